"""Virtual time: what happens when, in order."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

Act = Callable[[], None]


class Clock:
    """Seconds since the start, and what is still to happen. Of two things at one time the one asked for first is first.

    >>> clock, seen = Clock(), []
    >>> clock.after(2.0, lambda: seen.append("later"))
    >>> clock.after(1.0, lambda: seen.append("sooner"))
    >>> clock.run(until_s=1.5)
    >>> seen, clock.now
    (['sooner'], 1.5)
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self._queue: list[tuple[float, int, Act]] = []
        self._order = 0

    def after(self, delay_s: float, act: Act) -> None:
        """Do `act` in `delay_s` seconds; 0 is after everything that is to happen now already."""
        self.at(self.now + delay_s, act)

    def at(self, time_s: float, act: Act) -> None:
        """Do `act` at `time_s`, or now if that has passed."""
        if math.isinf(time_s):
            return
        self._order += 1
        heapq.heappush(self._queue, (max(time_s, self.now), self._order, act))

    def run(self, *, until_s: float, watch: Callable[[float], None] | None = None) -> None:
        """Let time pass until `until_s`, or until somebody stops the clock. watch: is told the time now and then."""
        count = 0
        while self._queue and self._queue[0][0] <= until_s and not self.stopped:
            self.now, _, act = heapq.heappop(self._queue)
            act()
            count += 1
            if watch is not None and count % 1024 == 0:
                watch(self.now)
        if not self.stopped:
            self.now = until_s
