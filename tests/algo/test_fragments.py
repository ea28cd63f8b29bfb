from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.algo.fragments import Layout, buckets, strided_fragments, tensor_buckets
from atoll.errors import ConfigError

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=8)


def layout_of(shapes: list[tuple[int, ...]], whole: frozenset[int] = frozenset()) -> Layout:
    return Layout(tuple(f"t{i}" for i in range(len(shapes))), tuple(shapes), whole)


def elements(layout: Layout, buckets: list) -> list[tuple[int, int]]:
    """(tensor, element) in the order in which buckets hold them, each at its place in the flat buffer."""
    seen = []
    for bucket in buckets:
        position = bucket.start
        for piece in bucket.pieces:
            assert piece.offset == position and piece.offset == layout.offsets[piece.tensor] + piece.start
            seen += [(piece.tensor, element) for element in range(piece.start, piece.stop)]
            position += piece.stop - piece.start
        assert position == bucket.stop
    return seen


@given(shapes, st.integers(1, 60), st.data())
def test_every_element_lies_in_exactly_one_bucket(
    shapes: list[tuple[int, ...]], capacity: int, data: st.DataObject
) -> None:
    whole = data.draw(st.sets(st.integers(0, max(len(shapes) - 1, 0))))
    layout = layout_of(shapes, frozenset(whole))
    made = buckets(layout, capacity)
    assert elements(layout, made) == [(t, e) for t, shape in enumerate(shapes) for e in range(math.prod(shape))]
    for bucket in made:
        assert bucket.pieces, "an empty bucket would be an exchange about nothing"
        lone_whole = len(bucket.pieces) == 1 and bucket.pieces[0].tensor in whole
        assert bucket.stop - bucket.start <= capacity or lone_whole
        assert all(
            piece.stop - piece.start == layout.numels[piece.tensor] for piece in bucket.pieces if piece.tensor in whole
        )


@given(shapes)
def test_tensor_buckets_hold_one_whole_tensor_each(shapes: list[tuple[int, ...]]) -> None:
    layout = layout_of(shapes)
    made = tensor_buckets(layout)
    assert [bucket.pieces[0].tensor for bucket in made] == [t for t, n in enumerate(layout.numels) if n]
    assert elements(layout, made) == [(t, e) for t, shape in enumerate(shapes) for e in range(math.prod(shape))]


@pytest.mark.parametrize(
    ("sizes", "capacity", "bounds"),
    [
        ([(6,), (6,)], 10, [(0, 10), (10, 12)]),
        ([(12,)], 10, [(0, 10), (10, 12)]),
        ([(3,), (3,), (3,)], 3, [(0, 3), (3, 6), (6, 9)]),
        ([(4,)], 100, [(0, 4)]),
        ([], 10, []),
        ([(0,)], 10, []),
    ],
)
def test_sizes_that_break_bucketing_elsewhere(sizes: list[tuple[int]], capacity: int, bounds: list) -> None:
    assert [(bucket.start, bucket.stop) for bucket in buckets(layout_of(sizes), capacity)] == bounds


def test_a_tensor_that_must_stay_whole_is_not_cut() -> None:
    made = buckets(layout_of([(4,), (3, 5), (4,)], frozenset([1])), 10)
    assert [(bucket.start, bucket.stop) for bucket in made] == [(0, 4), (4, 19), (19, 23)]


@given(st.integers(1, 6), st.integers(0, 13))
def test_strided_fragments_hold_every_name_once(num_fragments: int, num_layers: int) -> None:
    num_layers = max(num_layers, num_fragments if num_fragments > 1 else 0)
    names = ["model.embed.weight", *(f"model.layers.{i}.mlp.weight" for i in range(num_layers)), "model.norm.weight"]
    fragments = strided_fragments(names, num_fragments)
    assert len(fragments) == num_fragments
    assert sorted(name for fragment in fragments for name in fragment) == sorted(names)
    for layer in range(num_layers):
        assert f"model.layers.{layer}.mlp.weight" in fragments[layer % num_fragments]


def test_the_layer_number_is_found_in_the_names_of_gpt2_and_llama() -> None:
    for name in ("transformer.h.{}.attn.c_attn.weight", "model.layers.{}.self_attn.q_proj.weight", "{}.weight"):
        assert strided_fragments([name.format(i) for i in (0, 1, 2, 10)], 2) == [
            [name.format(0), name.format(2), name.format(10)],
            [name.format(1)],
        ]


def test_more_fragments_than_layers_are_refused_with_the_number_that_would_do() -> None:
    names = ["embed", "layers.0.w", "layers.1.w", "norm"]
    with pytest.raises(ConfigError, match=r"fragments=4 .* Use fragments=3 or fewer"):
        strided_fragments(names, 4)
