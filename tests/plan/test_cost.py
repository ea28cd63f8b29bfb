"""Closed forms against numbers that can be checked by hand, and the figures of the papers."""

import math

import pytest

from atoll.plan import cost

GBIT = 1e9 / 8
OPT, LARGE = 1.3157e9, 107e9  # parameters
OPT_STEP_S, LARGE_STEP_S = 1.372, 8.79
TOKENS = 32_768


def close(value: float) -> object:
    return pytest.approx(value, rel=0.005)


def full_s(num_parameters: float) -> float:
    return cost.full_sync_s(num_parameters, GBIT, num_islands=2)


@pytest.mark.parametrize(
    ("num_parameters", "step_s", "sync_s", "kappa", "tokens_per_s", "speedup"),
    [(OPT, OPT_STEP_S, 42.1, 30.7, 753.6, 31.7), (LARGE, LARGE_STEP_S, 3424, 389.5, 9.55, 390)],
)
def test_check_values_of_both_models(
    num_parameters: float, step_s: float, sync_s: float, kappa: float, tokens_per_s: float, speedup: float
) -> None:
    full = full_s(num_parameters)
    assert full == close(sync_s)
    assert full / step_s == close(kappa)
    assert TOKENS / cost.allreduce_step_s(step_s, full) == close(tokens_per_s)
    assert cost.speedup(full / step_s, compression=8, inner_steps=125) == close(speedup)


def test_without_compression_the_large_model_makes_1196_tokens_a_second() -> None:
    seconds = cost.round_s(125, LARGE_STEP_S, full_s(LARGE), overlapped=True)
    assert 125 * TOKENS / seconds == close(1196)


@pytest.mark.parametrize(("compression", "inner_steps"), [(1, 390), (8, 49), (16, 25)])
def test_inner_steps_that_hide_the_sync_of_the_large_model(compression: float, inner_steps: int) -> None:
    sync_s = cost.sync_s(full_s(LARGE), compression=compression)
    assert cost.smallest_inner_steps(sync_s, LARGE_STEP_S) == inner_steps
    assert cost.round_s(inner_steps, LARGE_STEP_S, sync_s, overlapped=True) == inner_steps * LARGE_STEP_S
    assert cost.round_s(inner_steps - 1, LARGE_STEP_S, sync_s, overlapped=True) == sync_s


@pytest.mark.parametrize(("compression", "mbit"), [(1, 3116), (8, 389), (16, 195)])
def test_bandwidth_that_hides_the_sync_of_the_large_model_at_125_steps(compression: float, mbit: float) -> None:
    speed = cost.hiding_bytes_per_s(LARGE * 4 / compression, 125, LARGE_STEP_S)
    assert speed * 8 / 1e6 == close(mbit)


def test_the_paper_s_357_times_is_a_kappa_of_356() -> None:
    assert cost.speedup(356, compression=8, inner_steps=125) == close(357)


@pytest.mark.parametrize(("sync_s", "percent"), [(103, 95.7), (382, 85.6), (469, 83.0)])
def test_utilisation_of_intellect_1_from_its_own_times(sync_s: float, percent: float) -> None:
    assert 100 * cost.utilisation(38 * 60, sync_s) == close(percent)


def test_opendiloco_computes_more_than_90_percent_on_its_slowest_link() -> None:
    """1.1 B in fp16, four islands, 127 Mbit/s, 67.5 minutes of compute a round."""
    sync_s = cost.full_sync_s(1.1e9, 127e6 / 8, num_islands=4, bytes_a_value=2)
    assert 0.90 <= cost.utilisation(67.5 * 60, sync_s) <= 0.955
    assert cost.utilisation(67.5 * 60, 300) == close(0.931)


@pytest.mark.parametrize("kappa", [0.1, 30.7, 390])
@pytest.mark.parametrize("overlapped", [True, False])
def test_speedup_is_the_ratio_of_the_rates(kappa: float, overlapped: bool) -> None:
    step_s, inner_steps, compression = 2.0, 125, 8
    seconds = cost.round_s(
        inner_steps, step_s, cost.sync_s(kappa * step_s, compression=compression), overlapped=overlapped
    )
    rates = inner_steps * cost.allreduce_step_s(step_s, kappa * step_s) / seconds
    assert cost.speedup(
        kappa, compression=compression, inner_steps=inner_steps, overlapped=overlapped
    ) == pytest.approx(rates)


def test_equal_kappa_gives_equal_speedups_on_a_small_machine() -> None:
    kappa = cost.full_sync_s(1e6, 4.1e6 / 8, num_islands=2) / 0.020
    assert kappa == close(390)


@pytest.mark.parametrize("target", [0.5, 0.8, 0.95, 0.99])
def test_bandwidth_and_inner_steps_for_a_target_reach_just_that(target: float) -> None:
    sent, step_s, inner_steps, overhead_s = 1e9, 0.5, 100, 0.1
    speed = cost.blocking_bytes_per_s(target, sent, inner_steps, step_s, overhead_s=overhead_s)
    assert cost.utilisation(inner_steps * step_s, sent / speed + overhead_s) == pytest.approx(target)
    enough = cost.inner_steps_for(target, 7.3, step_s)
    assert cost.utilisation(enough * step_s, 7.3) >= target
    assert enough == 1 or cost.utilisation((enough - 1) * step_s, 7.3) < target


def test_no_bandwidth_helps_against_an_overhead_longer_than_the_round() -> None:
    assert cost.hiding_bytes_per_s(1e9, 10, 0.1, overhead_s=1.5) == math.inf
    assert cost.blocking_bytes_per_s(0.9, 1e9, 10, 0.1, overhead_s=0.2) == math.inf


@pytest.mark.parametrize(("bits", "islands"), [(4, 4), (2, 8), (0.219, 73)])
def test_gathering_codes_beats_an_int8_ring_below_a_number_of_islands(bits: float, islands: int) -> None:
    """fp4, 2-bit statistical, and 64 of 4,096 values in 2 bits with 12-bit indices."""
    assert math.floor(cost.gather_wins_below(bits, 8)) == islands
    sent = {m: (bits * cost.gather_factor(m), 8 * cost.ring_factor(m)) for m in (islands - 1, islands + 1)}
    assert sent[islands - 1][0] < sent[islands - 1][1]
    assert sent[islands + 1][0] > sent[islands + 1][1]


def test_a_pipeline_of_many_microbatches_has_little_bubble() -> None:
    assert cost.pipeline_efficiency(1, 4) == 1
    assert cost.pipeline_efficiency(4, 1) == 0.25
    assert cost.pipeline_efficiency(8, 800) > 0.99


def test_encoding_ten_million_values_at_half_a_gigabyte_a_second_takes_80_ms() -> None:
    assert cost.encoding_s(10e6, 0.5e9) == pytest.approx(0.08)


def test_a_ring_of_four_waits_for_six_latencies() -> None:
    assert cost.ring_latency_s(4, 0.05) == pytest.approx(0.3)
