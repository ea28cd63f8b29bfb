"""A `Schedule` as what an island does, in order.

Every launch is one round of the protocol, counted from 1: for one fragment that is the round of training, for P
fragments a P-th of it. An averaging lands at the schedule's own step.

>>> from atoll.algo.schedule import Schedule
>>> for item in Script(Schedule(4, num_fragments=2, delay=1)).first(6):
...     print(item)
Compute(steps=2, before=0)
Launch(round=1, fragment=0)
Compute(steps=1, before=2)
Land(round=1)
Compute(steps=1, before=3)
Launch(round=2, fragment=1)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.algo import schedule as of

WALKED_ROUNDS = 3  # after which every round of the schedule is like the one before


class Compute(NamedTuple):
    """Take `steps` inner steps. before: steps of the same round of training that come before them."""

    steps: int
    before: int

    def scaled(self, target: Any, inner_steps: int) -> Any:
        """The steps of an island that takes `target` of the `inner_steps` steps of a round; also of arrays of targets.

        >>> [Compute(5, before).scaled(18, 20) for before in (0, 5, 10, 15)]
        [4, 5, 4, 5]
        """
        return target * (self.before + self.steps) // inner_steps - target * self.before // inner_steps


class Launch(NamedTuple):
    """Offer the progress of `fragment` to `round`."""

    round: int
    fragment: int


class Land(NamedTuple):
    """Wait for `round`, and go on from what it led to."""

    round: int


Item = Compute | Launch | Land


@dataclass
class _Walk:
    """A walk along a schedule. flying: rounds that have not landed, by fragment."""

    schedule: of.Schedule
    items: list[Item]
    flying: list[deque[int]]
    round: int = 0
    idle: int = 0  # steps since the last event

    def step(self, step: int) -> None:
        self.idle += 1
        for event in self.schedule.events(step):
            if self.idle:
                begun = step - self.idle - self.schedule.first_step
                self.items.append(Compute(self.idle, begun % self.schedule.inner_steps))
                self.idle = 0
            self.items.append(self._land(event) if isinstance(event, of.Apply) else self._launch(event))

    def _launch(self, event: of.Launch) -> Launch:
        self.round += 1
        self.flying[event.fragment].append(self.round)
        return Launch(self.round, event.fragment)

    def _land(self, event: of.Apply) -> Land:
        return Land(self.flying[event.fragment].popleft())


class Script:
    """The items of `schedule`, without end."""

    def __init__(self, schedule: of.Schedule) -> None:
        self.inner_steps = schedule.inner_steps
        self.num_fragments = schedule.num_fragments
        walk = _Walk(schedule, [], [deque() for _ in range(schedule.num_fragments)])
        bounds = [0]
        for number in range(WALKED_ROUNDS):
            first = schedule.first_step + number * schedule.inner_steps
            for step in range(first + 1, first + schedule.inner_steps + 1):
                walk.step(step)
            bounds.append(len(walk.items))
        assert walk.idle == 0, "a round ends with a launch"
        self._head = walk.items[: bounds[-2]]
        self._period = walk.items[bounds[-2] :]
        self._launched = {item.round: place for place, item in enumerate(walk.items) if isinstance(item, Launch)}

    def __getitem__(self, place: int) -> Item:
        if place < len(self._head):
            return self._head[place]
        number, within = divmod(place - len(self._head), len(self._period))
        return self._later(self._period[within], number)

    def first(self, count: int) -> list[Item]:
        """The first `count` items."""
        return [self[place] for place in range(count)]

    def launch_of(self, round: int) -> int:
        """The place of the launch of `round`; -1, before everything, for round 0."""
        if round <= 0:
            return -1
        walked = WALKED_ROUNDS * self.num_fragments
        number = max(0, -(-(round - walked) // self.num_fragments))
        return self._launched[round - number * self.num_fragments] + number * len(self._period)

    def _later(self, item: Item, number: int) -> Item:
        """An item of the last round that was walked, `number` rounds later."""
        shift = number * self.num_fragments
        if isinstance(item, Launch):
            return Launch(item.round + shift, item.fragment)
        return Land(item.round + shift) if isinstance(item, Land) else item
