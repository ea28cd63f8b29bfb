"""The inner learning rate: a function of the global inner step alone, so that a late joiner has everyone's rate."""

from __future__ import annotations

import math


def inner_lr(
    step: int,
    *,
    learning_rate: float,
    warmup_steps: int,
    max_steps: int,
    decay: str = "cosine",
    min_ratio: float = 0.0,
    restart_step: int = 0,
) -> float:
    """Rate of inner step `step` (from 1): linear warm-up, then a half cosine down to `min_ratio` or constant.

    restart_step: the step after which DiLoCo begins from a pretrained model; the warm-up runs again there (arXiv
    2311.08105), while the decay goes on.

    >>> [inner_lr(s, learning_rate=1.0, warmup_steps=2, max_steps=10, decay="constant") for s in (1, 2, 3)]
    [0.5, 1.0, 1.0]
    """
    since = step - restart_step if step > restart_step else step
    warmth = min(1.0, since / warmup_steps) if warmup_steps else 1.0
    if decay == "constant":
        return learning_rate * warmth
    progress = min(max(step - warmup_steps, 0) / max(max_steps - warmup_steps, 1), 1.0)
    return learning_rate * warmth * (min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))
