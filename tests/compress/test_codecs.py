"""Blocks of values as bytes: how far off, how many bytes, whatever the values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.compress.codecs import CHUNK_ELEMENTS, Blocks, Fp4, Int4, Int8, Stat2

CODECS = {
    "int8": Blocks(Int8(), 1024),
    "int4": Blocks(Int4(), 128),
    "fp4": Blocks(Fp4(), 128),
    "stat2": Blocks(Stat2(), 4096),
}
SMALL = {
    f"{name} of {block}": Blocks(code, block)
    for name, code in (("int8", Int8()), ("int4", Int4()), ("fp4", Fp4()), ("stat2", Stat2()))
    for block in (1, 3, 8, 10)
}
each_codec = pytest.mark.parametrize("codec", (CODECS | SMALL).values(), ids=CODECS | SMALL)


def there_and_back(codec: Blocks, flat: Tensor) -> Tensor:
    return codec.decode(codec.encode(flat), flat.numel())


def noise(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def block_amax(flat: Tensor, block: int) -> Tensor:
    """Of the block each element lies in."""
    padded = torch.nn.functional.pad(flat.abs(), (0, -flat.numel() % block)).view(-1, block)
    return padded.amax(1, keepdim=True).expand_as(padded).reshape(-1)[: flat.numel()]


@each_codec
@pytest.mark.parametrize("numel", [0, 1, 2, 127, 128, 129, 4096, 5000, CHUNK_ELEMENTS + 1, 3 * CHUNK_ELEMENTS + 77])
def test_a_payload_is_whole_blocks_and_gives_back_every_element(codec: Blocks, numel: int) -> None:
    flat = noise(numel)
    payload = codec.encode(flat)
    assert payload.dtype == torch.uint8
    assert payload.shape == (-(-numel // codec.block) * codec.block_bytes,)
    back = codec.decode(payload, numel)
    assert back.shape == (numel,) and back.dtype == torch.float32
    assert (back - flat).norm() <= 0.65 * flat.norm()


@pytest.mark.parametrize(
    ("name", "block_bytes"), [("int8", 4 + 1024), ("int4", 2 + 64), ("fp4", 2 + 64), ("stat2", 16 + 1024)]
)
def test_codes_are_packed(name: str, block_bytes: int) -> None:
    assert CODECS[name].block_bytes == block_bytes


@each_codec
def test_a_part_cut_between_blocks_decodes_alone(codec: Blocks) -> None:
    """So that owners of slices can do their work; also from a buffer in which it lies anywhere."""
    flat = noise(5 * codec.block + 1)
    payload, whole = codec.encode(flat), there_and_back(codec, flat)
    start, stop = 2, 6
    part = torch.cat([torch.zeros(1, dtype=torch.uint8), payload[start * codec.block_bytes : stop * codec.block_bytes]])
    numel = flat.numel() - start * codec.block
    assert torch.equal(codec.decode(part[1:], numel), whole[start * codec.block :])


@each_codec
def test_what_was_decoded_hardly_changes_when_it_is_coded_again(codec: Blocks) -> None:
    once = there_and_back(codec, noise(2000))
    torch.testing.assert_close(there_and_back(codec, once), once, rtol=0, atol=0.35 if "Stat2" in repr(codec) else 1e-5)


@each_codec
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1000.0, 0.1, -1e-20, 3e38])
@pytest.mark.parametrize("numel", [1, 3, 300])
def test_constants_survive(codec: Blocks, value: float, numel: int) -> None:
    flat = torch.full((numel,), value)
    torch.testing.assert_close(there_and_back(codec, flat), flat, rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", ["int8", "int4", "fp4"])
def test_short_constants_survive_to_the_last_bit_or_two(name: str) -> None:
    for value in (1.0, 3.0, 100.0, 0.25):
        flat = torch.full((200,), value)
        torch.testing.assert_close(there_and_back(CODECS[name], flat), flat, rtol=3e-7, atol=0)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(CODECS | SMALL)),
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=30),
)
def test_finite_values_never_become_nan_or_infinity(name: str, values: list[float]) -> None:
    flat = torch.tensor(values)
    back = there_and_back((CODECS | SMALL)[name], flat)
    assert torch.isfinite(back).all()
    assert back.abs().max() <= flat.abs().max() * (1 + 2**-7)


@pytest.mark.parametrize(("name", "share"), [("int8", 1 / 254), ("int4", 1 / 14)])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-9, 1e-25, 1e30])
def test_integers_are_off_by_half_a_step_at_most(name: str, share: float, size: float) -> None:
    codec = CODECS[name]
    flat = noise(100_000) * size
    error = (there_and_back(codec, flat) - flat).abs() / block_amax(flat, codec.block)
    assert error.max() <= share * 1.01 + (2**-8 if name == "int4" else 1e-6)
    assert error.max() >= share * 0.9, "the bound is not tight: something else was tested"


def test_fp4_is_off_by_a_third_of_a_value_or_half_its_smallest_level() -> None:
    flat = noise(100_000)
    amax = block_amax(flat, 128).to(torch.bfloat16).float()
    back = there_and_back(CODECS["fp4"], flat)
    assert ((back - flat).abs() <= torch.maximum(flat.abs() / 3, amax * 2**-7) + amax * 2**-8).all()


def test_fp4_takes_the_nearest_of_its_levels() -> None:
    levels = torch.tensor([0.0, *(2.0**-k for k in range(7))])
    levels = torch.cat([levels, -levels])
    flat = torch.cat([torch.ones(1), torch.linspace(-1, 1, 127)])
    nearest = levels[(flat[:, None] - levels).abs().argmin(1)]
    back = there_and_back(CODECS["fp4"], flat)
    torch.testing.assert_close((back - flat).abs(), (nearest - flat).abs(), rtol=0, atol=1e-6)
    assert set(back.tolist()) <= set(levels.tolist())


def test_int4_takes_the_nearest_of_fifteen_levels() -> None:
    flat = torch.cat([torch.full((1,), 7.0), torch.linspace(-7, 7, 127)])
    torch.testing.assert_close(there_and_back(CODECS["int4"], flat), flat.round(), rtol=0, atol=1e-5)


def test_stat2_sends_the_mean_of_each_bin() -> None:
    """Mean 0, σ = √5: edges at −3.35, 0 and 3.35."""
    flat = torch.tensor([-4.0, -2.0, -1.0, 1.0, 2.0, 4.0, -1.0, 1.0])
    sigma = flat.square().mean().sqrt()
    assert 2.0 < 1.5 * sigma < 4.0
    back = there_and_back(Blocks(Stat2(), 8), flat)
    inner = 4 / 3
    torch.testing.assert_close(back, torch.tensor([-4.0, -inner, -inner, inner, inner, 4.0, -inner, inner]))


def test_stat2_keeps_the_sum_and_a_fifth_of_the_energy_at_most_is_lost() -> None:
    flat = noise(40_000) * 1e-3 + 2e-4
    back = there_and_back(CODECS["stat2"], flat)
    assert back.double().sum().item() == pytest.approx(flat.double().sum().item(), rel=1e-4)
    assert (back - flat).square().sum() <= 0.2 * (flat - flat.mean()).square().sum()


def test_a_lone_giant_does_not_drown_the_other_blocks() -> None:
    """One scale a tensor would turn all small values to zero."""
    for name, codec in CODECS.items():
        flat = 1e-3 * noise(10_000)
        flat[5000] = 1000.0
        back = there_and_back(codec, flat)
        far = torch.ones(10_000, dtype=torch.bool)
        far[5000 // codec.block * codec.block : (5000 // codec.block + 1) * codec.block] = False
        assert (back - flat)[far].norm() <= 0.45 * flat[far].norm(), name
        assert math.isclose(back[5000].item(), 1000.0, rel_tol=2**-8), name


def test_same_values_give_the_same_bytes() -> None:
    """Whatever the memory that is reused held before."""
    for name, codec in (CODECS | SMALL).items():
        flat = noise(5 * codec.block - codec.block // 2)
        first = codec.encode(flat)
        torch.full((first.numel(),), 255, dtype=torch.uint8)
        assert torch.equal(codec.encode(flat), first), name
