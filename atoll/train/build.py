"""From settings to a `Run`: data, models, schedule, outer loops, output."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from atoll.algo.adopt import ADOPT_RULES
from atoll.algo.fragments import strided_fragments
from atoll.algo.outer import OUTER_OPTIMIZERS, cosine_lr
from atoll.algo.schedule import Schedule
from atoll.comm.base import Transport
from atoll.compress import Compressor, Feedback, Quantized, build_compressor, check_compressor, fastest_reduction
from atoll.compress.quantize import Reduction
from atoll.data import TextData, load_data
from atoll.errors import ConfigError, StorageError
from atoll.models import build_model, load_model
from atoll.parallel import ReplicaMesh, ShardReader, build_parallel
from atoll.parallel.cut import family_of
from atoll.parallel.sharding import checkpoint_activations_
from atoll.train.checkpoint import find_checkpoint, load_json, prepare_run_dir, refuse_other_config
from atoll.train.config import TrainConfig, essential, read_config_file, write_config_file
from atoll.train.console import Console
from atoll.train.data_parallel import GradientSync
from atoll.train.folder import CONFIG, METRICS, holds_run, refuse_taken
from atoll.train.layout import Layout, initial_folder, make_layout, model_config, parallel_settings
from atoll.train.metrics import MetricsWriter, open_trackers, truncate_metrics
from atoll.train.replica import Member, Replica, computes_in_bfloat16
from atoll.train.resume import STATE, resume_run
from atoll.train.run import Output, Run
from atoll.train.stopping import Signals, Stopper
from atoll.train.sync import BUCKET_ELEMENTS, OuterSettings, ReplicaSync
from atoll.train.workers import ManyWorkers, ModelPart, OneWorker, ShardSync, Workers


def build_run(
    config: TrainConfig,
    transports: Sequence[Transport],
    *,
    stopper: Stopper,
    signals: Signals,
    num_processes: int,
    quiet: bool = False,
    schedule: Schedule | None = None,
    data: TextData | None = None,
    mesh: ReplicaMesh | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """A run ready to train, resumed if `config.resume` says so.

    transports: one for each replica of this process. schedule: another than blocking rounds. data: what `config.data`
    describes, where it is loaded already. mesh: the workers of the one replica that this process is a worker of, where
    it has several; its transport leads to this worker's counterparts. clock: seconds; times
    steps and syncs.
    """
    workers: Workers = OneWorker() if mesh is None else ManyWorkers(mesh)
    leads = transports[0].replica == 0 and workers.index == 0
    set_threads(config, num_processes)
    console = Console(max_steps=config.max_steps, on_closed=signals.stop) if leads and not quiet else None
    data = data or load_data(
        config.data, sequence_length=config.sequence_length, num_replicas=config.replicas, seed=config.seed
    )
    schedule = schedule or make_schedule(config)
    if mesh is None:
        device, layout = pick_device(config, transports[0].replica), None
        members = [
            _build_member(config, transport, data, device=device, schedule=schedule, clock=clock)
            for transport in transports
        ]
    else:
        layout = make_layout(config, vocab_size=data.vocab_size)
        members = [_build_worker(layout, transports[0], data, mesh=mesh, schedule=schedule, workers=workers)]
    if console is not None:
        console.line(f"data: {data.describe()}")
        console.line(_describe_model(config, members[0], layout))
        if reduction := describe_reduction(config):
            console.line(reduction)
        for warning in warnings_of(config, [tuple(tensor.shape) for tensor in members[0].sync.anchor().values()]):
            console.line(f"warning: {warning}")
    run = Run(
        config,
        members,
        schedule=schedule,
        data=data,
        output=Output(None, console, []),
        stopper=stopper,
        signals=signals,
        workers=workers,
        layout=layout,
    )
    _open_run_dir(run)
    return run


def make_schedule(config: TrainConfig) -> Schedule:
    """When what is sent and when it lands, as `config` says."""
    return Schedule(
        config.inner_steps,
        num_fragments=config.fragments,
        delay=config.resolved_delay,
        blocking_first=config.resolved_delay > 0 and config.first_round == "blocking",
        first_step=config.pretrain_steps,
    )


def make_compressor(config: TrainConfig) -> Compressor:
    """The compressor that `config` names."""
    options = replace(config.compressor_options, reduction=chosen_reduction(config))
    return build_compressor(config.compressor, options)


def chosen_reduction(config: TrainConfig) -> Reduction | None:
    """How a mean of codes comes about where the link is known: what is faster, a bucket at a time; else the default.

    An elastic run has no number of replicas to choose by.
    """
    if (
        config.compressor not in ("int8", "int4", "fp4")
        or not config.link_mbps
        or config.elastic
        or config.replicas < 2
    ):
        return None
    payload = build_compressor(config.compressor, config.compressor_options).payload_bytes((BUCKET_ELEMENTS,))
    return fastest_reduction(
        payload,
        num_replicas=config.replicas,
        link_bytes_per_s=config.link_mbps * 125_000,
        latency_s=config.link_latency_ms / 1000,
    )


def describe_reduction(config: TrainConfig) -> str:
    """The line that a run's log has about it; empty for what is not averaged as codes."""
    inner = make_compressor(config)
    inner = inner.inner if isinstance(inner, Feedback) else inner
    if not isinstance(inner, Quantized):
        return ""
    why = f"the faster one at {config.link_mbps:g} Mbit/s" if chosen_reduction(config) else "the default"
    return f"codes of {config.compressor} are averaged by {inner.reduction} over {config.replicas} replicas: {why}"


HOT_GAIN = 4.0  # of the outer optimizer, η/(1−μ), beyond which a round of delay makes training swing


def warnings_of(config: TrainConfig, shapes: Iterable[Sequence[int]]) -> list[str]:
    """What is likely to train badly in `config`, each with the value that would do. shapes: of all parameters."""
    warnings = check_compressor(
        config.compressor, config.compressor_options, shapes=shapes, outer_momentum=config.outer_momentum
    )
    momentum = config.outer_momentum if config.outer_optimizer in ("nesterov", "momentum") else 0.0
    gain = config.outer_lr / (1 - momentum)
    if config.resolved_delay >= config.inner_steps and gain > HOT_GAIN:
        warnings.append(
            f"outer_lr={config.outer_lr:g} with outer_momentum={momentum:g} moves {gain:.1f} times the mean progress, "
            "and a round late it overshoots. Use outer_lr=0.6 and outer_momentum=0.4 with schedule=delayed."
        )
    return warnings


def set_threads(config: TrainConfig, num_processes: int) -> None:
    """CPU threads of this process: as told, or an even share of the cores (contended threads are many times slower)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(config.threads or max(1, cores // num_processes))


def pick_device(config: TrainConfig, replica: int) -> torch.device:
    """The device a replica trains on: "auto" takes a GPU if there is one, in turn by replica."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device='cuda' was asked for, but torch sees no GPU. Use device=cpu, or install a CUDA build."
        )
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", replica))
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def outer_settings(config: TrainConfig, schedule: Schedule) -> OuterSettings:
    """The outer loop that `config` describes."""

    def lr(step: int) -> float:
        if config.outer_lr_schedule == "constant":
            return config.outer_lr
        began = max(0, step - config.inner_steps)  # at its last step the cosine is 0: that round's work would be lost
        return cosine_lr(config.outer_lr, step=began, total_steps=config.max_steps)

    return OuterSettings(
        optimizer=OUTER_OPTIMIZERS[config.outer_optimizer](config.outer_momentum, config.outer_epsilon),
        lr=lr,
        compressor=make_compressor(config),
        adopt=ADOPT_RULES[config.resolved_adopt](config.alpha, config.resolved_carry_share),
        keep_contribution=schedule.delay > 0,
        prune_rule=config.prune_rule,
        prune_fraction=config.prune_fraction,
        dropped_count=config.drop_merge == "all",
        own_base=config.drop_base == "own",
        on_host=config.outer_state == "host",
        probe_rank=config.rank if config.adaptive else 0,
        energy=config.adaptive_energy,
    )


def _build_member(
    config: TrainConfig,
    transport: Transport,
    data: TextData,
    *,
    device: torch.device,
    schedule: Schedule,
    clock: Callable[[], float],
) -> Member:
    if config.init_from:
        model = _load_initial(config, vocab_size=data.vocab_size)
    else:
        vocab_size = config.model.vocab_size or data.vocab_size
        model = build_model(
            config.model, vocab_size=vocab_size, sequence_length=config.sequence_length, seed=config.seed
        )
    if config.activation_checkpointing:
        checkpoint_activations_(family_of(model.config).layer_list(model))
    stream = data.stream(transport.replica)
    replica = Replica(transport.replica, model=model, stream=stream, config=config, device=device, clock=clock)
    if config.method == "data-parallel":
        sync = GradientSync(replica.trainable(), transport, make_compressor(config))
        return Member(replica, transport, sync)
    fragments = strided_fragments(list(replica.trainable()), schedule.num_fragments)
    companions = replica.inner_moments if config.average_inner_state else list
    outer = ReplicaSync(
        replica.trainable(),
        transport,
        outer_settings(config, schedule),
        fragments=fragments,
        companions=companions,
        clock=clock,
    )
    return Member(replica, transport, outer)


def build_part(layout: Layout, mesh: ReplicaMesh, *, vocab_size: int) -> ModelPart:
    """This worker's layers and rows of the model of a replica of many. Collective."""
    config = layout.config
    built = model_config(config, vocab_size=vocab_size)
    settings = parallel_settings(config, bfloat16=computes_in_bfloat16(config, mesh.device))
    model = build_parallel(built, mesh, settings, seed=None if config.init_from else config.seed)
    if config.init_from:
        _refuse_misfit(config, built, vocab_size=vocab_size)
        ShardReader(initial_folder(config).glob("*.safetensors")).fill_(model.held())
    return ModelPart(model)


def _build_worker(
    layout: Layout, transport: Transport, data: TextData, *, mesh: ReplicaMesh, schedule: Schedule, workers: Workers
) -> Member:
    """This worker of a replica of many: its layers and rows of the model, which it syncs with its counterparts."""
    config = layout.config
    part = build_part(layout, mesh, vocab_size=data.vocab_size)
    stream = data.stream(transport.replica)
    replica = Replica(
        transport.replica, model=part, stream=stream, config=config, device=mesh.device, worker=mesh.worker
    )
    fragments = strided_fragments(layout.names, schedule.num_fragments)
    sync = ShardSync(part, transport, outer_settings(config, schedule), fragments=fragments, workers=workers)
    return Member(replica, transport, sync)


def _load_initial(config: TrainConfig, *, vocab_size: int) -> PreTrainedModel:
    """The model of `init_from`; refuses one that the data does not fit."""
    model = load_model(config.init_from)
    _refuse_misfit(config, model.config, vocab_size=vocab_size)
    return model


def _refuse_misfit(config: TrainConfig, built: PreTrainedConfig, *, vocab_size: int) -> None:
    positions = getattr(built, "max_position_embeddings", config.sequence_length)
    if built.vocab_size < vocab_size or positions < config.sequence_length:
        raise ConfigError(
            f"init_from={config.init_from!r} knows {built.vocab_size} tokens at {positions} positions; the data "
            f"has {vocab_size} tokens in sequences of {config.sequence_length}.\n"
            "Set data.tokenizer to the folder of the model's tokenizer, and sequence_length to its positions at most."
        )


def _open_run_dir(run: Run) -> None:
    """Check the run folder, resume if asked, check that all replicas begin alike, and open the metrics."""
    folder: Path | None = None
    if run.leads:
        folder = _claim(run)
    folder = _tell_folder(run, folder)
    if folder is not None:
        resume_run(run, folder)
        run.output.line(f"resumed from {folder.name} after step {run.step}")
    if run.leads:
        _rewrite_files(run)
    run.check_same_start()
    if run.workers.index == 0:
        run.output.metrics = MetricsWriter(run.run_dir / METRICS)
    if run.leads:
        run.output.trackers = open_trackers(run.config.report_to, run.run_dir, run.config.model_dump())


def _claim(run: Run) -> Path | None:
    """The checkpoint to resume from; refuses a folder that holds another run."""
    config, run_dir = run.config, run.run_dir
    refuse_taken(config)
    prepare_run_dir(run_dir, warn=run.output.line)
    folder = find_checkpoint(run_dir, config.resume, warn=run.output.line)
    if folder is not None:
        refuse_other_config(load_json(folder / STATE)["settings"], essential(config))
    if holds_run(run_dir):
        refuse_other_config(essential(read_config_file(run_dir / CONFIG)), essential(config))
    return folder


def _tell_folder(run: Run, folder: Path | None) -> Path | None:
    """The leading process's choice, the same on all: ballots have one length, so the name is padded."""
    name = (str(folder) if folder is not None else "").encode().ljust(4096)
    name = run.workers.gather(name)[0]
    chosen = run.exchange([name] * len(run.members))[0].decode().strip()
    return Path(chosen) if chosen else None


def _rewrite_files(run: Run) -> None:
    """What is written once: the settings, and the metrics up to the step resumed from."""
    try:
        write_config_file(run.config, run.run_dir / CONFIG)
        if (run.run_dir / METRICS).exists():
            truncate_metrics(run.run_dir / METRICS, run.step)
    except OSError as error:
        raise StorageError(f"cannot write to {run.run_dir}: {error.strerror}. Choose another --output-dir.") from error


def _describe_model(config: TrainConfig, member: Member, layout: Layout | None) -> str:
    parameters = sum(param.numel() for param in member.replica.trainable().values())
    batch = f"{config.batch_size} x {config.gradient_accumulation_steps} x {config.sequence_length}"
    workers = ""
    if layout is not None:
        parameters = layout.num_parameters
        stages = f"{config.pipeline_stages} stages ({config.pipeline_schedule}, {config.resolved_microbatches} parts)"
        workers = f" | workers of a replica: {stages} x {config.data_workers} data ({config.sharding})"
    return (
        f"model: {config.model.family} with {parameters / 1e6:.2f} M parameters | replicas: {config.replicas}, each "
        f"{batch} tokens a step on {member.replica.device}{workers}"
    )
