"""A SIGKILL at any point of a round loses no committed round, and the rest go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from faults.fleet import Fleet, Life
from faults.points import COORDINATOR, COORDINATOR_AT_A_JOIN, DONOR, ISLAND, JOINER, LEADER

pytestmark = pytest.mark.slow


def die(fleet: Fleet, life: Life, point: str, *, skip: int = 0) -> None:
    """See a process die at a crash point."""
    fleet.plan(life.name, point, skip=skip)
    fleet.wait_end(life)
    fleet.clear_plan()


def kill_at_each(fleet: Fleet, seat: int, points: Sequence[str]) -> None:
    for number, point in enumerate(points):
        die(fleet, fleet.islands[seat], f"island.{point}", skip=number % 2)
        fleet.wait_rounds(2)  # one may have been under way with the victim's work in it
        fleet.add(seat)
        fleet.wait_counted(seat)


def test_an_island_may_die_at_any_point(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=3)
    run.wait_round(2)
    kill_at_each(run, 1, ISLAND)
    run.check()


def test_the_island_that_leads_may_die_at_any_point(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=3, save_steps=16, eval_steps=16)
    run.wait_round(2)
    kill_at_each(run, 0, LEADER)
    run.check()
    run.wait(lambda: run.of("eval"), "an evaluation")


def test_a_joiner_may_die_at_any_point(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=2)
    run.wait_round(2)
    for point in JOINER:
        run.plan(run.next_name("island-2"), f"island.{point}")
        joiner = run.add(2)
        run.wait_end(joiner)
        run.clear_plan()
        run.wait_rounds(1)
    run.add(2)
    run.wait_counted(0, 1, 2)
    run.check()


def test_a_donor_may_die_in_the_middle_of_a_transfer(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=3)
    run.wait_round(2)
    for point in DONOR:
        donor = run.islands[0]
        run.plan(donor.name, f"donor.{point}")
        run.add(3)
        run.wait_end(donor)
        run.clear_plan()
        run.wait_counted(1, 2, 3)
        run.kill(3)
        run.add(0)
        run.wait_counted(0, 1, 2)
    run.check()


def test_the_coordinator_may_die_at_any_point(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=3)
    run.wait_round(2)
    for point in (*COORDINATOR, *COORDINATOR_AT_A_JOIN):
        at_a_join = point in COORDINATOR_AT_A_JOIN
        run.plan(run.coordinator.name, f"coordinator.{point}")
        if at_a_join:
            run.kill(2)
            run.add(2)
        run.wait_end(run.coordinator)
        run.clear_plan()
        run.start_coordinator()
        run.wait_counted(0, 1, 2)
    assert all(island.is_alive for island in run.islands.values())
    run.check()
