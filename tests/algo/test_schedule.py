from __future__ import annotations

import pytest

from atoll.algo.schedule import Apply, Launch, Schedule
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
