"""A sync schedule on a clock: when training waits for the link.

The same `Schedule` that trains is walked step by step. A launch queues its bytes on the island's link, which sends one
fragment after the other; a landing waits until its fragment is there. What is waited is exposed, the rest is hidden.

    H=4, delay=4, S=6 s, T=1 s     step  1 2 3 4       5 6 7 8       round = max(H·T, S)
                                   link        ├──────────┤├──────
                                   wait                    ▒▒
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from atoll.algo.schedule import Event, Launch, Schedule

Seconds = NDArray[np.float64]

WARM_UP_ROUNDS, MEASURED_ROUNDS = 2, 2
ROUNDING = 1e-9  # share of a round below which a wait is only the rounding of sums


@dataclass(frozen=True)
class FifoLink:
    """A link that sends one thing after the other. free_s: when it has sent all it was given."""

    free_s: Seconds

    def send(self, at_s: Seconds, duration_s: Seconds) -> FifoLink:
        """The link once it has also sent what was handed to it at `at_s`; `free_s` is then when that has arrived."""
        return FifoLink(np.maximum(self.free_s, at_s) + duration_s)


@dataclass(frozen=True)
class RoundTime:
    """One round in the steady state. compute_s: H·T. exposed_s: what it took beyond that; arrays as the durations."""

    compute_s: float
    exposed_s: Seconds

    @property
    def total_s(self) -> Seconds:
        return self.compute_s + self.exposed_s

    @property
    def utilisation(self) -> Seconds:
        return self.compute_s / self.total_s


def run_schedule(
    schedule: Schedule, *, step_s: float, fragment_s: Sequence[Seconds], landing_s: float = 0.0
) -> RoundTime:
    """The steady round of `schedule`.

    fragment_s: for each fragment the seconds it holds the link; scalars, or arrays to try many links in one walk.
    landing_s: seconds that all landings of one round take of the training itself, on top of any wait.

    >>> fragments = [np.array([3.0, 6.0])]
    >>> run_schedule(Schedule(4), step_s=1.0, fragment_s=fragments).total_s
    array([ 7., 10.])
    >>> run_schedule(Schedule(4, delay=4), step_s=1.0, fragment_s=fragments).total_s
    array([4., 6.])
    """
    shape = np.shape(fragment_s[0])
    now, link = np.zeros(shape), FifoLink(np.zeros(shape))
    flying = [schedule.num_in_flight(fragment, _steady_start(schedule)) for fragment in range(len(fragment_s))]
    arrivals = [deque([np.zeros(shape)] * count) for count in flying]
    marks: list[Seconds] = []
    events, last = _period(schedule), 0
    for number in range(WARM_UP_ROUNDS + MEASURED_ROUNDS):
        for step, event in events:
            now = now + (number * schedule.inner_steps + step - last) * step_s
            last = number * schedule.inner_steps + step
            if isinstance(event, Launch):
                link = link.send(now, fragment_s[event.fragment])
                arrivals[event.fragment].append(link.free_s)
            else:
                now = np.maximum(now, arrivals[event.fragment].popleft()) + landing_s / schedule.num_fragments
        marks.append(now)
    spent = (marks[-1] - marks[WARM_UP_ROUNDS - 1]) / MEASURED_ROUNDS
    compute = schedule.inner_steps * step_s
    exposed = spent - compute
    return RoundTime(compute, np.where(exposed > ROUNDING * compute, exposed, 0.0))


@lru_cache(maxsize=256)
def _period(schedule: Schedule) -> tuple[tuple[int, Event], ...]:
    """The events of one round in the steady state, each with its step 1..H, in order."""
    start = _steady_start(schedule)
    steps = range(1, schedule.inner_steps + 1)
    return tuple((step, event) for step in steps for event in schedule.events(start + step))


def _steady_start(schedule: Schedule) -> int:
    """A step with a whole round behind it, at which every fragment has as many averagings in flight as it ever will."""
    return schedule.first_step + 2 * schedule.inner_steps
