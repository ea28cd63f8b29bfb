"""Which worker holds which stages of the model, for each pipeline schedule. No process group is needed to ask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from atoll.errors import ConfigError, nearest
from atoll.parallel.cut import family_of, given_split, split_layers
from atoll.parallel.skeleton import Skeleton


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule of torch.

    stages_per_worker: how many stages of the model a worker holds. style: which ones; with 2 workers, `loop` gives
    worker 0 the stages 0 and 2, and `v` the stages 0 and 3.
    """

    kind: type[PipelineScheduleSingle] | type[PipelineScheduleMulti]
    stages_per_worker: int = 1
    style: Literal["loop", "v"] = "loop"


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(ScheduleGPipe),
    "1f1b": Schedule(Schedule1F1B),
    "interleaved": Schedule(ScheduleInterleaved1F1B, stages_per_worker=2),
    "zero-bubble": Schedule(ScheduleZBVZeroBubble, stages_per_worker=2, style="v"),
}


@dataclass(frozen=True)
class StagePlan:
    """How a model is spread over the workers of a pipeline.

    layers: of each stage of the model, in order. num_parameters: of each stage; a tied embedding counts in the first
    and in the last stage, for both hold it.
    """

    schedule: str
    num_workers: int
    layers: tuple[range, ...]
    num_parameters: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    def worker_of_stage(self, stage: int) -> int:
        """
        >>> loop = StagePlan("interleaved", 2, tuple(range(i, i + 1) for i in range(4)), (0,) * 4)
        >>> v = StagePlan("zero-bubble", 2, tuple(range(i, i + 1) for i in range(4)), (0,) * 4)
        >>> [loop.worker_of_stage(i) for i in range(4)], [v.worker_of_stage(i) for i in range(4)]
        ([0, 1, 0, 1], [0, 1, 1, 0])
        """
        turn, place = divmod(stage, self.num_workers)
        backwards = SCHEDULES[self.schedule].style == "v" and turn % 2 == 1
        return self.num_workers - 1 - place if backwards else place

    def stages_of_worker(self, worker: int) -> list[int]:
        return [stage for stage in range(self.num_stages) if self.worker_of_stage(stage) == worker]

    def stage_of_layer(self, layer: int) -> int:
        return next(stage for stage, layers in enumerate(self.layers) if layer in layers)

    def parameters_of_worker(self, worker: int) -> int:
        """Numbers that a worker holds, before they are sharded over the axis `data`."""
        return sum(self.num_parameters[stage] for stage in self.stages_of_worker(worker))

    def bubble(self, microbatches: int) -> float:
        """Share of a step that a worker idles, (p-1)/(m v + p-1) for p workers of v stages and m microbatches.

        Exact for equal stages with a backward twice as long as a forward; for `zero-bubble` it is the bound that the
        weights' backward then fills.

        >>> plan = StagePlan("1f1b", 4, tuple(range(i, i + 1) for i in range(4)), (0,) * 4)
        >>> round(plan.bubble(12), 3)
        0.2
        """
        work = microbatches * (self.num_stages // self.num_workers)
        return (self.num_workers - 1) / (work + self.num_workers - 1)


def plan_stages(
    skeleton: Skeleton, num_workers: int, *, schedule: str = "1f1b", split: Sequence[int] | None = None
) -> StagePlan:
    """Cut a model into stages for `num_workers` workers, evenly by parameters or by `split` (layers of each stage).

    Raises ConfigError for an unknown schedule, a family that cannot be cut, a split that does not fit, and more stages
    than layers.
    """
    num_stages = num_workers * find_schedule(schedule).stages_per_worker
    layer_sizes, first, last = _sizes(skeleton)
    _check_layers(len(layer_sizes), num_workers, schedule)
    if split is None:
        layers = split_layers(layer_sizes, num_stages, first=first, last=last)
    else:
        layers = given_split(split, len(layer_sizes), num_stages)
    sizes = [sum(layer_sizes[i] for i in part) for part in layers]
    sizes[0] += first
    sizes[-1] += last
    if num_stages == 1 and skeleton.model.config.tie_word_embeddings:
        sizes[0] -= skeleton.model.get_input_embeddings().weight.numel()
    return StagePlan(schedule, num_workers, tuple(layers), tuple(sizes))


def find_schedule(name: str) -> Schedule:
    """Raises ConfigError for a name that is not in `SCHEDULES`."""
    if name not in SCHEDULES:
        raise ConfigError(
            f"pipeline_schedule={name!r} is not known.{nearest(name, SCHEDULES)} Use one of {', '.join(SCHEDULES)}."
        )
    return SCHEDULES[name]


def check_batch(batch_size: int, microbatches: int, *, num_workers: int, schedule: str) -> None:
    """Raises ConfigError for microbatches that the schedule cannot run or that do not divide the batch.

    batch_size: sequences of one worker of the axis `data` a step.
    """
    if microbatches < num_workers:
        raise ConfigError(
            f"microbatches={microbatches} is less than pipeline_stages={num_workers}; some stages would never be busy "
            f"together. Use at least {num_workers}."
        )
    if find_schedule(schedule).stages_per_worker > 1 and microbatches % (microbatches // num_workers):
        raise ConfigError(
            f"microbatches={microbatches} do not come in equal rounds of about {num_workers}, as {schedule} runs "
            f"them. Use {microbatches // num_workers * num_workers}."
        )
    if batch_size % microbatches:
        raise ConfigError(
            f"batch_size={batch_size} is not a multiple of microbatches={microbatches}. "
            f"Use {_nearest_multiple(batch_size, microbatches)}{_or_microbatches(batch_size, num_workers)}."
        )


def _nearest_multiple(number: int, of: int) -> int:
    return max(1, round(number / of)) * of


def _or_microbatches(batch_size: int, num_workers: int) -> str:
    fitting = next((m for m in range(num_workers, batch_size + 1) if batch_size % m == 0), None)
    return f", or microbatches={fitting}" if fitting else ""


def _check_layers(num_layers: int, num_workers: int, schedule: str) -> None:
    each = find_schedule(schedule).stages_per_worker
    if num_workers * each > num_layers:
        most = num_layers // each
        why = f" and {schedule} gives every worker {each} stages" if each > 1 else ""
        raise ConfigError(
            f"pipeline_stages={num_workers} is too many for a model of {num_layers} layers: a stage needs at least one"
            f"{why}. Use {f'at most {most}' if most else 'another schedule'}."
        )


def _sizes(skeleton: Skeleton) -> tuple[list[int], int, int]:
    """Parameters of each layer, of what the first stage holds besides, and of what the last does."""
    model = skeleton.model
    family = family_of(model.config)
    body = model.get_submodule(family.body)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in family.layer_list(model)]

    def size(names: Sequence[str]) -> int:
        modules = [getattr(body, name) for name in names]
        return sum(p.numel() for module in modules if module is not None for p in module.parameters())

    head = sum(p.numel() for p in model.lm_head.parameters())
    return layers, size(list(family.first)), size(list(family.last)) + head
