"""One island of an elastic run: trains alone, and takes part in rounds that others may leave or join at any time.

    while the run goes on:
        inner steps till this island's share of a round is done         hearing, between steps, what the others agreed
        offer the progress, wait until the round is committed, adopt it

What may happen between an offer and its commit, and how it is heard of:

    Go          average now, with these: an attempt begins, in a thread of its own
    Void        the attempt came to nothing; the offer stands, and another `Go` follows
    Commit      all reached the same anchor: adopt it. An island that had nothing to offer in time adopts it as well and
                carries its progress onto it: it is owed to the next round
    Donor       what this island holds is not what is committed: fetch that

An attempt changes nothing of the island, so that it can be given up at any moment. Only `_land` and `_fetch` move the
anchor, both in the training thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from atoll.algo.merge import geometry
from atoll.algo.schedule import Schedule
from atoll.comm.torchdist import TorchDistTransport
from atoll.data.stream import LeasedStream
from atoll.elastic import messages as m
from atoll.elastic.group import connect, host_meeting, join_meeting
from atoll.elastic.link import LinkFailed, LinkLost
from atoll.errors import AtollError, CheckpointError, ConfigError, DataError, TransportError
from atoll.train.committed import capture, restore
from atoll.train.config import TrainConfig
from atoll.train.replica import Replica, StepReport
from atoll.train.sync import Arrived, ReplicaSync

MEETING_S = 20.0  # the longest wait for the participants of an attempt to meet
LEASED_ROUNDS = 2  # rounds of samples that an island holds at most


class ControlLink(Protocol):
    """The way to the coordinator. events: what comes from there, and what this process puts in itself."""

    events: queue.Queue[Any]

    def send(self, message: m.FromMember) -> None: ...


@dataclass(frozen=True)
class Averaged:
    """An attempt of this island is over. result: what it reached, or why it failed."""

    attempt: int
    result: Arrived | AtollError
    wire_s: float


class Watcher(Protocol):
    """Who is told what happens to an island."""

    def stepped(self, report: StepReport, *, step: int) -> None: ...

    def committed(self, commit: m.Commit, *, step: int, leads: bool) -> None: ...

    def line(self, text: str) -> None: ...


@dataclass
class _Offer:
    """What was taken for a round, and what it was made of: owed again if the round is committed without it."""

    ready: m.Ready
    tokens_before: int
    committed: bool = False  # it is in a committed round, although this island could not adopt it


class Stopped(Exception):
    """The island was told to leave."""


class Island:
    """The training thread of one island."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        member: str,
        address: str,
        replica: Replica,
        sync: ReplicaSync,
        schedule: Schedule,
        link: ControlLink,
        watcher: Watcher,
        fetch: Callable[[m.Donor], tuple[dict[str, Tensor], dict[str, Any]]],
        should_stop: Callable[[], bool],
        seat: int = -1,
        has_state: bool = False,
        steps: int = 0,
        position: int = 0,
    ) -> None:
        assert isinstance(replica.stream, LeasedStream)
        self.config = config
        self.replica = replica
        self.sync = sync
        self.round = sync.round  # the committed round whose state this island holds
        self.has_state = has_state  # whether the anchor is one that was committed, or that a founder may begin with
        self.seat = seat
        self.leads = False
        self.finish: m.Finish | None = None
        self.state_lock = threading.Lock()  # held while the anchor moves
        self._member = member
        self._address = address
        self._stream = replica.stream
        self._delayed = schedule.delay > 0
        self._blocking_first = schedule.blocking_first
        self._link = link
        self._watcher = watcher
        self._fetch_state = fetch
        self._should_stop = should_stop
        self.steps = steps  # inner steps since this island last had something in a round
        self._target = config.inner_steps
        self._boot = ""
        self._num_rounds = -(-config.max_steps // config.inner_steps)
        self._offer: _Offer | None = None  # announced, and in no committed round yet
        self._go: m.Go | None = None
        self._attempt: _Attempt | None = None
        self._arrived: tuple[int, Arrived] | None = None  # attempt, and what it reached
        self._commit: m.Commit | None = None  # committed, and not adopted yet: rounds that land later
        self._inner_s = 0.0
        self._exposed_s = 0.0  # of the current round: seconds in which this island waited
        self._current = False
        self._waits_to_land = False
        self._last_attempt = 0  # the highest numbers heard of, for a coordinator that lost its log
        self.position = position
        self._wanted = 0  # samples asked for and not leased yet

    # --- the loop

    def run(self) -> None:
        """Train until the run is over. Raises `Stopped` when told to leave, `AtollError` when it cannot go on."""
        self._wait(lambda: self._current)
        while self.finish is None and self.round < self._num_rounds:
            if self.steps < self._target:
                self._lease_ahead()
                if self.finish is None:
                    self._inner_step()
                self._hear()
            else:
                self._sync()
        self._wait(lambda: self.finish is not None)

    def hello(self, **about: Any) -> m.Hello:
        """What this island says of itself whenever it comes to the coordinator; `about` is what never changes."""
        offered = self._offer.ready.used if self._offer else ()
        in_flight = self._offer is not None and self._go is not None and self._counts(self._go)
        return m.Hello(
            member=self._member,
            round=self.round if self.has_state else -1,
            digest=self.sync.digest() if self.has_state else "",
            leased=self._stream.leased if in_flight else (*offered, *self._stream.leased),
            in_flight=offered if in_flight else (),
            in_flight_round=self._go.round if in_flight and self._go else 0,
            attempt=self._last_attempt,
            position=self.position,
            seat=self.seat,
            **about,
        )

    def beat(self) -> m.Beat:
        """A sign of life, from another thread."""
        rate = self.steps * self._tokens_a_step() / self._inner_s if self._inner_s else 0.0
        return m.Beat(self.steps, rate)

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The committed state for a joiner; from another thread, between two rounds."""
        with self.state_lock:
            return capture(self.sync)

    # --- inner steps

    def _inner_step(self) -> None:
        step = self._step()
        self.replica.compute_gradients(step)
        report = self.replica.update(step)
        self.steps += 1
        self._inner_s += report.seconds
        self._watcher.stepped(report, step=step)

    def _step(self) -> int:
        """The global inner step that comes next: where the run is, not how much this island has done of it."""
        within = min(self.steps + 1, self.config.inner_steps)
        return min(self.round * self.config.inner_steps + within, self.config.max_steps)

    def _lease_ahead(self) -> None:
        """Have samples for this step, and for a round more, so that a coordinator that is away stops nobody."""
        need = self.config.batch_size * self.config.gradient_accumulation_steps
        if self._stream.remaining < need * self.config.inner_steps and self._wanted == 0:
            self._want(need * self.config.inner_steps * LEASED_ROUNDS - self._stream.remaining)
        if self._stream.remaining < need:
            self._wait(lambda: self._stream.remaining >= need or self.finish is not None)

    def _want(self, samples: int) -> None:
        self._wanted = samples
        self._link.send(m.Want(samples))

    # --- rounds

    def _sync(self) -> None:
        """Bring this island's progress into a round.

        With a delay a round lands when the next one is taken, and is taken before it lands: progress first, then θ.
        """
        began = time.perf_counter()
        taken = self._take()
        if self._offer is not None:
            self._wait_landed()
        if self.steps > 0:  # the round before was committed without us: all of it is owed again
            self._restore(taken)
        else:
            self._announce(taken)
            if not self._delayed or (self._blocking_first and self.round == 0):
                self._wait_landed()
        self._exposed_s += time.perf_counter() - began

    def _take(self) -> _Offer:
        """Take the progress of this island as it is now."""
        replica = self.replica
        offer = self.sync.take(0, weight=float(replica.tokens - replica.tokens_at_sync))
        ready = m.Ready(
            round=self.round + 1,
            base="",
            weight=offer.weight,
            norm=offer.norm,
            finite=offer.finite,
            steps=self.steps,
            used=self._stream.settle(),
            inner_s=self._inner_s,
        )
        taken = _Offer(ready, replica.tokens_at_sync)
        replica.tokens_at_sync = replica.tokens
        self.steps, self._inner_s = 0, 0.0
        return taken

    def _announce(self, offer: _Offer) -> None:
        """Say that the progress is there; also again, when the coordinator came back or the anchor was mended."""
        ready = replace(offer.ready, round=self.round + 1, base=self.sync.measure_digest())
        self._offer = replace(offer, ready=ready)
        self._link.send(ready)

    def _wait_landed(self) -> None:
        """Until what was offered is in a committed round, or is owed again."""
        self._waits_to_land = True
        if self._commit is not None:
            self._adopt_committed()
        self._wait(lambda: self._offer is None or self.finish is not None)
        self._waits_to_land = False

    def _land(self, arrived: Arrived, commit: m.Commit) -> None:
        """The round is committed: adopt it."""
        step = min(commit.round * self.config.inner_steps, self.config.max_steps)
        with self.state_lock:
            report = self.sync.land(0, arrived, step=step)
            self.round = commit.round
        if report.weights[arrived.place] == 0:
            self._owe_again()
        self._offer = self._go = None
        if commit.fastest > 0 and self.config.adapt_inner_steps:
            self._target = self._adapted(commit.fastest)
        self._watcher.committed(commit, step=step, leads=self.leads)

    def _owe_again(self) -> None:
        """A round was committed without what was offered: it is owed to the next, unless it is broken."""
        if self._offer is None:
            return
        if not self._offer.ready.finite:
            self.sync.restart()
            self.replica.start_afresh()
        else:
            self._restore(self._offer)

    def _restore(self, offer: _Offer) -> None:
        self.steps += offer.ready.steps
        self._inner_s += offer.ready.inner_s
        self.replica.tokens_at_sync = min(self.replica.tokens_at_sync, offer.tokens_before)
        self._stream.owe(offer.ready.used)

    def _adapted(self, fastest: float) -> int:
        """DyLU: as many steps as this island makes while the fastest makes all of them."""
        rate = self.beat().tokens_per_s or fastest
        return max(1, min(self.config.inner_steps, int(self.config.inner_steps * rate / fastest)))

    # --- what is heard

    def _hear(self) -> None:
        """Whatever has come in since, without waiting."""
        self._check_stop()
        while True:
            try:
                event = self._link.events.get_nowait()
            except queue.Empty:
                return
            self._handle(event)

    def _wait(self, until: Callable[[], bool]) -> None:
        """Hear what comes in until something is true."""
        while not until():
            self._check_stop()
            try:
                event = self._link.events.get(timeout=0.2)
            except queue.Empty:
                continue
            self._handle(event)

    def _check_stop(self) -> None:
        if self._should_stop():
            raise Stopped

    def _handle(self, event: object) -> None:
        match event:
            case m.Welcome():
                self._welcomed(event)
            case m.Go():
                self._begin(event)
            case m.Meet(attempt, address, port):
                if self._attempt is not None and self._attempt.number == attempt:
                    self._attempt.meeting.put((address, port))
            case Averaged():
                self._averaged(event)
            case m.Commit():
                self._committed(event)
            case m.Void(attempt, why):
                self._give_up(attempt)
            case m.Rejected():
                self._rejected(event)
            case m.Donor():
                self._fetch(event)
            case m.Lease(ranges, position):
                self.position = max(self.position, position)
                self._wanted = 0
                self._stream.lease(ranges)
            case m.Refused(why, exit_code):
                raise _refusal(why, exit_code)
            case m.Finish():
                self.finish = event
            case LinkLost(why):
                self._watcher.line(f"the coordinator is out of reach, training goes on: {why.splitlines()[0]}")
            case LinkFailed(trace):
                raise RuntimeError(f"the link to the coordinator failed:\n{trace}")

    def _welcomed(self, welcome: m.Welcome) -> None:
        self.seat = welcome.seat
        self.leads = self.leads or (self._go is None and welcome.seat == 0)
        self.replica.index = welcome.seat
        self._current = welcome.current
        if welcome.boot != self._boot:
            self._boot = welcome.boot
            self._attempt = None
        self._num_rounds = welcome.num_rounds
        self.position = max(self.position, welcome.position)
        if self._wanted:
            self._want(self._wanted)  # whether it was heard the first time is not known; samples are plenty
        if self._offer is not None and welcome.contributed >= self._offer.ready.round:
            self._offer.committed = True
        arrived = self._arrived
        if arrived is not None and welcome.round == self.round + 1 and arrived[1].digest == welcome.digest:
            # it was committed while the coordinator could not say so
            self._committed(m.Commit(welcome.round, arrived[0], welcome.digest))
            self._say_what_it_has()
            self._current = True
        elif welcome.current:
            self._arrived = None
            if self._offer is not None:
                self._announce(self._offer)

    def _begin(self, go: m.Go) -> None:
        """Take part in an attempt, with what was offered or listening."""
        if self._commit is not None:
            self._adopt_committed()  # a round that would have landed later: the next one starts from it
        if go.round != self.round + 1:
            self._link.send(m.Failed(go.round, go.attempt, f"holds round {self.round}"))
            return
        place = [participant.member for participant in go.participants].index(self._member)
        self.leads = go.participants[place].seat == min(participant.seat for participant in go.participants)
        self._go = go
        self._last_attempt = max(self._last_attempt, go.attempt)
        self._arrived = None
        self._attempt = _Attempt(self, go, place)
        self._attempt.start()

    def average(self, go: m.Go, place: int, meeting: queue.Queue[tuple[str, int]]) -> Arrived:
        """One attempt, in its own thread: meet, average, find out where it leads. Changes nothing."""
        if place == 0:
            met = host_meeting(self._address, timeout_s=MEETING_S)
            self._link.send(m.Meet(go.attempt, met.address, met.port))
            store = met.store
        else:
            try:
                store = join_meeting(*meeting.get(timeout=MEETING_S), timeout_s=MEETING_S)
            except queue.Empty:
                raise TransportError("the first participant never said where to meet") from None
        group = connect(
            store,
            go.participants,
            member=self._member,
            attempt=go.attempt,
            address=self._address,
            timeout_s=self.config.timeout_s,
        )
        transport = TorchDistTransport(group, timeout_s=self.config.timeout_s)
        weights = [participant.weight for participant in go.participants]
        step = min(go.round * self.config.inner_steps, self.config.max_steps)
        return self.sync.average(0, transport, weights, offered=self._offer is not None, step=step)

    def post(self, averaged: Averaged) -> None:
        """From the thread of an attempt: it is over."""
        self._link.events.put(averaged)

    def _averaged(self, averaged: Averaged) -> None:
        if self._attempt is None or averaged.attempt != self._attempt.number or self._go is None:
            return
        if isinstance(averaged.result, AtollError):
            self._link.send(m.Failed(self._go.round, averaged.attempt, str(averaged.result).splitlines()[0]))
            return
        arrived = averaged.result
        self._arrived = (averaged.attempt, arrived)
        self._link.send(_reached(self._go, averaged, arrived))

    def _committed(self, commit: m.Commit) -> None:
        self.position = max(self.position, commit.position)
        if commit.round <= self.round:
            return  # said again to one that had it already
        if self._arrived is None or self._arrived[0] != commit.attempt:
            self._link.send(m.Failed(commit.round, commit.attempt, "has no result of it"))
            return
        self._commit = commit
        if self._waits_to_land or self._offer is None or not self._delayed:
            self._adopt_committed()  # else it lands when the next one is taken

    def _adopt_committed(self) -> None:
        assert self._commit is not None and self._arrived is not None
        commit, arrived = self._commit, self._arrived[1]
        self._commit = self._arrived = self._attempt = None
        self._land(arrived, commit)

    def _give_up(self, attempt: int) -> None:
        if self._attempt is not None and self._attempt.number == attempt:
            self._attempt = self._arrived = self._go = None

    def _rejected(self, rejected: m.Rejected) -> None:
        """The offer was not let in. What can never be let in is dropped; the rest is owed to the next round."""
        if rejected.round > self.round:  # else it crossed the commit of a round that went on without it
            self._watcher.line(f"contribution refused: {rejected.why}" + (" (benched)" if rejected.benched else ""))
        if rejected.drop:
            self._offer = None
            self.sync.take_back(0)
            self.sync.restart()
            self.replica.start_afresh()
            self.replica.tokens_at_sync = self.replica.tokens
            self.steps, self._inner_s = 0, 0.0

    def _fetch(self, donor: m.Donor) -> None:
        """Take over the committed state; what this island has done that no committed round holds stays owed."""
        try:
            tensors, about = self._fetch_state(donor)
        except (TransportError, CheckpointError, DataError) as error:
            self._watcher.line(f"state from {donor.member[:8]} not received: {str(error).splitlines()[0]}")
            self._say_what_it_has()
            return
        mended = self.has_state and about["round"] == self.round  # the anchor alone was wrong
        landed = self._offer is not None and self._offer.committed
        progress = self.sync.progress(without_offers=landed) if self.has_state and not mended else None
        with self.state_lock:
            self.sync.take_back(0)
            restore(self.sync, tensors, about)
            if not mended:
                self.sync.rebase(progress)
            self.round = about["round"]
            self.has_state = True
        if not landed:
            self._owe_again()
        self._offer = self._arrived = self._commit = self._go = None
        self._current = True
        self._say_what_it_has()

    def _say_what_it_has(self) -> None:
        held = (self.round, self.sync.digest()) if self.has_state else (-1, "")
        self._link.send(m.Have(*held))

    def _counts(self, go: m.Go) -> bool:
        return any(who.member == self._member and who.weight > 0 for who in go.participants)

    def _tokens_a_step(self) -> int:
        config = self.config
        return config.batch_size * config.gradient_accumulation_steps * config.sequence_length


class _Attempt:
    """One attempt under way. meeting: where its participants meet, once that is known."""

    def __init__(self, island: Island, go: m.Go, place: int) -> None:
        self.number = go.attempt
        self.meeting: queue.Queue[tuple[str, int]] = queue.Queue()
        self._island = island
        self._go = go
        self._place = place

    def start(self) -> None:
        # A daemon: nothing can interrupt a wait inside gloo, and a process that leaves does not wait for it.
        threading.Thread(target=self._run, name=f"atoll-attempt-{self.number}", daemon=True).start()

    def _run(self) -> None:
        began = time.perf_counter()
        result: Arrived | AtollError
        try:
            result = self._island.average(self._go, self._place, self.meeting)
        except AtollError as error:
            result = error
        except Exception as error:  # whatever it is, the others must hear that this attempt came to nothing
            result = AtollError(f"{type(error).__name__}: {error}")
        self._island.post(Averaged(self.number, result, time.perf_counter() - began))


def _reached(go: m.Go, averaged: Averaged, arrived: Arrived) -> m.Reached:
    gram = arrived.sent.gram
    seen = None if gram is None else geometry(gram, [participant.weight for participant in go.participants])
    return m.Reached(
        round=go.round,
        attempt=go.attempt,
        digest=arrived.digest,
        base=arrived.base,
        norms=() if seen is None else tuple(seen.norms),
        delta_norm=0.0 if seen is None else seen.delta_norm,
        cosine_mean=None if seen is None else seen.cosine_mean,
        payload_bytes=arrived.sent.payload_bytes,
        wire_s=averaged.wire_s,
    )


def _refusal(why: str, exit_code: int) -> AtollError:
    error = ConfigError(why) if exit_code == 2 else TransportError(why)
    error.exit_code = exit_code
    return error
