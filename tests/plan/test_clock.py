"""Schedules on a clock, against the closed forms where these are exact."""

import numpy as np
import pytest

from atoll.algo.schedule import Apply, Launch, Schedule
from atoll.plan import cost
from atoll.plan.clock import run_schedule

SYNCS = np.array([0.0, 0.3, 1.0, 7.5, 40.0, 100.0, 333.0])


@pytest.mark.parametrize("inner_steps", [1, 7, 100])
def test_a_blocking_round_is_compute_and_then_sync(inner_steps: int) -> None:
    spent = run_schedule(Schedule(inner_steps), step_s=0.5, fragment_s=[SYNCS])
    assert spent.total_s == pytest.approx(inner_steps * 0.5 + SYNCS)


@pytest.mark.parametrize("inner_steps", [1, 7, 100])
@pytest.mark.parametrize("blocking_first", [True, False])
def test_a_delayed_round_is_the_longer_of_compute_and_sync(inner_steps: int, blocking_first: bool) -> None:
    schedule = Schedule(inner_steps, delay=inner_steps, blocking_first=blocking_first)
    spent = run_schedule(schedule, step_s=0.5, fragment_s=[SYNCS])
    expected = [cost.round_s(inner_steps, 0.5, sync, overlapped=True) for sync in SYNCS]
    assert spent.total_s == pytest.approx(np.array(expected), rel=0.01)


@pytest.mark.parametrize(("fragments", "delay"), [(4, 1), (10, 2), (10, 5), (25, 1)])
def test_streaming_stalls_by_what_a_fragment_takes_beyond_its_delay(fragments: int, delay: int) -> None:
    """Exact while a fragment lands before the next one is launched: at most H/P steps in flight."""
    schedule, step_s = Schedule(100, fragments, delay), 0.5
    each = SYNCS / fragments
    spent = run_schedule(schedule, step_s=step_s, fragment_s=[each] * fragments)
    stalls = fragments * np.maximum(0.0, each - delay * step_s)
    assert spent.exposed_s == pytest.approx(stalls, rel=0.01)


def test_no_schedule_outruns_the_link() -> None:
    for schedule in (Schedule(20), Schedule(20, delay=20), Schedule(20, 4, 5), Schedule(20, 20, 20)):
        pieces = [SYNCS / schedule.num_fragments] * schedule.num_fragments
        spent = run_schedule(schedule, step_s=0.5, fragment_s=pieces)
        assert (spent.total_s >= np.maximum(SYNCS, 10.0) - 1e-9).all()


def naive_total(schedule: Schedule, step_s: float, fragment_s: list[float], rounds: int) -> float:
    """Every step of a run in turn, from its first: the plain reading of a schedule, as the trainer drives it."""
    now, free = 0.0, 0.0
    flying: list[list[float]] = [[] for _ in fragment_s]
    marks = []
    for step in range(1, schedule.inner_steps * rounds + 1):
        now += step_s
        for event in schedule.events(step):
            if isinstance(event, Launch):
                free = max(free, now) + fragment_s[event.fragment]
                flying[event.fragment].append(free)
            if isinstance(event, Apply):
                now = max(now, flying[event.fragment].pop(0))
        marks.append(now)
    return (marks[-1] - marks[-1 - 4 * schedule.inner_steps]) / 4


@pytest.mark.parametrize("seed", range(20))
def test_the_clock_agrees_with_a_walk_over_every_step(seed: int) -> None:
    chance = np.random.default_rng(seed)
    fragments = int(chance.choice([1, 2, 3, 6]))
    inner_steps = fragments * int(chance.integers(1, 5))
    schedule = Schedule(inner_steps, fragments, int(chance.integers(0, inner_steps + 1)))
    pieces = chance.exponential(2.0, fragments)
    spent = run_schedule(schedule, step_s=1.0, fragment_s=[np.asarray(piece) for piece in pieces])
    assert float(spent.total_s) == pytest.approx(naive_total(schedule, 1.0, list(pieces), rounds=40), rel=1e-6)


def test_time_at_a_landing_is_seen_even_where_the_sync_is_hidden() -> None:
    spent = run_schedule(Schedule(10, 5, 1), step_s=1.0, fragment_s=[np.array(0.1)] * 5, landing_s=0.5)
    assert float(spent.exposed_s) == pytest.approx(0.5)
