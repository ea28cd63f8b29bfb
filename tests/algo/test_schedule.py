from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.algo.schedule import Apply, Event, Launch, Schedule
from atoll.errors import ConfigError


def launch_steps(schedule: Schedule, fragment: int, last_step: int) -> list[int]:
    return [step for step in range(1, last_step + 1) if Launch(fragment) in schedule.events(step)]


@pytest.mark.parametrize("inner_steps", [1, 2, 3, 7, 500])
def test_exactly_h_steps_lie_between_syncs_from_the_first_round_on(inner_steps: int) -> None:
    syncs = launch_steps(Schedule(inner_steps), 0, 4 * inner_steps)
    assert syncs == [inner_steps, 2 * inner_steps, 3 * inner_steps, 4 * inner_steps]
    assert all(Schedule(inner_steps).events(step) == (Launch(0), Apply(0)) for step in syncs)


def test_rounds_begin_after_pretraining() -> None:
    schedule = Schedule(3, first_step=5)
    assert launch_steps(schedule, 0, 14) == [8, 11, 14]
    assert schedule.finish(5) == () and schedule.finish(4) == ()
    assert schedule.finish(6) == (Launch(0), Apply(0))


def test_streaming_staggers_fragments() -> None:
    schedule = Schedule(6, num_fragments=3, delay=1)
    assert [launch_steps(schedule, p, 14) for p in range(3)] == [[2, 8, 14], [4, 10], [6, 12]]
    assert schedule.events(5) == (Apply(1),)


def test_under_one_round_of_delay_a_round_is_launched_before_the_last_one_lands() -> None:
    schedule = Schedule(4, delay=4)
    assert schedule.events(4) == (Launch(0),)
    assert schedule.events(8) == (Launch(0), Apply(0))
    assert schedule.finish(8) == (Apply(0),)
    assert schedule.finish(9) == (Launch(0), Apply(0), Apply(0))


def test_a_first_round_that_blocks_lands_at_once_and_only_the_first() -> None:
    schedule = Schedule(4, delay=4, blocking_first=True)
    assert [schedule.events(step) for step in (4, 8, 12)] == [
        (Launch(0), Apply(0)),
        (Launch(0),),
        (Launch(0), Apply(0)),
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"inner_steps": 0}, ["inner_steps=0", "Use 1"]),
        ({"inner_steps": -3}, ["inner_steps=-3", "Use 1"]),
        ({"inner_steps": 500, "num_fragments": 7}, ["500", "fragments=7", "504", "497"]),
        ({"inner_steps": 2, "num_fragments": 3}, ["fragments=3", "inner_steps=3"]),
        ({"inner_steps": 4, "num_fragments": 0}, ["fragments=0", "Use 1"]),
        ({"inner_steps": 4, "delay": 5}, ["delay=5", "Use at most 4"]),
        ({"inner_steps": 4, "delay": -1}, ["delay=-1"]),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_with_the_way_out(settings: dict[str, int], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Schedule(**settings)
    message = str(caught.value)
    assert all(word in message for word in words) and len(message.splitlines()) <= 3


# --- rounds of changing length


def happens(schedule: Schedule, steps: range) -> dict[int, tuple[Event, ...]]:
    return {step: events for step in steps if (events := schedule.events(step))}


def test_what_flies_when_the_length_changes_lands_at_the_next_boundary() -> None:
    schedule = Schedule(4, delay=4, blocking_first=True).continue_with(12, 2).continue_with(16, 5)
    both = (Launch(0), Apply(0))
    assert happens(schedule, range(1, 24)) == {4: both, 8: (Launch(0),), 12: both, 14: both, 16: both, 21: both}
    assert schedule.inner_steps == schedule.delay == 5


def test_the_first_round_still_blocks_when_the_length_changes_after_it() -> None:
    schedule = Schedule(4, delay=4, blocking_first=True).continue_with(4, 3)
    assert happens(schedule, range(1, 11)) == {4: (Launch(0), Apply(0)), 7: (Launch(0),), 10: (Launch(0), Apply(0))}


def test_a_length_chosen_before_any_round_is_that_of_a_schedule_made_so() -> None:
    assert Schedule(4, delay=4, first_step=3).continue_with(3, 6) == Schedule(6, delay=6, first_step=3)


def test_the_same_length_changes_nothing() -> None:
    schedule = Schedule(4, num_fragments=2, delay=1)
    assert schedule.continue_with(8, 4) is schedule


def test_fragments_are_staggered_over_rounds_of_their_length() -> None:
    schedule = Schedule(6, num_fragments=2, delay=2).continue_with(6, 4)
    assert [launch_steps(schedule, p, 14) for p in range(2)] == [[3, 8, 12], [6, 10, 14]]
    assert [step for step in range(1, 15) if Apply(1) in schedule.events(step)] == [8, 12]


def test_rounds_are_numbered_over_changes_of_length() -> None:
    schedule = Schedule(3, first_step=2).continue_with(8, 2).continue_with(12, 5)
    assert [schedule.round_of(step) for step in range(1, 19)] == [0, 0, *(1,) * 3, *(2,) * 3, 3, 3, 4, 4, *(5,) * 5, 6]
    assert [schedule.boundary_after(step) for step in (0, 2, 4, 5, 8, 11, 12)] == [2, 5, 5, 8, 10, 12, 17]


@pytest.mark.parametrize(
    ("schedule", "step", "inner_steps", "words"),
    [
        (Schedule(4), 6, 8, ["step=6", "step=4 or 8"]),
        (Schedule(4), 4, 0, ["inner_steps=0", "Use 1"]),
        (Schedule(4, first_step=3), 2, 8, ["step=2", "step=3 or 7"]),
        (Schedule(6, num_fragments=3), 6, 7, ["inner_steps=7", "9", "or 6"]),
        (Schedule(8, num_fragments=2, delay=4), 8, 4, ["inner_steps=4", "delay=4", "Use 6"]),
        (Schedule(4).continue_with(8, 3), 4, 2, ["step=4", "step=8 or 11"]),
    ],
)
def test_a_change_that_cannot_be_is_refused_with_the_way_out(
    schedule: Schedule, step: int, inner_steps: int, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        schedule.continue_with(step, inner_steps)
    assert all(word in str(caught.value) for word in words)


@st.composite
def changing(draw: st.DrawFn) -> tuple[Schedule, Schedule, int | None]:
    """A schedule, the same with other lengths from later on, and the step of the first change."""
    num_fragments = draw(st.integers(1, 3))
    lengths = [num_fragments * draw(st.integers(1, 4)) for _ in range(draw(st.integers(2, 4)))]
    whole = draw(st.booleans())
    schedule = before = Schedule(
        lengths[0],
        num_fragments=num_fragments,
        delay=lengths[0] if whole else draw(st.integers(0, min(lengths) - 1)),
        blocking_first=draw(st.booleans()),
        first_step=draw(st.integers(0, 5)),
    )
    first_change = None
    for length in lengths[1:]:
        step = schedule.first_step + draw(st.integers(0, 3)) * schedule.inner_steps
        schedule = schedule.continue_with(step, length)
        first_change = step if first_change is None and schedule is not before else first_change
    return before, schedule, first_change


@given(changing(), st.integers(0, 60))
def test_every_launch_lands_once_in_order_whenever_rounds_change_their_length(
    drawn: tuple[Schedule, Schedule, int | None], last_step: int
) -> None:
    _, schedule, _ = drawn
    for fragment in range(schedule.num_fragments):
        launched, landed = [], []
        for step in range(1, last_step + 1):
            launched += [step] * schedule.events(step).count(Launch(fragment))
            landed += [step] * schedule.events(step).count(Apply(fragment))
            assert schedule.num_in_flight(fragment, step) == len(launched) - len(landed) >= 0
        for number, (taken, lands) in enumerate(zip(launched, landed, strict=False)):
            if schedule.blocking_first and number == 0:
                assert lands == taken
            elif schedule.delay == schedule.inner_steps:
                assert lands == launched[number + 1]
            else:
                assert lands == taken + schedule.delay
        ends = schedule.finish(last_step)
        assert len(landed) + ends.count(Apply(fragment)) == len(launched) + ends.count(Launch(fragment))


@given(changing(), st.integers(1, 40))
def test_a_change_of_length_does_not_touch_what_was_before_it(
    drawn: tuple[Schedule, Schedule, int | None], step: int
) -> None:
    before, after, first_change = drawn
    if first_change is None or before.first_step != first_change >= step:
        assert before.events(step) == after.events(step)
        assert before.round_of(step) == after.round_of(step)


@given(changing())
def test_boundaries_are_where_the_last_fragment_is_launched(drawn: tuple[Schedule, Schedule, int | None]) -> None:
    _, schedule, _ = drawn
    begun = schedule.boundary_after(-1)
    last = schedule.num_fragments - 1
    for number, (start, end) in enumerate(pairwise([begun, *launch_steps(schedule, last, 60)])):
        assert schedule.boundary_after(start) == end
        assert {schedule.round_of(step) for step in range(start + 1, end + 1)} == {number + 1}
