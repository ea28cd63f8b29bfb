"""Islands join a run that goes on, with exactly its state, and leave nothing behind when they go."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from faults.fleet import Fleet, Resources

pytestmark = pytest.mark.slow


def test_a_joiner_holds_the_committed_anchor_before_it_contributes(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=2)
    run.wait_round(2)
    for seat in (2, 3, 4):
        run.add(seat)
        run.wait_counted(seat)
    digests = {payload["round"]: payload["digest"] for payload in run.committed()}
    synced = run.records("synced")
    assert {record["replica"] for record in synced} >= {2, 3, 4}
    for seat in (2, 3, 4):
        first = min(event["round"] for event in run.of("round") if event["weights"].get(str(seat)))
        proved = [record["round"] for record in synced if record["replica"] == seat]
        assert first - 1 in proved, (first, proved)
        assert digests[first - 1]
    run.check()


def test_nothing_is_left_of_thirty_islands_that_came_and_went(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=2, inner_steps=4)
    run.wait_round(2)
    for number in range(10):
        for seat in (2, 3, 4):
            run.add(seat)
        run.wait_counted(2, 3, 4)
        run.kill(2, 3, 4)
        if number == 1:
            run.wait_rounds(3)
            before = {life.name: run.resources(life) for life in (run.islands[0], run.coordinator)}
    for life in (run.islands[0], run.coordinator):
        run.wait(lambda: _is_back_at(run.resources(life), before[life.name]), f"{life.name} to be as it was")  # noqa: B023
    run.check()


def _is_back_at(now: Resources, before: Resources) -> bool:
    """Threads of attempts that came to nothing end within seconds, and what they hold with them."""
    grown = now.resident_bytes - before.resident_bytes
    return now.descriptors <= before.descriptors and now.threads <= before.threads and grown <= 20e6


def test_a_joiner_that_is_told_to_begin_at_round_0_says_where_it_is(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=2)
    run.wait_round(2)
    joiner = run.add(2)
    run.wait_counted(2)
    assert run.of("member", what="joined", replica=2)[0]["pid"] == joiner.pid
    assert re.search(r"state of round \d+: \d+\.\d MB", run.log(joiner))
