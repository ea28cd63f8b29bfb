"""Averaging in fp32 (`identity`), bf16 or fp16: each value travels in that dtype, sums are fp32, one more rounding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.exchange import Exchange, Mean, State, mean_sent_bytes


@dataclass(frozen=True)
class Cast:
    """Average in `dtype`. Values beyond its range are clamped to its largest (65,504 for fp16).

    What the one rounding of the mean loses is nobody's to owe (at most half a unit in the last place of `dtype`).

    >>> exchange = Cast(torch.float16).average(torch.tensor([1.0, 1e9]), {})
    >>> next(exchange).tensor
    tensor([1.0000e+00, 6.5504e+04], dtype=torch.float16)
    """

    dtype: torch.dtype
    elementwise = True
    needs_feedback = False

    def init(self, shape: Sequence[int]) -> State:
        return {}

    def average(self, tensor: Tensor, state: State, *, owed: Tensor | None = None) -> Exchange:
        encoded = self._encode(tensor)
        if owed is not None:
            torch.sub(tensor, encoded.to(torch.float32), out=owed)
        mean = yield Mean(encoded)
        return mean.to(torch.float32), state

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def sent_bytes(self, shape: Sequence[int], *, num_replicas: int, replica: int) -> int:
        return mean_sent_bytes(math.prod(shape), self.dtype.itemsize, num_replicas=num_replicas, replica=replica)

    def _encode(self, tensor: Tensor) -> Tensor:
        if self.dtype is torch.float16:
            largest = torch.finfo(torch.float16).max
            tensor = tensor.clamp(-largest, largest)
        return tensor.to(self.dtype)
