"""Top-k: of every chunk only the values of largest magnitude travel, each with its 12-bit index (arXiv 2508.15706).

A chunk is a square block of a matrix whose sides the block's side divides (64 × 64 for 4,096 elements), otherwise a run
of a tensor's elements. 64 of each 4,096 with 2-bit values are 14 bits each, 0.219 bits a parameter. Where replicas keep
different elements there is nothing to sum on the way: payloads are gathered and every replica adds them up.

    payload    [indices: 12 bits, two in three bytes][values: fp32, or 2 bits with a codebook a 4,096 of them]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from atoll.compress.base import flat_fp32, gathered_mean
from atoll.compress.codecs import Code
from atoll.exchange import Exchange, Gather, State

LARGEST_CHUNK = 4096  # what 12 bits can count
_VALUES_A_CODEBOOK = 4096


@dataclass(frozen=True)
class Fp32:
    """Values as they are."""

    def row_bytes(self, length: int) -> int:
        return 4 * length

    def encode(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(rows.contiguous().view(torch.uint8))

    def decode(self, coded: Tensor, out: Tensor) -> None:
        out.copy_(coded.reshape(-1).clone().view(torch.float32).view(out.shape))


@dataclass(frozen=True)
class TopK:
    """Average the `k` largest of each `chunk` elements; of a shorter last chunk as large a share, rounded up.

    Ties go to the first element. values: how those kept are coded.

    >>> exchange = TopK(k=1, chunk=4).average(torch.tensor([1.0, -3.0, 2.0, 3.0, 5.0]), {})
    >>> next(exchange).payload.tolist()  # indices 1 and 0, then −3 and 5
    [1, 0, 0, 0, 0, 64, 192, 0, 0, 160, 64]
    """

    k: int = 64
    chunk: int = LARGEST_CHUNK
    values: Code = Fp32()
    elementwise = False
    needs_feedback = True

    def init(self, shape: Sequence[int]) -> State:
        return {}

    def average(self, tensor: Tensor, state: State, *, owed: Tensor | None = None) -> Exchange:
        shape = tensor.shape
        payload = self._encode(self._in_chunks(flat_fp32(tensor), shape))
        if owed is not None:
            torch.sub(tensor, self._decode(payload, shape), out=owed)
        gathered = yield Gather(payload)
        return gathered_mean(gathered, lambda coded: self._decode(coded, shape)), state

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return self._index_bytes(num_kept := self._num_kept(math.prod(shape))) + self._value_bytes(num_kept)

    def sent_bytes(self, shape: Sequence[int], *, num_replicas: int, replica: int) -> int:
        return self.payload_bytes(shape) * (num_replicas - 1)

    # --- chunks

    def _side(self, shape: Sequence[int]) -> int:
        """Of the square blocks a tensor of `shape` is cut into, or 0."""
        side = math.isqrt(self.chunk)
        squares = side * side == self.chunk and len(shape) == 2 and math.prod(shape) > 0
        return side if squares and shape[0] % side == 0 and shape[1] % side == 0 else 0

    def _in_chunks(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
        """The elements in the order in which chunks take them; flat."""
        side = self._side(shape)
        if not side:
            return flat
        blocks = flat.view(shape[0] // side, side, shape[1] // side, side)
        return blocks.transpose(1, 2).reshape(-1)

    def _from_chunks(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
        side = self._side(shape)
        if not side:
            return flat.view(tuple(shape))
        blocks = flat.view(shape[0] // side, shape[1] // side, side, side)
        return blocks.transpose(1, 2).reshape(tuple(shape))

    def _num_kept_of(self, length: int) -> int:
        return -(-self.k * length // self.chunk)

    def _num_kept(self, numel: int) -> int:
        return numel // self.chunk * self.k + self._num_kept_of(numel % self.chunk)

    # --- payload

    def _index_bytes(self, num_kept: int) -> int:
        return -(-3 * num_kept // 2)

    def _value_bytes(self, num_kept: int) -> int:
        full, rest = divmod(num_kept, _VALUES_A_CODEBOOK)
        row_bytes = self.values.row_bytes
        return full * row_bytes(_VALUES_A_CODEBOOK) + (row_bytes(rest) if rest else 0)

    def _encode(self, flat: Tensor) -> Tensor:
        full = flat.numel() // self.chunk * self.chunk
        parts = [flat[:full].view(-1, self.chunk), flat[full:].view(1, -1)]
        kept = [(part, largest(part, self._num_kept_of(part.shape[1]))) for part in parts if part.numel()]
        if not kept:
            return torch.empty(0, dtype=torch.uint8, device=flat.device)
        indices = torch.cat([index.reshape(-1) for _, index in kept])
        values = torch.cat([part.gather(1, index).reshape(-1) for part, index in kept])
        return torch.cat([pack_12_bits(indices), self._encode_values(values)])

    def _decode(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        numel = math.prod(shape)
        num_kept = self._num_kept(numel)
        cut = self._index_bytes(num_kept)
        indices = unpack_12_bits(payload[:cut], num_kept)
        full = numel // self.chunk
        chunks = torch.arange(num_kept, device=payload.device) // self.k
        flat = torch.zeros(numel, dtype=torch.float32, device=payload.device)
        flat[chunks.clamp_(max=full) * self.chunk + indices] = self._decode_values(payload[cut:], num_kept)
        return self._from_chunks(flat, shape)

    def _encode_values(self, values: Tensor) -> Tensor:
        coded = torch.empty(self._value_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        for row, out in self._value_rows(values, coded):
            self.values.encode(row, out)
        return coded

    def _decode_values(self, coded: Tensor, num_kept: int) -> Tensor:
        values = torch.empty(num_kept, dtype=torch.float32, device=coded.device)
        for row, part in self._value_rows(values, coded):
            self.values.decode(part, row)
        return values

    def _value_rows(self, values: Tensor, coded: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Values and their codes, side by side: whole rows with a codebook each, then the rest."""
        full = values.numel() // _VALUES_A_CODEBOOK
        cut = full * self.values.row_bytes(_VALUES_A_CODEBOOK)
        rows = [(values[: full * _VALUES_A_CODEBOOK].view(full, -1), coded[:cut].view(full, -1))] if full else []
        if values.numel() % _VALUES_A_CODEBOOK:
            rows.append((values[full * _VALUES_A_CODEBOOK :].view(1, -1), coded[cut:].view(1, -1)))
        return rows


def largest(rows: Tensor, k: int) -> Tensor:
    """(rows, k) int64: where the k largest magnitudes of each row of up to 4,096 lie, in rising order.

    Equal magnitudes are told apart by their place, the first wins: no two keys are equal, so that no implementation of
    top-k has a choice.
    """
    length = rows.shape[1]
    places = torch.arange(length - 1, -1, -1, device=rows.device)
    keys = (rows.abs().contiguous().view(torch.int32).to(torch.int64) << 12).bitwise_or_(places)
    best = torch.topk(keys, k, dim=1, sorted=False).values
    return (length - 1 - (best & 0xFFF)).sort(dim=1).values


def pack_12_bits(numbers: Tensor) -> Tensor:
    """(n,) integers below 4,096 in ⌈3n/2⌉ bytes.

    >>> pack_12_bits(torch.tensor([0xABC, 0x123, 0x7FF])).tolist() == [0xBC, 0x3A, 0x12, 0xFF, 0x07]
    True
    """
    even = pad(numbers, (0, numbers.numel() % 2)).view(-1, 2)
    first, second = even[:, 0], even[:, 1]
    packed = torch.stack([first & 0xFF, (first >> 8) | ((second & 0xF) << 4), second >> 4], dim=1)
    return packed.to(torch.uint8).view(-1)[: -(-3 * numbers.numel() // 2)]


def unpack_12_bits(packed: Tensor, count: int) -> Tensor:
    """(count,) int64: what `pack_12_bits` packed."""
    triples = pad(packed, (0, packed.numel() % 3 and 1)).view(-1, 3).to(torch.int64)
    first = triples[:, 0] | ((triples[:, 1] & 0xF) << 8)
    second = (triples[:, 1] >> 4) | (triples[:, 2] << 4)
    return torch.stack([first, second], dim=1).view(-1)[:count]
