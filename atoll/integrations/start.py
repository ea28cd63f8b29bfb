"""Replicas begin alike, or are made to.

Each replica states facts: its settings, the shapes of its tensors, fingerprints of their values. One small message
tells whether all state the same; only when they do not do the facts themselves travel, so that the first that differs
can be named.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from atoll.comm.base import Transport
from atoll.exchange import Exchange, Mean
from atoll.integrations.connect import exchange

CHUNK_BYTES = 1 << 22
_SUMMARY = struct.Struct("<16sq")


@dataclass(frozen=True)
class Difference:
    """The first fact that two replicas state differently. mine, theirs: "key: value" of replica 0 and of `replica`."""

    key: str
    mine: str
    replica: int
    theirs: str

    def __str__(self) -> str:
        return f"replica 0 has {self.mine}, replica {self.replica} has {self.theirs}"


def first_difference(transport: Transport, facts: Mapping[str, str]) -> Difference | None:
    """Compare `facts` with those of the other replicas; the same answer everywhere, None if all are equal."""
    text = json.dumps(list(facts.items())).encode()
    seen = exchange(transport, _SUMMARY.pack(xxhash.xxh3_128_digest(text), len(text)))
    if len(set(seen)) == 1:
        return None
    longest = max(_SUMMARY.unpack(summary)[1] for summary in seen)
    stated = [json.loads(text) for text in exchange(transport, text.ljust(longest))]
    other = next(replica for replica, facts_there in enumerate(stated) if facts_there != stated[0])
    return _compare(stated[0], stated[other], other)


def _compare(ours: list[list[str]], theirs: list[list[str]], replica: int) -> Difference:
    nothing = ["nothing more", ""]
    length = max(len(ours), len(theirs))
    ours, theirs = ([*facts, *[nothing] * (length - len(facts))] for facts in (ours, theirs))
    left, right = next((left, right) for left, right in zip(ours, theirs, strict=True) if left != right)
    key = left[0] if left is not nothing else right[0]
    return Difference(key, ": ".join(filter(None, left)), replica, ": ".join(filter(None, right)))


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """xxh3-128 of the values of `tensors`, their dtypes and shapes; 32 hex digits.

    >>> fingerprint([torch.ones(2, 3)]) == fingerprint([torch.ones(3, 2).t()])
    True
    >>> fingerprint([torch.ones(2)]) == fingerprint([torch.ones(2, dtype=torch.bfloat16)])
    False
    """
    state = xxhash.xxh3_128()
    for tensor in tensors:
        state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        state.update(_as_bytes(tensor).cpu().numpy().data)
    return state.hexdigest()


def copy_from_first_(transport: Transport, tensors: Sequence[Tensor]) -> None:
    """Overwrite `tensors` with those of replica 0, bit for bit, whatever their dtype.

    They travel as bytes: a mean in which only replica 0 counts, and every byte is exact in fp32.
    """
    flats = [_as_bytes(tensor).clone() for tensor in tensors]
    chunks = [chunk for flat in flats for chunk in flat.split(CHUNK_BYTES) if chunk.numel()]
    flight = transport.launch(b".", _first_counts, (_average(chunk) for chunk in chunks))
    for chunk, (received, _) in zip(chunks, flight.results(), strict=True):
        chunk.copy_(received)
    flight.traffic()
    for tensor, flat in zip(tensors, flats, strict=True):
        tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _average(chunk: Tensor) -> Exchange:
    mean = yield Mean(chunk)
    return mean, {}


def _first_counts(payloads: Sequence[bytes]) -> list[float]:
    return [1.0] + [0.0] * (len(payloads) - 1)
