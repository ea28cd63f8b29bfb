"""What members and the coordinator say to each other.

A *member* is one island in one life: an island that crashed and came back is another member. Every message is a frozen
dataclass; on the wire it is one JSON object whose `kind` is the class name, and what does not fit its types is refused
(`elastic.wire`). Rounds count from 1; "round r is committed" means that its outer step is agreed and will never be
undone; round 0 is the start. An *attempt* is one try to average one round; its number is never used again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Range = tuple[int, int]  # samples [start, stop) of the one global order


# --- from a member


@dataclass(frozen=True)
class Hello:
    """The first message of a connection, also after the connection was lost or the coordinator came back.

    member: 16 random hex digits that the member made up once. name: for people. settings_digest: of the settings that
    matter. address, port: where its workers can be reached by other members, and its donor service. round, digest: the
    committed state it holds; -1 and "" for none. founder: it may start a new run from its seed (round 0). seat: the
    number of the replica it would like to be, -1 for any. leased: ranges it holds and has not contributed yet.
    in_flight: ranges of the contribution to round `in_flight_round` that it gave to an averaging whose outcome it was
    not told (0: none). attempt: the highest number of an attempt, and position: of a sample, that it has heard of, for
    a coordinator that lost its log. books: what the last settled `Welcome` said. fingerprint: of the key of its donor
    service. dialable: others can open connections to it; the coordinator sets it, whatever the member says.
    """

    member: str
    name: str
    version: str
    settings_digest: str
    address: str
    port: int
    pid: int
    num_workers: int
    round: int
    digest: str
    founder: bool = False
    seat: int = -1
    leased: tuple[Range, ...] = ()
    in_flight: tuple[Range, ...] = ()
    in_flight_round: int = 0
    attempt: int = 0
    position: int = 0
    books: str = ""
    fingerprint: str = ""
    dialable: bool = True


@dataclass(frozen=True)
class Ready:
    """This member has done its inner steps for `round` and holds the committed state before it.

    base: digest of the anchor as it is in memory now. weight: tokens trained on. norm: of the pseudo-gradient.
    finite: it holds no NaN or infinity. steps: inner steps it took. used: ranges of samples that went into it.
    sync_s: seconds it expects the averaging to take (0: unknown). inner_s: seconds its inner steps took. loss: their
    mean training loss, nats a token; None where it is not known.
    """

    round: int
    base: str
    weight: float
    norm: float
    finite: bool
    steps: int
    used: tuple[Range, ...] = ()
    sync_s: float = 0.0
    inner_s: float = 0.0
    loss: float | None = None


@dataclass(frozen=True)
class Reached:
    """The averaging of an attempt is done here. digest: of the anchor it leads to, which has not been adopted yet.

    base: digest of the anchor it started from, as it is in memory; "" where it was not looked at.
    norms: of every participant's contribution as it was received, in the order of the attempt; empty where unknown.
    payload_bytes: that this member sent for parameters. wire_s: seconds the averaging took; of these meet_s until all
    were connected, send_s waiting for the network, outer_s for the outer step; the rest is encoding and arithmetic.
    step_bytes: that one step of data parallelism in fp32 would have sent from here.
    """

    round: int
    attempt: int
    digest: str
    base: str = ""
    norms: tuple[float, ...] = ()
    payload_bytes: int = 0
    wire_s: float = 0.0
    delta_norm: float = 0.0
    cosine_mean: float | None = None
    meet_s: float = 0.0
    send_s: float = 0.0
    outer_s: float = 0.0
    step_bytes: int = 0


@dataclass(frozen=True)
class Failed:
    """The averaging of an attempt failed here, or this member has no result of an attempt that was committed.

    unreachable: members that it could not reach, where it knows.
    """

    round: int
    attempt: int
    why: str
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Have:
    """The state this member holds now: it took it from a donor, or applied a commit.

    Also said with what it held before when a donor could not be used; then it is told another.
    """

    round: int
    digest: str


@dataclass(frozen=True)
class Want:
    """This member would like to train on `samples` more samples."""

    samples: int


@dataclass(frozen=True)
class Beat:
    """This member is alive. step: the inner steps of its current round done so far. tokens_per_s: its speed.

    loss: of its last inner steps, smoothed, nats a token.
    """

    step: int = 0
    tokens_per_s: float = 0.0
    loss: float | None = None


@dataclass(frozen=True)
class Evaluated:
    """This member's share of an evaluation of the anchor of `round`: part `part` of `parts` of the held-out text.

    loss_sum: nats, summed over `tokens` predicted tokens.
    """

    round: int
    part: int
    parts: int
    loss_sum: float
    tokens: int


@dataclass(frozen=True)
class Leave:
    """This member goes, in good order: what it leased and did not contribute is free again."""

    why: str = ""


# --- from the coordinator


@dataclass(frozen=True)
class Welcome:
    """The member is in. boot: changes whenever the coordinator starts anew; attempts of an older boot are void.

    seat: the number of its replica, stable over its life. round, digest: what is committed (0 and "" before the first
    member says what round 0 is). current: the member holds that state; otherwise a `Donor` follows when there is one.
    leased: what it may keep of the samples it said it holds. contributed: the last committed round that holds a
    contribution of this member, or may hold one. settled: false while a coordinator that has no log asks its members
    what is committed; nothing is decided by this Welcome then, and another follows. After each, a member that is ready
    says `Ready` again. books: a name of the books on samples, which changes when they are lost.
    """

    boot: str
    seat: int
    round: int
    digest: str
    current: bool
    num_rounds: int
    beat_s: float
    leased: tuple[Range, ...] = ()
    contributed: int = -1
    position: int = 0
    settled: bool = True
    books: str = ""


@dataclass(frozen=True)
class Refused:
    """The member may not take part. exit_code: that its process should end with."""

    why: str
    exit_code: int


@dataclass(frozen=True)
class Participant:
    """One member of an attempt. weight: 0 for one that listens: it takes part in the averaging and does not count."""

    member: str
    seat: int
    weight: float
    address: str


@dataclass(frozen=True)
class Go:
    """Average `round` now, with these, in this order. The first of them holds the rendezvous of the attempt's group."""

    round: int
    attempt: int
    participants: tuple[Participant, ...]


@dataclass(frozen=True)
class Meet:
    """Where the processes of an attempt meet. From its first participant to the coordinator, and on to the others."""

    attempt: int
    address: str
    port: int


@dataclass(frozen=True)
class Commit:
    """Round `round` is committed: all participants of `attempt` adopt what they reached.

    weights, refused: by seat. lone: one island alone made it while others exist. fastest: tokens a second of the
    fastest live member (0: unknown). position: the first sample that was never leased. Said again to a participant that
    was away when it was said first.
    """

    round: int
    attempt: int
    digest: str
    weights: dict[int, float] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    lone: bool = False
    fastest: float = 0.0
    position: int = 0


@dataclass(frozen=True)
class Void:
    """Attempt `attempt` came to nothing: what was averaged is thrown away and nothing has moved."""

    attempt: int
    why: str


@dataclass(frozen=True)
class Rejected:
    """The member's contribution to `round` is not let in; it may take part with weight 0, or say `Ready` anew.

    benched: its contributions are not asked for any more. drop: its inner steps since the anchor can never be let in;
    it starts again from the anchor.
    """

    round: int
    why: str
    benched: bool = False
    drop: bool = False


@dataclass(frozen=True)
class Donor:
    """Fetch the committed state from this member: https://address:port with the ticket. fingerprint: of its key."""

    member: str
    address: str
    port: int
    ticket: str
    fingerprint: str
    round: int


@dataclass(frozen=True)
class Serve:
    """To a donor: whoever shows this ticket may fetch the committed state."""

    ticket: str
    member: str


@dataclass(frozen=True)
class Lease:
    """These samples are the member's to train on, and nobody else's. position: the first that was never leased."""

    ranges: tuple[Range, ...]
    position: int = 0


@dataclass(frozen=True)
class Finish:
    """The run is over after the committed round `round`. exit_code: 0, or why it ended before its time."""

    round: int
    exit_code: int = 0
    why: str = ""


FromMember = Hello | Ready | Reached | Failed | Have | Want | Beat | Evaluated | Leave | Meet
FromCoordinator = Welcome | Refused | Go | Meet | Commit | Void | Rejected | Donor | Serve | Lease | Finish
