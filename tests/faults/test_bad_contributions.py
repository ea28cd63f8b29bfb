"""What is broken on one island reaches no other: it is noticed, named, refused and mended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from faults.fleet import Fleet

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("point", ["step", "ready", "averaged", "before_land", "landed"])
def test_a_flipped_bit_of_an_anchor_is_caught_at_the_next_commit_and_mended(
    fleet: Callable[..., Fleet], point: str
) -> None:
    run = fleet(replicas=3)
    run.wait_round(2)
    victim = run.islands[1]
    run.deed(victim.name, f"island.{point}", "flip")
    run.wait(lambda: run.of("fault", what="desync"), "the flip to be noticed")
    noticed = run.of("fault", what="desync")[0]
    assert (noticed["replica"], noticed["round"] - run.round <= 1) == (1, True)
    run.wait_counted(0, 1, 2)
    assert victim.is_alive
    run.check(desync=True)


@pytest.mark.parametrize("deed", ["nan", "explode"])
def test_a_broken_contribution_is_refused_by_name_and_reaches_nobody(fleet: Callable[..., Fleet], deed: str) -> None:
    run = fleet(replicas=3)
    run.wait_round(5)
    victim = run.islands[1]
    run.deed(victim.name, "island.before_take", deed)
    run.wait(lambda: run.of("fault", what="refused"), "the refusal")
    refused = run.of("fault", what="refused")
    assert [fault["replica"] for fault in refused] == [1]
    assert ("not finite" if deed == "nan" else "its norm") in refused[0]["detail"]
    run.wait_round(refused[0]["round"])
    made = next(event for event in run.of("round") if event["round"] == refused[0]["round"])
    assert "1" not in made["weights"] and made["refused"] == [1]
    assert all(norm < 100 for norm in made["norms"])
    assert "contribution refused" in run.log(victim)
    run.wait_counted(0, 1, 2)
    assert victim.is_alive
    run.check()


def test_an_island_that_is_refused_three_times_is_benched_and_the_others_go_on(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=3)
    run.wait_round(5)
    victim = run.islands[1]
    for number in range(1, 4):
        run.deed(victim.name, "island.before_take", "nan")
        run.wait(lambda: len(run.of("fault", what="refused")) >= number, f"refusal {number}")  # noqa: B023
    assert "benched" in run.of("fault", what="refused")[-1]["detail"]
    since = run.round
    run.wait_rounds(4)
    assert all("1" not in event["weights"] for event in run.of("round") if event["round"] > since + 1)
    assert victim.is_alive
    run.check()
