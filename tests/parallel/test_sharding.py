"""What a worker holds and owns, and what all workers of a replica decide together."""

from __future__ import annotations

import pytest
import torch
from parallel import parallel_work as work
from parallel.parallel_work import Case, Rows
from spawn import run_replicas
from torch import nn

from atoll.parallel.mesh import worker_at
from atoll.parallel.pipeline import ParallelSettings
from atoll.parallel.refine import Owners, refine
from atoll.parallel.sharding import Shard, Sharding, checkpoint_activations_

STEPS = 5
ONE_STAGE = [  # without a pipeline, microbatches are gradient accumulation
    Case("llama", ParallelSettings("gpipe", 2, sharding="shard")),
    Case("llama", ParallelSettings("1f1b", 2, sharding="replicate")),
    Case("gpt2", ParallelSettings("gpipe", 1, sharding="shard"), tie=True),
    Case("opt", ParallelSettings("gpipe", 1, sharding="shard", activation_checkpointing=True)),
    Case("qwen2", ParallelSettings("interleaved", 2)),
    Case("gpt2", ParallelSettings("zero-bubble", 2), tie=True),
]
SYNCED = [
    Case("llama", ParallelSettings("1f1b", 2, sharding="replicate")),
    Case("llama", ParallelSettings("1f1b", 2, sharding="shard")),
    Case("gpt2", ParallelSettings("1f1b", 2, sharding="replicate"), tie=True),
    Case("gpt2", ParallelSettings("1f1b", 2, sharding="shard"), tie=True),
]


def test_two_workers_of_one_stage_are_one_process() -> None:
    results = run_replicas(work.train_cases, 2, 2, 1, ONE_STAGE, STEPS, timeout_s=120)
    for i, case in enumerate(ONE_STAGE):
        single = work.train_alone(case.family, steps=STEPS, tie=case.tie)
        workers = [worker[i] for worker in results]
        assert workers[0].losses == workers[1].losses == pytest.approx(single.losses, abs=2e-6)
        assert workers[0].norms == workers[1].norms == pytest.approx(single.norms, rel=2e-5)
        assert workers[0].held_out == workers[1].held_out == pytest.approx(single.held_out, rel=1e-5)
        for name, value in work.assemble([worker.rows for worker in workers], single.rows).items():
            torch.testing.assert_close(value, single.rows[name][1], atol=3e-5, rtol=0)


@pytest.fixture(scope="module")
def islands() -> dict[tuple[int, int], list[list[tuple[Rows, list[torch.Tensor]]]]]:
    """Replicas of (data, stage) workers after each worker halved what it owns."""
    shapes = [(2, 1), (1, 2), (2, 2)]
    return {shape: run_replicas(work.outer_step, shape[0] * shape[1], *shape, SYNCED) for shape in shapes}


@pytest.mark.parametrize("i", range(len(SYNCED)), ids=[str(case) for case in SYNCED])
def test_what_owners_change_is_changed_everywhere(islands, i: int) -> None:  # type: ignore[no-untyped-def]
    expected = work.halved_alone(SYNCED[i])
    start = work.whole_model(SYNCED[i].family, tie=SYNCED[i].tie)
    like = {name: ((0, param.numel()), param.detach()) for name, param in start.named_parameters()}
    for workers in islands.values():
        for name, value in work.assemble([worker[i][0] for worker in workers], like).items():
            assert torch.equal(value, like[name][1] * 0.5), name
        for worker in workers:
            summed, mean = worker[i][1]
            assert float(summed) == pytest.approx(expected[0], rel=1e-5)
            assert float(mean) == pytest.approx(expected[1], rel=1e-5)


@pytest.mark.parametrize("i", range(len(SYNCED)), ids=[str(case) for case in SYNCED])
def test_islands_of_different_shapes_have_a_common_refinement(islands, i: int) -> None:  # type: ignore[no-untyped-def]
    owners: list[Owners] = [
        [{name: span for name, (span, _) in worker[i][0].items()} for worker in workers] for workers in islands.values()
    ]
    pieces = refine(owners)
    model = work.whole_model(SYNCED[i].family, tie=SYNCED[i].tie)
    assert sum(piece.numel for held in pieces.values() for piece in held) == sum(p.numel() for p in model.parameters())
    for holders, held in pieces.items():
        for piece in held:
            values = [
                _shard(workers[worker][i][0], piece.name).part(piece.start, piece.stop)
                for worker, workers in zip(holders, islands.values(), strict=True)
            ]
            assert all(torch.equal(value, values[0]) for value in values)


def _shard(rows: Rows, name: str) -> Shard:
    (start, stop), tensor = rows[name]
    return Shard(tensor, start, stop, torch.Size([stop]))


@pytest.mark.parametrize("sharding", ["replicate", "shard"])
def test_one_bad_gradient_is_seen_by_all_and_scales_nothing(sharding: Sharding) -> None:
    for result in run_replicas(work.one_worker_has_a_bad_gradient, 4, 2, 2, sharding):
        norm, unscaled, any_of_one, any_of_none, numbered = result
        assert norm != norm  # NaN
        assert unscaled and any_of_one and not any_of_none and numbered


def test_sums_are_the_same_bits_on_every_worker_however_badly_they_cancel() -> None:
    sums = run_replicas(work.sum_is_the_same_everywhere, 3, 3, 1)
    assert sums[0] == sums[1] == sums[2]
    assert sums[0] == pytest.approx([0.6, 1.0])


def test_bf16_arithmetic_keeps_fp32_weights_and_trains() -> None:
    single = work.train_alone("llama", steps=3)
    for copies, shards in run_replicas(work.mixed_precision_losses, 2, 2):
        assert copies == pytest.approx(single.losses, abs=0.03)
        assert shards == pytest.approx(single.losses, abs=0.03)
        assert copies != single.losses and shards != single.losses


def test_a_mesh_that_does_not_fit_says_what_would() -> None:
    with pytest.raises(AssertionError, match="3 x pipeline_stages=1 is 3 workers, and the replica has 1"):
        run_replicas(work.sum_is_the_same_everywhere, 1, 3, 1)


def test_workers_of_a_column_are_neighbours() -> None:
    assert [worker_at(data, 1, num_data=4) for data in range(4)] == [4, 5, 6, 7]


def test_a_checkpointed_block_runs_again_in_the_backward() -> None:
    calls = []

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("forward")
            return self.inner(x).relu()

    block = Block()
    plain = torch.autograd.grad(block(torch.ones(2, 4)).sum(), block.inner.weight)[0]
    names = [name for name, _ in block.named_parameters()]
    checkpoint_activations_([block])
    calls.clear()
    again = torch.autograd.grad(block(torch.ones(2, 4)).sum(), block.inner.weight)[0]
    assert calls == ["forward", "forward"]
    assert torch.equal(plain, again)
    assert [name for name, _ in block.named_parameters()] == names
