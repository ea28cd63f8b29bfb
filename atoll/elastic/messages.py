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


@dataclass(frozen=True)
class Ready:
    """This member has done its inner steps for `round` and holds the committed state before it.

    base: digest of the anchor as it is in memory now. weight: tokens trained on. norm: of the pseudo-gradient.
    finite: it holds no NaN or infinity. steps: inner steps it took. used: ranges of samples that went into it.
    sync_s: seconds it expects the averaging to take (0: unknown).
    """

    round: int
    base: str
    weight: float
    norm: float
    finite: bool
    steps: int
    used: tuple[Range, ...] = ()
    sync_s: float = 0.0


@dataclass(frozen=True)
class Reached:
    """The averaging of an attempt is done here. digest: of the anchor it leads to, which has not been adopted yet.

    norms: of every participant's contribution as it was received, in the order of the attempt; empty where unknown.
    payload_bytes: that this member sent for parameters. wire_s: seconds the averaging took.
    """

    round: int
    attempt: int
    digest: str
    norms: tuple[float, ...] = ()
    payload_bytes: int = 0
    wire_s: float = 0.0
    delta_norm: float = 0.0
    cosine_mean: float | None = None


@dataclass(frozen=True)
class Failed:
    """The averaging of an attempt failed here."""

    round: int
    attempt: int
    why: str


@dataclass(frozen=True)
class Have:
    """This member now holds the committed state of `round`: it took it from a donor, or applied a commit."""

    round: int
    digest: str


@dataclass(frozen=True)
class Want:
    """This member would like to train on `samples` more samples."""

    samples: int


@dataclass(frozen=True)
class Beat:
    """This member is alive. step: the inner steps of its current round done so far. tokens_per_s: its speed."""

    step: int = 0
    tokens_per_s: float = 0.0


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
    """

    boot: str
    seat: int
    round: int
    digest: str
    current: bool
    num_rounds: int
    beat_s: float


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

    weights, refused: by seat. lone: one island alone made it while others exist.
    """

    round: int
    attempt: int
    digest: str
    weights: dict[int, float] = field(default_factory=dict)
    refused: tuple[int, ...] = ()
    lone: bool = False


@dataclass(frozen=True)
class Void:
    """Attempt `attempt` came to nothing: what was averaged is thrown away and nothing has moved."""

    attempt: int
    why: str


@dataclass(frozen=True)
class Rejected:
    """The member's contribution to `round` is not let in. benched: its contributions are not asked for any more."""

    round: int
    why: str
    benched: bool = False


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
    """These samples are the member's to train on, and nobody else's."""

    ranges: tuple[Range, ...]


@dataclass(frozen=True)
class Finish:
    """The run is over after the committed round `round`. exit_code: 0, or why it ended before its time."""

    round: int
    exit_code: int = 0
    why: str = ""


FromMember = Hello | Ready | Reached | Failed | Have | Want | Beat | Leave | Meet
FromCoordinator = Welcome | Refused | Go | Meet | Commit | Void | Rejected | Donor | Serve | Lease | Finish
