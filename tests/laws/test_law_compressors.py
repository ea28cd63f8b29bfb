"""Laws of the outer loop under compressors whose numbers nobody can tell by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from laws.driver import SCHEDULES, Fleet, assert_same_bits, settings_for
from torch import Tensor

from atoll.algo.adopt import carry
from atoll.algo.outer import SGD
from atoll.algo.schedule import Schedule
from atoll.compress import COMPRESSORS, Compressor, CompressorOptions, build_compressor

OPTIONS = CompressorOptions(rank=2, topk=4, chunk=64)
ALL: dict[str, Compressor] = {
    **{name: build_compressor(name, OPTIONS) for name in COMPRESSORS},
    "int4, feedback": build_compressor("int4", CompressorOptions(feedback=True)),
    "stat2, requantised": build_compressor("stat2", CompressorOptions(reduction="requantise")),
}
each_compressor = pytest.mark.parametrize("compressor", ALL.values(), ids=ALL)
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
FRAGMENTS = {2: [["scalar", "turned"], ["matrix", "vector"]], 3: [["scalar"], ["turned", "vector"], ["matrix"]]}


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "scalar": torch.tensor(1.0),
        "matrix": torch.randn(16, 24, generator=generator),
        "turned": torch.randn(8, 16, generator=generator).t(),
        "vector": torch.randn(37, generator=generator),
    }


def drift(replica: int, step: int, params: dict[str, Tensor]) -> None:
    """A pull to 0 and noise of this replica's own."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    for param in params.values():
        param.mul_(0.95).add_(torch.randn(param.shape, generator=generator), alpha=0.05)


def fleet_of(
    compressor: Compressor,
    schedule: Schedule,
    num_replicas: int = 3,
    *,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Fleet:
    outer = settings_for(schedule, compressor=compressor, bucket_elements=150, **(settings or {}))
    fragments = FRAGMENTS.get(schedule.num_fragments)
    return Fleet(num_replicas, outer, schedule, move=drift, start=start, fragments=fragments, **more)


@each_compressor
@each_schedule
def test_anchors_and_shared_state_are_bit_identical_after_every_step(
    compressor: Compressor, schedule: Schedule
) -> None:
    """Also when a replica sits a round out."""

    def how(replica: int, step: int) -> dict[str, object]:
        return {"weight": 1.0 + replica, "present": not (replica == 1 and 4 < step < 9)}

    fleet = fleet_of(compressor, schedule, how=how)
    for _ in range(14):
        fleet.run(1)
        for replica in (1, 2):
            assert_same_bits(fleet.anchor(replica), fleet.anchor(0))
            shared = [fleet.members[r].sync.shared_codes() for r in (replica, 0)]
            assert_same_bits(*shared)
        assert len({member.sync.digest() for member in fleet.members}) == 1
    assert fleet.reports and all(torch.isfinite(value).all() for value in fleet.anchor().values())


@each_compressor
@each_schedule
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_bytes_declared_are_bytes_counted_in_every_round(
    compressor: Compressor, schedule: Schedule, num_replicas: int
) -> None:
    fleet = fleet_of(compressor, schedule, num_replicas).run(2 * schedule.inner_steps + 2)
    assert fleet.reports
    for reports in fleet.reports:
        declared = [member.sync.sent_bytes(reports[0].fragment) for member in fleet.members]
        assert [report.payload_bytes for report in reports] == declared
        assert (sum(declared) == 0) == (num_replicas == 1)


@each_compressor
@pytest.mark.parametrize("name", ["diloco", "streaming, delay 1", "one-round delay, first blocks"])
def test_a_run_resumed_after_any_step_is_the_uninterrupted_run(compressor: Compressor, name: str) -> None:
    def make() -> Fleet:
        return fleet_of(compressor, SCHEDULES[name], 2, settings={"adopt": carry(0.5)})

    whole = make().run(11).finish()
    for stop in range(11):
        resumed = make().load(make().run(stop).save()).run(11 - stop).finish()
        for there, here in zip(whole.members, resumed.members, strict=True):
            assert_same_bits(there.params, here.params)
            assert_same_bits(there.sync.anchor(), here.sync.anchor())
            for old, new in zip(
                there.sync.replica_state()["fragments"], here.sync.replica_state()["fragments"], strict=True
            ):
                for left, right in zip(old["codes"], new["codes"], strict=True):
                    assert_same_bits(left, right)


@each_compressor
def test_a_void_round_changes_nothing(compressor: Compressor) -> None:
    schedule = SCHEDULES["diloco"]
    fleet = fleet_of(compressor, schedule).run(4)
    before = fleet.save()["members"]
    fleet.how = lambda replica, step: {"present": False}
    fleet.run(4)
    for old, new in zip(before, fleet.save()["members"], strict=True):
        assert_same_bits(old["anchor"], new["anchor"])
        for left, right in zip(old["own"]["fragments"], new["own"]["fragments"], strict=True):
            for code, after in zip(left["codes"], right["codes"], strict=True):
                assert_same_bits(code, after)


@each_compressor
def test_training_goes_where_it_goes_uncompressed(compressor: Compressor) -> None:
    """All are pulled to 0 from numbers of size 1: no compressor stands in the way, none makes it diverge.

    The outer step is small: what feedback sends late acts as a delay, which a large step would not bear.
    """
    settings = {"optimizer": SGD(), "lr": lambda step: 0.3}
    fleet = fleet_of(compressor, SCHEDULES["diloco"], settings=settings).run(160)
    size = torch.cat([value.reshape(-1) for value in fleet.anchor().values()]).square().mean().sqrt()
    assert size < 0.2
