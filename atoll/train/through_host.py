"""A transport for tensors on a GPU that sends from host memory.

The workers of a replica talk to each other by NCCL. Were the messages between replicas NCCL's as well, a thread that
sends a round while the main thread trains could wait for a communicator that waits for it: NCCL wants all its work in
one order on all ranks. So they go by gloo, which takes host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atoll.comm.base import Flight, Tally, Transport
from atoll.comm.torchdist import TorchDistTransport
from atoll.exchange import CodedMean, Exchange, Gather, Gathered, Mean, Request

HOST = torch.device("cpu")


class ThroughHost:
    """`transport` for exchanges of tensors on `device`: requests are copied to the host, and answers back."""

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self._transport = transport
        self._device = device

    @property
    def num_replicas(self) -> int:
        return self._transport.num_replicas

    @property
    def replica(self) -> int:
        return self._transport.replica

    def launch(
        self,
        ballot: bytes,
        tally: Tally,
        exchanges: Iterable[Exchange],
        *,
        background: bool = False,
        weights: Sequence[float] | None = None,
    ) -> Flight:
        """weights: as in `TorchDistTransport.launch`, for a transport that takes them."""
        staged = (through(exchange, HOST, self._device) for exchange in exchanges)
        if weights is None:
            return self._transport.launch(ballot, tally, staged, background=background)
        assert isinstance(self._transport, TorchDistTransport), (
            "weights that are known beforehand go by torch.distributed"
        )
        return self._transport.launch(ballot, tally, staged, background=background, weights=weights)

    def close(self) -> None:
        self._transport.close()


def through(exchange: Exchange, there: torch.device, back: torch.device) -> Exchange:
    """The same exchange with its requests on `there`, while it computes on `back`."""
    answer: Any = None
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration as stop:
            return stop.value
        moved = _moved(request, there)
        answer = _answer(back, (yield moved))
        if isinstance(request, CodedMean) and isinstance(moved, CodedMean):
            _give_back(request.owed, moved.owed)


def _moved(request: Request, device: torch.device) -> Request:
    match request:
        case Mean(tensor):
            return replace(request, tensor=tensor.to(device))
        case Gather(payload):
            return replace(request, payload=payload.to(device))
        case CodedMean(payload, _, _, owed):
            return replace(request, payload=payload.to(device), owed=None if owed is None else owed.to(device))


def _give_back(owed: Tensor | None, added_to: Tensor | None) -> None:
    """What the owner of a slice owes: a transport adds to it in place."""
    if owed is not None and added_to is not None:
        owed.copy_(added_to)


def _answer(device: torch.device, answer: Tensor | Gathered) -> Tensor | Gathered:
    if isinstance(answer, Gathered):
        return replace(answer, payloads=[payload.to(device) for payload in answer.payloads])
    return answer.to(device)
