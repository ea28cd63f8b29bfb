"""Two engines behind one seam: all replicas in this process (`local`), or a process a replica (`torchdist`).

Which one runs:

    atoll train --engine local       M replicas take turns in one process
    atoll train --replicas M         this process starts M workers on this machine and looks after them
    torchrun ... -m atoll train      torchrun started the workers; each is one replica
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from atoll.comm.local import LocalGroup
from atoll.comm.torchdist import TorchDistTransport
from atoll.errors import ConfigError, TransportError
from atoll.train.allocator import keep_freed_memory
from atoll.train.build import build_run
from atoll.train.config import TrainConfig
from atoll.train.launch import run_workers, under_torchrun
from atoll.train.loop import train
from atoll.train.run import Run
from atoll.train.stopping import LocalStopper, StoreStopper, watch_signals


def run(config: TrainConfig) -> None:
    """Train as `config` says, with the engine it names."""
    if under_torchrun():
        run_torchrun_worker(config)
    elif config.engine == "local" or config.replicas == 1:
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
    """One replica, among processes that torchrun started."""
    store, rank, num_ranks = next(dist.rendezvous("env://"))
    if num_ranks != config.replicas:
        raise ConfigError(
            f"replicas={config.replicas}, but torchrun started {num_ranks} processes; each is one replica. "
            f"Use --replicas {num_ranks}."
        )
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    run_worker(config, store, rank, num_processes=local_processes)


def run_worker(config: TrainConfig, store: dist.Store, rank: int, *, num_processes: int) -> None:
    """One replica: joins the others through `store` and trains."""
    backend = "nccl" if config.device != "cpu" and torch.cuda.is_available() else "gloo"
    timeout = timedelta(seconds=config.timeout_s)
    keep_freed_memory()
    with watch_signals() as signals:
        _connect(backend, store, rank, config.replicas, timeout)
        transport = TorchDistTransport(timeout_s=config.timeout_s)
        stopper = StoreStopper(
            dist.PrefixStore("atoll", store),
            rank=rank,
            num_ranks=config.replicas,
            signals=signals,
            timeout_s=config.timeout_s,
        )
        running = build_run(config, [transport], stopper=stopper, signals=signals, num_processes=num_processes)
        try:
            train(running)
        finally:
            running.close()
        running.barrier()  # the store lives in the launcher: nobody leaves while another still needs it
        transport.close()
        dist.destroy_process_group()


def _connect(backend: str, store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> None:
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise TransportError(
            f"replica {rank} could not reach the others within {timeout.total_seconds():.0f} s: "
            f"{str(error).splitlines()[0]}"
        ) from error
