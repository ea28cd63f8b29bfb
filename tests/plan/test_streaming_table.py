"""The published table of bandwidths, computed again."""

import numpy as np
import pytest

from atoll.plan.streaming_table import (
    GRID_GBIT_PER_S,
    METHODS,
    MODELS,
    PAPER,
    TARGETS,
    closed_form_utilisation,
    simulated_utilisation,
    table,
)


@pytest.fixture(scope="module")
def cells():
    return table()


def test_68_of_75_cells_are_the_paper_s_and_all_within_one_grid_step(cells) -> None:
    assert len(cells) == 75
    assert sum(cell.off_by == 0 for cell in cells) >= 68
    assert max(abs(cell.off_by) for cell in cells) == 1


def test_the_paper_s_numbers_lie_on_its_grid_to_a_decimal() -> None:
    for numbers in PAPER.values():
        for number in numbers:
            assert np.abs(GRID_GBIT_PER_S - number).min() < 0.1


def test_the_closed_form_is_within_two_grid_steps_of_the_simulation(cells) -> None:
    step = GRID_GBIT_PER_S[1] / GRID_GBIT_PER_S[0]
    assert all(abs(np.log(cell.closed_form / cell.simulated)) <= 2.01 * np.log(step) for cell in cells)


def test_what_users_are_told_reaches_the_target_and_nothing_below_does(cells) -> None:
    for cell in cells:
        method = next(method for method in METHODS if method.name == cell.method)
        model = next(model for model in MODELS if model.name == cell.model)
        below, at = simulated_utilisation(method, model, np.array([cell.simulated, cell.reaching]))
        assert below < cell.target <= at


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_more_bandwidth_never_computes_less(method, model) -> None:
    for utilisation in (simulated_utilisation, closed_form_utilisation):
        shares = utilisation(method, model, np.logspace(-1, 4, 60))
        assert (np.diff(shares) >= -1e-12).all()
        assert 0 < shares[0] < shares[-1] <= 1 + 1e-12


def test_targets_are_in_order_along_a_row(cells) -> None:
    for first in range(0, 75, len(TARGETS)):
        row = [cell.simulated for cell in cells[first : first + len(TARGETS)]]
        assert row == sorted(row)
