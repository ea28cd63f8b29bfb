"""Rank and round length that follow the effective rank of the pseudo-gradient (DiLoCoX, arXiv 2506.21263).

    r_t = mean effective rank over the last c rounds ;  α = r_t / r_1 ;  rank = α·r_1 ;  H = α·H_1

Fewer directions are fewer bytes, so replicas can afford to meet more often. A round t is decided by what rounds up to
t − 2 were like: they have landed when it begins, also where rounds land one round late. All replicas compute a decision
from the same numbers, which the ballots of the contributors held, so that nothing has to be agreed; and as those
numbers are in the log, every decision can be computed again from it.

Ours, where the paper is silent: the effective rank is that of the raw pseudo-gradient, measured at r_1 whatever the
rank is now (measured inside the subspace in use it could only fall, down to 1 in the end); one α for all matrices; a
floor; falls of α are bounded; α grows where error feedback is left with more than the effective rank is meant to leave.

>>> controller = Controller(first_rank=8, first_inner_steps=100, window=2)
>>> history = [Observation(effective_rank=4, sync_s=20, step_s=1, residual_share=0.01)] * 5
>>> [(decision.rank, decision.inner_steps) for decision in controller.replay(history)]
[(8, 100), (8, 100), (8, 100), (7, 80), (6, 64), (5, 52), (4, 50)]
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.errors import ConfigError

_FORMAT = struct.Struct("<4d")
_OVERSAMPLES = 8  # directions beyond the rank that are probed: the last of those asked for come out right
_SHORTEST_S = 1e-9  # a step that took no time by the clock took this long
_ROUNDING = 1e-9  # a product that is whole but for this is whole


@dataclass(frozen=True)
class Observation:
    """What a round was like for one replica, or for all (`pooled`).

    effective_rank: of its raw pseudo-gradient, see `probe`; from 0 to r_1. sync_s: seconds from when all had launched
    until the mean was there. Waiting for those who launch late does not count: longer rounds would make that longer,
    and that the rounds. step_s: of one inner step. residual_share: energy of what error feedback owes afterwards, as a
    share of what was to be sent (pseudo-gradient plus what was owed before); 0 without feedback.

    >>> Observation.unpack(Observation(12.5, 3.0, 0.25, 0.02).pack())
    Observation(effective_rank=12.5, sync_s=3.0, step_s=0.25, residual_share=0.02)
    """

    effective_rank: float
    sync_s: float
    step_s: float
    residual_share: float

    def pack(self) -> bytes:
        """As 32 bytes."""
        return _FORMAT.pack(self.effective_rank, self.sync_s, self.step_s, self.residual_share)

    @classmethod
    def unpack(cls, packed: bytes) -> Observation:
        """From 32 bytes."""
        return cls(*_FORMAT.unpack(packed))


def pooled(observations: Sequence[Observation], weights: Sequence[float]) -> Observation:
    """The round as all saw it: weighted means of ranks and shares, the longest times, of those who contributed.

    >>> slow, fast = Observation(10, 4, 2, 0.5), Observation(20, 6, 1, 0.0)
    >>> pooled([slow, fast, Observation(99, 99, 99, 1)], [1, 1, 0])
    Observation(effective_rank=15.0, sync_s=6, step_s=2, residual_share=0.25)
    """
    counted = [(seen, weight) for seen, weight in zip(observations, weights, strict=True) if weight > 0]
    assert counted, "a round that nobody contributed to was like nothing"
    total = math.fsum(weight for _, weight in counted)
    return Observation(
        effective_rank=math.fsum(weight * seen.effective_rank for seen, weight in counted) / total,
        sync_s=max(seen.sync_s for seen, _ in counted),
        step_s=max(seen.step_s for seen, _ in counted),
        residual_share=math.fsum(weight * seen.residual_share for seen, weight in counted) / total,
    )


@dataclass(frozen=True)
class Decision:
    """What a round does. alpha: the share of the first rank and the first round length that led to it."""

    rank: int
    inner_steps: int
    alpha: float = 1.0


@dataclass(frozen=True)
class Controller:
    """Decides rank and inner steps of each round.

    first_rank, first_inner_steps: r_1 and H_1, which the first rounds have and none exceeds, save for a longer sync.
    window: rounds that the effective rank is averaged over (c). floor: the least α. max_fall: share that α falls by at
    most from round to round. energy: share of the energy that the effective rank holds; 1 − energy is what may be owed.
    headroom: a round takes at least this many times as long as its sync, so that the sync stays hidden behind it.
    multiple_of, least_inner_steps: round lengths that the schedule bears (fragments divide it, delays fit into it).
    """

    first_rank: int
    first_inner_steps: int
    window: int = 5
    floor: float = 0.25
    max_fall: float = 0.2
    energy: float = 0.95
    headroom: float = 1.1
    multiple_of: int = 1
    least_inner_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("first_rank", "first_inner_steps", "window", "multiple_of", "least_inner_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not positive; it counts. Use {name}=1 or more.")
        _check_share("floor", self.floor, 0 < self.floor <= 1, "above 0 and at most 1", 0.25)
        _check_share("max_fall", self.max_fall, 0 <= self.max_fall < 1, "from 0 and below 1", 0.2)
        _check_energy(self.energy)
        _check_share("headroom", self.headroom, self.headroom >= 1, "1 or more", 1.1)

    @property
    def first(self) -> Decision:
        """Of the first two rounds, of which nothing is known when they begin."""
        return Decision(self.first_rank, self._steps_of(1.0, least=1))

    def decide(self, history: Sequence[Observation | None]) -> Decision:
        """Of round t, from rounds 1 to t − 2. Pure: the same history leads to the same decision on every machine."""
        return self.replay(history)[-1]

    def replay(self, history: Sequence[Observation | None]) -> list[Decision]:
        """Of rounds 1, 2, 3, ... up to the second after those of `history`; None: a round that nobody counted in."""
        decisions = [self.first, self.first]
        course = Course(self.first)
        for seen in history:
            course = course.after(seen, self)
            decisions.append(course.decision)
        return decisions

    def following(self, decision: Decision, recent: Sequence[Observation]) -> Decision:
        """The decision after `decision`, given the last rounds, up to `window`: all that `decide` remembers."""
        alpha = self._alpha(decision.alpha, recent) if len(recent) == self.window else decision.alpha
        return Decision(_ceil(alpha * self.first_rank), self._steps_of(alpha, least=self._hiding(recent)), alpha)

    def _alpha(self, before: float, recent: Sequence[Observation]) -> float:
        wanted = math.fsum(seen.effective_rank for seen in recent) / len(recent) / self.first_rank
        if recent[-1].residual_share > 1 - self.energy:
            wanted = max(wanted, before / (1 - self.max_fall))
        return min(1.0, max(wanted, before * (1 - self.max_fall), self.floor))

    def _hiding(self, recent: Sequence[Observation]) -> int:
        """Steps that hide a sync. Of several rounds the median: a lone stall does not stretch a round."""
        steps = sorted(seen.sync_s / max(seen.step_s, _SHORTEST_S) for seen in recent)
        return _ceil(self.headroom * steps[len(steps) // 2])

    def _steps_of(self, alpha: float, *, least: int) -> int:
        steps = max(_ceil(alpha * self.first_inner_steps), least, self.least_inner_steps)
        return -(-steps // self.multiple_of) * self.multiple_of


@dataclass(frozen=True)
class Course:
    """All that has to be remembered from round to round. recent: the last that counted, up to the window.

    >>> controller, seen = Controller(8, 100, window=1), Observation(4, 20, 1, 0.0)
    >>> Course(controller.first).after(seen, controller).decision
    Decision(rank=7, inner_steps=80, alpha=0.8)
    """

    decision: Decision
    recent: tuple[Observation, ...] = ()

    def after(self, seen: Observation | None, controller: Controller) -> Course:
        """With the decision of the next round, now that one more is known; None: nobody counted in that one."""
        recent = self.recent if seen is None else (*self.recent, seen)[-controller.window :]
        return Course(controller.following(self.decision, recent) if recent else self.decision, recent)


@dataclass(frozen=True)
class Probe:
    """What a probe of matrices found. effective_rank: their mean, by energy, of up to the probed rank."""

    effective_rank: float
    energy: float


def probe(matrices: Iterable[Tensor], *, rank: int, energy: float = 0.95, seed: int = 0) -> Probe:
    """The effective rank of raw pseudo-gradients (n, m) probed at `rank`, one number for all of them.

    Each matrix counts by its energy (sum of squares), with its effective rank as a share of the directions probed;
    a matrix that is smaller than `rank` is probed at its smaller side. Without any energy the rank is `rank`: a round
    without progress is no reason to send less.

    >>> flat, thin = torch.eye(4), torch.ones(8, 8) / 4
    >>> [probe(chosen, rank=4).effective_rank for chosen in ([flat], [thin], [flat, thin])]
    [4.0, 1.0, 2.5]
    """
    return merge_probes([_probe_one(matrix, rank, energy, seed) for matrix in matrices], rank=rank)


def merge_probes(probes: Sequence[Probe], *, rank: int) -> Probe:
    """One probe of several, each of other matrices or other parts of them (shards, pipeline stages)."""
    total = math.fsum(found.energy for found in probes)
    if not total > 0:
        return Probe(float(rank), 0.0)
    return Probe(math.fsum(found.energy * found.effective_rank for found in probes) / total, total)


def _probe_one(matrix: Tensor, rank: int, energy: float, seed: int) -> Probe:
    total = energy_of([matrix])
    if not total > 0:
        return Probe(0.0, 0.0)
    probed = min(rank, *matrix.shape)
    return Probe(rank * effective_rank(matrix, rank=probed, energy=energy, seed=seed) / probed, total)


def effective_rank(matrix: Tensor, *, rank: int, energy: float = 0.95, seed: int = 0) -> int:
    """How many singular values hold `energy` of the energy of `matrix` (n, m): 0 to `rank`, which stands for more.

    The leading singular values are found by a randomized range finder with a turn of power iteration (Halko et al.,
    arXiv 0909.4061), from `seed`: they come out slightly too small, never too large. Four products with the matrix.

    >>> effective_rank(torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.1])), rank=3, energy=0.9)
    2
    """
    _check_energy(energy)
    size = matrix.abs().amax().item() if matrix.numel() else 0.0
    if size == 0:
        return 0
    scaled = matrix.detach().to(torch.float32) / size  # squares of numbers near 1 neither vanish nor overflow
    held = _leading_energies(scaled, min(rank + _OVERSAMPLES, *matrix.shape), seed).cumsum(0)
    return min(rank, int((held < energy * energy_of([scaled])).sum()) + 1)


def energy_of(tensors: Iterable[Tensor]) -> float:
    """The sum of squares of all elements."""
    return math.fsum(float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32)) ** 2 for tensor in tensors)


def _leading_energies(matrix: Tensor, count: int, seed: int) -> Tensor:
    """(count,) fp64, falling: squares of the largest singular values of `matrix`."""
    generator = torch.Generator(matrix.device).manual_seed(seed)
    start = torch.randn(matrix.shape[1], count, generator=generator, device=matrix.device)
    found = torch.linalg.qr(matrix @ start).Q
    found = torch.linalg.qr(matrix.T @ found).Q
    found = torch.linalg.qr(matrix @ found).Q
    core = (found.T @ matrix).to(torch.float64)
    return torch.linalg.eigvalsh(core @ core.T).flip(0).clamp_(min=0)


def _ceil(value: float) -> int:
    return math.ceil(value - _ROUNDING)


def _check_energy(energy: float) -> None:
    _check_share("energy", energy, 0 < energy < 1, "between 0 and 1, 0.95 to 0.99 as a rule", 0.95)


def _check_share(name: str, value: float, holds: bool, rule: str, remedy: float) -> None:
    if not holds:
        raise ConfigError(f"{name}={value!r} cannot be used: it is {rule}. Use {name}={remedy}.")
