"""Pruning of outer gradients (DiLoCo, arXiv 2311.08105, section on communication efficiency).

A row is what feeds one output: the last dim of a tensor; a vector is one row, a scalar is never pruned. Both readings
of the paper zero exactly floor(fraction · row length) entries of each row.
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
    return delta if delta.dim() == 0 else _zero_first(delta, _smallest_first(delta), fraction)


def by_sign(delta: Tensor, fraction: float) -> Tensor:
    """Elect the sign of each row by its sum; zero first what is against it, then the smallest.

    >>> import torch
    >>> by_sign(torch.tensor([[1.0, -2.0, 3.0, -1.5]]), 0.5)
    tensor([[1., 0., 3., 0.]])
    """
    if delta.dim() == 0:
        return delta
    smallest = _smallest_first(delta)
    agrees = delta.sign() * delta.sum(-1, keepdim=True).sign() >= 0
    against_first = agrees.gather(-1, smallest).int().argsort(dim=-1, stable=True)
    return _zero_first(delta, smallest.gather(-1, against_first), fraction)


def _smallest_first(delta: Tensor) -> Tensor:
    return delta.abs().argsort(dim=-1, stable=True)


def _zero_first(delta: Tensor, order: Tensor, fraction: float) -> Tensor:
    """Zero the first floor(fraction · row length) of each row in `order`; 0.57 of 100 is 57, not floats' 56."""
    num_pruned = int(fraction * delta.shape[-1] + 1e-9)
    return delta.scatter(-1, order[..., :num_pruned], 0.0)


PRUNE_RULES: dict[str, Callable[[Tensor, float], Tensor]] = {"magnitude": by_magnitude, "sign": by_sign}
