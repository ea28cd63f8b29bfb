"""One island of an elastic run: trains alone, and takes part in rounds that others may leave or join at any time.

    while the run goes on:
        inner steps till this island's share of a round is done         hearing, between steps, what the others agreed
        offer the progress, wait until the round is committed, adopt it

What may happen between an offer and its commit, and how it is heard of:

    Go          average now, with these: an attempt begins, in a thread of its own
    Void        the attempt came to nothing; the offer stands, and another `Go` follows
    Commit      all reached the same anchor: adopt it. An island that had nothing to offer in time adopts it as well and
                carries its progress onto it: it is owed to the next round
    Donor       what this island holds is not what is committed: fetch that, in a thread of its own

An attempt changes nothing of the island, so that it can be given up at any moment. Only `_adopt_committed` and
`_take_over` move the anchor, both in the training thread. docs/protocol.md ("What an island must do") says what the
others rely on. What the island's workers do, it does by its `Crew`: here it is one, however many they are.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from atoll.algo.merge import geometry
from atoll.algo.schedule import Schedule
from atoll.data.stream import LeasedStream
from atoll.elastic import messages as m
from atoll.elastic.crash import crash_point
from atoll.elastic.donate import State
from atoll.elastic.group import host_meeting, join_meeting
from atoll.elastic.leases import common, without
from atoll.elastic.link import LinkBack, LinkFailed, LinkLost
from atoll.errors import AtollError, CheckpointError, ConfigError, DataError, TransportError
from atoll.exchange import mean_sent_bytes
from atoll.train.config import TrainConfig
from atoll.train.crew import Crew, Reached
from atoll.train.replica import StepReport

MEETING_S = 20.0  # the longest wait for the first participant of an attempt to say where to meet
FIRST_WORD_S = 60.0  # the longest wait of an island that was never let in for a coordinator that is away
LEASED_ROUNDS = 2  # rounds of samples that an island holds at most
SAY_AGAIN_S = 0.5  # after a refusal, before the same is offered again
MEND_S = 3.0  # after a refusal for a damaged anchor, before the island asks for a donor by saying what it holds
AS_FAST = 0.85  # of the fastest island's speed; from there on an island takes all inner steps: grace covers the rest
LAST_STATE_S = 5.0  # at the end of the run, for an island that is behind to fetch the last state


class ControlLink(Protocol):
    """The way to the coordinator. events: what comes from there, and what this process puts in itself."""

    events: queue.Queue[Any]

    def send(self, message: m.FromMember, *, connection: int | None = None) -> None: ...


@dataclass(frozen=True)
class Averaged:
    """An attempt of this island is over. result: what it reached, or why it failed."""

    attempt: int
    result: Reached | AtollError
    wire_s: float


@dataclass(frozen=True)
class Arriving:
    """A committed state, all of whose rows are with the workers. transfer: its number. about: what came with it."""

    transfer: int
    about: dict[str, Any]


@dataclass(frozen=True)
class Fetched:
    """A transfer is over. result: the committed state, or why it did not come."""

    donor: m.Donor
    result: Arriving | AtollError


@dataclass(frozen=True)
class Landing:
    """A round that this island adopted. place: of this island among the `of` that averaged it."""

    commit: m.Commit
    step: int
    place: int
    of: int
    leads: bool


class Watcher(Protocol):
    """Who is told what happens to an island."""

    def stepped(self, report: StepReport, *, step: int) -> None: ...

    def committed(self, landing: Landing) -> None: ...

    def line(self, text: str) -> None: ...


@dataclass
class _Offer:
    """What was taken for a round, and what it was made of: owed again if the round is committed without it.

    given: the averaging that it was given to and whose outcome is not known. spent: it is in a committed round, which
    this island has not adopted.
    """

    ready: m.Ready
    tokens_before: int
    given: m.Go | None = None
    spent: bool = False


class Stopped(Exception):
    """The island was told to leave."""


class Island:
    """The training thread of one island.

    crew: its workers, led by this process. digest: of the anchor that they hold. introduction: what it says of itself
    when it comes to the coordinator, the state it holds left out.
    books: name of the books on samples in which those that the stream holds are its own.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        introduction: m.Hello,
        crew: Crew,
        digest: str,
        schedule: Schedule,
        link: ControlLink,
        watcher: Watcher,
        fetch: Callable[[m.Donor], Arriving],
        should_stop: Callable[[], bool],
        has_state: bool = False,
        steps: int = 0,
        position: int = 0,
        books: str = "",
    ) -> None:
        assert isinstance(crew.worker.stream, LeasedStream)
        self.config = config
        self.crew = crew
        self.replica = crew.worker.replica
        self.round = crew.round  # the committed round whose state this island holds
        self.has_state = has_state  # whether the anchor is one that was committed, or that a founder may begin with
        self.seat = introduction.seat
        self.leads = False
        self.finish: m.Finish | None = None
        self.steps = steps  # inner steps since this island last had something in a round
        self.position = position
        self.books = books
        self._introduction = introduction
        self._stream = crew.worker.stream
        self._delayed = schedule.delay > 0
        self._blocking_first = schedule.blocking_first
        self._link = link
        self._watcher = watcher
        self._fetch_state = fetch
        self._should_stop = should_stop
        self._target = config.inner_steps
        self._num_rounds = -(-config.max_steps // config.inner_steps)
        self._state_lock = threading.Lock()  # held while the anchor moves
        self._digest = digest  # of the anchor as it was when it last moved
        # what the coordinator said
        self._coming_connection = self._connection = 0  # only on one with a Welcome is anything said
        self._boot = ""
        self._told = (-1, "")  # the newest committed round that was heard of, and its digest
        self._current = False
        self._benched = False
        self._last_attempt = 0  # the highest number heard of, for a coordinator that lost its log
        self._wanted = 0  # samples asked for and not leased yet
        self._say_again_at: float | None = None
        # the round being made
        self._offer: _Offer | None = None  # announced, and not adopted as part of a committed round
        self._taken: _Offer | None = None  # for the round after that one: announced when that one has landed
        self._attempt: _Attempt | None = None
        self._commit: m.Commit | None = None  # committed, reached by `_attempt` and not adopted yet: lands later
        self._waits_to_land = False
        self._landings: list[Landing] = []  # that the watcher was not told of
        self._transfer: m.Donor | None = None
        self._inner_s = 0.0
        self._loss: float | None = None  # of the last inner steps, smoothed
        self._loss_sum, self._loss_steps = 0.0, 0  # over the inner steps of this offer that this process made
        self._measured_steps = self._measured_s = 0.0  # of the last rounds, each counting half of the next
        self._hello = introduction
        self._note()

    # --- the loop

    def run(self) -> None:
        """Train until the run is over. Raises `Stopped` when told to leave, `AtollError` when it cannot go on."""
        self._came_at = time.monotonic()
        self._wait(self._may_begin)
        while not self._is_over():
            if self._benched:
                self._wait(self._is_over)
            elif self.steps < self._target:
                self._lease_ahead()
                if self.finish is None:
                    self._inner_step()
                self._hear()
            else:
                self._sync()
        self._wait(lambda: self.finish is not None)
        self._conclude()

    def _may_begin(self) -> bool:
        """Whether there is a state to train from, or the run is over. One that was never let in does not wait for ever:
        a run that ended while it was on its way has no coordinator any more."""
        if not self._connection and time.monotonic() - self._came_at > FIRST_WORD_S:
            raise TransportError(
                f"the coordinator has said nothing for {FIRST_WORD_S:.0f} s. The run may be over, or its coordinator "
                "down: see `atoll status` there, then give the same command again."
            )
        return self._current or self.finish is not None

    def hello(self) -> m.Hello:
        """What this island says whenever it comes to the coordinator; from another thread.

        It is made by the training thread whenever that changes: what is said must fit together.
        """
        return self._hello

    def beat(self) -> m.Beat:
        """A sign of life, from another thread."""
        return m.Beat(self.steps, self._tokens_per_s(), self._loss)

    @property
    def digest(self) -> str:
        """Of the anchor as it was when it last moved."""
        return self._digest

    def snapshot(self) -> State:
        """The committed state for a joiner; from another thread. Raises `CheckpointError` where there is none."""
        with self._state_lock:
            if not self.has_state:
                raise CheckpointError("this island holds no committed state itself.")
            commit, attempt = self._commit, self._attempt
            ahead = attempt.arrived if commit is not None and attempt is not None else None
            round, digest = (self.round, self._digest) if ahead is None else (self.round + 1, ahead.digest)
            tensors, about = self.crew.capture(ahead, step=self._step_of(round))
        return tensors, about | {"round": round, "digest": digest, "position": self.position}

    def withdraw(self) -> None:
        """Before leaving: nothing is on offer any more. The progress that no committed round holds can be kept then."""
        if self._commit is not None:
            self._adopt_committed()
        self.crew.withdraw(spent=self._offer is not None and self._offer.spent)
        self._owe_again()

    def _is_over(self) -> bool:
        return self.finish is not None or self.round >= self._num_rounds

    def _conclude(self) -> None:
        """Hold the last state, where it is to be had."""
        if self._commit is not None:
            self._adopt_committed()
        deadline = time.monotonic() + LAST_STATE_S
        self._wait(lambda: self._transfer is None or time.monotonic() >= deadline)
        self._follow_up()

    # --- inner steps

    def _inner_step(self) -> None:
        crash_point("island.step")
        step = self._step()
        report = self.crew.step(step)
        self.steps += 1
        self._inner_s += report.seconds
        self._loss = _smooth(self._loss, report.loss)
        self._loss_sum, self._loss_steps = self._loss_sum + report.loss, self._loss_steps + 1
        self._measured_steps += 1
        self._measured_s += report.seconds
        self._watcher.stepped(report, step=step)
        crash_point("island.stepped")

    def _step(self) -> int:
        """The global inner step that comes next: where the run is, not how much this island has done of it."""
        within = min(self.steps + 1, self.config.inner_steps)
        return min(self.round * self.config.inner_steps + within, self.config.max_steps)

    def _step_of(self, round: int) -> int:
        return min(round * self.config.inner_steps, self.config.max_steps)

    def _lease_ahead(self) -> None:
        """Have samples for this step, and for a round more, so that a coordinator that is away stops nobody."""
        need = self.config.batch_size * self.config.gradient_accumulation_steps
        if self._stream.remaining < need * self.config.inner_steps and self._wanted == 0:
            self._want(need * self.config.inner_steps * LEASED_ROUNDS - self._stream.remaining)
        if self._stream.remaining < need:
            self._wait(lambda: self._stream.remaining >= need or self.finish is not None)

    def _want(self, samples: int) -> None:
        self._wanted = samples
        self._say(m.Want(samples))

    # --- offering

    def _sync(self) -> None:
        """Bring this island's progress into a round.

        With a delay a round lands when the next one is taken, and is taken before it lands: progress first, then θ.
        """
        self._taken = self._take()
        if self._offer is not None:
            self._wait_landed()
        if self._taken is None or self.finish is not None:  # the round before was made without us: all is owed again
            return
        self._offer, self._taken = self._taken, None
        self._announce()
        if not self._delayed or self._lands_at_once():
            self._wait_landed()

    def _lands_at_once(self) -> bool:
        """Whether the round on offer lands before training goes on, although rounds are delayed."""
        return (self._blocking_first and self.round == 0) or self.round + 1 >= self._num_rounds

    def _take(self) -> _Offer:
        """Take the progress of this island as it is now."""
        crash_point("island.before_take")
        replica = self.replica
        offer = self.crew.take(weight=float(replica.tokens - replica.tokens_at_sync))
        ready = m.Ready(
            round=self.round + 1,
            base="",
            weight=offer.weight,
            norm=offer.norm,
            finite=offer.finite,
            steps=self.steps,
            used=self._stream.settle(),
            inner_s=self._inner_s,
            loss=self._loss_sum / self._loss_steps if self._loss_steps else None,
        )
        taken = _Offer(ready, replica.tokens_at_sync)
        replica.tokens_at_sync = replica.tokens
        self.steps, self._inner_s = 0, 0.0
        self._loss_sum, self._loss_steps = 0.0, 0
        self._measured_steps, self._measured_s = self._measured_steps / 2, self._measured_s / 2
        crash_point("island.taken")
        return taken

    def _announce(self) -> None:
        """Say that the progress is there; also again, when the coordinator came back or the anchor was mended."""
        offer = self._offer
        if offer is None or offer.spent or self._commit is not None or self._benched:
            return
        self._say_again_at = None
        offer.ready = replace(offer.ready, round=self.round + 1, base=self.crew.digest())
        self._note()
        self._say(offer.ready)
        crash_point("island.ready")

    def _wait_landed(self) -> None:
        """Until what was offered is in a committed round, or is owed again."""
        self._waits_to_land = True
        if self._commit is not None:
            self._adopt_committed()
        self._wait(lambda: self._offer is None or self.finish is not None)
        self._waits_to_land = False

    def _owe_again(self) -> None:
        """What was taken is in no committed round: it goes to the next, unless it is broken or spent."""
        offers = [offer for offer in (self._taken, self._offer) if offer is not None and not offer.spent]
        self._offer = self._taken = None
        for offer in offers:
            self.steps += offer.ready.steps
            self._inner_s += offer.ready.inner_s
            if offer.ready.loss is not None:
                self._loss_sum += offer.ready.loss * offer.ready.steps
                self._loss_steps += offer.ready.steps
            self.replica.tokens_at_sync = min(self.replica.tokens_at_sync, offer.tokens_before)
            self._stream.owe(offer.ready.used)
        if not all(offer.ready.finite for offer in offers):
            self._drop_work()

    def _drop_work(self) -> None:
        """Start again from the anchor: what was done since can be in no round."""
        self._offer = self._taken = None  # an attempt that it listens to goes on
        self.crew.restart()
        self.replica.tokens_at_sync = self.replica.tokens
        self._stream.settle()
        self.steps, self._inner_s = 0, 0.0
        self._loss_sum, self._loss_steps = 0.0, 0

    # --- adopting

    def _adopt_committed(self) -> None:
        """Land what is committed and was reached here."""
        commit, attempt = self._commit, self._attempt
        assert commit is not None and attempt is not None and attempt.arrived is not None
        crash_point("island.before_land")
        step = self._step_of(commit.round)
        with self._state_lock:
            self._digest = self.crew.land(attempt.arrived, step=step)
            self.round = commit.round
            self._commit = self._attempt = None
        if attempt.offers:
            self._offer = None
        else:
            self._owe_again()
        self._target = self._share_of_steps(commit.fastest)
        self._note()
        if self._digest == commit.digest:
            self._say_what_it_has()
        else:
            self._report_damage()
        crash_point("island.landed")
        self._landings.append(Landing(commit, step, attempt.place, len(attempt.go.participants), self.leads))

    def _report_damage(self) -> None:
        """The anchor is not what all agreed on; the state comes from a donor."""
        self._current = False
        self._watcher.line(f"the anchor of round {self.round} was damaged here; it is fetched from another island")
        self._say_what_it_has()

    def _share_of_steps(self, fastest: float) -> int:
        """DyLU: as many steps as this island makes while the fastest makes all of them."""
        steps = self.config.inner_steps
        if not self.config.adapt_inner_steps or fastest <= 0 or self._measured_s <= 0:
            return steps
        speed = self._tokens_per_s() / fastest
        return steps if speed >= AS_FAST else max(1, int(steps * speed))

    def _take_over(self, state: Arriving) -> None:
        """Take over the committed state; what this island has done that no committed round holds stays owed."""
        about = state.about
        mended = self.has_state and about["round"] == self.round  # the anchor alone was wrong
        spent = self._offer is not None and self._offer.spent
        keep = self.has_state and not mended
        idle = self._offer is None and self._taken is None and self.steps == 0
        with self._state_lock:
            self._digest = self.crew.restore(
                about, transfer=state.transfer, keep=keep, spent=spent, rebase=not mended or idle
            )
            self.round = about["round"]
            self.has_state = True
            self._commit = self._attempt = None
        self.position = max(self.position, int(about["position"]))
        self._owe_again()

    # --- hearing

    def _hear(self) -> None:
        """Whatever has come in since, without waiting."""
        self._check_stop()
        while True:
            try:
                event = self._link.events.get_nowait()
            except queue.Empty:
                break
            self._handle(event)
        self._follow_up()

    def _wait(self, until: Callable[[], bool]) -> None:
        """Hear what comes in until something is true."""
        while not until():
            self._check_stop()
            try:
                event = self._link.events.get(timeout=0.2)
            except queue.Empty:
                event = None
            if event is not None:
                self._handle(event)
            self._follow_up()

    def _follow_up(self) -> None:
        """What follows from events and may take long: nobody waits for it."""
        self._say_again_if_due()
        while self._landings:
            self._watcher.committed(self._landings.pop(0))

    def _check_stop(self) -> None:
        if self._should_stop():
            raise Stopped

    def _handle(self, event: object) -> None:
        match event:
            case LinkBack(number):
                self._coming_connection = number
            case m.Welcome():
                self._welcomed(event)
            case m.Go():
                self._begin(event)
            case m.Meet(attempt, address, port):
                if self._attempt is not None and self._attempt.go.attempt == attempt:
                    self._attempt.meeting.put((address, port))
            case Averaged():
                self._averaged(event)
            case m.Commit():
                self._committed(event)
            case m.Void(attempt):
                self._give_up(attempt)
            case m.Rejected():
                self._rejected(event)
            case m.Donor():
                self._begin_transfer(event)
            case Fetched():
                self._fetched(event)
            case m.Lease(ranges, position):
                self.position = max(self.position, position)
                self._wanted = 0
                self._stream.lease(ranges)
            case m.Refused(why, exit_code):
                raise _refusal(why, exit_code)
            case m.Finish():
                self.finish = event
            case LinkLost(why):
                doing = "training goes on" if self._connection else "nothing is trained yet"
                self._watcher.line(f"the coordinator is out of reach, {doing}: {why.splitlines()[0]}")
            case LinkFailed(trace):
                raise RuntimeError(f"the link to the coordinator failed:\n{trace}")
        self._note()

    def _say(self, message: m.FromMember) -> None:
        """Say this, unless the connection on which it holds is gone: after the next `Welcome` it is said anew."""
        self._link.send(message, connection=self._connection)

    def _note(self) -> None:
        """Put down what `hello` says from now on."""
        round, digest = self._held()
        offer = self._offer if self._offer is not None and not self._offer.spent else None
        in_flight = offer.ready.used if offer is not None and offer.given is not None else ()
        owned = [*self._stream.leased]
        owned += offer.ready.used if offer is not None and offer.given is None else ()
        owned += self._taken.ready.used if self._taken is not None else ()
        self._hello = replace(
            self._introduction,
            round=round,
            digest=digest,
            seat=self.seat,
            leased=tuple(owned),
            in_flight=tuple(in_flight),
            in_flight_round=offer.given.round if offer is not None and offer.given is not None else 0,
            attempt=self._last_attempt,
            position=self.position,
            books=self.books,
        )

    def _held(self) -> tuple[int, str]:
        """The committed state that this island holds or is about to adopt: -1 and "" for none."""
        if self._commit is not None:
            return self._commit.round, self._commit.digest
        return (self.round, self._digest) if self.has_state else (-1, "")

    def _say_what_it_has(self) -> None:
        self._say(m.Have(*self._held()))
        crash_point("island.have")

    # --- what the coordinator says

    def _welcomed(self, welcome: m.Welcome) -> None:
        self._connection = self._coming_connection
        self.seat = self.replica.index = welcome.seat
        self.leads = self.leads or (self._last_attempt == 0 and welcome.seat == 0)
        self._num_rounds = welcome.num_rounds
        self.position = max(self.position, welcome.position)
        if welcome.boot != self._boot:
            self._boot = welcome.boot
            if self._attempt is not None and self._attempt.arrived is None:
                self._attempt = None
        if welcome.settled:
            self._settle(welcome)
        self._told = (welcome.round, welcome.digest)
        self._current = welcome.current or self._held() == (welcome.round, welcome.digest)
        if self._current and not welcome.current:
            self._say_what_it_has()  # it got there while the Welcome was on its way
        if self._wanted:
            self._want(self._wanted)  # whether it was heard the first time is not known; samples are plenty
        if self._current:
            self._announce()

    def _settle(self, welcome: m.Welcome) -> None:
        """What became of the contribution in flight, and of the samples held."""
        self.books = welcome.books
        offer = self._offer
        if offer is not None and offer.given is not None:
            offer.spent |= welcome.contributed >= offer.given.round
            if not offer.spent and (self._attempt is None or self._attempt.go is not offer.given):
                offer.given = None  # it was of an earlier boot, and came to nothing
        state = self._stream.state_dict()
        leased = [(start, stop) for start, stop in state["leased"]]
        used = [(start, stop) for start, stop in state["used"]]
        trained = list(used)
        for one in (self._offer, self._taken):
            trained += one.ready.used if one is not None and not one.spent else ()
        if without(trained, welcome.leased):
            self._watcher.line("samples of this island are with others now; the work done with them is dropped")
            if self._commit is not None:
                self._adopt_committed()
            self._drop_work()
            leased, used = [*trained, *leased], []
        own = [pair for one in leased for pair in common([one], welcome.leased)]
        self._stream.load_state_dict({"leased": own, "used": used})

    def _begin(self, go: m.Go) -> None:
        """Take part in an attempt, with what was offered or listening."""
        self._last_attempt = max(self._last_attempt, go.attempt)
        if self._attempt is not None and self._attempt.go.attempt == go.attempt:
            self._say_outcome(self._attempt)  # the connection was lost in the middle of it
            return
        if self._commit is not None:
            self._adopt_committed()  # a round that would have landed later: the next one starts from it
        place = [participant.member for participant in go.participants].index(self._introduction.member)
        counts = go.participants[place].weight > 0
        if go.round != self.round + 1 or (counts and self._offer is None):
            self._say(m.Failed(go.round, go.attempt, f"holds round {self.round}, and nothing to offer for {go.round}"))
            return
        self.leads = go.participants[place].seat == min(participant.seat for participant in go.participants)
        if counts and self._offer is not None:
            self._offer.given = go
        self._attempt = _Attempt(self, go, place, offers=counts)
        crash_point("island.go")
        self._attempt.start()

    def average(self, attempt: _Attempt) -> Reached:
        """One attempt, in its own thread: meet, average, find out where it leads. Changes nothing."""
        began = time.perf_counter()
        go, address = attempt.go, self._introduction.address
        patience_s = max(MEETING_S, self.config.deadline_s)  # whoever is in the middle of an inner step comes late
        if attempt.place == 0:
            met = host_meeting(address, timeout_s=patience_s)
            crash_point("island.hosting")
            self._say(m.Meet(go.attempt, met.address, met.port))
            store, place = met.store, (met.address, met.port)
        else:
            try:
                place = attempt.meeting.get(timeout=patience_s)
            except queue.Empty:
                raise TransportError("the first participant never said where to meet") from None
            store = join_meeting(*place, timeout_s=patience_s)
        crash_point("island.meeting")
        met_s = time.perf_counter() - began
        reached = self.crew.average(
            store,
            place,
            attempt=go.attempt,
            round=go.round,
            place=attempt.place,
            weights=[participant.weight for participant in go.participants],
            offered=attempt.offers,
            step=self._step_of(go.round),
            base=self._digest,
            patience_s=patience_s,
        )
        return replace(reached, meet_s=met_s + reached.meet_s)

    def post(self, event: Averaged | Fetched) -> None:
        """From the thread of an attempt or a transfer: it is over."""
        self._link.events.put(event)

    def _averaged(self, averaged: Averaged) -> None:
        attempt = self._attempt
        if attempt is None or attempt.go.attempt != averaged.attempt:
            return
        attempt.averaged = averaged
        crash_point("island.averaged")
        self._say_outcome(attempt)
        crash_point("island.reached")

    def _say_outcome(self, attempt: _Attempt) -> None:
        """What became of the averaging here, if anything did yet."""
        averaged, go = attempt.averaged, attempt.go
        if averaged is None:
            return
        if isinstance(averaged.result, AtollError):
            self._say(m.Failed(go.round, go.attempt, str(averaged.result).splitlines()[0]))
        else:
            self._say(_reached(attempt, averaged, averaged.result, numel=self.crew.numel))

    def _committed(self, commit: m.Commit) -> None:
        crash_point("island.commit")
        self.position = max(self.position, commit.position)
        self._told = (commit.round, commit.digest)
        if commit.round <= self._held()[0]:
            self._say_what_it_has()  # said again to one that has it already
            return
        offer, attempt = self._offer, self._attempt
        if offer is not None and offer.given is not None:
            offer.spent = offer.given.attempt == commit.attempt and commit.weights.get(self.seat, 0.0) > 0
            offer.given = None
        dropped = attempt is not None and attempt.offers and offer is None
        if attempt is None or dropped or not attempt.reached(commit) or commit.round != self.round + 1:
            self._attempt, self._current = None, False
            self._say(m.Failed(commit.round, commit.attempt, "has no result of it"))
            return
        self._commit, self._current = commit, True
        if self._waits_to_land or offer is None or not offer.spent or not self._delayed:
            self._adopt_committed()  # without what was offered too late: that is owed, and offered again at once
        else:  # it lands when the next one is taken
            self._say_what_it_has()

    def _give_up(self, attempt: int) -> None:
        if self._offer is not None and self._offer.given is not None and self._offer.given.attempt == attempt:
            self._offer.given = None
        if self._attempt is not None and self._attempt.go.attempt == attempt:
            self._attempt = None

    def _rejected(self, rejected: m.Rejected) -> None:
        """The offer was not let in. What can never be let in is dropped; the rest is offered again."""
        self._benched |= rejected.benched
        if rejected.round <= self._held()[0]:
            return  # it crossed the commit of a round that went on without it
        self._watcher.line(f"contribution refused: {rejected.why}")
        if rejected.drop:
            self._drop_work()
        elif self._offer is not None:
            whole = self.crew.digest() == self._digest
            self._say_again_at = time.monotonic() + (SAY_AGAIN_S if whole else MEND_S)

    def _say_again_if_due(self) -> None:
        """After a refusal that names no donor: say what is held, then offer again."""
        if self._say_again_at is None or time.monotonic() < self._say_again_at:
            return
        self._say_again_at = None
        if self._transfer is None and self._commit is None:
            self._say(m.Have(self.round, self.crew.digest()))
            self._announce()

    # --- the state from a donor

    def _begin_transfer(self, donor: m.Donor) -> None:
        """Fetch the committed state; a donor named later replaces one that did not deliver yet."""
        if self._commit is not None:
            self._adopt_committed()
        self._say_again_at = None
        if self.has_state and (self.round, self.crew.digest()) == self._told and donor.round == self.round:
            self._current = True
            self._say_what_it_has()
            self._announce()
            return
        self._current = False
        self._transfer = donor
        threading.Thread(target=self._run_transfer, args=(donor,), name="atoll-transfer", daemon=True).start()

    def _run_transfer(self, donor: m.Donor) -> None:
        """In its own thread."""
        result: Arriving | AtollError
        crash_point("island.fetching")
        try:
            result = self._fetch_state(donor)
        except AtollError as error:
            result = error
        except Exception as error:  # whatever it is, the training thread must hear that nothing comes
            result = AtollError(f"{type(error).__name__}: {error}")
        crash_point("island.fetched")
        self.post(Fetched(donor, result))

    def _fetched(self, fetched: Fetched) -> None:
        if fetched.donor is not self._transfer:
            return
        self._transfer = None
        try:
            if isinstance(fetched.result, AtollError):
                raise fetched.result
            if self._commit is not None:
                self._adopt_committed()
            self._take_over(fetched.result)
        except (TransportError, CheckpointError, DataError) as error:
            who = fetched.donor.member[:8]
            self._watcher.line(f"the state of island {who} cannot be used: {str(error).splitlines()[0]}")
        else:
            self._current = True
        crash_point("island.before_have")
        self._say_what_it_has()

    def _tokens_per_s(self) -> float:
        """How fast this island trains: over the last rounds, for a single one says little."""
        return self._measured_steps * self._tokens_a_step() / self._measured_s if self._measured_s else 0.0

    def _tokens_a_step(self) -> int:
        config = self.config
        return config.batch_size * config.gradient_accumulation_steps * config.sequence_length


class _Attempt:
    """One attempt under way. meeting: where its participants meet, once that is known. offers: it does not listen."""

    def __init__(self, island: Island, go: m.Go, place: int, *, offers: bool) -> None:
        self.go = go
        self.place = place
        self.offers = offers
        self.meeting: queue.Queue[tuple[str, int]] = queue.Queue()
        self.averaged: Averaged | None = None
        self._island = island

    @property
    def arrived(self) -> Reached | None:
        """What it reached, if it came so far."""
        result = self.averaged.result if self.averaged is not None else None
        return None if isinstance(result, AtollError) else result

    def reached(self, commit: m.Commit) -> bool:
        """Whether it is the attempt that is committed, and came to the same anchor here."""
        return self.arrived is not None and (self.go.attempt, self.arrived.digest) == (commit.attempt, commit.digest)

    def start(self) -> None:
        # A daemon: nothing can interrupt a wait inside gloo, and a process that leaves does not wait for it.
        threading.Thread(target=self._run, name=f"atoll-attempt-{self.go.attempt}", daemon=True).start()

    def _run(self) -> None:
        began = time.perf_counter()
        result: Reached | AtollError
        try:
            result = self._island.average(self)
        except AtollError as error:
            result = error
        except Exception as error:  # whatever it is, the others must hear that this attempt came to nothing
            result = AtollError(f"{type(error).__name__}: {error}")
        self._island.post(Averaged(self.go.attempt, result, time.perf_counter() - began))


def _smooth(before: float | None, loss: float) -> float:
    """The losses of the last ten steps or so, for people; one that is no number is forgotten with the next.

    >>> _smooth(None, 4.0), _smooth(10.0, 0.0), _smooth(float("nan"), 3.0)
    (4.0, 9.0, 3.0)
    """
    return loss if before is None or not math.isfinite(before) else 0.9 * before + 0.1 * loss


def _reached(attempt: _Attempt, averaged: Averaged, arrived: Reached, *, numel: int) -> m.Reached:
    go, gram = attempt.go, arrived.sent.gram
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
        meet_s=arrived.meet_s,
        send_s=arrived.sent.waited_s,
        outer_s=arrived.outer_s,
        step_bytes=mean_sent_bytes(numel, 4, num_replicas=len(go.participants), replica=attempt.place),
    )


def _refusal(why: str, exit_code: int) -> AtollError:
    error = ConfigError(why) if exit_code == 2 else TransportError(why)
    error.exit_code = exit_code
    return error
