"""Law 7: every launch is applied once, in order, whatever the schedule and wherever the run ends."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from atoll.algo.schedule import Event, Launch, Schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    num_fragments = draw(st.integers(1, 4))
    inner_steps = num_fragments * draw(st.integers(1, 5))
    return Schedule(
        inner_steps,
        num_fragments=num_fragments,
        delay=draw(st.integers(0, inner_steps)),
        blocking_first=draw(st.booleans()),
        first_step=draw(st.integers(0, 7)),
    )


class Ledger:
    """Follows a run: the steps at which each fragment was launched, and which of them have landed."""

    def __init__(self, num_fragments: int) -> None:
        self.launches: list[list[int]] = [[] for _ in range(num_fragments)]
        self.landings: list[list[tuple[int, int]]] = [[] for _ in range(num_fragments)]
        self._flying: list[deque[int]] = [deque() for _ in range(num_fragments)]

    def note(self, step: int, events: tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, Launch):
                self.launches[event.fragment].append(step)
                self._flying[event.fragment].append(step)
            else:
                self.landings[event.fragment].append((self._flying[event.fragment].popleft(), step))

    def in_flight(self, fragment: int) -> int:
        return len(self._flying[fragment])


@given(schedules(), st.integers(0, 40))
def test_every_launch_lands_once_in_order_and_none_is_left_at_the_end(schedule: Schedule, last_step: int) -> None:
    ledger = Ledger(schedule.num_fragments)
    for step in range(1, last_step + 1):
        ledger.note(step, schedule.events(step))
        for fragment in range(schedule.num_fragments):
            assert schedule.num_in_flight(fragment, step) == ledger.in_flight(fragment)
    ledger.note(last_step, schedule.finish(last_step))
    for fragment in range(schedule.num_fragments):
        assert ledger.in_flight(fragment) == 0
        assert [launched for launched, _ in ledger.landings[fragment]] == ledger.launches[fragment]


@given(schedules(), st.integers(1, 40))
def test_no_progress_is_left_unsent_when_a_run_ends(schedule: Schedule, last_step: int) -> None:
    ledger = Ledger(schedule.num_fragments)
    for step in range(1, last_step + 1):
        ledger.note(step, schedule.events(step))
    ledger.note(last_step, schedule.finish(last_step))
    for launches in ledger.launches:
        assert launches[-1:] == ([last_step] if last_step > schedule.first_step else [])
        assert len(set(launches)) == len(launches), "one step's progress was sent twice"


@given(schedules())
def test_a_fragment_is_launched_every_inner_steps_and_lands_after_the_delay(schedule: Schedule) -> None:
    ledger = Ledger(schedule.num_fragments)
    last_step = schedule.first_step + 4 * schedule.inner_steps
    for step in range(1, last_step + 1):
        ledger.note(step, schedule.events(step))
    apart = schedule.inner_steps // schedule.num_fragments
    for fragment in range(schedule.num_fragments):
        launches = ledger.launches[fragment]
        assert launches[0] == schedule.first_step + (fragment + 1) * apart
        assert {b - a for a, b in pairwise(launches)} == {schedule.inner_steps}
        for number, (launched, landed) in enumerate(ledger.landings[fragment]):
            blocks = schedule.blocking_first and number == 0
            assert landed - launched == (0 if blocks else schedule.delay)


@given(schedules(), st.integers(1, 60))
def test_at_one_step_progress_is_taken_before_any_anchor_moves(schedule: Schedule, step: int) -> None:
    kinds = [isinstance(event, Launch) for event in schedule.events(step)]
    assert kinds == sorted(kinds, reverse=True)
