"""Bytes an island sends in a round, as the compressors themselves declare them.

What is counted here is what training counts on the wire: every fragment's tensors, each through the `sent_bytes` of the
compressor. Compressors that treat all elements alike see a fragment as one long tensor, as the trainer cuts it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from atoll.algo.fragments import strided_fragments
from atoll.compress import (
    Compressor,
    CompressorOptions,
    Feedback,
    Quantized,
    TopK,
    build_compressor,
    check_compressor,
)
from atoll.plan.shapes import ModelShape, TensorShapes

FP32_BYTES = 4
BUCKET_ELEMENTS = 1 << 21  # of the trainer, by test: elements that travel together where tensors may be cut


@dataclass(frozen=True)
class Coding:
    """A compressor with its settings. rank: of the low-rank ones, 0 for their default. feedback: None: as it needs."""

    name: str
    rank: int = 0
    feedback: bool | None = None

    @property
    def low_rank(self) -> bool:
        return "lowrank" in self.name

    @property
    def owes(self) -> bool:
        """Whether it keeps a residual: error feedback, 4 bytes a parameter."""
        return isinstance(self.compressor, Feedback)

    @property
    def options(self) -> CompressorOptions:
        if self.rank:
            return CompressorOptions(rank=self.rank, feedback=self.feedback)
        return CompressorOptions(feedback=self.feedback)

    @property
    def compressor(self) -> Compressor:
        """The very object that trains. Raises ConfigError for a name that does not exist, with the nearest."""
        return _built(self)

    def phases(self, num_islands: int) -> int:
        """Messages of one exchange that wait for each other: to the owners of slices and back; two islands swap.

        >>> [Coding(name).phases(4) for name in ("int8", "lowrank", "topk")], Coding("int8").phases(2)
        ([2, 4, 1], 1)
        """
        inner = self.compressor.inner if isinstance(self.compressor, Feedback) else self.compressor
        gathers = isinstance(inner, TopK) or (isinstance(inner, Quantized) and inner.reduction == "gather")
        return (1 if gathers or num_islands == 2 else 2) * (2 if self.low_rank else 1)

    def describe(self) -> str:
        """
        >>> Coding("lowrank+int4", 2048).describe(), Coding("int8").describe()
        ('lowrank+int4 rank 2048', 'int8')
        """
        return f"{self.name} rank {self.rank}" if self.low_rank and self.rank else self.name


IDENTITY = Coding("identity")


@dataclass(frozen=True)
class Payload:
    """What each island sends for one fragment of a round. exchanges: that it travels in, one after the other."""

    sent_bytes: int
    exchanges: int


def fragment_payloads(shape: ModelShape, coding: Coding, *, num_islands: int, num_fragments: int = 1) -> list[Payload]:
    """What each island sends for every fragment of one round. Islands differ by an element a tensor at most.

    >>> shape = ModelShape("llama", 64, 2, 1, 128, 1000)
    >>> fragment_payloads(shape, IDENTITY, num_islands=2) == [Payload(4 * shape.num_parameters, exchanges=1)]
    True
    """
    tensors = shape.tensors
    return [
        _payload({name: tensors[name] for name in names}, coding, num_islands)
        for names in strided_fragments(list(tensors), num_fragments)
    ]


def compression(sent_bytes: float, shape: ModelShape, num_islands: int) -> float:
    """ρ: how many times less than fp32 this is."""
    full = 2 * (num_islands - 1) / num_islands * shape.num_parameters * FP32_BYTES
    return full / sent_bytes if sent_bytes else math.inf


def check_coding(coding: Coding, shape: ModelShape) -> list[str]:
    """Warnings about a compressor on this model, by name; ConfigError if it cannot be used at all."""
    return check_compressor(coding.name, coding.options, shapes=sorted(set(shape.tensors.values())))


def _payload(tensors: TensorShapes, coding: Coding, num_islands: int) -> Payload:
    """Compressors that treat all elements alike get buckets, the others a tensor at a time."""
    sizes: Sequence[tuple[int, ...]] = list(tensors.values())
    exchanges = len(sizes)
    if coding.compressor.elementwise:
        numel = sum(math.prod(size) for size in sizes)
        sizes, exchanges = [(numel,)], math.ceil(numel / BUCKET_ELEMENTS)
    return Payload(sum(_sent_bytes(coding, size, num_islands) for size in sizes), exchanges)


@lru_cache(maxsize=4096)
def _sent_bytes(coding: Coding, size: tuple[int, ...], num_islands: int) -> int:
    return coding.compressor.sent_bytes(size, num_replicas=num_islands, replica=0)


@lru_cache(maxsize=64)
def _built(coding: Coding) -> Compressor:
    return build_compressor(coding.name, coding.options)
