"""How a worker process holds freed memory."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # names of malloc.h
_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Have the C library keep freed tensors of up to 1 GiB for the next, instead of giving their pages back.

    A page that comes back has to be cleared and mapped again; a round makes its buckets anew and takes a fifth longer.
    For a process of our own, once, before it makes tensors. Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
