"""Pruning of outer gradients (DiLoCo, arXiv 2311.08105, section on communication efficiency).

A row is what feeds one output: the last dim of a tensor; a vector is one row, a scalar is never pruned. Both readings of the paper zero exactly
floor(fraction · row length) entries of each row.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def by_magnitude(delta: Tensor, fraction: float) -> Tensor:
    """Zero the smallest entries of each row.

    >>> import torch
    >>> by_magnitude(torch.tensor([[1.0, -2.0, 3.0, -4.0]]), 0.5)
    tensor([[ 0.,  0.,  3., -4.]])
    """
    return _zero_lowest(delta, delta.abs(), fraction)


def by_sign(delta: Tensor, fraction: float) -> Tensor:
    """Elect the sign of each row by its sum; zero first what is against it, then the smallest.

    >>> import torch
    >>> by_sign(torch.tensor([[1.0, -2.0, 3.0, -1.5]]), 0.5)
    tensor([[1., 0., 3., 0.]])
    """
    if delta.dim() == 0:
        return delta
    magnitude = delta.abs()
    agrees = delta * delta.sum(-1, keepdim=True) >= 0
    return _zero_lowest(delta, magnitude + agrees * (magnitude.amax() + 1), fraction)


def _zero_lowest(delta: Tensor, score: Tensor, fraction: float) -> Tensor:
    if delta.dim() == 0 or not delta.numel():
        return delta
    num_pruned = int(fraction * delta.shape[-1])
    lowest = score.argsort(dim=-1, stable=True)[..., :num_pruned]
    return delta.scatter(-1, lowest, 0.0)


PRUNE_RULES: dict[str, Callable[[Tensor, float], Tensor]] = {"magnitude": by_magnitude, "sign": by_sign}
