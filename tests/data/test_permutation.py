import numpy as np
import pytest

from atoll.data.permutation import permutation_key, permute


@pytest.mark.parametrize("size", [1, 2, 3, 7, 255, 256, 257, 1000, 65_537])
def test_every_index_comes_exactly_once(size: int) -> None:
    order = permute(np.arange(size), size, key=permutation_key(size, "test"))
    assert np.array_equal(np.sort(order), np.arange(size))


def test_one_index_is_permuted_as_it_is_among_others() -> None:
    order = permute(np.arange(1000), 1000, key=5)
    assert [int(permute(np.array([k]), 1000, key=5)[0]) for k in (0, 17, 999)] == [order[0], order[17], order[999]]


def test_another_key_gives_another_order() -> None:
    first, second = (permute(np.arange(1000), 1000, key=key) for key in (1, 2))
    assert (first == second).mean() < 0.02


def test_order_is_not_that_of_the_indices() -> None:
    order = permute(np.arange(10_000), 10_000, key=3)
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05


def test_every_place_is_reached_about_equally_often() -> None:
    places = np.array([int(permute(np.array([0]), 5, key=key)[0]) for key in range(300)])
    assert np.bincount(places, minlength=5).min() > 35


def test_order_is_pinned_so_that_old_checkpoints_resume() -> None:
    assert permute(np.arange(8), 8, key=permutation_key(0, 0, 0)).tolist() == [5, 6, 7, 2, 1, 4, 3, 0]
