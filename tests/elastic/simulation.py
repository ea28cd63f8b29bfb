"""The round protocol under seeded faults, in virtual time: a coordinator, islands, links and an arbiter who knows all.

    python tests/elastic/simulation.py --seeds 2000
    python tests/elastic/simulation.py --seed 17 --verbose

The coordinator is `atoll.elastic.membership.Membership` itself; everything around it is a small honest model. An island
trains at its own speed, beats, says Ready, averages, adopts on Commit, fetches from donors, keeps its progress and
comes back after a cut. Nothing here imports torch, sleeps or looks at a clock: one seed is one history.

The `Arbiter` looks at every step. It recomputes the digest of every committed round from the contributions that really
went into it, so a wrong weight, a wrong base, a work counted twice or not at all cannot hide.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from atoll.elastic.leases import Range, common, count, merged, without
from atoll.elastic.membership import Close, Effect, Membership, Record, Rules, Send
from atoll.elastic.messages import (
    Beat,
    Commit,
    Donor,
    Failed,
    Finish,
    Go,
    Have,
    Hello,
    Lease,
    Leave,
    Meet,
    Reached,
    Ready,
    Refused,
    Rejected,
    Serve,
    Void,
    Want,
    Welcome,
)

SAMPLES = 8  # of one island in one round
SECRET = b"simulated"
AVERAGING_LIMIT_S = 2.0  # after which an island gives up on peers that do not answer
NOTICE_S = 0.1  # until an island notices that a peer's process died
HALF_OPEN_S = 3.0  # until an island gives up a connection on which nothing comes through
MOST_EVENTS = 100_000  # of one history, which has a few thousand
QUIET_S = 60.0  # longest from the last fault to the end of the run, and four slow rounds for each that is missing


class Broken(AssertionError):
    """A promise of the protocol does not hold."""


def digest_of(base: str, contributions: Iterable[tuple[str, float, tuple[Range, ...]]]) -> str:
    """The anchor that a round leads to: it depends on all that went in, and on nothing else."""
    return f"{zlib.crc32(repr((base, sorted(contributions))).encode()):08x}"


@dataclass(eq=False)
class Link:
    """One connection between an island and the coordinator: ordered in both directions, and lossless until it ends."""

    island: Island
    up: bool = True  # as the island sees it
    accepted: bool = True  # as the coordinator sees it
    last: dict[str, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})
    held: list[tuple[str, Any]] = field(default_factory=list)  # what was on its way when the network was cut


@dataclass
class Group:
    """The data plane of one attempt: who has come, and whether it broke before all was sent."""

    go: Go
    joined: dict[str, Island] = field(default_factory=dict)
    ends_at: float | None = None
    broken: bool = False


@dataclass
class Average:
    """One attempt as an island sees it.

    result: the digest it leads to, once it is done. parked: the connection was lost, and whether it still counts is
    not known.
    """

    go: Go
    boot: str
    result: str | None = None
    failed: bool = False
    parked: bool = False


@dataclass(frozen=True)
class Flight:
    """A contribution that was given to an averaging, until it is known whether it is in a committed round."""

    round: int
    attempt: int
    used: tuple[Range, ...]


class Island:
    """One process that trains, in one life."""

    def __init__(self, world: World, name: str, *, founder: bool, saved: tuple[int, str, int] = (-1, "", 0)) -> None:
        self.world = world
        self.id = f"{len(world.islands):02d}{world.rng.getrandbits(24):06x}"
        self.name = name
        self.founder = founder
        self.round, self.digest, self.position = saved
        self.memory = self.digest  # the anchor as it is: a flipped bit shows here
        self.ever_held = self.round >= 0
        self.train_s = world.rng.choice([0.5, 1.0, 1.0, 1.0, 1.5, 4.0])
        self.expects_s = world.rng.choice([0.0, 0.3])
        self.alive, self.frozen, self.finished, self.left = True, False, False, False
        self.cut_from_coordinator = False
        self.link: Link | None = None
        self.backlog: list[Callable[[], None]] = []
        self.retries = 0
        self.boot, self.books, self.seat = "", "", -1
        self.welcome: Welcome | None = None
        self.leased: list[Range] = []  # to train on
        self.used: list[Range] = []  # trained on and not committed
        self.training = False
        self.norm = 1.0
        self.wanting = False
        self.said: Ready | None = None
        self.average: Average | None = None
        self.flight: Flight | None = None
        self.fetching: Donor | None = None
        self.attempt = 0
        self.benched = False
        self.poison, self.spoiled = "", ""  # of the next work, and of the one that is done
        self.greeted = False  # on this connection
        self.poisoned = False
        self.glitches = 0
        world.islands.append(self)
        self.dial()
        self.beat()

    # --- time and the network

    def later(self, delay: float, act: Callable[[], None]) -> None:
        """A timer of this process: it does not go off while the process is frozen, nor after its death."""
        self.world.at(delay, lambda: self.when_running(act))

    def when_running(self, act: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.frozen:
            self.backlog.append(act)
        else:
            act()

    def beat(self) -> None:
        if self.link and self.link.up:
            self.say(Beat(tokens_per_s=SAMPLES / self.train_s))
        if not self.done:
            self.later(self.world.rules.beat_s, self.beat)

    @property
    def done(self) -> bool:
        return not self.alive or self.finished or self.left

    def dial(self) -> None:
        if self.done or (self.link and self.link.up):
            return
        if self.world.host.up and not self.cut_from_coordinator:
            self.link = self.world.host.accept(self)
            self.greeted = False
            self.retries = 0
            self.say(self.hello())
        else:
            self.retries += 1
            self.later(min(1.0, 0.1 * 2**self.retries) * self.world.rng.uniform(0.7, 1.0), self.dial)

    def hang_up(self) -> None:
        """The connection is gone, as this island sees it."""
        if self.link and self.link.up:
            self.link.up = False
            self.later(0.05, self.dial)

    def say(self, message: Any) -> None:
        if self.link and self.link.up:
            self.world.carry(self.link, "up", message)

    def hello(self) -> Hello:
        held = merged([*self.leased, *self.used])
        flying = common(held, self.flight.used) if self.flight else []
        return Hello(
            member=self.id,
            name=self.name,
            version=self.world.rules.version,
            settings_digest=self.world.rules.settings_digest,
            address=self.id,
            port=1,
            pid=int(self.id[:2]),
            num_workers=1,
            round=self.round,
            digest=self.digest,
            founder=self.founder,
            seat=self.seat,
            leased=tuple(without(held, flying)),
            in_flight=tuple(flying),
            in_flight_round=self.flight.round if self.flight else 0,
            attempt=self.attempt,
            position=self.position,
            books=self.books,
        )

    def hear(self, message: Any) -> None:
        if not self.done:
            getattr(self, f"on_{type(message).__name__.lower()}")(message)

    # --- training

    @property
    def current(self) -> bool:
        return self.round >= 0 and self.fetching is None

    def work(self) -> None:
        """Whatever comes next: get samples, train on them, say so."""
        if self.done or self.benched or not self.current or self.training or self.welcome is None:
            return
        if self.used:
            self.say_ready()
        elif count(self.leased) < SAMPLES:
            if not self.wanting and self.greeted:
                self.wanting = True
                self.say(Want(SAMPLES - count(self.leased)))
        else:
            self.training = True
            self.later(self.train_s * self.world.rng.uniform(0.9, 1.1), self.trained)

    def trained(self) -> None:
        self.training = False
        self.norm = self.world.rng.uniform(0.9, 1.1)
        self.spoiled, self.poison = self.spoiled or self.poison, ""
        self.used = merged([*self.used, *self.leased])
        self.leased = []
        self.work()

    def say_ready(self) -> None:
        if not self.greeted:
            return
        if (self.average is not None and not self.average.parked) or (
            self.said is not None and self.said.round == self.round + 1
        ):
            return
        honest = Ready(
            round=self.round + 1,
            base=self.memory,
            weight=float(count(self.used)),
            norm=self.norm,
            finite=True,
            steps=SAMPLES,
            used=tuple(self.used),
            sync_s=self.expects_s,
        )
        self.said = self.spoil(honest)
        self.say(self.said)

    def spoil(self, ready: Ready) -> Ready:
        return {
            "nan": replace(ready, finite=False, norm=float("nan")),
            "huge": replace(ready, norm=1e30),
            "weight": replace(ready, weight=-1.0),
            "round": replace(ready, round=ready.round + 2),
            "foreign": replace(ready, used=((0, 1), *ready.used[:1])),
            "base": replace(ready, base="0ther"),
        }.get(self.spoiled, ready)

    def drop_work(self) -> None:
        self.leased = merged([*self.leased, *self.used])
        self.used, self.said = [], None

    # --- what the coordinator says

    def on_welcome(self, welcome: Welcome) -> None:
        self.welcome, self.seat, self.greeted = welcome, welcome.seat, True
        self.position = max(self.position, welcome.position)
        if welcome.boot != self.boot:
            self.boot = welcome.boot
            if self.average and self.average.result is None:
                self.leave_group()
        if self.average:
            self.average.parked = True
        self.said, self.wanting = None, False
        if welcome.settled:
            self.settle(welcome)
        if welcome.current:
            self.fetching = None
            self.work()
        elif (self.round, self.digest, self.memory) == (welcome.round, welcome.digest, welcome.digest):
            self.say(Have(self.round, self.digest))  # it got there while the Welcome was on its way
            self.work()

    def settle(self, welcome: Welcome) -> None:
        """What became of the contribution in flight, and of the samples held."""
        self.books = welcome.books
        if self.flight and welcome.contributed >= self.flight.round:
            self.contributed()
        tainted = without(self.used, welcome.leased)
        self.leased = common(self.leased, welcome.leased)
        if tainted:
            self.world.stats["work dropped with its samples"] += 1
            self.used = common(self.used, welcome.leased)
            self.drop_work()

    def on_refused(self, refused: Refused) -> None:
        raise Broken(f"{self.name} was refused: {refused.why}")

    def on_lease(self, lease: Lease) -> None:
        self.wanting = False
        self.position = max(self.position, lease.position)
        self.leased = merged([*self.leased, *lease.ranges])
        self.work()

    def on_rejected(self, rejected: Rejected) -> None:
        self.benched |= rejected.benched
        mine = self.said is not None and rejected.round == self.said.round
        self.spoiled = ""
        if rejected.drop:
            self.drop_work()
        if mine:
            self.said = None
        if self.memory != self.digest:
            self.later(3.0, self.mend)
        elif mine:
            self.later(0.5, self.look_again)

    def look_again(self) -> None:
        """Its contribution was refused: it says what it holds, and then offers one again."""
        if self.current:
            self.say(Have(self.round, self.memory))
            self.work()

    def mend(self) -> None:
        """Its anchor is not what it should be, and no donor was named: it reads its own copy on disk."""
        if self.memory != self.digest and self.fetching is None:
            self.memory = self.digest
            self.say(Have(self.round, self.digest))
            self.work()

    def on_go(self, go: Go) -> None:
        self.attempt = max(self.attempt, go.attempt)
        if self.average and self.average.go.attempt == go.attempt:
            self.average.parked = False
            if self.average.result is not None:
                self.reached()
            return
        self.world.arbiter.saw_go(self, go)
        self.leave_group()
        mine = next(participant for participant in go.participants if participant.member == self.id)
        sent = self.said.used if mine.weight and self.said else ()
        self.average = Average(go, self.boot)
        if mine.weight:
            self.flight = Flight(go.round, go.attempt, sent)
        self.world.arbiter.contributions[go.attempt, self.id] = (mine.weight, sent, self.spoiled == "hidden")
        if go.participants[0].member == self.id:
            self.say(Meet(go.attempt, self.id, 1))
            self.world.join(self, go)
        self.later(AVERAGING_LIMIT_S, lambda: self.give_up(go.attempt))

    def on_meet(self, meet: Meet) -> None:
        if self.average and self.average.go.attempt == meet.attempt and self.average.result is None:
            self.world.join(self, self.average.go)

    def give_up(self, attempt: int) -> None:
        group = self.world.groups.get((self.boot, attempt))
        if group is None or group.ends_at is None or group.broken:
            self.fail(attempt, "peers do not answer")

    def fail(self, attempt: int, why: str) -> None:
        average = self.average
        if average is None or average.go.attempt != attempt or average.result is not None or average.failed:
            return
        average.failed = True
        others = [participant.member for participant in average.go.participants]
        named = [other for other in others if self.world.are_cut(self.id, other)] if self.world.hints else []
        self.say(Failed(average.go.round, attempt, why, tuple(named)))

    def finish_average(self, attempt: int) -> None:
        average = self.average
        if average is None or average.go.attempt != attempt or average.failed or average.result is not None:
            return
        contributions = self.world.arbiter.contributions_to(average.go)
        average.result = digest_of(self.memory, contributions)
        if self.glitches:
            self.glitches -= 1
            average.result = f"{self.world.rng.getrandbits(32):08x}"
        if average.result != digest_of(self.digest, contributions):
            self.world.mistakes.add(average.result)
        self.reached()

    def reached(self) -> None:
        average = self.average
        assert average is not None and average.result is not None
        hidden = self.world.arbiter.hidden_in(average.go)
        norms = tuple(1e30 if participant.member in hidden else 1.0 for participant in average.go.participants)
        base = self.memory if self.world.reports_base else ""
        self.say(Reached(average.go.round, average.go.attempt, average.result, base, norms))

    def leave_group(self) -> None:
        """Stop averaging without a result; what was contributed stays here."""
        average, self.average = self.average, None
        if average is not None and average.result is None:
            self.world.break_group(average, self, NOTICE_S)

    def on_void(self, void: Void) -> None:
        if self.flight and self.flight.attempt == void.attempt:
            self.flight = None
        if self.average and self.average.go.attempt == void.attempt:
            before = (self.round, self.digest, tuple(self.used))
            self.leave_group()
            if before != (self.round, self.digest, tuple(self.used)):
                raise Broken(f"{self.name} moved in the void attempt {void.attempt}")
            self.world.stats["voids"] += 1
            self.work()

    def contributed(self) -> None:
        """What it sent is in a committed round: it is spent."""
        assert self.flight is not None
        self.used = without(self.used, self.flight.used)
        self.flight, self.said = None, None

    def on_commit(self, commit: Commit) -> None:
        average = self.average
        self.position = max(self.position, commit.position)
        if self.round == commit.round and self.digest == commit.digest:
            self.say(Have(self.round, self.digest))
            return
        mine = average is not None and average.go.attempt == commit.attempt
        if self.flight and self.flight.attempt == commit.attempt and commit.weights.get(self.seat, 0.0) > 0:
            self.contributed()
        self.flight = None
        if average and mine and average.result == commit.digest and self.round == commit.round - 1:
            self.adopt(commit.round, commit.digest)
        else:
            self.leave_group()
            self.say(Failed(commit.round, commit.attempt, "no result of it here"))

    def adopt(self, round: int, digest: str) -> None:
        self.round, self.digest, self.memory = round, digest, digest
        self.ever_held, self.average, self.flight, self.fetching, self.said = True, None, None, None, None
        self.world.arbiter.saw_adoption(self)
        self.say(Have(round, digest))
        self.work()

    def on_donor(self, donor: Donor) -> None:
        self.said = None
        if self.round >= donor.round and self.memory == self.digest:  # it took it meanwhile
            self.say(Have(self.round, self.digest))
            self.work()
            return
        self.leave_group()
        self.fetching = donor
        self.later(self.world.rng.uniform(0.1, self.world.transfer_s), lambda: self.fetched(donor))

    def fetched(self, donor: Donor) -> None:
        if self.fetching is not donor or self.done:
            return
        source = self.world.by_id(donor.member)
        if not source.ever_held:
            raise Broken(f"{source.name} is a donor and never held committed state")
        self.fetching = None
        usable = source.alive and not source.frozen and not self.world.are_cut(self.id, source.id)
        if usable and donor.ticket in source.tickets and source.memory == source.digest:
            self.position = max(self.position, source.position)  # it is part of the state
            self.adopt(source.round, source.digest)
        elif self.memory != self.digest:
            self.mend()
        else:
            self.say(Have(self.round, self.digest))
        if self.world.ending:
            self.finished = True

    @property
    def tickets(self) -> set[str]:
        return self.world.tickets.setdefault(self.id, set())

    def on_serve(self, serve: Serve) -> None:
        self.tickets.add(serve.ticket)

    def on_finish(self, finish: Finish) -> None:
        if finish.exit_code:
            assert self.world.deserted, "the arbiter saw it end"
        self.world.ending = True
        self.finished = self.fetching is None


class Host:
    """The service round the state machine: connections, the log, crashes between what it writes and what it sends."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.boots = 1
        self.log: str | None = None
        self.links: dict[str, Link] = {}
        self.empty_since: float | None = 0.0
        self.crash_after: int | None = None  # sends after the next commit
        self.tick_at: float | None = None
        self.membership = Membership(world.rules, boot="boot1", secret=SECRET)

    def accept(self, island: Island) -> Link:
        return Link(island)

    def hear(self, link: Link, message: Any) -> None:
        if not self.up or not link.accepted:
            self.world.cut_off(link)
            return
        now, member = self.world.now, link.island.id
        if isinstance(message, Hello):
            old = self.links.get(member)
            if old is not None and old is not link:
                self.close(old)
            self.links[member] = link
            self.empty_since = None
            self.act(self.membership.connect(member, message, now))
        elif self.links.get(member) is link:
            self.act(self.membership.receive(member, message, now))
        else:
            self.world.cut_off(link)

    def lost(self, link: Link) -> None:
        """The coordinator notices that a connection ended."""
        link.accepted = False
        if self.up and self.links.get(link.island.id) is link:
            self.forget(link)
            self.act(self.membership.disconnect(link.island.id, self.world.now))

    def close(self, link: Link) -> None:
        link.accepted = False
        self.world.at(0.02, lambda: link.island.when_running(link.island.hang_up if link.up else lambda: None))
        if self.links.get(link.island.id) is link:
            self.forget(link)

    def forget(self, link: Link) -> None:
        del self.links[link.island.id]
        if not self.links:
            self.empty_since = self.world.now

    def act(self, effects: list[Effect]) -> None:
        records = [effect for effect in effects if isinstance(effect, Record)]
        for record in records:
            if record.kind == "state":
                self.log = json.dumps(record.payload)
            self.world.arbiter.saw_record(record)
        sends = [effect for effect in effects if not isinstance(effect, Record)]
        committed = any(record.kind == "committed" for record in records)
        if committed and self.crash_after is not None:
            sends, self.crash_after = sends[: self.crash_after], None
            self.world.at(0.0, self.world.kill_coordinator)
        for effect in sends:
            self.do(effect)
        self.schedule_tick()

    def do(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            if self.world.verbose:
                self.world.note(f"  -> {self.world.by_id(effect.to).name} {effect.message}")
            if effect.to in self.links:
                self.world.carry(self.links[effect.to], "down", effect.message)
        elif isinstance(effect, Close) and effect.member in self.links:
            self.close(self.links[effect.member])

    def schedule_tick(self) -> None:
        deadline = self.membership.next_deadline()
        if deadline is not None and (self.tick_at is None or deadline < self.tick_at):
            self.tick_at = deadline
            boot = self.boots
            self.world.at(max(0.0, deadline - self.world.now), lambda: self.tick(boot, deadline))

    def tick(self, boot: int, planned: float) -> None:
        if boot != self.boots or not self.up or self.tick_at != planned:
            return
        self.tick_at = None
        due = self.membership.next_deadline()
        if due is not None and due <= self.world.now:
            self.act(self.membership.tick(self.world.now))
            after = self.membership.next_deadline()
            if after is not None and after <= self.world.now:
                raise Broken(f"the clock stands still: a tick at {self.world.now} asks for another at {after}")
        self.schedule_tick()

    def crash(self) -> None:
        self.up = False
        self.crash_after = None
        for link in self.links.values():
            self.world.cut_off(link)
        self.links, self.empty_since = {}, self.world.now

    def restart(self, *, with_log: bool) -> None:
        self.up = True
        self.boots += 1
        self.tick_at = None
        boot = f"boot{self.boots}"
        state = json.loads(self.log) if with_log and self.log else None
        if state is None:
            self.log = None
            self.membership = Membership(self.world.rules, boot=boot, secret=SECRET)
        else:
            self.membership = Membership.restore(self.world.rules, boot=boot, state=state, secret=SECRET)
            self.world.arbiter.saw_restart(state["committed"])


@dataclass
class Made:
    """A committed round as the arbiter knows it."""

    round: int
    parent: str
    used: tuple[tuple[Range, ...], ...]


class Arbiter:
    """Knows everything and checks what the protocol promises, at every step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tip, self.round = "", 0
        self.made: dict[str, Made] = {}
        self.spent: set[int] = set()
        self.contributions: dict[tuple[int, str], tuple[float, tuple[Range, ...], bool]] = {}
        self.gos: dict[tuple[str, int], Go] = {}
        self.last_attempt = 0

    def contributions_to(self, go: Go) -> list[tuple[str, float, tuple[Range, ...]]]:
        found = ((p.member, *self.contributions[go.attempt, p.member]) for p in go.participants)
        return [(member, weight, used) for member, weight, used, _ in found if weight > 0]

    def hidden_in(self, go: Go) -> set[str]:
        return {p.member for p in go.participants if p.weight and self.contributions[go.attempt, p.member][2]}

    def saw_go(self, island: Island, go: Go) -> None:
        known = self.gos.setdefault((island.boot, go.attempt), go)
        self.require(known == go, f"attempt {go.attempt} was begun twice: {known} and {go}")
        mine = next(p for p in go.participants if p.member == island.id)
        if go.round == self.round + 1 and island.boot == self.world.host.membership.boot:
            self.require(island.round == go.round - 1, f"{island.name} at {island.round} is asked for round {go.round}")
            self.require(island.digest == self.tip, f"{island.name} holds {island.digest}, not {self.tip}")
        if mine.weight:
            said = island.said
            good = said is not None and said.round == go.round and said.weight == mine.weight and said.finite
            self.require(good, f"{island.name} contributes {mine.weight} and said {said}")
        self.require(island.ever_held, f"{island.name} is fresh and takes part in round {go.round}")

    def saw_record(self, record: Record) -> None:
        if self.world.verbose and record.kind != "state":
            self.world.note(f"  ## {record.kind} {record.payload}")
        if record.kind == "founded":
            self.saw_truth(record.payload["round"], record.payload["digest"])
        elif record.kind == "committed":
            self.saw_commit(record.payload)
        elif record.kind == "finished" and record.payload["exit_code"]:
            since = self.world.host.empty_since
            deserted = since is not None and self.world.now >= since + self.world.rules.deadline_s - 0.5
            self.require(deserted, f"the run ended by itself: {record.payload}")
            self.world.deserted = self.world.ending = True
            self.world.stats["deserted"] = 1
        elif record.kind == "fault":
            self.world.stats[f"fault: {record.payload['what']}"] = 1

    def saw_commit(self, payload: dict[str, Any]) -> None:
        """A committed round is what its contributors made of the round before, weighted by what they did."""
        round, digest, attempt = payload["round"], payload["digest"], payload["attempt"]
        self.require(round == self.round + 1, f"round {round} was committed after {self.round}")
        self.require(attempt > self.last_attempt or self.world.forgot, f"attempt {attempt} after {self.last_attempt}")
        seats = {seat: member for seat, member in payload["members"].items()}
        weights = {seats[seat]: weight for seat, weight in payload["weights"].items()}
        parts = [(m, *self.contributions[attempt, m][:2]) for m in seats.values() if (attempt, m) in self.contributions]
        real = [part for part in parts if part[1] > 0]
        self.require({m: w for m, w, _ in real} == weights, f"round {round}: weights {weights}, contributions {real}")
        self.require(bool(weights), f"round {round} has no contributor")
        mean = digest == digest_of(self.tip, real) or self.is_lone_mistake(payload["witnesses"], digest)
        self.require(mean, f"round {round} is not the mean of its contributions")
        hidden = [m for m in weights if self.contributions[attempt, m][2]]
        self.require(not hidden, f"round {round} holds a bad contribution of {hidden}")
        self.made[digest] = Made(round, self.tip, tuple(used for _, _, used in real))
        self.tip, self.round, self.last_attempt = digest, round, attempt
        self.spend(self.made[digest])
        self.world.stats["rounds"] += 1
        self.world.stats["lone"] += bool(payload["lone"])

    def is_lone_mistake(self, witnesses: int, digest: str) -> bool:
        """With one witness nobody can notice that its memory or its arithmetic is broken: this is not promised."""
        alone = witnesses == 1 and digest in self.world.mistakes
        self.world.stats["lone mistakes"] += alone
        return alone

    def spend(self, made: Made) -> None:
        for ranges in made.used:
            ids = {sample for start, stop in ranges for sample in range(start, stop)}
            self.require(not ids & self.spent, f"round {made.round} holds samples again: {sorted(ids & self.spent)}")
            self.spent |= ids

    def saw_truth(self, round: int, digest: str) -> None:
        """A coordinator without a log must find the newest round that any island it hears of holds."""
        heard = [link.island for link in self.world.host.links.values() if not link.island.left]
        newest = max((island.round for island in heard), default=0)
        self.require(round == max(newest, 0), f"round {round} was taken for the truth, and {newest} is held")
        if self.round and round < self.round:
            self.world.stats["history lost with the log"] += 1
        self.require(round == 0 or digest in self.made, f"nobody ever made {digest}, the truth of round {round}")
        self.tip, self.round, self.spent = digest, round, set()
        while digest in self.made:
            self.spend(self.made[digest])
            digest = self.made[digest].parent

    def saw_restart(self, committed: dict[str, Any] | None) -> None:
        if committed is not None:
            same = (committed["round"], committed["digest"]) == (self.round, self.tip)
            self.require(same, f"the log says {committed['round']}, and round {self.round} was committed")

    def saw_adoption(self, island: Island) -> None:
        made = self.made.get(island.digest)
        known = made.round if made else 0
        self.require(known == island.round, f"{island.name} adopted {island.digest} as round {island.round}")

    def require(self, holds: bool, sentence: str) -> None:
        if not holds:
            raise Broken(f"{sentence} (at {self.world.now:.3f} s)")


class World:
    """One history: everything that happens is drawn from `seed`."""

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.rng = random.Random(seed)
        self.verbose = verbose
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0
        rng = self.rng
        founders = rng.choice([1, 2, 2, 3, 3, 4, 5])
        self.rules = Rules(
            num_rounds=rng.randint(5, 9),
            settings_digest="settings",
            version="1.2.3",
            replicas=founders,
            quorum=rng.choice([0.5, 0.5, 0.75]),
            deadline_s=10.0,
            min_replicas=rng.choice([0, 0, 0, 1]),
            beat_s=1.0,
            lost_after_s=5.0,
        )
        self.latency_s = rng.choice([0.001, 0.02, 0.1])
        self.transfer_s = rng.choice([0.3, 1.0, 3.0])
        self.hints, self.reports_base = rng.random() < 0.5, rng.random() < 0.5
        self.stats: dict[str, int] = {
            "rounds": 0,
            "voids": 0,
            "lone": 0,
            "history lost with the log": 0,
            "lone mistakes": 0,
            "work dropped with its samples": 0,
        }
        self.islands: list[Island] = []
        self.groups: dict[tuple[str, int], Group] = {}
        self.tickets: dict[str, set[str]] = {}
        self.cuts: set[frozenset[str]] = set()
        self.mistakes: set[str] = set()  # results of broken memory or arithmetic
        self.ending = False
        self.deserted = False  # too few islands for too long
        self.forgot = False  # the coordinator lost its log at least once
        self.healed_at = 0.0
        self.arbiter = Arbiter(self)
        self.host = Host(self)
        for i in range(founders):
            self.at(rng.uniform(0, 1.0), lambda i=i: self.start_founder(i))
        self.plan_faults()
        self.at(5.0, self.operate)

    # --- the loop

    def at(self, delay: float, act: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.queue, (self.now + delay, self.order, act))

    def note(self, line: str) -> None:
        if self.verbose:
            print(f"{self.now:9.3f} {line}")

    def run(self) -> dict[str, int]:
        while self.queue:
            self.now, _, act = heapq.heappop(self.queue)
            act()
            if self.ending and all(island.done for island in self.islands):
                break
            if self.now > self.limit() or self.order > MOST_EVENTS:
                raise Broken(f"no end {self.now - self.healed_at:.0f} s after the last fault: {self.where_it_stands()}")
        self.check_end()
        return self.stats

    def limit(self) -> float:
        slowest = max((island.train_s for island in self.islands), default=1.0)
        return self.healed_at + QUIET_S + 4 * self.rules.num_rounds * (slowest + 1.0)

    def where_it_stands(self) -> str:
        status = self.host.membership.status(self.now)
        members = [(m["name"], m["state"], m["round"]) for m in status["members"] if m["state"] not in ("lost", "left")]
        alarms = [alarm["what"] for alarm in status["alarms"]]
        running = [(island.name, island.round, island.fetching, island.frozen) for island in self.running()]
        return f"round {status['round']}, waits for {status['waiting_for']}, {members}, {alarms}, running: {running}"

    def check_end(self) -> None:
        if not self.ending:
            raise Broken("everything stopped, and the run is not over")
        if self.arbiter.round != self.rules.num_rounds and not self.deserted:
            raise Broken(f"the run ended at round {self.arbiter.round}")
        if self.stats["history lost with the log"]:
            return  # whoever was gone by then ended with a history of its own
        for island in self.islands:
            if island.finished and island.round == self.arbiter.round and island.digest != self.arbiter.tip:
                raise Broken(f"{island.name} ended with {island.digest} and the run with {self.arbiter.tip}")

    # --- who is there

    def by_id(self, member: str) -> Island:
        return self.islands[int(member[:2])]

    def running(self) -> list[Island]:
        return [island for island in self.islands if not island.done]

    def start_founder(self, i: int) -> None:
        Island(self, f"island{i}", founder=True, saved=(0, "start", 0))

    # --- the network

    def carry(self, link: Link, way: str, message: Any) -> None:
        if link.island.cut_from_coordinator:
            link.held.append((way, message))
            return
        arrival = max(self.now + self.latency_s * self.rng.uniform(0.5, 1.5), link.last[way])
        link.last[way] = arrival
        self.at(arrival - self.now, lambda: self.arrive(link, way, message))

    def arrive(self, link: Link, way: str, message: Any) -> None:
        if link.island.cut_from_coordinator:
            link.held.append((way, message))
        elif way == "up":
            if self.verbose and not isinstance(message, Beat):
                self.note(f"{link.island.name} {message}")
            self.host.hear(link, message)
        else:
            link.island.when_running(lambda: link.island.hear(message) if link.up else None)

    def cut_off(self, link: Link) -> None:
        """The island notices that the coordinator closed the connection, or died."""
        link.accepted = False
        self.at(
            0.02, lambda: link.island.when_running(lambda: link.island.hang_up() if link.island.link is link else None)
        )

    def are_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.cuts

    # --- the data plane

    def join(self, island: Island, go: Go) -> None:
        group = self.groups.setdefault((island.boot, go.attempt), Group(go))
        others = [participant.member for participant in go.participants]
        if group.broken or any(self.are_cut(island.id, other) for other in others):
            self.break_group(island.average, island, AVERAGING_LIMIT_S / 2)
            island.later(AVERAGING_LIMIT_S / 2, lambda: island.fail(go.attempt, "a peer cannot be reached"))
            return
        group.joined[island.id] = island
        if len(group.joined) == len(others) and group.ends_at is None:
            group.ends_at = self.now + self.rng.uniform(0.05, 0.5)
            for member in list(group.joined.values()):
                delay = group.ends_at - self.now + self.rng.uniform(0, 0.1)
                self.at(delay, lambda member=member: self.end_average(member, group))

    def end_average(self, island: Island, group: Group) -> None:
        if not group.broken:
            island.when_running(lambda: island.finish_average(group.go.attempt))

    def break_group(self, average: Average, culprit: Island, notice_s: float) -> None:
        """An island dropped out of an averaging: before everything was sent, nobody can finish any more."""
        group, attempt = self.groups.get((average.boot, average.go.attempt)), average.go.attempt
        if group is None or (group.ends_at is not None and self.now >= group.ends_at):
            return
        if group.ends_at is not None and group.ends_at - self.now < 0.03 and self.rng.random() < 0.5:
            return  # just in time: the others have all they need
        group.broken = True
        for other in group.joined.values():
            if other is not culprit:
                other.later(notice_s, lambda other=other: other.fail(attempt, "a peer is gone"))

    # --- faults

    def plan_faults(self) -> None:
        kinds = list(FAULTS)
        weights = [FAULTS[kind][0] for kind in kinds]
        for _ in range(self.rng.choice([0, 1, 2, 3, 4, 6, 8])):
            kind = self.rng.choices(kinds, weights)[0]
            when = self.rng.uniform(0.5, 16.0)
            self.healed_at = max(self.healed_at, when)
            self.at(when, lambda kind=kind: self.strike(kind))

    def strike(self, kind: str) -> None:
        if not self.ending:
            self.note(f"!! {kind}")
            self.stats[kind] = self.stats.get(kind, 0) + 1
            FAULTS[kind][1](self)

    def heal(self, delay: float, act: Callable[[], None]) -> None:
        self.healed_at = max(self.healed_at, self.now + delay)
        self.at(delay, act)

    def anyone(self) -> Island | None:
        running = self.running()
        return self.rng.choice(running) if running else None

    def kill(self, island: Island) -> None:
        """Its process is gone. The kernel closes its connections, unless the network is cut."""
        self.note(f"!! kill {island.name}")
        if island.average:
            self.break_group(island.average, island, NOTICE_S)
        island.alive = False
        link = island.link
        if link and link.up:
            link.up = False
            if not island.cut_from_coordinator:
                self.at(0.02, lambda: self.host.lost(link))

    def come_back(self, dead: Island) -> None:
        """A new process in its place: from what it saved, or from nothing."""
        if self.ending:
            return
        last = not any(island.round >= 0 for island in self.running())
        saved = dead.round >= 0 and (last or self.rng.random() < 0.8)
        founder = self.rng.random() < 0.3 and not self.forgot and self.host.log is not None
        fresh = (0, "start", 0) if founder else (-1, "", 0)
        state = (dead.round, dead.digest, dead.position) if saved else fresh
        Island(self, f"{dead.name}'", founder=founder, saved=state)

    def kill_and_restart(self) -> None:
        island = self.anyone()
        if island is not None:
            self.kill(island)
            if self.rng.random() < 0.7 or not any(other.round >= 0 for other in self.running()):
                self.heal(self.rng.uniform(0.2, 8.0), lambda: self.come_back(island))

    def kill_many(self) -> None:
        running = self.running()
        share = self.rng.choice([0.67, 1.0])
        for island in self.rng.sample(running, max(1, round(share * len(running)))) if running else []:
            self.kill(island)
            self.heal(self.rng.uniform(0.2, 5.0), lambda island=island: self.come_back(island))

    def freeze(self) -> None:
        island = self.anyone()
        if island is None or island.frozen:
            return
        self.note(f"!! freeze {island.name}")
        island.frozen = True
        if island.average:
            self.break_group(island.average, island, AVERAGING_LIMIT_S)
        self.heal(self.rng.choice([0.5, 3.0, 12.0, 30.0]), lambda: self.thaw(island))

    def thaw(self, island: Island) -> None:
        self.note(f"!! thaw {island.name}")
        island.frozen = False
        backlog, island.backlog = island.backlog, []
        for act in backlog:
            island.when_running(act)

    def cut_from_coordinator(self) -> None:
        for island in self.rng.sample(self.running(), self.rng.randint(0, len(self.running()))):
            self.cut_island(island, self.rng.choice([0.5, 2.0, 8.0, 20.0]))

    def cut_island(self, island: Island, seconds: float) -> None:
        if island.cut_from_coordinator:
            return
        self.note(f"!! cut {island.name} off for {seconds} s")
        island.cut_from_coordinator = True
        link = island.link
        if seconds > HALF_OPEN_S:
            island.later(HALF_OPEN_S, lambda: island.hang_up() if island.link is link else None)
        self.heal(seconds, lambda: self.mend_island(island))

    def mend_island(self, island: Island) -> None:
        island.cut_from_coordinator = False
        link = island.link
        if link is None:
            return
        held, link.held = link.held, []
        if link.up and link.accepted:
            for way, message in held:
                self.carry(link, way, message)
        elif link.up:
            self.cut_off(link)
        else:
            self.at(0.02, lambda: self.host.lost(link))

    def drop_connections(self) -> None:
        for island in self.rng.sample(self.running(), self.rng.randint(0, len(self.running()))):
            link = island.link
            if link and link.up and not island.cut_from_coordinator:
                island.hang_up()
                self.at(0.01, lambda link=link: self.host.lost(link))

    def cut_peers(self) -> None:
        """Islands that cannot reach each other, though all reach the coordinator: one from all, or two halves."""
        running = self.running()
        if len(running) < 2:
            return
        side = self.rng.sample(running, self.rng.choice([1, 1, max(1, len(running) // 2)]))
        pairs = {frozenset((a.id, b.id)) for a in side for b in running if b not in side}
        self.cuts |= pairs
        for pair in pairs:
            for island in (self.by_id(member) for member in sorted(pair)):
                if island.average and pair <= {p.member for p in island.average.go.participants}:
                    self.break_group(island.average, island, AVERAGING_LIMIT_S)
        self.heal(self.rng.choice([1.0, 6.0, 20.0]), lambda: self.cuts.difference_update(pairs))

    def kill_coordinator(self) -> None:
        if not self.host.up:
            return
        self.note("!! the coordinator dies")
        self.host.crash()
        self.heal(self.rng.choice([0.2, 2.0, 8.0]), self.restart_coordinator)

    def restart_coordinator(self) -> None:
        if self.host.up:
            return
        empty = self.rng.random() < 0.35
        self.forgot |= empty
        self.note(f"!! the coordinator is back {'without' if empty else 'with'} its log")
        self.host.restart(with_log=not empty)

    def crash_at_commit(self) -> None:
        self.host.crash_after = self.rng.choice([0, 1, 2, 3])

    def join_late(self) -> None:
        Island(self, f"joiner{len(self.islands)}", founder=False)

    def leave(self) -> None:
        running = self.running()
        if len(running) > 1:
            island = self.rng.choice(running)
            if not any(other.round >= 0 for other in running if other is not island):
                return
            island.say(Leave("asked to"))
            if island.average:
                self.break_group(island.average, island, NOTICE_S)
            island.left = True
            link = island.link
            if link and link.up:
                self.at(0.3, lambda: self.host.lost(link))

    def poison(self) -> None:
        island = self.anyone()
        if island is not None and not island.poisoned:  # three strikes would bench it, perhaps as the last one
            island.poisoned = True
            island.poison = self.rng.choice("nan huge weight round foreign base hidden".split())

    def flip(self) -> None:
        island = self.anyone()
        if island is not None and island.round >= 0 and len(self.running()) > 1:
            island.memory = f"flip{self.rng.getrandbits(16):04x}"

    def glitch(self) -> None:
        island = self.anyone()
        if island is not None:
            island.glitches = self.rng.choice([1, 1, 2])

    def operate(self) -> None:
        """A person who reads alarms: if nobody can ever hold what the log says, the log goes, and the run goes on."""
        if self.host.up and not self.ending:
            alarms = [alarm["what"] for alarm in self.host.membership.status(self.now)["alarms"]]
            alive = [island for island in self.islands if island.alive and not island.left]
            held = any(self.holds_tip(island) for island in alive)
            if "nobody holds the state" in alarms and not held and any(island.round >= 0 for island in alive):
                self.note("!! the operator starts the coordinator with an empty log")
                self.stats["operator"] = self.stats.get("operator", 0) + 1
                self.forgot = True
                self.host.crash()
                self.host.restart(with_log=False)
                self.healed_at = max(self.healed_at, self.now)
        self.at(5.0, self.operate)

    def holds_tip(self, island: Island) -> bool:
        tip = self.arbiter.tip
        return island.digest == tip or (island.average is not None and island.average.result == tip)


# what may go wrong -> how often, and how
FAULTS: dict[str, tuple[int, Callable[[World], None]]] = {
    "kill": (4, World.kill_and_restart),
    "kill many": (1, World.kill_many),
    "freeze": (4, World.freeze),
    "cut from the coordinator": (3, World.cut_from_coordinator),
    "connections lost": (3, World.drop_connections),
    "peers cut": (3, World.cut_peers),
    "coordinator killed": (3, World.kill_coordinator),
    "coordinator killed in a commit": (2, World.crash_at_commit),
    "join": (3, World.join_late),
    "leave": (1, World.leave),
    "bad contribution": (3, World.poison),
    "flipped bit": (2, World.flip),
    "wrong arithmetic": (1, World.glitch),
}


def simulate(seed: int, *, verbose: bool = False) -> dict[str, int]:
    """Run one history to its end. Returns what happened in it. Raises Broken."""
    return World(seed, verbose=verbose).run()


def main() -> int:
    """Run many seeds, or replay one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2000, help="how many histories")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--verbose", action="store_true", help="print every message")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        print(simulate(arguments.seed, verbose=arguments.verbose))
        return 0
    failures, total, began = 0, {}, time.perf_counter()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        try:
            for name, number in simulate(seed).items():
                total[name] = total.get(name, 0) + number
        except Exception as error:  # whatever it is, the seed that shows it is what counts
            failures += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    seconds = time.perf_counter() - began
    print(f"{arguments.seeds} seeds in {seconds:.1f} s ({arguments.seeds / seconds:.0f} a second), {failures} failures")
    print(", ".join(f"{name} {number}" for name, number in sorted(total.items())))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
