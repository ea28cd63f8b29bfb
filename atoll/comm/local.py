"""M replicas in one process: deterministic, no network, for tests and experiments.

The replicas of a group take turns. The first to ask for a result drives the exchanges of all in lock step, so every
replica must have launched before any asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from atoll.comm.base import Tally
from atoll.exchange import (
    CodedMean,
    Exchange,
    Gather,
    Gathered,
    Mean,
    Request,
    State,
    Traffic,
    coded_mean,
    coded_mean_sent_bytes,
    coded_slices,
    mean_sent_bytes,
    weighted_mean,
)

_Watch = Callable[[Sequence[Tensor]], None] | None
_Kind = TypeVar("_Kind", Mean, CodedMean, Gather)


class LocalGroup:
    """M replicas of one process and the launches between them."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self._launches: dict[int, _Launch] = {}
        self._counts = [0] * num_replicas

    def endpoints(self) -> list[LocalTransport]:
        """One transport a replica."""
        return [LocalTransport(self, replica) for replica in range(self.num_replicas)]

    def join(self, replica: int, ballot: bytes, tally: Tally, exchanges: Iterable[Exchange]) -> _Launch:
        """Take part in the next launch of `replica`; the k-th launches of all replicas belong together."""
        index = self._counts[replica]
        self._counts[replica] += 1
        launch = self._launches.setdefault(index, _Launch(self.num_replicas))
        launch.join(replica, ballot, tally, exchanges)
        if launch.is_complete:
            del self._launches[index]  # from here on only the flights hold it
        return launch


class LocalTransport:
    """One replica's end of a `LocalGroup`."""

    def __init__(self, group: LocalGroup, replica: int) -> None:
        self._group = group
        self.num_replicas = group.num_replicas
        self.replica = replica

    def launch(
        self, ballot: bytes, tally: Tally, exchanges: Iterable[Exchange], *, background: bool = False
    ) -> LocalFlight:
        return LocalFlight(self._group.join(self.replica, ballot, tally, exchanges), self.replica)

    def close(self) -> None:
        pass


class LocalFlight:
    """One replica's view of a launch."""

    def __init__(self, launch: _Launch, replica: int) -> None:
        self._launch = launch
        self._replica = replica

    def ballots(self) -> Sequence[bytes]:
        return self._launch.all_ballots()

    def results(self) -> Iterator[tuple[Tensor, State]]:
        while (result := self._launch.next_result(self._replica)) is not None:
            yield result

    def traffic(self) -> Traffic:
        return Traffic(self._launch.sent_bytes[self._replica], self._launch.gram)


class _Launch:
    """The k-th launch of every replica, driven together."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.sent_bytes = [0] * num_replicas
        self.gram: Tensor | None = torch.zeros(num_replicas, num_replicas, dtype=torch.float64)
        self._ballots: dict[int, bytes] = {}
        self._exchanges: dict[int, Iterator[Exchange]] = {}
        self._ready: list[deque[tuple[Tensor, State]]] = [deque() for _ in range(num_replicas)]
        self._tally: Tally | None = None
        self._weights: Sequence[float] | None = None

    def join(self, replica: int, ballot: bytes, tally: Tally, exchanges: Iterable[Exchange]) -> None:
        self._ballots[replica] = ballot
        self._exchanges[replica] = iter(exchanges)
        self._tally = tally

    @property
    def is_complete(self) -> bool:
        """Whether every replica has joined."""
        return len(self._ballots) == self.num_replicas

    def all_ballots(self) -> list[bytes]:
        missing = set(range(self.num_replicas)) - set(self._ballots)
        assert not missing, f"replicas {sorted(missing)} have not launched: every replica launches before any waits"
        return [self._ballots[replica] for replica in range(self.num_replicas)]

    def next_result(self, replica: int) -> tuple[Tensor, State] | None:
        if not self._ready[replica] and not self._drive_next():
            return None
        return self._ready[replica].popleft()

    def _drive_next(self) -> bool:
        """Run the next exchange of every replica to its end; False when there is none left."""
        ballots = self.all_ballots()
        if self._weights is None:
            assert self._tally is not None
            self._weights = self._tally(ballots)
        exchanges = [next(self._exchanges[replica], None) for replica in range(self.num_replicas)]
        running = [exchange for exchange in exchanges if exchange is not None]
        assert len(running) in (0, self.num_replicas), "replicas launched different numbers of exchanges"
        if not running:
            return False
        results = drive_together(running, self._weights, launch=self)
        for replica, result in enumerate(results):
            self._ready[replica].append(result)
        return True

    def count(self, requests: Sequence[Request]) -> None:
        """Add what a network would carry for these requests."""
        for replica, request in enumerate(requests):
            self.sent_bytes[replica] += _sent_bytes(request, num_replicas=self.num_replicas, replica=replica)
        if isinstance(requests[0], Gather):
            self.gram = None  # what is handed round is opaque

    def add_inner_products(self, rows: Sequence[Tensor]) -> None:
        """Of the same elements of all contributions."""
        if self.gram is not None:
            stacked = torch.stack([row.reshape(-1).to(torch.float32) for row in rows])
            self.gram += (stacked @ stacked.T).to(torch.float64)


def drive_together(
    exchanges: Sequence[Exchange], weights: Sequence[float], *, launch: _Launch | None = None
) -> list[tuple[Tensor, State]]:
    """Run one exchange of every replica in lock step and return the result of each.

    >>> def identity(tensor):
    ...     mean = yield Mean(tensor)
    ...     return mean, {}
    >>> [mean for mean, _ in drive_together([identity(torch.tensor([x])) for x in (1.0, 3.0)], [1, 1])]
    [tensor([2.]), tensor([2.])]
    """
    requests = [next(exchange) for exchange in exchanges]
    while True:
        if launch is not None:
            launch.count(requests)
        answers = _answer(requests, weights, None if launch is None else launch.add_inner_products)
        results, requests = [], []
        for exchange, answer in zip(exchanges, answers, strict=True):
            try:
                requests.append(exchange.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        assert not (results and requests), "the exchanges of one launch end together"
        if results:
            return results


def _answer(requests: Sequence[Request], weights: Sequence[float], watch: _Watch) -> Sequence[Tensor | Gathered]:
    first = requests[0]
    if isinstance(first, Mean):
        return _answer_mean(_alike(requests, Mean), weights, watch if first.measured else None)
    if isinstance(first, CodedMean):
        return _answer_coded_mean(_alike(requests, CodedMean), weights, watch if first.measured else None)
    payloads = [request.payload for request in _alike(requests, Gather)]
    return [Gathered(payloads, weights) for _ in requests]


def _answer_mean(requests: Sequence[Mean], weights: Sequence[float], watch: _Watch) -> list[Tensor]:
    if watch is not None:
        watch([request.tensor for request in requests])
    mean = weighted_mean([request.tensor for request in requests], weights)
    return [mean.to(requests[0].tensor.dtype, copy=True) for _ in requests]


def _answer_coded_mean(requests: Sequence[CodedMean], weights: Sequence[float], watch: _Watch) -> list[Tensor]:
    codec, numel = requests[0].codec, requests[0].numel
    parts = []
    for owner, part in enumerate(coded_slices(numel, codec, len(requests))):
        owed = requests[owner].owed
        parts.append(
            coded_mean(
                [request.payload[part.payload] for request in requests],
                weights,
                codec,
                part.numel,
                owner=owner,
                owed=None if owed is None else owed[part.elements],
                watch=watch,
            )
        )
    payload = torch.cat(parts)
    return [codec.decode(payload, numel) for _ in requests]


def _alike(requests: Sequence[Request], kind: type[_Kind]) -> list[_Kind]:
    same = [request for request in requests if isinstance(request, kind)]
    assert len(same) == len(requests), "replicas asked for different things in one exchange"
    return same


def _sent_bytes(request: Request, *, num_replicas: int, replica: int) -> int:
    size = {"num_replicas": num_replicas, "replica": replica}
    if isinstance(request, Mean):
        return mean_sent_bytes(request.tensor.numel(), request.tensor.element_size(), **size)
    if isinstance(request, CodedMean):
        return coded_mean_sent_bytes(request.numel, request.codec, **size)
    return request.payload.numel() * (num_replicas - 1)
