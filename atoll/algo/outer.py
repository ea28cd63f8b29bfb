"""Outer optimizers: how the anchor follows the mean pseudo-gradient (DiLoCo, arXiv 2311.08105, Algorithm 1).

Each is a frozen description with `init` and `step_`. State is fp32 and lives outside, so that it can be kept per
fragment, saved, and sliced: all rules are elementwise, and a step over slices equals a step over the whole.

Two replicas that each move by −1 a round from 0, with the defaults of the paper (η 0.7, μ 0.9):

>>> anchor, optimizer = torch.zeros(1), Nesterov()
>>> state = optimizer.init(anchor)
>>> for count in range(1, 5):
...     optimizer.step_(anchor, torch.ones(1), state, lr=0.7, count=count)
...     print(round(anchor.item(), 5))
-1.33
-3.227
-5.6343
-8.50087
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]


class OuterOptimizer(Protocol):
    """What an outer optimizer offers. All tensors are flat fp32 slices of the same shape."""

    def init(self, anchor: Tensor) -> State:
        """Fresh state for `anchor`: fp32 tensors of its shape."""
        ...

    def step_(self, anchor: Tensor, delta: Tensor, state: State, *, lr: float, count: int) -> None:
        """Move `anchor` in place by the mean pseudo-gradient `delta` (anchor minus parameters); `delta` is used up.

        count: outer steps this fragment will have made after this one, from 1.
        """
        ...

    def gain(self, lr: float) -> float:
        """How far the anchor moves at once for a unit change of `delta`."""
        ...


@dataclass(frozen=True)
class Nesterov:
    """v ← μv + Δ ; θ ← θ − η(Δ + μv). The same arithmetic, in the same order, as torch.optim.SGD(nesterov=True)."""

    momentum: float = 0.9

    def init(self, anchor: Tensor) -> State:
        return {"momentum": torch.zeros_like(anchor)}

    def step_(self, anchor: Tensor, delta: Tensor, state: State, *, lr: float, count: int) -> None:
        velocity = state["momentum"]
        velocity.mul_(self.momentum).add_(delta)
        anchor.add_(delta.add_(velocity, alpha=self.momentum), alpha=-lr)

    def gain(self, lr: float) -> float:
        return lr * (1 + self.momentum)


@dataclass(frozen=True)
class Momentum:
    """v ← μv + Δ ; θ ← θ − ηv."""

    momentum: float = 0.9

    def init(self, anchor: Tensor) -> State:
        return {"momentum": torch.zeros_like(anchor)}

    def step_(self, anchor: Tensor, delta: Tensor, state: State, *, lr: float, count: int) -> None:
        velocity = state["momentum"]
        velocity.mul_(self.momentum).add_(delta)
        anchor.add_(velocity, alpha=-lr)

    def gain(self, lr: float) -> float:
        return lr


@dataclass(frozen=True)
class SGD:
    """θ ← θ − ηΔ. With η = 1 this is FedAvg, with one replica Lookahead."""

    def init(self, anchor: Tensor) -> State:
        return {}

    def step_(self, anchor: Tensor, delta: Tensor, state: State, *, lr: float, count: int) -> None:
        anchor.add_(delta, alpha=-lr)

    def gain(self, lr: float) -> float:
        return lr


@dataclass(frozen=True)
class Adam:
    """Adam on pseudo-gradients. The paper finds it unstable unless epsilon is about 0.1."""

    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 0.1

    def init(self, anchor: Tensor) -> State:
        return {"exp_avg": torch.zeros_like(anchor), "exp_avg_sq": torch.zeros_like(anchor)}

    def step_(self, anchor: Tensor, delta: Tensor, state: State, *, lr: float, count: int) -> None:
        first, second = state["exp_avg"], state["exp_avg_sq"]
        first.lerp_(delta, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(delta, delta, value=1 - self.beta2)
        denominator = second.sqrt().div_(math.sqrt(1 - self.beta2**count)).add_(self.epsilon)
        anchor.addcdiv_(first, denominator, value=-lr / (1 - self.beta1**count))

    def gain(self, lr: float) -> float:
        return lr / self.epsilon


# name -> (momentum, epsilon) -> optimizer; one line adds one
OUTER_OPTIMIZERS: dict[str, Callable[[float, float], OuterOptimizer]] = {
    "nesterov": lambda momentum, epsilon: Nesterov(momentum),
    "momentum": lambda momentum, epsilon: Momentum(momentum),
    "sgd": lambda momentum, epsilon: SGD(),
    "adam": lambda momentum, epsilon: Adam(beta1=momentum, epsilon=epsilon),
}


def cosine_lr(lr: float, *, step: int, total_steps: int) -> float:
    """Outer rate that falls from `lr` to 0 by a half cosine over `total_steps` inner steps.

    >>> [round(cosine_lr(0.7, step=s, total_steps=100), 3) for s in (0, 50, 100)]
    [0.7, 0.35, 0.0]
    """
    return lr * 0.5 * (1 + math.cos(math.pi * min(step, total_steps) / total_steps))
