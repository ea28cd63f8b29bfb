"""`atoll train ... --dry-run`: what each worker would hold and send, from the settings alone. Nothing is started.

State is exact: it is the plan that trains. Activations are an estimate (34 bytes a token, layer and unit of width in 16
bits, twice that in fp32; attention computed in pieces), times the microbatches that wait for their backward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from atoll.errors import ConfigError
from atoll.plan.estimate import Estimate, Method, Workload, estimate
from atoll.plan.links import uniform
from atoll.plan.memory import ACTIVATION_BYTES
from atoll.plan.payload import Coding
from atoll.plan.shapes import ModelShape, shape_of_hf_config, shape_of_settings
from atoll.plan.units import (
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_seconds,
)
from atoll.train.build import make_schedule
from atoll.train.config import TrainConfig
from atoll.train.console import print_line
from atoll.train.layout import Layout, initial_folder, make_layout, waiting_microbatches
from atoll.train.memory import ON_HOST, predict_memory

FLAGS = {"--memory": "40GB", "--step-time": "8.79s", "--link": "1gbit"}  # each with an example or its default
WIDTH = 180
SHORT = {"gradients": "grads", "inner optimizer": "optimizer", "outer state": "momentum", "compressor": "codes"}


@dataclass(frozen=True)
class Options:
    """What is asked besides the settings of the run.

    memory_bytes: of a device. step_s: of an inner step, pipeline bubble included. link_bytes_per_s: of an island.
    """

    as_json: bool = False
    memory_bytes: float = 40e9
    step_s: float | None = None
    link_bytes_per_s: float = 125e6


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes of the fullest worker of a stage, by state."""

    stage: int
    layers: tuple[int, ...]
    num_parameters: int
    on_device: dict[str, int]
    on_host: dict[str, int]
    activations: int
    sent_bytes: int

    @property
    def device_bytes(self) -> int:
        return sum(self.on_device.values()) + self.activations


@dataclass(frozen=True)
class DryRun:
    """The answer. throughput: where the time of a step was given. ways_out: settings that would fit, or nothing."""

    layout: Layout
    options: Options
    stages: list[WorkerMemory]
    bubble: float
    sent_bytes: int
    throughput: Estimate | None
    ways_out: str


def options_from(args: Sequence[str]) -> tuple[Options | None, list[str]]:
    """The flags that belong to a dry run, and the rest; None where there are none of them.

    >>> options_from(["quickstart", "--dry-run", "--memory", "80GB"])[1]
    ['quickstart', '--dry-run']
    """
    given: dict[str, str] = {}
    rest: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--json" and not equals:
            given[name] = "yes"
        elif name in FLAGS:
            given[name] = value if equals else next(words, "")
            if not given[name] or given[name].startswith("--"):
                raise ConfigError(f"{name} needs a value, as in {name} {FLAGS[name]}.")
        else:
            rest.append(word)
    if not given:
        return None, rest
    step = given.get("--step-time", "")
    return Options(
        as_json="--json" in given,
        memory_bytes=parse_bytes(given.get("--memory", FLAGS["--memory"])),
        step_s=parse_seconds(step) if step else None,
        link_bytes_per_s=parse_bandwidth(given.get("--link", FLAGS["--link"])),
    ), rest


def dry_run(config: TrainConfig, options: Options) -> None:
    """Print what `config` would come to."""
    answer = make_dry_run(config, options)
    if options.as_json:
        print_line(json.dumps(as_json(answer), indent=1))
    else:
        console = Console(highlight=False)
        console.width = console.width if console.is_terminal else max(WIDTH, console.width)
        show(answer, console)


def make_dry_run(config: TrainConfig, options: Options) -> DryRun:
    """Raises ConfigError for what cannot be laid out."""
    shape = model_shape(config)
    layout = make_layout(config, vocab_size=shape.vocab_size)
    stages = [worker_memory(layout, shape, stage) for stage in range(config.pipeline_stages)]
    sent = sum(
        layout.sent_bytes(stage, data) for stage in range(config.pipeline_stages) for data in range(config.data_workers)
    )
    return DryRun(
        layout=layout,
        options=options,
        stages=stages,
        bubble=layout.plan.bubble(config.resolved_microbatches),
        sent_bytes=sent if config.replicas > 1 else 0,
        throughput=_throughput(config, shape, options),
        ways_out=_ways_out(config, shape, stages, options.memory_bytes),
    )


def model_shape(config: TrainConfig) -> ModelShape:
    """Of the settings, or of the folder to start from."""
    if config.init_from:
        return shape_of_hf_config(initial_folder(config))
    return shape_of_settings(config.model_dump())


def worker_memory(layout: Layout, shape: ModelShape, stage: int) -> WorkerMemory:
    """Of the first worker of a stage, which has most rows."""
    config = layout.config
    held = predict_memory(layout, stage)
    held |= _gathered(layout, stage)
    to_host = ON_HOST if config.outer_state == "host" else ()
    return WorkerMemory(
        stage=stage,
        layers=tuple(layer for part in layout.plan.stages_of_worker(stage) for layer in layout.plan.layers[part]),
        num_parameters=layout.plan.parameters_of_worker(stage),
        on_device={name: size for name, size in held.items() if name not in to_host},
        on_host={name: size for name, size in held.items() if name in to_host},
        activations=_activations(layout, shape, stage),
        sent_bytes=layout.sent_bytes(stage) if config.replicas > 1 else 0,
    )


def _gathered(layout: Layout, stage: int) -> dict[str, int]:
    """Whole parameters and gradients that a sharded stage of a pipeline keeps for the time of a step."""
    config = layout.config
    if config.sharding == "replicate" or config.data_workers == 1 or config.pipeline_stages == 1:
        return {}
    return {"gathered": (4 + _value_bytes(config)) * layout.plan.parameters_of_worker(stage)}


def _activations(layout: Layout, shape: ModelShape, stage: int) -> int:
    """Of all microbatches whose backward is still to come, and of the logits of one."""
    config = layout.config
    tokens = config.sequences_a_worker // config.resolved_microbatches * config.sequence_length
    parts = layout.plan.stages_of_worker(stage)
    layers = sum(len(layout.plan.layers[part]) for part in parts) / len(parts)
    of_layer = ACTIVATION_BYTES * _value_bytes(config) / 2 * shape.hidden_size
    kept = layers * of_layer
    if config.activation_checkpointing:
        kept = layers * _value_bytes(config) * shape.hidden_size
    waiting = tokens * kept * waiting_microbatches(config, stage)
    again = tokens * of_layer if config.activation_checkpointing else 0
    last = layout.plan.num_stages - 1 in parts
    return round(waiting + again + (8 * shape.vocab_size * tokens if last else 0))


def _value_bytes(config: TrainConfig) -> int:
    """Of what is computed with: bf16 on a GPU, unless told otherwise."""
    return 2 if config.dtype == "bfloat16" or (config.dtype == "auto" and config.device != "cpu") else 4


def _ways_out(config: TrainConfig, shape: ModelShape, stages: Sequence[WorkerMemory], capacity: float) -> str:
    """The first change that makes every worker fit; empty where all do, or where none of them helps."""
    if all(worker.device_bytes <= capacity for worker in stages):
        return ""
    tried: dict[str, Any] = {}
    for name, value in (("outer_state", "host"), ("activation_checkpointing", True), ("sharding", "shard")):
        refused = name == "activation_checkpointing" and config.pipeline_schedule == "zero-bubble"
        if getattr(config, name) == value or refused or (name == "sharding" and config.data_workers == 1):
            continue
        tried[name] = value
        layout = make_layout(config.model_copy(update=tried), vocab_size=shape.vocab_size)
        fullest = max(worker_memory(layout, shape, stage).device_bytes for stage in range(config.pipeline_stages))
        if fullest <= capacity:
            flags = " ".join(f"--{key.replace('_', '-')}{'' if v is True else f' {v}'}" for key, v in tried.items())
            return f"Use {flags}: {format_bytes(fullest)} on the fullest device."
    return "Use more --pipeline-stages, or --data-workers with --sharding shard."


def _throughput(config: TrainConfig, shape: ModelShape, options: Options) -> Estimate | None:
    """On links of one bandwidth, each island sending through its own."""
    if options.step_s is None:
        return None
    sequences = config.replicas * config.batch_size * config.gradient_accumulation_steps
    coding = Coding(config.compressor, config.rank if "lowrank" in config.compressor else 0, config.error_feedback)
    workload = Workload(shape, options.step_s, float(sequences * config.sequence_length), workers=config.num_workers)
    network = uniform(config.replicas, options.link_bytes_per_s)
    return estimate(Method(config.schedule, make_schedule(config), coding), workload, network)


# --- showing it


def as_json(answer: DryRun) -> dict[str, Any]:
    """Plain values: bytes, seconds, shares from 0 to 1."""
    config, found = answer.layout.config, answer.throughput
    return {
        "parameters": answer.layout.num_parameters,
        "replicas": config.replicas,
        "workers_a_replica": config.num_workers,
        "processes": config.num_processes,
        "pipeline_schedule": config.pipeline_schedule,
        "microbatches": config.resolved_microbatches,
        "bubble": answer.bubble,
        "memory_bytes": answer.options.memory_bytes,
        "fits": not answer.ways_out,
        "way_out": answer.ways_out,
        "stages": [_stage_json(worker, answer.options.memory_bytes) for worker in answer.stages],
        "sent_bytes_a_round": answer.sent_bytes,
        "tokens_per_s": found.tokens_per_s if found else None,
        "round_s": found.round_s if found else None,
        "sync_s": found.sync_s if found else None,
        "utilisation": found.utilisation if found else None,
    }


def _stage_json(worker: WorkerMemory, capacity: float) -> dict[str, Any]:
    return {
        "stage": worker.stage,
        "layers": list(worker.layers),
        "parameters": worker.num_parameters,
        "on_device": worker.on_device,
        "on_host": worker.on_host,
        "activations_estimated": worker.activations,
        "device_bytes": worker.device_bytes,
        "fits": worker.device_bytes <= capacity,
        "sent_bytes_a_round": worker.sent_bytes,
    }


def show(answer: DryRun, console: Console) -> None:
    """In the terminal: a row for stages that are alike."""
    config = answer.layout.config
    console.print(
        f"dry run, nothing is started: {format_count(answer.layout.num_parameters)} parameters | {config.replicas} "
        f"replicas x {config.pipeline_stages} stages x {config.data_workers} data workers = {config.num_processes} "
        "processes"
    )
    host = ", ".join(answer.stages[0].on_host) if config.outer_state == "host" else "nothing"
    console.print(
        f"{config.pipeline_schedule}, {config.resolved_microbatches} microbatches: {100 * answer.bubble:.1f} % of a "
        f"step is bubble | data workers: {config.sharding} | on the host: {host}"
    )
    console.print(_table(answer.stages))
    for line in conclusions(answer):
        console.print(line)


def _table(stages: Sequence[WorkerMemory]) -> Table:
    names = list(dict.fromkeys(name for worker in stages for name in (*worker.on_device, *worker.on_host)))
    table = Table(box=None, header_style="bold", pad_edge=False)
    shown = [SHORT.get(name, name) for name in names]
    for title in ("stage", "layers", "numbers", *shown, "activations", "device", "host", "sends"):
        table.add_column(title, justify="left" if title in ("stage", "layers") else "right", no_wrap=True)
    for _, alike in groupby(stages, key=_likeness):
        table.add_row(*_row(list(alike), names))
    return table


def _likeness(worker: WorkerMemory) -> tuple[Any, ...]:
    held = tuple({**worker.on_device, **worker.on_host}.items())
    return len(worker.layers), worker.num_parameters, held, worker.sent_bytes


def _row(workers: Sequence[WorkerMemory], names: Sequence[str]) -> list[str]:
    """Of stages that hold the same; their activations may differ, and the most is shown."""
    first, last = workers[0], workers[-1]
    fullest = max(workers, key=lambda worker: worker.activations)
    held: Mapping[str, int] = {**first.on_device, **first.on_host}
    span = f"{first.stage}" if len(workers) == 1 else f"{first.stage}-{last.stage}"
    layers = f"{len(first.layers)}" + (f" ({_span(first.layers)})" if len(workers) == 1 else " each")
    cells = [span, layers, format_count(first.num_parameters)]
    cells += [format_bytes(held.get(name, 0)) for name in names]
    sizes = (fullest.activations, fullest.device_bytes, sum(first.on_host.values()), first.sent_bytes)
    return [*cells, *map(format_bytes, sizes)]


def _span(layers: Sequence[int]) -> str:
    """
    >>> _span([0, 1, 2]), _span([0, 3, 4]), _span([5])
    ('0-2', '0, 3-4', '5')
    """
    runs = [[number for _, number in run] for _, run in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def conclusions(answer: DryRun) -> list[str]:
    """Whether it fits, what a round sends, and how fast it would be where the time of a step is known."""
    fullest = max(answer.stages, key=lambda worker: worker.device_bytes)
    capacity = format_bytes(answer.options.memory_bytes)
    fits = f"fits {capacity} (stage {fullest.stage} needs most, {format_bytes(fullest.device_bytes)})"
    if answer.ways_out:
        needed = format_bytes(fullest.device_bytes)
        fits = f"does not fit {capacity}: stage {fullest.stage} needs {needed} on its device. {answer.ways_out}"
    steps = answer.layout.config.inner_steps
    lines = [fits, f"sends {format_bytes(answer.sent_bytes)} a replica and round of {steps} steps"]
    found = answer.throughput
    if found is not None:
        lines.append(
            f"{format_rate(found.tokens_per_s)} tokens/s over all replicas at {format_seconds(found.workload.step_s)} "
            f"a step: round {format_seconds(found.round_s)}, sync {format_seconds(found.sync_s)}, computing "
            f"{100 * found.utilisation:.1f} % of the time"
        )
    return lines


def refuse_alone(options: Options | None, config: TrainConfig) -> None:
    """Raises ConfigError for flags of a dry run without one."""
    if options is not None and not config.dry_run:
        raise ConfigError("--json, --memory, --step-time and --link belong to a dry run. Add --dry-run.")


__all__ = ["DryRun", "Options", "as_json", "conclusions", "dry_run", "make_dry_run", "options_from", "refuse_alone"]
