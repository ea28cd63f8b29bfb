"""Sync schedules as data: a pure function from the inner step to what is launched and what lands.

Steps count from 1 and are the same on every replica. `Launch(p)` takes the progress of fragment p and starts averaging
it, `Apply(p)` lets the oldest averaging of fragment p land. At one step launches come before landings: progress is
taken before the anchor moves.

    DiLoCo              inner_steps=H                            launch and apply at H, 2H, 3H, ...
    streaming           inner_steps=H, num_fragments=P, delay=τ  p launches every H steps, H/P after p−1; lands τ later
    one-round delay     inner_steps=H, delay=H                   round t is launched, then round t−1 lands

    H=4, P=2, τ=1   step      1  2  3  4  5  6  7  8  9
                    launch       0     1     0     1
                    apply           0     1     0     1

>>> schedule = Schedule(inner_steps=4, num_fragments=2, delay=1)
>>> [schedule.events(step) for step in (2, 3, 4, 5)]
[(Launch(fragment=0),), (Apply(fragment=0),), (Launch(fragment=1),), (Apply(fragment=1),)]
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import ConfigError


@dataclass(frozen=True)
class Launch:
    """Take the progress of `fragment` and start averaging it."""

    fragment: int


@dataclass(frozen=True)
class Apply:
    """The oldest averaging of `fragment` lands."""

    fragment: int


Event = Launch | Apply


@dataclass(frozen=True)
class Schedule:
    """When each fragment is launched and when it lands.

    inner_steps: steps between two launches of one fragment (H). delay: steps from launch to landing, 0 to H.
    blocking_first: the first round of each fragment lands at once whatever the delay, so that replicas do not run on
    alone for two rounds. first_step: the step after which rounds begin (steps of pretraining come before).
    """

    inner_steps: int
    num_fragments: int = 1
    delay: int = 0
    blocking_first: bool = False
    first_step: int = 0

    def __post_init__(self) -> None:
        if self.inner_steps < 1:
            raise ConfigError(f"inner_steps={self.inner_steps} is not positive; a round needs a step. Use 1 or more.")
        if self.num_fragments < 1:
            raise ConfigError(
                f"fragments={self.num_fragments} is not positive; a model is one fragment or more. Use 1."
            )
        if not 0 <= self.delay <= self.inner_steps:
            raise ConfigError(
                f"delay={self.delay} is outside 0..inner_steps={self.inner_steps}; a fragment lands before it is "
                f"launched twice again. Use at most {self.inner_steps}."
            )
        if self.inner_steps % self.num_fragments:
            below = self.inner_steps - self.inner_steps % self.num_fragments
            raise ConfigError(
                f"inner_steps={self.inner_steps} is not a multiple of fragments={self.num_fragments}; one is sent "
                f"every inner_steps/fragments steps. Use inner_steps={below + self.num_fragments}"
                + (f" or {below}." if below else ".")
            )

    def events(self, step: int) -> tuple[Event, ...]:
        """What happens after inner step `step`, in order."""
        launches = [Launch(p) for p in range(self.num_fragments) if self._launches(p, step)]
        landings = [Apply(p) for p in range(self.num_fragments) if self._lands(p, step)]
        return (*launches, *landings)

    def finish(self, step: int) -> tuple[Event, ...]:
        """What ends a run after step `step`, beyond `events(step)`: launch what is unsent, land what is in flight."""
        events: list[Event] = []
        for fragment in range(self.num_fragments):
            if not self._launches(fragment, step) and step > self.first_step:
                events.append(Launch(fragment))
                events.extend(Apply(fragment) for _ in range(self.num_in_flight(fragment, step) + 1))
            else:
                events.extend(Apply(fragment) for _ in range(self.num_in_flight(fragment, step)))
        return tuple(events)

    def num_in_flight(self, fragment: int, step: int) -> int:
        """Averagings of `fragment` launched and not landed once the events of `step` are done."""
        recent = range(max(self.first_step + 1, step - self.delay + 1), step + 1)
        flying = [s for s in recent if self._launches(fragment, s)]
        return len([s for s in flying if not (self.blocking_first and self._is_first(fragment, s))])

    def _launches(self, fragment: int, step: int) -> bool:
        since = step - self.first_step - self._offset(fragment)
        return since >= 0 and since % self.inner_steps == 0

    def _lands(self, fragment: int, step: int) -> bool:
        if self.blocking_first and self._is_first(fragment, step):
            return True
        launched = step - self.delay
        if self.delay and self.blocking_first and self._is_first(fragment, launched):
            return False
        return self._launches(fragment, launched)

    def _is_first(self, fragment: int, step: int) -> bool:
        return step == self.first_step + self._offset(fragment)

    def _offset(self, fragment: int) -> int:
        return (fragment + 1) * self.inner_steps // self.num_fragments
