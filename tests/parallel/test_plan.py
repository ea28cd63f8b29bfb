"""Stages: which layers, which worker, and what is said about those that do not fit."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel.parallel_work import VOCAB, hf_config
from transformers import AutoConfig

from atoll.errors import ConfigError
from atoll.parallel.cut import given_split, split_layers
from atoll.parallel.plan import SCHEDULES, StagePlan, check_batch, plan_stages
from atoll.parallel.skeleton import build_skeleton

FAMILIES = ("llama", "qwen2", "opt", "gpt2")


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.data())
def test_no_other_split_has_a_cheaper_costliest_stage(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    first, last = data.draw(st.integers(0, 60)), data.draw(st.integers(0, 60))

    def worst(bounds: tuple[int, ...]) -> int:
        stages = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        stages[0] += first
        stages[-1] += last
        return max(stages)

    layers = split_layers(costs, num_stages, first=first, last=last)
    assert [i for part in layers for i in part] == list(range(len(costs)))
    assert all(layers)
    best = min(worst((0, *cuts, len(costs))) for cuts in combinations(range(1, len(costs)), num_stages - 1))
    assert worst((0, *(part.stop for part in layers))) == best


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_stage_has_one_worker_and_every_worker_its_stages(schedule: str, workers: int) -> None:
    each = SCHEDULES[schedule].stages_per_worker
    plan = StagePlan(schedule, workers, tuple(range(i, i + 1) for i in range(workers * each)), (1,) * (workers * each))
    held = [plan.stages_of_worker(worker) for worker in range(workers)]
    assert sorted(stage for stages in held for stage in stages) == list(range(plan.num_stages))
    assert {len(stages) for stages in held} == {each}
    assert all(plan.worker_of_stage(stage) == worker for worker in range(workers) for stage in held[worker])
    assert [plan.stage_of_layer(layer) for layer in range(plan.num_stages)] == list(range(plan.num_stages))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stages_have_all_parameters_once(family: str) -> None:
    skeleton = build_skeleton(hf_config(family))
    total = sum(param.numel() for param in skeleton.model.parameters())
    for workers in (1, 2, 4):
        assert sum(plan_stages(skeleton, workers).num_parameters) == total
    tied = build_skeleton(hf_config(family, tie=True))
    once = sum(param.numel() for param in tied.model.parameters())
    assert sum(plan_stages(tied, 1).num_parameters) == once
    assert sum(plan_stages(tied, 2).num_parameters) == once + VOCAB * 32  # the head's copy


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_workers": 5}, "pipeline_stages=5 .*4 layers.*at most 4"),
    ({"num_workers": 4, "schedule": "interleaved"}, "pipeline_stages=4 .*gives every worker 2 stages.*at most 2"),
    ({"num_workers": 3, "schedule": "zero-bubble"}, "pipeline_stages=3 .*at most 2"),
    ({"num_workers": 2, "schedule": "1fib"}, "'1fib' is not known. Did you mean '1f1b'"),
    ({"num_workers": 2, "split": [2, 3]}, r"\[2, 3\] does not .*Use \[2, 2\]"),
    ({"num_workers": 2, "split": [4, 0]}, r"\[4, 0\] does not .*Use \[2, 2\]"),
]


@pytest.mark.parametrize(("asked", "message"), REFUSED)
def test_a_plan_that_does_not_fit_says_what_would(asked: dict[str, Any], message: str) -> None:
    asked = dict(asked)
    with pytest.raises(ConfigError, match=message):
        plan_stages(build_skeleton(hf_config("llama")), asked.pop("num_workers"), **asked)


def test_an_unequal_split_is_taken_as_given() -> None:
    plan = plan_stages(build_skeleton(hf_config("opt")), 2, split=[1, 3])
    assert plan.layers == (range(0, 1), range(1, 4)) == tuple(given_split([1, 3], 4, 2))


@pytest.mark.parametrize(
    ("batch", "microbatches", "workers", "schedule", "message"),
    [
        (8, 1, 2, "1f1b", "microbatches=1 is less than pipeline_stages=2.*at least 2"),
        (8, 1, 2, "gpipe", "microbatches=1 is less than pipeline_stages=2.*at least 2"),
        (8, 3, 2, "1f1b", "batch_size=8 is not a multiple of microbatches=3. Use 9, or microbatches=2"),
        (14, 7, 2, "interleaved", "microbatches=7 do not come in equal rounds.*Use 6"),
    ],
)
def test_a_batch_that_does_not_fit_says_what_would(
    batch: int, microbatches: int, workers: int, schedule: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_batch(batch, microbatches, num_workers=workers, schedule=schedule)


def test_another_family_is_refused_by_name() -> None:
    config = AutoConfig.for_model("gpt_neox", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    with pytest.raises(ConfigError, match=r"'gpt_neox' cannot be cut.*llama, qwen2, opt, gpt2"):
        plan_stages(build_skeleton(config), 2)
