"""The words shared by algorithms, compressors and transports.

An averaging is a generator. It *yields* what it wants averaged (`Mean`) or handed round (`Gather`), is sent the
answer, and *returns* the averaged tensor with its next state. It never sees a network: a test drives it with a list,
the local transport with the other replicas of the process, the network transport with sockets.

    def identity(tensor, state):
        mean = yield Mean(tensor)
        return mean, state
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]

CODED_CHUNK = 1 << 16  # elements that are decoded, averaged and encoded at a time: their fp32 values stay in cache


@dataclass(frozen=True)
class Mean:
    """Ask for the weighted mean of `tensor` over the contributing replicas.

    `tensor` travels in its own dtype; the owner of each slice sums in fp32 in replica order, divides by the sum of the
    weights and rounds once, so that every replica receives the same bytes. The answer has its shape and dtype.

    measured: the tensors are the contributions (or have their inner products), so their inner products are wanted.
    """

    tensor: Tensor
    measured: bool = True


@dataclass(frozen=True)
class Gather:
    """Ask for every replica's `payload` (1-D uint8). The answer is a `Gathered`."""

    payload: Tensor


@dataclass(frozen=True)
class Gathered:
    """Payloads of all replicas in replica order, and the weight of each (0: does not count)."""

    payloads: list[Tensor]
    weights: Sequence[float]


class Codec(Protocol):
    """Turns fp32 values into bytes, a block of elements at a time, so that coded tensors can be cut between blocks.

    block: elements a block. block_bytes: bytes a block takes on the wire, scales included.
    """

    @property
    def block(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    def encode(self, flat: Tensor) -> Tensor:
        """(numel,) fp32 as (ceil(numel / block) * block_bytes,) uint8; a last block that is not full is filled up."""
        ...

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """The (numel,) fp32 values of a payload made by `encode`."""
        ...


@dataclass(frozen=True)
class CodedMean:
    """Ask for the weighted mean of values that travel as codes.

    payload: what `codec.encode` made of (numel,) values. The owner of each slice decodes those of all contributors,
    averages them in fp32 and encodes once more; the answer, (numel,) fp32, is decoded from the same bytes everywhere.

    owed: (numel,) fp32 or None. The owner of a slice adds to its part of it, in place, what the second encoding lost,
    as if that were this replica's to send; see `coded_mean`. measured: as in `Mean`.
    """

    payload: Tensor
    codec: Codec
    numel: int
    owed: Tensor | None = None
    measured: bool = True


Request = Mean | CodedMean | Gather
Exchange = Generator[Request, Any, tuple[Tensor, State]]


@dataclass
class Traffic:
    """What one launch put on the wire, and how the contributions lay to each other.

    payload_bytes: bytes this replica sent to others for parameters (control messages excluded).
    gram: (M, M) fp64, inner products of the contributions of the M replicas, or None where the codes do not allow it.
    waited_s: seconds in which nothing was done but wait for the network; 0 where there is none.
    """

    payload_bytes: int = 0
    gram: Tensor | None = field(default=None)
    waited_s: float = 0.0


def slice_bounds(numel: int, num_replicas: int) -> list[int]:
    """Bounds of the slice each replica owns when `numel` elements are averaged: replica i owns [b[i], b[i+1]).

    >>> slice_bounds(10, 4)
    [0, 2, 5, 7, 10]
    """
    return [numel * i // num_replicas for i in range(num_replicas + 1)]


def mean_sent_bytes(numel: int, itemsize: int, *, num_replicas: int, replica: int) -> int:
    """Exact bytes that `replica` sends for one `Mean` of `numel` elements.

    Each replica sends every slice it does not own to its owner, then its own averaged slice to all others: over the
    replicas that is 2(M-1)/M payloads each, as a ring.

    >>> [mean_sent_bytes(10, 4, num_replicas=4, replica=r) for r in range(4)]
    [56, 64, 56, 64]
    """
    bounds = slice_bounds(numel, num_replicas)
    own = bounds[replica + 1] - bounds[replica]
    return itemsize * ((numel - own) + own * (num_replicas - 1))


@dataclass(frozen=True)
class CodedSlice:
    """What one replica owns of a coded tensor: some elements, and the bytes of their blocks."""

    elements: slice
    payload: slice

    @property
    def numel(self) -> int:
        return int(self.elements.stop - self.elements.start)


def coded_slices(numel: int, codec: Codec, num_replicas: int) -> list[CodedSlice]:
    """The slice each replica owns when `numel` coded elements are averaged; cut between blocks.

    Five elements in blocks of two are three blocks, the last half full:

    >>> from types import SimpleNamespace
    >>> for part in coded_slices(5, SimpleNamespace(block=2, block_bytes=7), 2):
    ...     print(part.elements, part.payload)
    slice(0, 2, None) slice(0, 7, None)
    slice(2, 5, None) slice(7, 21, None)
    """
    num_blocks = -(-numel // codec.block)
    return [
        CodedSlice(
            slice(start * codec.block, min(stop * codec.block, numel)),
            slice(start * codec.block_bytes, stop * codec.block_bytes),
        )
        for start, stop in pairwise(slice_bounds(num_blocks, num_replicas))
    ]


def coded_mean_sent_bytes(numel: int, codec: Codec, *, num_replicas: int, replica: int) -> int:
    """Exact bytes that `replica` sends for one `CodedMean` of `numel` elements."""
    num_blocks = -(-numel // codec.block)
    return mean_sent_bytes(num_blocks, codec.block_bytes, num_replicas=num_replicas, replica=replica)


def coded_mean(
    payloads: Sequence[Tensor],
    weights: Sequence[float],
    codec: Codec,
    numel: int,
    *,
    owed: Tensor | None = None,
    owner: int = 0,
    watch: Callable[[Sequence[Tensor]], None] | None = None,
) -> Tensor:
    """The weighted mean of coded values, coded once more: what the owner of a slice computes and sends to all.

    payloads: uint8, of `numel` elements each; of a replica of weight 0 it may be anything, also empty.
    owed: (numel,) fp32 of replica `owner`, or None. What coding the mean lost is added to it, times Σw / w of the
    owner: sent with that weight in a later round, it moves the mean by just what was lost. An owner of weight 0 keeps
    nothing of a round, so there it is left alone.
    watch: called with the decoded values of all replicas (zeros for weight 0), a cache-sized part at a time.
    """
    coded = torch.empty(-(-numel // codec.block) * codec.block_bytes, dtype=torch.uint8, device=payloads[0].device)
    for part in _chunks(numel, codec):
        rows = [
            codec.decode(payload[part.payload], part.numel)
            if weight > 0
            else torch.zeros(part.numel, device=coded.device)
            for payload, weight in zip(payloads, weights, strict=True)
        ]
        if watch is not None:
            watch(rows)
        mean = weighted_mean(rows, weights)
        coded[part.payload] = codec.encode(mean)
        if owed is not None and weights[owner] > 0:
            mean -= codec.decode(coded[part.payload], part.numel)
            owed[part.elements] += mean.mul_(sum(weights) / weights[owner])
    return coded


def _chunks(numel: int, codec: Codec) -> list[CodedSlice]:
    """Parts of about `CODED_CHUNK` elements."""
    return coded_slices(numel, codec, max(1, -(-numel // max(CODED_CHUNK, codec.block))))


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float], *, out: Tensor | None = None) -> Tensor:
    """Σ wᵢ xᵢ / Σ wᵢ over the replicas with wᵢ > 0, summed in fp32 in replica order, as fp32.

    A replica of weight 0 is left out, not multiplied by 0: its NaN cannot reach the result. The divisor is those who
    contributed. Weights are divided by the largest first: equal weights give the plain sum over the plain count.

    >>> weighted_mean([torch.tensor([1.0]), torch.tensor([4.0]), torch.tensor([float("nan")])], [1, 2, 0])
    tensor([3.])
    """
    top = max(weights)
    if not top > 0:
        raise AssertionError("a mean needs at least one contributor of positive weight")
    shares = [(tensor, weight / top) for tensor, weight in zip(tensors, weights, strict=True) if weight > 0]
    total = sum(share for _, share in shares)
    first, share = shares[0]
    if out is None:
        out = torch.empty(first.shape, dtype=torch.float32, device=first.device)
    out.copy_(first)
    if share != 1:
        out.mul_(share)
    for tensor, share in shares[1:]:
        out.add_(tensor.to(torch.float32), alpha=share)
    return out if total == 1 else out.div_(total)
