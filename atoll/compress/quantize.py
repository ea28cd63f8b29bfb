"""Averaging values that travel as codes of a few bits, in one of two ways.

    requantise   the owner of each slice decodes all contributions, averages in fp32 and codes the mean once more
                 sent: 2(M−1)/M payloads, as a ring; two roundings
    gather       every replica receives all codes and averages what they stand for
                 sent: M−1 payloads; one rounding, one wait less

Both send one payload with two replicas; with more, requantising sends less. Codes cannot be summed on the way, as
Q(a) + Q(b) is not Q(a + b). Every replica decodes the same bytes in the same order, so all get the same mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from atoll.compress.base import flat_fp32, gathered_mean
from atoll.exchange import Codec, CodedMean, Exchange, Gather, State, coded_mean_sent_bytes

Reduction = Literal["requantise", "gather"]
_REDUCTIONS: tuple[Reduction, ...] = ("gather", "requantise")


@dataclass(frozen=True)
class Quantized:
    """Average values coded by `codec`."""

    codec: Codec
    reduction: Reduction = "requantise"
    needs_feedback: bool = False
    elementwise = True

    def init(self, shape: Sequence[int]) -> State:
        return {}

    def average(self, tensor: Tensor, state: State, *, owed: Tensor | None = None) -> Exchange:
        flat = flat_fp32(tensor)
        payload = self.codec.encode(flat)
        flat_owed = None if owed is None else owed.view(-1)
        if flat_owed is not None:
            torch.sub(flat, self.codec.decode(payload, flat.numel()), out=flat_owed)
        if self.reduction == "gather":
            gathered = yield Gather(payload)
            mean = gathered_mean(gathered, lambda coded: self.codec.decode(coded, flat.numel()))
        else:
            mean = yield CodedMean(payload, self.codec, flat.numel(), flat_owed)
        return mean.view(tensor.shape), state

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return -(-math.prod(shape) // self.codec.block) * self.codec.block_bytes

    def sent_bytes(self, shape: Sequence[int], *, num_replicas: int, replica: int) -> int:
        if self.reduction == "gather":
            return self.payload_bytes(shape) * (num_replicas - 1)
        return coded_mean_sent_bytes(math.prod(shape), self.codec, num_replicas=num_replicas, replica=replica)


def predicted_seconds(
    payload_bytes: float,
    reduction: Reduction,
    *,
    num_replicas: int,
    link_bytes_per_s: float,
    code_bytes_per_s: float = math.inf,
    latency_s: float = 0.0,
) -> float:
    """Seconds to average one payload over M replicas: what a replica sends, what it decodes, and waits for others.

    code_bytes_per_s: payload bytes that one replica encodes or decodes in a second.

    >>> [predicted_seconds(8e6, way, num_replicas=8, link_bytes_per_s=1e6) for way in ("requantise", "gather")]
    [14.0, 56.0]
    """
    others = num_replicas - 1
    if reduction == "gather":
        return others * payload_bytes / link_bytes_per_s + num_replicas * payload_bytes / code_bytes_per_s + latency_s
    ring = 2 * others / num_replicas
    coded = 2 + 1 / num_replicas  # decode a slice of each, encode a slice, decode the whole mean
    return ring * payload_bytes / link_bytes_per_s + coded * payload_bytes / code_bytes_per_s + 2 * latency_s


def fastest_reduction(
    payload_bytes: float,
    *,
    num_replicas: int,
    link_bytes_per_s: float,
    code_bytes_per_s: float = math.inf,
    latency_s: float = 0.0,
) -> Reduction:
    """The reduction that `predicted_seconds` finds faster; at a draw gathering, which rounds once only.

    >>> [fastest_reduction(8e6, num_replicas=m, link_bytes_per_s=1e6) for m in (2, 3)]
    ['gather', 'requantise']
    """
    seconds = {
        way: predicted_seconds(
            payload_bytes,
            way,
            num_replicas=num_replicas,
            link_bytes_per_s=link_bytes_per_s,
            code_bytes_per_s=code_bytes_per_s,
            latency_s=latency_s,
        )
        for way in _REDUCTIONS
    }
    return min(_REDUCTIONS, key=lambda way: seconds[way])
