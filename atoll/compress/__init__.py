"""Compressors by name. A new one is a file in this folder and a line in `COMPRESSORS`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from atoll.compress.base import Compressor, bits_per_parameter, settle, shared_part
from atoll.compress.cast import Cast
from atoll.compress.codecs import Blocks, Fp4, Int4, Int8, Stat2
from atoll.compress.feedback import Feedback
from atoll.compress.lowrank import LowRank, at_rank, rank_of
from atoll.compress.options import CompressorOptions, check_rank
from atoll.compress.quantize import Quantized, fastest_reduction, predicted_seconds
from atoll.compress.topk import TopK
from atoll.errors import ConfigError, nearest

IDENTITY = Cast(torch.float32)
INT8 = Blocks(Int8(), 1024)
INT4 = Blocks(Int4(), 128)
FP4 = Blocks(Fp4(), 128)
STAT2 = Blocks(Stat2(), 4096)

HIGH_MOMENTUM = 0.6  # beyond it low rank with feedback may diverge (docs/compressors.md)

# name: how to make it of the options. Error feedback comes on top, see `build_compressor`.
COMPRESSORS: dict[str, Callable[[CompressorOptions], Compressor]] = {
    "identity": lambda options: IDENTITY,
    "bf16": lambda options: Cast(torch.bfloat16),
    "fp16": lambda options: Cast(torch.float16),
    "int8": lambda options: Quantized(INT8, options.reduction or "requantise"),
    "int4": lambda options: Quantized(INT4, options.reduction or "requantise"),
    "fp4": lambda options: Quantized(FP4, options.reduction or "requantise"),
    "stat2": lambda options: Quantized(STAT2, options.reduction or "gather", needs_feedback=True),
    "topk": lambda options: TopK(options.topk, options.chunk),
    "topk+stat2": lambda options: TopK(options.topk, options.chunk, Stat2()),
    "lowrank": lambda options: LowRank(options.rank, IDENTITY, IDENTITY),
    "lowrank+int4": lambda options: LowRank(options.rank, Quantized(INT4), Quantized(INT4)),
}


def build_compressor(name: str, options: CompressorOptions | None = None) -> Compressor:
    """The compressor `name` with `options`, with error feedback where asked for, or where it needs that.

    >>> build_compressor("int4").needs_feedback, type(build_compressor("topk")).__name__
    (False, 'Feedback')
    """
    options = options or CompressorOptions()
    if name not in COMPRESSORS:
        known = ", ".join(COMPRESSORS)
        raise ConfigError(f"compressor={name!r} is not known.{nearest(name, COMPRESSORS)} Known: {known}.")
    compressor = COMPRESSORS[name](options)
    wanted = compressor.needs_feedback if options.feedback is None else options.feedback
    if not wanted:
        return compressor
    return Feedback(compressor, options.feedback_beta, getattr(torch, options.residual_dtype))


def check_compressor(
    name: str,
    options: CompressorOptions | None = None,
    *,
    shapes: Iterable[Sequence[int]] = (),
    outer_momentum: float = 0.0,
) -> list[str]:
    """Warnings about settings that train badly, each with the value that would do. ConfigError for impossible ones.

    shapes: of all parameters. outer_momentum: of the outer optimizer.

    >>> check_compressor("topk", CompressorOptions(feedback=False), outer_momentum=0.9)[0]
    'compressor=topk without error feedback loses most of each pseudo-gradient for good. Use error_feedback=true.'
    """
    options = options or CompressorOptions()
    warnings = []
    compressor = build_compressor(name, options)
    if compressor.needs_feedback:
        warnings.append(
            f"compressor={name} without error feedback loses most of each pseudo-gradient for good. "
            "Use error_feedback=true."
        )
    if name.startswith("topk") and outer_momentum > 0:
        warnings.append(
            f"outer_momentum={outer_momentum:g} with compressor={name}: what feedback sends late is pushed on for many "
            "more rounds. Use outer_momentum=0."
        )
    inner = compressor.inner if isinstance(compressor, Feedback) else compressor
    if isinstance(inner, LowRank) and isinstance(compressor, Feedback) and outer_momentum > HIGH_MOMENTUM:
        warnings.append(
            f"outer_momentum={outer_momentum:g} with compressor={name}: what feedback sends late is pushed on for many "
            f"more rounds, and may swing ever further. Use outer_momentum={HIGH_MOMENTUM:g} or less."
        )
    shapes = list(shapes)
    if isinstance(inner, LowRank) and shapes:
        warnings += check_rank(inner.rank, shapes)
    return warnings


__all__ = [
    "COMPRESSORS",
    "IDENTITY",
    "Blocks",
    "Cast",
    "Compressor",
    "CompressorOptions",
    "Feedback",
    "LowRank",
    "Quantized",
    "TopK",
    "at_rank",
    "bits_per_parameter",
    "build_compressor",
    "check_compressor",
    "fastest_reduction",
    "predicted_seconds",
    "rank_of",
    "settle",
    "shared_part",
]
