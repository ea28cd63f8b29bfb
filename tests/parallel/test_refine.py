"""The common refinement of islands of different shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.parallel.refine import FlatRange, Owners, refine


@st.composite
def islands(draw: st.DrawFn) -> tuple[dict[str, int], list[Owners]]:
    """Sizes of parameters, and islands of 1 to 5 workers that own every element once, some workers nothing."""
    sizes = draw(st.dictionaries(st.sampled_from("abcde"), st.integers(1, 40), min_size=1))
    made: list[Owners] = []
    for _ in range(draw(st.integers(1, 4))):
        workers = draw(st.integers(1, 5))
        owners: list[dict[str, FlatRange]] = [{} for _ in range(workers)]
        for name, size in sizes.items():
            inner = st.lists(st.integers(0, size), min_size=workers - 1, max_size=workers - 1)
            bounds = [0, *sorted(draw(inner)), size]
            for worker, place in enumerate(draw(st.permutations(range(workers)))):
                owners[worker][name] = (bounds[place], bounds[place + 1])
        made.append(owners)
    return sizes, made


@given(islands())
def test_every_element_is_in_exactly_one_piece(case: tuple[dict[str, int], list[Owners]]) -> None:
    sizes, owners = case
    times = {name: [0] * size for name, size in sizes.items()}
    for pieces in refine(owners).values():
        for piece in pieces:
            for element in range(piece.start, piece.stop):
                times[piece.name][element] += 1
    assert all(set(counts) == {1} for counts in times.values())


@given(islands())
def test_the_holders_of_a_piece_own_all_of_it(case: tuple[dict[str, int], list[Owners]]) -> None:
    _, owners = case
    for holders, pieces in refine(owners).items():
        for piece in pieces:
            for island, worker in zip(owners, holders, strict=True):
                start, stop = island[worker][piece.name]
                assert start <= piece.start < piece.stop <= stop


@given(islands(), st.randoms(use_true_random=False))
def test_the_order_does_not_depend_on_that_of_the_names(case: tuple[dict[str, int], list[Owners]], random) -> None:  # type: ignore[no-untyped-def]
    _, owners = case
    shuffled = []
    for island in owners:
        workers = [list(ranges.items()) for ranges in island]
        for ranges in workers:
            random.shuffle(ranges)
        shuffled.append([dict(ranges) for ranges in workers])
    assert [*refine(shuffled).items()] == [*refine(owners).items()]


@given(islands())
def test_islands_of_one_shape_average_with_their_counterparts(case: tuple[dict[str, int], list[Owners]]) -> None:
    _, owners = case
    twins = refine([owners[0]] * 3)
    assert all(len(set(holders)) == 1 for holders in twins)
    pieces = {(holders[0], piece.name): piece for holders, held in twins.items() for piece in held}
    owned = {
        (worker, name): span
        for worker, spans in enumerate(owners[0])
        for name, span in spans.items()
        if span[0] < span[1]
    }
    assert {key: (piece.start, piece.stop) for key, piece in pieces.items()} == owned


@pytest.mark.parametrize(
    ("islands", "message"),
    [
        ([[{"w": (0, 4)}, {"w": (5, 8)}]], "elements 4 to 5 of w not at all"),
        ([[{"w": (0, 4)}, {"w": (3, 8)}]], "elements 3 to 4 of w twice"),
        ([[{"w": (0, 4)}], [{"w": (0, 5)}]], "w has 4 elements on island 0 and 5 on island 1"),
        ([[{"w": (0, 4)}], [{"w": (0, 4), "v": (0, 1)}]], "v is a parameter of island 1 and not of island 0"),
        ([[{"w": (0, 4), "v": (0, 1)}], [{"w": (0, 4)}]], "v is a parameter of island 0 and not of island 1"),
    ],
)
def test_islands_that_do_not_fit_are_refused(islands: list[Owners], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        refine(islands)
