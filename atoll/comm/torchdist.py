"""Replicas joined by a torch.distributed process group, one process a replica: gloo on CPU, NCCL on GPU.

Everything travels as point-to-point messages whose tags follow from the order of the program, the same on all
replicas, so that several exchanges can be under way at once. A mean goes by slices: each replica owns one, receives it
from all, averages it, and sends the mean to all. Two replicas swap whole tensors instead: as many bytes, one wait less,
and both compute what either would have received.

The exchanges of a launch move like a systolic array, `lag` beats from phase to phase. With more than two replicas:

    beat          0      1      2      3      4      5      6
    exchange 0    send          mean          done                 (lag 2)
    exchange 1           send          mean          done
    exchange 2                  send          mean          done

An exchange is pulled when its beat comes, and that is when a replica computes what it sends: arithmetic and sending
overlap. Nothing measured decides what a beat does, so every replica posts its messages in the same order.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.comm.base import Tally
from atoll.errors import TransportError
from atoll.exchange import Exchange, Gathered, Mean, Request, State, Traffic, slice_bounds, weighted_mean

LAG = 2  # beats between the phases of an exchange
_LAUNCHES, _LANES, _PHASES = 1 << 6, 1 << 19, 1 << 5  # a tag is a non-negative int of 31 bits: 6 + 19 + 5
_BALLOTS, _GRAM, _FIRST_EXCHANGE = 0, 1, 2  # lanes of a launch


class TorchDistTransport:
    """One replica's end of a process group.

    group: None is the default group. timeout_s: the longest wait for any one message. lag: beats between the phases of
    an exchange; each is a bucket more under way (two, with more than two replicas). Every failure of the network is a
    `TransportError`, after which the group cannot be used again. The group belongs to who made it.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0, lag: int = LAG) -> None:
        self._wire = _Wire(group, timeout_s)
        self._lag = lag
        self._num_launches = 0

    @property
    def num_replicas(self) -> int:
        return self._wire.num_replicas

    @property
    def replica(self) -> int:
        return self._wire.replica

    def launch(self, ballot: bytes, tally: Tally, exchanges: Iterable[Exchange]) -> TorchDistFlight:
        """Send the ballot and the first `lag` exchanges; asking for results moves the rest.

        Exchanges that differ in number or size between replicas must never get here: gloo ends such a process.
        """
        flight = TorchDistFlight(self._wire, self._num_launches, ballot, tally, exchanges, self._lag)
        self._num_launches += 1
        return flight

    def close(self) -> None:
        """Nothing to let go of."""


class _Wire:
    """Messages between the replicas of a group, each wait bounded."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.num_replicas = dist.get_world_size(group)
        self.replica = dist.get_rank(group)
        self.peers = [peer for peer in range(self.num_replicas) if peer != self.replica]
        self.timeout_s = timeout_s
        self._group = group if group is not None else dist.group.WORLD
        on_device = dist.get_backend(group) == "nccl"
        self.control_device = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")

    def post(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], *, tag: int, what: str) -> _Pending:
        """Begin to send and receive flat tensors by peer; empty ones are not sent.

        Receives first: a send whose receive is already posted goes out at once.
        """
        messages: list[tuple[Callable[..., dist.Work | None], int, Tensor]]
        messages = [(dist.irecv, peer, tensor) for peer, tensor in incoming.items() if tensor.numel()]
        messages += [(dist.isend, peer, tensor) for peer, tensor in outgoing.items() if tensor.numel()]
        operations = [
            dist.P2POp(call, tensor, group=self._group, tag=tag, group_peer=peer) for call, peer, tensor in messages
        ]
        pending = _Pending(self, [], [peer for _, peer, _ in messages], what)
        if operations:
            try:
                pending.works = dist.batch_isend_irecv(operations)
            except RuntimeError as error:
                raise self.failure(what, pending.peers, error) from error
        return pending

    def failure(self, what: str, peers: Sequence[int], error: RuntimeError) -> TransportError:
        names = ", ".join(str(peer) for peer in sorted(set(peers)))
        return TransportError(
            f"replica {self.replica} exchanged {what} with replica {names} and the network failed "
            f"(timeout_s={self.timeout_s:g}): {_reason(error)}\n"
            "This connection is over. See what became of the other replica, then start all again with --resume auto."
        )


def _reason(error: RuntimeError) -> str:
    """The first sentence of what the backend says, without where in its source it says so."""
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first_line).split(". ")[0][:160].rstrip(".")


@dataclass
class _Pending:
    """Messages under way."""

    wire: _Wire
    works: list[dist.Work]
    peers: list[int]
    what: str

    def wait(self) -> None:
        """Until all have arrived or left; raises `TransportError`."""
        timeout = timedelta(seconds=self.wire.timeout_s)
        one_each = len(self.works) == len(self.peers)  # gloo; NCCL has one handle for all
        for number, work in enumerate(self.works):
            try:
                work.wait(timeout)
            except RuntimeError as error:
                raise self.wire.failure(self.what, [self.peers[number]] if one_each else self.peers, error) from error
        self.works = []


# A protocol yields what it has to wait for and returns its answer.
_Steps = Generator[_Pending, None, Any]


class _Lane:
    """The messages of one exchange: a fresh tag for each phase."""

    def __init__(self, wire: _Wire, launch: int, number: int, what: str) -> None:
        self._wire = wire
        self._base = (launch % _LAUNCHES * _LANES + number % _LANES) * _PHASES
        self._phase = 0
        self._what = what
        self.sent_bytes = 0

    def post(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> _Pending:
        tag = self._base + self._phase % _PHASES
        self._phase += 1
        self.sent_bytes += sum(tensor.nbytes for tensor in outgoing.values())
        return self._wire.post(outgoing, incoming, tag=tag, what=self._what)

    def gather(self, own: Tensor) -> _Steps:
        """The contiguous `own` of every replica, in replica order; all have one shape."""
        wire = self._wire
        rows = [own if r == wire.replica else torch.empty_like(own) for r in range(wire.num_replicas)]
        yield self.post(dict.fromkeys(wire.peers, own), {peer: rows[peer] for peer in wire.peers})
        return rows


class _Course:
    """A protocol on its way, a phase at a time. `result` counts once `done`."""

    def __init__(self, steps: _Steps, *, born: int = 0) -> None:
        self.born = born
        self.done = False
        self.result: Any = None
        self._steps = steps
        self._pending: _Pending | None = None
        self.advance()

    def advance(self) -> None:
        """Wait for the phase under way and begin the next."""
        if self._pending is not None:
            self._pending.wait()
        try:
            self._pending = next(self._steps)
        except StopIteration as stop:
            self._pending, self.result, self.done = None, stop.value, True

    def finish(self) -> Any:
        while not self.done:
            self.advance()
        return self.result

    def abandon(self) -> None:
        """Let what is under way arrive, and stop."""
        if self._pending is not None:
            self._pending.wait()
        self._steps.close()


class TorchDistFlight:
    """One launched round of one replica."""

    def __init__(
        self, wire: _Wire, number: int, ballot: bytes, tally: Tally, exchanges: Iterable[Exchange], lag: int
    ) -> None:
        self._wire = wire
        self._number = number
        self._tally = tally
        self._exchanges = enumerate(exchanges)
        self._lag = lag
        self._beats = 0
        self._running: deque[_Course] = deque()
        self._ready: deque[tuple[Tensor, State]] = deque()
        self._lanes: list[_Lane] = []
        self._weights: Sequence[float] | None = None
        self._products: list[Tensor] = []
        self._gram: Tensor | None = None
        own = torch.frombuffer(bytearray(ballot), dtype=torch.uint8).to(wire.control_device)
        self._ballots = _Course(self._lane(_BALLOTS, "ballots").gather(own))
        for _ in range(lag):  # nothing is due yet: sends, waits for nothing
            self._beat()

    def ballots(self) -> Sequence[bytes]:
        return [bytes(row.tolist()) for row in self._ballots.finish()]

    def results(self) -> Iterator[tuple[Tensor, State]]:
        """The result of each exchange in order; none where no replica has a positive weight."""
        while self._ready or self._beat() or self._ready:
            if self._ready:
                yield self._ready.popleft()

    def traffic(self) -> Traffic:
        """Sums the inner products over the owners of slices, so either all replicas ask or none does."""
        while self._beat():
            pass
        if self._gram is None:
            parts = _Course(self._lane(_GRAM, "inner products").gather(self._partial_gram())).finish()
            self._gram = torch.stack(parts).sum(0).cpu()
        return Traffic(sum(lane.sent_bytes for lane in self._lanes), self._gram)

    # --- the array

    def _beat(self) -> bool:
        """Begin one more exchange and move on those that are due; False when there is nothing left to do."""
        began = self._begin_next()
        due = [course for course in self._running if self._is_due(course)]
        if due and not any(self._agreed_weights()):
            self._call_off()
        else:
            for course in due:
                course.advance()
        self._beats += 1
        while self._running and self._running[0].done:
            self._ready.append(self._running.popleft().result)
        return began or bool(self._running)

    def _is_due(self, course: _Course) -> bool:
        age = self._beats - course.born
        return age > 0 and age % self._lag == 0 and not course.done

    def _begin_next(self) -> bool:
        number, exchange = next(self._exchanges, (0, None))
        if exchange is None:
            return False
        lane = self._lane(_FIRST_EXCHANGE + number, f"bucket {number}")
        self._lanes.append(lane)
        self._running.append(_Course(self._follow(lane, exchange), born=self._beats))
        return True

    def _call_off(self) -> None:
        """Nobody counts: what was sent arrives and is forgotten; the other exchanges are not begun, on any replica."""
        for course in self._running:
            course.abandon()
        self._running.clear()
        self._exchanges = enumerate(())

    def _lane(self, number: int, what: str) -> _Lane:
        return _Lane(self._wire, self._number, number, f"{what} of launch {self._number}")

    def _agreed_weights(self) -> Sequence[float]:
        if self._weights is None:
            self._weights = self._tally(self.ballots())
        return self._weights

    # --- the protocols

    def _follow(self, lane: _Lane, exchange: Exchange) -> _Steps:
        """Answer what an exchange asks for, to its end."""
        answer = None
        while True:
            try:
                request = exchange.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = yield from self._answer(lane, request)

    def _answer(self, lane: _Lane, request: Request) -> _Steps:
        if not isinstance(request, Mean):
            payloads = yield from lane.gather(request.payload.contiguous())
            return Gathered(payloads, self._agreed_weights())
        flat = request.tensor.detach().reshape(-1)
        mean = self._mean_of_two if self._wire.num_replicas == 2 else self._mean_by_slices
        averaged = yield from mean(lane, flat)
        return averaged.view(request.tensor.shape)

    def _mean_by_slices(self, lane: _Lane, flat: Tensor) -> _Steps:
        """Owners average their slice of `flat` (M slices) and send it to all."""
        wire = self._wire
        averaged = torch.empty_like(flat)
        slices, means = self._slices(flat), self._slices(averaged)
        own = slices[wire.replica]
        rows = [own if r == wire.replica else torch.empty_like(own) for r in range(wire.num_replicas)]
        yield lane.post({peer: slices[peer] for peer in wire.peers}, {peer: rows[peer] for peer in wire.peers})
        self._add_inner_products(rows)
        home = means[wire.replica]
        home.copy_(weighted_mean(rows, self._agreed_weights()))
        yield lane.post(dict.fromkeys(wire.peers, home), {peer: means[peer] for peer in wire.peers})
        return averaged

    def _mean_of_two(self, lane: _Lane, flat: Tensor) -> _Steps:
        """Both replicas average the whole."""
        (peer,) = self._wire.peers
        received = torch.empty_like(flat)
        yield lane.post({peer: flat}, {peer: received})
        rows = [flat, received] if peer == 1 else [received, flat]
        self._add_inner_products([self._slices(row)[self._wire.replica] for row in rows])
        first, second = self._agreed_weights()
        if first == second and flat.dtype == torch.float32:
            return torch.add(*rows, out=received).mul_(0.5)  # as weighted_mean, bit for bit, in half the passes
        return weighted_mean(rows, [first, second]).to(flat.dtype)

    def _slices(self, flat: Tensor) -> list[Tensor]:
        bounds = slice_bounds(flat.numel(), self._wire.num_replicas)
        return [flat[start:stop] for start, stop in pairwise(bounds)]

    def _add_inner_products(self, rows: Sequence[Tensor]) -> None:
        """Of the contributions to the slice this replica owns, while they are in the cache."""
        values = [row.to(torch.float32) for row in rows]
        products = [torch.dot(left, right) for i, left in enumerate(values) for right in values[: i + 1]]
        self._products.append(torch.stack(products))

    def _partial_gram(self) -> Tensor:
        """This replica's part of the Gram matrix (M × M, fp64)."""
        num, device = self._wire.num_replicas, self._wire.control_device
        gram = torch.zeros(num, num, dtype=torch.float64, device=device)
        if self._products:
            lower = torch.tril_indices(num, num, device=device)
            gram[lower[0], lower[1]] = torch.stack(self._products).to(torch.float64).sum(0)
        return gram + gram.tril(-1).T
