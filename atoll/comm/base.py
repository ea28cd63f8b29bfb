"""The one seam with the network.

A replica *launches* a round: its ballot (a few bytes: weight, digest, health) and a stream of exchanges, one a bucket.
All replicas launch the same number of exchanges in the same order. What comes back is a `Flight`: first the ballots of
all, then, in order, the result of every exchange. A transport may work ahead, but never changes the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from atoll.exchange import Exchange, State, Traffic

# From the ballots of all replicas, in replica order, to the weight of each; pure, so that all replicas agree.
Tally = Callable[[Sequence[bytes]], Sequence[float]]


class Flight(Protocol):
    """One launched round."""

    def ballots(self) -> Sequence[bytes]:
        """The ballots of all replicas in replica order; waits for them."""
        ...

    def results(self) -> Iterator[tuple[Tensor, State]]:
        """The result of each exchange in order; waits for each. May be asked for once. The caller owns the tensors."""
        ...

    def traffic(self) -> Traffic:
        """What the launch put on the wire, after the last result; waits for the sum over slice owners."""
        ...


class Transport(Protocol):
    """One replica's end of the link to the others."""

    @property
    def num_replicas(self) -> int: ...

    @property
    def replica(self) -> int: ...

    def launch(self, ballot: bytes, tally: Tally, exchanges: Iterable[Exchange], *, background: bool = False) -> Flight:
        """Begin a round. Ballots of one launch have one length on all replicas. Raises TransportError, now or later.

        background: the exchanges go on beside what this process does next, where the transport can do that; they may
        then be pulled from another thread.
        """
        ...

    def close(self) -> None:
        """Let go of the network."""
        ...
