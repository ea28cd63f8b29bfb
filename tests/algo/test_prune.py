from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.algo.prune import PRUNE_RULES, by_magnitude, by_sign

each_rule = pytest.mark.parametrize("rule", PRUNE_RULES.values(), ids=PRUNE_RULES)


@each_rule
@pytest.mark.parametrize("shape", [(100,), (3, 100), (2, 5, 100), (4, 7), (6, 1)])
@pytest.mark.parametrize("percent", [0, 25, 29, 50, 57, 58, 75, 99])
def test_every_row_loses_exactly_the_floor_of_its_share(rule: object, shape: tuple[int, ...], percent: int) -> None:
    delta = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    pruned = rule(delta, percent / 100)
    expected = int(Fraction(percent, 100) * shape[-1])
    assert set((pruned == 0).sum(-1).reshape(-1).tolist()) == {expected}
    kept = pruned != 0
    assert torch.equal(pruned[kept], delta[kept])


@each_rule
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3, 4), (0,), (0, 3), (3, 0)])
def test_awkward_shapes_keep_their_shape(rule: object, shape: tuple[int, ...]) -> None:
    delta = torch.ones(shape)
    pruned = rule(delta, 0.4)
    assert pruned.shape == delta.shape
    if shape == ():
        assert pruned.item() == 1.0, "a scalar is never pruned"


@each_rule
def test_a_transposed_matrix_is_pruned_by_its_own_rows(rule: object) -> None:
    delta = torch.randn(4, 6, generator=torch.Generator().manual_seed(2)).t()
    assert torch.equal(rule(delta, 0.5), rule(delta.contiguous(), 0.5))


def test_magnitude_keeps_the_largest_of_each_row() -> None:
    delta = torch.tensor([[0.1, -5.0, 2.0, -0.2], [100.0, 300.0, -200.0, 400.0]])
    assert by_magnitude(delta, 0.5).tolist() == [[0, -5, 2, 0], [0, 300, 0, 400]]


def test_sign_zeroes_what_is_against_the_row_first_then_the_smallest() -> None:
    delta = torch.tensor([[-9.0, 4.0, 5.0, 1.0, 2.0], [9.0, -4.0, -5.0, -1.0, -2.0]])
    assert by_sign(delta, 0.2).tolist() == [[0, 4, 5, 1, 2], [0, -4, -5, -1, -2]]
    assert by_sign(delta, 0.6).tolist() == [[0, 4, 5, 0, 0], [0, -4, -5, 0, 0]]
    assert by_magnitude(delta, 0.2).tolist() == [[-9, 4, 5, 0, 2], [9, -4, -5, 0, -2]]


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-12, 1e-30])
def test_sign_ranks_small_numbers_beside_a_large_one(scale: float) -> None:
    """Pseudo-gradients are small: their order must not drown in a sum with something large."""
    delta = torch.tensor([[4.0, 3.0, 2.0, 1.0, -1.0]]) * scale
    rows = torch.cat([delta, torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0]])])
    assert (by_sign(rows, 0.6)[0] / scale).tolist() == pytest.approx([4.0, 3.0, 0.0, 0.0, 0.0])


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=12), st.integers(0, 99))
def test_magnitude_never_zeroes_a_larger_entry_than_it_keeps(row: list[float], percent: int) -> None:
    delta = torch.tensor(row)
    pruned = by_magnitude(delta, percent / 100)
    gone, kept = delta[pruned != delta].abs(), pruned[pruned != 0].abs()
    assert not (len(gone) and len(kept)) or gone.max() <= kept.min()
