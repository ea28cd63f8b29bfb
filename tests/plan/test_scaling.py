"""The scaling laws at the sizes of their paper."""

import pytest

from atoll.plan.scaling import (
    better_loss,
    data_parallel_law,
    data_parallel_loss,
    diloco_law,
    diloco_loss,
    outside,
)


@pytest.mark.parametrize(
    ("num_parameters", "parallel", "one", "two", "four", "eight"),
    [
        (1.3e9, 2.454, 2.433, 2.453, 2.473, 2.493),
        (4e9, 2.204, 2.178, 2.196, 2.213, 2.231),
        (10e9, 2.020, 1.990, 2.006, 2.022, 2.039),
    ],
)
def test_losses_at_the_paper_s_sizes(
    num_parameters: float, parallel: float, one: float, two: float, four: float, eight: float
) -> None:
    assert data_parallel_loss(num_parameters) == pytest.approx(parallel, abs=6e-4)
    losses = [diloco_loss(num_parameters, islands) for islands in (1, 2, 4, 8)]
    assert losses == pytest.approx([one, two, four, eight], abs=6e-4)


def test_the_better_fit_has_a_floor_and_agrees_near_a_billion() -> None:
    assert better_loss(1.3e9, 2) == pytest.approx(diloco_loss(1.3e9, 2), rel=0.005)
    assert better_loss(10e9, 2) > 1.02 * diloco_loss(10e9, 2)
    assert better_loss(1e15, 1) > 1.05


def test_rates_and_batches() -> None:
    law = diloco_law(1e9, 4)
    assert law.inner_lr == pytest.approx(22256 * 1e9**-0.8827 * 4**0.2929)
    assert law.batch_tokens / 2048 == pytest.approx(0.00709 * 1e9**0.4695 * 4**0.3399)
    assert [diloco_law(1e9, islands).outer_lr for islands in (1, 2, 4, 8)] == [0.4, 0.6, 0.6, 0.8]
    parallel = data_parallel_law(1e9)
    assert parallel.batch_tokens / 2048 == pytest.approx(0.22592 * 1e9**0.281)
    assert parallel.inner_lr == pytest.approx(16319.2 * 1e9**-0.819)


@pytest.mark.parametrize(
    ("num_parameters", "islands", "inner_steps", "said"),
    [
        (107e9, 2, 30, "107 B"),
        (1e6, 2, 30, "1 M"),
        (1e9, 16, 30, "16 islands"),
        (1e9, 2, 500, "larger outer rate"),
        (1e9, 2, 1, "H = 1"),
    ],
)
def test_outside_of_their_range_they_say_so(num_parameters: float, islands: int, inner_steps: int, said: str) -> None:
    (found,) = outside(num_parameters, islands, inner_steps)
    assert said in found


def test_inside_they_are_silent() -> None:
    assert outside(1e9, 8, 30) == []
    assert outside(10e9, 1, 100) == []
