"""Runs of replicas with many workers, and what their workers do in tests: importable by a fork server."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from train.tiny import checkpoint, metrics, tiny_config

from atoll.train import engine
from atoll.train.config import TrainConfig
from atoll.train.memory import memory_by_state
from atoll.train.run import Run
from atoll.train.sync import RoundReport
from atoll.train.workers import ModelPart

TWO_LAYERS = {"family": "llama", "hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}
DELAYED = {"schedule": "delayed", "adopt": "carry", "outer_lr": 0.6, "outer_momentum": 0.4}
LOW_RANK = {"compressor": "lowrank+int4", "rank": 4, "error_feedback": True}
STREAMING = {"schedule": "streaming", "fragments": 2, "delay": 1, "inner_steps": 4, "max_steps": 88, "alpha": 0.5}


def worker_config(folder: Path, name: str, **changes: Any) -> TrainConfig:
    """44 steps of two replicas in `folder`/`name`, 22 rounds; by processes."""
    settings = {"model": TWO_LAYERS, "engine": "torchdist", "batch_size": 4, "max_steps": 44, "inner_steps": 2}
    settings |= {"learning_rate": 2e-3, "adam_epsilon": 1e-6, "output_dir": str(folder / name)}
    return tiny_config(folder, **(settings | changes))


def losses(config: TrainConfig) -> dict[tuple[int, int], float]:
    """By step and replica."""
    return {(line["step"], line["replica"]): line["loss"] for line in metrics(config, "step")}


def anchor(config: TrainConfig, step: int = 0) -> dict[str, Tensor]:
    """Of a checkpoint, the last one by default."""
    return load_file(checkpoint(config, step or config.max_steps) / "model.safetensors")


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any element."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# --- targets of `run_workers`


def train_and_note_rounds(config: TrainConfig, store: Any, rank: int, *, num_processes: int) -> None:
    """Trains; every process writes down the digest of each round, as it has it."""
    log_round = Run._log_round

    def log_and_note(run: Run, report: RoundReport, step: int) -> None:
        log_round(run, report, step)
        line = {"step": step, "fragment": report.fragment, "digest": report.digest, "refused": report.refused}
        path = run.run_dir / f"memory-{rank}.json"
        path.write_text(json.dumps(memory_by_state(run.members[0]).bytes_by_state))  # the last round's stays
        with open(run.run_dir / f"rounds-{rank}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    Run._log_round = log_and_note  # type: ignore[method-assign]
    engine.run_worker(config, store, rank, num_processes=num_processes)


def break_one_worker(config: TrainConfig, store: Any, rank: int, *, num_processes: int) -> None:
    """Trains; in the steps that end rounds 3 and 9, one element on the last worker of replica 1 becomes NaN."""

    def spoil(run: Run, step: int) -> None:
        if rank == config.num_processes - 1 and step in (3 * config.inner_steps, 9 * config.inner_steps):
            part = run.members[0].replica.trainee
            assert isinstance(part, ModelPart)
            next(iter(part.shards.values())).tensor.view(-1)[0] = math.nan

    _after_updates(spoil)
    train_and_note_rounds(config, store, rank, num_processes=num_processes)


def die_in_one_worker(config: TrainConfig, store: Any, rank: int, *, num_processes: int) -> None:
    """Trains; the last process is gone after step 5."""

    def die(run: Run, step: int) -> None:
        if step == 5 and rank == config.num_processes - 1:
            os._exit(9)

    _after_updates(die)
    engine.run_worker(config, store, rank, num_processes=num_processes)


def told_to_stop_in_one_worker(config: TrainConfig, store: Any, rank: int, *, num_processes: int) -> None:
    """Trains; after step 5 one process alone gets a signal, and no other process ever does."""
    log_step = Run.log_step

    def log_and_tell(run: Run, report: Any) -> None:
        log_step(run, report)
        if report.step == 5 and rank == config.num_processes - 1:
            run._signals.stop()

    Run.log_step = log_and_tell  # type: ignore[method-assign]
    engine.run_worker(config, store, rank, num_processes=num_processes)


def rounds_noted(config: TrainConfig) -> list[list[dict[str, Any]]]:
    """By process."""
    paths = [Path(config.output_dir, f"rounds-{rank}.jsonl") for rank in range(config.num_processes)]
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def _after_updates(action: Callable[[Run, int], None]) -> None:
    """Have `action(run, step)` called between the updates of a step and its sync."""
    log_step = Run.log_step

    def log_and_act(run: Run, report: Any) -> None:
        log_step(run, report)
        with torch.no_grad():
            action(run, report.step)

    Run.log_step = log_and_act  # type: ignore[method-assign]
