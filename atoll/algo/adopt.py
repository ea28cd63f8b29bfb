"""Adopt rules: what a replica's parameters become when a round lands.

A rule is a pure, elementwise function of a `Landing`. Law: one replica with a unit outer step and full `carry` trains
as if no outer loop were there, for any schedule and delay.

    replace            θ                             DiLoCo; under delay "reset"
    lerp(alpha)        α·parameters + (1−α)·θ        Streaming DiLoCo (arXiv 2501.18512): α=0 is purely the anchor
    carry(share)       θ + share·(progress that θ does not hold yet)
    eager              θ moved by this replica's own share of the mean that is still to come (arXiv 2502.12996)

"Progress" is parameters minus where they started: the negative of a pseudo-gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Landing:
    """What a replica knows when a round lands. All tensors fp32 and of one shape.

    anchor: θ after the outer step. params: the replica's parameters now. unsent: progress that no launch has taken.
    flying: progress launched and not landed yet. num_contributors: replicas in the mean that landed. gain: how far θ
    moves for a unit of mean progress.
    """

    anchor: Tensor
    params: Tensor
    unsent: Tensor
    flying: Tensor
    num_contributors: int
    gain: float


@dataclass(frozen=True)
class AdoptRule:
    """`adopt(landing)` gives the new parameters.

    keeps_unsent: progress no launch has taken is owed to the next; otherwise the next measures from the anchor.
    needs_progress: the rule reads more than the anchor.
    """

    adopt: Callable[[Landing], Tensor]
    keeps_unsent: bool
    needs_progress: bool


def replace() -> AdoptRule:
    """Parameters become the anchor."""
    return AdoptRule(lambda landing: landing.anchor, keeps_unsent=False, needs_progress=False)


def lerp(alpha: float) -> AdoptRule:
    """Parameters become α·parameters + (1−α)·anchor: α=0 is purely the anchor, α=1 purely local."""

    def adopt(landing: Landing) -> Tensor:
        return landing.params * alpha + landing.anchor * (1 - alpha)

    return AdoptRule(adopt, keeps_unsent=False, needs_progress=True)


def carry(share: float) -> AdoptRule:
    """Parameters become the anchor plus a share of the progress that the anchor does not hold yet."""

    def adopt(landing: Landing) -> Tensor:
        return landing.anchor + share * (landing.unsent + landing.flying)

    return AdoptRule(adopt, keeps_unsent=True, needs_progress=True)


def eager() -> AdoptRule:
    """A replica steps ahead of the mean by its own part of it, gain/M of its progress.

    The paper lets every replica step a θᵢ of its own: θᵢ ← Outer(θᵢ, Δ̄ₜ₋₁ + (Δᵢ,ₜ − Δᵢ,ₜ₋₁)/M). What that adds to
    the mean telescopes: after t rounds only Δᵢ,ₜ/M is left, on top of the shared θ. With SGD this is the same; with
    momentum the paper's θᵢ also keeps the momentum of its own older parts, which here is θ's alone.
    """

    def adopt(landing: Landing) -> Tensor:
        return landing.anchor + (landing.gain / landing.num_contributors) * (landing.unsent + landing.flying)

    return AdoptRule(adopt, keeps_unsent=True, needs_progress=True)


# name -> (alpha, share) -> rule; one line adds one
ADOPT_RULES: dict[str, Callable[[float, float], AdoptRule]] = {
    "replace": lambda alpha, share: replace(),
    "lerp": lambda alpha, share: lerp(alpha),
    "carry": lambda alpha, share: carry(share),
    "eager": lambda alpha, share: eager(),
}
