"""One attempt to average a round, as bytes on the fabric.

    all have met   ballots   encode   to the owners of slices   what they averaged, to all   done, each for itself
                   ├───────┤├───────┤├──────── phase 1 ───────┤├──────── phase 2 ─────────┤

Two islands swap whole buckets and codes that cannot be summed go to everyone: one phase. Low rank averages two factors
one after the other: four. An island begins a phase when it has received everything of the one before; so a slow link
holds up those who wait for it and nobody else.

A participant that dies is noticed by the others after `NOTICE_S`, and nobody finishes. One that is frozen is not
noticed: its flows stand still, and the rest is for the protocol to decide.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from atoll.elastic.messages import Go
from atoll.plan.estimate import BALLOT_MESSAGES
from atoll.plan.sim.clock import Clock
from atoll.plan.sim.fabric import Fabric
from atoll.plan.sim.links import Sites
from atoll.plan.sim.scenario import Scenario
from atoll.plan.sim.tracks import ENCODE, SEND, WIRE, Tracks

if TYPE_CHECKING:
    from atoll.plan.sim.island import Island

NOTICE_S = 0.1  # until an island notices that a peer's process died


class _Phase:
    """One phase of an averaging: who still waits for what."""

    def __init__(self, averaging: Averaging, number: int, count: int) -> None:
        self.averaging = averaging
        self.number = number
        self.missing = np.full(count, count - 1)  # flows that each place still receives

    def arrived(self, sources: Sites, targets: Sites) -> None:
        self.averaging.received(self, sources, targets)


class Averaging:
    """The data plane of one attempt. Places are those of `go.participants`."""

    def __init__(
        self, go: Go, fragment: int, *, scenario: Scenario, clock: Clock, fabric: Fabric, tracks: Tracks
    ) -> None:
        self.go = go
        self.fragment = fragment
        self.over = False
        self._scenario = scenario
        self._clock = clock
        self._fabric = fabric
        self._tracks = tracks
        self._joined: dict[str, Island] = {}
        self._sites: Sites = np.zeros(0, dtype=np.int64)
        self._place = np.zeros(0, dtype=np.int64)  # by site
        self._phases: list[_Phase] = []
        self._unsent = np.zeros(0, dtype=np.int64)  # flows of each place that are under way or still to come
        self._latency_s = 0.0
        self._sending_since = 0.0

    @property
    def count(self) -> int:
        return len(self.go.participants)

    @property
    def sent_bytes(self) -> int:
        """By each participant, once it is done."""
        return self._scenario.costs.payloads(self.count)[self.fragment].sent_bytes

    def join(self, island: Island) -> None:
        """`island` is there. When all are, it begins."""
        if self.over:
            return
        self._joined[island.id] = island
        if len(self._joined) == self.count:
            self._meet()

    def end(self) -> None:
        """Nothing of it goes on."""
        self.over = True
        for phase in self._phases:
            self._fabric.drop(phase)
        for island in self._joined.values():
            self._tracks.begin(island.site, "", self._clock.now, lane=WIRE)

    def lose(self, culprit: Island) -> None:
        """The process of `culprit` is gone: the others notice, each for itself."""
        if self.over:
            return
        self.end()
        for other in self._joined.values():
            if other is not culprit:
                other.later(NOTICE_S, partial(other.fail, self.go, "a peer is gone"))

    # --- inside

    def _meet(self) -> None:
        order = [self._joined[participant.member] for participant in self.go.participants]
        self._sites = np.array([island.site for island in order], dtype=np.int64)
        self._place = np.zeros(self._fabric.links.num_sites, dtype=np.int64)
        self._place[self._sites] = np.arange(self.count)
        self._latency_s = self._fabric.links.longest_latency_s(self._sites)
        if self.count == 1:
            self._clock.after(0.0, self._unless_over(lambda: self._finish(0)))
            return
        ballots_s = self._scenario.meeting_s + BALLOT_MESSAGES * self._latency_s
        self._clock.after(ballots_s, self._unless_over(self._encode))

    def _encode(self) -> None:
        self._show(ENCODE)
        encode_s = self._scenario.costs.encode_s(self.count, self.fragment)
        self._clock.after(encode_s, self._unless_over(self._send))

    def _send(self) -> None:
        self._show(SEND)
        self._sending_since = self._clock.now
        number = self._scenario.costs.phases(self.count)
        self._phases = [_Phase(self, phase, self.count) for phase in range(number)]
        self._unsent = np.full(self.count, number * (self.count - 1))
        self._begin_phase(0, np.arange(self.count))

    def _begin_phase(self, number: int, places: Sites) -> None:
        """Those at `places` send their part of it to all others."""
        if number == len(self._phases):
            for place in places:
                self._finish_in_time(int(place))
            return
        sources = np.repeat(places, self.count - 1)
        others = np.arange(self.count - 1)[None, :] + (np.arange(self.count - 1)[None, :] >= places[:, None])
        each = self.sent_bytes / len(self._phases) / (self.count - 1)
        self._fabric.send(self._phases[number], self._sites[sources], self._sites[others.ravel()], each)

    def received(self, phase: _Phase, sources: Sites, targets: Sites) -> None:
        """Flows of `phase` have come to their end; whoever has all of it goes on, a latency later."""
        from_places, to_places = self._place[sources], self._place[targets]
        self._unsent -= np.bincount(from_places, minlength=self.count)
        phase.missing -= np.bincount(to_places, minlength=self.count)
        complete = np.unique(to_places[phase.missing[to_places] == 0])
        last = phase.number == len(self._phases) - 1
        if last:
            touched = np.unique(np.concatenate([to_places, from_places]))
            complete = touched[(phase.missing[touched] == 0) & (self._unsent[touched] == 0)]
        if len(complete):
            after = self._unless_over(lambda: self._begin_phase(phase.number + 1, complete))
            self._clock.after(self._latency_s, after)

    def _finish_in_time(self, place: int) -> None:
        """Many small messages take longer than their bytes."""
        least_s = self._scenario.costs.least_sending_s(self.count, self.fragment, self._latency_s)
        earliest = self._sending_since + least_s + len(self._phases) * self._latency_s
        self._clock.at(earliest, self._unless_over(lambda: self._finish(place)))

    def _finish(self, place: int) -> None:
        island = self._joined[self.go.participants[place].member]
        self._tracks.begin(island.site, "", self._clock.now, lane=WIRE)
        island.when_running(lambda: island.finish_average(self))

    def _show(self, kind: str) -> None:
        for island in self._joined.values():
            self._tracks.begin(island.site, kind, self._clock.now, lane=WIRE)

    def _unless_over(self, act: Callable[[], None]) -> Callable[[], None]:
        return lambda: None if self.over else act()
