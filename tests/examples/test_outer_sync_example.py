from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "outer_sync.py"


def run_example(*launcher: str) -> str:
    finished = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", output)]


def test_it_runs_alone() -> None:
    output = run_example()
    assert len(losses(output)) == 4 and losses(output)[-1] < losses(output)[0]
    assert re.search(r"\nreplica 0 of 1: 5 rounds, anchor [0-9a-f]{32}\n$", output)


@pytest.mark.slow
def test_two_processes_under_torchrun_end_with_one_anchor() -> None:
    output = run_example("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ends = re.findall(r"replica (\d) of 2: 5 rounds, anchor ([0-9a-f]{32})", output)
    assert sorted(replica for replica, _ in ends) == ["0", "1"]
    assert len({anchor for _, anchor in ends}) == 1
