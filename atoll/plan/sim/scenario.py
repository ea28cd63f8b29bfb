"""What is simulated, all of it as data, and what cannot be simulated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np

from atoll.algo.schedule import Schedule
from atoll.elastic.membership import Rules
from atoll.errors import ConfigError
from atoll.plan.estimate import BALLOT_MESSAGES, LAG, Method, Workload
from atoll.plan.links import Network
from atoll.plan.payload import Payload, fragment_payloads
from atoll.plan.sim.faults import Fault, Rates
from atoll.plan.sim.links import Links, Sites, links_of
from atoll.plan.units import format_seconds

STATE_BYTES = 8  # a parameter, to a joiner: anchor and outer momentum
QUORUM, DEADLINE_S = 0.6, 30.0  # of the trainer's settings, by test
UNENDING = 2**40  # rounds of a run that ends by time


@dataclass(frozen=True)
class Patience:
    """What the protocol is told: see `Rules`. adapt: slower islands take fewer steps (DyLU), as in training."""

    quorum: float = QUORUM
    deadline_s: float = DEADLINE_S
    beat_s: float = 0.5
    lost_after_s: float = 5.0
    adapt: bool = True


@dataclass(frozen=True)
class Speeds:
    """How long steps take beside the workload's `step_s`.

    jitter: standard deviation of one step over its mean; steps are independent (gamma distributed). slower: how many
    times as long the steps of an island take, by site.
    """

    jitter: float = 0.0
    slower: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Scenario:
    """One simulation.

    duration_s, num_rounds: it ends at whichever comes first; a round here is all fragments once. down_bytes_per_s: see
    `links_of`. message_s: of each message between two islands, beside its bytes. meeting_s: until the processes of an
    attempt have found each other. rates and script: what happens to islands. seed: of everything that is drawn.
    """

    method: Method
    workload: Workload
    network: Network
    duration_s: float = math.inf
    num_rounds: int = 0
    seed: int = 0
    speeds: Speeds = field(default_factory=Speeds)
    patience: Patience = field(default_factory=Patience)
    down_bytes_per_s: tuple[float, ...] = ()
    message_s: float = 0.0
    meeting_s: float = 0.0
    rates: Rates = field(default_factory=Rates)
    script: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if not self.num_rounds and math.isinf(self.duration_s):
            raise ConfigError("how long to simulate is not said. Give --hours 1 or --rounds 100.")
        if not self.duration_s > 0 or self.num_rounds < 0:
            raise ConfigError(
                f"{self.duration_s:g} s or {self.num_rounds} rounds are not positive. Give --hours 1 or --rounds 100."
            )

    @property
    def num_islands(self) -> int:
        return self.network.num_islands

    @property
    def schedule(self) -> Schedule:
        """Data parallelism is a blocking round of one step."""
        return self.method.schedule or Schedule(1)

    @property
    def fault_free(self) -> bool:
        return not self.rates.any and not any(fault.what != "slow" for fault in self.script)

    def without_faults(self) -> Scenario:
        """The same with islands that stay; those that are slow are slow here too."""
        slow = tuple(fault for fault in self.script if fault.what == "slow")
        return replace(self, rates=Rates(), script=slow)

    @property
    def tokens_a_step(self) -> float:
        """Of one island."""
        return self.workload.tokens_per_step / self.num_islands

    @property
    def state_bytes(self) -> float:
        """What a joiner receives."""
        return float(STATE_BYTES * self.workload.shape.num_parameters)

    @property
    def protocol_rounds(self) -> int:
        """A launch each."""
        return self.num_rounds * self.schedule.num_fragments if self.num_rounds else UNENDING

    @property
    def rules(self) -> Rules:
        """For the coordinator."""
        patience = self.patience
        return Rules(
            num_rounds=self.protocol_rounds,
            settings_digest="simulated",
            version="1.0.0",
            replicas=self.num_islands,
            quorum=patience.quorum,
            deadline_s=patience.deadline_s,
            beat_s=patience.beat_s,
            lost_after_s=patience.lost_after_s,
        )

    @cached_property
    def costs(self) -> Costs:
        return Costs(self)

    def links(self, more_sites: int) -> Links:
        return links_of(self.network, down_bytes_per_s=self.down_bytes_per_s, more_sites=more_sites)

    def step_s(self, site: int) -> float:
        """Mean seconds of a step at `site`."""
        return self.workload.step_s * dict(self.speeds.slower).get(site, 1.0)

    def draw_compute_s(self, steps: int, step_s: float, rng: np.random.Generator) -> float:
        """Seconds of `steps` steps: a sum of so many independent ones, drawn at once."""
        if not self.speeds.jitter or not steps:
            return steps * step_s
        spread = self.speeds.jitter**2
        return float(rng.gamma(steps / spread, step_s * spread))


class Costs:
    """Bytes and seconds of one averaging of m islands, from the compressor's own declarations."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self.payloads: Callable[[int], Sequence[Payload]] = lru_cache(maxsize=None)(self._payloads)

    def _payloads(self, num_islands: int) -> Sequence[Payload]:
        method = self._scenario.method
        if num_islands < 2:
            return [Payload(0, 0)] * method.num_fragments
        return fragment_payloads(
            self._scenario.workload.shape,
            method.coding,
            num_islands=num_islands,
            num_fragments=method.num_fragments,
        )

    def phases(self, num_islands: int) -> int:
        """Of messages that wait for each other."""
        return self._scenario.method.coding.phases(num_islands)

    def encode_s(self, num_islands: int, fragment: int) -> float:
        """The overhead of this fragment's share of a round; nothing where there is nobody to send to."""
        payloads = self.payloads(num_islands)
        total = sum(payload.sent_bytes for payload in payloads)
        return self._scenario.workload.overhead_s * payloads[fragment].sent_bytes / total if total else 0.0

    def least_sending_s(self, num_islands: int, fragment: int, latency_s: float) -> float:
        """Seconds below which its messages do not come, however few bytes they hold: see `Estimate`."""
        exchanges = self.payloads(num_islands)[fragment].exchanges / self._scenario.workload.workers
        messages_s = exchanges * (num_islands - 1) * self.phases(num_islands) * self._scenario.message_s
        return max(exchanges * latency_s / LAG, messages_s)

    def attempt_s(self, links: Links, sites: Sites, fragment: int) -> float:
        """From the moment all have met to the last byte, on links that nothing else uses."""
        count = len(sites)
        if count < 2:
            return 0.0
        latency_s = links.longest_latency_s(sites)
        sending_s = links.exchange_s(sites, self.payloads(count)[fragment].sent_bytes)
        sending_s = max(sending_s, self.least_sending_s(count, fragment, latency_s))
        return self.encode_s(count, fragment) + sending_s + (self.phases(count) + BALLOT_MESSAGES) * latency_s


def check_churn(scenario: Scenario) -> None:
    """Raises ConfigError where rates leave nobody who holds the state.

    Killed islands are away for the repair and the transfer of the state; the mean of how many are away at a time is the
    rate times that (Little's law).
    """
    rates, islands = scenario.rates, scenario.num_islands
    if not rates.kill and not rates.leave:
        return
    if islands < 2:
        raise ConfigError("one island that dies or leaves takes the run with it. Use --islands 2 or more.")
    if math.isinf(rates.repair_s) or rates.leave:
        _check_survivors(scenario)
    if math.isfinite(rates.repair_s):
        transfer_s = scenario.links(0).transfer_s(0, 1, scenario.state_bytes)
        away = rates.kill * (rates.repair_s + transfer_s)
        if away >= islands - 1:
            raise ConfigError(
                f"a kill every {format_seconds(1 / rates.kill)}, and {format_seconds(rates.repair_s + transfer_s)} "
                f"until each is back, keep {away:.1f} of {islands} islands away: nobody would hold the state.\n"
                f"Use --kill-rate 1/{math.ceil((rates.repair_s + transfer_s) / (islands - 1)) + 1}s at most, or more "
                "islands."
            )


def _check_survivors(scenario: Scenario) -> None:
    """Islands that go for good: some must be left at the end."""
    rates, islands = scenario.rates, scenario.num_islands
    going = (rates.kill if math.isinf(rates.repair_s) else 0.0) + rates.leave - rates.join
    if math.isinf(scenario.duration_s) or going * scenario.duration_s < islands - 1:
        return
    hours = (islands - 1) / going / 3600
    raise ConfigError(
        f"{going * scenario.duration_s:.0f} of {islands} islands would go for good: nobody would be left.\n"
        f"Use --join-after 60s so that they come back, or at most --hours {math.floor(hours * 100) / 100:g}."
    )
