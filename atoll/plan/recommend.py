"""Which method to take, which it beat and why, and the settings that run it.

Candidates are schedules times compressors. They are compared by *useful* tokens a second: the rate, less what their
expected loss costs in compute. By the scaling law (arXiv 2503.09799) loss falls as C^−0.049 with compute C at 20 tokens
a parameter, so 1 % of loss is worth 20 % of the compute: a method that is twice as fast may lose up to 3.5 %.

The costs in loss below are assumptions, for want of a law that covers all methods; the planner prints them as such.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.algo.schedule import Schedule
from atoll.plan import scaling
from atoll.plan.estimate import Estimate, Method, Workload, estimate, no_later_than_needed
from atoll.plan.links import Network
from atoll.plan.payload import Coding
from atoll.plan.units import format_seconds

LOSS_EXPONENT = 0.0985 / 2  # loss ~ N^−0.0985, compute ~ N² at 20 tokens a parameter

# Assumed cost in loss, relative, over blocking DiLoCo in fp32.
CODING_COST = {
    "identity": 0.0,
    "bf16": 0.0003,
    "fp16": 0.0002,
    "int8": 0.0005,  # no loss is seen down to 4 bits; never quite 0, so that of two as fast the plainer is taken
    "int4": 0.001,
    "fp4": 0.001,
    "stat2": 0.005,
    "lowrank": 0.008,
    "lowrank+int4": 0.01,
    "topk": 0.01,
    "topk+stat2": 0.01,
}
UNKNOWN_CODING_COST = 0.01
STREAMING_COST, STREAMING_COST_A_STEP = 0.001, 0.0005  # nothing up to a delay of 5 (arXiv 2501.18512)
DELAYED_COST = 0.026  # a whole round late, and as much less as the delay is shorter (docs/results.md)
COST_A_DECADE_OF_H = 0.008  # H = 1000 is 2.9 % in perplexity behind H = 50 (arXiv 2311.08105), near ln 15 in loss
H_WITHOUT_COST = 30

CODINGS = ("identity", "fp16", "int8", "int4", "fp4", "lowrank+int4", "topk+stat2")
STREAMING_DELAYS = (1, 2, 3, 5)
INNER_STEPS_TRIED = (30, 60, 100, 200, 500)
LAYERS_A_FRAGMENT = 3

# Settings of a base that belong to the method it was for.
OUTER_SETTINGS = ("outer_optimizer", "outer_lr", "outer_momentum")
OF_THE_METHOD = frozenset(
    {
        *("method", "inner_steps", "schedule", "delay", "fragments", "first_round", "adopt", "alpha", "carry_share"),
        *("compressor", "rank", "error_feedback", *OUTER_SETTINGS),
    }
)

HEADLINES = ("allreduce", "diloco", "streaming", "delayed", "dilocox")


@dataclass(frozen=True)
class Candidate:
    """One method, its estimate, and what it is assumed to cost in loss (relative, over data parallelism)."""

    estimate: Estimate
    loss_cost: float

    @property
    def method(self) -> Method:
        return self.estimate.method

    @property
    def useful_tokens_per_s(self) -> float:
        return self.estimate.tokens_per_s * (1 + self.loss_cost) ** (-1 / LOSS_EXPONENT)


@dataclass(frozen=True)
class Recommendation:
    """The method to take, and the best of two other kinds with why each is worse."""

    best: Candidate
    beaten: tuple[tuple[Candidate, str], ...]

    @property
    def why(self) -> str:
        best = self.best.estimate
        hidden = "no wait is seen" if best.exposed_s < 0.01 * best.compute_s else f"waits {_waits(best)}"
        return f"{100 * best.utilisation:.1f} % of the time is computed: {hidden}"


def headline_methods(
    workload: Workload, *, inner_steps: int, coding: Coding, fragments: int = 0, delay: int = 0
) -> dict[str, Method]:
    """The methods that are always shown, by name: data parallelism, DiLoCo, streaming, one-round delay, DiLoCoX.

    coding: of streaming and DiLoCoX; the others send fp32. Streaming is left out where no number of fragments fits H.
    """
    count = fragments or fitting_fragments(workload.shape.num_layers, inner_steps)
    methods = {
        "allreduce": Method("allreduce", None),
        "diloco": Method("diloco", Schedule(inner_steps)),
        "delayed": Method("delayed", Schedule(inner_steps, delay=inner_steps)),
        "dilocox": Method("dilocox", Schedule(inner_steps, delay=inner_steps), coding),
    }
    if count > 1:
        streaming = Schedule(inner_steps, count, min(delay or 1, inner_steps))
        plain = Coding("fp4") if coding.low_rank or "topk" in coding.name else coding
        methods["streaming"] = Method("streaming", streaming, plain)
    return {name: methods[name] for name in HEADLINES if name in methods}


def fitting_fragments(num_layers: int, inner_steps: int) -> int:
    """The number of fragments nearest to three layers each that divides H; 1 if none does.

    >>> fitting_fragments(80, 125), fitting_fragments(24, 100), fitting_fragments(24, 101)
    (25, 10, 1)
    """
    wanted = max(2, num_layers / LAYERS_A_FRAGMENT)
    divisors = [count for count in range(2, min(num_layers, inner_steps) + 1) if inner_steps % count == 0]
    return min(divisors, key=lambda count: abs(math.log(count / wanted)), default=1)


def candidate_methods(workload: Workload, *, inner_steps: Sequence[int], rank: int, fragments: int = 0) -> list[Method]:
    """Data parallelism, and every schedule with every compressor for each H, plainest first."""
    methods = [Method("allreduce", None, Coding(name)) for name in ("identity", "fp16")]
    for steps in inner_steps:
        schedules = {"diloco": [Schedule(steps)], "delayed": [Schedule(steps, delay=steps)]}
        count = fragments or fitting_fragments(workload.shape.num_layers, steps)
        if count > 1:
            delays = [delay for delay in STREAMING_DELAYS if delay <= steps]
            schedules["streaming"] = [Schedule(steps, count, delay) for delay in delays]
        codings = [Coding(name, rank if "lowrank" in name else 0) for name in CODINGS]
        methods += [
            Method(name, schedule, coding)
            for name, options in schedules.items()
            for schedule in options
            for coding in codings
            if "topk" not in coding.name or name == "diloco"  # its outer step has no momentum; untried with others
        ]
    return methods


def loss_cost(method: Method, num_islands: int) -> float:
    """What `method` is assumed to cost in loss, relative to data parallelism with the same tokens.

    >>> [round(loss_cost(Method("diloco", Schedule(steps)), 1), 6) for steps in (30, 300)]
    [0.0, 0.008]
    """
    cost = CODING_COST.get(method.coding.name, UNKNOWN_CODING_COST)
    if method.schedule is None:
        return cost
    cost += COST_A_DECADE_OF_H * math.log10(max(method.inner_steps, H_WITHOUT_COST) / H_WITHOUT_COST)
    if method.kind == "streaming":
        cost += STREAMING_COST + STREAMING_COST_A_STEP * method.delay
    if method.kind == "delayed":
        cost += DELAYED_COST * method.delay / method.inner_steps
    return float(cost + num_islands**0.0116 - 1)


def recommend(methods: Sequence[Method], workload: Workload, network: Network) -> Recommendation:
    """The method with the most useful tokens a second, and the best of the two next kinds of schedule.

    Rounds that land late are taken as late as hides their sync, and no later.
    """
    trimmed = [no_later_than_needed(method, workload, network) for method in methods]
    candidates = [
        Candidate(estimate(method, workload, network), loss_cost(method, network.num_islands)) for method in trimmed
    ]
    candidates.sort(key=lambda candidate: -candidate.useful_tokens_per_s)
    best = candidates[0]
    rivals: dict[str, Candidate] = {}
    for candidate in candidates:
        if candidate.method.kind != best.method.kind:
            rivals.setdefault(candidate.method.kind, candidate)
    beaten = tuple((rival, _why_worse(rival, best)) for rival in list(rivals.values())[:2])
    return Recommendation(best, beaten)


def settings_of(method: Method, network: Network, base: dict[str, Any]) -> dict[str, Any]:
    """Settings for `atoll train` that run `method`: those of `base` with what the method asks for.

    Outer settings: for a delay 0.6 / 0.4 and `carry` of 1/M, for streaming the paper's 0.4, for top-k plain averaging;
    otherwise those of `base`, or the scaling law's rate for M.
    """
    islands = network.num_islands
    kept = {name: value for name, value in base.items() if name not in OF_THE_METHOD}
    settings: dict[str, Any] = {**kept, "replicas": islands, "compressor": method.coding.name}
    if method.schedule is None:
        return settings | {"method": "data-parallel"}
    settings |= {"method": "diloco", "inner_steps": method.inner_steps, "schedule": method.kind}
    if method.coding.rank:
        settings["rank"] = method.coding.rank
    if method.coding.owes:
        settings["error_feedback"] = True
    return settings | _outer_settings(method, islands, base)


def default_rank(hidden_size: int) -> int:
    """An eighth of the width: square matrices shrink fourfold."""
    return max(1, hidden_size // 8)


def _outer_settings(method: Method, islands: int, base: dict[str, Any]) -> dict[str, Any]:
    if method.kind == "streaming":
        streaming = {"fragments": method.num_fragments, "delay": method.delay, "adopt": "lerp", "alpha": 0.5}
        return {**streaming, "outer_lr": 0.4, "outer_momentum": 0.9}
    if method.kind == "delayed":
        late = {"delay": method.delay} if method.delay < method.inner_steps else {}
        carry = {"adopt": "carry", "carry_share": round(1 / islands, 4)}
        return {**late, **carry, "outer_lr": 0.6, "outer_momentum": 0.4}
    if "topk" in method.coding.name:
        return {"outer_optimizer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0}
    if "outer_lr" in base:
        return {name: base[name] for name in OUTER_SETTINGS if name in base}
    return {"outer_lr": scaling.best_outer_lr(islands), "outer_momentum": 0.9}


def _why_worse(rival: Candidate, best: Candidate) -> str:
    """In half a line: slower, and by what wait; or as fast, and at what cost in loss."""
    rate = rival.estimate.tokens_per_s / best.estimate.tokens_per_s
    extra_loss = 100 * (rival.loss_cost - best.loss_cost)
    if rate < 0.995:
        return f"{100 * rate:.3g} % of its rate: waits {_waits(rival.estimate)}"
    if rate < 1.005 and extra_loss < 0.05:
        return "as fast, so nothing is gained by it"
    speed = "as fast" if rate < 1.005 else f"{rate:.3g}x as fast"
    worth = 1 - ((1 + rival.loss_cost) / (1 + best.loss_cost)) ** (-1 / LOSS_EXPONENT)
    return f"{speed}, but about {extra_loss:.1f} % more loss (assumed), worth {100 * worth:.0f} % of the compute"


def _waits(estimate: Estimate) -> str:
    per = "step" if estimate.method.schedule is None else "round"
    return f"{format_seconds(estimate.exposed_s)} a {per} of {format_seconds(estimate.round_s)}"
