"""A slow island does not set the pace, and its work counts."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest
from faults.fleet import Fleet

pytestmark = pytest.mark.slow

STEP_S = 0.02  # of sleep, so that two cores are enough for three islands


def pace(run: Fleet, since: int) -> float:
    """Median seconds of a round."""
    return median(event["round_s"] for event in run.of("round") if event["round"] > since)


@pytest.mark.parametrize("adapt", [True, False])
def test_an_island_ten_times_slower_does_not_set_the_pace_and_counts(fleet: Callable[..., Fleet], adapt: bool) -> None:
    run = fleet(replicas=3, inner_steps=24, step_s=STEP_S, slow={2: 10 * STEP_S}, adapt_inner_steps=adapt)
    run.wait_round(4, timeout_s=60)
    since = run.round
    run.wait_rounds(12, timeout_s=60)
    # A round waits for its grace, and for the step in which the slow island is: far less than for all its steps.
    assert pace(run, since) < 0.4 * 24 * 10 * STEP_S, [event["round_s"] for event in run.of("round")]
    weights = [event["weights"].get("2", 0.0) for event in run.of("round") if event["round"] > since]
    assert sum(weights) > 0
    steps = sum(weights) / 16
    assert steps >= 12 * 24 / 10 / 2, "most of what it did is in the means"
    run.check()
