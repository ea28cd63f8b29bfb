"""Who is in, which round it is, and what is committed: the coordinator's logic as a deterministic state machine.

It has no clock, no network, no disk and no chance of its own: what happened and when is passed in, and each call
returns what is to be done, in order. `docs/protocol.md` draws the states and says what is promised.

    members ──Hello, Ready, Reached, ...──▶ Membership ──▶ [Record, ..., Send, Send, ...]
                                               │ next_deadline()
                 clock ──────tick──────────────┘

The order of the effects is part of the protocol: a `Record` is on disk before anything that follows it is sent.

>>> from atoll.elastic.messages import Hello
>>> membership = Membership(Rules(num_rounds=10, settings_digest="s", version="1.0.0", replicas=1), boot="b1")
>>> hello = Hello("m1", "island", "1.0.2", "s", "10.0.0.1", 7000, 1, 1, round=0, digest="d0", founder=True)
>>> [effect.kind if isinstance(effect, Record) else effect.message for effect in membership.connect("m1", hello, 0.0)]
... # doctest: +ELLIPSIS
['state', 'member', 'founded', Welcome(boot='b1', seat=0, round=0, digest='d0', current=True, ...)]
>>> membership.status(0.0)["round"], membership.status(0.0)["members"][0]["state"]
(0, 'training')
"""

from __future__ import annotations

import hmac
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from atoll.elastic.leases import Leases, Range, common, without
from atoll.elastic.messages import (
    Beat,
    Commit,
    Donor,
    Failed,
    Finish,
    FromCoordinator,
    FromMember,
    Go,
    Have,
    Hello,
    Lease,
    Leave,
    Meet,
    Participant,
    Reached,
    Ready,
    Refused,
    Rejected,
    Serve,
    Void,
    Want,
    Welcome,
)

SETTLE_S = 2.0  # how long a coordinator that came back waits for those who were there before
LEAST_GRACE_S = 0.2
GRACE_SHARE = 0.15  # of the median round
LEAST_PATIENCE_S = 1.0  # with the survivors of an attempt
FRESH_BEATS = 3  # a member that was not heard for so many beats is not asked to take part
RETRY_S, LONGEST_RETRY_S = 0.1, 2.0  # before the next attempt, doubled with each that failed
DONOR_RETRY_S, LONGEST_DONOR_RETRY_S = 0.1, 5.0
ABSURD_NORM = 1e12
LEAST_NORMS = 3  # that must be known before one can be called too large
KEPT_NORMS = 32
KEPT_TIMES = 5
MOST_RANGES = 64  # in one contribution
MOST_CLAIMS = 1024  # ranges that a member may say it holds
MOST_SAMPLES = 2**40  # in one lease
LARGEST = 2**53  # number of an attempt or a sample that a member is believed to have heard of
KEPT_GONE = 64
KEPT_ACCOUNTS = 256
KEPT_ALARMS = 20
PATIENT_TRANSFERS = 2  # transfers a joiner may lose to a committed round before the round waits for it, once

LOST, LEFT = "lost", "left"


@dataclass(frozen=True)
class Rules:
    """What the run is, and how patient it is.

    replicas: seats expected at the start. min_replicas: with fewer live members for longer than deadline_s the run ends
    with exit code 5. quorum: share of the current members that must be ready before grace begins. deadline_s: the one
    knob; longest that a round waits for one more member after quorum, and the start for `replicas` members. beat_s: how
    often a member says that it is alive; lost_after_s: silent for so long, it is evicted. clip_ratio: a norm above so
    many medians is refused. strikes: refused so often, a member is benched.
    """

    num_rounds: int
    settings_digest: str
    version: str
    replicas: int
    min_replicas: int = 1
    quorum: float = 0.5
    deadline_s: float = 30.0
    beat_s: float = 0.5
    lost_after_s: float = 5.0
    clip_ratio: float = 10.0
    strikes: int = 3


@dataclass(frozen=True)
class Committed:
    """The newest committed round. weights and refused by seat; participants: who was told to adopt it, by member."""

    round: int
    digest: str
    attempt: int = 0
    weights: Mapping[int, float] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    lone: bool = False
    participants: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        return {**vars(self), "weights": dict(self.weights)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Committed:
        """From JSON, where keys are text and tuples are lists."""
        weights = {int(seat): float(weight) for seat, weight in plain.get("weights", {}).items()}
        lists = {name: tuple(plain.get(name, ())) for name in ("refused", "participants")}
        return cls(**{**plain, **lists, "weights": weights})


@dataclass(frozen=True)
class Send:
    """Send `message` to the member `to`; if it is not connected, the message is dropped."""

    to: str
    message: FromCoordinator


@dataclass(frozen=True)
class Record:
    """Write this down before doing anything that follows; what stands together is best written in one transaction.

    kind      payload
    state     what `Membership.restore` needs; replaces the one before
    founded   the truth a coordinator without a log took from its members: round, digest
    committed round, digest, attempt, weights, used, members, contributors, listeners, refused, lone, witnesses, ...
    void      round, attempt, why
    member    what (joined, left, lost, refused, carried), replica, pid, round, member, name, why
    synced    a member proved that it holds what is committed: replica, member, round, transfers
    fault     what, replica, round, member, detail, alarm
    finished  round, exit_code, why
    """

    kind: str
    payload: dict[str, Any]


@dataclass(frozen=True)
class Close:
    """Close the connection of this member after what was sent: it was evicted or refused. It may connect anew."""

    member: str


Effect = Send | Record | Close


@dataclass
class _Account:
    """What is remembered of a member while it is away and while the coordinator is.

    contributed: the last committed round with a contribution of it. tokens: that it contributed in all. there: neither
    lost nor left, when that was last known. pid, name: as it said them.
    """

    seat: int
    contributed: int = -1
    tokens: float = 0.0
    strikes: int = 0
    benched: bool = False
    faults: int = 0
    there: bool = True
    pid: int = -1
    name: str = ""


@dataclass
class _Transfer:
    """A member fetches the committed state of `round` from `donor`."""

    donor: str
    round: int


@dataclass
class _Member:
    """One member in the life of this coordinator. round, digest: the committed state it holds, as far as is known."""

    id: str
    hello: Hello
    account: _Account
    seen: float
    round: int
    digest: str
    connected: bool = True
    away_since: float = 0.0
    gone: str = ""  # LOST or LEFT
    release_at: float | None = None  # when the samples of a lost member are given to others
    ready: Ready | None = None
    refused_round: int = -1
    refused_ready: Ready | None = None
    step: int = 0
    tokens_per_s: float = 0.0
    welcomed: Welcome | None = None
    transfer: _Transfer | None = None
    transfers: int = 0
    tried: set[str] = field(default_factory=set)  # donors it could not use
    donor_at: float = 0.0  # not before
    waited_for: bool = False
    stale: set[int] = field(default_factory=set)  # attempts whose late messages are recorded
    told_void: int = 0  # the attempt it was last told is void

    @property
    def seat(self) -> int:
        return self.account.seat

    @property
    def live(self) -> bool:
        return self.connected and not self.gone


@dataclass
class _Attempt:
    """One try to average one round. contributions: of those with a weight. gone: those that are not connected."""

    number: int
    round: int
    participants: tuple[Participant, ...]
    contributions: dict[str, Ready]
    started: float
    expected_s: float
    limit_s: float | None
    reached: dict[str, Reached] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    meet: Meet | None = None
    give_up_at: float | None = None

    @property
    def members(self) -> list[str]:
        return [participant.member for participant in self.participants]

    def waits_for(self) -> list[str]:
        """Participants that are there and have not finished."""
        return [member for member in self.members if member not in self.reached and member not in self.gone]

    def deadline(self) -> float | None:
        """When it is given up at the latest; None while nothing speaks against it."""
        limits = [self.give_up_at] if self.give_up_at is not None else []
        limits += [self.started + self.limit_s] if self.limit_s is not None else []
        return min(limits, default=None)


@dataclass
class _Round:
    """What is known of the round that is being made, forgotten when it is committed."""

    started: float
    quorum_at: float | None = None
    grace_until: float = 0.0
    timed: bool = False
    voids: int = 0
    failures: int = 0  # attempts that failed though nobody was gone
    blind: int = 0  # of those, the ones since somebody last named whom it could not reach
    cut: set[frozenset[str]] = field(default_factory=set)  # pairs that cannot reach each other
    overruns: int = 0  # attempts that took too long though nobody was gone
    ties: int = 0
    only: tuple[str, ...] = ()  # after two ties: who makes the round
    retry_at: float = 0.0


class Membership:
    """The coordinator's state machine.

    boot: a name of this start of the coordinator that no other has. committed, attempt, leases: what the log holds;
    nothing for a new run and for a coordinator that lost its log, which then asks its members. secret: of the run;
    tickets for donors are derived from it.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        boot: str,
        committed: Committed | None = None,
        attempt: int = 0,
        leases: Mapping[str, Any] | None = None,
        secret: bytes = b"",
    ) -> None:
        self.rules = rules
        self.boot = boot
        self._secret = secret
        self._now = 0.0
        self._effects: list[Effect] = []
        self._changed = False  # what a restart needs
        self._members: dict[str, _Member] = {}
        self._accounts: dict[str, _Account] = {}
        self._committed = committed or Committed(0, "")
        self._attempt_number = attempt
        self._attempt: _Attempt | None = None
        self._round = _Round(started=0.0, timed=True)  # nobody knows when it began
        self._leases = Leases(leases)
        self._books, self._openings = f"{boot}.0", 0  # the name changes when the books are lost
        self._earlier_books: list[str] = []
        self._norms: list[float] = []
        self._round_times: list[float] = []
        self._sync_times: list[float] = []
        # A coordinator without a log learns from its members what is committed; until then nothing is decided.
        self._has_log = committed is not None
        self._settled = self._has_log
        self._settle_at: float | None = None
        self._has_founder = False
        self._presumed = -1  # every round up to this one may hold a contribution of anyone
        self._committed_here = False
        # Members that are expected back at once are waited for, so that the first to return does not go on alone.
        self._awaited = set(self._committed.participants)
        self._awaited_until: float | None = None
        self._orphans_at: float | None = None  # when samples of those who did not come back are given to others
        self._roll_call_at: float | None = None  # when those who were there before and did not come back are lost
        self._tickets = 0
        self._below_since: float | None = None
        self._finish: Finish | None = None
        self._alarms: list[dict[str, Any]] = []
        self._strangers: set[str] = set()
        self._last: dict[str, Any] = {}  # the payload of the last committed record
        if self._committed.round >= rules.num_rounds:
            self._finish = Finish(self._committed.round)
        self._handlers: dict[type, Callable[[_Member, Any], None]] = {
            Ready: self._on_ready,
            Reached: self._on_reached,
            Failed: self._on_failed,
            Have: self._on_have,
            Want: self._on_want,
            Meet: self._on_meet,
            Leave: self._on_leave,
        }

    # --- the interface: what happened, and when

    def connect(self, member_id: str, hello: Hello, now: float) -> list[Effect]:
        """A connection said Hello as its first message. A connection that this member had before counts as closed."""
        self._now = max(self._now, now)
        why = self._why_refused(hello)
        if why:
            self._refuse(member_id, hello, why)
        else:
            self._admit(member_id, hello)
            self._advance()
        return self._drain()

    def receive(self, member_id: str, message: FromMember, now: float) -> list[Effect]:
        """`message` came from a member that said Hello before."""
        self._now = max(self._now, now)
        if isinstance(message, Hello):
            return self.connect(member_id, message, now)
        member = self._members.get(member_id)
        if member is None or not member.live:
            self._note_zombie(member_id, member, message)
            return self._drain()
        was_fresh, member.seen = self._is_fresh(member), self._now
        if isinstance(message, Beat):  # by far the most frequent
            member.step, member.tokens_per_s = message.step, message.tokens_per_s
            if was_fresh:
                return []
            self._advance()
        elif self._finish is None or isinstance(message, Leave):
            handler = self._handlers.get(type(message))
            if handler is not None:  # other messages are no part of the protocol, and only show that it is alive
                handler(member, message)
            self._advance()
        return self._drain()

    def disconnect(self, member_id: str, now: float) -> list[Effect]:
        """The connection of a member closed, for whatever reason. If it does not come back it is lost."""
        self._now = max(self._now, now)
        member = self._members.get(member_id)
        if member is not None and member.live:
            self._set_away(member)
            self._advance()
        return self._drain()

    def tick(self, now: float) -> list[Effect]:
        """Time passed. To be called at `next_deadline()` at the latest; more often does no harm."""
        self._now = max(self._now, now)
        self._evict()
        self._advance()
        return self._drain()

    def next_deadline(self) -> float | None:
        """When `tick` must be called at the latest if nothing else happens; None: not before something happens."""
        if self._finish is not None:
            return None
        return min(self._deadlines(), default=None)

    # --- the interface: what is known

    def snapshot(self) -> dict[str, Any]:
        """What a restart needs, as plain data; `restore` takes it back, also after a trip through JSON."""
        return {
            "committed": self._committed.plain() if self._settled else None,
            "attempt": self._attempt_number,
            "leases": self._leases.snapshot(),
            "accounts": {member: dict(vars(account)) for member, account in self._accounts.items()},
            "norms": list(self._norms),
            "round_times": list(self._round_times),
            "sync_times": list(self._sync_times),
            "presumed": self._presumed,
            "books": self._books,
            "earlier_books": list(self._earlier_books),
        }

    @classmethod
    def restore(cls, rules: Rules, *, boot: str, state: Mapping[str, Any], secret: bytes = b"") -> Membership:
        """The coordinator as it was when `snapshot` was written, with nobody connected."""
        committed = Committed.from_plain(state["committed"]) if state["committed"] else None
        attempt, leases = state["attempt"], state["leases"]
        new = cls(rules, boot=boot, committed=committed, attempt=attempt, leases=leases, secret=secret)
        new._accounts = {member: _Account(**account) for member, account in state["accounts"].items()}
        new._norms, new._presumed = list(state["norms"]), state["presumed"]
        new._books, new._earlier_books = state["books"], list(state["earlier_books"])
        new._round_times, new._sync_times = list(state["round_times"]), list(state["sync_times"])
        return new

    def status(self, now: float) -> dict[str, Any]:
        """Everything worth showing, as plain data. Three things are reported apart:

        liveness: who is there. participation: who took part in the last committed round, and with what weight.
        breadth: share of the live members whose work is in its mean.
        """
        live = self._live()
        contributors = len(self._last.get("contributors", ()))
        return {
            "boot": self.boot,
            "round": self._committed.round,
            "num_rounds": self.rules.num_rounds,
            "digest": self._committed.digest,
            "settled": self._settled,
            "attempt": self._attempt_number,
            "averaging": self._attempt is not None,
            "waiting_for": self._waiting_for(),
            "members": [self._member_status(m, now) for m in sorted(self._members.values(), key=lambda m: m.seat)],
            "liveness": [member.seat for member in live],
            "participation": {str(seat): weight for seat, weight in self._last.get("weights", {}).items()},
            "breadth": min(1.0, contributors / len(live)) if live else 0.0,
            "leases": self._leases.totals(),
            "alarms": [*self._alarms, *self._standing_alarms()],
            "finished": None if self._finish is None else asdict(self._finish),
        }

    # --- small questions

    def _live(self) -> list[_Member]:
        return sorted((member for member in self._members.values() if member.live), key=lambda member: member.seat)

    def _is_current(self, member: _Member) -> bool:
        committed = self._committed
        return bool(committed.digest) and (member.round, member.digest) == (committed.round, committed.digest)

    def _is_fresh(self, member: _Member) -> bool:
        return member.live and self._now <= member.seen + FRESH_BEATS * self.rules.beat_s

    def _electorate(self) -> list[_Member]:
        """Who is asked for a contribution: those who are there, and those who closed their connection just now."""
        asked = (m for m in self._members.values() if not m.gone and self._is_current(m) and not m.account.benched)
        return [m for m in asked if m.ready or m.refused_round != self._committed.round + 1]

    def _expected_s(self, contributions: Iterable[Ready]) -> float:
        """Seconds an averaging takes: what the members expect, or what the last ones took."""
        measured = median(self._sync_times) if self._sync_times else 0.0
        return max([measured, *(ready.sync_s for ready in contributions if 0 < ready.sync_s < math.inf)])

    def _norm_limit(self) -> float:
        if len(self._norms) < LEAST_NORMS:
            return ABSURD_NORM
        return min(ABSURD_NORM, self.rules.clip_ratio * median(self._norms))

    def _is_bad_norm(self, norm: float) -> bool:
        return not 0 <= norm <= self._norm_limit()  # NaN and infinity fail too

    # --- effects

    def _send(self, member: _Member | str, message: FromCoordinator) -> None:
        self._effects.append(Send(member if isinstance(member, str) else member.id, message))

    def _record(self, kind: str, **payload: Any) -> None:
        self._effects.append(Record(kind, payload))

    def _record_member(self, what: str, member: _Member, why: str = "") -> None:
        who = {"replica": member.seat, "pid": member.hello.pid, "member": member.id, "name": member.hello.name}
        self._record("member", what=what, round=self._committed.round, why=why, **who)

    def _fault(self, what: str, member: _Member | None, detail: str, *, alarm: bool = False) -> None:
        who = {"replica": member.seat if member else None, "member": member.id if member else None}
        payload = {"what": what, "round": self._committed.round + 1, "detail": detail, "alarm": alarm, **who}
        self._effects.append(Record("fault", payload))
        if member is not None:
            member.account.faults += 1
        if alarm:
            self._alarms = [*self._alarms, {**payload, "at": self._now}][-KEPT_ALARMS:]

    def _drain(self) -> list[Effect]:
        """What is to be done; what a restart needs to know stands first."""
        effects, self._effects = self._effects, []
        if self._changed:
            self._changed = False
            effects.insert(0, Record("state", self.snapshot()))
        return effects

    # --- coming

    def _why_refused(self, hello: Hello) -> str:
        ours, theirs = self.rules.version, hello.version
        if ours.split(".")[:2] != theirs.split(".")[:2]:
            return f"version {theirs} cannot take part in a run of version {ours}. Install atoll=={ours}."
        if hello.settings_digest != self.rules.settings_digest:
            return (
                f"settings {hello.settings_digest[:12]} differ from the run's {self.rules.settings_digest[:12]}; "
                "islands of other settings do not train one model. Start this island with the run's own settings."
            )
        return ""

    def _refuse(self, member_id: str, hello: Hello, why: str) -> None:
        who = {"replica": -1, "pid": hello.pid, "member": member_id, "name": hello.name}
        self._record("member", what="refused", round=self._committed.round, why=why, **who)
        self._send(member_id, Refused(why, exit_code=3))
        self._effects.append(Close(member_id))

    def _admit(self, member_id: str, hello: Hello) -> None:
        old = self._members.get(member_id)
        if old is not None and old.live:  # the newer connection wins
            self._set_away(old)
        account = self._account(member_id, hello)
        member = _Member(member_id, hello, account, seen=self._now, round=hello.round, digest=hello.digest)
        if old is not None:
            member.transfers, member.waited_for, member.tried = old.transfers, old.waited_for, old.tried
        self._members[member_id] = member
        self._strangers.discard(member_id)
        if self._orphans_at is None:
            self._orphans_at = self._now + self.rules.deadline_s
            self._roll_call_at = self._now + self.rules.lost_after_s
        self._attempt_number = max(self._attempt_number, 0 if self._has_log else min(hello.attempt, LARGEST))
        self._changed = True
        if old is None or old.gone:
            self._record_member("joined", member, why="again" if old is not None else "")
        self._wait_for_others(member, returned=old is not None and not old.gone)
        self._learn(member)
        self._settle_if_due()
        self._welcome(member)
        self._bring_up_to_date(member)

    def _account(self, member_id: str, hello: Hello) -> _Account:
        account = self._accounts.pop(member_id, None) or _Account(seat=-1)
        account.seat = self._seat(member_id, [account.seat, hello.seat])
        account.there, account.pid, account.name = True, hello.pid, hello.name
        self._accounts[member_id] = account  # the newest last
        dead = [m for m in self._accounts if m not in self._members or self._members[m].gone]
        for forgotten in dead[: max(0, len(self._accounts) - KEPT_ACCOUNTS)]:
            del self._accounts[forgotten]
        return account

    def _seat(self, member_id: str, wishes: Sequence[int]) -> int:
        """The first free seat it wishes for, otherwise the lowest free one."""
        others = [member for member in self._members.values() if member.id != member_id and not member.gone]
        for other in others:
            if other.seat == wishes[-1] and not other.connected and wishes[0] != wishes[-1]:
                self._lose(other, LOST, "its seat was asked for by a newer member")
        taken = {other.seat for other in others if not other.gone}
        for wish in wishes:
            if wish >= 0 and wish not in taken:
                return wish
        # Whoever was there before this coordinator was started again finds its seat free.
        expected = (m for m in self._committed.participants if m in self._accounts and m not in self._members)
        taken |= {self._accounts[m].seat for m in expected if m != member_id}
        return next(seat for seat in range(len(taken) + 1) if seat not in taken)

    def _wait_for_others(self, member: _Member, *, returned: bool) -> None:
        """Whoever comes back after a cut that hit others too gives them a moment, and does not go on alone."""
        self._awaited.discard(member.id)
        if returned:
            away = [other.id for other in self._members.values() if not other.connected and not other.gone]
            if away:
                self._awaited.update(away)
                self._awaited_until = self._now + SETTLE_S
        elif self._awaited_until is None:
            self._awaited_until = self._now + SETTLE_S

    def _bring_up_to_date(self, member: _Member) -> None:
        """A participant that was away is told what it missed; what it averaged may be all that it lacks."""
        if self._attempt and member.id in self._attempt.members and self._is_current(member):
            self._attempt.gone.discard(member.id)
            self._watch_survivors(self._attempt)
            self._send(member, self._go_message(self._attempt))
            if self._attempt.meet:
                self._send(member, self._attempt.meet)
        elif self._missed_commit(member):
            self._send(member, self._commit_message())
            member.donor_at = self._now + SETTLE_S
        elif self._settled and 0 <= member.round < self._committed.round:
            if member.round > 0 or member.hello.leased:  # else it has just been started
                self._record_member("carried", member, why=f"it was away since round {member.round}")
        elif self._settled and member.round > self._committed.round:
            detail = f"it holds round {member.round} of another history, and takes over what is committed here"
            self._fault("ahead", member, detail, alarm=True)
        if self._finish is not None:
            self._find_donors()
            self._send(member, self._finish)

    def _missed_commit(self, member: _Member) -> bool:
        committed = self._committed
        took_part = committed.attempt > 0 and member.id in committed.participants
        return self._settled and took_part and member.round == committed.round - 1

    # --- the truth, where there is no log

    def _learn(self, member: _Member) -> None:
        """What a coordinator without a log takes from a Hello: the highest committed round that any member holds."""
        if self._has_log:
            self._reclaim(member)
            return
        if self._settled and (self._committed_here or member.round <= self._committed.round):
            self._leases.presume(min(member.hello.position, LARGEST))
            self._reclaim(member)
            return
        if self._settled:  # later than hoped, and not too late: nothing was decided yet
            self._fault("late truth", member, f"it holds round {member.round}, newer than any before", alarm=True)
            self._settled = False
            if self._attempt:
                self._void("a member holds a newer round")
            for other in self._members.values():
                other.ready = None
        self._prefer(member)

    def _prefer(self, member: _Member) -> None:
        """Until it is settled, the newest state that was heard of stands for the truth."""
        if not _holds_state(member):
            return
        known, founder = self._committed, member.hello.founder
        newer = member.round > known.round or not known.digest
        if newer or (member.round == known.round == 0 and founder and not self._has_founder):
            self._committed, self._has_founder = Committed(member.round, member.digest), founder
        if newer and member.round >= 1:
            self._settle_at = self._now + SETTLE_S
        elif self._settle_at is None:
            self._settle_at = self._now + self.rules.deadline_s

    def _settle_if_due(self) -> None:
        if self._settled or self._settle_at is None:
            return
        top = max((m.round for m in self._members.values() if not m.gone and _holds_state(m)), default=0)
        live = self._live()
        holders = [member for member in live if member.round == top and _holds_state(member)]
        everyone = top == 0 and len(live) >= self.rules.replicas
        enough = top > 0 or len(live) >= self.rules.min_replicas
        if holders and (everyone or (enough and self._now >= self._settle_at)):
            self._settle(holders)

    def _settle(self, holders: list[_Member]) -> None:
        """From here on there is one truth, and it is the log's."""
        live = self._live()
        ids = tuple(member.id for member in holders)
        self._committed = Committed(holders[0].round, self._most_held(holders), participants=ids)
        self._settled, self._changed = True, True
        self._presumed = self._committed.round if self._committed.round >= 1 else -1
        self._round = _Round(started=self._now)
        self._record("founded", round=self._committed.round, digest=self._committed.digest)
        self._open_books(live, holders)
        for member in live:
            self._welcome(member)
        if self._committed.round >= self.rules.num_rounds:
            self._end(Finish(self._committed.round))

    def _open_books(self, live: list[_Member], holders: list[_Member]) -> None:
        """Who holds which samples, from what the members say. What nobody claims may be committed, and is skipped.

        A member is believed if it knows the books that those who hold the newest state know: others may have been
        given its samples since. What was leased before that state was heard of may have gone into it.
        """
        old, self._leases = self._leases, Leases()
        self._leases.presume(max([old.position, *(_claimed_position(member.hello) for member in live)]))
        self._openings += 1
        self._books = f"{self.boot}.{self._openings}"
        self._earlier_books = sorted({member.hello.books for member in holders} - {""})
        known = max(member.hello.position for member in holders)
        for member in live:
            self._reclaim(member, without(old.held(member.id), [(0, known)]))

    def _most_held(self, holders: list[_Member]) -> str:
        """The digest of the committed round: the first founder's of round 0; afterwards what most members hold."""
        held = Counter(member.digest for member in holders)
        if holders[0].round == 0:
            return self._committed.digest if self._committed.digest in held else holders[0].digest
        best = min(held, key=lambda digest: (-held[digest], digest))
        if len(held) > 1:
            detail = ", ".join(f"{digest[:12]}: {number} members" for digest, number in sorted(held.items()))
            self._fault("two digests", None, f"round {holders[0].round} is held as {detail}", alarm=True)
        return best

    def _reclaim(self, member: _Member, since: Sequence[Range] = ()) -> None:
        """Leave to a member what it says it holds, and what was leased to it `since` it said so."""
        if self._is_contributing(member):
            return  # what it contributed now is neither its own nor committed yet
        hello = member.hello
        believed = hello.books == self._books or hello.books in self._earlier_books
        said = [pair for pair in (*hello.leased, *hello.in_flight)[:MOST_CLAIMS] if 0 <= pair[0] < pair[1]]
        claimed = [*(said if believed else common(said, self._leases.held(member.id))), *since]
        spent = hello.in_flight if hello.in_flight_round <= self._presumed else ()
        self._leases.reclaim(member.id, without(claimed, spent))

    def _welcome(self, member: _Member) -> None:
        """Say where the run is, unless that is what it was told already."""
        own = (*member.hello.leased, *member.hello.in_flight)
        welcome = Welcome(
            boot=self.boot,
            seat=member.seat,
            round=self._committed.round,
            digest=self._committed.digest,
            current=self._is_current(member),
            num_rounds=self.rules.num_rounds,
            beat_s=self.rules.beat_s,
            leased=self._leases.held(member.id) if self._settled else own,
            contributed=max(member.account.contributed, self._presumed),
            position=self._leases.position,
            settled=self._settled,
            books=self._books if self._settled else "",
        )
        if member.welcomed is None or replace(welcome, position=member.welcomed.position) != member.welcomed:
            member.welcomed = welcome
            self._send(member, welcome)

    # --- going

    def _set_away(self, member: _Member) -> None:
        member.connected = False
        member.away_since = self._now
        member.ready = member.transfer = None
        for other in self._members.values():
            if other.transfer and other.transfer.donor == member.id:
                other.transfer = None
        if self._attempt and member.id in self._attempt.members:
            self._attempt.gone.add(member.id)
            self._watch_survivors(self._attempt)

    def _lose(self, member: _Member, what: str, why: str) -> None:
        if member.connected:
            self._set_away(member)
        member.gone, member.account.there = what, False
        self._awaited.discard(member.id)
        member.release_at = self._now + (self.rules.deadline_s if what == LOST else 0.0)
        self._changed = True
        self._record_member(what, member, why)
        self._release_if_due(member)

    def _release_if_due(self, member: _Member) -> None:
        """Give back the samples of a member that is gone, but never those that an attempt is averaging."""
        if member.release_at is not None and self._now >= member.release_at and not self._is_contributing(member):
            self._leases.release(member.id)
            member.release_at = None
            self._changed = True
            self._forget_old()

    def _is_contributing(self, member: _Member) -> bool:
        return self._attempt is not None and member.id in self._attempt.contributions

    def _forget_old(self) -> None:
        busy = self._attempt.members if self._attempt else []
        gone = [m for m in self._members.values() if m.gone and m.release_at is None and m.id not in busy]
        for member in sorted(gone, key=lambda m: m.away_since)[: max(0, len(gone) - KEPT_GONE)]:
            del self._members[member.id]

    def _release_orphans(self) -> None:
        for member_id in self._leases.members():
            if member_id not in self._members:
                self._leases.release(member_id)
                self._changed = True
        self._orphans_at = math.inf

    def _call_roll(self) -> None:
        """Who was there before this coordinator was started again, and died while it was away."""
        for member_id, account in self._accounts.items():
            if account.there and member_id not in self._members:
                account.there, self._changed = False, True
                who = {"replica": account.seat, "pid": account.pid, "member": member_id, "name": account.name}
                why = "it did not come back when the coordinator did"
                self._record("member", what=LOST, round=self._committed.round, why=why, **who)
        self._roll_call_at = math.inf

    def _evict(self) -> None:
        if self._roll_call_at is not None and self._now >= self._roll_call_at:
            self._call_roll()
        if self._orphans_at is not None and self._now >= self._orphans_at:
            self._release_orphans()
        patience = self.rules.lost_after_s
        for member in list(self._members.values()):
            if member.gone:
                self._release_if_due(member)
            elif member.connected and self._now >= member.seen + patience:
                self._lose(member, LOST, f"silent for {patience:g} s")
                self._effects.append(Close(member.id))
            elif not member.connected and self._now >= member.away_since + patience:
                self._lose(member, LOST, f"disconnected for {patience:g} s")

    def _on_leave(self, member: _Member, message: Leave) -> None:
        self._lose(member, LEFT, message.why)

    def _note_zombie(self, member_id: str, member: _Member | None, message: FromMember) -> None:
        """Somebody speaks who was evicted or never said Hello: nothing it says counts, and that is recorded once."""
        if member_id in self._strangers or isinstance(message, (Beat, Leave)):
            return
        if len(self._strangers) < KEPT_ACCOUNTS:
            self._strangers.add(member_id)
            self._fault("zombie", member, f"a {type(message).__name__} of {member_id}, which is not in, was ignored")

    # --- what members say

    def _on_want(self, member: _Member, want: Want) -> None:
        if not self._settled:
            return  # nobody knows yet which samples are free; it asks again after the Welcome that follows
        if member.account.benched or not 1 <= want.samples <= MOST_SAMPLES:
            self._fault("lease refused", member, f"it asked for {want.samples} samples")
            return
        ranges = self._leases.grant(member.id, want.samples)
        self._changed = True
        self._send(member, Lease(ranges, self._leases.position))

    def _on_have(self, member: _Member, have: Have) -> None:
        if not self._settled:
            member.round, member.digest = have.round, have.digest
            return
        was_current, transfer = self._is_current(member), member.transfer
        moved_on = have.round > member.round
        member.round, member.digest, member.transfer = have.round, have.digest, None
        if self._is_current(member):
            self._note_synced(member, was_current)
            return
        member.ready = None
        member.transfers += 1
        delay = min(LONGEST_DONOR_RETRY_S, DONOR_RETRY_S * 2 ** min(member.transfers - 1, 16))
        member.donor_at = self._now + (0.0 if moved_on else delay)
        if transfer and not moved_on:
            member.tried.add(transfer.donor)
        if have.round >= self._committed.round:
            self._fault("desync", member, f"it holds {have.digest[:12]} as round {have.round}")

    def _note_synced(self, member: _Member, was_current: bool) -> None:
        if not was_current:
            who = {"replica": member.seat, "member": member.id, "name": member.hello.name}
            self._record("synced", round=member.round, transfers=member.transfers + 1, **who)
        member.tried.clear()

    def _on_ready(self, member: _Member, ready: Ready) -> None:
        """Let a contribution in, or say why not. The last committed round is the only base there is."""
        if not self._settled:
            return  # it says so again after the Welcome that follows
        if ready == member.refused_ready or (member.ready is not None and _same_work(ready, member.ready)):
            return  # said again: a Welcome, or the answer to the first time, crossed it
        if member.transfer is not None:
            return  # a Donor crossed it: it says so again when it has taken the state
        if member.account.benched:
            self._reject(member, ready.round, "it is benched")
        elif ready.round <= self._committed.round:
            self._reject(member, ready.round, f"round {ready.round} is committed already")
        elif not self._is_current(member):
            self._reject(member, ready.round, "it does not hold the committed state: say Have first")
        elif ready.round == self._committed.round + 1 and ready.base != self._committed.digest:
            self._desync(member, f"its anchor is {ready.base[:12]}, not {self._committed.digest[:12]}")
            self._reject(member, ready.round, "its anchor is not the committed one")
        else:
            self._judge(member, ready)

    def _judge(self, member: _Member, ready: Ready) -> None:
        why, drop = self._why_rejected(member, ready)
        if why:
            self._strike(member, ready, why, drop=drop)
            return
        member.ready = ready

    def _why_rejected(self, member: _Member, ready: Ready) -> tuple[str, bool]:
        """Why a contribution is not let in, and whether what it is made of must be thrown away."""
        if ready.round != self._committed.round + 1:
            return f"round {ready.round} is not the next, which is {self._committed.round + 1}", False
        if member.ready is not None:
            return "a contribution of this member is in already", False
        if not 0 < ready.weight < math.inf:
            return f"weight {ready.weight} is not positive", False
        if not ready.finite:
            return f"it is not finite (norm {ready.norm:.4g})", True
        if self._is_bad_norm(ready.norm):
            return f"its norm {ready.norm:.4g} is not within [0, {self._norm_limit():.4g}]", True
        if len(ready.used) > MOST_RANGES or not self._leases.holds(member.id, ready.used):
            return "it used samples that are not leased to it", True
        return "", False

    def _strike(self, member: _Member, ready: Ready, why: str, *, drop: bool) -> None:
        account, round = member.account, ready.round
        member.refused_ready = ready
        account.strikes += 1
        self._changed = True
        if account.strikes >= self.rules.strikes and not account.benched:
            account.benched = True
            why = f"{why}; benched after {account.strikes} such"
            if not self._is_contributing(member):
                self._leases.release(member.id)
        self._fault("refused", member, why)
        if round == self._committed.round + 1 and member.ready is None:
            member.refused_round = round
        self._reject(member, round, why, drop=drop)

    def _reject(self, member: _Member, round: int, why: str, *, drop: bool = False) -> None:
        self._send(member, Rejected(round, why, benched=member.account.benched, drop=drop))

    def _desync(self, member: _Member, detail: str) -> None:
        """What it holds is not what is committed: it takes the state from a donor."""
        self._fault("desync", member, detail)
        member.round, member.digest = min(member.round, self._committed.round), "desynced"
        member.ready, member.transfer, member.donor_at = None, None, self._now

    # --- an attempt

    def _on_meet(self, member: _Member, meet: Meet) -> None:
        attempt = self._attempt
        if attempt is None or meet.attempt != attempt.number or attempt.members[0] != member.id:
            self._note_stale(member, meet.attempt)
            return
        attempt.meet = meet
        for other in attempt.members[1:]:
            if other not in attempt.gone:
                self._send(other, meet)

    def _on_reached(self, member: _Member, reached: Reached) -> None:
        attempt = self._attempt
        if attempt is None or reached.attempt != attempt.number or member.id not in attempt.members:
            self._note_stale(member, reached.attempt)
            return
        attempt.reached[member.id] = reached

    def _on_failed(self, member: _Member, failed: Failed) -> None:
        self._round.cut |= {frozenset((member.id, other)) for other in failed.unreachable if other in self._members}
        attempt = self._attempt
        if attempt is not None and failed.attempt == attempt.number and member.id in attempt.members:
            self._note_failure(attempt, failed)
            self._void(f"{member.hello.name}: {failed.why}"[:200])
        elif failed.attempt == self._committed.attempt and failed.round == self._committed.round:
            # It took part and has no result: what its peers reached it takes from one of them.
            member.donor_at = self._now
            if self._is_current(member):
                member.round, member.digest = self._committed.round - 1, ""
        elif not failed.unreachable:
            self._note_stale(member, failed.attempt)

    def _note_failure(self, attempt: _Attempt, failed: Failed) -> None:
        if attempt.gone:
            return
        self._round.failures += 1
        self._round.blind = 0 if failed.unreachable else self._round.blind + 1
        wait_s = min(LONGEST_RETRY_S, RETRY_S * 2 ** min(self._round.failures - 1, 16))
        self._round.retry_at = self._now + wait_s

    def _note_stale(self, member: _Member, number: int) -> None:
        """An answer to an attempt that is over: it crossed the Void on its way, or a zombie speaks. Recorded once."""
        if number not in (member.told_void, self._committed.attempt) and number not in member.stale:
            member.stale.add(number)
            self._fault("stale", member, f"an answer to attempt {number}, which nobody asked for, was ignored")

    def _watch_survivors(self, attempt: _Attempt) -> None:
        """Those who are left of an attempt may finish it, and have a moment for that."""
        if not attempt.gone - set(attempt.reached):
            attempt.give_up_at = None
        elif attempt.give_up_at is None:
            attempt.give_up_at = self._now + max(LEAST_PATIENCE_S, 3 * attempt.expected_s)

    def _watch_attempt(self) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        deadline = attempt.deadline()
        if attempt.meet is None and attempt.members[0] in attempt.gone:
            self._void("the member that holds the rendezvous is gone")
        elif not attempt.waits_for():
            self._conclude(attempt)
        elif deadline is not None and self._now >= deadline:
            self._round.overruns += not attempt.gone
            self._void("its survivors did not finish" if attempt.gone else "it took too long")

    def _conclude(self, attempt: _Attempt) -> None:
        """Everyone who is left has finished: the round is committed, or nothing happened."""
        digests = Counter(reached.digest for reached in attempt.reached.values())
        deviant = {m for m, reached in attempt.reached.items() if reached.base not in ("", self._committed.digest)}
        if not any(self._members[member].live for member in attempt.reached):
            self._void("nobody who finished it is left")
        elif len(digests) > 1 or deviant:
            self._deviate(attempt, digests, deviant)
        elif accused := self._accused(attempt):
            self._refuse_contributions(attempt, accused)
        else:
            self._commit(attempt)

    def _accused(self, attempt: _Attempt) -> list[str]:
        """Contributors whose norm, as most of those who report norms received it, must not reach the model."""
        reports = [r.norms for r in attempt.reached.values() if len(r.norms) == len(attempt.participants)]
        bad = []
        for i, member in enumerate(attempt.members):
            votes = sum(self._is_bad_norm(norms[i]) for norms in reports)
            if member in attempt.contributions and 2 * votes > len(reports):
                bad.append(member)
        return bad

    def _refuse_contributions(self, attempt: _Attempt, accused: list[str]) -> None:
        names = ", ".join(self._members[member].hello.name for member in accused)
        self._void(f"a contribution is not finite or too large: {names}")
        for member in accused:
            self._members[member].ready = None
            why = "what arrived of its contribution is not finite or too large"
            self._strike(self._members[member], attempt.contributions[member], why, drop=True)

    def _deviate(self, attempt: _Attempt, digests: Counter[str], deviant: set[str]) -> None:
        """The members averaged to different anchors. Whoever is wrong for sure resyncs; a tie is tried once more.

        Wrong for sure: it started from another anchor than the committed one, or more than half of all agree without
        it. In a tie everyone looks at its anchor again, in saying Ready anew. After a second tie no arithmetic
        between the two sides can be trusted, so one side makes the round: that of the contributor with the fewest
        faults, then the lowest seat. The others keep their work, take its result and bring the work to the next round.
        """
        most, votes = digests.most_common(1)[0]
        if not deviant and 2 * votes > len(attempt.reached):
            deviant = {member for member, reached in attempt.reached.items() if reached.digest != most}
        self._void("the members reached different anchors")
        if deviant:
            for member in sorted(deviant):
                self._desync(self._members[member], "it reached another anchor than the others")
                self._reject(self._members[member], attempt.round, "it reached another anchor than the others")
            return
        self._round.ties += 1
        if self._round.ties >= 2:
            self._choose_side(attempt)
            return
        for member in attempt.contributions:
            self._members[member].ready = None
            self._reject(self._members[member], attempt.round, "no anchor has a majority: look at yours and say Ready")

    def _choose_side(self, attempt: _Attempt) -> None:
        candidates = [self._members[m] for m in attempt.contributions if m in attempt.reached]
        chosen = min(
            candidates or [self._members[m] for m in attempt.reached], key=lambda m: (m.account.faults, m.seat)
        )
        digest = attempt.reached[chosen.id].digest
        self._round.only = tuple(m for m, reached in attempt.reached.items() if reached.digest == digest)
        detail = f"two averagings ended in a tie; the side of {chosen.hello.name} makes round {attempt.round}"
        self._fault("tie", chosen, detail, alarm=True)

    def _void(self, why: str) -> None:
        """Nothing moves: what was averaged is thrown away, what was contributed stays with the members."""
        attempt = self._attempt
        assert attempt is not None, "there is an attempt to void"
        self._attempt = None
        self._round.voids += 1
        self._record("void", round=attempt.round, attempt=attempt.number, why=why)
        for member in attempt.members:
            if member not in attempt.gone:
                self._members[member].told_void = attempt.number
                self._send(member, Void(attempt.number, why))
            self._release_if_due(self._members[member])

    # --- closing a round

    def _close_round(self) -> None:
        """Begin an attempt when everyone is ready, or when a quorum is and grace is over."""
        if not self._settled or self._attempt or self._finish or self._now < self._round.retry_at:
            return
        electorate = self._electorate()
        ready = [member for member in electorate if member.ready and self._is_fresh(member)]
        if not ready or len(ready) < math.ceil(self.rules.quorum * len(electorate) - 1e-9):
            self._round.quorum_at = None
            return
        self._note_quorum()
        if self._waits_for_return() or self._waits_for_joiner():
            return
        everyone = len(ready) == sum(member.connected for member in electorate)
        if everyone or self._now >= self._round.grace_until:
            self._begin(ready)

    def _note_quorum(self) -> None:
        """Grace is a share of the median round, measured from one commit to the next quorum."""
        this = self._round
        if this.quorum_at is not None:
            return
        this.quorum_at = self._now
        if not this.timed:
            this.timed = True
            self._round_times = [*self._round_times, self._now - this.started][-KEPT_TIMES:]
        known = self._round_times
        grace_s = max(LEAST_GRACE_S, GRACE_SHARE * median(known)) if known else self.rules.deadline_s
        this.grace_until = self._now + min(self.rules.deadline_s, grace_s)

    def _waits_for_return(self) -> bool:
        return bool(self._awaited) and self._awaited_until is not None and self._now < self._awaited_until

    def _waits_for_joiner(self) -> bool:
        """A transfer that takes longer than a round would never end: once, the round waits for it."""
        if self._round.quorum_at is None or self._now >= self._round.quorum_at + self.rules.deadline_s:
            return False
        return any(self._deserves_waiting(member) for member in self._members.values())

    def _deserves_waiting(self, member: _Member) -> bool:
        slow = member.transfer is not None and member.transfers >= PATIENT_TRANSFERS
        return slow and not member.waited_for and self._is_fresh(member)

    def _begin(self, ready: list[_Member]) -> None:
        ids = {member.id for member in ready}
        there = self._without_cut([m for m in self._live() if self._is_current(m) and self._is_fresh(m)])
        there.sort(key=lambda member: not member.hello.dialable)  # the first holds the store that all others dial
        contributions = {m.id: m.ready for m in there if m.id in ids and m.ready}
        if not contributions:
            self._round.retry_at = self._now + RETRY_S
            return
        for member in self._members.values():
            member.waited_for |= self._deserves_waiting(member)
        self._attempt_number += 1
        expected_s = self._expected_s(contributions.values())
        self._attempt = _Attempt(
            number=self._attempt_number,
            round=self._committed.round + 1,
            participants=tuple(_participant(m, contributions.get(m.id)) for m in there),
            contributions=contributions,
            started=self._now,
            expected_s=expected_s,
            limit_s=self._limit_s(expected_s),
        )
        self._changed = True
        for member in there:
            self._send(member, self._go_message(self._attempt))

    def _limit_s(self, expected_s: float) -> float | None:
        """Far longer than any averaging takes; longer each time, should the expectation be wrong. None: unknown."""
        if expected_s <= 0:
            return None
        return (self.rules.deadline_s + 10 * expected_s) * 2.0 ** min(self._round.overruns, 16)

    def _without_cut(self, members: list[_Member]) -> list[_Member]:
        """After two failures though everyone was there: leave out those who cannot reach the others.

        First the ones named, as few as it takes. Where failures name nobody, leave out one after the other, newest
        seats first, then each two, three, ... neighbours by seat: at most n² attempts find a part that can average.
        """
        this = self._round
        if this.only:
            side = [member for member in members if member.id in this.only]
            members = side if any(member.ready for member in side) else members
        if this.failures < 2:
            return members
        members = _without_pairs(members, this.cut)
        if this.blind < 2 or len(members) < 2:
            return members
        size, start = divmod(this.blind - 2, len(members))
        size = 1 + size % (len(members) - 1)
        newest_first = members[::-1]
        left_out = {newest_first[(start + i) % len(members)].id for i in range(size)}
        if this.failures > 2 and all(m.id in left_out for m in members if m.ready):
            this.blind += 1  # nothing to average without them: on to the next choice
        return [member for member in members if member.id not in left_out]

    def _go_message(self, attempt: _Attempt) -> Go:
        return Go(attempt.round, attempt.number, attempt.participants)

    # --- committing

    def _commit(self, attempt: _Attempt) -> None:
        digest = next(iter(attempt.reached.values())).digest
        seats = {member: self._members[member].seat for member in attempt.members}
        out = [m for m in self._members.values() if m.id not in attempt.contributions]
        refused = [m.seat for m in out if m.refused_round == attempt.round]
        others = [m for m in self._live() if not m.account.benched and m.id not in attempt.contributions]
        carrying = [m for m in others if self._is_current(m)]
        self._committed = Committed(
            round=attempt.round,
            digest=digest,
            attempt=attempt.number,
            weights={seats[m]: ready.weight for m, ready in attempt.contributions.items()},
            refused=tuple(sorted(refused)),
            lone=len(attempt.contributions) == 1 and bool(others),
            participants=tuple(attempt.members),
        )
        self._attempt, self._committed_here, self._changed = None, True, True
        self._awaited.clear()
        self._book(attempt)
        self._record_commit(attempt)
        for member in attempt.members:
            self._tell_commit(attempt, self._members[member])
        for other in carrying:
            self._record_member("carried", other, why="it listened" if self._is_current(other) else "it was left out")
            # Where averaging takes longer than training, one attempt follows the other: a joiner that fetched the state
            # in between comes too late for each, and what it fetched is lost.
            other.transfers += not self._is_current(other)
        self._start_round()

    def _book(self, attempt: _Attempt) -> None:
        """What is counted and measured: samples, tokens, norms, seconds."""
        reports = [r.norms for r in attempt.reached.values() if len(r.norms) == len(attempt.participants)]
        for i, participant in enumerate(attempt.participants):
            ready = attempt.contributions.get(participant.member)
            if ready is None:
                continue
            account = self._members[participant.member].account
            account.contributed, account.tokens = attempt.round, account.tokens + ready.weight
            self._leases.commit(participant.member, ready.used)
            received = [norms[i] for norms in reports if not self._is_bad_norm(norms[i])]  # one may be wrong
            self._norms = [*self._norms, median(received) if received else ready.norm][-KEPT_NORMS:]
        self._sync_times = [*self._sync_times, self._now - attempt.started][-KEPT_TIMES:]

    def _record_commit(self, attempt: _Attempt) -> None:
        committed, reached = self._committed, list(attempt.reached.values())
        quorum_at = self._round.quorum_at if self._round.quorum_at is not None else attempt.started
        self._last = {
            "round": committed.round,
            "digest": committed.digest,
            "attempt": committed.attempt,
            "weights": dict(committed.weights),
            "used": {self._members[m].seat: [list(pair) for pair in r.used] for m, r in attempt.contributions.items()},
            "members": {participant.seat: participant.member for participant in attempt.participants},
            "contributors": sorted(committed.weights),
            "listeners": [p.seat for p in attempt.participants if p.member not in attempt.contributions],
            "refused": list(committed.refused),
            "lone": committed.lone,
            "witnesses": len(reached),
            "voids": self._round.voids,
            "round_s": self._now - self._round.started,
            "waited_s": attempt.started - quorum_at,
            "sync_s": self._now - attempt.started,
            "wire_s": max(r.wire_s for r in reached),
            "wire_bytes": sum(r.payload_bytes for r in reached),
            "delta_norm": reached[0].delta_norm,
            "cosine_mean": reached[0].cosine_mean,
            "norms": list(reached[0].norms),
        }
        self._record("committed", **self._last)
        if committed.lone:
            self._fault("lone commit", None, f"round {committed.round} has one contributor, others exist", alarm=True)

    def _commit_message(self) -> Commit:
        committed = self._committed
        return Commit(
            round=committed.round,
            attempt=committed.attempt,
            digest=committed.digest,
            weights=dict(committed.weights),
            refused=committed.refused,
            lone=committed.lone,
            fastest=max((m.tokens_per_s for m in self._live()), default=0.0),
            position=self._leases.position,
        )

    def _tell_commit(self, attempt: _Attempt, member: _Member) -> None:
        member.transfers, member.waited_for = 0, False
        if member.live:
            member.round, member.digest = self._committed.round, self._committed.digest
            self._send(member, self._commit_message())
        if member.gone:
            self._release_if_due(member)

    def _start_round(self) -> None:
        for member in self._members.values():
            member.ready, member.stale = None, set()
            if member.account.benched:
                self._leases.release(member.id)
        self._round = _Round(started=self._now)
        if self._committed.round >= self.rules.num_rounds:
            self._end(Finish(self._committed.round))

    # --- bringing members up to date

    def _find_donors(self) -> None:
        if not self._settled:
            return
        for member in self._live():
            if not self._is_current(member) and member.transfer is None and self._now >= member.donor_at:
                self._name_donor(member)

    def _name_donor(self, member: _Member) -> None:
        """Only who holds the committed state now can be a donor; the one with the fewest transfers is."""
        donors = [m for m in self._live() if self._is_current(m) and self._is_fresh(m) and m.hello.dialable]
        untried = [donor for donor in donors if donor.id not in member.tried]
        if not untried:
            member.tried.clear()
        busy = Counter(other.transfer.donor for other in self._members.values() if other.transfer)
        donor = min(untried or donors, key=lambda donor: (busy[donor.id], donor.seat), default=None)
        if donor is None:
            return
        member.transfer = _Transfer(donor.id, self._committed.round)
        ticket, hello = self._ticket(member), donor.hello
        self._send(donor, Serve(ticket, member.id))
        where = (hello.address, hello.port, ticket, hello.fingerprint)
        self._send(member, Donor(donor.id, *where, round=self._committed.round))

    def _ticket(self, member: _Member) -> str:
        self._tickets += 1
        said = f"{self.boot}:{member.id}:{self._tickets}".encode()
        return hmac.digest(self._secret, said, "sha256").hex()[:32]

    # --- the whole

    def _advance(self) -> None:
        """Whatever has become possible or due."""
        if self._finish is not None:
            return
        self._settle_if_due()
        self._watch_attempt()
        self._find_donors()  # first, so that a round may wait for a transfer that it would outrun
        self._close_round()
        self._find_donors()
        self._watch_numbers()

    def _watch_numbers(self) -> None:
        if not self._settled or self._finish:
            return
        if len(self._live()) >= self.rules.min_replicas:
            self._below_since = None
        elif self._below_since is None:
            self._below_since = self._now
        elif self._now >= self._below_since + self.rules.deadline_s:
            why = f"fewer than min_replicas={self.rules.min_replicas} islands for {self.rules.deadline_s:g} s"
            self._end(Finish(self._committed.round, exit_code=5, why=why))

    def _end(self, finish: Finish) -> None:
        if self._attempt:
            self._void("the run is over")
        self._find_donors()  # whoever is behind still gets the last state
        self._finish = finish
        self._record("finished", round=finish.round, exit_code=finish.exit_code, why=finish.why)
        for member in self._live():
            self._send(member, finish)

    def _deadlines(self) -> Iterator[float]:
        rules, this = self.rules, self._round
        for member in self._members.values():
            if member.release_at is not None and not self._is_contributing(member):
                yield member.release_at
            elif not member.gone:
                yield (member.seen if member.connected else member.away_since) + rules.lost_after_s
                if member.live and self._settled and member.donor_at > self._now:
                    yield member.donor_at
        if not self._settled and self._settle_at is not None and self._settle_at > self._now:
            yield self._settle_at
        if self._attempt:
            deadline = self._attempt.deadline()
            yield from [] if deadline is None else [deadline]
        else:
            waits = [this.retry_at]
            if this.quorum_at is not None:
                waits += [this.grace_until, this.quorum_at + rules.deadline_s, self._awaited_until or 0.0]
            yield from (wait for wait in waits if wait > self._now)
        for due in (self._orphans_at, self._roll_call_at):
            if due is not None and due < math.inf:
                yield due
        if self._below_since is not None:
            yield self._below_since + rules.deadline_s

    # --- for people

    def _member_status(self, member: _Member, now: float) -> dict[str, Any]:
        return {
            "seat": member.seat,
            "member": member.id,
            "name": member.hello.name,
            "state": self._state_of(member),
            "connected": member.connected,
            "round": member.round,
            "seen_s_ago": max(0.0, now - member.seen),
            "tokens_per_s": member.tokens_per_s,
            "step": member.step,
            "tokens": member.account.tokens,
            "strikes": member.account.strikes,
            "transfers": member.transfers,
        }

    def _state_of(self, member: _Member) -> str:
        if member.gone:
            return member.gone
        if self._attempt and member.id in self._attempt.members:
            return "averaging"
        if member.account.benched:
            return "benched"
        if not self._is_current(member):
            return "syncing"
        return "ready" if member.ready else "training"

    def _waiting_for(self) -> list[str]:
        """Names of those without whom nothing goes on, and words where it is not a member that is missing."""
        if not self._settled:
            missing = self.rules.replicas - len(self._live())
            return [f"{missing} more islands" if missing > 0 else "what the islands hold"]
        if self._attempt:
            return [self._members[member].hello.name for member in self._attempt.waits_for()]
        current = [m for m in self._members.values() if not m.gone and self._is_current(m) and not m.account.benched]
        waits = [member.hello.name for member in current if not member.ready]
        return waits if current else ["an island that holds the committed state"]

    def _standing_alarms(self) -> list[dict[str, Any]]:
        """An alarm for as long as it is true: members are here, and none of them can go on."""
        live = self._live()
        current = [member for member in live if self._is_current(member)]
        if not self._settled or not live or any(not member.account.benched for member in current):
            return []
        if current:
            detail = "every island that holds the committed state is benched. Bring another one, or mend these."
            return [{"what": "all are benched", "round": self._committed.round, "detail": detail, "alarm": True}]
        detail = (
            f"no island here holds committed round {self._committed.round}. Bring one back that does, or start the "
            "coordinator with an empty log to go on from the newest state that the islands hold."
        )
        return [{"what": "nobody holds the state", "round": self._committed.round, "detail": detail, "alarm": True}]


def _holds_state(member: _Member) -> bool:
    """Whether it holds committed state: round 0 is that of a founder, or was taken from one."""
    return member.round >= 0 and bool(member.digest)


def _claimed_position(hello: Hello) -> int:
    return min(LARGEST, max([hello.position, *(stop for _, stop in (*hello.leased, *hello.in_flight))]))


def _same_work(one: Ready, other: Ready) -> bool:
    return (one.round, one.base, one.weight, one.used) == (other.round, other.base, other.weight, other.used)


def _participant(member: _Member, ready: Ready | None) -> Participant:
    return Participant(member.id, member.seat, ready.weight if ready else 0.0, member.hello.address)


def _without_pairs(members: list[_Member], cut: set[frozenset[str]]) -> list[_Member]:
    """Drop the member with the most cut pairs, the newest seat among equals, until no pair is left."""
    kept = list(members)
    while True:
        ids = {member.id for member in kept}
        counts = Counter(member for pair in cut if pair <= ids for member in pair)
        if not counts:
            return kept
        worst = max(kept, key=lambda member: (counts[member.id], member.seat))
        kept.remove(worst)
