"""How a replica lies on its workers, from settings alone: which layers and rows each has. Nothing is built.

The same plan is checked before anything starts, shown by `--dry-run`, trained by, and compared with the memory that a
worker really holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from atoll.algo.fragments import strided_fragments
from atoll.compress import build_compressor
from atoll.errors import CheckpointError
from atoll.exchange import slice_bounds
from atoll.models.families import transformers_config
from atoll.parallel import ParallelSettings, StagePlan, build_skeleton, check_batch, in_flight, plan_stages
from atoll.parallel.cut import family_of
from atoll.parallel.pipeline import check_settings
from atoll.parallel.skeleton import Skeleton
from atoll.parallel.tied import tied_names
from atoll.train.config import TrainConfig

Shape = tuple[int, ...]
Shapes = dict[str, Shape]


@dataclass(frozen=True)
class Layout:
    """The workers of one replica.

    names: of all parameters in the order of the whole model, tied ones once. stages: for each place on the axis
    `stage`, the full shapes of what its workers hold, by name; `copy` of the last one is what another stage owns.
    """

    config: TrainConfig
    plan: StagePlan
    names: tuple[str, ...]
    stages: tuple[Shapes, ...]
    copy: str = ""

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return sum(math.prod(shape) for stage in self.stages for name, shape in stage.items() if name != self.copy)

    def held(self, stage: int) -> Shapes:
        """What a worker of `stage` computes with: the full shapes of its layers, or of their rows where sharded."""
        full = self.stages[stage]
        if self.config.sharding == "replicate" or self.config.data_workers == 1:
            return full
        return {name: _rows(shape, math.ceil(shape[0] / self.config.data_workers)) for name, shape in full.items()}

    def owned(self, stage: int, data: int = 0) -> Shapes:
        """What of it the worker at place `data` brings to a sync: whole rows, and each of them once a replica."""
        full = {name: shape for name, shape in self.stages[stage].items() if name != self.copy}
        rows = {name: _rows(shape, self._share(shape[0], data)) for name, shape in full.items()}
        return {name: shape for name, shape in rows.items() if shape[0]}

    def fragments(self) -> list[list[str]]:
        """Names by fragment, over the whole model."""
        return strided_fragments(self.names, self.config.fragments)

    def sent_bytes(self, stage: int, data: int = 0) -> int:
        """That the worker at a place sends to the other replicas in a round, all fragments together."""
        compressor = build_compressor(self.config.compressor, self.config.compressor_options)
        owned = self.owned(stage, data)
        shapes: list[Shape] = []
        for names in self.fragments():
            held = [owned[name] for name in names if name in owned]
            shapes += [(sum(map(math.prod, held)),)] if compressor.elementwise and held else held
        size = {"num_replicas": self.config.replicas, "replica": 0}
        return sum(compressor.sent_bytes(shape, **size) for shape in shapes)

    def _share(self, rows: int, data: int) -> int:
        if self.config.sharding == "replicate":
            bounds = slice_bounds(rows, self.config.data_workers)
            return bounds[data + 1] - bounds[data]
        each = math.ceil(rows / self.config.data_workers)
        return max(0, min(rows, each * (data + 1)) - each * data)


def model_config(config: TrainConfig, *, vocab_size: int) -> PreTrainedConfig:
    """The transformers configuration of the run's model. vocab_size: of the tokenizer.

    Raises ConfigError for sizes that do not fit together, CheckpointError for an `init_from` without a model.
    """
    if not config.init_from:
        sizes = max(config.model.vocab_size, vocab_size)
        return transformers_config(config.model, vocab_size=sizes, sequence_length=config.sequence_length)
    folder = initial_folder(config)
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'} cannot be used: {str(error).splitlines()[0]}. Use another model folder."
        ) from error


def initial_folder(config: TrainConfig) -> Path:
    """Where the weights of `init_from` are: at its top or in `model/`."""
    top = Path(config.init_from)
    for folder in (top, top / "model"):
        if (folder / "config.json").is_file():
            return folder
    raise CheckpointError(
        f"{top} has no config.json, at its top or in model/. Give a checkpoint or a folder of save_pretrained."
    )


def parallel_settings(config: TrainConfig, *, bfloat16: bool = False) -> ParallelSettings:
    """How the workers of a replica compute together."""
    return ParallelSettings(
        schedule=config.pipeline_schedule,
        microbatches=config.resolved_microbatches,
        sharding=config.sharding,
        mixed_precision=torch.bfloat16 if bfloat16 else None,
        activation_checkpointing=config.activation_checkpointing,
    )


def make_layout(config: TrainConfig, *, vocab_size: int = 1) -> Layout:
    """The layout that `config` describes.

    Raises ConfigError, with the value that would do, for what cannot be laid out: more stages than layers, fewer
    microbatches than stages, a family that cannot be cut.
    """
    built = model_config(config, vocab_size=vocab_size)
    check_settings(built, parallel_settings(config), num_workers=config.pipeline_stages)
    check_batch(
        config.sequences_a_worker,
        config.resolved_microbatches,
        num_workers=config.pipeline_stages,
        schedule=config.pipeline_schedule,
    )
    skeleton = build_skeleton(built)
    plan = plan_stages(skeleton, config.pipeline_stages, schedule=config.pipeline_schedule)
    return layout_of(config, skeleton, plan)


def waiting_microbatches(config: TrainConfig, stage: int) -> int:
    """Forwards on a worker of `stage` whose backward is still to come, at most at once; see `in_flight`."""
    return in_flight(
        config.pipeline_schedule,
        stage,
        num_workers=config.pipeline_stages,
        microbatches=config.resolved_microbatches,
    )


def layout_of(config: TrainConfig, skeleton: Skeleton, plan: StagePlan) -> Layout:
    """The layout of a plan that is made already."""
    shapes = {name: tuple(param.shape) for name, param in skeleton.model.named_parameters()}
    by_stage = _by_stage(skeleton, plan, shapes)
    tied = tied_names(skeleton.model) if plan.num_stages > 1 else None
    if tied is not None:
        by_stage[-1][tied[1]] = shapes[tied[0]]
    workers = [
        {name: shape for stage in plan.stages_of_worker(worker) for name, shape in by_stage[stage].items()}
        for worker in range(plan.num_workers)
    ]
    return Layout(config, plan, tuple(shapes), tuple(workers), tied[1] if tied is not None else "")


def _by_stage(skeleton: Skeleton, plan: StagePlan, shapes: Mapping[str, Shape]) -> list[Shapes]:
    """Full shapes by stage of the model, tied ones in the first alone."""
    family = family_of(skeleton.model.config)
    layers = f"{family.body}.{family.layers}."
    first = tuple(f"{family.body}.{name}." for name in family.first)
    stages: list[Shapes] = [{} for _ in range(plan.num_stages)]
    for name, shape in shapes.items():
        if name.startswith(layers):
            stage = plan.stage_of_layer(int(name.removeprefix(layers).partition(".")[0]))
        else:
            stage = 0 if name.startswith(first) else plan.num_stages - 1
        stages[stage][name] = shape
    return stages


def _rows(shape: Sequence[int], rows: int) -> Shape:
    return (rows, *shape[1:])
