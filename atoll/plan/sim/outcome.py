"""What came of a simulation, as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from atoll.plan.sim.scenario import Scenario
from atoll.plan.sim.tracks import COMPUTE, LAND, PRESENT, WAIT, Span


class Commit(NamedTuple):
    """A round of the protocol was committed. tokens: of a whole model, so that fragments count in parts."""

    time_s: float
    contributors: int
    participants: int
    tokens: float


class Happening(NamedTuple):
    """Something out of the ordinary. site: -1 where no island is meant."""

    time_s: float
    what: str
    site: int
    why: str = ""


@dataclass
class Outcome:
    """One simulation. model: `messages` or `rounds`, see `atoll.plan.simulate`.

    tokens_owed: trained on by islands that are there, and in no committed round at the end. seconds: by what training
    did, over all islands. payload_bytes: by site, what finished averagings sent. link_bytes: by site, everything that
    left it. state_bytes: sent to joiners.
    """

    scenario: Scenario
    model: str
    simulated_s: float = 0.0
    ended: str = ""
    tokens_trained: float = 0.0
    tokens_owed: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    payload_bytes: list[float] = field(default_factory=list, repr=False)
    link_bytes: list[float] = field(default_factory=list, repr=False)
    state_bytes: float = 0.0
    commits: list[Commit] = field(default_factory=list, repr=False)
    happened: list[Happening] = field(default_factory=list, repr=False)
    spans: list[Span] = field(default_factory=list, repr=False)

    @property
    def rounds(self) -> float:
        """Committed, all fragments once; whole where there is one fragment."""
        count = len(self.commits) / self.scenario.schedule.num_fragments
        return int(count) if count == int(count) else count

    @property
    def tokens_committed(self) -> float:
        return sum(commit.tokens for commit in self.commits)

    @property
    def tokens_lost(self) -> float:
        """Trained on by islands that went before that was in a committed round."""
        return max(0.0, self.tokens_trained - self.tokens_committed - self.tokens_owed)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_committed / self.simulated_s if self.simulated_s else 0.0

    @property
    def utilisation(self) -> float:
        """Share of their time that islands which are there compute."""
        present = sum(self.seconds.get(kind, 0.0) for kind in PRESENT)
        return self.seconds.get(COMPUTE, 0.0) / present if present else 0.0

    @property
    def exposed_s(self) -> float:
        """Seconds of a round in which an island stood still for it, on average."""
        count = sum(commit.participants for commit in self.commits) / self.scenario.schedule.num_fragments
        return (self.seconds.get(WAIT, 0.0) + self.seconds.get(LAND, 0.0)) / count if count else 0.0

    @property
    def round_s(self) -> float:
        """From one committed round to the next, on average, the first left out."""
        fragments = self.scenario.schedule.num_fragments
        if len(self.commits) <= fragments:
            return self.simulated_s
        first, last = self.commits[fragments - 1], self.commits[-1]
        return (last.time_s - first.time_s) / (len(self.commits) - fragments) * fragments

    @property
    def steady_round_s(self) -> float:
        """The same of the second half: where rounds are alike, the time of one in the steady state."""
        fragments = self.scenario.schedule.num_fragments
        rounds = len(self.commits) // fragments // 2
        if not rounds:
            return self.round_s
        last = len(self.commits) - 1
        return (self.commits[last].time_s - self.commits[last - rounds * fragments].time_s) / rounds

    @property
    def bytes_per_island(self) -> float:
        """Payload that an island of the start sent, on average."""
        return sum(self.payload_bytes) / self.scenario.num_islands

    def counts(self) -> Counter[str]:
        """How often what happened."""
        return Counter(happening.what for happening in self.happened)

    def window(self, start_s: float, end_s: float) -> list[Span]:
        """What is known of that time, cut at its ends."""
        return [
            span._replace(start_s=max(span.start_s, start_s), end_s=min(span.end_s, end_s))
            for span in self.spans
            if span.end_s > start_s and span.start_s < end_s
        ]


def rate_over_time(commits: Sequence[Commit], simulated_s: float, bins: int) -> list[float]:
    """Committed tokens a second in equal parts of the time."""
    tokens = [0.0] * bins
    for commit in commits:
        tokens[min(bins - 1, int(commit.time_s / simulated_s * bins))] += commit.tokens
    return [count / (simulated_s / bins) for count in tokens]


def as_plain(value: Any) -> Any:
    """Floats without the dust of sums, for JSON."""
    return float(f"{value:.9g}") if isinstance(value, float) else value
