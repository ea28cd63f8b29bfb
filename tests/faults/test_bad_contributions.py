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


@pytest.mark.parametrize(
    ("point", "deed", "words"),
    [
        ("before_take", "nan", "it is not finite"),
        ("before_take", "explode", "its norm"),
        ("go", "nan", "what arrived of its contribution"),  # after it had said that all was well
        ("go", "explode", "what arrived of its contribution"),
    ],
)
def test_a_broken_contribution_is_refused_by_name_and_reaches_nobody(
    fleet: Callable[..., Fleet], point: str, deed: str, words: str
) -> None:
    run = fleet(replicas=3)
    run.wait_round(5)
    victim = run.islands[1]
    run.deed(victim.name, f"island.{point}", deed)
    run.wait(lambda: run.of("fault", what="refused"), "the refusal")
    refused = run.of("fault", what="refused")
    assert [fault["replica"] for fault in refused] == [1]
    assert words in refused[0]["detail"]
    run.wait_round(refused[0]["round"])
    made = next(event for event in run.of("round") if event["round"] == refused[0]["round"])
    assert made["refused"] == [1] or "1" in made["weights"], "left out, unless it did its steps anew in time"
    assert all(norm < 100 for norm in made["norms"])
    assert "contribution refused" in run.log(victim)
    run.wait_counted(0, 1, 2)
    assert victim.is_alive
    assert all(event["delta_norm"] < 100 for event in run.of("round"))
    run.check()


def test_an_island_that_is_refused_three_times_is_benched_and_the_others_go_on(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=3)
    run.wait_round(5)
    victim = run.islands[1]
    for number in range(1, 4):
        run.deed(victim.name, "island.before_take", "nan")
        run.wait(lambda: len(run.of("fault", what="refused")) >= number, f"refusal {number}")  # noqa: B023
        if number < 3:
            run.wait_counted(1)  # it has heard of the refusal and begun afresh: the next deed is not wiped away with it
    assert "benched" in run.of("fault", what="refused")[-1]["detail"]
    since = run.round
    run.wait_rounds(4)
    assert all("1" not in event["weights"] for event in run.of("round") if event["round"] > since + 1)
    assert victim.is_alive
    run.check()
