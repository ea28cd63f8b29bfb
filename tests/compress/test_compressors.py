"""What every compressor answers to."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.comm.local import LocalGroup, drive_together
from atoll.compress import COMPRESSORS, Compressor
from atoll.exchange import Exchange, Mean, mean_sent_bytes, slice_bounds, weighted_mean

each_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)

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


def average(compressor: Compressor, tensors: list[torch.Tensor], weights: list[float]) -> list[torch.Tensor]:
    exchanges: list[Exchange] = [compressor.average(t, compressor.init(t.shape)) for t in tensors]
    return [mean for mean, _ in drive_together(exchanges, weights)]


def test_every_compressor_has_a_stated_precision() -> None:
    assert set(PRECISION) == set(COMPRESSORS)


@each_compressor
@pytest.mark.parametrize("tensor", AWKWARD.values(), ids=AWKWARD)
def test_awkward_shapes_are_averaged(compressor: Compressor, tensor: torch.Tensor) -> None:
    for mean in average(compressor, [tensor, 3 * tensor], [1.0, 1.0]):
        assert mean.dtype == torch.float32 and mean.shape == tensor.shape
        assert torch.equal(mean, 2 * tensor)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_mean_is_as_precise_as_stated(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(500, generator=generator) for _ in range(3)]
    weights = [1.0, 2.0, 4.0]
    mean = average(COMPRESSORS[name], tensors, weights)[0]
    exact = sum(weight * tensor.double() for weight, tensor in zip(weights, tensors, strict=True)) / 7
    size = sum(weight * tensor.abs().double() for weight, tensor in zip(weights, tensors, strict=True)) / 7
    assert ((mean - exact).abs() <= 2.1 * PRECISION[name] * size + 1e-7).all()


@each_compressor
def test_every_replica_receives_the_same_bits_in_memory_of_its_own(compressor: Compressor) -> None:
    generator = torch.Generator().manual_seed(1)
    means = average(compressor, [torch.randn(50, generator=generator) for _ in range(4)], [1.0, 0.5, 3.0, 1.0])
    assert all(torch.equal(mean, means[0]) for mean in means)
    assert len({mean.data_ptr() for mean in means}) == 4, "replicas use their means up in place"


@each_compressor
def test_what_was_sent_is_left_as_it_was(compressor: Compressor) -> None:
    tensors = [torch.full((4,), 1.0 + i) for i in range(2)]
    for mean in average(compressor, tensors, [1.0, 1.0]):
        mean.zero_()
    assert [tensor.tolist() for tensor in tensors] == [[1.0] * 4, [2.0] * 4]


@each_compressor
def test_a_huge_finite_value_never_becomes_an_infinity(compressor: Compressor) -> None:
    for mean in average(compressor, [torch.tensor([1e30, -1e30, 7e4]), torch.zeros(3)], [1.0, 1.0]):
        assert torch.isfinite(mean).all() and mean[0] > 3e4 and mean[1] < -3e4


@pytest.mark.parametrize(("name", "itemsize"), [("identity", 4), ("bf16", 2), ("fp16", 2)])
def test_bytes_on_the_wire_are_those_of_the_dtype(name: str, itemsize: int) -> None:
    """Two replicas: one payload each."""
    request = next(COMPRESSORS[name].average(torch.ones(10), {}))
    assert isinstance(request, Mean) and request.tensor.nbytes == 10 * itemsize
    assert COMPRESSORS[name].sent_bytes((10,), num_replicas=2, replica=0) == 10 * itemsize


@each_compressor
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7,), (2, 3, 4), (0,), (101,)])
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


# --- the mean itself


@given(st.integers(0, 1000), st.integers(1, 9))
def test_slices_cover_a_tensor_and_bytes_add_up_to_a_ring(numel: int, num_replicas: int) -> None:
    bounds = slice_bounds(numel, num_replicas)
    assert bounds[0] == 0 and bounds[-1] == numel and bounds == sorted(bounds)
    assert max(b - a for a, b in pairwise(bounds)) <= numel // num_replicas + 1
    sent = sum(mean_sent_bytes(numel, 4, num_replicas=num_replicas, replica=r) for r in range(num_replicas))
    assert sent == 4 * numel * 2 * (num_replicas - 1)


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 0.5, 1e-9, 1e12]), min_size=1, max_size=6).filter(any))
def test_the_weighted_mean_is_the_sum_over_those_who_count(weights: list[float]) -> None:
    values = [float(i + 1) for i in range(len(weights))]
    tensors = [torch.tensor([v if w else math.nan]) for v, w in zip(values, weights, strict=True)]
    exact = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    assert weighted_mean(tensors, weights).item() == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("weight", [1.0, 3.0, 0.1, 1e9])
def test_equal_weights_of_any_size_give_the_plain_mean_bit_for_bit(weight: float) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(40, generator=generator) for _ in range(3)]
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
