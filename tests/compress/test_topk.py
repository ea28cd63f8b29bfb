from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.comm.local import drive_together
from atoll.compress.codecs import Stat2
from atoll.compress.topk import TopK, largest, pack_12_bits, unpack_12_bits


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sent_alone(compressor: TopK, tensor: Tensor) -> Tensor:
    return drive_together([compressor.average(tensor, {})], [1.0])[0][0]


@settings(deadline=None)
@given(st.lists(st.integers(0, 4095), max_size=50))
def test_indices_of_12_bits_come_back_from_three_bytes_a_pair(numbers: list[int]) -> None:
    packed = pack_12_bits(torch.tensor(numbers, dtype=torch.int64))
    assert packed.dtype == torch.uint8 and packed.numel() == (3 * len(numbers) + 1) // 2
    assert unpack_12_bits(packed, len(numbers)).tolist() == numbers


def test_just_the_largest_of_each_chunk_arrive() -> None:
    flat = noise(5 * 4096 + 1000)
    sent = sent_alone(TopK(), flat)
    for start in range(0, flat.numel(), 4096):
        part, arrived = flat[start : start + 4096], sent[start : start + 4096]
        kept = 64 if part.numel() == 4096 else 16  # of 1,000: 15.6
        assert arrived.count_nonzero() == kept
        assert torch.equal(arrived[arrived != 0], part[arrived != 0])
        assert part[arrived == 0].abs().max() <= part[arrived != 0].abs().min()


def test_chunks_of_a_matrix_are_its_square_blocks() -> None:
    """The 64 largest of one block travel, however small next to those of another."""
    matrix = noise(128, 192)
    matrix[:64, :64] *= 1e-4
    sent = sent_alone(TopK(), matrix)
    blocks = sent.view(2, 64, 3, 64).transpose(1, 2).reshape(6, -1)
    assert blocks.count_nonzero(1).tolist() == [64] * 6
    assert torch.equal(sent[sent != 0], matrix[sent != 0])
    strip = matrix[:, :100].contiguous()  # 64 does not divide 100: runs of 4,096 elements
    assert sent_alone(TopK(), strip).view(-1)[:4096].count_nonzero() == 64


@pytest.mark.parametrize("shape", [(), (1,), (3,), (10, 7), (64, 64), (128, 64), (64, 128), (2, 64, 64), (5000,)])
@pytest.mark.parametrize("chunk", [1, 7, 64, 4096])
def test_keeping_everything_is_the_exact_mean(shape: tuple[int, ...], chunk: int) -> None:
    tensors = [noise(*shape, seed=i) for i in range(3)]
    compressor = TopK(k=chunk, chunk=chunk)
    for mean, _ in drive_together([compressor.average(t, {}) for t in tensors], [1.0] * 3):
        torch.testing.assert_close(mean, (tensors[0] + tensors[1] + tensors[2]) / 3, rtol=2e-7, atol=0)


def test_the_first_of_equals_wins() -> None:
    rows = torch.tensor([[1.0, -1.0, 1.0, 0.5], [0.0, 0.0, 0.0, 0.0], [-2.0, 3.0, -3.0, 3.0]])
    assert largest(rows, 2).tolist() == [[0, 1], [0, 1], [1, 2]]
    assert largest(torch.ones(2, 4096), 3).tolist() == [[0, 1, 2]] * 2


@settings(deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40), st.integers(1, 40))
def test_the_largest_are_those_of_a_stable_sort(values: list[float], k: int) -> None:
    k = min(k, len(values))
    best = sorted(range(len(values)), key=lambda place: (-abs(values[place]), place))[:k]
    assert largest(torch.tensor([values]), k).tolist() == [sorted(best)]


def test_two_bits_a_value_keep_its_place_and_sign() -> None:
    matrix = noise(128, 128)
    exact, coarse = sent_alone(TopK(), matrix), sent_alone(TopK(values=Stat2()), matrix)
    assert torch.equal(coarse != 0, exact != 0)
    assert torch.equal(coarse.sign(), exact.sign())
    assert len(set(coarse[coarse != 0].tolist())) <= 4
    assert (coarse - exact).norm() < 0.4 * exact.norm()


def test_each_4096_values_have_a_codebook_of_their_own() -> None:
    flat = noise(65 * 4096)
    flat[: 64 * 4096] *= 100  # 64 chunks of 64 values, then one chunk of small ones
    sent = sent_alone(TopK(values=Stat2()), flat)
    assert (sent[64 * 4096 :].abs().max() / flat[64 * 4096 :].abs().max()).item() == pytest.approx(1.0, abs=0.4)


@pytest.mark.parametrize("values", [TopK().values, Stat2()], ids=["fp32", "stat2"])
def test_the_payload_is_indices_and_values_and_nothing_else(values: object) -> None:
    compressor = TopK(values=values)
    request = next(compressor.average(noise(256, 256), {}))
    num_kept = 16 * 64
    codes = 4 * num_kept if values == TopK().values else num_kept // 4 + 16
    assert request.payload.numel() == num_kept * 3 // 2 + codes == compressor.payload_bytes((256, 256))


def test_replicas_that_keep_different_elements_are_averaged_over_all() -> None:
    tensors = [torch.tensor([4.0, 0.1, 0.0, 0.0]), torch.tensor([0.1, 0.0, -8.0, 0.0])]
    compressor = TopK(k=1, chunk=4)
    for mean, _ in drive_together([compressor.average(t, {}) for t in tensors], [1.0, 3.0]):
        assert mean.tolist() == [1.0, 0.0, -6.0, 0.0]
