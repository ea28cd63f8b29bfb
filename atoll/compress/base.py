"""What a compressor offers, and what becomes of its state when a round lands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from atoll.exchange import CodedMean, Exchange, Gathered, Mean, State

OWN = "own."  # keys of state that is one replica's; all other keys hold the same bytes on every replica


class Compressor(Protocol):
    """A way of averaging tensors over replicas with few bytes. It has no state: what lasts is in the state it is given.

    elementwise: a tensor may be cut into slices anywhere, each averaged alone, at no loss.
    needs_feedback: it leaves out so much that training suffers unless that is owed to later rounds.
    """

    @property
    def elementwise(self) -> bool: ...

    @property
    def needs_feedback(self) -> bool: ...

    def init(self, shape: Sequence[int]) -> State:
        """State kept between rounds for a tensor of `shape` (empty for most).

        Keys that begin with "own." are this replica's; the others hold the same bytes on all replicas. See `settle`.
        """
        ...

    def average(self, tensor: Tensor, state: State, *, owed: Tensor | None = None) -> Exchange:
        """Yield what must be averaged or gathered; return the mean (fp32, shape of `tensor`) and the next state.

        owed: fp32, contiguous, shape of `tensor`, or None. It is filled with what of `tensor` this replica did not get
        across: summed over replicas by weight, that is exactly what the mean lacks.
        Neither tensor nor state is changed. A round that comes to nothing is simply forgotten.
        """
        ...

    def payload_bytes(self, shape: Sequence[int]) -> int:
        """Exact bytes of what one replica has to say about one tensor of `shape`."""
        ...

    def sent_bytes(self, shape: Sequence[int], *, num_replicas: int, replica: int) -> int:
        """Exact bytes `replica` sends to average one tensor of `shape`."""
        ...


def bits_per_parameter(compressor: Compressor, shape: Sequence[int]) -> float:
    """Bits of payload an element, of a tensor of `shape` that is not empty."""
    return 8 * compressor.payload_bytes(shape) / math.prod(shape)


def settle(before: State, after: State, *, counted: bool) -> State:
    """What to keep of a compressor's state after a round, given the states before and after it.

    The shared part, equal on all replicas, moves on with every committed round; what a replica owes (keys that begin
    with "own.") only if its contribution counted.

    >>> settle({"own.residual": 1, "warm": 1}, {"own.residual": 2, "warm": 2}, counted=False)
    {'warm': 2, 'own.residual': 1}
    """
    if counted:
        return after
    own = {key: value for key, value in before.items() if key.startswith(OWN)}
    return shared_part(after) | own


def shared_part(state: State) -> State:
    """What all replicas hold alike: what one that joins must be given."""
    return {key: value for key, value in state.items() if not key.startswith(OWN)}


def gathered_mean(gathered: Gathered, decode: Callable[[Tensor], Tensor]) -> Tensor:
    """Σ wᵢ decode(payloadᵢ) / Σ wᵢ over the replicas with wᵢ > 0, in replica order; every replica computes it alike.

    Products are rounded before they are added, and the sum is multiplied by 1 / Σw: neither fused multiply-add nor the
    division of some accelerators (which is a multiplication) makes a difference between machines.
    """
    shares = [(payload, w) for payload, w in zip(gathered.payloads, gathered.weights, strict=True) if w > 0]
    assert shares, "a mean needs at least one contributor of positive weight"
    top = max(weight for _, weight in shares)
    total = None
    for payload, weight in shares:
        values = decode(payload)
        values = values if weight == top else values.mul_(weight / top)
        total = values if total is None else total.add_(values)
    assert total is not None
    return total.mul_(1 / sum(weight / top for _, weight in shares))


def unmeasured(exchange: Exchange) -> Exchange:
    """The same exchange, of tensors that are not contributions: their inner products would tell nothing."""
    answer = None
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield replace(request, measured=False) if isinstance(request, Mean | CodedMean) else request


def flat_fp32(tensor: Tensor) -> Tensor:
    """(numel,) contiguous fp32; the tensor's own memory where that is so already."""
    return tensor.detach().to(torch.float32).reshape(-1).contiguous()
