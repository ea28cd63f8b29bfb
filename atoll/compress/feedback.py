"""Error feedback: what a replica's contribution left out is owed, and added to its next one.

    M = Δ + β e ;  send inner(M) ;  e = M − what of it got across

With β = 1 nothing is ever lost: what was sent so far and what is owed add up to all pseudo-gradients, summed over the
replicas. That includes what the owner of a slice loses when it codes the mean of all once more: it is the owner who
owes that. A round that came to nothing, or in which this replica did not count, leaves e as it was (`settle`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.compress.base import OWN, Compressor
from atoll.exchange import Exchange, State

RESIDUAL = OWN + "residual"


@dataclass(frozen=True)
class Feedback:
    """Error feedback around `inner`. beta: share of what is owed that is kept (0.95 in arXiv 2508.15706).

    residual_dtype: fp32, or bf16 in half the memory; in bf16 the law above holds to 3 digits only.

    >>> from atoll.compress.topk import TopK
    >>> feedback = Feedback(TopK(k=1, chunk=4))
    >>> exchange = feedback.average(torch.tensor([4.0, 1.0]), feedback.init((2,)))
    >>> from atoll.exchange import Gathered
    >>> try:
    ...     exchange.send(Gathered([next(exchange).payload], [1.0]))
    ... except StopIteration as stop:
    ...     print(stop.value)
    (tensor([4., 0.]), {'own.residual': tensor([0., 1.])})
    """

    inner: Compressor
    beta: float = 1.0
    residual_dtype: torch.dtype = torch.float32
    needs_feedback = False

    @property
    def elementwise(self) -> bool:
        return self.inner.elementwise

    def init(self, shape: Sequence[int]) -> State:
        return self.inner.init(shape) | {RESIDUAL: torch.zeros(tuple(shape), dtype=self.residual_dtype)}

    def average(self, tensor: Tensor, state: State, *, owed: Tensor | None = None) -> Exchange:
        assert owed is None, "error feedback keeps what it owes to itself"
        total = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        torch.add(tensor, state[RESIDUAL].to(total), alpha=self.beta, out=total)
        missed = torch.empty_like(total)
        inner_state = {key: value for key, value in state.items() if key != RESIDUAL}
        mean, inner_state = yield from self.inner.average(total, inner_state, owed=missed)
        return mean, inner_state | {RESIDUAL: missed.to(self.residual_dtype)}

    def payload_bytes(self, shape: Sequence[int]) -> int:
        return self.inner.payload_bytes(shape)

    def sent_bytes(self, shape: Sequence[int], *, num_replicas: int, replica: int) -> int:
        return self.inner.sent_bytes(shape, num_replicas=num_replicas, replica=replica)
