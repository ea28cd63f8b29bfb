"""Cutting a model into fragments that sync together, and a fragment into buckets that travel together.

A fragment's tensors lie one after the other in one flat fp32 buffer. A bucket is a range of that buffer with the pieces
of tensors it covers. Law: every element lies in exactly one bucket, for any sizes and any capacity.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from atoll.errors import ConfigError


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of tensor number `tensor` of the fragment, at `offset` of the flat buffer."""

    tensor: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of the flat buffer."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    """The tensors of one fragment in their order. shapes: full shapes. whole: tensors that must not be cut."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    whole: frozenset[int] = frozenset()

    @property
    def numels(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def numel(self) -> int:
        return sum(self.numels)

    @property
    def offsets(self) -> list[int]:
        """Where each tensor begins in the flat buffer."""
        return list(accumulate(self.numels, initial=0))[:-1]


def buckets(layout: Layout, capacity: int) -> list[Bucket]:
    """Ranges of at most `capacity` elements, longer only for a tensor that must stay whole.

    >>> layout = Layout(("a", "b"), ((6,), (2, 3)))
    >>> [(bucket.start, bucket.stop) for bucket in buckets(layout, 10)]
    [(0, 10), (10, 12)]
    """
    result: list[Bucket] = []
    pieces: list[Piece] = []
    start = 0
    for piece in _pieces(layout, capacity):
        if pieces and piece.offset + piece.stop - piece.start - start > capacity:
            result.append(Bucket(start, piece.offset, tuple(pieces)))
            pieces, start = [], piece.offset
        pieces.append(piece)
    if pieces:
        result.append(Bucket(start, layout.numel, tuple(pieces)))
    return result


def _pieces(layout: Layout, capacity: int) -> list[Piece]:
    """Tensors in order, those that may be cut cut where a multiple of `capacity` falls in the flat buffer."""
    pieces = []
    offset = 0
    for tensor, numel in enumerate(layout.numels):
        start = 0
        while start < numel:
            room = capacity - (offset + start) % capacity
            stop = numel if tensor in layout.whole else min(numel, start + room)
            pieces.append(Piece(tensor, start, stop, offset + start))
            start = stop
        offset += numel
    return pieces


def tensor_buckets(layout: Layout) -> list[Bucket]:
    """One bucket a tensor, for compressors that look at whole tensors."""
    return [
        Bucket(offset, offset + numel, (Piece(tensor, 0, numel, offset),))
        for tensor, (offset, numel) in enumerate(zip(layout.offsets, layout.numels, strict=True))
        if numel
    ]


def strided_fragments(names: Sequence[str], num_fragments: int) -> list[list[str]]:
    """Layer l goes to fragment l mod P; what comes before the layers to the first, what comes after to the last.

    Streaming DiLoCo (arXiv 2501.18512) finds strided fragments better than consecutive ones. Raises ConfigError where a
    fragment would be empty.

    >>> strided_fragments(["embed", "layers.0.w", "layers.1.w", "layers.2.w", "norm"], 2)
    [['embed', 'layers.0.w', 'layers.2.w'], ['layers.1.w', 'norm']]
    """
    fragments: list[list[str]] = [[] for _ in range(num_fragments)]
    seen_layer = False
    for name in names:
        layer = re.search(r"\.(\d+)\.", f".{name}.")
        if layer:
            seen_layer = True
            fragments[int(layer.group(1)) % num_fragments].append(name)
        else:
            fragments[-1 if seen_layer else 0].append(name)
    filled = sum(bool(fragment) for fragment in fragments)
    if filled < num_fragments:
        raise ConfigError(
            f"fragments={num_fragments} cannot all be filled by this model's layers, which go to them in turn. "
            f"Use fragments={filled} or fewer."
        )
    return fragments
