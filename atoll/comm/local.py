"""M replicas in one process: deterministic, no network, for tests and experiments.

The replicas of a group take turns. The first to ask for a result drives the exchanges of all in lock step, so every
replica must have launched before any asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from atoll.comm.base import Tally
from atoll.exchange import (
    Exchange,
    Gather,
    Gathered,
    Mean,
    Request,
    State,
    Traffic,
    mean_sent_bytes,
    weighted_mean,
)


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
        self.gram = torch.zeros(num_replicas, num_replicas, dtype=torch.float64)
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
        """Add what a network would carry for these requests, and the inner products of what is averaged."""
        for replica, request in enumerate(requests):
            self.sent_bytes[replica] += _sent_bytes(request, num_replicas=self.num_replicas, replica=replica)
        if isinstance(requests[0], Mean):
            rows = torch.stack([_mean_of(request).reshape(-1).to(torch.float32) for request in requests])
            self.gram += (rows @ rows.T).to(torch.float64)


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
        answers = _answer(requests, weights)
        results, requests = [], []
        for exchange, answer in zip(exchanges, answers, strict=True):
            try:
                requests.append(exchange.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        assert not (results and requests), "the exchanges of one launch end together"
        if results:
            return results


def _answer(requests: Sequence[Request], weights: Sequence[float]) -> list[Tensor] | list[Gathered]:
    if isinstance(requests[0], Mean):
        mean = weighted_mean([_mean_of(request) for request in requests], weights)
        dtype = _mean_of(requests[0]).dtype
        return [mean.to(dtype, copy=True) for _ in requests]
    payloads = [request.payload for request in requests if isinstance(request, Gather)]
    assert len(payloads) == len(requests), "replicas asked for different things in one exchange"
    return [Gathered(payloads, weights) for _ in requests]


def _mean_of(request: Request) -> Tensor:
    assert isinstance(request, Mean), "replicas asked for different things in one exchange"
    return request.tensor


def _sent_bytes(request: Request, *, num_replicas: int, replica: int) -> int:
    if isinstance(request, Mean):
        tensor = request.tensor
        return mean_sent_bytes(tensor.numel(), tensor.element_size(), num_replicas=num_replicas, replica=replica)
    return request.payload.numel() * (num_replicas - 1)
