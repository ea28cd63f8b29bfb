from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.comm.local import drive_together
from atoll.compress import IDENTITY
from atoll.compress.codecs import Blocks, Int4
from atoll.compress.lowrank import (
    WARM_START,
    LowRank,
    exact_matmul,
    first_directions,
    largest_rank,
    orthonormal_rows,
    resize_state,
)
from atoll.compress.quantize import Quantized
from atoll.exchange import State

INT4 = Quantized(Blocks(Int4(), 128))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def low_rank(rank: int, inner: object = IDENTITY, *, saving: float = 2.0) -> LowRank:
    return LowRank(rank, inner, IDENTITY, saving)


def rounds(compressor: LowRank, tensors: list[Tensor], number: int) -> tuple[Tensor, State]:
    """The mean of the last of some rounds of the same contributions, and the state after it."""
    states = [compressor.init(t.shape) for t in tensors]
    results: list[tuple[Tensor, State]] = []
    for _ in range(number):
        exchanges = [compressor.average(t, s) for t, s in zip(tensors, states, strict=True)]
        results = drive_together(exchanges, [1.0] * len(tensors))
        states = [state for _, state in results]
    return results[0]


# --- arithmetic that comes out the same everywhere


@pytest.mark.slow
def test_other_kernels_and_other_threads_give_the_same_bits() -> None:
    """And a plain product does not, or this would show nothing."""

    def digests(threads: int, **environment: str) -> list[str]:
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, Path(__file__).parent / "bits_elsewhere.py", str(threads)],
            env=os.environ | {"PYTHONPATH": str(root)} | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout.split()

    here = digests(1)
    plain = slice(2, None, 3)
    others = [
        digests(2, OMP_NUM_THREADS="2"),
        digests(1, ATEN_CPU_CAPABILITY="default"),
        digests(1, MKL_ENABLE_INSTRUCTIONS="SSE4_2", MKL_CBWR="COMPATIBLE"),
    ]
    for there in others:
        assert [*there[0::3], *there[1::3]] == [*here[0::3], *here[1::3]]
    assert any(there[plain] != here[plain] for there in others)


@pytest.mark.parametrize(("n", "k", "m"), [(1, 1, 1), (5, 3, 7), (100, 64, 90), (700, 2048, 300), (3, 1, 600_000)])
def test_an_exact_product_is_as_precise_as_fp32(n: int, k: int, m: int) -> None:
    left, right = noise(n, k), noise(k, m, seed=1)
    exact = left.double() @ right.double()
    sizes = left.abs().double() @ right.abs().double()
    assert ((exact_matmul(left, right) - exact).abs() <= 2**-20 * sizes + 1e-5 * exact.abs().max() * 2**-4).all()


@pytest.mark.parametrize("length", [1, 100, 5000])
def test_the_order_of_a_sum_does_not_matter_to_an_exact_product(length: int) -> None:
    left, right = noise(20, length), noise(length, 30, seed=1)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(2))
    product = exact_matmul(left, right)
    assert torch.equal(product, exact_matmul(left[:, order], right[order]))
    assert length == 1 or not torch.equal(left @ right, left[:, order] @ right[order])


def test_an_exact_product_of_extremes_is_finite() -> None:
    huge, tiny = torch.full((3, 4), 1e30), torch.full((4, 5), 1e-38)
    torch.testing.assert_close(exact_matmul(huge, tiny), torch.full((3, 5), 4e-8))
    assert exact_matmul(torch.zeros(3, 4), huge.T).tolist() == [[0.0] * 3] * 3


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 5))
def test_rows_become_orthonormal_or_zero(rank: int, length: int, seed: int) -> None:
    rows = noise(rank, length, seed=seed)
    basis = orthonormal_rows(rows).double()
    gram = basis @ basis.T
    kept = gram.diagonal() > 0.5
    assert kept.sum() == min(rank, length)
    torch.testing.assert_close(gram, torch.diag(kept.double()), rtol=0, atol=2e-6)
    spanned = rows.double() @ basis.T @ basis
    torch.testing.assert_close(spanned, rows.double(), rtol=0, atol=2e-4 * rows.abs().max().item())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_dependent_rows_become_zero_and_the_others_stay_orthonormal(scale: float) -> None:
    rows = noise(6, 50)
    rows[2] = 3 * rows[0] - rows[1]
    rows[4] = 0
    basis = orthonormal_rows(rows * scale).double()
    kept = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(basis @ basis.T, torch.diag(kept), rtol=0, atol=2e-6)


def test_badly_conditioned_rows_become_orthonormal() -> None:
    rows = noise(20, 20) @ (noise(20, 400, seed=1) * torch.logspace(0, -3, 20)[:, None])
    basis = orthonormal_rows(rows).double()
    torch.testing.assert_close(basis @ basis.T, torch.eye(20, dtype=torch.float64), rtol=0, atol=2e-6)


# --- the compressor


@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (40, 40), (1, 9), (9, 1), (1, 1)])
def test_full_rank_is_the_exact_mean(shape: tuple[int, int]) -> None:
    tensors = [noise(*shape, seed=i) for i in range(3)]
    compressor = low_rank(min(shape), saving=0.0)
    assert compressor.factors(shape)
    mean, _ = rounds(compressor, tensors, 1)
    torch.testing.assert_close(mean, torch.stack(tensors).mean(0), rtol=0, atol=2e-5)


def test_a_mean_of_that_rank_travels_whole() -> None:
    tensors = [noise(60, 3) @ noise(3, 80, seed=1), noise(60, 2, seed=2) @ noise(2, 80, seed=3)]
    mean, _ = rounds(low_rank(5), tensors, 1)
    torch.testing.assert_close(mean, (tensors[0] + tensors[1]) / 2, rtol=0, atol=2e-5)


def test_the_warm_start_finds_the_largest_singular_values() -> None:
    """Rounds are steps of a power iteration: from a random start to the best approximation of that rank."""
    left, right = torch.linalg.qr(noise(60, 40)).Q, torch.linalg.qr(noise(80, 40, seed=1)).Q
    matrix = left @ torch.diag(0.7 ** torch.arange(40.0)) @ right.T
    best = (0.7 ** torch.arange(4.0, 40.0)).square().sum().sqrt()
    errors = [(rounds(low_rank(4), [matrix], number)[0] - matrix).norm() / best for number in (1, 2, 8)]
    assert errors[0] > 1.05 and errors[1] < errors[0]
    assert 1.0 - 1e-4 <= errors[2] < 1.001


def test_the_warm_start_is_the_same_on_all_replicas_and_moves_with_every_round() -> None:
    compressor = low_rank(3, INT4)
    states = [compressor.init((40, 50)) for _ in range(3)]
    exchanges = [compressor.average(noise(40, 50, seed=i), s) for i, s in enumerate(states)]
    results = drive_together(exchanges, [1.0, 0.0, 2.0])
    starts = [state["warm_start"] for _, state in results]
    assert all(torch.equal(start, starts[0]) for start in starts) and starts[0].shape == (3, 50)
    assert not torch.equal(starts[0], states[0]["warm_start"])


def test_a_direction_lost_to_a_zero_round_is_found_again() -> None:
    compressor = low_rank(3)
    _, state = rounds(compressor, [torch.zeros(40, 50)], 2)
    assert torch.equal(state["warm_start"], torch.zeros(3, 50))
    matrix = noise(40, 2) @ noise(2, 50, seed=1)
    mean, _ = drive_together([compressor.average(matrix, state)], [1.0])[0]
    torch.testing.assert_close(mean, matrix, rtol=0, atol=1e-5)


@pytest.mark.parametrize("other", [2, 7])
def test_a_warm_start_of_another_rank_is_taken_over(other: int) -> None:
    """The rank may change from round to round."""
    matrix = noise(60, 2) @ noise(2, 80, seed=1)
    _, state = rounds(low_rank(other), [matrix], 3)
    compressor = low_rank(4)
    mean, after = drive_together([compressor.average(matrix, state)], [1.0])[0]
    torch.testing.assert_close(mean, matrix, rtol=0, atol=2e-5)
    assert after["warm_start"].shape == (4, 80)


@pytest.mark.parametrize("shape", [(), (7,), (0, 5), (2, 3, 4), (6, 6), (64, 4)])
def test_what_is_no_large_matrix_goes_by_the_fallback(shape: tuple[int, ...]) -> None:
    compressor = low_rank(4)
    assert not compressor.factors(shape) and compressor.init(shape) == {}
    tensors = [noise(*shape), noise(*shape, seed=1)]
    mean, state = drive_together([compressor.average(t, {}) for t in tensors], [1.0, 1.0])[0]
    assert torch.equal(mean, (tensors[0] + tensors[1]) / 2) and state == {}
    assert compressor.payload_bytes(shape) == IDENTITY.payload_bytes(shape)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300))
def test_the_largest_rank_is_the_last_that_is_factored(rows: int, columns: int) -> None:
    rank = largest_rank((rows, columns))
    assert rank == 0 or low_rank(rank).factors((rows, columns))
    assert not low_rank(rank + 1).factors((rows, columns))
    assert rank < min(rows, columns)


def test_a_factored_matrix_sends_less_than_half() -> None:
    for shape in ((100, 300), (512, 512)):
        compressor = low_rank(largest_rank(shape))
        assert compressor.payload_bytes(shape) < IDENTITY.payload_bytes(shape) / 2


def test_first_directions_are_the_same_for_the_same_shape_and_begin_alike_for_every_rank() -> None:
    assert torch.equal(first_directions(3, 40), first_directions(3, 40))
    assert torch.equal(first_directions(2, 40), first_directions(3, 40)[:2])
    assert not torch.equal(first_directions(3, 40)[:, :39], first_directions(3, 39))


@pytest.mark.parametrize("inner", [IDENTITY, INT4], ids=["fp32", "int4"])
def test_what_a_replica_owes_is_its_matrix_less_what_it_sent(inner: object) -> None:
    compressor = low_rank(3, inner)
    tensors = [noise(40, 50, seed=i) for i in range(2)]
    owed = [torch.full((40, 50), torch.nan) for _ in tensors]
    exchanges = [
        compressor.average(t, compressor.init(t.shape), owed=out) for t, out in zip(tensors, owed, strict=True)
    ]
    mean = drive_together(exchanges, [1.0, 1.0])[0][0]
    torch.testing.assert_close(mean + (owed[0] + owed[1]) / 2, (tensors[0] + tensors[1]) / 2, rtol=0, atol=2e-6)
    assert all(0.1 < out.norm() / t.norm() < 1.1 for out, t in zip(owed, tensors, strict=True))


def test_a_state_of_another_rank_keeps_its_first_directions_and_gets_the_next_it_might_have_begun_with() -> None:
    owed = torch.ones(9, 20)
    state = {WARM_START: torch.randn(3, 20), "own.residual": owed}
    fresh = first_directions(5, 20)
    for rank in (1, 3, 5):
        resized = resize_state(state, rank, (9, 20))
        assert torch.equal(resized[WARM_START], torch.cat([state[WARM_START], fresh[3:]])[:rank])
        assert resized["own.residual"] is owed
    assert torch.equal(resize_state({}, 5, (9, 20))[WARM_START], fresh)
    assert state[WARM_START].shape == (3, 20), "what it was given was changed"
