"""Codes as fused kernels: on a GPU, `torch.compile` makes of each code one pass over memory instead of some ten.

    decoding   the same bits as the plain code: a table look-up or one multiplication a value, nothing to contract
    encoding   the same sizes and rules; a compiled division may differ in its last bit, and a value that lies within
               that of the middle between two levels then goes to the other one, as may the means of stat2's levels,
               whose sums are in another order

Both ends decode the bytes that were sent, and a replica owes what *its* bytes left out: what a code rounds to decides
how exact a round is, never whether replicas agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from atoll.compress.codecs import Code


def is_fused(device: torch.device) -> bool:
    """Whether codes are compiled on `device`: on GPUs. On a CPU blocks that fit its cache are as fast."""
    return device.type == "cuda"


@dataclass(frozen=True)
class Fused:
    """A `Code` whose two ways are compiled."""

    row_bytes: Callable[[int], int]
    encode: Callable[[Tensor, Tensor], None]
    decode: Callable[[Tensor, Tensor], None]


# Eager arithmetic rounds every value to its dtype; a fused kernel would compute on with more.
_AS_EAGER: dict[str, Any] = {"emulate_precision_casts": True, "eager_numerics.division_rounding": True}


@cache
def fused(code: Code) -> Fused:
    """`code`, compiled at its first use; any number of blocks is served by one kernel."""
    encode, decode = (
        torch.compile(way, dynamic=True, fullgraph=True, options=_AS_EAGER) for way in (code.encode, code.decode)
    )
    return Fused(code.row_bytes, encode, decode)
