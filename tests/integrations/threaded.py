"""M replicas that each run a loop of their own in a thread, over one `LocalGroup`: real blocking rounds, no network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor

from atoll.comm.base import Flight, Tally, Transport
from atoll.comm.local import LocalGroup
from atoll.errors import TransportError
from atoll.exchange import Exchange, State, Traffic

T = TypeVar("T")
PATIENCE_S = 30.0  # how long a hanging test is waited for


class ThreadedGroup:
    """A `LocalGroup` whose replicas may wait for each other."""

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        self.changed = threading.Condition()
        self.joined: list[int] = []
        self.broken = False
        self._endpoints = LocalGroup(num_replicas).endpoints()

    def endpoints(self) -> list[ThreadedTransport]:
        return [ThreadedTransport(self, endpoint) for endpoint in self._endpoints]

    def wait_for_all(self, number: int) -> None:
        def ready() -> bool:
            return self.broken or self.joined[number] == self.num_replicas

        with self.changed:
            if not self.changed.wait_for(ready, PATIENCE_S) or self.broken:
                raise TransportError("another replica is gone")

    def give_up(self) -> None:
        with self.changed:
            self.broken = True
            self.changed.notify_all()


class ThreadedTransport:
    def __init__(self, group: ThreadedGroup, inner: Transport) -> None:
        self._group = group
        self._inner = inner
        self._count = 0
        self.num_replicas = inner.num_replicas
        self.replica = inner.replica

    def launch(
        self, ballot: bytes, tally: Tally, exchanges: Iterable[Exchange], *, background: bool = False
    ) -> ThreadedFlight:
        number, self._count = self._count, self._count + 1
        with self._group.changed:
            flight = self._inner.launch(ballot, tally, exchanges)
            if number == len(self._group.joined):
                self._group.joined.append(0)
            self._group.joined[number] += 1
            self._group.changed.notify_all()
        return ThreadedFlight(self._group, number, flight)

    def close(self) -> None:
        pass


class ThreadedFlight:
    def __init__(self, group: ThreadedGroup, number: int, inner: Flight) -> None:
        self._group = group
        self._number = number
        self._inner = inner

    def ballots(self) -> Sequence[bytes]:
        self._group.wait_for_all(self._number)
        with self._group.changed:
            ballots = self._inner.ballots()
        assert len({len(ballot) for ballot in ballots}) == 1, f"ballots of several lengths: {ballots}"
        return ballots

    def results(self) -> Iterator[tuple[Tensor, State]]:
        self.ballots()
        results = self._inner.results()
        while True:
            with self._group.changed:
                result = next(results, None)
            if result is None:
                return
            yield result

    def traffic(self) -> Traffic:
        with self._group.changed:
            return self._inner.traffic()


def run_together(work: Callable[[Transport], T], num_replicas: int) -> list[T]:
    """`work(transport)` of every replica, each in a thread; their results, or the first error that is a cause."""
    group = ThreadedGroup(num_replicas)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(transport: ThreadedTransport) -> None:
        try:
            results[transport.replica] = work(transport)
        except BaseException as error:
            errors.append(error)
            group.give_up()

    threads = [threading.Thread(target=run, args=(endpoint,)) for endpoint in group.endpoints()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors, key=lambda error: isinstance(error, TransportError))
    return [results[replica] for replica in range(num_replicas)]
