"""What each process of the tests in this folder does, and the one process that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from atoll.models import build_model
from atoll.models.families import transformers_config
from atoll.parallel.memory import count_bytes
from atoll.parallel.mesh import build_mesh
from atoll.parallel.pipeline import ParallelModel, ParallelSettings, build_parallel
from atoll.parallel.shard_files import ShardReader, make_optimizer_state_, optimizer_values, write_shards
from atoll.parallel.sharding import local_rows
from atoll.train.config import ModelConfig

VOCAB, SEQUENCE, SEED = 63, 16, 3  # an odd vocabulary: rows that two workers cannot share evenly
BATCH = 8  # sequences of the whole replica a step
MAX_NORM = 0.5  # about half of the first norms, so that clipping acts
CPU = torch.device("cpu")

Rows = dict[str, tuple[tuple[int, int], Tensor]]


@dataclass(frozen=True)
class Case:
    """A model and how a replica runs it."""

    family: str
    settings: ParallelSettings
    tie: bool = False

    def __str__(self) -> str:
        words = [self.family, self.settings.schedule, self.settings.sharding]
        notes = {
            "tied": self.tie,
            "checkpointing": self.settings.activation_checkpointing,
            "split": self.settings.split,
        }
        return " ".join([*words, *(note for note, there in notes.items() if there)])


@dataclass(frozen=True)
class Trained:
    """What a worker knows after some steps. rows: those it owns. held_out: of `evaluate`."""

    losses: list[float]
    norms: list[float]
    rows: Rows
    held_out: tuple[float, int] = (0.0, 0)
    bytes_by_state: dict[str, int] | None = None


def _model_config(family: str, num_layers: int, tie: bool) -> ModelConfig:
    return ModelConfig(
        family=family, hidden_size=32, num_layers=num_layers, num_heads=2, intermediate_size=64, tie_embeddings=tie
    )


def hf_config(family: str, *, num_layers: int = 4, tie: bool = False) -> PreTrainedConfig:
    return transformers_config(_model_config(family, num_layers, tie), vocab_size=VOCAB, sequence_length=SEQUENCE)


def whole_model(family: str, *, num_layers: int = 4, tie: bool = False) -> PreTrainedModel:
    config = _model_config(family, num_layers, tie)
    return build_model(config, vocab_size=VOCAB, sequence_length=SEQUENCE, seed=SEED)


def batches(first: int, last: int) -> Tensor:
    """Token ids [steps, BATCH, SEQUENCE] of the steps [first, last)."""
    return torch.randint(0, VOCAB, (last, BATCH, SEQUENCE), generator=torch.Generator().manual_seed(11))[first:]


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, fused=True)


def train_alone(family: str, *, steps: int, tie: bool = False) -> Trained:
    """The whole model on one process."""
    model = whole_model(family, tie=tie)
    optimizer = optimizer_of(model.parameters())
    losses, norms = [], []
    for batch in batches(0, steps):
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        losses.append(float(loss.detach()))
    rows = {name: ((0, param.numel()), param.detach()) for name, param in model.named_parameters()}
    with torch.no_grad():
        five = batches(0, 1)[0][:5]
        held_out = float(model(input_ids=five, labels=five).loss) * 75, 75
    return Trained(losses, norms, rows, held_out)


def train_part(model: ParallelModel, optimizer: torch.optim.Optimizer, steps: Tensor) -> Trained:
    """The same with this worker's part of it."""
    losses, norms = [], []
    for batch in steps:
        optimizer.zero_grad()
        losses.append(model.compute_gradients(batch.chunk(model.mesh.num_data)[model.mesh.data]))
        norms.append(model.clip_gradients_(MAX_NORM))
        optimizer.step()
    return Trained(losses, norms, owned_rows(model))


def owned_rows(model: ParallelModel) -> Rows:
    return {name: (shard.flat_range, shard.tensor.clone()) for name, shard in model.shards().items()}


def assemble(workers: list[Rows], like: Rows) -> dict[str, Tensor]:
    """Whole parameters from what the workers own; every element must be owned exactly once."""
    whole = {name: torch.zeros(value.numel()) for name, (_, value) in like.items()}
    times = {name: torch.zeros(value.numel()) for name, (_, value) in like.items()}
    for rows in workers:
        for name, ((start, stop), values) in rows.items():
            assert values.numel() == stop - start
            whole[name][start:stop] += values.reshape(-1)
            times[name][start:stop] += 1
    for name, count in times.items():
        assert bool((count == 1).all()), f"{name} is owned {sorted(set(count.tolist()))} times"
    return {name: value.view_as(like[name][1]) for name, value in whole.items()}


def train_cases(_: int, num_data: int, num_stages: int, cases: list[Case], steps: int) -> list[Trained]:
    """Each case from its first weights, then evaluated on five sequences in batches of two."""
    mesh = build_mesh(num_data, num_stages, device=CPU)
    results = []
    for case in cases:
        model = build_parallel(hf_config(case.family, tie=case.tie), mesh, case.settings, seed=SEED)
        optimizer = optimizer_of(model.params.values())
        trained = train_part(model, optimizer, batches(0, steps))
        held_out = model.evaluate(batches(0, 1)[0][:5], batch_size=2)
        again = train_part(model, optimizer, batches(0, 1)[:, :, :8])  # another shape: the schedule is made anew
        assert again.losses[0] > 0
        held = count_bytes(model.params, optimizer)
        results.append(Trained(trained.losses, trained.norms, trained.rows, held_out, held))
    return results


def outer_step(_: int, num_data: int, num_stages: int, cases: list[Case]) -> list[tuple[Rows, list[Tensor]]]:
    """Each worker changes the rows it owns as an outer step would; what it then owns, and two losses after that."""
    mesh = build_mesh(num_data, num_stages, device=CPU)
    results = []
    for case in cases:
        model = build_parallel(hf_config(case.family, tie=case.tie), mesh, case.settings, seed=SEED)
        tokens = batches(0, 1)[0]
        own = tokens.chunk(num_data)[mesh.data]
        model.compute_gradients(own)
        for shard in model.shards().values():
            shard.tensor.mul_(0.5)
        model.gather_shards_()
        whole = [param.detach() for param in model.params.values() if not isinstance(param, DTensor)]
        assert case.settings.sharding == "shard" or len(whole) == len(model.params)
        losses = [torch.tensor(model.evaluate(tokens, batch_size=4)[0]), torch.tensor(model.compute_gradients(own))]
        results.append((owned_rows(model), losses))
    return results


def halved_alone(case: Case) -> tuple[float, float]:
    """Summed and mean loss of the whole model with all its weights halved."""
    model = whole_model(case.family, tie=case.tie)
    tokens = batches(0, 1)[0]
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
        loss = float(model(input_ids=tokens, labels=tokens).loss)
    return loss * BATCH * (SEQUENCE - 1), loss


def one_worker_has_a_bad_gradient(worker: int, num_data: int, num_stages: int, sharding: Any) -> list[Any]:
    """NaN in one worker's gradient: its norm everywhere, and whether anything was scaled."""
    mesh = build_mesh(num_data, num_stages, device=CPU)
    settings = ParallelSettings(microbatches=2, sharding=sharding)
    model = build_parallel(hf_config("llama"), mesh, settings, seed=SEED)
    model.compute_gradients(batches(0, 1)[0].chunk(num_data)[mesh.data])
    grads = {name: local_rows(param.grad) for name, param in model.params.items() if param.grad is not None}
    if mesh.stage == num_stages - 1 and (mesh.data == num_data - 1 or sharding == "replicate"):
        next(iter(grads.values())).view(-1)[0] = float("nan")
    before = {name: grad.clone() for name, grad in grads.items()}
    norm = model.clip_gradients_(1e-3)
    unscaled = all(torch.equal(before[name].nan_to_num(), grads[name].nan_to_num()) for name in grads)
    return [norm, unscaled, mesh.any(worker == 1), mesh.any(False), mesh.worker == worker]


def sum_is_the_same_everywhere(worker: int, num_data: int, num_stages: int) -> list[float]:
    mesh = build_mesh(num_data, num_stages, device=CPU)
    return mesh.sum(0.1 * (worker + 1), 1e16 if worker == 0 else -1e16 if worker == 1 else 1.0)


def mixed_precision_losses(_: int, num_data: int) -> list[list[float]]:
    """Losses in bf16 with copies and with shards, and the dtypes of what the worker keeps."""
    mesh = build_mesh(num_data, 1, device=CPU)
    results = []
    for sharding in ("replicate", "shard"):
        settings = ParallelSettings(schedule="gpipe", sharding=sharding, mixed_precision=torch.bfloat16)  # type: ignore[arg-type]
        model = build_parallel(hf_config("llama"), mesh, settings, seed=SEED)
        trained = train_part(model, optimizer_of(model.params.values()), batches(0, 3))
        assert all(param.dtype == torch.float32 for param in model.params.values())
        results.append(trained.losses)
    return results


def train_and_save(
    worker: int, num_data: int, num_stages: int, case: Case, steps: tuple[int, int], load: str, save: str
) -> Trained:
    """Go on from the checkpoint `load` ('' for none), of whatever layout, for some steps, and write `save`."""
    mesh = build_mesh(num_data, num_stages, device=CPU)
    config = hf_config(case.family, tie=case.tie)
    model = build_parallel(config, mesh, case.settings, seed=None if load else SEED)
    optimizer = optimizer_of(model.params.values())
    if load:
        load_checkpoint(model, optimizer, Path(load), step=steps[0])
    trained = train_part(model, optimizer, batches(*steps))
    save_checkpoint(model, optimizer, Path(save), worker)
    return trained


def save_checkpoint(model: ParallelModel, optimizer: torch.optim.Optimizer, folder: Path, worker: int) -> None:
    write_shards(folder / f"model-{worker}.safetensors", model.shards())
    for key, values in optimizer_values(model.params, optimizer).items():
        write_shards(folder / f"{key}-{worker}.safetensors", model.shards(values))


def load_checkpoint(model: ParallelModel, optimizer: torch.optim.Optimizer, folder: Path, *, step: int) -> None:
    ShardReader(folder.glob("model-*.safetensors")).fill_(model.held())
    make_optimizer_state_(model.params, optimizer, keys=("exp_avg", "exp_avg_sq"), step=step)
    for key, values in optimizer_values(model.params, optimizer).items():
        ShardReader(folder.glob(f"{key}-*.safetensors")).fill_(model.held(values))
