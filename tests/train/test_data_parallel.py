from __future__ import annotations

import math

import pytest
import torch
from laws.driver import bits

from atoll.comm.local import LocalGroup
from atoll.compress import IDENTITY, Cast, build_compressor
from atoll.errors import ConfigError
from atoll.train.data_parallel import GradientSync

CASTS = ["identity", "bf16", "fp16"]
each_compressor = pytest.mark.parametrize("compressor", [build_compressor(name) for name in CASTS], ids=CASTS)


def awkward(dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    tensors = {
        "scalar": torch.tensor(1.0),
        "vector": torch.ones(3),
        "cube": torch.ones(2, 2, 2),
        "turned": torch.ones(2, 3).t(),
        "empty": torch.empty(0, 3),
    }
    return {name: torch.nn.Parameter(tensor.to(dtype)) for name, tensor in tensors.items()}


def syncs_of(models: list[dict[str, torch.nn.Parameter]], compressor: object = IDENTITY) -> list[GradientSync]:
    ends = LocalGroup(len(models)).endpoints()
    return [GradientSync(params, end, compressor) for params, end in zip(models, ends, strict=True)]


def average(
    models: list[dict[str, torch.nn.Parameter]], syncs: list[GradientSync], gradients: list[float | None]
) -> list:
    for params, value, sync in zip(models, gradients, syncs, strict=True):
        for param in params.values():
            param.grad = None if value is None else torch.full_like(param, value)
        sync.launch(1.0)
    return [sync.apply() for sync in syncs]


def seen(params: dict[str, torch.nn.Parameter]) -> set[float]:
    return {value for p in params.values() if p.numel() for value in p.grad.reshape(-1).tolist()}


@each_compressor
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_of_any_shape_and_dtype_become_their_mean(compressor: object, dtype: torch.dtype) -> None:
    models = [awkward(dtype) for _ in range(3)]
    reports = average(models, syncs_of(models, compressor), [1.0, 2.0, 6.0])
    assert [seen(params) for params in models] == [{3.0}] * 3
    assert reports[0].round == 1 and reports[0].contributors == 3


def test_a_gradient_that_a_replica_lacks_counts_as_zero() -> None:
    models = [awkward(), awkward()]
    average(models, syncs_of(models), [4.0, None])
    assert [seen(params) for params in models] == [{2.0}] * 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_the_rest_agree_bit_for_bit(bad: float) -> None:
    models = [awkward() for _ in range(3)]
    reports = average(models, syncs_of(models), [0.1, bad, 0.7])
    assert [report.refused for report in reports] == [[1]] * 3
    assert reports[0].contributors == 2
    without = [awkward() for _ in range(2)]
    average(without, syncs_of(without), [0.1, 0.7])
    for params in models:
        assert [bits(p.grad) for p in params.values()] == [bits(p.grad) for p in without[0].values()]


def test_where_no_replica_has_a_finite_gradient_each_keeps_its_own_and_can_skip_the_step() -> None:
    models = [awkward(), awkward()]
    syncs = syncs_of(models)
    reports = average(models, syncs, [math.inf, math.inf])
    assert reports[0].refused == [0, 1] and reports[0].contributors == 0
    assert [seen(params) for params in models] == [{math.inf}] * 2
    average(models, syncs, [1.0, 3.0])
    assert seen(models[1]) == {2.0}, "the step after is as if nothing had happened"


@each_compressor
def test_bytes_counted_are_those_of_the_dtype(compressor: Cast) -> None:
    models = [awkward(), awkward()]
    numel = sum(param.numel() for param in models[0].values())
    reports = average(models, syncs_of(models, compressor), [1.0, 2.0])
    assert [report.payload_bytes for report in reports] == [numel * compressor.dtype.itemsize] * 2


def test_the_digest_tells_parameters_apart_by_their_last_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        models = [awkward(dtype), awkward(dtype)]
        syncs = syncs_of(models)
        assert syncs[0].digest() == syncs[1].digest()
        with torch.no_grad():
            models[1]["cube"][1, 1, 1] *= 1 + 2 * torch.finfo(dtype).eps
        assert syncs[0].digest() != syncs[1].digest()


def test_the_step_count_is_saved_and_restored() -> None:
    models = [awkward()]
    syncs = syncs_of(models)
    for _ in range(3):
        average(models, syncs, [1.0])
    (fresh,) = syncs_of([awkward()])
    fresh.load_shared_state(syncs[0].anchor(), syncs[0].shared_state())
    assert fresh.round == 3


def test_a_compressor_that_must_see_whole_tensors_is_refused() -> None:
    class Whole(Cast):
        elementwise = False

    with pytest.raises(ConfigError, match="identity, bf16 or fp16"):
        syncs_of([awkward()], Whole(torch.float32))


def test_a_compressor_that_owes_something_between_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="identity, bf16 or fp16"):
        syncs_of([awkward()], build_compressor("stat2"))
