from __future__ import annotations

import pytest
import torch

from atoll.comm.local import drive_together
from atoll.compress.codecs import Blocks, Int4, Int8
from atoll.compress.quantize import Quantized, Reduction, fastest_reduction, predicted_seconds


def noise(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("code", "share"), [(Int8(), 1 / 254), (Int4(), 1 / 14 + 2**-8)], ids=["int8", "int4"])
def test_the_mean_is_off_by_two_roundings_at_most(num_replicas: int, code: Int8 | Int4, share: float) -> None:
    """Adding up codes, as a plain sum of bytes would, is off by far more: int8 wraps."""
    tensors = [noise(3000, seed) for seed in range(num_replicas)]
    compressor = Quantized(Blocks(code, 128))
    mean = drive_together([compressor.average(t, {}) for t in tensors], [1.0] * num_replicas)[0][0]
    exact = torch.stack(tensors).mean(0)
    largest = torch.stack(tensors).abs().max()
    assert (mean - exact).abs().max() <= 2.02 * share * largest


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_gathering_saves_the_second_rounding(num_replicas: int) -> None:
    tensors = [noise(3000, seed) for seed in range(num_replicas)]
    exact = torch.stack(tensors).mean(0)
    errors = {}
    for reduction in ("requantise", "gather"):
        compressor = Quantized(Blocks(Int4(), 128), reduction)
        results = drive_together([compressor.average(t, {}) for t in tensors], [1.0] * num_replicas)
        errors[reduction] = (results[0][0] - exact).norm()
    codec = Blocks(Int4(), 128)
    decoded = torch.stack([codec.decode(codec.encode(t), 3000) for t in tensors]).mean(0)
    torch.testing.assert_close(errors["gather"], (decoded - exact).norm(), rtol=1e-4, atol=1e-6)
    assert num_replicas == 1 or errors["gather"] < errors["requantise"]


@pytest.mark.parametrize("reduction", ["requantise", "gather"])
@pytest.mark.parametrize("num_replicas", [2, 3, 8])
def test_the_prediction_on_a_slow_link_is_declared_bytes_by_bandwidth(reduction: Reduction, num_replicas: int) -> None:
    compressor = Quantized(Blocks(Int8(), 1024), reduction)
    shape = (num_replicas * 1024 * 100,)
    sent = compressor.sent_bytes(shape, num_replicas=num_replicas, replica=0)
    seconds = predicted_seconds(
        compressor.payload_bytes(shape), reduction, num_replicas=num_replicas, link_bytes_per_s=1e6
    )
    assert seconds == pytest.approx(sent / 1e6, rel=1e-6)


def test_gathering_pays_with_two_replicas_only() -> None:
    def seconds(reduction: Reduction, num_replicas: int) -> float:
        link = {"link_bytes_per_s": 1e7, "code_bytes_per_s": 1e9, "latency_s": 0.05}
        return predicted_seconds(1e8, reduction, num_replicas=num_replicas, **link)

    assert seconds("gather", 2) < seconds("requantise", 2)
    assert all(seconds("gather", m) > seconds("requantise", m) for m in (3, 4, 8, 64))


def test_far_replicas_with_little_to_say_gather() -> None:
    link = {"link_bytes_per_s": 1e7, "latency_s": 0.2}
    assert fastest_reduction(1e4, num_replicas=8, **link) == "gather"
    assert fastest_reduction(1e8, num_replicas=8, **link) == "requantise"
