from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.algo.rates import inner_lr


def rates(**settings: object) -> list[float]:
    return [inner_lr(step, learning_rate=1.0, **settings) for step in range(1, settings["max_steps"] + 1)]


def test_warm_up_is_linear_and_reaches_the_full_rate() -> None:
    assert rates(warmup_steps=4, max_steps=6, decay="constant") == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(warmup_steps=0, max_steps=2, decay="constant") == [1.0, 1.0]


def test_cosine_falls_from_the_end_of_the_warm_up_to_the_least_ratio() -> None:
    seen = rates(warmup_steps=2, max_steps=10, min_ratio=0.1)
    assert seen[:2] == pytest.approx([0.5, 1.0])
    assert seen[5] == pytest.approx(0.1 + 0.9 / 2)
    assert seen[-1] == pytest.approx(0.1)


def test_the_warm_up_runs_again_where_diloco_begins_while_the_decay_goes_on() -> None:
    once = rates(warmup_steps=2, max_steps=12)
    again = rates(warmup_steps=2, max_steps=12, restart_step=6)
    assert again[:6] == once[:6] and again[7:] == once[7:]
    assert again[6] == pytest.approx(once[6] / 2)
    assert rates(warmup_steps=3, max_steps=8, decay="constant", restart_step=4) == pytest.approx(
        [1 / 3, 2 / 3, 1, 1, 1 / 3, 2 / 3, 1, 1]
    )


@given(st.integers(1, 500), st.integers(0, 50), st.integers(0, 100), st.sampled_from(["cosine", "constant"]))
def test_a_rate_is_never_above_the_full_one_nor_below_nothing(step: int, warmup: int, restart: int, decay: str) -> None:
    rate = inner_lr(step, learning_rate=3e-4, warmup_steps=warmup, max_steps=200, decay=decay, restart_step=restart)
    assert 0.0 <= rate <= 3e-4 and math.isfinite(rate)
