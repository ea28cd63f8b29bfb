"""Low-rank averaging of matrices (PowerSGD, arXiv 1905.13727, in the form DiLoCoX uses, arXiv 2506.21263).

    M = δ + e                                  n × m, this replica's; Q is the last round's Q', the same on all
    P = mean(M Q);  orthogonalise P            n × r
    Q' = mean(Mᵀ P)                            m × r
    Δ = P Q'ᵀ;  e = M − P Q'_ownᵀ

For a shared Q all is linear in M, so means go by owners and slices, at 2(M−1)/M payloads. Factors are kept and sent as
rows, (r, n) and (r, m): what an inner compressor codes together belongs to one direction and has one size.

The same bits everywhere. All replicas hold the same P and Q' after their means, but each orthogonalises and multiplies
by itself, and that would not give the same bits: a sum of products is rounded in the order in which a BLAS, its
number of threads and the width of the processor's registers happen to add. One bit is enough for anchors to part. So
where replicas must agree, factors are rounded to whole numbers so short that a product of them is *exact* in fp64:
with nothing rounded, no order is better than another (`exact_matmul`). What is left (Gram-Schmidt on r × r numbers) is
elementwise. What only this replica uses (M Q, Mᵀ P, the residual) goes through the fast BLAS.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.compress.base import Compressor, unmeasured
from atoll.compress.feedback import Feedback
from atoll.exchange import Exchange, State

WARM_START = "warm_start"  # (r, m): Q' of the last committed round, the same bytes on all replicas
_LARGEST = 1e30  # values are clamped to this: no product of theirs overflows
_DEPENDENT = 2.0**-28  # what is left of a row's square, as a share, below which it is taken to depend on those before
_EXACT_BITS = 53  # of fp64
_ROWS_ELEMENTS = 1 << 18  # a product is made some rows at a time, so that its fp64 form stays small


@dataclass(frozen=True)
class LowRank:
    """Average matrices as factors of `rank`; all other tensors, and matrices that would gain little, by `fallback`.

    inner: averages the factors. saving: a matrix is factored where that leaves fewer than 1 / saving of its elements.
    Tensors are looked at whole. A part of a matrix (a shard) is a matrix like any other.
    """

    rank: int
    inner: Compressor
    fallback: Compressor
    saving: float = 2.0
    elementwise = False
    needs_feedback = True

    def factors(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of `shape` travels as factors."""
        return len(shape) == 2 and (shape[0] + shape[1]) * self.rank * self.saving < math.prod(shape)

    def init(self, shape: Sequence[int]) -> State:
        return {WARM_START: first_directions(self.rank, shape[1])} if self.factors(shape) else {}

    def average(self, tensor: Tensor, state: State, *, owed: Tensor | None = None) -> Exchange:
        if not self.factors(tensor.shape):
            mean, _ = yield from self.fallback.average(tensor, {}, owed=owed)
            return mean, state
        matrix = tensor.detach().to(torch.float32).clamp(-_LARGEST, _LARGEST)
        warm_start = resize_state(state, self.rank, matrix.shape)[WARM_START]
        directions = self._directions(warm_start.to(matrix.device))
        left, _ = yield from unmeasured(self.inner.average(directions @ matrix.T, {}))
        left = orthonormal_rows(left)
        own = left @ matrix
        missed = None if owed is None else torch.empty_like(own)
        right, _ = yield from self.inner.average(own, {}, owed=missed)
        if owed is not None and missed is not None:
            torch.addmm(tensor.to(torch.float32), left.T, own - missed, alpha=-1, out=owed)
        return exact_matmul(left.T, right), state | {WARM_START: right}

    def payload_bytes(self, shape: Sequence[int]) -> int:
        if not self.factors(shape):
            return self.fallback.payload_bytes(shape)
        return sum(self.inner.payload_bytes((self.rank, side)) for side in shape)

    def sent_bytes(self, shape: Sequence[int], *, num_replicas: int, replica: int) -> int:
        size = {"num_replicas": num_replicas, "replica": replica}
        if not self.factors(shape):
            return self.fallback.sent_bytes(shape, **size)
        return sum(self.inner.sent_bytes((self.rank, side), **size) for side in shape)

    def _directions(self, warm_start: Tensor) -> Tensor:
        """(rank, m): the warm start in rows of one size, none of them zero.

        A direction that the last round did not find (a zero row) begins anew, or it would stay zero for ever.
        """
        fresh = first_directions(self.rank, warm_start.shape[1]).to(warm_start.device)
        sizes = warm_start.abs().amax(1, keepdim=True)
        return torch.where(sizes > 0, warm_start / sizes.clamp(min=1e-36), fresh)


def largest_rank(shape: Sequence[int], *, saving: float = 2.0) -> int:
    """The largest rank at which a matrix of `shape` is factored; 0 if there is none.

    >>> largest_rank((1024, 1024)), largest_rank((64, 2)), largest_rank((4096, 1024))
    (255, 0, 409)
    """
    if len(shape) != 2 or 0 in shape:
        return 0
    return math.ceil(math.prod(shape) / ((shape[0] + shape[1]) * saving)) - 1


def rank_of(compressor: Compressor) -> int:
    """The rank of a low-rank compressor, also one inside of error feedback; 0 for any other."""
    if isinstance(compressor, Feedback):
        return rank_of(compressor.inner)
    return compressor.rank if isinstance(compressor, LowRank) else 0


def at_rank(compressor: Compressor, rank: int) -> Compressor:
    """The same low-rank compressor at another rank; its states fit at any, see `resize_state`.

    >>> from atoll.compress import build_compressor
    >>> rank_of(at_rank(build_compressor("lowrank+int4"), 3))
    3
    """
    if isinstance(compressor, LowRank):
        return replace(compressor, rank=rank)
    if isinstance(compressor, Feedback):
        return replace(compressor, inner=at_rank(compressor.inner, rank))
    return compressor


def resize_state(state: State, rank: int, shape: Sequence[int]) -> State:
    """The state of a matrix of `shape` at `rank`, made of its state at any other rank, the same on every machine.

    Its first directions matter most: a fall of the rank cuts the last ones, a rise adds those that a matrix begins
    with. A matrix that was not factored so far begins with these alone. What else there is (a residual) stays.

    >>> state = {WARM_START: torch.ones(2, 5), "own.residual": torch.zeros(3, 5)}
    >>> [{key: tuple(value.shape) for key, value in resize_state(state, rank, (3, 5)).items()} for rank in (1, 4)]
    [{'warm_start': (1, 5), 'own.residual': (3, 5)}, {'warm_start': (4, 5), 'own.residual': (3, 5)}]
    """
    kept = state[WARM_START][:rank] if WARM_START in state else torch.empty(0, shape[1])
    if kept.shape[0] < rank:
        kept = torch.cat([kept, first_directions(rank, shape[1])[kept.shape[0] :].to(kept.device)])
    return state | {WARM_START: kept}


def first_directions(rank: int, length: int) -> Tensor:
    """(rank, length) fp32 in [−1, 1): random, and the same on every machine: drawn as whole numbers."""
    generator = torch.Generator().manual_seed(1_000_003 * length + 17)
    return torch.randint(-(1 << 15), 1 << 15, (rank, length), generator=generator).to(torch.float32) / (1 << 15)


def orthonormal_rows(rows: Tensor) -> Tensor:
    """An orthonormal basis of what the rows of (r, n) span, as (r, n) fp32: the same bits on every machine.

    Row k spans with those before it what rows 0..k did. A row that depends on those before it becomes zero. The Gram
    matrix is exact; from it follows the mixture of rows that is orthonormal; a second turn takes out what the
    rounding of the first one left.

    >>> orthonormal_rows(torch.tensor([[3.0, 4.0], [6.0, 8.0], [1.0, 0.0]]))
    tensor([[ 0.6000,  0.8000],
            [ 0.0000,  0.0000],
            [ 0.8000, -0.6000]])
    """
    for _ in range(2):
        whole, _ = _whole_numbers(rows, 1, _bits(rows.shape[1]))
        gram = whole @ whole.T  # exact
        rows = exact_matmul(_orthonormalising(gram), whole)
    return rows


def _orthonormalising(gram: Tensor) -> Tensor:
    """W, (r, r) lower triangular, with W G Wᵀ = 1, save for zero rows where G is singular. fp64.

    Elimination on [G | 1]: rows of the right half end as L⁻¹ where G = L D Lᵀ. Every operation is elementwise and
    rounded by itself; no sum has an order.
    """
    rank = gram.shape[0]
    squares = gram.diagonal().clone()
    table = torch.cat([gram, torch.eye(rank, dtype=gram.dtype, device=gram.device)], 1)
    for k in range(rank):
        pivot = table[k, k]
        share = torch.where(pivot > squares[k] * _DEPENDENT, table[k + 1 :, k] / pivot, 0.0)
        active = slice(k, rank + k + 1)  # left of it all is eliminated, right of it all is zero
        step = share[:, None] * table[k, active]
        table[k + 1 :, active] -= step
    pivots = table.diagonal()[:rank]
    sizes = torch.where(pivots > squares * _DEPENDENT, 1 / pivots.clamp(min=1e-300).sqrt(), 0.0)
    return table[:, rank:] * sizes[:, None]


def exact_matmul(left: Tensor, right: Tensor) -> Tensor:
    """(n, k) times (k, m) as fp32, the same bits on every machine and with any number of threads.

    Each row of `left` and column of `right` is rounded to whole numbers times a power of two, with so few bits (21 to
    26) that sums of k products fit into the 53 bits of fp64: nothing is rounded until the result is.
    """
    bits = _bits(left.shape[1])
    rows, row_sizes = _whole_numbers(left, 1, bits)
    columns, column_sizes = _whole_numbers(right, 0, bits)
    result = torch.empty(left.shape[0], right.shape[1], dtype=torch.float32, device=left.device)
    step = max(1, _ROWS_ELEMENTS // max(1, right.shape[1]))
    for start in range(0, left.shape[0], step):
        product = rows[start : start + step] @ columns
        result[start : start + step] = product.mul_(row_sizes[start : start + step]).mul_(column_sizes)
    return result


def _bits(length: int) -> int:
    """Bits of two whole numbers so that `length` products of such add up exactly in fp64."""
    return (_EXACT_BITS - math.ceil(math.log2(max(1, length)))) // 2


def _whole_numbers(values: Tensor, dim: int, bits: int) -> tuple[Tensor, Tensor]:
    """(whole, sizes), both fp64, with whole · sizes ≈ values along `dim`; |whole| ≤ 2^bits, sizes are powers of two."""
    values = values.to(torch.float64)
    _, exponents = torch.frexp(values.abs().amax(dim, keepdim=True))  # amax < 2^exponent
    return (values * _power_of_two(bits - exponents)).round_(), _power_of_two(exponents - bits)


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^exponents as fp64, put together from its bits: a library's `pow` may be off by one."""
    return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)
