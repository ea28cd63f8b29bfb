"""Randomness that depends on a seed alone and leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draws on the CPU and on `device` inside the block start from `seed`; afterwards the generators are as before.

    Other accelerators are left alone (`torch.manual_seed` would reseed every one of them).

    >>> before = torch.random.get_rng_state()
    >>> with seeded(7, torch.device("cpu")):
    ...     first = torch.rand(2)
    >>> with seeded(7, torch.device("cpu")):
    ...     second = torch.rand(2)
    >>> torch.equal(first, second), torch.equal(before, torch.random.get_rng_state())
    (True, True)
    """
    accelerators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=accelerators):
        torch.default_generator.manual_seed(seed)
        for accelerator in accelerators:
            torch.cuda.default_generators[accelerator.index].manual_seed(seed)
        yield
