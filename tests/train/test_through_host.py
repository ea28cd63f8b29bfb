"""Exchanges that are staged elsewhere come to the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.comm.local import LocalGroup
from atoll.compress import CompressorOptions, build_compressor
from atoll.exchange import CodedMean, Exchange, Gather, Gathered, Mean
from atoll.train.through_host import ThroughHost, through

CPU = torch.device("cpu")


def weigh_alike(ballots: Any) -> list[float]:
    return [1.0] * len(ballots)


def averaged(name: str, *, staged: bool) -> list[tuple[Tensor, Any]]:
    """What two replicas get for a matrix each."""
    compressor = build_compressor(name, CompressorOptions(rank=2, feedback=True))
    flights = []
    for number, end in enumerate(LocalGroup(2).endpoints()):
        transport = ThroughHost(end, CPU) if staged else end
        matrix = torch.randn(24, 32, generator=torch.Generator().manual_seed(number))
        flights.append(transport.launch(b"b", weigh_alike, [compressor.average(matrix, compressor.init((24, 32)))]))
    return [next(iter(flight.results())) for flight in flights]


@pytest.mark.parametrize("name", ["identity", "int8", "topk", "lowrank+int4"])
def test_the_mean_and_what_is_owed_are_as_without(name: str) -> None:
    for (mean, state), (plain, plain_state) in zip(
        averaged(name, staged=True), averaged(name, staged=False), strict=True
    ):
        assert torch.equal(mean, plain)
        assert state.keys() == plain_state.keys()
        assert all(torch.equal(state[key], plain_state[key]) for key in state)


def test_requests_go_there_and_answers_come_back() -> None:
    """With meta tensors in the place of those on a GPU."""
    meta = torch.device("meta")
    codec = build_compressor("int8").codec  # type: ignore[attr-defined]
    seen: list[Any] = []

    def asks() -> Exchange:
        seen.append((yield Mean(torch.zeros(3))))
        seen.append((yield Gather(torch.zeros(3, dtype=torch.uint8))))
        seen.append((yield CodedMean(torch.zeros(8, dtype=torch.uint8), codec, 4)))
        return torch.zeros(1), {}

    exchange = through(asks(), meta, CPU)
    request = next(exchange)
    assert isinstance(request, Mean) and request.tensor.device == meta
    request = exchange.send(torch.ones(3))
    assert isinstance(request, Gather) and request.payload.device == meta
    request = exchange.send(Gathered([torch.ones(3)], [1.0]))
    assert isinstance(request, CodedMean) and request.payload.device == meta and request.owed is None
    with pytest.raises(StopIteration):
        exchange.send(torch.ones(4))
    assert torch.equal(seen[0], torch.ones(3)) and torch.equal(seen[1].payloads[0], torch.ones(3))
