"""Simulate a run: which model of it, against what it is measured, and what is worth a warning.

Two models of one history (`sim.world`, `sim.rounds`): in messages, with the coordinator's own state machine and links
that are shared by the byte, for some hundred islands; in whole rounds, vectorised, for any number. They agree within a
few per mille, by test.

>>> from atoll.algo.schedule import Schedule
>>> from atoll.plan.estimate import Method, Workload
>>> from atoll.plan.links import uniform
>>> from atoll.plan.shapes import ModelShape
>>> workload = Workload(ModelShape("llama", 64, 2, 1, 128, 1000), step_s=0.1, tokens_per_step=1024)
>>> scenario = Scenario(Method("diloco", Schedule(10)), workload, uniform(2, 1e6), num_rounds=5)
>>> found = simulate(scenario)
>>> found.outcome.model, found.outcome.rounds, round(found.outcome.round_s / found.estimate.round_s, 6)
('messages', 5, 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from atoll.errors import ConfigError, nearest
from atoll.plan.cost import smallest_inner_steps
from atoll.plan.estimate import Estimate, estimate
from atoll.plan.payload import check_coding
from atoll.plan.sim.faults import Fault, draw_faults
from atoll.plan.sim.outcome import Outcome, as_plain
from atoll.plan.sim.rounds import Rounds
from atoll.plan.sim.scenario import Scenario, check_churn
from atoll.plan.sim.tracks import PRESENT
from atoll.plan.sim.world import World
from atoll.plan.units import format_bandwidth, format_bytes, format_seconds

MESSAGES_UP_TO = 200  # islands
MOST_MESSAGES_S = 60.0  # of real time, as estimated, before whole rounds are taken instead
ISLAND_ROUND_S, MORE_AN_ISLAND_S = 3e-4, 4e-6  # of real time: of an island in a round, and more for each other island
MODELS = ("auto", "messages", "rounds")
WINDOW_ROUNDS = 12
KEPT_SPANS = 2000  # of the time line in JSON

Watch = Callable[[float], None]


@dataclass(frozen=True)
class Simulation:
    """What was found. fault_free: the same without faults, or the same object where there are none."""

    outcome: Outcome
    fault_free: Outcome
    estimate: Estimate
    warnings: tuple[str, ...]

    @property
    def scenario(self) -> Scenario:
        return self.outcome.scenario

    @property
    def goodput(self) -> float:
        """Committed tokens a second over those without faults."""
        return self.outcome.tokens_per_s / self.fault_free.tokens_per_s if self.fault_free.tokens_per_s else 0.0

    @cached_property
    def window(self) -> tuple[float, float]:
        """A time worth a picture: some rounds, from shortly before the first fault."""
        return default_window(self.outcome)


def simulate(scenario: Scenario, *, model: str = "auto", watch: Watch | None = None) -> Simulation:
    """Run `scenario`, and again without faults where it has any.

    model: `messages`, `rounds`, or `auto`: by the number of islands. watch: is told the simulated time now and then.
    Raises ConfigError for rates that leave nobody.
    """
    check_churn(scenario)
    drawn = faults_of(scenario)
    closed_form = estimate(scenario.method, scenario.workload, scenario.network)
    chosen = _model(scenario, model, closed_form)
    outcome = chosen(scenario, drawn).run(watch)
    calm = scenario.without_faults()
    fault_free = outcome if scenario.fault_free else chosen(calm, list(calm.script)).run(watch)
    return Simulation(outcome, fault_free, closed_form, tuple(_warnings(outcome, closed_form)))


def faults_of(scenario: Scenario) -> list[Fault]:
    """Those of its script and those drawn from its rates, by time."""
    sites = max([scenario.num_islands - 1, *(fault.site for fault in scenario.script)]) + 1
    rng = np.random.default_rng((scenario.seed, 0))
    if scenario.rates.any and math.isinf(scenario.duration_s):
        raise ConfigError("rates need an end: faults are drawn for a time, not for rounds. Give --hours 1.")
    drawn = draw_faults(scenario.rates, num_sites=sites, until_s=scenario.duration_s, rng=rng)
    return sorted([*scenario.script, *drawn], key=lambda fault: fault.time_s)


def default_window(outcome: Outcome) -> tuple[float, float]:
    """Some rounds, from shortly before the first fault or from the start."""
    first = next(
        (happening.time_s for happening in outcome.happened if happening.what in ("kill", "stop", "void")), 0.0
    )
    length_s = WINDOW_ROUNDS * max(outcome.round_s, 1e-9)
    start_s = max(0.0, min(first - length_s / 6, outcome.simulated_s - length_s))
    return start_s, min(outcome.simulated_s, start_s + length_s)


def as_json(found: Simulation, window: tuple[float, float] | None = None) -> dict[str, Any]:
    """Everything as plain values: seconds, bytes, tokens, shares from 0 to 1."""
    outcome, scenario = found.outcome, found.scenario
    method = scenario.method
    counts = outcome.counts()
    return {
        "parameters": scenario.workload.shape.num_parameters,
        "islands": scenario.num_islands,
        "schedule": method.kind,
        "compressor": method.coding.name,
        "inner_steps": method.inner_steps,
        "fragments": method.num_fragments,
        "delay": method.delay,
        "link_bits_per_s": scenario.network.slowest_bytes_per_s * 8,
        "latency_s": scenario.network.longest_latency_s,
        "step_s": scenario.workload.step_s,
        "seed": scenario.seed,
        "model": outcome.model,
        "simulated_s": as_plain(outcome.simulated_s),
        "rounds": as_plain(outcome.rounds),
        "round_s": as_plain(outcome.round_s),
        "exposed_s": as_plain(outcome.exposed_s),
        "utilisation": as_plain(outcome.utilisation),
        "goodput": as_plain(found.goodput),
        "tokens_per_s": as_plain(outcome.tokens_per_s),
        "tokens_committed": as_plain(outcome.tokens_committed),
        "tokens_lost": as_plain(outcome.tokens_lost),
        "fault_free": {
            "rounds": as_plain(found.fault_free.rounds),
            "tokens_per_s": as_plain(found.fault_free.tokens_per_s),
            "utilisation": as_plain(found.fault_free.utilisation),
        },
        "closed_form": {"round_s": found.estimate.round_s, "utilisation": found.estimate.utilisation},
        "bytes_per_island": as_plain(outcome.bytes_per_island),
        "bytes_per_round": as_plain(outcome.bytes_per_island / outcome.rounds if outcome.rounds else 0.0),
        "link_bytes": as_plain(sum(outcome.link_bytes)),
        "state_bytes": as_plain(outcome.state_bytes),
        "contributors": as_plain(_mean([commit.contributors for commit in outcome.commits])),
        "counts": {what: counts[what] for what in ("kill", "stop", "leave", "join", "void", "spared")},
        "seconds": {kind: as_plain(outcome.seconds.get(kind, 0.0)) for kind in (*PRESENT, "down")},
        "ended": outcome.ended,
        "happened": [_plain_tuple(happening) for happening in outcome.happened[:KEPT_SPANS]],
        "timeline": timeline(outcome, window or found.window),
        "warnings": list(found.warnings),
    }


def timeline(outcome: Outcome, window: tuple[float, float]) -> dict[str, Any]:
    """What each island did from when to when: [island, lane, what, start, end], in seconds."""
    spans = outcome.window(*window)
    return {
        "from_s": as_plain(window[0]),
        "until_s": as_plain(window[1]),
        "spans": [_plain_tuple(span) for span in spans[:KEPT_SPANS]],
        "left_out": max(0, len(spans) - KEPT_SPANS),
    }


# --- inside


def _model(scenario: Scenario, name: str, closed_form: Estimate) -> type[World] | type[Rounds]:
    if name not in MODELS:
        raise ConfigError(f"--detail {name!r} is not known.{nearest(name, MODELS)} Known: {', '.join(MODELS)}.")
    if name == "auto":
        few = scenario.num_islands <= MESSAGES_UP_TO and _messages_s(scenario, closed_form) <= MOST_MESSAGES_S
        name = "messages" if few else "rounds"
    return World if name == "messages" else Rounds


def _messages_s(scenario: Scenario, closed_form: Estimate) -> float:
    """Real seconds that a simulation in messages would take, about."""
    rounds = min(scenario.num_rounds or math.inf, scenario.duration_s / closed_form.round_s)
    each_s = ISLAND_ROUND_S + MORE_AN_ISLAND_S * scenario.num_islands
    return rounds * scenario.schedule.num_fragments * scenario.num_islands * each_s


def _warnings(outcome: Outcome, closed_form: Estimate) -> list[str]:
    scenario = outcome.scenario
    checks = (_cannot_hide, _never_in, _faults_in_every_sync, _nothing_committed)
    found = check_coding(scenario.method.coding, scenario.workload.shape)
    return found + [warning for check in checks if (warning := check(outcome, closed_form))]


def _cannot_hide(outcome: Outcome, closed_form: Estimate) -> str:
    """A delay that hides too little, with what would."""
    method, step_s = closed_form.method, closed_form.workload.step_s
    if not method.delay or closed_form.exposed_s <= 0.01 * closed_form.compute_s + closed_form.workload.landing_s:
        return ""
    link = closed_form.bandwidths[0.99]
    or_link = f", or a link of {format_bandwidth(link)}" if link else ""
    if method.kind == "delayed":
        enough = closed_form.inner_steps_to_hide
        return (
            f"--inner-steps {method.inner_steps} take {format_seconds(closed_form.compute_s)}, too few to hide a sync "
            f"of {format_seconds(closed_form.sync_s)}. Use --inner-steps {enough}{or_link}."
        )
    longest_s = max(closed_form.fragment_s)
    delay = smallest_inner_steps(longest_s, step_s)
    fits = delay <= method.inner_steps // method.num_fragments
    enough = -(-closed_form.inner_steps_to_hide // method.num_fragments) * method.num_fragments
    way_out = f"--delay {delay}" if fits else f"--inner-steps {enough} with a longer --delay"
    return (
        f"--delay {method.delay} cannot hide the {format_seconds(longest_s)} that a fragment takes. "
        f"Use {way_out}{or_link}."
    )


def _never_in(outcome: Outcome, closed_form: Estimate) -> str:
    """A state that takes longer to fetch than rounds wait for it."""
    scenario = outcome.scenario
    joins = outcome.counts()["join"]
    if not joins or scenario.num_islands < 2:
        return ""
    transfer_s = scenario.links(0).transfer_s(0, 1, scenario.state_bytes)
    patience_s = closed_form.round_s / scenario.schedule.num_fragments + scenario.patience.deadline_s
    if transfer_s <= patience_s:
        return ""
    return (
        f"a joiner fetches {format_bytes(scenario.state_bytes)} in {format_seconds(transfer_s)}, and a round waits for "
        f"it no longer than {format_seconds(patience_s)}: it comes too late each time. "
        f"Use --deadline {math.ceil(transfer_s)}s or a faster link."
    )


def _faults_in_every_sync(outcome: Outcome, closed_form: Estimate) -> str:
    """An averaging that something interrupts each time."""
    rates = outcome.scenario.rates
    rate = rates.kill + rates.stop + rates.leave
    longest_s = max(closed_form.fragment_s, default=0.0)
    if rate * longest_s < 1:
        return ""
    return (
        f"something happens every {format_seconds(1 / rate)}, and an averaging takes {format_seconds(longest_s)}: most "
        "come to nothing and are tried again. Use a compressor that sends less, more fragments, or a faster link."
    )


def _nothing_committed(outcome: Outcome, closed_form: Estimate) -> str:
    if outcome.commits:
        return ""
    rounds_s = 2 * closed_form.round_s
    return (
        f"no round was committed in {format_seconds(outcome.simulated_s)}. Use --hours {rounds_s / 3600:.2g} or more."
    )


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _plain_tuple(values: tuple[Any, ...]) -> list[Any]:
    return [as_plain(value) for value in values]
