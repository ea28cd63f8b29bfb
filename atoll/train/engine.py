"""Two engines behind one seam: all replicas in this process (`local`), or a process a worker (`torchdist`).

Which one runs:

    atoll train --engine local       M replicas take turns in one process
    atoll train --replicas M         this process starts the workers on this machine and looks after them
    torchrun ... -m atoll train      torchrun started the workers

A replica is one worker, or `data_workers` x `pipeline_stages` of them. Then process k is worker k mod W of replica
k div W, and two kinds of groups keep apart what is inside a replica and what is between:

    replica 0    worker 0 ── worker 1      the default process group: activations and gradients (gloo; NCCL on GPUs)
                    ┊           ┊
    replica 1    worker 0 ── worker 1      ┊ counterparts: pseudo-gradients (gloo, whatever the other one is)
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from atoll.comm.base import Transport
from atoll.comm.local import LocalGroup
from atoll.comm.torchdist import TorchDistTransport
from atoll.errors import ConfigError, TransportError
from atoll.parallel import build_mesh
from atoll.train.allocator import keep_freed_memory
from atoll.train.build import build_run, pick_device
from atoll.train.config import TrainConfig
from atoll.train.launch import run_workers, under_torchrun
from atoll.train.loop import train
from atoll.train.run import Run
from atoll.train.stopping import LocalStopper, Signals, StoreStopper, watch_signals
from atoll.train.through_host import ThroughHost
from atoll.train.workers import ManyWorkers, WorkerStopper


def run(config: TrainConfig) -> None:
    """Train as `config` says, with the engine it names."""
    if under_torchrun():
        run_torchrun_worker(config)
    elif config.engine == "local" or config.num_processes == 1:
        run_local(config)
    else:
        run_workers(config, run_worker)


def run_local(config: TrainConfig, *, quiet: bool = False) -> Run:
    """All replicas in this process; returns the finished run."""
    with watch_signals() as signals:
        finished = build_run(
            config,
            LocalGroup(config.replicas).endpoints(),
            stopper=LocalStopper(signals),
            signals=signals,
            num_processes=1,
            quiet=quiet,
        )
        try:
            train(finished)
        finally:
            finished.close()
    return finished


def run_torchrun_worker(config: TrainConfig) -> None:
    """One worker, among processes that torchrun started."""
    store, rank, num_ranks = next(dist.rendezvous("env://"))
    if num_ranks != config.num_processes and config.num_workers > 1:
        each = f"data_workers={config.data_workers} x pipeline_stages={config.pipeline_stages}"
        raise ConfigError(
            f"{config.replicas} replicas of {each} are {config.num_processes} processes, but torchrun started "
            f"{num_ranks}. Use --nproc-per-node such that there are {config.num_processes} in all, or other --replicas."
        )
    if num_ranks != config.num_processes:
        raise ConfigError(
            f"replicas={config.replicas}, but torchrun started {num_ranks} processes; each is one replica. "
            f"Use --replicas {num_ranks}."
        )
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    run_worker(config, store, rank, num_processes=local_processes)


def run_worker(config: TrainConfig, store: dist.Store, rank: int, *, num_processes: int) -> None:
    """Process `rank` of the run: joins the others through `store` and trains."""
    keep_freed_memory()
    with watch_signals() as signals:
        if config.num_workers == 1:
            _run_replica(config, store, rank, signals=signals, num_processes=num_processes)
        else:
            _run_part(config, store, rank, signals=signals, num_processes=num_processes)
        dist.destroy_process_group()


def _run_replica(config: TrainConfig, store: dist.Store, rank: int, *, signals: Signals, num_processes: int) -> None:
    """A replica that is this process alone."""
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    backend = "nccl" if on_gpu and config.outer_state == "device" else "gloo"  # what is sent lies where the anchor does
    _connect(backend, store, rank, config.replicas, timedelta(seconds=config.timeout_s))
    transport = TorchDistTransport(timeout_s=config.timeout_s)
    stopper = _stopper(config, store, rank, signals)
    _train(build_run(config, [transport], stopper=stopper, signals=signals, num_processes=num_processes))
    transport.close()


def _run_part(config: TrainConfig, store: dist.Store, rank: int, *, signals: Signals, num_processes: int) -> None:
    """One worker of a replica of many."""
    replica, worker = divmod(rank, config.num_workers)
    device = pick_device(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    inside = dist.PrefixStore(f"replica-{replica}", store)
    _connect(backend, inside, worker, config.num_workers, timedelta(seconds=config.timeout_s))
    mesh = build_mesh(config.data_workers, config.pipeline_stages, device=device)
    workers = ManyWorkers(mesh)
    transport: Transport = TorchDistTransport(_counterparts(config, store, rank), timeout_s=config.timeout_s)
    if device.type == "cuda" and config.outer_state == "device":
        transport = ThroughHost(transport, device)
    told = Signals()  # to the replica, whichever of its workers was
    speaker = (_stopper(config, store, replica, told), told) if workers.index == 0 else None
    stopper = WorkerStopper(workers, signals, speaker=speaker)
    _train(build_run(config, [transport], stopper=stopper, signals=signals, num_processes=num_processes, mesh=mesh))
    transport.close()


def _train(run: Run) -> None:
    try:
        train(run)
    finally:
        run.close()
    run.barrier()  # the store lives in the launcher: nobody leaves while another still needs it


def _stopper(config: TrainConfig, store: dist.Store, replica: int, signals: Signals) -> StoreStopper:
    return StoreStopper(
        dist.PrefixStore("atoll", store),
        rank=replica,
        num_ranks=config.replicas,
        signals=signals,
        timeout_s=config.timeout_s,
    )


def _counterparts(config: TrainConfig, store: dist.Store, rank: int) -> dist.ProcessGroup:
    """The workers of the same place in all replicas."""
    replica, worker = divmod(rank, config.num_workers)
    meeting = dist.PrefixStore(f"counterparts-{worker}", store)
    timeout = timedelta(seconds=config.timeout_s)
    try:
        return dist.ProcessGroupGloo(meeting, replica, config.replicas, timeout=timeout)
    except (RuntimeError, dist.DistError) as error:
        raise _unreachable(rank, timeout, error) from error


def _connect(backend: str, store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> None:
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise _unreachable(rank, timeout, error) from error


def _unreachable(rank: int, timeout: timedelta, error: Exception) -> TransportError:
    return TransportError(
        f"process {rank} could not reach the others within {timeout.total_seconds():.0f} s: "
        f"{str(error).splitlines()[0]}"
    )
