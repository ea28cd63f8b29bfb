from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.algo.adaptive import (
    Controller,
    Decision,
    Observation,
    Probe,
    effective_rank,
    energy_of,
    merge_probes,
    pooled,
    probe,
)
from atoll.errors import ConfigError

CALM = Observation(effective_rank=64.0, sync_s=1.0, step_s=1.0, residual_share=0.0)
CONTROLLER = Controller(first_rank=64, first_inner_steps=125)


def rounds(number: int, **changes: float) -> list[Observation]:
    return [replace(CALM, **changes)] * number


def with_singular_values(values: list[float], rows: int, columns: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(side, len(values), generator=generator).to(torch.float64) for side in (rows, columns))
    left, right = torch.linalg.qr(left).Q, torch.linalg.qr(right).Q
    return ((left * torch.tensor(values, dtype=torch.float64)) @ right.T).to(torch.float32)


# --- the effective rank


@pytest.mark.parametrize(("energy", "rank"), [(0.5, 1), (0.9, 2), (0.95, 3), (0.99, 4)])
def test_the_effective_rank_is_the_singular_values_that_hold_the_energy(energy: float, rank: int) -> None:
    """Energies 64, 27, 7, 1.5, 0.5 of 100."""
    values = [math.sqrt(share) for share in (64, 27, 7, 1.5, 0.5)]
    matrix = with_singular_values(values, 60, 40)
    assert effective_rank(matrix, rank=8, energy=energy) == rank
    assert effective_rank(matrix.T, rank=8, energy=energy) == rank


@pytest.mark.parametrize("decay", [0.7, 0.9, 0.95])
def test_the_probe_finds_what_a_whole_decomposition_finds(decay: float) -> None:
    """To one, where neighbours are close."""
    matrix = with_singular_values([decay**k for k in range(80)], 200, 120)
    held = torch.linalg.svdvals(matrix.to(torch.float64)).square().cumsum(0)
    exact = int((held < 0.95 * held[-1]).sum()) + 1
    assert 0 <= effective_rank(matrix, rank=48, energy=0.95) - exact <= 1


def test_more_than_the_probed_rank_counts_as_the_probed_rank() -> None:
    noise = torch.randn(100, 100, generator=torch.Generator().manual_seed(0))
    assert effective_rank(noise, rank=16) == 16


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e15])
def test_the_size_of_a_pseudo_gradient_does_not_matter(size: float) -> None:
    matrix = with_singular_values([3.0, 2.0, 1.0], 30, 20)
    assert effective_rank(matrix * size, rank=5, energy=0.9) == effective_rank(matrix, rank=5, energy=0.9) == 2


@pytest.mark.parametrize("matrix", [torch.zeros(5, 7), torch.empty(0, 3), torch.empty(3, 0)])
def test_nothing_has_no_rank(matrix: Tensor) -> None:
    assert effective_rank(matrix, rank=2) == 0


def test_bfloat16_and_turned_matrices_are_probed_as_they_are_and_left_alone() -> None:
    matrix = with_singular_values([4.0, 1.0, 1.0], 12, 9).to(torch.bfloat16).t()
    before = matrix.clone()
    assert effective_rank(matrix, rank=4, energy=0.8) == 1
    assert torch.equal(matrix, before)


def test_the_same_seed_gives_the_same_rank_and_the_global_generator_is_left_alone() -> None:
    noise = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) @ torch.diag(0.9 ** torch.arange(64.0))
    state = torch.get_rng_state()
    found = {effective_rank(noise, rank=32, energy=0.9, seed=5) for _ in range(3)}
    assert len(found) == 1 and torch.equal(torch.get_rng_state(), state)


def test_the_rank_is_that_of_the_matrix_not_of_a_subspace_in_use() -> None:
    """A controller that looked only at 4 directions of a matrix that grew to 12 would never learn of it."""
    narrow, wide = with_singular_values([1.0] * 4, 50, 50), with_singular_values([1.0] * 12, 50, 50)
    assert (effective_rank(narrow, rank=16), effective_rank(wide, rank=16)) == (4, 12)


def test_matrices_count_by_their_energy() -> None:
    thin, wide = with_singular_values([3.0], 30, 30), with_singular_values([1.0] * 3, 30, 30)
    found = probe([thin, wide, torch.zeros(30, 30)], rank=6)
    assert found.effective_rank == pytest.approx((9 * 1 + 3 * 3) / 12, abs=1e-4)
    assert found.energy == pytest.approx(12, rel=1e-4)


def test_a_matrix_smaller_than_the_rank_counts_by_the_share_of_its_directions() -> None:
    assert probe([torch.eye(2)], rank=8).effective_rank == 8.0
    assert probe([torch.tensor([[1.0, 0.0], [0.0, 0.0]])], rank=8).effective_rank == 4.0


def test_a_round_without_progress_is_no_reason_to_send_less() -> None:
    assert probe([torch.zeros(4, 4)], rank=8).effective_rank == 8.0
    assert probe([], rank=8) == Probe(8.0, 0.0)


def test_probes_of_parts_make_the_probe_of_all() -> None:
    matrices = [with_singular_values([2.0**-k for k in range(n)], 20, 30, seed=n) for n in (2, 5, 9)]
    parts = [probe([matrix], rank=8) for matrix in matrices]
    whole = probe(matrices, rank=8)
    assert merge_probes(parts, rank=8).effective_rank == pytest.approx(whole.effective_rank)
    assert energy_of(matrices) == pytest.approx(whole.energy)


# --- the decision


def test_the_first_rounds_have_the_first_values() -> None:
    first = Decision(64, 125)
    assert CONTROLLER.replay([]) == [first, first]
    assert CONTROLLER.decide([]) == first
    assert CONTROLLER.replay(rounds(4, effective_rank=16.0)) == [first] * 6, "there is no mean over 5 rounds yet"


def test_rank_and_round_length_follow_the_effective_rank() -> None:
    decision = CONTROLLER.decide(rounds(20, effective_rank=48.0))
    assert decision == Decision(48, 94, 0.75)  # 93.75 steps, rounded up


def test_the_effective_rank_is_averaged_over_the_window() -> None:
    controller = replace(CONTROLLER, window=4, max_fall=0.9)
    history = rounds(3, effective_rank=64.0) + rounds(1, effective_rank=32.0)
    assert controller.decide(history).alpha == (3 * 64 + 32) / 4 / 64
    assert controller.decide(rounds(9, effective_rank=8.0) + history).alpha == (3 * 64 + 32) / 4 / 64


def test_it_falls_by_a_fifth_a_round_at_most_and_to_a_quarter_at_least() -> None:
    alphas = [decision.alpha for decision in CONTROLLER.replay(rounds(30, effective_rank=1.0))]
    assert alphas[:7] == [1.0] * 6 + [0.8] and alphas[-1] == 0.25
    assert all(later >= earlier * 0.8 - 1e-12 for earlier, later in pairwise(alphas))
    assert CONTROLLER.decide(rounds(30, effective_rank=1.0)) == Decision(16, 32, 0.25)


def test_a_small_rank_can_fall_too() -> None:
    """A fifth of 4 is less than 1: counted in whole ranks it would be stuck."""
    assert Controller(first_rank=4, first_inner_steps=10).decide(rounds(30, effective_rank=1.0)).rank == 1


def test_it_rises_with_the_effective_rank() -> None:
    history = rounds(20, effective_rank=16.0) + rounds(5, effective_rank=64.0)
    assert CONTROLLER.decide(history) == Decision(64, 125)


def test_it_grows_while_error_feedback_owes_too_much() -> None:
    """At 0.95, more than 5 % of the energy: it grows round by round, whatever the effective rank says."""
    fallen = rounds(30, effective_rank=1.0)
    assert CONTROLLER.decide([*fallen, replace(fallen[0], residual_share=0.04)]).alpha == 0.25
    alphas = [d.alpha for d in CONTROLLER.replay(fallen + rounds(10, effective_rank=1.0, residual_share=0.06))[-10:]]
    assert alphas[:2] == [0.25 / 0.8, 0.25 / 0.8 / 0.8] and alphas[-1] == 1.0


def test_it_never_exceeds_the_first_values() -> None:
    assert CONTROLLER.decide(rounds(9, effective_rank=640.0, residual_share=1.0)) == Decision(64, 125)


def test_a_round_is_never_too_short_to_hide_its_sync() -> None:
    """9.1 s of sync are 91 steps of 0.1 s, and 1.1 times that are 100.1."""
    history = rounds(30, effective_rank=1.0, sync_s=9.1, step_s=0.1)
    assert CONTROLLER.decide(history) == Decision(16, 101, 0.25)
    assert CONTROLLER.decide(rounds(1, sync_s=20.0, step_s=0.1)).inner_steps == 220, "also longer than the first"


def test_a_lone_stall_does_not_stretch_a_round_and_a_slower_link_does() -> None:
    calm, stalled = rounds(4), rounds(1, sync_s=3000.0)
    assert CONTROLLER.decide(calm + stalled).inner_steps == 125
    assert CONTROLLER.decide(calm + stalled * 3).inner_steps == 3300


def test_round_lengths_fit_the_schedule() -> None:
    controller = replace(CONTROLLER, first_inner_steps=120, multiple_of=8, least_inner_steps=41)
    assert controller.decide(rounds(9, effective_rank=55.0)).inner_steps % 8 == 0
    assert controller.decide(rounds(30, effective_rank=1.0)).inner_steps == 48
    assert replace(CONTROLLER, multiple_of=8).first.inner_steps == 128


observations = st.builds(
    Observation,
    effective_rank=st.floats(0, 64),
    sync_s=st.floats(0, 1e4),
    step_s=st.floats(1e-3, 10),
    residual_share=st.floats(0, 1),
)


@given(st.lists(observations, max_size=30), st.integers(1, 6), st.integers(1, 4))
def test_the_laws_of_a_decision_hold_for_any_history(history: list[Observation], window: int, multiple_of: int) -> None:
    controller = Controller(first_rank=64, first_inner_steps=120, window=window, multiple_of=multiple_of)
    decisions = controller.replay(history)
    assert len(decisions) == len(history) + 2
    for number, (before, after) in enumerate(pairwise(decisions[1:])):
        recent = history[max(0, number + 1 - window) : number + 1]
        assert 16 <= after.rank <= 64 and after.alpha >= before.alpha * (1 - 0.2) - 1e-12
        steps = sorted(seen.sync_s / seen.step_s for seen in recent)[len(recent) // 2]
        assert after.inner_steps % multiple_of == 0 and after.inner_steps >= 1.1 * steps - 1e-3
        assert after.inner_steps * 64 >= after.rank * 120 - 120, "H and rank follow one alpha"
        assert controller.following(before, recent) == after, "all that a decision needs is the last and the window"


@given(st.lists(observations, max_size=20))
def test_a_decision_is_computed_again_from_the_log(history: list[Observation]) -> None:
    logged = [Observation.unpack(seen.pack()) for seen in history]
    decisions = CONTROLLER.replay(logged)
    assert decisions == CONTROLLER.replay(history)
    assert decisions[1:] == [CONTROLLER.decide(history[:count]) for count in range(len(history) + 1)]


# --- what all replicas saw


def test_all_replicas_see_means_and_maxima_of_those_who_contributed() -> None:
    seen = [Observation(10, 3, 1, 0.1), Observation(40, 2, 4, 0.4), Observation(math.nan, math.inf, math.nan, math.nan)]
    assert pooled(seen, [2.0, 1.0, 0.0]) == Observation(20.0, 3, 4, pytest.approx(0.2))


def test_one_contributor_is_seen_as_it_is() -> None:
    assert pooled([CALM, replace(CALM, sync_s=9.0)], [1.0, 0.0]) == CALM


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"first_rank": 0}, ["first_rank=0", "1"]),
        ({"first_inner_steps": -1}, ["first_inner_steps=-1"]),
        ({"window": 0}, ["window=0"]),
        ({"floor": 0.0}, ["floor=0.0", "0.25"]),
        ({"max_fall": 1.0}, ["max_fall=1.0", "0.2"]),
        ({"energy": 1.0}, ["energy=1.0", "0.95"]),
        ({"headroom": 0.9}, ["headroom=0.9", "1.1"]),
        ({"multiple_of": 0}, ["multiple_of=0"]),
    ],
)
def test_a_controller_that_cannot_be_is_refused(settings: dict[str, float], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(CONTROLLER, **settings)
    assert all(word in str(caught.value) for word in words)
