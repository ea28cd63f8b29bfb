"""What every compressor answers to, whatever its method."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.comm.local import LocalGroup, drive_together
from atoll.compress import (
    COMPRESSORS,
    Cast,
    Compressor,
    CompressorOptions,
    Feedback,
    bits_per_parameter,
    build_compressor,
    settle,
)
from atoll.exchange import (
    Exchange,
    Mean,
    State,
    coded_mean,
    coded_slices,
    mean_sent_bytes,
    slice_bounds,
    weighted_mean,
)

# low ranks and both reductions, so that small tensors are factored and nothing is left out
OPTIONS = CompressorOptions(rank=2)
ALL: dict[str, Compressor] = {
    **{name: build_compressor(name, OPTIONS) for name in COMPRESSORS},
    "stat2, requantised": build_compressor("stat2", CompressorOptions(reduction="requantise")),
    "int8, gathered": build_compressor("int8", CompressorOptions(reduction="gather")),
    "int4, feedback": build_compressor("int4", CompressorOptions(feedback=True)),
    "fp16, feedback, bf16 residual": build_compressor(
        "fp16", CompressorOptions(feedback=True, feedback_beta=0.5, residual_dtype="bfloat16")
    ),
    "topk of 16": build_compressor("topk", CompressorOptions(topk=3, chunk=16)),
}
CASTS = {name: build_compressor(name) for name in ("identity", "bf16", "fp16")}

each_compressor = pytest.mark.parametrize("compressor", ALL.values(), ids=ALL)
each_cast = pytest.mark.parametrize("compressor", CASTS.values(), ids=CASTS)

# largest relative error of one rounding; the way of a value there and back has two
PRECISION = {"identity": 2**-23, "bf16": 2**-8, "fp16": 2**-11}

AWKWARD = {
    "scalar": torch.tensor(2.0),
    "one": torch.tensor([3.0]),
    "three": torch.tensor([1.0, -2.0, 0.5]),
    "3-D": torch.arange(24.0).view(2, 3, 4),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "empty": torch.empty(0, 3),
    "zeros": torch.zeros(5),
}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lone_giant() -> Tensor:
    """A single 1000 among noise of size 1e-3."""
    tensor = 1e-3 * noise(4000, seed=9)
    tensor[1234] = 1000.0
    return tensor


HARD = {
    **AWKWARD,
    "large matrix": noise(64, 130),
    "blocks of 64": noise(128, 64),
    "transposed matrix": noise(40, 90).t(),
    "zero matrix": torch.zeros(40, 60),
    "rank one": noise(50, 1) @ noise(1, 70, seed=1),
    "big constant": torch.full((300,), 1e6),
    "constant matrix": torch.full((33, 65), 7e4),
    "lone giant": lone_giant(),
    "tiny": 1e-30 * noise(500),
    "denormal": torch.full((20,), 1e-42),
    "huge": 1e30 * noise(500),
    "nearly the largest": torch.full((130,), 1e38),
    "a huge matrix": 1e37 * noise(40, 60),
}
each_tensor = pytest.mark.parametrize("tensor", HARD.values(), ids=HARD)


def run(
    compressor: Compressor, tensors: list[Tensor], weights: list[float], states: list[State] | None = None
) -> list[tuple[Tensor, State]]:
    states = states or [compressor.init(t.shape) for t in tensors]
    exchanges: list[Exchange] = [compressor.average(t, state) for t, state in zip(tensors, states, strict=True)]
    return drive_together(exchanges, weights)


def average(compressor: Compressor, tensors: list[Tensor], weights: list[float]) -> list[Tensor]:
    return [mean for mean, _ in run(compressor, tensors, weights)]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# --- all of them


@each_compressor
@each_tensor
def test_every_shape_comes_back_finite_in_fp32_and_as_large_as_it_was_at_most(
    compressor: Compressor, tensor: Tensor
) -> None:
    for mean in average(compressor, [tensor, tensor / 2], [1.0, 1.0]):
        assert mean.dtype == torch.float32 and mean.shape == tensor.shape
        assert torch.isfinite(mean).all()
        if tensor.numel() and tensor.dim() < 2:
            assert mean.abs().max() <= 1.01 * tensor.abs().max()


@each_compressor
@each_tensor
def test_all_replicas_receive_the_same_bits(compressor: Compressor, tensor: Tensor) -> None:
    tensors = [tensor, tensor / 4, torch.roll(tensor, 3) / 4, -tensor / 2]
    results = run(compressor, tensors, [1.0, 0.5, 3.0, 1.0])
    assert {bits(mean) for mean, _ in results} == {bits(results[0][0])}
    shared = [{key: bits(v) for key, v in state.items() if not key.startswith("own.")} for _, state in results]
    assert all(state == shared[0] for state in shared)


@each_compressor
def test_replicas_receive_memory_of_their_own_and_what_was_given_is_left_as_it_was(compressor: Compressor) -> None:
    tensors = [noise(40, 70, seed=i) for i in range(3)]
    states = [compressor.init(t.shape) for t in tensors]
    before = [(bits(t), {k: bits(v) for k, v in s.items()}) for t, s in zip(tensors, states, strict=True)]
    results = run(compressor, tensors, [1.0, 1.0, 1.0], states)
    for mean, state in results:
        mean.fill_(math.nan)
        assert all(torch.isfinite(value).all() for value in state.values())
    assert len({mean.data_ptr() for mean, _ in results}) == 3
    assert [(bits(t), {k: bits(v) for k, v in s.items()}) for t, s in zip(tensors, states, strict=True)] == before


@each_compressor
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_replica_of_weight_0_is_left_out_nan_and_all(compressor: Compressor, bad: float) -> None:
    good = [noise(64, 100, seed=i) for i in range(2)]
    broken = noise(64, 100, seed=5)
    broken[3, 7] = bad
    alone = average(compressor, [good[0], good[1], torch.zeros(64, 100)], [1.0, 2.0, 0.0])[0]
    beside = run(compressor, [good[0], good[1], broken], [1.0, 2.0, 0.0])
    for mean, state in beside:
        assert bits(mean) == bits(alone)
        shared = {key: value for key, value in state.items() if not key.startswith("own.")}
        assert all(torch.isfinite(value).all() for value in shared.values())
    settled = settle(compressor.init((64, 100)), beside[2][1], counted=False)
    assert all(torch.isfinite(value).all() for value in settled.values())


@each_compressor
def test_weights_are_respected(compressor: Compressor) -> None:
    tensors = [torch.full((200,), value) for value in (8.0, -4.0, 100.0)]
    for mean in average(compressor, tensors, [3.0, 1.0, 0.0]):
        kept = mean[mean != 0]
        torch.testing.assert_close(kept, torch.full_like(kept, 5.0), rtol=0.25, atol=0)
        assert len(kept) > 0


@each_compressor
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "shape", [(), (1,), (3,), (7,), (2, 3, 4), (0,), (0, 3), (101,), (5000,), (64, 64), (128, 192), (100, 300)]
)
def test_bytes_declared_are_bytes_counted_at_the_transport(
    compressor: Compressor, num_replicas: int, shape: tuple[int, ...]
) -> None:
    flights = []
    for end in LocalGroup(num_replicas).endpoints():
        exchange = compressor.average(torch.ones(shape), compressor.init(shape))
        flights.append(end.launch(b".", lambda ballots: [1.0] * len(ballots), iter([exchange])))
    for flight in flights:
        assert len(list(flight.results())) == 1
    counted = [flight.traffic().payload_bytes for flight in flights]
    declared = [compressor.sent_bytes(shape, num_replicas=num_replicas, replica=r) for r in range(num_replicas)]
    assert counted == declared
    assert num_replicas == 1 or math.prod(shape) == 0 or sum(counted) > 0
    if num_replicas == 2:
        assert sum(counted) == 2 * compressor.payload_bytes(shape)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("identity", 32, 32),
        ("bf16", 16, 16),
        ("fp16", 16, 16),
        ("int8", 8, 8.04),
        ("int4", 4, 4.13),
        ("fp4", 4, 4.13),
        ("stat2", 2, 2.04),
        ("topk", 0.68, 0.69),
        ("topk+stat2", 0.21, 0.22),
        ("lowrank", 4, 4.01),  # rank 64 of 1,024: 2 · 64 / 1024 of 32 bits
        ("lowrank+int4", 0.5, 0.52),
    ],
)
def test_the_bits_a_parameter_are_those_the_method_is_known_for(name: str, low: float, high: float) -> None:
    assert low <= bits_per_parameter(build_compressor(name), (1024, 1024)) <= high


def test_every_compressor_says_how_many_bits_it_takes() -> None:
    for name in COMPRESSORS:
        assert 0.2 < bits_per_parameter(build_compressor(name), (512, 512)) <= 32, name


@each_compressor
def test_a_round_that_was_never_finished_can_be_tried_again(compressor: Compressor) -> None:
    """Nothing but the state that is returned remembers a round."""
    tensor, shape = noise(64, 80), (64, 80)
    state = compressor.init(shape)
    next(compressor.average(tensor, state))
    first, again = run(compressor, [tensor], [1.0], [state]), run(compressor, [tensor], [1.0], [state])
    assert bits(first[0][0]) == bits(again[0][0])
    assert {k: bits(v) for k, v in first[0][1].items()} == {k: bits(v) for k, v in again[0][1].items()}


@each_compressor
def test_state_of_its_own_is_told_from_state_that_all_share(compressor: Compressor) -> None:
    state = compressor.init((64, 80))
    assert set(state) <= {"own.residual", "warm_start"}
    assert ("own.residual" in state) == isinstance(compressor, Feedback)


# --- fp32, bf16, fp16: short numbers travel exactly


@each_cast
@pytest.mark.parametrize("tensor", AWKWARD.values(), ids=AWKWARD)
def test_short_numbers_are_averaged_exactly(compressor: Compressor, tensor: Tensor) -> None:
    for mean in average(compressor, [tensor, 3 * tensor], [1.0, 1.0]):
        assert torch.equal(mean, 2 * tensor)


@pytest.mark.parametrize("name", CASTS)
def test_a_mean_is_as_precise_as_stated(name: str) -> None:
    tensors = [noise(500, seed=i) for i in range(3)]
    weights = [1.0, 2.0, 4.0]
    mean = average(CASTS[name], tensors, weights)[0]
    exact = sum(weight * tensor.double() for weight, tensor in zip(weights, tensors, strict=True)) / 7
    size = sum(weight * tensor.abs().double() for weight, tensor in zip(weights, tensors, strict=True)) / 7
    assert ((mean - exact).abs() <= 2.1 * PRECISION[name] * size + 1e-7).all()


@pytest.mark.parametrize(("name", "itemsize"), [("identity", 4), ("bf16", 2), ("fp16", 2)])
def test_bytes_on_the_wire_are_those_of_the_dtype(name: str, itemsize: int) -> None:
    """Two replicas: one payload each."""
    request = next(CASTS[name].average(torch.ones(10), {}))
    assert isinstance(request, Mean) and request.tensor.nbytes == 10 * itemsize
    assert CASTS[name].sent_bytes((10,), num_replicas=2, replica=0) == 10 * itemsize


@each_cast
def test_a_cast_owes_what_its_dtype_could_not_hold(compressor: Cast) -> None:
    tensor = torch.tensor([1.0, 1e9, 1 + 2**-12])
    owed = torch.empty(3)
    request = next(compressor.average(tensor, {}, owed=owed))
    assert torch.equal(request.tensor.float() + owed, tensor)


# --- the mean itself


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 9))
def test_slices_cover_a_tensor_and_bytes_add_up_to_a_ring(numel: int, num_replicas: int) -> None:
    bounds = slice_bounds(numel, num_replicas)
    assert bounds[0] == 0 and bounds[-1] == numel and bounds == sorted(bounds)
    assert max(b - a for a, b in pairwise(bounds)) <= numel // num_replicas + 1
    sent = sum(mean_sent_bytes(numel, 4, num_replicas=num_replicas, replica=r) for r in range(num_replicas))
    assert sent == 4 * numel * 2 * (num_replicas - 1)


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 0.5, 1e-9, 1e12]), min_size=1, max_size=6).filter(any))
def test_the_weighted_mean_is_the_sum_over_those_who_count(weights: list[float]) -> None:
    values = [float(i + 1) for i in range(len(weights))]
    tensors = [torch.tensor([v if w else math.nan]) for v, w in zip(values, weights, strict=True)]
    exact = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    assert weighted_mean(tensors, weights).item() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("weight", [1.0, 3.0, 0.1, 1e9])
def test_equal_weights_of_any_size_give_the_plain_mean_bit_for_bit(weight: float) -> None:
    tensors = [noise(40, seed=i) for i in range(3)]
    plain = (tensors[0] + tensors[1] + tensors[2]) / 3
    assert torch.equal(weighted_mean(tensors, [weight] * 3), plain)


def test_a_mean_of_low_precision_tensors_is_summed_in_fp32() -> None:
    """256 ones in bf16: a bf16 sum would stop at 256."""
    tensors = [torch.ones(1, dtype=torch.bfloat16)] * 300
    assert weighted_mean(tensors, [1.0] * 300).tolist() == [1.0]
    assert weighted_mean([torch.tensor([256.0], dtype=torch.bfloat16), *tensors[:2]], [1.0] * 3).tolist() == [86.0]


def test_a_mean_without_contributors_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="contributor"):
        weighted_mean([torch.ones(1)], [0.0])
    with pytest.raises(AssertionError, match="contributor"):
        average(build_compressor("topk"), [torch.ones(1)], [0.0])


@pytest.mark.parametrize("name", ["int8", "int4", "fp4"])
@pytest.mark.parametrize("numel", [0, 1, 129, 200_000])
def test_a_coded_mean_is_the_same_however_many_owners_share_the_work(name: str, numel: int) -> None:
    codec = build_compressor(name).codec
    payloads = [codec.encode(noise(numel, seed=i)) for i in range(3)]
    whole = coded_mean(payloads, [1.0, 0.0, 2.0], codec, numel)
    for num_replicas in (2, 3, 7):
        parts = [
            coded_mean([p[part.payload] for p in payloads], [1.0, 0.0, 2.0], codec, part.numel)
            for part in coded_slices(numel, codec, num_replicas)
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_an_owner_owes_what_coding_the_mean_lost_by_its_own_weight() -> None:
    codec, weights = build_compressor("int4").codec, [1.0, 3.0]
    payloads = [codec.encode(noise(1000, seed=i)) for i in range(2)]
    exact = weighted_mean([codec.decode(payload, 1000) for payload in payloads], weights)
    for owner, weight in enumerate(weights):
        owed = torch.ones(1000)
        coded = codec.decode(coded_mean(payloads, weights, codec, 1000, owed=owed, owner=owner), 1000)
        torch.testing.assert_close(coded + (owed - 1) * weight / 4, exact, rtol=0, atol=1e-6)
        assert (owed != 1).any()
    untouched = torch.ones(1000)
    coded_mean(payloads, [1.0, 0.0], codec, 1000, owed=untouched, owner=1)
    assert torch.equal(untouched, torch.ones(1000)), "a replica that does not count keeps nothing of a round"


def test_the_local_transport_measures_what_codes_stand_for() -> None:
    compressor = build_compressor("int8")
    tensors = [noise(3000, seed=i) for i in range(3)]
    flights = [
        end.launch(b".", lambda ballots: [1.0] * 3, iter([compressor.average(t, {})]))
        for end, t in zip(LocalGroup(3).endpoints(), tensors, strict=True)
    ]
    for flight in flights:
        list(flight.results())
    stacked = torch.stack(tensors)
    torch.testing.assert_close(flights[1].traffic().gram.float(), stacked @ stacked.T, rtol=0.001, atol=5.0)


def test_the_inner_products_of_low_rank_rounds_are_those_of_what_is_sent() -> None:
    """Matrices of rank one travel whole; their first factors must not be measured."""
    compressor = build_compressor("lowrank", CompressorOptions(rank=2, feedback=False))
    tensors = [noise(40, 1) @ noise(1, 30, seed=1), 3 * noise(40, 1) @ noise(1, 30, seed=1)]
    flights = [
        end.launch(b".", lambda ballots: [1.0] * 2, iter([compressor.average(t, compressor.init(t.shape))]))
        for end, t in zip(LocalGroup(2).endpoints(), tensors, strict=True)
    ]
    for flight in flights:
        list(flight.results())
    stacked = torch.stack([tensor.view(-1) for tensor in tensors])
    torch.testing.assert_close(flights[0].traffic().gram.float(), stacked @ stacked.T, rtol=1e-4, atol=1e-3)


def test_gathered_payloads_are_opaque_to_the_transport() -> None:
    compressor = build_compressor("topk")
    (end,) = LocalGroup(1).endpoints()
    flight = end.launch(b".", lambda ballots: [1.0], iter([compressor.average(torch.ones(4), compressor.init((4,)))]))
    list(flight.results())
    assert flight.traffic().gram is None
