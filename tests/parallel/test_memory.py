"""Memory of a step, against what the schedules of torch really do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from parallel.parallel_work import CPU, SEED, hf_config

from atoll.parallel.memory import activation_bytes, in_flight
from atoll.parallel.pipeline import cut_stages
from atoll.parallel.plan import SCHEDULES, plan_stages
from atoll.parallel.sharding import checkpoint_activations_
from atoll.parallel.skeleton import build_skeleton


def most_at_once(schedule: str, num_workers: int, microbatches: int) -> list[int]:
    """Forwards without their backward on each worker, from the order in which torch runs them."""
    kind = SCHEDULES[schedule]
    each = kind.stages_per_worker
    stages = [
        SimpleNamespace(group_size=num_workers, group_rank=0, num_stages=num_workers * each, stage_index=i, submod=None)
        for i in range(each)
    ]
    order = kind.kind(stages if each > 1 else stages[0], microbatches).pipeline_order  # type: ignore[arg-type]
    peaks = []
    for worker in range(num_workers):
        names = [action.computation_type.name for action in order[worker] if action is not None]  # type: ignore[index]
        alive = [0]
        for name in names:
            alive.append(alive[-1] + (name == "FORWARD") - (name in ("FULL_BACKWARD", "BACKWARD_WEIGHT")))
        assert alive[-1] == 0
        peaks.append(max(alive))
    return peaks


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("workers", "microbatches"), [(1, 2), (2, 2), (2, 4), (3, 6), (4, 4), (4, 8), (4, 16)])
def test_as_many_microbatches_are_in_flight_as_foretold(schedule: str, workers: int, microbatches: int) -> None:
    foretold = [
        in_flight(schedule, worker, num_workers=workers, microbatches=microbatches) for worker in range(workers)
    ]
    assert foretold == most_at_once(schedule, workers, microbatches)


def test_checkpointed_layers_keep_their_inputs_only() -> None:
    tokens = torch.randint(0, 63, (2, 16))
    hidden = torch.randn(2, 16, 32, requires_grad=True)
    skeleton = build_skeleton(hf_config("llama"))
    plan = plan_stages(skeleton, 2)
    (stage,) = cut_stages(skeleton, plan, [0], seed=SEED, device=CPU)
    plain = activation_bytes(stage, tokens, tokens)
    assert plain > 10 * hidden.nbytes
    checkpoint_activations_(stage.blocks)
    assert activation_bytes(stage, tokens, tokens) < plain / 4
    assert all(param.grad is None for param in stage.parameters())
