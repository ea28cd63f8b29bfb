"""Rounds that land after they were launched, coded: an island may die, or join, while one is in flight."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from faults.fleet import Fleet

pytestmark = pytest.mark.slow

DELAYED = {"schedule": "delayed", "compressor": "lowrank+int4", "rank": 4}


@pytest.mark.parametrize("point", ["ready", "connected", "reached", "commit", "stepped"])
def test_an_island_may_die_while_its_round_is_in_flight(fleet: Callable[..., Fleet], point: str) -> None:
    run = fleet(replicas=3, **DELAYED)
    run.wait_round(3)
    victim = run.islands[1]
    run.plan(victim.name, f"island.{point}", skip=2)
    run.wait_end(victim)
    run.clear_plan()
    run.wait_rounds(2)
    run.add(1)
    run.wait_counted(0, 1, 2)
    run.wait_rounds(2)
    run.check()


def test_a_joiner_takes_over_the_state_of_a_round_that_has_not_landed_anywhere(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=2, inner_steps=30, step_s=0.01, **DELAYED)
    run.wait_round(2)
    run.add(2)
    run.wait_counted(0, 1, 2)
    run.wait_rounds(2)
    run.check()


def test_a_delayed_run_lands_its_last_round(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=2, max_steps=40, save_steps=0, **DELAYED)
    codes = [run.wait_end(island, timeout_s=30) for island in run.islands.values()]
    assert codes == [0, 0]
    assert run.saved()["round"] == 5
    assert run.saved()["anchor_digest"] == run.of("round")[-1]["anchor_digest"]
    run.check()
