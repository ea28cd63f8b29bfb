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
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.comm.base import Tally
from atoll.errors import TransportError
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
    coded_slices,
    slice_bounds,
    weighted_mean,
)

LAG = 2  # beats between the phases of an exchange
_LAUNCHES, _LANES, _PHASES = 1 << 6, 1 << 19, 1 << 5  # a tag is a non-negative int of 31 bits: 6 + 19 + 5
_BALLOTS, _GRAM, _FIRST_EXCHANGE = 0, 1, 2  # lanes of a launch


class TorchDistTransport:
    """One replica's end of a process group.

    group: None is the default group. timeout_s: the longest wait for any one message. lag: beats between the phases of
    an exchange; each is a bucket more under way (two, with more than two replicas). Every failure of the network is a
    `TransportError`, after which the group cannot be used again. The group belongs to who made it.

    Launches in the background are driven one after the other by a thread of the transport's own.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0, lag: int = LAG) -> None:
        self._wire = _Wire(group, timeout_s)
        self._lag = lag
        self._num_launches = 0
        self._background = ThreadPoolExecutor(1, thread_name_prefix="atoll-transport")

    @property
    def num_replicas(self) -> int:
        return self._wire.num_replicas

    @property
    def replica(self) -> int:
        return self._wire.replica

    def launch(
        self,
        ballot: bytes,
        tally: Tally,
        exchanges: Iterable[Exchange],
        *,
        background: bool = False,
        weights: Sequence[float] | None = None,
    ) -> TorchDistFlight:
        """Send the ballot and the first `lag` exchanges; asking for results, or the background, moves the rest.

        weights: of each replica, where all know them beforehand; then those of weight 0 send no contribution.
        Exchanges that differ in number or size between replicas must never get here: gloo ends such a process.
        """
        flight = TorchDistFlight(self._wire, self._num_launches, ballot, tally, exchanges, self._lag, weights=weights)
        self._num_launches += 1
        if background:
            flight.run_in(self._background)
        else:
            flight.begin()
        return flight

    def close(self) -> None:
        """Let the background thread end; what it is at is finished first."""
        self._background.shutdown()


class _Wire:
    """Messages between the replicas of a group, each wait bounded."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._group: dist.ProcessGroup = group if group is not None else dist.group.WORLD
        self.num_replicas = self._group.size()
        self.replica = self._group.rank()
        self.peers = [peer for peer in range(self.num_replicas) if peer != self.replica]
        self.timeout_s = timeout_s
        self.waited_s = 0.0
        self._on_device = self._group.name() == "nccl"
        on_device = self._on_device
        self.control_device = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")

    def post(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], *, tag: int, what: str) -> _Pending:
        """Begin to send and receive flat tensors by peer; empty ones are not sent.

        Receives first: a send whose receive is already posted goes out at once.
        """
        receives = {peer: tensor for peer, tensor in incoming.items() if tensor.numel()}
        sends = {peer: tensor for peer, tensor in outgoing.items() if tensor.numel()}
        pending = _Pending(self, [], [*receives, *sends], what)
        try:
            if self._on_device:
                pending.works = self._post_together(receives, sends, tag)
            else:
                pending.works = [self._group.recv([tensor], peer, tag) for peer, tensor in receives.items()]
                pending.works += [self._group.send([tensor], peer, tag) for peer, tensor in sends.items()]
        except RuntimeError as error:
            raise self.failure(what, pending.peers, error) from error
        return pending

    def _post_together(self, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor], tag: int) -> list[dist.Work]:
        """NCCL takes messages that wait for each other only as one batch."""
        operations = [
            dist.P2POp(call, tensor, group=self._group, tag=tag, group_peer=peer)
            for call, messages in ((dist.irecv, receives), (dist.isend, sends))
            for peer, tensor in messages.items()
        ]
        return dist.batch_isend_irecv(operations) if operations else []

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
        began = time.perf_counter()
        one_each = len(self.works) == len(self.peers)  # gloo; NCCL has one handle for all
        for number, work in enumerate(self.works):
            try:
                work.wait(timeout)
            except RuntimeError as error:
                raise self.wire.failure(self.what, [self.peers[number]] if one_each else self.peers, error) from error
        self.wire.waited_s += time.perf_counter() - began
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


class _Plain:
    """Values that travel as they are. measured: their inner products are wanted."""

    unit = 1  # elements that must not be cut apart

    def __init__(self, request: Mean) -> None:
        self.measured = request.measured

    def values(self, row: Tensor, owner: int) -> Tensor:
        return row.to(torch.float32)

    def mean(self, rows: Sequence[Tensor], weights: Sequence[float], owner: int) -> Tensor:
        return weighted_mean(rows, weights).to(rows[0].dtype)


class _Codes:
    """Values that travel as codes: uint8, `unit` bytes a block. What coding the mean loses, the owner of it owes."""

    def __init__(self, request: CodedMean, wire: _Wire) -> None:
        self.measured = request.measured
        self.unit = request.codec.block_bytes
        self._codec = request.codec
        self._parts = coded_slices(request.numel, request.codec, wire.num_replicas)
        self._replica = wire.replica
        self._owed = request.owed

    def values(self, row: Tensor, owner: int) -> Tensor:
        return self._codec.decode(row, self._parts[owner].numel)

    def mean(self, rows: Sequence[Tensor], weights: Sequence[float], owner: int) -> Tensor:
        part = self._parts[owner]
        owed = self._owed[part.elements] if self._owed is not None and owner == self._replica else None
        return coded_mean(rows, weights, self._codec, part.numel, owed=owed, owner=owner)


_Kind = _Plain | _Codes


class TorchDistFlight:
    """One launched round of one replica."""

    def __init__(
        self,
        wire: _Wire,
        number: int,
        ballot: bytes,
        tally: Tally,
        exchanges: Iterable[Exchange],
        lag: int,
        *,
        weights: Sequence[float] | None = None,
    ) -> None:
        self._wire = wire
        self._number = number
        self._tally = tally
        self._exchanges = enumerate(exchanges)
        self._lag = lag
        self._beats = 0
        self._waited_before = wire.waited_s
        self._running: deque[_Course] = deque()
        self._ready: deque[tuple[Tensor, State]] = deque()
        self._lanes: list[_Lane] = []
        self._weights: Sequence[float] | None = weights
        self._silent = [] if weights is None else [peer for peer, weight in enumerate(weights) if not weight > 0]
        self._products: list[Tensor] = []
        self._gathers = False
        self._gram: Tensor | None = None
        self._done: Future[tuple[list[tuple[Tensor, State]], Traffic]] | None = None
        own = torch.frombuffer(bytearray(ballot), dtype=torch.uint8).to(wire.control_device)
        self._ballots = _Course(self._lane(_BALLOTS, "ballots").gather(own))
        self._ballots_lock = threading.Lock()

    def begin(self) -> None:
        """Send the first exchanges: nothing is due yet, so nothing is waited for."""
        for _ in range(self._lag):
            self._beat()

    def run_in(self, thread: ThreadPoolExecutor) -> None:
        """Have `thread` do all there is to do, after what it was given before."""
        self._done = thread.submit(lambda: (list(self._results()), self._traffic()))

    def ballots(self) -> Sequence[bytes]:
        with self._ballots_lock:  # the background wants to know the weights while the launcher asks as well
            return [bytes(row.tolist()) for row in self._ballots.finish()]

    def results(self) -> Iterator[tuple[Tensor, State]]:
        """The result of each exchange in order; none where no replica has a positive weight."""
        return self._results() if self._done is None else iter(self._done.result()[0])

    def traffic(self) -> Traffic:
        """Sums the inner products over the owners of slices, so either all replicas ask or none does."""
        return self._traffic() if self._done is None else self._done.result()[1]

    def _results(self) -> Iterator[tuple[Tensor, State]]:
        while self._ready or self._beat() or self._ready:
            if self._ready:
                yield self._ready.popleft()

    def _traffic(self) -> Traffic:
        while self._beat():
            pass
        if self._gram is None and not self._gathers:
            parts = _Course(self._lane(_GRAM, "inner products").gather(self._partial_gram())).finish()
            self._gram = torch.stack(parts).sum(0).cpu()
        sent_bytes = sum(lane.sent_bytes for lane in self._lanes)
        return Traffic(sent_bytes, self._gram, self._wire.waited_s - self._waited_before)

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
        match request:
            case Gather(payload):
                self._gathers = True
                payloads = yield from self._gather(lane, payload.contiguous())
                return Gathered(payloads, self._agreed_weights())
            case CodedMean():
                payload = yield from self._average(lane, request.payload, _Codes(request, self._wire))
                return request.codec.decode(payload, request.numel)
            case Mean(tensor):
                averaged = yield from self._average(lane, tensor.detach().reshape(-1), _Plain(request))
                return averaged.view(tensor.shape)

    def _gather(self, lane: _Lane, own: Tensor) -> _Steps:
        """The payloads of all; an empty one for a replica that is known not to count."""
        wire = self._wire
        rows = [own if r == wire.replica else own.new_empty(self._size(r, own)) for r in range(wire.num_replicas)]
        yield lane.post(self._to_peers(dict.fromkeys(wire.peers, own)), {peer: rows[peer] for peer in wire.peers})
        return rows

    def _average(self, lane: _Lane, flat: Tensor, kind: _Kind) -> _Steps:
        """The mean of what travels as `flat`, in the form it travels in."""
        mean = self._mean_of_two if self._wire.num_replicas == 2 else self._mean_by_slices
        return (yield from mean(lane, flat, kind))

    def _mean_by_slices(self, lane: _Lane, flat: Tensor, kind: _Kind) -> _Steps:
        """Owners average their slice of `flat` (M slices) and send it to all."""
        wire = self._wire
        averaged = torch.empty_like(flat)
        slices, means = self._slices(flat, kind), self._slices(averaged, kind)
        own = slices[wire.replica]
        rows = [own if r == wire.replica else own.new_empty(self._size(r, own)) for r in range(wire.num_replicas)]
        outgoing = self._to_peers({peer: slices[peer] for peer in wire.peers})
        yield lane.post(outgoing, {peer: rows[peer] for peer in wire.peers})
        self._add_inner_products(rows, kind)
        home = means[wire.replica]
        home.copy_(kind.mean(rows, self._agreed_weights(), wire.replica))
        yield lane.post(dict.fromkeys(wire.peers, home), {peer: means[peer] for peer in wire.peers})
        return averaged

    def _mean_of_two(self, lane: _Lane, flat: Tensor, kind: _Kind) -> _Steps:
        """Both replicas average the whole."""
        (peer,) = self._wire.peers
        received = flat.new_empty(self._size(peer, flat))
        yield lane.post(self._to_peers({peer: flat}), {peer: received})
        rows = [flat, received] if peer == 1 else [received, flat]
        self._add_inner_products([self._slices(row, kind)[self._wire.replica] for row in rows], kind)
        first, second = self._agreed_weights()
        if first == second and flat.dtype == torch.float32:
            return torch.add(*rows, out=received).mul_(0.5)  # as weighted_mean, bit for bit, in half the passes
        if isinstance(kind, _Plain):
            return kind.mean(rows, [first, second], 0)
        halves = zip(*(self._slices(row, kind) for row in rows), strict=True)
        return torch.cat([kind.mean(half, [first, second], owner) for owner, half in enumerate(halves)])

    def _size(self, replica: int, like: Tensor) -> int:
        """Elements that `replica` sends where all others send as many as `like` has."""
        return 0 if replica in self._silent else like.numel()

    def _to_peers(self, outgoing: dict[int, Tensor]) -> dict[int, Tensor]:
        """What this replica sends of its contribution: nothing where it does not count."""
        return {} if self._wire.replica in self._silent else outgoing

    def _slices(self, flat: Tensor, kind: _Kind) -> list[Tensor]:
        """Slices by owner, cut at multiples of the unit that the form must not be cut in."""
        bounds = slice_bounds(flat.numel() // kind.unit, self._wire.num_replicas)
        return [flat[start * kind.unit : stop * kind.unit] for start, stop in pairwise(bounds)]

    def _add_inner_products(self, rows: Sequence[Tensor], kind: _Kind) -> None:
        """Of the contributions to the slice this replica owns, while they are in the cache."""
        if not kind.measured:
            return
        owner = self._wire.replica
        longest = max(row.numel() for row in rows)
        values = [kind.values(row if row.numel() == longest else row.new_zeros(longest), owner) for row in rows]
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
