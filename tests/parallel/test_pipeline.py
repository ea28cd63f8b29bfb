"""Pipeline x data x shard is the single process, to rounding."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch
from parallel.parallel_work import Case, Trained, assemble, hf_config, train_alone, train_cases
from spawn import run_replicas

from atoll.errors import ConfigError
from atoll.parallel.memory import predict_bytes
from atoll.parallel.pipeline import ParallelSettings, check_settings
from atoll.parallel.plan import SCHEDULES, plan_stages
from atoll.parallel.skeleton import build_skeleton

STEPS = 5
FAMILIES = ("llama", "qwen2", "opt", "gpt2")
CASES = [
    *(Case(family, ParallelSettings(schedule, 4)) for family, schedule in product(FAMILIES, SCHEDULES)),
    *(Case("gpt2", ParallelSettings(schedule, 2), tie=True) for schedule in ("1f1b", "zero-bubble")),
    *(Case("llama", ParallelSettings(schedule, 4, sharding="shard")) for schedule in SCHEDULES),
    *(Case("qwen2", ParallelSettings(schedule, 2, sharding="shard"), tie=True) for schedule in ("1f1b", "zero-bubble")),
    *(
        Case("opt", ParallelSettings(schedule, 4, sharding=sharding, activation_checkpointing=True))
        for schedule, sharding in product(("1f1b", "interleaved"), ("replicate", "shard"))
    ),
    Case("gpt2", ParallelSettings("1f1b", 4, split=[1, 3])),
]


@cache
def alone(family: str, tie: bool) -> Trained:
    return train_alone(family, steps=STEPS, tie=tie)


@pytest.fixture(scope="module")
def trained() -> dict[str, list[Trained]]:
    """All cases on 2 stages x 2 data, by their names: what each of the four workers has."""
    workers = run_replicas(train_cases, 4, 2, 2, CASES, STEPS, timeout_s=240)
    return {str(case): [worker[i] for worker in workers] for i, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_stages_times_two_data_is_one_process(case: Case, trained: dict[str, list[Trained]]) -> None:
    workers, single = trained[str(case)], alone(case.family, case.tie)
    assert workers[0].losses == pytest.approx(single.losses, abs=2e-6)
    assert workers[0].norms == pytest.approx(single.norms, rel=2e-5)
    assert workers[0].held_out == pytest.approx(single.held_out, rel=1e-5)
    for name, value in assemble([worker.rows for worker in workers], single.rows).items():
        torch.testing.assert_close(value, single.rows[name][1], atol=3e-5, rtol=0)
    assert max(single.norms) > 0.5  # clipping acted, or the norm was not tested


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_workers_know_the_same_loss_and_norm(case: Case, trained: dict[str, list[Trained]]) -> None:
    first = trained[str(case)][0]
    for worker in trained[str(case)]:
        assert (worker.losses, worker.norms, worker.held_out) == (first.losses, first.norms, first.held_out)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_worker_holds_what_was_foretold(case: Case, trained: dict[str, list[Trained]]) -> None:
    settings = case.settings
    skeleton = build_skeleton(hf_config(case.family, tie=case.tie))
    plan = plan_stages(skeleton, 2, schedule=settings.schedule, split=settings.split)
    for worker, result in enumerate(trained[str(case)]):
        predicted = predict_bytes(plan, worker // 2, num_shards=2 if settings.sharding == "shard" else 1)
        assert result.bytes_by_state is not None
        for state, size in predicted.items():  # rows do not always halve evenly
            slack = 0.02 * size if settings.sharding == "shard" else 0
            assert abs(result.bytes_by_state[state] - size) <= slack, state


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"layerdrop": 0.1}, ParallelSettings(), r"layerdrop=0\.1 .*Use layerdrop=0"),
        ({}, ParallelSettings("zero-bubble", activation_checkpointing=True), "Use 'interleaved' or '1f1b'"),
    ],
)
def test_what_would_be_computed_wrongly_or_too_often_is_refused(
    changes: dict[str, float], settings: ParallelSettings, message: str
) -> None:
    config = hf_config("opt")
    config.update(changes)
    with pytest.raises(ConfigError, match=message):
        check_settings(config, settings, num_workers=2)
