"""Bytes a worker by state, and what goes to the host."""

import pytest

from atoll.errors import ConfigError
from atoll.plan.memory import activation_bytes, plan_memory, state_bytes
from atoll.plan.presets import PRESETS

LARGE = PRESETS["dilocox_107b"].shape
OPT = PRESETS["dilocox_opt_1_3b"].shape


def test_bytes_a_parameter_by_the_table() -> None:
    assert sum(state_bytes(bf16=True, in_flight=True, residual=True).values()) == 32
    assert sum(state_bytes(bf16=False, in_flight=False, residual=False).values()) == 24
    inner = ("weights", "gradients", "master", "inner m", "inner v")
    assert sum(state_bytes(bf16=True, in_flight=False, residual=False)[name] for name in inner) == 16


def test_state_is_spread_over_the_workers_of_an_island() -> None:
    one, many = (plan_memory(OPT, workers=workers) for workers in (1, 8))
    assert one.device_bytes == 24 * OPT.num_parameters
    assert many.device_bytes == pytest.approx(one.device_bytes / 8)
    assert many.bytes_a_parameter == pytest.approx(24)


def test_what_does_not_fit_moves_to_the_host_the_least_used_first() -> None:
    every = {"bf16": True, "in_flight": True, "residual": True}
    free = plan_memory(LARGE, workers=80, **every)
    assert free.on_host == {}
    tight = plan_memory(LARGE, workers=80, capacity=40e9, **every)
    assert list(tight.on_host) == ["residual"]
    assert tight.device_bytes <= 40e9 < free.device_bytes
    tighter = plan_memory(LARGE, workers=80, capacity=25e9, **every)
    assert set(tighter.on_host) == {"residual", "in flight", "outer momentum", "anchor"}
    assert tighter.bytes_a_parameter == pytest.approx(32)


def test_a_model_larger_than_all_memory_is_refused_with_what_would_hold_it() -> None:
    with pytest.raises(ConfigError, match="--devices 43") as error:
        plan_memory(LARGE, workers=2, capacity=40e9, bf16=True)
    assert len(str(error.value).splitlines()) <= 3
    plan_memory(LARGE, workers=43, capacity=40e9, bf16=True)
    with pytest.raises(ConfigError):
        plan_memory(LARGE, workers=42, capacity=40e9, bf16=True)


def test_activations_count_against_the_device_and_alone_may_be_too_many() -> None:
    activations = activation_bytes(OPT, 65536, bf16=False)
    assert plan_memory(OPT, activations=activations).device_bytes == 24 * OPT.num_parameters + activations
    with pytest.raises(ConfigError, match="fewer tokens"):
        plan_memory(OPT, capacity=10e9, activations=20e9)


def test_activations_grow_with_tokens_and_shrink_with_stages_and_precision() -> None:
    whole = activation_bytes(OPT, 1000, bf16=True)
    assert activation_bytes(OPT, 2000, bf16=True) == 2 * whole
    assert activation_bytes(OPT, 1000, bf16=True, stages=4) < whole < activation_bytes(OPT, 1000, bf16=False)


def test_no_workers_hold_nothing() -> None:
    with pytest.raises(ConfigError, match="devices=0"):
        plan_memory(OPT, workers=0)
