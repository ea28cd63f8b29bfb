"""How a block of fp32 values becomes bytes: int8, int4, fp4 (E3M0) and 2-bit statistical.

A `Code` treats one block a row: a head with the block's scale or codebook, then the codes. `Blocks` makes of it a
`Codec` for tensors of any length. Codes really are packed: an int4 takes half a byte.

    code     head a block        codes a byte   usual block   bits a value
    Int8     amax, fp32          1              1,024         8.03
    Int4     amax, bf16          2              128           4.13
    Fp4      amax, bf16          2              128           4.13
    Stat2    4 values, fp32      4              4,096         2.03

What is kept is the block's largest magnitude (amax), not amax / 7 or the like: short numbers stay exact. In 16 bits it
is a bfloat16: as many bytes as fp16, but no block is ever too small or too large for it, and what it loses in precision
is a small part of what the codes lose. Both ends compute with the rounded one.

Decoding is one table look-up or multiplication a value with no choice in how it rounds: every machine decodes the same
bytes to the same bits. Finite values never decode to NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from atoll.compress.fused import fused, is_fused

CHUNK_ELEMENTS = 1 << 16  # rows are coded this many elements at a time: values and codes stay in the L2 cache
_TINY = 1e-36  # blocks below this are all zero in code: the reciprocal of their scale would not be finite
_LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.bfloat16)}


class Code(Protocol):
    """How one block is coded. `encode` and `decode` take many blocks at once, one a row."""

    def __hash__(self) -> int: ...

    def row_bytes(self, length: int) -> int:
        """Bytes of a block of `length` values."""
        ...

    def encode(self, rows: Tensor, out: Tensor) -> None:
        """(blocks, length) fp32 into (blocks, row_bytes(n)) uint8 for some n ≥ length; the rest counts as unused."""
        ...

    def decode(self, coded: Tensor, out: Tensor) -> None:
        """(blocks, row_bytes(length)) uint8 into (blocks, length) fp32."""
        ...


@dataclass(frozen=True)
class Blocks:
    """A `Codec`: flat tensors in blocks of `block` values, each coded by `code`.

    >>> codec = Blocks(Int8(), block=4)
    >>> payload = codec.encode(torch.tensor([127.0, -3.0, 0.0, 64.2, 5.0]))
    >>> payload.shape, codec.decode(payload, 5)
    (torch.Size([16]), tensor([127.,  -3.,   0.,  64.,   5.]))
    """

    code: Code
    block: int

    @property
    def block_bytes(self) -> int:
        return self.code.row_bytes(self.block)

    def encode(self, flat: Tensor) -> Tensor:
        num_blocks = -(-flat.numel() // self.block)
        payload = torch.empty(num_blocks * self.block_bytes, dtype=torch.uint8, device=flat.device)
        coded = payload.view(num_blocks, self.block_bytes)
        code = self._code_on(flat.device)
        for blocks in self._chunks(flat.numel(), flat.device):
            code.encode(self._rows(flat, blocks), coded[blocks])
        return payload

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        flat = torch.empty(numel, dtype=torch.float32, device=payload.device)
        coded = payload.view(-1, self.block_bytes)
        code = self._code_on(flat.device)
        for blocks in self._chunks(numel, flat.device):
            rows = self._rows(flat, blocks)
            if rows.shape[1] == self.block:
                code.decode(coded[blocks], rows)
            else:
                whole = rows.new_empty(1, self.block)
                code.decode(coded[blocks], whole)
                rows.copy_(whole[:, : rows.shape[1]])
        return flat

    def _code_on(self, device: torch.device) -> Code:
        return fused(self.code) if is_fused(device) else self.code

    def _chunks(self, numel: int, device: torch.device) -> Iterator[slice]:
        """Full blocks some at a time, where kernels are fused all of them, then the last one if it is not full."""
        full, rest = divmod(numel, self.block)
        step = max(1, full if is_fused(device) else CHUNK_ELEMENTS // self.block)
        for first in range(0, full, step):
            yield slice(first, min(first + step, full))
        if rest:
            yield slice(full, full + 1)

    def _rows(self, flat: Tensor, blocks: slice) -> Tensor:
        """A view of those blocks of `flat`, one a row."""
        part = flat[blocks.start * self.block : blocks.stop * self.block]
        return part.view(blocks.stop - blocks.start, -1)


@dataclass(frozen=True)
class Int8:
    """Nearest of −127..127 times amax / 127: an error of at most amax / 254. [amax: fp32][codes: int8]"""

    def row_bytes(self, length: int) -> int:
        return 4 + length

    def encode(self, rows: Tensor, out: Tensor) -> None:
        amax = _amax(rows, torch.float32)
        levels = _levels(rows, amax, largest=127)
        out[:, :4] = amax.view(torch.uint8)
        out[:, 4:].view(torch.int8).copy_(_filled(levels, out.shape[1] - 4))

    def decode(self, coded: Tensor, out: Tensor) -> None:
        scale = _head(coded, 4, torch.float32) * (1 / 127)
        out.copy_(coded[:, 4:].view(torch.int8)).mul_(scale)


@dataclass(frozen=True)
class Int4:
    """Nearest of −7..7 times amax / 7: an error of at most amax / 14 (DiLoCoX, arXiv 2506.21263).

    [amax: bf16][first half of the block + 16 · second half: int8]
    """

    def row_bytes(self, length: int) -> int:
        return 2 + -(-length // 2)

    def encode(self, rows: Tensor, out: Tensor) -> None:
        half = out.shape[1] - 2
        amax = _amax(rows, torch.bfloat16)
        levels = _filled(_levels(rows, amax.float(), largest=7), 2 * half)
        out[:, :2] = amax.view(torch.uint8)
        out[:, 2:].view(torch.int8).copy_(torch.add(levels[:, :half], levels[:, half:], alpha=16))

    def decode(self, coded: Tensor, out: Tensor) -> None:
        half = coded.shape[1] - 2
        scale = _head(coded, 2, torch.bfloat16).float() * (1 / 7)
        pairs = coded[:, 2:].view(torch.int8).to(torch.float32)
        second = (pairs * (1 / 16)).round_()  # the first is less than half of 16, so this is exact
        pairs.sub_(second, alpha=16)
        _multiply(pairs, scale, out[:, :half])
        _multiply(second[:, : out.shape[1] - half], scale, out[:, half:])


@dataclass(frozen=True)
class Fp4:
    """E3M0, a sign and three bits of exponent: the nearest of 0 and ±amax · 2⁻ᵏ, k = 0..6.

    An error of at most a third of the value, or amax · 2⁻⁷ (Streaming DiLoCo, arXiv 2501.18512).
    [amax: bf16][first half of the block + 16 · second half: uint8]; a code is 8 · negative + (0, or 7 − k).
    """

    def row_bytes(self, length: int) -> int:
        return 2 + -(-length // 2)

    def encode(self, rows: Tensor, out: Tensor) -> None:
        half = out.shape[1] - 2
        amax = _amax(rows, torch.bfloat16)
        codes = _filled(self._codes(rows, amax.float()), 2 * half)
        out[:, :2] = amax.view(torch.uint8)
        out[:, 2:] = codes[:, :half] + (codes[:, half:] << 4)

    def _codes(self, rows: Tensor, amax: Tensor) -> Tensor:
        """Adding half a mantissa carries into the exponent from 1.5 up: between two powers of 2, that is the nearer."""
        bits = (rows * (1 / amax.clamp(min=_TINY))).abs_().clamp_(max=1).view(torch.int32)
        codes = ((bits + (1 << 22)) >> 23).sub_(127 - 7).clamp_(0, 7)
        nearer_to_the_least_than_to_0 = torch.ge(bits, (127 - 7) << 23, out=torch.empty_like(bits))
        codes = torch.maximum(codes, nearer_to_the_least_than_to_0)
        return codes.bitwise_or_((rows.contiguous().view(torch.int32) >> 28) & 8)

    def decode(self, coded: Tensor, out: Tensor) -> None:
        half = coded.shape[1] - 2
        amax = _head(coded, 2, torch.bfloat16).float()
        powers = [0.0, *(2.0**-k for k in range(6, -1, -1))]
        table = torch.tensor([*powers, *(-power for power in powers)], device=coded.device)
        pairs = coded[:, 2:].to(torch.int32)
        _multiply(_look_up(table, pairs & 15), amax, out[:, :half])
        _multiply(_look_up(table, pairs[:, : out.shape[1] - half] >> 4), amax, out[:, half:])


@dataclass(frozen=True)
class Stat2:
    """Two bits: which quarter of mean ± 3σ a value lies in, sent as the mean of all values there (arXiv 2508.15706).

    The bins have the width 1.5σ; the outer ones go on for ever. Their means keep the sum of a block as it was.
    [4 bin means: fp32][codes 0..3, first + 4 · second + 16 · third + 64 · fourth quarter of the block: uint8]
    """

    def row_bytes(self, length: int) -> int:
        return 16 + -(-length // 4)

    def encode(self, rows: Tensor, out: Tensor) -> None:
        quarter = out.shape[1] - 16
        amax = _amax(rows, torch.float32)
        shares = rows * (1 / amax.clamp(min=_TINY))  # so that squares neither vanish nor overflow
        codes = self._codes(shares)
        out[:, :16] = (self._bin_means(shares, codes) * amax).view(torch.uint8)
        first, second, third, fourth = _filled(codes, 4 * quarter).view(-1, 4, quarter).unbind(1)
        out[:, 16:] = torch.add(first.add(second, alpha=4), third.add(fourth, alpha=4), alpha=16)

    def _codes(self, values: Tensor) -> Tensor:
        """(blocks, length) values as 0.0, 1.0, 2.0 or 3.0; a block that is constant as 2.0."""
        centred = values - values.mean(1, keepdim=True)
        sigma = centred.square().mean(1, keepdim=True).sqrt_()
        return centred.mul_(1 / (1.5 * sigma).clamp(min=_TINY)).floor_().add_(2).clamp_(0, 3)

    def _bin_means(self, values: Tensor, codes: Tensor) -> Tensor:
        """(blocks, 4): the mean of the values in each bin, 0 for an empty one."""
        means, inside = values.new_empty(values.shape[0], 4), torch.empty_like(values)
        for number in range(4):
            torch.eq(codes, number, out=inside)
            means[:, number] = (inside * values).sum(1) / inside.sum(1).clamp_(min=1)
        return means

    def decode(self, coded: Tensor, out: Tensor) -> None:
        quarter = coded.shape[1] - 16
        means = _head(coded, 16, torch.float32)
        for number in range(4):
            part = out[:, number * quarter : (number + 1) * quarter]
            codes = (coded[:, 16 : 16 + part.shape[1]] >> (2 * number)) & 3
            part.copy_(means.gather(1, codes.to(torch.int64)))


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Into `out`, which may be a view; compiled kernels take no such `out`, and need none."""
    if torch.compiler.is_compiling():
        out.copy_(left * right)
    else:
        torch.mul(left, right, out=out)


def _amax(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """(blocks, 1): the largest magnitude of each row, finite, in `dtype`."""
    return rows.abs().amax(1, keepdim=True).clamp_(max=_LARGEST[dtype]).to(dtype)


def _levels(rows: Tensor, amax: Tensor, *, largest: int) -> Tensor:
    """Rows in units of amax / largest, to the nearest whole number."""
    return (rows * (largest / amax.clamp(min=_TINY))).round_().clamp_(-largest, largest)


def _head(coded: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The first `width` bytes of each block as numbers: a copy, as they may lie anywhere."""
    return coded[:, :width].reshape(-1).clone().view(dtype).view(coded.shape[0], -1)


def _filled(rows: Tensor, length: int) -> Tensor:
    return rows if rows.shape[1] == length else pad(rows, (0, length - rows.shape[1]))


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    return table.index_select(0, codes.reshape(-1)).view(codes.shape)
