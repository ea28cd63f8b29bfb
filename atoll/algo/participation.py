"""Who trains in a round and whose contribution is lost.

The experiments of DiLoCo (arXiv 2311.08105) on replica counts and dropped outer gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

# name -> (most replicas M, round from 1, number of rounds) -> replicas that train in that round
REPLICA_SCHEDULES: dict[str, Callable[[int, int, int], int]] = {
    "constant": lambda most, round, rounds: most,
    "doubling": lambda most, round, rounds: most if round > rounds / 2 else max(1, most // 2),
    "halving": lambda most, round, rounds: max(1, most // 2) if round > rounds / 2 else most,
    "ramp-up": lambda most, round, rounds: math.ceil(most * min(round, rounds) / rounds),
    "ramp-down": lambda most, round, rounds: math.ceil(most * max(rounds - round + 1, 1) / rounds),
}


def active_replicas(kind: str, *, replicas: int, round: int, num_rounds: int) -> int:
    """How many replicas train in `round`; they are the first so many.

    >>> [active_replicas("ramp-up", replicas=4, round=r, num_rounds=8) for r in range(1, 9)]
    [1, 1, 2, 2, 3, 3, 4, 4]
    """
    return REPLICA_SCHEDULES[kind](replicas, round, max(num_rounds, 1))


def is_dropped(replica: int, *, round: int, replicas: int, probability: float, seed: int) -> bool:
    """Whether the contribution of `replica` to `round` is lost; the same answer on every replica.

    >>> sum(is_dropped(0, round=r, replicas=2, probability=0.5, seed=0) for r in range(1000))
    494
    """
    if probability == 0:
        return False
    draws = torch.rand(replicas, generator=torch.Generator().manual_seed(seed * 1_000_003 + round))
    return bool(draws[replica] < probability)
