"""The digest of an anchor, the same however its rows lie on workers.

A parameter is cut into blocks of whole rows, some 16 KB each, from its first row on, whoever holds them:

    parameter     ├─ block 0 ─┤├─ block 1 ─┤├─ block 2 ─┤├ 3 ┤
    worker 0      ────────────────────╮
    worker 1                          ╰───────────────────────
    leaves        hash 0       bytes  bytes   hash 2       hash 3

Each worker hashes the blocks that are its own, and of one that is cut between two workers gives the bytes (rare: rows
are mostly cut at large powers of two). `combine` hashes the hashes: blocks to parameters, parameters by name to one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash
from torch import Tensor

BLOCK_ELEMENTS = 4096
ITEM_BYTES = 4
HASH_BYTES = 16


@dataclass(frozen=True)
class OwnedRows:
    """The elements [start, stop) of a flattened parameter of `shape`: whole rows, owned by one worker."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def span(self) -> str:
        """
        >>> OwnedRows("lm_head.weight", 0, 8, (4, 4)).span
        '0.8.lm_head.weight'
        """
        return f"{self.start}.{self.stop}.{self.name}"

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the rows, as a tensor of their own."""
        width = row_width(self.shape)
        return (self.numel // width, *self.shape[1:])


def row_width(shape: Sequence[int]) -> int:
    """Elements of a row.

    >>> row_width((3, 4, 5)), row_width((7,)), row_width(())
    (20, 1, 1)
    """
    return math.prod(shape[1:])


def block_elements(shape: Sequence[int]) -> int:
    """Of the blocks of a parameter: whole rows, a power of two of them.

    >>> block_elements((8, 64)), block_elements((100,)), block_elements((3, 10_000))
    (4096, 4096, 10000)
    """
    width = row_width(shape)
    return width << max(0, (BLOCK_ELEMENTS // width).bit_length() - 1)


@dataclass(frozen=True)
class _Span:
    """Consecutive elements of one block. whole: all of them. ends: the block ends here."""

    numel: int
    whole: bool
    ends: bool


def _spans(rows: OwnedRows) -> Iterator[_Span]:
    block, size = block_elements(rows.shape), math.prod(rows.shape)
    at = rows.start
    while at < rows.stop:
        begin = at - at % block
        end = min(begin + block, size)
        stop = min(end, rows.stop)
        yield _Span(stop - at, whole=(at, stop) == (begin, end), ends=stop == end)
        at = stop


class Leaves:
    """What one worker says of its rows, computed while they pass by in their order."""

    def __init__(self, owned: Sequence[OwnedRows]) -> None:
        self._spans = (span for rows in owned for span in _spans(rows))
        self._missing = 0  # bytes of the span under way that did not come yet
        self._whole = False
        self._hash = xxhash.xxh3_128()
        self._told = bytearray()

    def update(self, flat: Tensor) -> None:
        """The next elements: fp32, 1-D, contiguous."""
        if not flat.numel():
            return
        view = flat.detach().cpu().numpy().data.cast("B")
        at = 0
        while at < len(view):
            if not self._missing:
                self._begin()
            part = view[at : at + self._missing]
            if self._whole:
                self._hash.update(part)
            else:
                self._told += part
            at += len(part)
            self._missing -= len(part)
            if not self._missing and self._whole:
                self._told += self._hash.digest()

    def _begin(self) -> None:
        span = next(self._spans)
        self._missing, self._whole = span.numel * ITEM_BYTES, span.whole
        self._hash.reset()

    def told(self) -> bytes:
        """Hashes of whole blocks and bytes of cut ones, in order."""
        assert not self._missing and next(self._spans, None) is None, "there are more rows than were shown"
        return bytes(self._told)


def combine(workers: Sequence[Sequence[OwnedRows]], told: Sequence[bytes]) -> str:
    """The digest of the anchor that all these workers own together, from their leaves: 32 hex digits.

    >>> import torch
    >>> values = torch.arange(20_000.0)
    >>> def leaves(start, stop):
    ...     one = Leaves([OwnedRows("w", start, stop, (20_000,))])
    ...     one.update(values[start:stop])
    ...     return one.told()
    >>> def owned(*bounds):
    ...     return [[OwnedRows("w", start, stop, (20_000,))] for start, stop in bounds]
    >>> whole = combine(owned((0, 20_000)), [leaves(0, 20_000)])
    >>> whole == combine(owned((0, 5), (5, 9_000), (9_000, 20_000)), [leaves(0, 5), leaves(5, 9_000), leaves(9_000, 20_000)])
    True
    """  # noqa: E501 (an example)
    parts: dict[str, list[tuple[OwnedRows, memoryview]]] = defaultdict(list)
    for owned, leaves in zip(workers, told, strict=True):
        at = 0
        for rows in owned:
            size = sum(HASH_BYTES if span.whole else span.numel * ITEM_BYTES for span in _spans(rows))
            parts[rows.name].append((rows, memoryview(leaves)[at : at + size]))
            at += size
        assert at == len(leaves), "a worker told more than it owns"
    return xxhash.xxh3_128_hexdigest(b"".join(_of_parameter(parts[name]) for name in sorted(parts)))


def _of_parameter(parts: Sequence[tuple[OwnedRows, memoryview]]) -> bytes:
    hashes, cut = xxhash.xxh3_128(), xxhash.xxh3_128()
    for rows, leaves in sorted(parts, key=lambda part: part[0].start):
        at = 0
        for span in _spans(rows):
            size = HASH_BYTES if span.whole else span.numel * ITEM_BYTES
            part = leaves[at : at + size]
            at += size
            if span.whole:
                hashes.update(part)
                continue
            cut.update(part)
            if span.ends:
                hashes.update(cut.digest())
                cut.reset()
    return hashes.digest()
