"""A frozen island is noticed, stops nobody for long, changes nothing when it thaws, and takes part again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from faults.fleet import Fleet

pytestmark = pytest.mark.slow

NOTICED_S = 10.0


@pytest.mark.parametrize("point", ["connected", "averaged"])
def test_an_island_that_freezes_in_mid_average_is_evicted_and_comes_back(
    fleet: Callable[..., Fleet], point: str
) -> None:
    run = fleet(replicas=3)
    run.wait_round(2)
    victim = run.islands[1]
    run.plan(victim.name, f"island.{point}", signal.SIGSTOP)
    run.wait(victim.is_frozen, "the freeze")
    began, frozen_at = time.perf_counter(), run.round
    run.clear_plan()
    run.wait_round(frozen_at + 2, timeout_s=NOTICED_S)
    assert time.perf_counter() - began < NOTICED_S
    lost = run.of("member", what="lost", replica=1)
    assert [event["pid"] for event in lost] == [victim.pid]
    assert "silent" in lost[0]["why"]
    run.send(1, signal.SIGCONT)
    run.wait_counted(0, 1, 2)
    assert victim.is_alive
    returned = run.of("member", what="joined", replica=1)[-1]
    assert (returned["pid"], returned["why"]) == (victim.pid, "again")
    run.check()


def test_what_a_thawed_island_says_of_an_old_attempt_is_ignored_by_number(fleet: Callable[..., Fleet]) -> None:
    """It averaged to the end, was frozen before it could say so, and says so when all others are rounds ahead."""
    run = fleet(replicas=3)
    run.wait_round(2)
    victim = run.islands[2]
    run.plan(victim.name, "island.averaged", signal.SIGSTOP)
    run.wait(victim.is_frozen, "the freeze")
    run.clear_plan()
    run.wait(lambda: run.of("member", what="lost", replica=2), "the eviction")
    run.wait_rounds(2)
    run.send(2, signal.SIGCONT)
    run.wait_counted(2)
    lost, back = run.of("member", what="lost")[0]["round"], run.of("member", what="joined", why="again")[0]["round"]
    weights = {event["round"]: event["weights"].get("2", 0.0) for event in run.of("round")}
    # The round that it averaged may hold its work, for the others had all of it. What it says of it comes too late.
    assert not any(weights[number] for number in range(lost + 2, back + 1))
    first = next(weights[number] for number in range(back + 1, run.round + 1) if weights[number])
    assert first >= run.tokens_a_round, "what it had done before the freeze counts in the end"
    run.check()


def test_a_donor_that_freezes_in_the_middle_of_a_transfer_is_replaced_by_another(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=3)
    run.wait_round(2)
    donor = run.islands[0]
    run.plan(donor.name, "donor.asked", signal.SIGSTOP)
    run.add(3)
    run.wait(donor.is_frozen, "the freeze")
    run.clear_plan()
    run.wait_counted(1, 2, 3, timeout_s=NOTICED_S + 5.0)
    assert donor.is_frozen()
    run.check()
