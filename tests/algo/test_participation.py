from __future__ import annotations

import pytest

from atoll.algo.participation import REPLICA_SCHEDULES, active_replicas, is_dropped

SHAPES = {
    "constant": [8, 8, 8, 8, 8, 8, 8, 8],
    "doubling": [4, 4, 4, 4, 8, 8, 8, 8],
    "halving": [8, 8, 8, 8, 4, 4, 4, 4],
    "ramp-up": [1, 2, 3, 4, 5, 6, 7, 8],
    "ramp-down": [8, 7, 6, 5, 4, 3, 2, 1],
}


def test_every_replica_schedule_has_a_shape_to_follow() -> None:
    assert set(SHAPES) == set(REPLICA_SCHEDULES)


@pytest.mark.parametrize("kind", SHAPES)
def test_replica_counts_follow_the_paper(kind: str) -> None:
    assert [active_replicas(kind, replicas=8, round=r, num_rounds=8) for r in range(1, 9)] == SHAPES[kind]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
@pytest.mark.parametrize("num_rounds", [0, 1, 2, 5, 13])
def test_there_is_always_a_replica_and_never_more_than_all(kind: str, replicas: int, num_rounds: int) -> None:
    for round in range(1, num_rounds + 3):
        assert 1 <= active_replicas(kind, replicas=replicas, round=round, num_rounds=num_rounds) <= replicas


def test_ramps_of_one_length_train_as_much_up_as_down() -> None:
    """Only the total matters, says the paper, so the two must have one total."""
    totals = [
        sum(active_replicas(kind, replicas=8, round=r, num_rounds=24) for r in range(1, 25))
        for kind in ("ramp-up", "ramp-down")
    ]
    assert totals[0] == totals[1]
    assert sum(SHAPES["doubling"]) == sum(SHAPES["halving"])


def drops(seed: int, probability: float = 0.5) -> list[list[bool]]:
    return [
        [is_dropped(r, round=t, replicas=4, probability=probability, seed=seed) for r in range(4)]
        for t in range(1, 201)
    ]


def test_dropped_contributions_are_the_same_wherever_they_are_asked_for() -> None:
    assert drops(seed=7) == drops(seed=7)
    assert drops(seed=7) != drops(seed=8)


def test_each_replica_is_dropped_about_as_often_as_asked_and_not_all_at_once() -> None:
    seen = drops(seed=0, probability=0.3)
    for replica in range(4):
        assert 0.2 < sum(row[replica] for row in seen) / 200 < 0.4
    assert len({tuple(row) for row in seen}) > 10


def test_nothing_is_dropped_at_probability_0() -> None:
    assert not any(any(row) for row in drops(seed=3, probability=0.0))


def test_the_largest_seed_of_a_run_can_be_used() -> None:
    is_dropped(0, round=10**6, replicas=2, probability=0.5, seed=2**32 - 1)
