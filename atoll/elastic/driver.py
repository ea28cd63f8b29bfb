"""Feeds the state machine of a run: its clock, its memory and its voice.

One task takes what happens, one thing at a time, asks `Membership`, writes what it records to the log, and only then
says what follows from it: a coordinator that is killed anywhere in between has promised nothing that it does not find
again. Connections have queues of their own, so that a member that is slow to read holds up nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from atoll.elastic.crash import crash_point
from atoll.elastic.evaluations import Evaluation, Evaluations
from atoll.elastic.log import COMMITTED, Entry, Log
from atoll.elastic.membership import Effect, Membership, Record, Rules, Send
from atoll.elastic.messages import Beat, Evaluated, Finish, FromCoordinator, FromMember, Hello, Refused
from atoll.elastic.page_history import History
from atoll.elastic.page_watch import Watch
from atoll.elastic.wire import encode, printable

SILENCE_S = 5.0  # the longest a person is left without a word about what is waited for
RETURN_S = 3.0  # longer than an island waits between two tries to come back
CLOSE_S = 3.0  # for a connection to end in good order
MAX_WAITING = 1000  # messages to a member that does not read them
RATE, BURST = 50.0, 500.0  # messages a second from one member, and in one go
LEAST_WAIT_S = 0.001  # between two looks at the clock
STATE = "state"  # the record that replaces the one before

STOPPED = 75  # exit code of islands that the operator stopped: saved, and can go on
EVICTED = 4

Say = Callable[[str], None]


@dataclass(frozen=True)
class Service:
    """What a coordinator is started with.

    settings: of the run, plain JSON, handed to joiners as they are. folder: of the run. host, port: see `choose_place`;
    port 0 is that of the last start, or any. step_of: the inner step at which a round ends. metrics: gets every event
    of the run, a line of metrics.jsonl each. say: gets lines for people, and with `say_rounds` one for each round too.
    evaluated: gets what came of an evaluation. told_round: the newest round that `metrics` was given, in an earlier
    start too; None: not known. past: the events that `metrics` was given in earlier starts, steps left out.
    clock: seconds since 1970, for tokens and for people.
    """

    settings: Mapping[str, Any]
    rules: Rules
    folder: Path
    host: str
    port: int
    step_of: Callable[[int], int]
    metrics: Callable[[Mapping[str, Any]], None]
    say: Say
    say_rounds: bool = True
    allow_public: bool = False
    evaluated: Callable[[Evaluation], None] = lambda evaluation: None
    told_round: int | None = None
    past: Callable[[], Iterable[Mapping[str, Any]]] = tuple
    clock: Callable[[], float] = time.time


# --- connections, and what they bring ---


@dataclass(eq=False)
class Connection:
    """One websocket of a member. peer: the address it comes from. outgoing: None in it closes the connection."""

    member: str
    peer: str
    socket: web.WebSocketResponse
    abort: Callable[[], None]
    outgoing: asyncio.Queue[str | None] = field(default_factory=lambda: asyncio.Queue(MAX_WAITING))

    def put(self, text: str | None) -> None:
        """To be sent after what waits already. A member that does not read for so long is cut off."""
        try:
            self.outgoing.put_nowait(text)
        except asyncio.QueueFull:
            self.abort()

    def end(self) -> None:
        """Close it after what waits already, and cut it off if that takes long: the member may be frozen."""
        self.put(None)
        asyncio.get_running_loop().call_later(CLOSE_S, self.abort)

    async def write(self) -> None:
        """Send what is put in, until None."""
        with suppress(ConnectionError):  # the reader notices it too
            while (text := await self.outgoing.get()) is not None:
                await self.socket.send_str(text)
                crash_point("coordinator.sent_" + text.split('"', 4)[3].lower())
        await self.socket.close(code=aiohttp.WSCloseCode.OK)


class Bucket:
    """Lets `RATE` things a second through, `BURST` at once."""

    def __init__(self, now: float) -> None:
        self._level, self._at = BURST, now

    def take(self, now: float) -> bool:
        self._level = min(BURST, self._level + RATE * (now - self._at)) - 1.0
        self._at = now
        return self._level >= 0


@dataclass(frozen=True)
class Came:
    connection: Connection
    hello: Hello


@dataclass(frozen=True)
class Said:
    connection: Connection
    message: FromMember


@dataclass(frozen=True)
class Went:
    connection: Connection


@dataclass(frozen=True)
class Stop:
    why: str


News = Came | Said | Went | Stop


# --- the one task that decides ---


class Driver:
    """Feeds the state machine, keeps what it records, says what it sends.

    ended: the exit code of the run, once that is known, or what stopped the service.
    """

    def __init__(self, membership: Membership, log: Log, service: Service) -> None:
        self.inbox: asyncio.Queue[News] = asyncio.Queue(4 * MAX_WAITING)
        self.connections: dict[str, Connection] = {}
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self._membership = membership
        self._log = log
        self._service = service
        self._watch = Watch()
        self._history = History(num_rounds=service.rules.num_rounds, step_of=service.step_of)
        for event in service.past():
            self._history.note(event)
        self._evaluations = Evaluations()
        self._nobody_came = True  # since the start
        # Islands that were there before this start come back within seconds, each in its own time.
        self._expected_until = self.now() + RETURN_S if membership.status(0.0)["round"] else 0.0
        self._spoke_at = self.now()
        self._tell_untold()
        finished = self.status()["finished"]
        if finished is not None:  # it died when the run was over; those who did not hear so will come
            self._end(finished["exit_code"])

    def now(self) -> float:
        """Seconds on a clock that never goes back."""
        return self._loop.time()

    @property
    def is_waited_on(self) -> bool:
        """Whether a member is connected, or may come to hear that the run is over."""
        return bool(self.connections) or self._nobody_came or self.now() < self._expected_until

    def status(self) -> dict[str, Any]:
        """The state machine's view, and what is known of members and rounds beside it, plain JSON."""
        status = self._membership.status(self.now())
        for member in status["members"]:
            member |= self._watch.about(member["member"])
        return status | {"summary": self._history.summary(self._service.clock())}

    def history(self) -> tuple[str, dict[str, Any]]:
        """What happened so far, as plain JSON, and a name that changes whenever that does."""
        return f"{self._membership.boot}-{self._history.version}", self._history.plain()

    def note(self, event: dict[str, Any]) -> None:
        """An event of the run, for its metrics and its history; it is given the time."""
        event["at"] = round(self._service.clock(), 3)
        self._service.metrics(event)
        self._history.note(event)

    async def run(self) -> None:
        """Work for ever. A failure ends the service: nothing may be said that is not on disk."""
        try:
            while True:
                news = await self._next()
                effects = [] if news is None else self._decide(news)
                effects += self._membership.tick(self.now())
                self._carry_out(effects)
        except Exception as error:  # handed to whoever waits for the end, who raises it
            if not self.ended.done():
                self.ended.set_exception(error)

    async def announce(self) -> None:
        """Say every five seconds who is waited for."""
        while True:
            await asyncio.sleep(SILENCE_S / 5)
            if self.now() - self._spoke_at >= SILENCE_S and (waiting := describe_wait(self.status())):
                self._speak(waiting)

    async def _next(self) -> News | None:
        """The next thing that happens; None once the state machine wants to be asked again."""
        with suppress(asyncio.QueueEmpty):
            return self.inbox.get_nowait()
        deadline = self._membership.next_deadline()
        timeout = None if deadline is None else max(LEAST_WAIT_S, deadline - self.now())
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):  # wait_for of Python 3.11 may swallow a cancellation
                return await self.inbox.get()
        return None

    def _decide(self, news: News) -> list[Effect]:
        if isinstance(news, Stop):
            self._stop_all(news.why)
            return []
        connection = news.connection
        known = self.connections.get(connection.member)
        if isinstance(news, Came):
            if known is not None:
                known.end()
            self.connections[connection.member] = connection
            self._nobody_came = False
            crash_point("coordinator.hello")
            return self._membership.connect(connection.member, news.hello, self.now())
        if known is not connection:
            return []  # of a connection that a newer one of the same member has replaced
        if isinstance(news, Said) and isinstance(news.message, Evaluated):
            self._tell_evaluations(self._evaluations.add(news.message, committed=int(self.status()["round"])))
            return []
        if isinstance(news, Said):
            self._hear(connection.member, news.message)
            return self._membership.receive(connection.member, news.message, self.now())
        del self.connections[connection.member]
        return self._membership.disconnect(connection.member, self.now())

    def _hear(self, member: str, message: FromMember) -> None:
        self._watch.heard(member, message, self.now())
        if isinstance(message, Beat):
            self._history.beat(message, self._service.clock())

    def _carry_out(self, effects: list[Effect]) -> None:
        records = [effect for effect in effects if isinstance(effect, Record)]
        if records:
            entries = [Entry(record.kind, record.payload) for record in records if record.kind != STATE]
            states = [record.payload for record in records if record.kind == STATE]
            _crash("before_record", records)
            self._log.append(entries, snapshot=states[-1] if states else None)  # on disk when this returns
            _crash("recorded", records)
        for effect in effects:
            if isinstance(effect, Record):
                self._tell(effect)
            elif isinstance(effect, Send):
                self._send(effect.to, effect.message)
            elif effect.member in self.connections:
                self.connections[effect.member].end()

    def give_up_evaluations(self) -> None:
        """Nobody is left to bring what is missing."""
        self._tell_evaluations(self._evaluations.give_up())

    def _tell_evaluations(self, evaluations: list[Evaluation]) -> None:
        for evaluation in evaluations:
            self._service.evaluated(evaluation)
            step = self._service.step_of(evaluation.round)
            self._history.note({"event": "eval", "step": step, **asdict(evaluation)})

    def _tell(self, record: Record) -> None:
        """What was recorded, for the run's metrics and for people."""
        event = self._event(record)
        if event is not None:
            self.note(event)
        if record.kind != COMMITTED or self._service.say_rounds:
            line = describe(record, event)
            if line:
                self._speak(line)
        if record.kind == COMMITTED:
            self._tell_evaluations(self._evaluations.give_up(record.payload["round"]))
        if record.kind == "finished":
            self._end(record.payload["exit_code"])

    def _tell_untold(self) -> None:
        """Rounds that the coordinator wrote down and died before it told of them."""
        if self._service.told_round is not None:
            for payload in self._log.rounds(after=self._service.told_round):
                self._tell(Record(COMMITTED, payload))

    def _event(self, record: Record) -> dict[str, Any] | None:
        """The line of metrics.jsonl that a record stands for, if it stands for one."""
        payload, step_of = record.payload, self._service.step_of
        if record.kind == COMMITTED:
            return self._round_event(payload)
        if record.kind == "member":
            return {"event": "member", **payload, "step": step_of(payload["round"])}
        if record.kind == "fault":
            return {"event": "fault", **payload, "step": step_of(payload["round"] - 1)}
        if record.kind == "void":
            about = {"what": "void", "replica": None, "detail": payload["why"]}
            return {"event": "fault", **about, **payload, "step": step_of(payload["round"] - 1)}
        return None

    def _round_event(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """A committed round."""
        return {
            "event": "round",
            "round": payload["round"],
            "step": self._service.step_of(payload["round"]),
            "replicas": max(len(self.status()["liveness"]), len(payload["contributors"])),
            "contributors": len(payload["contributors"]),
            "payload_bytes": round(payload["wire_bytes"] / len(payload["members"])),
            "sync_s": payload["sync_s"],
            "anchor_digest": payload["digest"],
            "delta_norm": payload["delta_norm"],
            "cosine_mean": payload["cosine_mean"],
            "norms": payload["norms"],
            "committed": True,
            "weights": {str(seat): weight for seat, weight in payload["weights"].items()},
            "refused": payload["refused"],
            "lone": payload["lone"],
            "voids": payload["voids"],
            "waited_s": payload["waited_s"],
            "wire_s": payload["wire_s"],
            "wire_bytes": payload["wire_bytes"],
            "round_s": payload["round_s"],
            **self._watch.round(payload, self.now()),
        }

    def _send(self, member: str, message: FromCoordinator) -> None:
        if member in self.connections:
            self.connections[member].put(encode(message))

    def evict(self, members: Iterable[str], why: str) -> None:
        """Members whose token was revoked are out."""
        for member in members:
            if member in self.connections:
                self._send(member, Refused(why, EVICTED))
                self.connections[member].end()

    def _stop_all(self, why: str) -> None:
        committed = int(self.status()["round"])
        for member in self.connections:
            self._send(member, Finish(committed, STOPPED, why))
        self._nobody_came, self._expected_until = False, 0.0  # nor is anyone waited for
        self._end(STOPPED)

    def _end(self, code: int) -> None:
        if not self.ended.done():
            self.ended.set_result(code)

    def _speak(self, line: str) -> None:
        self._spoke_at = self.now()
        self._service.say(line)


def describe_wait(status: Mapping[str, Any]) -> str:
    """Who is waited for, where anybody or anything waits; "" while all islands train."""
    waiting = [printable(name, limit=40) for name in status["waiting_for"]]
    stalled = not status["settled"] or not status["liveness"] or status["averaging"]
    if status["finished"] or not waiting or not (stalled or _anyone(status, "ready")):
        return ""
    what = "averaging, waiting" if status["averaging"] else "waiting"
    return f"round {status['round'] + 1}: {what} for {', '.join(waiting)}"


def describe(record: Record, event: Mapping[str, Any] | None) -> str:
    """The line for people that a record is worth; "" for none."""
    payload = record.payload
    if record.kind == COMMITTED and event is not None:
        lone = " | alone, while others are there" if payload["lone"] else ""
        refused = ", ".join(map(str, payload["refused"])) or "0"
        return (
            f"round {payload['round']} committed in {payload['sync_s']:.1f} s | {event['contributors']}/"
            f"{event['replicas']} replicas | sent {payload['wire_bytes'] / 1e6:.1f} MB | waited "
            f"{payload['waited_s']:.1f} s | refused {refused} | anchor {payload['digest'][:6]}{lone}"
        )
    if record.kind == "member":
        why = f": {printable(payload['why'], limit=200)}" if payload["why"] else ""
        who = f"replica {payload['replica']}" if payload["replica"] >= 0 else "an island"
        return f"{who} ({printable(payload['name'], limit=40)}) {payload['what']}, round {payload['round']}{why}"
    if record.kind == "fault":
        who = "" if payload["replica"] is None else f" of replica {payload['replica']}"
        return f"fault{who}: {payload['what']}: {printable(payload['detail'], limit=200)}"
    if record.kind == "void":
        return f"round {payload['round']} is tried again: {printable(payload['why'], limit=200)}"
    if record.kind == "finished":
        why = f": {payload['why']}" if payload["why"] else ""
        return f"the run is over after round {payload['round']}{why}"
    return ""


def _crash(where: str, records: list[Record]) -> None:
    """A crash point for each kind of record that is written."""
    for kind in sorted({record.kind for record in records}):
        crash_point(f"coordinator.{where}_{kind}")


def _anyone(status: Mapping[str, Any], state: str) -> bool:
    return any(member["state"] == state for member in status["members"])
