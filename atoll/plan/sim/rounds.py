"""A whole run in rounds: the same history as `world`, with one array over all islands in place of messages.

All islands follow one script, so what happens is a sequence of items; each island has a clock of its own:

    compute   every clock moves on by what its steps take
    launch    clocks say who is ready when; the round closes by the protocol's rules; one attempt takes what the closed
              form says; whoever dies or freezes in it makes it void; then it is committed
    land      clocks move on to the commit

What is left out: two uses of one link at a time (a state that is fetched does not slow an averaging down, nor the other
way round), members that are disconnected and not lost yet in the quorum, and whom the coordinator's messages cross.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray

from atoll.elastic.membership import (
    FRESH_BEATS,
    GRACE_SHARE,
    KEPT_TIMES,
    LEAST_GRACE_S,
    LEAST_PATIENCE_S,
    PATIENT_TRANSFERS,
)
from atoll.plan.sim import faults as f
from atoll.plan.sim import tracks as kinds
from atoll.plan.sim.averaging import NOTICE_S
from atoll.plan.sim.links import Floats
from atoll.plan.sim.outcome import Commit, Happening, Outcome
from atoll.plan.sim.scenario import Scenario
from atoll.plan.sim.script import Compute, Land, Launch, Script
from atoll.plan.sim.tracks import WIRE, Tracks

COORDINATOR = 0
DRAWN_SITES, MOST_DRAWN = 16, 200  # that have a time line from the start, and with those that something happens to
ROUNDING = 1e-9

Mask = NDArray[np.bool_]


@dataclass
class _Joiner:
    """A site that fetches the committed state. round: of what it fetches. transfers: that came too late."""

    site: int
    round: int
    arrives_s: float
    transfers: int = 0
    waited_for: bool = False


@dataclass
class _Flight:
    """A committed round that some have not landed yet. mask: who contributed."""

    committed_s: float
    mask: Mask


class Rounds:
    """One history of a scenario. drawn: its faults."""

    def __init__(self, scenario: Scenario, drawn: list[f.Fault]) -> None:
        sites = max([scenario.num_islands - 1, *(fault.site for fault in drawn)]) + 1
        self.scenario = scenario
        self.script = Script(scenario.schedule)
        self.links = scenario.links(sites - scenario.num_islands)
        self.tracks = Tracks()
        self.round, self.committed_s = 0, 0.0
        self.over = False
        self._outcome = Outcome(scenario, "rounds")
        self._rng = np.random.default_rng((scenario.seed, 1))
        self._landing_s = scenario.workload.landing_s / scenario.schedule.num_fragments
        self._to_coordinator = np.array([self.links.latency_s(site, COORDINATOR) for site in range(sites)])
        self._alive = np.arange(sites) < scenario.num_islands
        self._current = self._alive.copy()  # holds what is committed and is in
        self._frozen_at = np.full(sites, math.inf)  # since when it stands still
        self._now = np.zeros(sites)  # the clock of each training
        self._offered = np.zeros(sites, dtype=bool)  # has progress that missed a round
        self._step_s = np.array([scenario.step_s(site) for site in range(sites)])
        self._unsent = np.zeros((self.script.num_fragments, sites))
        self._rate, self._fastest = np.zeros(sites), 0.0
        self._target = np.full(sites, self.script.inner_steps)  # steps a round
        self._steps, self._inner_s = np.zeros(sites), np.zeros(sites)  # of the current one
        self._down_since = np.full(sites, math.inf)
        self._flights: dict[int, _Flight] = {}
        self._joiners: dict[int, _Joiner] = {}
        self._held = np.zeros(sites, dtype=np.int64)  # the round that one which is away holds
        self._drawn = np.arange(sites) < DRAWN_SITES  # have a time line
        self._since = np.zeros(sites)  # when each began what it did last
        self._payload_bytes = np.zeros(sites)
        self._lost_bytes = np.zeros(sites)  # of attempts that came to nothing
        self._quorum_s = 0.0
        self._round_times: list[float] = []
        self._sync_times: list[float] = []
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._seconds = dict.fromkeys((*kinds.PRESENT, kinds.DOWN), 0.0)
        for fault in drawn:
            self._at(fault.time_s, partial(self._strike, fault))

    def run(self, watch: Callable[[float], None] | None = None) -> Outcome:
        """Let it happen."""
        place = 0
        while not self.over:
            item = self.script[place]
            if isinstance(item, Compute):
                self._compute(item)
            elif isinstance(item, Launch):
                self._launch(item)
                if watch is not None and item.round % 64 == 0:
                    watch(self.committed_s)
            else:
                self._land(item)
            place += 1
        return self._conclude()

    # --- training

    def _compute(self, item: Compute) -> None:
        """Everybody who has nothing left over from the last round takes steps."""
        self._train(np.flatnonzero(self._alive & self._current & ~self._offered), item)

    def _train(self, sites: NDArray[np.int64], item: Compute) -> None:
        scenario = self.scenario
        taken = item.scaled(self._target[sites], self.script.inner_steps).astype(float)
        seconds = taken * self._step_s[sites]
        if scenario.speeds.jitter:
            spread = scenario.speeds.jitter**2
            seconds = self._rng.gamma(taken / spread, self._step_s[sites] * spread)
        self._spend(sites, kinds.COMPUTE, self._now[sites] + seconds)
        tokens = taken * scenario.tokens_a_step
        self._unsent[:, sites] += tokens
        self._outcome.tokens_trained += float(tokens.sum())
        self._steps[sites] += taken
        self._inner_s[sites] += seconds

    def _end_round(self) -> None:
        """DyLU: the next round has as many steps as each takes while the fastest takes all of them."""
        done = (self._inner_s > 0) & self._alive & self._current & ~self._offered
        self._rate[done] = self._steps[done] * self.scenario.tokens_a_step / self._inner_s[done]
        self._steps[done] = self._inner_s[done] = 0.0
        if self.scenario.patience.adapt and self._fastest:
            steps = self.script.inner_steps
            share = np.minimum(1.0, self._rate[done] / self._fastest)
            self._target[done] = np.maximum(1, np.floor(steps * share + ROUNDING * steps)).astype(np.int64)

    def _spend(self, sites: NDArray[np.int64], kind: str, until: Floats) -> None:
        """Clocks of `sites` move on, never back, doing `kind`."""
        since = self._now[sites]
        until = np.maximum(since, until)
        end_s = self.scenario.duration_s
        self._seconds[kind] += float((np.minimum(until, end_s) - np.minimum(since, end_s)).sum())
        self._now[sites] = until
        self._since[sites] = since
        for place in np.flatnonzero(self._drawn[sites]).tolist():
            self.tracks.add(int(sites[place]), kind, float(since[place]), min(float(until[place]), end_s))

    def _land(self, item: Land) -> None:
        flight = self._flights.pop(item.round, None)
        if flight is None:
            return
        sites = np.flatnonzero(flight.mask & self._alive & self._current)
        self._spend(sites, kinds.WAIT, flight.committed_s + self._to_coordinator[sites])
        if self._landing_s:
            self._spend(sites, kinds.LAND, self._now[sites] + self._landing_s)

    # --- a round

    def _launch(self, item: Launch) -> None:
        """The round closes, is averaged and committed, with whatever happens meanwhile."""
        if item.fragment == self.script.num_fragments - 1:
            self._end_round()
        not_before = self.committed_s
        while True:
            start_s = self._close(not_before)
            if start_s is None or self._past_end(start_s):
                self._end_early()
                return
            taking_part, contributing = self._participants(start_s)
            ended_s, broken = self._attempt(item, start_s, taking_part)
            if not broken:
                break
            not_before = ended_s
        if self._past_end(ended_s):
            self._end_early()
            return
        self._commit(
            item, start_s=start_s, now=ended_s, taking_part=taking_part, contributing=contributing & self._alive
        )

    def _close(self, not_before: float) -> float | None:
        """When an attempt begins: all are ready, or a quorum is and grace is over. None: nobody is left."""
        while True:
            start_s = self._closing(not_before)
            next_s = self._events[0][0] if self._events else math.inf
            if next_s > min(start_s, self.scenario.duration_s):
                return start_s if math.isfinite(start_s) else None
            self._happen()
            not_before = max(not_before, next_s)

    def _closing(self, not_before: float) -> float:
        asked = np.flatnonzero(self._alive & self._current)
        if not len(asked):
            return math.inf
        heard = self._arrivals()[asked]
        start_s = self._when_closed(heard, not_before)
        if (start_s > self._fresh_until()[asked]).any():  # frozen for long: not ready, whatever it said before
            heard[np.isfinite(self._frozen_at[asked])] = math.inf
            start_s = self._when_closed(heard, not_before)
        return start_s

    def _arrivals(self) -> Floats:
        """When the coordinator hears that each is ready; never, while one is frozen that had not said so before."""
        latency_s = self._to_coordinator
        heard = np.maximum(self._now, self.committed_s + latency_s) + latency_s
        return np.where(self._now > self._frozen_at, math.inf, heard)

    def _fresh_until(self) -> Floats:
        """Until when each is asked to take part: for ever, but for those that are frozen."""
        return self._frozen_at + FRESH_BEATS * self.scenario.patience.beat_s

    def _when_closed(self, heard: Floats, not_before: float) -> float:
        quorum = max(1, math.ceil(self.scenario.patience.quorum * len(heard) - ROUNDING))
        quorum_s = float(np.partition(heard, quorum - 1)[quorum - 1])
        deadline_s = self.scenario.patience.deadline_s
        times = [*self._round_times, quorum_s - self.committed_s][-KEPT_TIMES:]
        grace_s = min(deadline_s, max(LEAST_GRACE_S, GRACE_SHARE * median(times)))
        start_s = min(float(heard.max()), quorum_s + grace_s)
        self._quorum_s = quorum_s
        for joiner in self._joiners.values():
            if joiner.transfers >= PATIENT_TRANSFERS and not joiner.waited_for:
                start_s = max(start_s, min(joiner.arrives_s, quorum_s + deadline_s))
        return max(start_s, not_before)

    def _participants(self, start_s: float) -> tuple[Mask, Mask]:
        """Who takes part, and who of them has something to give."""
        taking_part = self._alive & self._current & (start_s <= self._fresh_until())
        for joiner in self._joiners.values():
            joiner.waited_for |= joiner.transfers >= PATIENT_TRANSFERS
        return taking_part, taking_part & (self._arrivals() <= start_s + ROUNDING)

    def _attempt(self, item: Launch, start_s: float, taking_part: Mask) -> tuple[float, bool]:
        """When the coordinator knows how it ended, and whether that was void."""
        sites = np.flatnonzero(taking_part)
        go_s = float(self._to_coordinator[sites].max())
        encode_s = self.scenario.costs.encode_s(len(sites), item.fragment)
        met_s = start_s + go_s + (self.scenario.meeting_s if len(sites) > 1 else 0.0)
        ends_s = met_s + self.scenario.costs.attempt_s(self.links, sites, item.fragment)
        stalled = self._stalled_by(taking_part, start_s)
        while stalled is None and self._events and self._events[0][0] < ends_s:
            event_s = self._events[0][0]
            if self._past_end(event_s):
                break
            was_alive, was_frozen = self._alive & taking_part, np.isfinite(self._frozen_at)
            self._happen()
            if (was_alive & ~self._alive).any():
                return self._void(event_s + NOTICE_S + go_s, start_s, ends_s, sites, item), True
            if (taking_part & ~was_frozen & np.isfinite(self._frozen_at)).any():
                stalled = event_s
        if stalled is not None:
            return self._stall(stalled, start_s, ends_s, taking_part, item)
        self._show_wire(sites, met_s, encode_s, ends_s)
        return ends_s + go_s, False

    def _stalled_by(self, taking_part: Mask, start_s: float) -> float | None:
        frozen = taking_part & np.isfinite(self._frozen_at)
        return start_s if frozen.any() else None

    def _stall(
        self, since_s: float, start_s: float, ends_s: float, taking_part: Mask, item: Launch
    ) -> tuple[float, bool]:
        """A participant is frozen: its part stands still until it goes on, or until the others have waited enough."""
        frozen_s = float(self._frozen_at[taking_part & np.isfinite(self._frozen_at)].min())
        expected_s = median(self._sync_times) if self._sync_times else 0.0
        give_up_s = frozen_s + self.scenario.patience.lost_after_s + max(LEAST_PATIENCE_S, 3 * expected_s)
        sites = np.flatnonzero(taking_part)
        while self._events and self._events[0][0] < give_up_s:
            event_s = self._events[0][0]
            was_alive = self._alive & taking_part
            self._happen()
            if (was_alive & ~self._alive).any():
                return self._void(event_s + NOTICE_S, start_s, ends_s, sites, item), True
            if not (taking_part & np.isfinite(self._frozen_at)).any():
                if event_s - frozen_s > self.scenario.patience.lost_after_s:  # it was evicted and starts anew
                    return self._void(event_s + NOTICE_S, start_s, ends_s, sites, item), True
                ends_s = max(ends_s, since_s) + event_s - since_s
                return ends_s + float(self._to_coordinator[sites].max()), False
        return self._void(give_up_s, start_s, ends_s, sites, item), True

    def _void(self, now: float, start_s: float, ends_s: float, sites: NDArray[np.int64], item: Launch) -> float:
        self._happened(now, "void", -1)
        share = min(1.0, max(0.0, (now - start_s) / (ends_s - start_s))) if ends_s > start_s else 0.0
        self._lost_bytes[sites] += share * self.scenario.costs.payloads(len(sites))[item.fragment].sent_bytes
        return now

    def _commit(self, item: Launch, *, start_s: float, now: float, taking_part: Mask, contributing: Mask) -> None:
        sites = np.flatnonzero(taking_part)
        tokens = float(self._unsent[item.fragment, contributing].sum()) / self.script.num_fragments
        self._unsent[item.fragment, contributing] = 0.0
        self._round_times = [*self._round_times, self._quorum_s - self.committed_s][-KEPT_TIMES:]
        self._sync_times = [*self._sync_times, now - start_s][-KEPT_TIMES:]
        if len(sites) > 1:
            self._payload_bytes[sites] += self.scenario.costs.payloads(len(sites))[item.fragment].sent_bytes
        self.round, self.committed_s = item.round, now
        self._fastest = float(self._rate[self._alive & self._current].max(initial=0.0))
        self._flights[item.round] = _Flight(now, contributing)
        late = self._alive & self._current & ~contributing
        missed = late & (self._now > now) if self.script.num_fragments > 1 else late
        self._offered = missed
        self._held[self._alive & taking_part] = item.round
        self._drop_behind(taking_part, now)
        self._outcome.commits.append(Commit(now, int(contributing.sum()), len(sites), tokens))
        self.over |= item.round >= self.scenario.protocol_rounds

    def _drop_behind(self, taking_part: Mask, now: float) -> None:
        """Those who are in and took no part hold the round before: they fetch this one."""
        for site in np.flatnonzero(self._alive & self._current & ~taking_part & ~np.isfinite(self._frozen_at)):
            self._current[site] = False
            self._fetch(int(site), now)

    # --- what happens to islands

    def _at(self, time_s: float, act: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (time_s, self._order, act))

    def _happen(self) -> None:
        time_s, _, act = heapq.heappop(self._events)
        act(time_s)

    def _happened(self, now: float, what: str, site: int, why: str = "") -> None:
        if now <= self.scenario.duration_s:
            self._outcome.happened.append(Happening(now, what, site, why))

    def _strike(self, fault: f.Fault, now: float) -> None:
        if fault.what == f.JOIN:
            return self._join(fault.site, now)
        frozen = np.isfinite(self._frozen_at)
        there = np.flatnonzero(self._alive & (frozen if fault.what == f.GO else ~frozen)).tolist()
        site = fault.pick(there) if there else -1
        if site not in there:
            return self._happened(now, "missed", fault.site, f"nobody to {fault.what}")
        holds = self._current & self._alive & ~frozen
        holds[site] = False
        if fault.what in (f.KILL, f.LEAVE, f.STOP) and not holds.any():
            return self._spare(fault, site, now)
        self._happened(now, fault.what, site)
        self._draw(site, now)
        if fault.what == f.STOP:
            self._freeze(site, now, fault.seconds)
        elif fault.what == f.GO:
            self._thaw(site, now)
        elif fault.what == f.SLOW:
            self._step_s[site] = self.scenario.step_s(site) * fault.factor
        else:
            self._end(site, now)
            if fault.what == f.KILL and math.isfinite(fault.seconds):
                self._at(now + fault.seconds, lambda now: self._join(site, now))

    def _spare(self, fault: f.Fault, site: int, now: float) -> None:
        if fault.site >= 0:
            raise fault.leaves_nobody()
        self._happened(now, "spared", site, f"it would {fault.what}")

    def _end(self, site: int, now: float) -> None:
        """Its process is gone: what it would have computed since is taken back."""
        self._take_back(site, now)
        self._alive[site] = self._current[site] = self._offered[site] = False
        self._frozen_at[site] = math.inf
        self._target[site] = self.script.inner_steps
        self._unsent[:, site] = self._steps[site] = self._inner_s[site] = self._rate[site] = 0.0
        self._joiners.pop(site, None)
        self._down_since[site] = now

    def _take_back(self, site: int, now: float) -> None:
        """Training that lies after `now` does not happen."""
        ahead_s = min(self._now[site], self.scenario.duration_s) - now
        if ahead_s <= 0:
            one = np.array([site])
            self._spend(one, kinds.WAIT if self._current[site] else kinds.FETCH, np.array([now]))
            return
        self._seconds[kinds.COMPUTE] -= ahead_s
        if self._drawn[site]:
            self.tracks.cut(site, now)
        untaken = int(ahead_s / self._step_s[site]) * self.scenario.tokens_a_step
        self._outcome.tokens_trained -= min(untaken, float(self._unsent[:, site].min()))

    def _join(self, site: int, now: float) -> None:
        if self._alive[site]:
            return
        self._happened(now, f.JOIN, site)
        if math.isfinite(self._down_since[site]):
            self._seconds[kinds.DOWN] += now - self._down_since[site]
            self.tracks.add(site, kinds.DOWN, self._down_since[site], now)
        self._alive[site], self._down_since[site], self._now[site] = True, math.inf, now
        self._held[site] = -1
        self._fetch(site, now + 3 * self._to_coordinator[site])

    def _fetch(self, site: int, now: float, transfers: int = 0) -> None:
        """Ask for the state of the newest round; it arrives a transfer later."""
        donors = np.flatnonzero(self._current & self._alive & ~np.isfinite(self._frozen_at))
        waited = self._joiners[site].waited_for if site in self._joiners else False
        if not len(donors):
            self._at(now + 1.0, lambda now: self._fetch(site, now, transfers))
            return
        busy = len(self._joiners) % len(donors)
        took_s = self.links.transfer_s(int(donors[busy]), site, self.scenario.state_bytes)
        self._joiners[site] = _Joiner(site, self.round, now + took_s, transfers, waited)
        joiner = self._joiners[site]
        self._outcome.state_bytes += self.scenario.state_bytes
        self._at(now + took_s, lambda now: self._fetched(joiner, now))

    def _fetched(self, joiner: _Joiner, now: float) -> None:
        site = joiner.site
        if self._joiners.get(site) is not joiner:
            return
        self._spend(np.array([site]), kinds.FETCH, np.array([now]))
        if joiner.round < self.round:  # a round was committed meanwhile
            self._fetch(site, now, joiner.transfers + 1)
            return
        del self._joiners[site]
        self._held[site] = joiner.round
        self._enter(site, now)

    def _enter(self, site: int, now: float) -> None:
        """It holds what is committed: it trains for the next round."""
        self._current[site], self._now[site] = True, max(now, self._now[site])
        if self._unsent[:, site].any():
            self._offered[site] = True
            return
        place = self.script.launch_of(self.round) + 1
        while not isinstance(item := self.script[place], Launch):
            if isinstance(item, Compute):
                self._train(np.array([site]), item)
            place += 1
        # It is as far as those who are at the launch of the next round: the script's own steps to it are behind it.
        self._offered[site] = True

    def _freeze(self, site: int, now: float, seconds: float) -> None:
        self._frozen_at[site] = now
        if math.isfinite(seconds):
            self._at(now + seconds, lambda now: self._thaw(site, now))
        if seconds > self.scenario.patience.lost_after_s:
            self._at(now + self.scenario.patience.lost_after_s, lambda at: self._evict(site, now, at))

    def _evict(self, site: int, since: float, now: float) -> None:
        if self._frozen_at[site] == since and self._alive[site]:
            self._current[site] = False
            self._happened(now, "lost", site)

    def _thaw(self, site: int, now: float) -> None:
        """It goes on where it stood; if it missed a round, it fetches what is committed."""
        if not self._alive[site] or not math.isfinite(self._frozen_at[site]):
            return
        since_s, self._frozen_at[site] = float(self._frozen_at[site]), math.inf
        left_s = max(0.0, float(self._now[site]) - since_s)  # of what it was computing
        if not left_s:
            self._spend(np.array([site]), kinds.WAIT, np.array([since_s]))
        self._seconds[kinds.FROZEN] += now - since_s
        self.tracks.add(site, kinds.FROZEN, since_s, now)
        self._now[site] = now + left_s
        if self._held[site] == self.round:
            self._current[site] = True
        elif site not in self._joiners:
            self._current[site] = False
            self._fetch(site, now + 4 * self._to_coordinator[site], transfers=0)

    # --- the end

    def _past_end(self, time_s: float) -> bool:
        return time_s > self.scenario.duration_s

    def _end_early(self) -> None:
        """Time is over before this round is."""
        self.over = True

    def _conclude(self) -> Outcome:
        outcome, scenario = self._outcome, self.scenario
        by_rounds = self.round >= scenario.protocol_rounds or math.isinf(scenario.duration_s)
        end_s = self.committed_s if by_rounds else scenario.duration_s
        there = np.flatnonzero(self._alive)
        doing = kinds.COMPUTE if scenario.schedule.delay else kinds.WAIT
        self._spend(there, doing, np.full(len(there), end_s))
        down_s = end_s - self._down_since[np.isfinite(self._down_since)]
        self._seconds[kinds.DOWN] += float(np.maximum(0.0, down_s).sum())
        outcome.simulated_s = end_s
        outcome.tokens_owed = float(self._unsent[:, self._alive].mean(axis=0).sum())
        outcome.seconds = self._seconds
        self.tracks.close(end_s)
        outcome.spans = self.tracks.spans
        outcome.payload_bytes = self._payload_bytes.tolist()
        outcome.link_bytes = (self._payload_bytes + self._lost_bytes).tolist()
        return outcome

    def _draw(self, site: int, now: float) -> None:
        """From now on `site` has a time line, which begins with what it does."""
        if not self._drawn[site] and self._drawn.sum() < MOST_DRAWN:
            self._drawn[site] = True
            self.tracks.add(site, kinds.COMPUTE, float(self._since[site]), min(now, float(self._now[site])))

    def _show_wire(self, sites: NDArray[np.int64], met_s: float, encode_s: float, ends_s: float) -> None:
        for site in sites[self._drawn[sites]].tolist():
            self.tracks.add(site, kinds.ENCODE, met_s, met_s + encode_s, lane=WIRE)
            self.tracks.add(site, kinds.SEND, met_s + encode_s, ends_s, lane=WIRE)
