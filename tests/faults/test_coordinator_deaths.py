"""The coordinator may die: from its log, or without one, the run goes on where it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from faults.fleet import Fleet

pytestmark = pytest.mark.slow


def test_a_coordinator_that_is_killed_again_and_again_loses_nothing(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=3)
    run.wait_round(2)
    for _ in range(3):
        run.wait_rounds(1)
        run.kill_coordinator()
        run.start_coordinator()
        run.wait_counted(0, 1, 2, timeout_s=10.0)
    assert all(island.is_alive for island in run.islands.values())
    assert len(run.of("member", what="joined")) == 12  # each island anew after each start
    assert not [*run.of("member", what="lost"), *run.of("member", what="left")]
    run.check()


def test_a_coordinator_without_a_log_takes_what_the_islands_hold(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=3)
    run.wait_round(3)
    run.kill_coordinator()
    known = run.committed()
    run.forget_log()
    run.start_coordinator()
    run.wait_counted(0, 1, 2, timeout_s=10.0)
    assert all(island.is_alive for island in run.islands.values())
    first = run.committed()[0]
    assert first["round"] == known[-1]["round"] + 1
    run.check(known=known)


def test_an_island_that_dies_while_the_coordinator_is_away_is_missed_when_that_is_back(
    fleet: Callable[..., Fleet],
) -> None:
    run = fleet(replicas=3)
    run.wait_round(2)
    run.kill_coordinator()
    run.kill(1)
    run.start_coordinator()
    run.wait_counted(0, 2)
    run.wait(lambda: run.of("member", what="lost", replica=1), "the loss", timeout_s=10.0)
    assert [event["pid"] for event in run.of("member", what="lost")] == [run.islands[1].pid]
    run.check()


def test_islands_train_on_while_the_coordinator_is_away(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=2, inner_steps=60)
    run.wait_round(1)
    run.kill_coordinator()
    steps = run.steps()
    run.wait(lambda: run.steps() > steps + 10, "inner steps without a coordinator")
    run.start_coordinator()
    run.wait_counted(0, 1)
    run.check()
