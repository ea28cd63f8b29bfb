"""Scaling laws of DiLoCo (arXiv 2503.09799): what loss to expect, and which rates and batch are best.

Fitted on C4 with AdamW inside, H = 30, D = 20·N tokens. Elsewhere they are extrapolations: `outside` says so.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKENS_A_PARAMETER = 20
LAW_SEQUENCE_LENGTH = 2048
MAX_PARAMETERS, MAX_ISLANDS, INNER_STEPS = 10e9, 8, 30
MIN_PARAMETERS = 35e6  # the smallest model they were fitted on
VALID = "C4, AdamW, H = 30, M ≤ 8, 35 M ≤ N ≤ 10 B, 20 tokens a parameter"

OUTER_LR = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}


@dataclass(frozen=True)
class Law:
    """Best settings for a size and a number of islands. num_islands 0: data parallel.

    batch_tokens: over all islands a step.
    """

    num_parameters: float
    num_islands: int
    loss: float
    better_loss: float | None
    inner_lr: float
    batch_tokens: float
    outer_lr: float | None


def diloco_law(num_parameters: float, num_islands: int) -> Law:
    """DiLoCo with M islands, M = 1 included.

    >>> law = diloco_law(1e9, 2)
    >>> round(law.loss, 3), round(law.inner_lr * 1e4, 2), law.outer_lr
    (2.517, 3.1, 0.6)
    """
    n, m = num_parameters, num_islands
    return Law(
        *(n, m),
        loss=diloco_loss(n, m),
        better_loss=better_loss(n, m),
        inner_lr=22256 * n**-0.8827 * m**0.2929,
        batch_tokens=0.00709 * n**0.4695 * m**0.3399 * LAW_SEQUENCE_LENGTH,
        outer_lr=best_outer_lr(m),
    )


def data_parallel_law(num_parameters: float) -> Law:
    """Synchronous data parallelism."""
    n = num_parameters
    return Law(
        *(n, 0),
        loss=data_parallel_loss(n),
        better_loss=None,
        inner_lr=16319.2 * n**-0.819,
        batch_tokens=0.22592 * n**0.281 * LAW_SEQUENCE_LENGTH,
        outer_lr=None,
    )


def diloco_loss(num_parameters: float, num_islands: int) -> float:
    """Held-out loss on C4 in nats a token: 19.226·N^−0.0985·M^0.0116."""
    return 19.226 * num_parameters**-0.0985 * num_islands**0.0116


def data_parallel_loss(num_parameters: float) -> float:
    """18.129·N^−0.0953."""
    return 18.129 * num_parameters**-0.0953


def better_loss(num_parameters: float, num_islands: int) -> float:
    """A form with a floor that fits the published losses better (0.6 % off at 4 B and 10 B; our fit, not the paper's):
    37.961·N^(−0.15776 + 0.000264·M) + 1.0515."""
    return 37.961 * num_parameters ** (-0.15776 + 0.000264 * num_islands) + 1.0515


def best_outer_lr(num_islands: int) -> float:
    """η for Nesterov 0.9, that of the nearest M the paper tuned; independent of N.

    >>> [best_outer_lr(m) for m in (1, 2, 3, 4, 8, 64)]
    [0.4, 0.6, 0.6, 0.6, 0.8, 0.8]
    """
    return OUTER_LR[min(OUTER_LR, key=lambda known: abs(known - num_islands))]


def outside(num_parameters: float, num_islands: int, inner_steps: int) -> list[str]:
    """What of a plan lies outside of the laws' range, each with the nearest value inside; empty if nothing does.

    >>> outside(1e9, 4, 30)
    []
    >>> outside(107e9, 2, 30)
    ['107 B parameters are beyond the 10 B the laws were tested on']
    """
    found = []
    if num_parameters > MAX_PARAMETERS:
        found.append(f"{num_parameters / 1e9:.3g} B parameters are beyond the 10 B the laws were tested on")
    if num_parameters < MIN_PARAMETERS:
        found.append(f"{num_parameters / 1e6:.3g} M parameters are below the 35 M the laws begin at")
    if num_islands > MAX_ISLANDS:
        found.append(f"{num_islands} islands are more than the {MAX_ISLANDS} of the laws")
    if inner_steps > 4 * INNER_STEPS or inner_steps * 4 < INNER_STEPS:
        larger = "; a larger H wants a larger outer rate" * (inner_steps > INNER_STEPS)
        found.append(f"H = {inner_steps} is far from the {INNER_STEPS} of the laws{larger}")
    return found
