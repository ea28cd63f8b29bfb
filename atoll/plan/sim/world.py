"""A whole run in messages: `Membership` decides, islands train, bytes take their time.

    World ── Host ── Membership        who is in, which round, what is committed: the coordinator's own state machine
      │        └── messages, each after its latency
      ├── Island, Island, ...          training and the member's side of the protocol
      └── Fabric ── Averaging, ...     bytes of attempts and of states, sharing the islands' links

The beats of all islands come at one time, and only as often as the coordinator needs them to know who is alive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from atoll.elastic.membership import Close, Effect, Membership, Record, Send
from atoll.elastic.messages import Beat, Finish, Go, Hello, Leave
from atoll.plan.sim import faults as f
from atoll.plan.sim.averaging import Averaging
from atoll.plan.sim.clock import Clock
from atoll.plan.sim.fabric import Fabric
from atoll.plan.sim.island import Island
from atoll.plan.sim.links import Sites
from atoll.plan.sim.outcome import Commit, Happening, Outcome
from atoll.plan.sim.scenario import Scenario
from atoll.plan.sim.script import Script
from atoll.plan.sim.tracks import Tracks

BEATS_AT_ONCE = 2  # of the three after which a silent member is not asked any more
CLOSED_S = 0.02  # until the coordinator notices that a process died, or an island that its connection ended
COORDINATOR = 0  # its site


class Host:
    """The service round the state machine: connections, latencies, its timer."""

    def __init__(self, world: World) -> None:
        self.membership = Membership(world.scenario.rules, boot="boot")
        self._world = world
        self._there: dict[str, Island] = {}
        self._tick_at = float("inf")
        self._beat()

    def carry_up(self, island: Island, message: Any) -> None:
        """From an island, with all that was sent before it."""
        self._world.clock.after(self._latency_s(island), lambda: self._hear(island, message))

    def lost(self, island: Island) -> None:
        """Its process is gone: the connection closes."""
        if self._there.get(island.id) is island:
            del self._there[island.id]
            self._act(self.membership.disconnect(island.id, self._world.clock.now))

    def hear_beat(self, island: Island) -> None:
        """A sign of life."""
        if self._there.get(island.id) is island:
            effects = self.membership.receive(island.id, Beat(tokens_per_s=island.tokens_per_s), self._world.clock.now)
            if effects:
                self._act(effects)

    # --- inside

    def _hear(self, island: Island, message: Any) -> None:
        if isinstance(message, Hello):
            self._there[island.id] = island
            self._act(self.membership.connect(island.id, message, self._world.clock.now))
        elif self._there.get(island.id) is island:
            self._act(self.membership.receive(island.id, message, self._world.clock.now))
        if isinstance(message, Leave):
            self._there.pop(island.id, None)

    def _beat(self) -> None:
        """Everybody who runs says so, and will again."""
        for island in list(self._there.values()):
            if island.alive and not island.frozen:
                self.hear_beat(island)
        self._world.clock.after(BEATS_AT_ONCE * self._world.scenario.patience.beat_s, self._beat)

    def _act(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Record):
                self._world.recorded(effect)
            elif isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Close) and effect.member in self._there:
                island = self._there.pop(effect.member)
                self._world.clock.after(CLOSED_S, partial(island.when_running, island.closed))
        self._set_timer()

    def _send(self, send: Send) -> None:
        island = self._there.get(send.to)
        if island is not None and not isinstance(send.message, Finish):
            message = send.message
            self._world.clock.after(self._latency_s(island), lambda: island.when_running(lambda: island.hear(message)))

    def _set_timer(self) -> None:
        deadline = self.membership.next_deadline()
        if deadline is not None and (deadline < self._tick_at or self._tick_at <= self._world.clock.now):
            self._tick_at = deadline
            self._world.clock.at(deadline, lambda: self._tick(deadline))

    def _tick(self, planned: float) -> None:
        if planned != self._tick_at:
            return
        self._tick_at = float("inf")
        self._act(self.membership.tick(self._world.clock.now))

    def _latency_s(self, island: Island) -> float:
        return self._world.fabric.links.latency_s(island.site, COORDINATOR)


class _Transfer:
    """The committed state on its way to an island."""

    def __init__(self, source: Island, target: Island, done: Callable[[], None]) -> None:
        self.source = source
        self.target = target
        self._done = done

    def arrived(self, sources: Sites, targets: Sites) -> None:
        self._done()


class World:
    """One history of a scenario. drawn: its faults."""

    def __init__(self, scenario: Scenario, drawn: list[f.Fault]) -> None:
        sites = max([scenario.num_islands - 1, *(fault.site for fault in drawn)]) + 1
        self.scenario = scenario
        self.script = Script(scenario.schedule)
        self.clock = Clock()
        self.tracks = Tracks()
        self.fabric = Fabric(self.clock, scenario.links(sites - scenario.num_islands))
        self.slower: dict[int, float] = {}
        self.landing_s = scenario.workload.landing_s / scenario.schedule.num_fragments
        self._chances = [np.random.default_rng((scenario.seed, 1, site)) for site in range(sites)]
        self._outcome = Outcome(scenario, "messages")
        self._averagings: dict[int, Averaging] = {}
        self._transfers: list[_Transfer] = []
        self._islands: dict[str, Island] = {}
        self._at: dict[int, Island] = {}  # the newest of each site
        self._payload_bytes = np.zeros(sites)
        self.host = Host(self)
        for site in range(scenario.num_islands):
            self._start(site, founder=True)
        for fault in drawn:
            self.clock.at(fault.time_s, partial(self._strike, fault))

    def run(self, watch: Callable[[float], None] | None = None) -> Outcome:
        """Let it happen."""
        scenario, outcome = self.scenario, self._outcome
        self.clock.run(until_s=scenario.duration_s, watch=watch)
        self.tracks.close(self.clock.now)
        outcome.simulated_s = self.clock.now
        outcome.tokens_trained = sum(island.trained for island in self._islands.values())
        outcome.tokens_owed = sum(
            max(0.0, island.trained - island.committed) for island in self._islands.values() if island.alive
        )
        outcome.seconds = dict(self.tracks.seconds)
        outcome.spans = self.tracks.spans
        outcome.payload_bytes = self._payload_bytes.tolist()
        outcome.link_bytes = self.fabric.sent_bytes.tolist()
        return outcome

    # --- for islands and the host

    def island(self, member: str) -> Island | None:
        return self._islands.get(member)

    def draw_compute_s(self, island: Island, steps: int) -> float:
        return self.scenario.draw_compute_s(steps, island.step_s, self._chances[island.site])

    def averaging_of(self, go: Go) -> Averaging:
        """The data plane of an attempt, the same for all its participants."""
        if go.attempt not in self._averagings:
            fragment = (go.round - 1) % self.script.num_fragments
            self._averagings = {go.attempt: self._averaging(go, fragment)}
        return self._averagings[go.attempt]

    def sent_payload(self, island: Island, data: Averaging) -> None:
        if data.count > 1:
            self._payload_bytes[island.site] += data.sent_bytes

    def transfer(self, source: Island, target: Island, state: tuple[int, str]) -> None:
        """Send the committed state; what `target` was receiving before is given up."""
        self._cut_transfers(lambda transfer: transfer.target is target)
        transfer = _Transfer(source, target, lambda: self._transferred(transfer, state))
        self._transfers.append(transfer)
        ends = np.array([source.site]), np.array([target.site])
        self.fabric.send(transfer, *ends, self.scenario.state_bytes)

    def recorded(self, record: Record) -> None:
        """What the coordinator writes down."""
        payload, now, outcome = record.payload, self.clock.now, self._outcome
        if record.kind == "committed":
            self._note_commit(payload, now)
        elif record.kind == "void":
            outcome.happened.append(Happening(now, "void", -1, payload["why"]))
        elif record.kind == "member" and payload["what"] in ("lost", "joined") and now > 0:
            island = self._islands[payload["member"]]
            outcome.happened.append(Happening(now, payload["what"], island.site, payload["why"]))
        elif record.kind == "finished":
            outcome.ended = payload["why"]
            self.clock.stopped = True

    # --- inside

    def _note_commit(self, payload: dict[str, Any], now: float) -> None:
        """Fragments count in parts: all of them are the model."""
        weights = {seat: weight / self.script.num_fragments for seat, weight in payload["weights"].items()}
        for seat, tokens in weights.items():
            self._islands[payload["members"][seat]].committed += tokens
        self._outcome.commits.append(Commit(now, len(weights), len(payload["members"]), sum(weights.values())))

    def _averaging(self, go: Go, fragment: int) -> Averaging:
        return Averaging(go, fragment, scenario=self.scenario, clock=self.clock, fabric=self.fabric, tracks=self.tracks)

    def _start(self, site: int, *, founder: bool) -> None:
        island = Island(self, site, number=len(self._islands), founder=founder)
        self._islands[island.id] = self._at[site] = island

    def _transferred(self, transfer: _Transfer, state: tuple[int, str]) -> None:
        self._transfers.remove(transfer)
        latency_s = self.fabric.links.latency_s(transfer.source.site, transfer.target.site)
        transfer.target.later(latency_s, lambda: transfer.target.fetched(state))
        self._outcome.state_bytes += self.scenario.state_bytes

    def _cut_transfers(self, chosen: Callable[[_Transfer], bool]) -> list[_Transfer]:
        cut = [transfer for transfer in self._transfers if chosen(transfer)]
        for transfer in cut:
            self._transfers.remove(transfer)
            self.fabric.drop(transfer)
        return cut

    # --- faults

    def _strike(self, fault: f.Fault) -> None:
        if fault.what == f.JOIN:
            return self._join(fault.site)
        there = [site for site, island in sorted(self._at.items()) if island.alive and not island.frozen]
        if fault.what == f.GO:
            there = [site for site, island in sorted(self._at.items()) if island.alive]
        site = fault.pick(there) if there else -1
        if site not in there:
            self._outcome.happened.append(Happening(self.clock.now, "missed", fault.site, f"nobody to {fault.what}"))
            return
        island = self._at[site]
        if fault.what in (f.KILL, f.LEAVE, f.STOP) and not self._others_hold(island):
            return self._spare(fault, island)
        self._outcome.happened.append(Happening(self.clock.now, fault.what, site))
        acts = {f.KILL: self._kill, f.LEAVE: self._leave, f.STOP: self._stop, f.GO: self._thaw, f.SLOW: self._slow}
        acts[fault.what](island, fault)

    def _others_hold(self, island: Island) -> bool:
        return any(other is not island and other.holds_state and not other.frozen for other in self._at.values())

    def _spare(self, fault: f.Fault, island: Island) -> None:
        """Nobody would hold the committed state any more. In a file that is a mistake; by chance it is left out."""
        if fault.site >= 0:
            raise fault.leaves_nobody()
        self._outcome.happened.append(Happening(self.clock.now, "spared", island.site, f"it would {fault.what}"))

    def _kill(self, island: Island, fault: f.Fault) -> None:
        self._end(island)
        self.clock.after(CLOSED_S, lambda: self.host.lost(island))
        if fault.seconds < float("inf"):
            self.clock.after(fault.seconds, lambda: self._join(island.site))

    def _leave(self, island: Island, fault: f.Fault) -> None:
        island.say(Leave("it was asked to"))
        self._end(island)

    def _end(self, island: Island) -> None:
        island.die()
        self._cut_transfers(lambda transfer: transfer.target is island)
        for transfer in self._cut_transfers(lambda transfer: transfer.source is island):
            transfer.target.later(CLOSED_S, partial(transfer.target.fetched, None))

    def _stop(self, island: Island, fault: f.Fault) -> None:
        island.freeze()
        if fault.seconds < float("inf"):
            self.clock.after(fault.seconds, lambda: self._thaw(island, fault))

    def _thaw(self, island: Island, fault: f.Fault) -> None:
        island.thaw()

    def _slow(self, island: Island, fault: f.Fault) -> None:
        self.slower[island.site] = fault.factor
        island.step_s = self.scenario.step_s(island.site) * fault.factor

    def _join(self, site: int) -> None:
        if site in self._at and self._at[site].alive:
            return
        self._outcome.happened.append(Happening(self.clock.now, f.JOIN, site))
        self._start(site, founder=False)
