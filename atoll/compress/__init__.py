"""Compressors by name. A new one is a file in this folder and a line in `COMPRESSORS`."""

import torch

from atoll.compress.base import Compressor
from atoll.compress.cast import Cast

COMPRESSORS: dict[str, Compressor] = {
    "identity": Cast(torch.float32),
    "bf16": Cast(torch.bfloat16),
    "fp16": Cast(torch.float16),
}

__all__ = ["COMPRESSORS", "Cast", "Compressor"]
