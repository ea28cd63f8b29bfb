"""What compressors can be told, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.compress.lowrank import largest_rank
from atoll.compress.quantize import Reduction
from atoll.compress.topk import LARGEST_CHUNK
from atoll.errors import ConfigError

RESIDUAL_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class CompressorOptions:
    """rank: of low-rank factors. topk, chunk: elements kept of how many.

    reduction: of int8, int4, fp4 and stat2, see `quantize.py`; None: gather for stat2, requantise for the others.
    feedback: whether what a contribution leaves out is owed to the next; None: as the method needs. feedback_beta:
    share of it that is kept. residual_dtype: what is owed is held in.
    """

    rank: int = 64
    topk: int = 64
    chunk: int = LARGEST_CHUNK
    reduction: Reduction | None = None
    feedback: bool | None = None
    feedback_beta: float = 1.0
    residual_dtype: str = "float32"

    def __post_init__(self) -> None:
        _check("rank", self.rank, self.rank >= 1, rule="a factor has at least one row", remedy="64")
        _check("chunk", self.chunk, 1 <= self.chunk <= LARGEST_CHUNK, rule="an index has 12 bits", remedy="4096")
        _check(
            "topk",
            self.topk,
            1 <= self.topk <= self.chunk,
            rule=f"chunk={self.chunk}",
            remedy=f"{self.chunk // 64 or 1}",
        )
        share = self.feedback_beta
        _check("feedback_beta", share, 0 < share <= 1, rule="it is a share, above 0 and at most 1", remedy="1.0")
        known = self.residual_dtype in RESIDUAL_DTYPES
        _check("residual_dtype", self.residual_dtype, known, rule="known are float32, bfloat16", remedy="float32")
        known = self.reduction in (None, "requantise", "gather")
        _check("reduction", self.reduction, known, rule="known are requantise, gather", remedy="gather")


def _check(name: str, value: object, holds: bool, *, rule: str, remedy: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value!r} cannot be used: {rule}. Use {name}={remedy}.")


def check_rank(rank: int, shapes: Iterable[Sequence[int]]) -> list[str]:
    """Warnings about matrices that `rank` is too large for; ConfigError if there is no other matrix.

    >>> check_rank(64, [(512, 512), (128, 64), (512,)])
    ['rank=64 is too large for matrices of 128×64: they are sent by the fallback. rank=21 would factor them too.']
    """
    matrices = sorted({tuple(shape) for shape in shapes if len(shape) == 2 and 0 not in shape}, key=largest_rank)
    too_small = [shape for shape in matrices if largest_rank(shape) < rank]
    if not too_small:
        return []
    if len(too_small) == len(matrices):
        rows, columns = matrices[-1]
        best = largest_rank(matrices[-1])
        way_out = f"Use rank={best} or less." if best else "Use another compressor, such as int4."
        raise ConfigError(
            f"rank={rank} is too large for every matrix of this model: factors of the largest, {rows}×{columns}, would "
            f"not be half its size (n·m > 2·rank·(n+m)). {way_out}"
        )
    names = ", ".join(f"{rows}×{columns}" for rows, columns in too_small[:3]) + (" ..." if len(too_small) > 3 else "")
    smallest = next((largest_rank(shape) for shape in too_small if largest_rank(shape)), 0)
    more = f" rank={smallest} would factor them too." if smallest else ""
    return [f"rank={rank} is too large for matrices of {names}: they are sent by the fallback.{more}"]
