"""Real gloo groups over loopback, held against all replicas in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comm import replica_work as work
from spawn import KILLED, run_replicas

from atoll.algo.fragments import Layout
from atoll.exchange import weighted_mean


def both(num_replicas: int, launch: Any, *args: Any) -> tuple[list[Any], list[Any]]:
    """What the replicas see over gloo, and what they see in one process."""
    return run_replicas(work.over_gloo, num_replicas, launch, *args), work.locally(num_replicas, launch, *args)


@pytest.mark.parametrize("weights", [[1], [1, 1], [3, 1], [0, 2], [1, 1, 1], [0.5, 0, 7], [1, 1, 1, 1], [5, 0, 2, 3]])
def test_gloo_and_one_process_agree_bit_for_bit(weights: list[float]) -> None:
    over_gloo, locally = both(len(weights), work.means_of_all_shapes, weights)
    for (means, traffic), (expected, local_traffic) in zip(over_gloo, locally, strict=True):
        assert means == expected
        assert traffic.payload_bytes == local_traffic.payload_bytes
        torch.testing.assert_close(traffic.gram, local_traffic.gram, rtol=1e-4, atol=1e-2)
        assert torch.equal(traffic.gram, over_gloo[0][1].gram)
    assert all(means == over_gloo[0][0] for means, _ in over_gloo)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("capacity", [1, 10, 100])
def test_every_element_is_averaged_once_for_any_bucket_capacity(num_replicas: int, capacity: int) -> None:
    layout = Layout(("a", "b", "c", "d"), ((6,), (6,), (12,), (2, 9)))
    expected = weighted_mean([work.contribution(r, 0, (42,)) for r in range(num_replicas)], [1] * num_replicas)
    for mean in run_replicas(work.over_gloo, num_replicas, work.means_of_buckets, layout, capacity):
        assert torch.equal(mean, expected)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_an_exchange_may_ask_several_times(num_replicas: int) -> None:
    over_gloo, locally = both(num_replicas, work.two_means_and_a_gather)
    assert over_gloo == locally
    assert all(means == over_gloo[0][0] for means, _ in over_gloo)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_bytes_on_the_wire_are_those_every_code_declares(num_replicas: int) -> None:
    over_gloo, locally = both(num_replicas, work.every_code, [(33, 17), (257,), (1,)])
    assert over_gloo == locally
    for codes in over_gloo:
        assert {name: sent for name, (_, _, sent) in codes.items()} == {
            name: declared for name, (_, declared, _) in codes.items()
        }


@pytest.mark.parametrize("num_bytes", [0, 1, 1000])
def test_payloads_come_in_replica_order(num_bytes: int) -> None:
    over_gloo, locally = both(3, work.one_gather, num_bytes)
    assert over_gloo == locally
    assert over_gloo[0][1] == 2 * num_bytes


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_nan_of_a_replica_that_does_not_count_stays_out(num_replicas: int) -> None:
    counted = [r for r in range(num_replicas) if r != 1]
    expected = weighted_mean([work.contribution(r, 0, (1000,)) for r in counted], [1] * len(counted))
    for (mean,) in run_replicas(work.over_gloo, num_replicas, work.means_beside_a_nan):
        assert torch.equal(mean, expected)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_round_nobody_counts_in_gives_nothing_and_disturbs_no_other(num_replicas: int) -> None:
    for before, payload_bytes, after, void in run_replicas(
        work.over_gloo, num_replicas, work.a_void_round_between_two_others
    ):
        assert before == after and len(before) == 10
        assert void == []
        assert payload_bytes < 10 * 4000  # what was on its way when the ballots came


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_rounds_that_overlap_do_not_mix(num_replicas: int) -> None:
    over_gloo, locally = both(num_replicas, work.rounds_that_overlap)
    assert over_gloo == locally


def test_a_launch_may_hold_nothing() -> None:
    for ballots_arrived, results, traffic in run_replicas(work.over_gloo, 2, work.nothing_at_all):
        assert ballots_arrived and results == []
        assert traffic.payload_bytes == 0
        assert torch.equal(traffic.gram, torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_traffic_may_be_asked_before_the_results(num_replicas: int) -> None:
    seen = run_replicas(work.over_gloo, num_replicas, work.traffic_before_results)
    assert all(digests == seen[0][1] and len(digests) == 7 for _, digests in seen)
    assert sum(payload_bytes for payload_bytes, _ in seen) == 7 * 2000 * 2 * (num_replicas - 1)


def test_an_exchange_may_ask_nothing() -> None:
    assert run_replicas(work.over_gloo, 2, work.constants) == [list(range(9))] * 2


def test_exchanges_are_made_when_their_turn_comes() -> None:
    expected = ["made 0", "made 1", "launched", "made 2", "got 0", "made 3", "got 1", "made 4", "got 2", "made 5"]
    for order in run_replicas(work.order_of_events, 2):
        assert order == [*expected, "got 3", "got 4", "got 5"]


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_killed_peer_is_an_error_for_the_others_not_a_hang(num_replicas: int) -> None:
    *told, killed = run_replicas(work.lose_a_peer, num_replicas, 3.0)
    assert killed == KILLED
    for message in told:
        assert "timeout_s=3" in message and "bucket" in message
        assert message.count("\n") < 3


def test_an_absent_peer_is_an_error_after_the_timeout() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told, absent = run_replicas(work.wait_for_an_absent_peer, 2, store.port, 0.3)
    assert absent == "absent"
    assert "replica 0" in told and "ballots" in told and "replica 1" in told and "timeout_s=0.3" in told


@pytest.mark.parametrize("weights", [[1], [1, 1], [3, 1], [0, 2], [1, 1, 1], [2, 0, 1, 5]])
def test_codes_and_what_they_leave_owed_are_the_same_over_gloo_and_in_one_process(weights: list[float]) -> None:
    names = ["int8", "int4", "fp4", "stat2", "topk+stat2", "lowrank", "lowrank+int4"]
    over_gloo, locally = both(len(weights), work.codes_with_feedback, names, weights)
    assert over_gloo == locally
    for replica, codes in enumerate(over_gloo):
        assert [mean for mean, _ in codes] == [mean for mean, _ in over_gloo[0]], replica
        assert [state.get("warm_start") for _, state in codes] == [state.get("warm_start") for _, state in over_gloo[0]]


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_the_background_and_the_launcher_may_ask_for_the_ballots_at_the_same_time(num_replicas: int) -> None:
    mean_replica = (num_replicas - 1) / 2
    right = [(num_replicas, 4 * (mean_replica + number) + 6) for number in range(60)]
    for seen in run_replicas(work.background_rounds, num_replicas, 60):
        assert [count for count, _ in seen] == [count for count, _ in right]
        assert [total for _, total in seen] == pytest.approx([total for _, total in right])
