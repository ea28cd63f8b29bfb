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

The length of a round may change where a round ends (`continue_with`). Nothing is lost or applied twice over the change:
a delay of a whole round stays one, so that what is in flight lands at the fragment's next launch; a shorter delay stays
the number of steps that it is.

    H=4, then 2 from step 8 on, a whole round of delay
                    step      4  5  6  7  8  9 10 11 12
                    launch    a           b     c     d
                    apply                 a     b     c

>>> schedule = Schedule(inner_steps=4, num_fragments=2, delay=1)
>>> [schedule.events(step) for step in (2, 3, 4, 5)]
[(Launch(fragment=0),), (Apply(fragment=0),), (Launch(fragment=1),), (Apply(fragment=1),)]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

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


class Phase(NamedTuple):
    """Rounds of `inner_steps` steps each, the first of which begins after step `first_step`."""

    first_step: int
    inner_steps: int


@dataclass(frozen=True)
class Schedule:
    """When each fragment is launched and when it lands.

    inner_steps: steps between two launches of one fragment (H). delay: steps from launch to landing, 0 to H; H stands
    for one round, however long rounds come to be. blocking_first: the first round of each fragment lands at once
    whatever the delay, so that replicas do not run on alone for two rounds. first_step: the step after which rounds
    begin (steps of pretraining come before), or those of `inner_steps` steps do. earlier: rounds of other lengths
    before that, made by `continue_with`.
    """

    inner_steps: int
    num_fragments: int = 1
    delay: int = 0
    blocking_first: bool = False
    first_step: int = 0
    earlier: tuple[Phase, ...] = ()

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
            if not self._launches(fragment, step) and step > self._phases[0].first_step:
                events.append(Launch(fragment))
                events.extend(Apply(fragment) for _ in range(self.num_in_flight(fragment, step) + 1))
            else:
                events.extend(Apply(fragment) for _ in range(self.num_in_flight(fragment, step)))
        return tuple(events)

    def num_in_flight(self, fragment: int, step: int) -> int:
        """Averagings of `fragment` launched and not landed once the events of `step` are done."""
        if self._lands_a_round_later:
            last = self._last_launch(fragment, step)
            return int(last is not None and not self._blocks(fragment, last))
        recent = range(step - self.delay + 1, step + 1)
        return len([s for s in recent if self._launches(fragment, s) and not self._blocks(fragment, s)])

    # --- rounds of changing length

    def continue_with(self, step: int, inner_steps: int) -> Schedule:
        """The same schedule up to step `step`, at which a round ends, and rounds of `inner_steps` steps from then on.

        >>> schedule = Schedule(4, delay=4).continue_with(8, 2)
        >>> [(step, *schedule.events(step)) for step in range(1, 13) if schedule.events(step)]
        ... # doctest: +NORMALIZE_WHITESPACE
        [(4, Launch(fragment=0)), (8, Launch(fragment=0), Apply(fragment=0)),
         (10, Launch(fragment=0), Apply(fragment=0)), (12, Launch(fragment=0), Apply(fragment=0))]
        """
        if step < self.first_step or self.boundary_after(step - 1) != step:
            last = max(self.first_step, step - (step - self.first_step) % self.inner_steps)
            raise ConfigError(
                f"step={step} is not one at which a round ends; rounds change their length between rounds only. "
                f"Use step={last} or {self.boundary_after(last)}."
            )
        if 0 < inner_steps <= self.delay < self.inner_steps:
            raise ConfigError(
                f"inner_steps={inner_steps} is not more than delay={self.delay}, and rounds would overtake each other. "
                f"Use {-(-(self.delay + 1) // self.num_fragments) * self.num_fragments} or more."
            )
        if inner_steps == self.inner_steps:
            return self
        passed = () if step == self.first_step else (Phase(self.first_step, self.inner_steps),)
        return replace(
            self,
            inner_steps=inner_steps,
            delay=inner_steps if self._lands_a_round_later else self.delay,
            first_step=step,
            earlier=self.earlier + passed,
        )

    def boundary_after(self, step: int) -> int:
        """The first step after `step` at which a round ends; the beginning of the first round counts as one.

        >>> [Schedule(4, first_step=3).boundary_after(step) for step in (0, 2, 3, 6, 7)]
        [3, 3, 7, 7, 11]
        """
        phase = self._phase_at(step + 1)
        rounds = max(0, -(-(step + 1 - phase.first_step) // phase.inner_steps))
        return phase.first_step + rounds * phase.inner_steps

    def round_of(self, step: int) -> int:
        """The round that step `step` belongs to, from 1; 0 or less for steps before all rounds."""
        before = 0
        for phase, following in pairwise(self._phases):
            if step <= following.first_step:
                return before + -(-(step - phase.first_step) // phase.inner_steps)
            before += (following.first_step - phase.first_step) // phase.inner_steps
        return before + -(-(step - self.first_step) // self.inner_steps)

    @property
    def _phases(self) -> tuple[Phase, ...]:
        return (*self.earlier, Phase(self.first_step, self.inner_steps))

    @property
    def _lands_a_round_later(self) -> bool:
        return self.delay == self.inner_steps

    def _launches(self, fragment: int, step: int) -> bool:
        phase = self._phase_at(step)
        since = step - phase.first_step - self._offset(fragment, phase)
        return since >= 0 and since % phase.inner_steps == 0

    def _lands(self, fragment: int, step: int) -> bool:
        if self.delay and self._blocks(fragment, step):
            return True
        launched: int | None = step - self.delay
        if self._lands_a_round_later:
            launched = self._last_launch(fragment, step - 1) if self._launches(fragment, step) else None
        if launched is None or (self.delay and self._blocks(fragment, launched)):
            return False
        return self._launches(fragment, launched)

    def _blocks(self, fragment: int, step: int) -> bool:
        """Whether `fragment` is launched at `step` and that is its first launch, which lands at once."""
        first = self._phases[0]
        return self.blocking_first and step == first.first_step + self._offset(fragment, first)

    def _last_launch(self, fragment: int, step: int) -> int | None:
        """The last step up to `step` at which `fragment` was launched."""
        phase = self._phase_at(step)
        since = step - phase.first_step - self._offset(fragment, phase)
        if since >= 0:
            return step - since % phase.inner_steps
        return None if phase == self._phases[0] else self._last_launch(fragment, phase.first_step)

    def _phase_at(self, step: int) -> Phase:
        """Rounds of which length `step` belongs to; what happens at a boundary belongs to what ends there."""
        if step > self.first_step:
            return Phase(self.first_step, self.inner_steps)
        return next((phase for phase in reversed(self.earlier) if step > phase.first_step), self._phases[0])

    def _offset(self, fragment: int, phase: Phase) -> int:
        return (fragment + 1) * phase.inner_steps // self.num_fragments
