"""One replica's model on many workers: stages of layers, each replicated or sharded over the axis `data`.

    for batch in ...:                                   # every worker of a row reads the same sequences
        optimizer.zero_grad()
        loss = model.compute_gradients(batch)           # the schedule; gradients averaged over `data`
        norm = model.clip_gradients_(1.0)               # over all workers and stages
        if norm < float("inf"):                         # the same on every worker
            optimizer.step()

With one stage this is plain or sharded data parallelism, and `microbatches` is gradient accumulation.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from transformers import PreTrainedConfig

from atoll.errors import ConfigError
from atoll.parallel.clipping import clip_gradients_
from atoll.parallel.cut import Stage
from atoll.parallel.mesh import ReplicaMesh
from atoll.parallel.plan import SCHEDULES, StagePlan, check_batch, plan_stages
from atoll.parallel.sharding import (
    Shard,
    Sharding,
    average_gradients_,
    checkpoint_activations_,
    drop_gathered_,
    gather_shards_,
    held_shards,
    local_shards,
    shard_module_,
)
from atoll.parallel.skeleton import Skeleton, build_skeleton, give_weights_
from atoll.parallel.tied import TiedEmbedding, tied_names


@dataclass(frozen=True)
class ParallelSettings:
    """How one replica computes.

    schedule: a name in `SCHEDULES`. microbatches: parts of a worker's batch that follow each other through the stages.
    split: layers of each stage; None: evenly by parameters. sharding: of each stage over the axis `data`.
    mixed_precision: dtype of the arithmetic; parameters, gradients and sums stay fp32.
    """

    schedule: str = "1f1b"
    microbatches: int = 1
    split: Sequence[int] | None = None
    sharding: Sharding = "replicate"
    mixed_precision: torch.dtype | None = None
    activation_checkpointing: bool = False


class ParallelModel:
    """This worker's stages of the model, and the schedule that runs them with the other workers' ones.

    params: everything trainable that this worker holds, by its name in the whole model. copies: names among them that
    another worker owns: the head of a tied model, which is kept equal to the embedding of the first stage.
    """

    def __init__(self, stages: Sequence[Stage], plan: StagePlan, mesh: ReplicaMesh, settings: ParallelSettings) -> None:
        self.stages = list(stages)
        self.plan = plan
        self.mesh = mesh
        self.settings = settings
        self.config: PreTrainedConfig = stages[0].model.config
        self.params = {name: param for stage in stages for name, param in stage.named_weights().items()}
        self._tied = self._find_tied()
        self.copies = {self._tied.copy} & self.params.keys() if self._tied else set()
        self._schedules: dict[torch.Size, Any] = {}

    def compute_gradients(self, tokens: Tensor) -> float:
        """Forward and backward of one step, from no gradients (None or zeros) to the mean over the replica's sequences.

        tokens: ids [batch, sequence], the same on all workers of a row. Returns the mean next-token loss in nats of the
        whole replica, the same on every worker.

        Raises ConfigError when the microbatches do not divide the batch or do not suit the schedule.
        """
        losses: list[Tensor] = []
        tokens = tokens.to(self.mesh.device)
        first, last = self.stages[0].is_first, self.stages[-1].is_last
        schedule = self._schedule(tokens.shape)
        schedule.step(
            *([tokens] if first else []), target=tokens if last else None, losses=losses, return_outputs=False
        )
        average_gradients_(self.params.values(), self.mesh)
        if self._tied:
            self._tied.add_gradients_()
        own = float(torch.stack(losses).detach().mean()) / self.mesh.num_data if last else 0.0
        return self.mesh.sum(own)[0]

    def clip_gradients_(self, max_norm: float) -> float:
        """Clip by the norm over all stages and shards; see `clip_gradients_` of `atoll.parallel.clipping`."""
        return clip_gradients_(self.params, self.mesh, max_norm=max_norm, copies=self.copies)

    def shards(self, values: Mapping[str, Tensor] | None = None) -> dict[str, Shard]:
        """What this worker owns of the replica's parameters: every element is owned by exactly one worker.

        values: tensors of the same names and shapes instead, such as a moment of the optimizer or an anchor.
        """
        values = self.params if values is None else values
        return local_shards({name: value for name, value in values.items() if name not in self.copies}, self.mesh)

    def held(self, values: Mapping[str, Tensor] | None = None) -> list[tuple[str, Shard]]:
        """What this worker holds, for those who fill it from files; a tied copy under the name of its owner."""
        held = held_shards(self.params if values is None else values)
        return [(self._tied.owner if self._tied and name in self.copies else name, held[name]) for name in held]

    def gather_shards_(self) -> None:
        """Bring what other workers own up to date after all of them changed their `shards`. Collective."""
        gather_shards_(self.params, self.mesh)
        if self._tied:
            self._tied.copy_weights_()
        for stage in self.stages:
            drop_gathered_(stage)

    @torch.no_grad()
    def evaluate(self, sequences: Tensor, *, batch_size: int) -> tuple[float, int]:
        """Summed loss in nats, and predicted tokens, of `sequences` [number, sequence]: the same on every worker.

        Each worker is given all of them; the rows of the mesh share the work. Collective.
        """
        chunks = sequences.to(self.mesh.device).split(batch_size)
        rounds = -(-len(chunks) // self.mesh.num_data)  # all rows take part in every round: FSDP gathers in each
        mine = [round_ * self.mesh.num_data + self.mesh.data for round_ in range(rounds)]
        counts = [index < len(chunks) for index in mine]
        tokens = [chunks[min(index, len(chunks) - 1)] for index in mine]
        self._train(False)
        losses = self._forward(tokens)
        self._train(True)
        predicted = [part.shape[0] * (part.shape[1] - 1) for part in tokens]
        total = sum(loss * n for loss, n, count in zip(losses, predicted, counts, strict=True) if count)
        number = sum(n for n, count in zip(predicted, counts, strict=True) if count and self.stages[-1].is_last)
        nats, seen = self.mesh.sum(float(total), number)
        return nats, int(seen)

    def _train(self, mode: bool) -> None:
        for stage in self.stages:
            stage.train(mode)

    def _forward(self, batches: Sequence[Tensor]) -> list[float]:
        """The loss of each batch where the last stage is, zeros elsewhere; waves of batches keep all stages busy."""
        losses = []
        for start in range(0, len(batches), self.plan.num_workers):
            losses += self._wave(batches[start : start + self.plan.num_workers])
        for stage in self.stages:
            drop_gathered_(stage)
        return losses

    def _wave(self, batches: Sequence[Tensor]) -> list[float]:
        losses = [0.0] * len(batches)
        handed_on: dict[int, list[Tensor]] = {}
        sends: list[tuple[Any, Tensor]] = []  # a tensor must live until it is sent
        for stage in self.stages:
            for i, tokens in enumerate(batches):
                inputs = tokens if stage.is_first else self._receive(stage, tokens, handed_on, i)
                outputs = stage(inputs)
                if stage.is_last:
                    losses[i] = float(stage.loss(outputs, tokens))
                elif self.plan.worker_of_stage(stage.index + 1) == self.mesh.stage:
                    handed_on.setdefault(stage.index + 1, []).append(outputs)
                else:
                    to = self.plan.worker_of_stage(stage.index + 1)
                    sends.append((dist.isend(outputs, group=self.mesh.stage_group, group_dst=to), outputs))
        for work, _ in sends:
            work.wait()
        return losses

    def _receive(self, stage: Stage, tokens: Tensor, handed_on: dict[int, list[Tensor]], i: int) -> Tensor:
        if stage.index in handed_on:
            return handed_on[stage.index][i]
        hidden = torch.empty(
            *tokens.shape, self.config.hidden_size, dtype=stage.activation_dtype, device=self.mesh.device
        )
        source = self.plan.worker_of_stage(stage.index - 1)
        dist.recv(hidden, group=self.mesh.stage_group, group_src=source)
        return hidden

    def _find_tied(self) -> TiedEmbedding | None:
        names = tied_names(self.stages[0].model)
        if names is None or self.plan.num_stages == 1:
            return None
        ends = self.plan.worker_of_stage(0), self.plan.worker_of_stage(self.plan.num_stages - 1)
        return TiedEmbedding(self.params, *names, *ends, self.mesh)

    def _schedule(self, shape: torch.Size) -> Any:
        if shape not in self._schedules:
            self._schedules = {shape: self._build_schedule(*shape)}
        return self._schedules[shape]

    def _build_schedule(self, batch: int, sequence: int) -> Any:
        count = self.settings.microbatches
        check_batch(batch, count, num_workers=self.plan.num_workers, schedule=self.plan.schedule)
        stages = [self._torch_stage(stage, batch // count, sequence) for stage in self.stages]
        kind = SCHEDULES[self.plan.schedule]
        loss = self.stages[-1].loss
        if kind.stages_per_worker == 1:
            return kind.kind(stages[0], count, loss_fn=loss)  # type: ignore[arg-type]
        return kind.kind(stages, count, loss_fn=loss)  # type: ignore[arg-type]

    def _torch_stage(self, stage: Stage, batch: int, sequence: int) -> PipelineStage:
        """Shapes are said here: torch would find them by a forward whose random numbers we would miss."""
        width = self.config.hidden_size
        hidden = torch.empty(batch, sequence, width, dtype=stage.activation_dtype, device="meta", requires_grad=True)
        tokens = torch.empty(batch, sequence, dtype=torch.int64, device="meta")
        logits = torch.empty(batch, sequence, self.config.vocab_size, device="meta", requires_grad=True)
        return PipelineStage(
            stage,
            stage.index,
            stage.num_stages,
            self.mesh.device,
            input_args=tokens if stage.is_first else hidden,
            output_args=logits if stage.is_last else hidden,
            group=self.mesh.stage_group,
        )


def build_parallel(
    config: PreTrainedConfig, mesh: ReplicaMesh, settings: ParallelSettings, *, seed: int | None
) -> ParallelModel:
    """This worker's part of the model of `config`, with the first weights that the whole model has with `seed`.

    No worker ever holds more than its own stages and one more tensor. seed None leaves the weights undefined, for those
    who load some. Collective.

    Raises ConfigError for settings that do not fit the model or the mesh, and for a family that cannot be cut.
    """
    check_settings(config, settings, num_workers=mesh.num_stages)
    skeleton = build_skeleton(config)
    plan = plan_stages(skeleton, mesh.num_stages, schedule=settings.schedule, split=settings.split)
    stages = cut_stages(skeleton, plan, plan.stages_of_worker(mesh.stage), seed=seed, device=mesh.device)
    for stage in stages:
        _prepare_(stage, mesh, settings)
    return ParallelModel(stages, plan, mesh, settings)


def cut_stages(
    skeleton: Skeleton, plan: StagePlan, indices: Sequence[int], *, seed: int | None, device: torch.device
) -> list[Stage]:
    """The stages `indices` of a model with their weights on `device`. The skeleton is used up."""
    shared: dict[int, Any] = {id(param): param for param in skeleton.model.parameters()}
    models = [copy.deepcopy(skeleton.model, dict(shared)) for _ in indices]
    stages = [
        Stage(model, plan.layers[index], index=index, num_stages=plan.num_stages)
        for model, index in zip(models, indices, strict=True)
    ]
    give_weights_(nn.ModuleList(stages), skeleton.fills, seed=seed, device=device)
    if len(stages) > 1 and stages[-1].is_last:
        _untie_(stages[-1])
    return stages


def _untie_(stage: Stage) -> None:
    """A parameter in two stages of one worker would have its gradient divided by the microbatches twice."""
    head = stage.model.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone())


def _prepare_(stage: Stage, mesh: ReplicaMesh, settings: ParallelSettings) -> None:
    if settings.activation_checkpointing:
        checkpoint_activations_(stage.blocks)
    if settings.sharding == "replicate":
        stage.autocast = settings.mixed_precision
        return
    stage.activation_dtype = settings.mixed_precision or torch.float32
    keep = mesh.num_stages > 1  # a stage sees many microbatches in a row
    shard_module_(stage, stage.blocks, mesh, mixed_precision=settings.mixed_precision, reshard_after_forward=not keep)


def check_settings(config: PreTrainedConfig, settings: ParallelSettings, *, num_workers: int) -> None:
    """Raises ConfigError for what a pipeline of `num_workers` would compute wrongly, or many times over."""
    if num_workers > 1 and getattr(config, "layerdrop", 0.0) > 0:
        raise ConfigError(
            f"layerdrop={config.layerdrop} would drop layers by the random numbers of each stage. "
            f"Use layerdrop=0, or pipeline_stages=1."
        )
    if settings.activation_checkpointing and settings.schedule == "zero-bubble":
        raise ConfigError(
            "activation_checkpointing with pipeline_schedule='zero-bubble' would compute every layer again for each of "
            "its matrices (10 times in a Llama). Use 'interleaved' or '1f1b', or no activation_checkpointing."
        )
