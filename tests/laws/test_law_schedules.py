"""Every schedule with every compressor under every adopt rule: what must hold whatever is combined."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace as replace_field
from typing import Any

import pytest
import torch
from laws.driver import Fleet, assert_equal, assert_same_bits, bits, settings_for, sign_move, trained_alone
from torch import Tensor

from atoll.algo.adopt import AdoptRule, carry, eager, lerp, replace
from atoll.algo.outer import SGD, Nesterov
from atoll.algo.schedule import Event, Launch, Schedule
from atoll.compress import COMPRESSORS, Compressor, CompressorOptions, Feedback, build_compressor
from atoll.compress.feedback import RESIDUAL
from atoll.compress.lowrank import WARM_START

MOMENTUM = 0.4
NUM_REPLICAS = 3

BLOCKING = {"blocking": Schedule(3)}
DELAYED = {
    "delayed": Schedule(3, delay=3),
    "delayed, first blocks": Schedule(3, delay=3, blocking_first=True),
}
STREAMING = {
    f"streaming, P={parts}, delay {delay}": Schedule(steps, num_fragments=parts, delay=delay, blocking_first=delay > 1)
    for parts, steps, delays in ((2, 4, (0, 1, 2)), (3, 3, (0, 1)))
    for delay in delays
}
SCHEDULES = BLOCKING | DELAYED | STREAMING
RULES = {"reset": replace(), "carry": carry(1 / NUM_REPLICAS), "eager": eager(), "lerp": lerp(0.25)}


def rules_of(schedule: Schedule) -> dict[str, AdoptRule]:
    """Where rounds land at once nothing is unsent, and carry and eager are reset; lerp is streaming's."""
    apply = {"reset"} | ({"carry", "eager"} if schedule.delay else set())
    apply |= {"lerp"} if schedule.num_fragments > 1 else set()
    return {name: rule for name, rule in RULES.items() if name in apply}


COMBINED = [
    pytest.param(schedule, rule, id=f"{name}-{rule_name}")
    for name, schedule in SCHEDULES.items()
    for rule_name, rule in rules_of(schedule).items()
]

OPTIONS = CompressorOptions(rank=2, topk=4, chunk=32)
ALL: dict[str, Compressor] = {
    **{name: build_compressor(name, OPTIONS) for name in COMPRESSORS},
    "int4, feedback": build_compressor("int4", replace_field(OPTIONS, feedback=True)),
}
FRAGMENTS = {2: [["matrix"], ["scalar", "turned", "vector"]], 3: [["matrix"], ["turned"], ["scalar", "vector"]]}

each_compressor = pytest.mark.parametrize("compressor", ALL.values(), ids=ALL)
each_combination = pytest.mark.parametrize(("schedule", "rule"), COMBINED)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "scalar": torch.tensor(1.0),
        "matrix": torch.randn(12, 10, generator=generator),
        "turned": torch.randn(9, 11, generator=generator).t(),
        "vector": torch.randn(37, generator=generator),
    }


NOISE = [torch.randn(300, generator=torch.Generator().manual_seed(seed)) for seed in range(100)]


def drift(replica: int, step: int, params: dict[str, Tensor]) -> None:
    """A pull to 0 and noise of this replica's own."""
    noise = NOISE[(31 * replica + step) % 100]
    for number, param in enumerate(params.values()):
        param.mul_(0.95).add_(noise[number : number + param.numel()].view(param.shape), alpha=0.05)


class Watched(Fleet):
    """A fleet that checks after every landing, and adds up what was contributed and what arrived, by name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.launches = [0] * self.schedule.num_fragments
        self.declared: list[deque[list[int]]] = [deque() for _ in self.launches]
        self.contributed = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in self.start().items()}
        self.arrived = copy.deepcopy(self.contributed)
        self.momentum = copy.deepcopy(self.contributed)

    def do(self, events: Sequence[Event]) -> None:
        for event in events:
            super().do([event])
            if isinstance(event, Launch):
                self.launches[event.fragment] += 1
                self._declare(event.fragment)
                self._add_contributions(event.fragment)
            else:
                self._add_arrival(event.fragment)
                self._check_landing(event.fragment)

    def load(self, saved: Mapping[str, Any]) -> Fleet:
        super().load(saved)
        for fragment, item in enumerate(self.members[0].sync.replica_state()["fragments"]):
            for _ in item["flights"]:
                self._declare(fragment)
        return self

    def _declare(self, fragment: int) -> None:
        self.declared[fragment].append([member.sync.sent_bytes(fragment) for member in self.members])

    def _add_contributions(self, fragment: int) -> None:
        for member in self.members:
            kept = member.sync.replica_state()["fragments"][fragment]["flights"][-1]["contribution"]
            flat = member.sync.progress()[fragment] if kept is None else kept
            for name, part in self._named(fragment, flat).items():
                self.contributed[name] += part

    def _add_arrival(self, fragment: int) -> None:
        """v ← μv + Δ, so what arrived is what the momentum now has beyond μ times what it had."""
        outer = self.members[0].sync.shared_state()["outer"]
        for name in self.names[fragment]:
            velocity = outer[f"momentum.{name}"].to(torch.float64)
            self.arrived[name] += self.num_replicas * (velocity - MOMENTUM * self.momentum[name])
            self.momentum[name] = velocity

    def _check_landing(self, fragment: int) -> None:
        reports = self.reports[-1]
        assert [report.payload_bytes for report in reports] == self.declared[fragment].popleft()
        anchors = [torch.cat([part.reshape(-1) for part in m.sync.anchor().values()]) for m in self.members]
        assert len({bits(anchor) for anchor in anchors}) == 1
        assert len({member.sync.digest() for member in self.members}) == 1

    def owed(self) -> dict[str, Tensor]:
        """What error feedback of all replicas owes."""
        owed = {name: torch.zeros_like(value) for name, value in self.contributed.items()}
        for member in self.members:
            for fragment, item in enumerate(member.sync.replica_state()["fragments"]):
                flat = torch.cat([code[RESIDUAL].reshape(-1) for code in item["codes"]])
                for name, part in self._named(fragment, flat).items():
                    owed[name] += part
        return owed

    def _named(self, fragment: int, flat: Tensor) -> dict[str, Tensor]:
        shapes = [self.contributed[name].shape for name in self.names[fragment]]
        parts = flat.split([shape.numel() for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(self.names[fragment], parts, shapes, strict=True)}


def watched(compressor: Compressor, schedule: Schedule, rule: AdoptRule, **changes: Any) -> Watched:
    settings = settings_for(
        schedule,
        compressor=compressor,
        adopt=rule,
        optimizer=Nesterov(MOMENTUM),
        lr=lambda step: 0.6,
        bucket_elements=150,
        **changes,
    )
    fragments = FRAGMENTS.get(schedule.num_fragments)
    return Watched(NUM_REPLICAS, settings, schedule, move=drift, start=start, fragments=fragments)


def assert_nothing_is_lost(fleet: Watched) -> None:
    owed = fleet.owed()
    for name, contributed in fleet.contributed.items():
        torch.testing.assert_close(fleet.arrived[name] + owed[name], contributed, rtol=0, atol=1e-6 * NUM_REPLICAS)


@each_compressor
@each_combination
def test_whatever_is_combined(compressor: Compressor, schedule: Schedule, rule: AdoptRule) -> None:
    """`Watched` holds anchors to be bit-identical and declared bytes to be counted bytes at every landing."""
    fleet = watched(compressor, schedule, rule)
    fleet.run(2 * schedule.inner_steps + 1)
    saved = fleet.save()
    fleet.run(schedule.inner_steps).finish()
    counts = fleet.members[0].sync.shared_state()["counts"]
    assert counts == fleet.launches and min(counts) >= 3, "every launch is applied once"
    assert not any(item["flights"] for m in fleet.members for item in m.sync.replica_state()["fragments"])
    if isinstance(compressor, Feedback):
        assert_nothing_is_lost(fleet)
    resumed = watched(compressor, schedule, rule).load(saved).run(schedule.inner_steps).finish()
    for there, here in zip(fleet.members, resumed.members, strict=True):
        assert_same_bits(there.params, here.params)
        assert_same_bits(there.sync.anchor(), here.sync.anchor())
        assert_same_bits(there.sync.shared_codes(), here.sync.shared_codes())
    assert fleet.contributed["matrix"].abs().sum() > 1, "nothing was trained"


@each_compressor
def test_streaming_one_fragment_at_once_onto_the_anchor_is_diloco(compressor: Compressor) -> None:
    diloco = watched(compressor, Schedule(4), replace()).run(9)
    streaming = watched(compressor, Schedule(4, num_fragments=1, delay=0), lerp(0.0)).run(9)
    for left, right in zip(diloco.members, streaming.members, strict=True):
        assert_equal(left.params, right.params)
        assert_same_bits(left.sync.anchor(), right.sync.anchor())


# --- one replica


def unit_step(schedule: Schedule) -> dict[str, Any]:
    return {
        "settings": settings_for(schedule, optimizer=SGD(), lr=lambda step: 1.0, adopt=carry(1.0)),
        "schedule": schedule,
    }


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(steps, num_fragments=parts, delay=delay, blocking_first=blocks)
        for steps, parts in ((5, 1), (4, 2), (6, 3))
        for delay in range(steps + 1)
        for blocks in (False, True)
    ],
    ids=lambda s: f"H{s.inner_steps}-P{s.num_fragments}-delay{s.delay}{'-blocks' * s.blocking_first}",
)
def test_one_replica_with_a_unit_step_and_full_carry_trains_as_if_alone(schedule: Schedule) -> None:
    """For any delay, and at any step also for the anchor once what is in flight has landed."""
    fleet = Fleet(1, **unit_step(schedule)).run(17)
    assert_equal(fleet.members[0].params, trained_alone(sign_move, 17))
    fleet.finish()
    assert_equal(fleet.anchor(), trained_alone(sign_move, 17))


# --- what the controller changes on the way


@pytest.mark.parametrize("schedule", DELAYED.values(), ids=DELAYED)
@pytest.mark.parametrize("lengths", [(2, 5, 1), (4, 1, 3)], ids=str)
def test_one_replica_trains_as_if_alone_while_rounds_change_their_length(
    schedule: Schedule, lengths: tuple[int, ...]
) -> None:
    fleet = Fleet(1, **unit_step(schedule))
    for inner_steps in lengths:
        fleet.run(2 * fleet.schedule.inner_steps)
        fleet.schedule = fleet.schedule.continue_with(fleet.step, inner_steps)
        assert_equal(fleet.members[0].params, trained_alone(sign_move, fleet.step))
    fleet.run(3).finish()
    assert_equal(fleet.anchor(), trained_alone(sign_move, fleet.step))


@pytest.mark.parametrize("schedule", [*DELAYED.values(), STREAMING["streaming, P=2, delay 1"]], ids=str)
def test_laws_hold_while_rounds_change_their_length(schedule: Schedule) -> None:
    fleet = watched(ALL["lowrank+int4"], schedule, carry(1 / NUM_REPLICAS))
    for inner_steps in (6, 2, 4):
        fleet.run(2 * fleet.schedule.inner_steps)
        fleet.schedule = fleet.schedule.continue_with(fleet.step, inner_steps)
    fleet.run(5).finish()
    assert fleet.members[0].sync.shared_state()["counts"] == fleet.launches
    assert_nothing_is_lost(fleet)


def set_rank(fleet: Fleet, rank: int, codes: str = "lowrank+int4") -> None:
    """What of a decision concerns compressors. Their state is left as it is."""
    compressor = build_compressor(codes, replace_field(OPTIONS, rank=rank, feedback=True))
    for member in fleet.members:
        member.sync.settings = replace_field(member.sync.settings, compressor=compressor)


def warm_rows(fleet: Fleet) -> list[int]:
    codes = fleet.members[0].sync.shared_codes()
    return [value.shape[0] for name, value in codes.items() if name.endswith(WARM_START)]


@pytest.mark.parametrize("schedule", [BLOCKING["blocking"], *DELAYED.values()], ids=str)
@pytest.mark.parametrize("codes", ["lowrank", "lowrank+int4"])
def test_laws_hold_while_the_rank_changes(schedule: Schedule, codes: str) -> None:
    """Down to 1, up to 2 again, and up to 3, at which no matrix here is factored any more."""
    fleet = watched(build_compressor(codes, replace_field(OPTIONS, rank=2)), schedule, carry(1 / NUM_REPLICAS))
    for rank, rows in ((1, 1), (2, 2), (3, 2), (1, 1)):
        fleet.run(schedule.inner_steps)
        set_rank(fleet, rank, codes)
        fleet.run(2 * schedule.inner_steps)
        assert warm_rows(fleet) == [rows, rows]
    fleet.finish()
    assert_nothing_is_lost(fleet)


def test_a_matrix_that_a_lower_rank_makes_worth_factoring_begins_as_any_other() -> None:
    fleet = watched(build_compressor("lowrank", replace_field(OPTIONS, rank=3)), Schedule(3), replace())
    fleet.run(3)
    assert warm_rows(fleet) == []
    set_rank(fleet, 2, "lowrank")
    fleet.run(3)
    assert warm_rows(fleet) == [2, 2]
    assert_nothing_is_lost(fleet)


def test_a_run_resumed_after_its_rank_changed_is_the_uninterrupted_run() -> None:
    def at_rank_1() -> Watched:
        fleet = watched(ALL["lowrank+int4"], DELAYED["delayed"], carry(1 / NUM_REPLICAS))
        set_rank(fleet, 1)
        return fleet

    whole = watched(ALL["lowrank+int4"], DELAYED["delayed"], carry(1 / NUM_REPLICAS)).run(7)
    set_rank(whole, 1)
    saved = whole.run(6).save()
    resumed = at_rank_1().load(saved).run(5).finish()
    whole.run(5).finish()
    assert_same_bits(whole.anchor(), resumed.anchor())
    assert_same_bits(whole.members[2].params, resumed.members[2].params)


@pytest.mark.parametrize("name", ["lowrank", "lowrank+int4"])
@pytest.mark.parametrize("rule", [replace(), carry(1 / NUM_REPLICAS), eager()], ids=["reset", "carry", "eager"])
def test_anchors_stay_the_same_bits_while_rank_and_length_of_rounds_change(name: str, rule: AdoptRule) -> None:
    settings = settings_for(Schedule(3, delay=3), adopt=rule, compressor=build_compressor(name, OPTIONS))
    settings = replace_field(settings, probe_rank=2)
    fleet = Fleet(NUM_REPLICAS, settings, Schedule(3, delay=3), start=start)
    for rank, inner_steps in ((2, 3), (1, 2), (1, 1), (2, 4)):
        fleet.schedule = fleet.schedule.continue_with(fleet.step, inner_steps)
        for member in fleet.members:
            member.sync.set_rank(rank)
        fleet.run(inner_steps)
        assert len({member.sync.measure_digest() for member in fleet.members}) == 1
    fleet.finish()
    assert len({member.sync.digest() for member in fleet.members}) == 1
    assert [report[0].rank for report in fleet.reports] == [2, 1, 1, 2]
    assert len({report[0].seen for report in fleet.reports}) > 1
    for report in fleet.reports:
        assert len({each.seen.effective_rank for each in report if each.seen is not None}) == 1
