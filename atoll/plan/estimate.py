"""One method on one network: round time, rate, utilisation, and what would hide the sync.

A method is a compressor and a `Schedule`; data parallelism is the one without a schedule. Rounds are walked on a clock
(`clock.run_schedule`), so that anything the trainer can schedule can be planned.

What is assumed: all islands are equally fast; an island's devices send through its one link; a sync of an overlapped
schedule takes nothing from the inner steps but `landing_s`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atoll.algo.schedule import Schedule
from atoll.plan import cost
from atoll.plan.clock import RoundTime, Seconds, run_schedule
from atoll.plan.links import Network
from atoll.plan.payload import IDENTITY, Coding, Payload, fragment_payloads
from atoll.plan.shapes import ModelShape

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
SLOWEST_BYTES_PER_S, FASTEST_BYTES_PER_S = 1e2, 1e14
REFINEMENTS, GRID_POINTS = 4, 64

HEADROOM = 1.2

LAG = 2  # of the transport, by test: exchanges that are under way between two phases
BALLOT_MESSAGES = 1


@dataclass(frozen=True)
class Workload:
    """What every method is given alike.

    step_s: seconds of an inner step, pipeline bubble included. tokens_per_step: over all islands.
    overhead_s: of each sync beside sending (encoding, waiting for the last). landing_s: of each round, that the
    training itself stands still even where the sync is hidden. Both are 0 unless measured or given.
    workers: of an island, that send their shares side by side over the one link.
    """

    shape: ModelShape
    step_s: float
    tokens_per_step: float
    overhead_s: float = 0.0
    landing_s: float = 0.0
    workers: int = 1


@dataclass(frozen=True)
class Method:
    """A way of training. schedule: None for data parallelism, which averages gradients before every step."""

    name: str
    schedule: Schedule | None
    coding: Coding = IDENTITY

    @property
    def inner_steps(self) -> int:
        return 1 if self.schedule is None else self.schedule.inner_steps

    @property
    def num_fragments(self) -> int:
        return 1 if self.schedule is None else self.schedule.num_fragments

    @property
    def delay(self) -> int:
        return 0 if self.schedule is None else self.schedule.delay

    @property
    def kind(self) -> str:
        """The trainer's word for its schedule."""
        if self.schedule is None:
            return "allreduce"
        if self.num_fragments > 1:
            return "streaming"
        return "delayed" if self.delay else "blocking"

    def describe(self) -> str:
        """
        >>> Method("x", Schedule(100, 5, 2), Coding("int4")).describe()
        'streaming (5 fragments, delay 2), H 100, int4'
        """
        if self.schedule is None:
            return f"data parallel, {self.coding.describe()}"
        late = ""
        if self.kind == "streaming":
            late = f" ({self.num_fragments} fragments, delay {self.delay})"
        elif 0 < self.delay < self.inner_steps:
            late = f" by {self.delay} step{'s' * (self.delay > 1)}"
        return f"{self.kind}{late}, H {self.inner_steps}, {self.coding.describe()}"


@dataclass(frozen=True)
class Estimate:
    """What a method comes to.

    payload_bytes: that an island sends a round. fragment_s: that each fragment holds the link. exposed_s: of a round,
    in which no island computes. tokens_per_s: of all islands together.
    """

    method: Method
    workload: Workload
    network: Network
    payload_bytes: int
    fragment_s: tuple[float, ...]
    exposed_s: float

    @property
    def sync_s(self) -> float:
        """That all of a round's fragments hold the link."""
        return sum(self.fragment_s)

    @property
    def compute_s(self) -> float:
        return self.method.inner_steps * self.workload.step_s

    @property
    def round_s(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def utilisation(self) -> float:
        return cost.utilisation(self.compute_s, self.exposed_s)

    @property
    def tokens_per_s(self) -> float:
        return self.method.inner_steps * self.workload.tokens_per_step / self.round_s

    @property
    def inner_steps_to_hide(self) -> int:
        """H from which the sync fits beside the inner steps."""
        return cost.smallest_inner_steps(self.sync_s, self.workload.step_s)

    @property
    def delay_to_hide(self) -> int:
        """Steps from launch to landing that hide what the longest fragment takes; more than a round if H is too few."""
        return math.ceil(max(self.fragment_s) / self.workload.step_s)

    @cached_property
    def bandwidths(self) -> dict[float, float | None]:
        """The smallest bandwidth, bytes a second and the same everywhere, that reaches each of `TARGETS`."""
        return {target: smallest_bandwidth(self.method, self.workload, self.network, target) for target in TARGETS}


def estimate(method: Method, workload: Workload, network: Network) -> Estimate:
    """What `method` comes to on `network`."""
    payloads = _payloads(method, workload, network.num_islands)
    sending_s = [np.asarray(_sending_s(method, network, payload)) for payload in payloads]
    holding_s = _holding_s(method, workload, network, payloads, sending_s)
    exposed_s = float(_round_time(method, workload, holding_s).exposed_s)
    sent_bytes = sum(payload.sent_bytes for payload in payloads)
    return Estimate(method, workload, network, sent_bytes, tuple(float(seconds) for seconds in holding_s), exposed_s)


def no_later_than_needed(method: Method, workload: Workload, network: Network) -> Method:
    """`method`, one fragment that lands a whole round late, with a landing no later than hides its sync.

    The shorter the delay, the less it costs in loss. `HEADROOM` is left for syncs that take longer than foretold.
    """
    schedule = method.schedule
    if schedule is None or schedule.num_fragments > 1 or not 0 < schedule.delay == schedule.inner_steps:
        return method
    steps = math.ceil(HEADROOM * estimate(method, workload, network).sync_s / workload.step_s)
    return replace(method, schedule=replace(schedule, delay=min(schedule.delay, max(1, steps))))


def utilisation_curve(
    method: Method, workload: Workload, network: Network, bytes_per_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Utilisation at each of the bandwidths, the same between all islands, with the latencies of `network`."""
    payloads = _payloads(method, workload, network.num_islands)
    sending_s = [payload.sent_bytes / bytes_per_s for payload in payloads]
    holding_s = _holding_s(method, workload, network, payloads, sending_s)
    return np.asarray(_round_time(method, workload, holding_s).utilisation)


def smallest_bandwidth(method: Method, workload: Workload, network: Network, target: float) -> float | None:
    """Bytes a second from which `method` reaches a utilisation of `target`, to 0.01 %.

    None if no link does, 0 if none is needed.
    """
    if network.num_islands == 1:
        return 0.0
    low, high = SLOWEST_BYTES_PER_S, FASTEST_BYTES_PER_S
    for _ in range(REFINEMENTS):
        grid = np.geomspace(low, high, GRID_POINTS)
        reached = utilisation_curve(method, workload, network, grid) >= target
        if not reached[-1]:
            return None
        first = int(np.argmax(reached))
        if first == 0:
            return float(grid[0])
        low, high = float(grid[first - 1]), float(grid[first])
    return high


def _payloads(method: Method, workload: Workload, num_islands: int) -> list[Payload]:
    if num_islands == 1:
        return [Payload(0, 0)] * method.num_fragments
    return fragment_payloads(workload.shape, method.coding, num_islands=num_islands, num_fragments=method.num_fragments)


def _sending_s(method: Method, network: Network, payload: Payload) -> float:
    """Seconds to send a fragment; data parallelism may also go round in a ring."""
    if network.num_islands == 1:
        return 0.0
    seconds = network.exchange_s(payload.sent_bytes)
    if method.schedule is None:
        around = payload.sent_bytes / cost.ring_factor(network.num_islands)
        seconds = min(seconds, network.ring_s(around, network.best_ring))
    return seconds


def _holding_s(
    method: Method, workload: Workload, network: Network, payloads: Sequence[Payload], sending_s: Sequence[Seconds]
) -> list[Seconds]:
    """Seconds each fragment holds the link: sending, or waiting for messages where they are many and small; then the
    latencies that nothing hides, and its share of the overhead."""
    if network.num_islands == 1:
        return list(sending_s)
    total = sum(payload.sent_bytes for payload in payloads)
    latency_s = network.longest_latency_s
    unhidden_s = (method.coding.phases(network.num_islands) + BALLOT_MESSAGES) * latency_s
    return [
        np.maximum(seconds, payload.exchanges / workload.workers * latency_s / LAG)
        + unhidden_s
        + workload.overhead_s * payload.sent_bytes / total
        for payload, seconds in zip(payloads, sending_s, strict=True)
    ]


def _round_time(method: Method, workload: Workload, holding_s: Sequence[Seconds]) -> RoundTime:
    schedule = method.schedule or Schedule(inner_steps=1)
    return run_schedule(schedule, step_s=workload.step_s, fragment_s=holding_s, landing_s=workload.landing_s)
