"""A slow island does not set the pace, and its work counts."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest
from faults.fleet import Fleet

pytestmark = pytest.mark.slow

STEP_S = 0.02  # of sleep, so that two cores are enough for three islands
STEPS = 16
ROUNDS = 8


@pytest.mark.parametrize("adapt", [True, False])
def test_an_island_ten_times_slower_does_not_set_the_pace_and_counts(fleet: Callable[..., Fleet], adapt: bool) -> None:
    run = fleet(replicas=3, inner_steps=STEPS, step_s=STEP_S, slow={2: 10 * STEP_S}, adapt_inner_steps=adapt)
    run.wait_round(4)
    since = run.round
    run.wait_rounds(ROUNDS)
    rounds = [event for event in run.of("round") if event["round"] > since]
    # A round waits for its grace, and for the step in which the slow island is: far less than for all its steps.
    slow_s = 10 * STEPS * STEP_S
    assert median(event["round_s"] for event in rounds) < 0.4 * slow_s, rounds
    steps = sum(event["weights"].get("2", 0.0) for event in rounds) / run.tokens_a_step
    seconds = sum(event["round_s"] for event in rounds)
    assert steps > 0.4 * (seconds - slow_s) / (10 * STEP_S), "most of what it did is in the means"
    norms = [event["norms"] for event in rounds if event["weights"].get("2") == run.tokens_a_round]
    for *others, own in norms:  # rounds in which it brings a whole share of steps, made over several rounds
        assert own > 0.5 * max(others), "what it did before it listened is in what it brings"
    assert norms or adapt
    run.check()
