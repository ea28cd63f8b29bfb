"""Whether freed memory is kept, seen from the pages that the kernel has to hand out."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from atoll.train.allocator import keep_freed_memory

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        tensors = [torch.zeros(1 << 21) for _ in range(10)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
new_pages()
print(new_pages())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_tensors_make_room_for_the_next_without_new_pages() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert int(run.stdout) < 100  # of 204,800
