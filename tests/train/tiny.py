"""Runs small enough to be repeated at every step: one layer, 32 wide, on a text folder that the test writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from atoll.algo.schedule import Schedule
from atoll.comm.local import LocalGroup
from atoll.data import TextData, load_data
from atoll.train.build import build_run
from atoll.train.checkpoint import read_manifest
from atoll.train.config import TrainConfig, build_config
from atoll.train.loop import train
from atoll.train.metrics import read_metrics
from atoll.train.run import Run
from atoll.train.stopping import LocalStopper, Signals

TIMES = ("tokens_per_s", "sync_s", "exposed_s", "inner_s")
WORDS = "anchor harbour tide reef salt gull wave island strait beacon sail oar keel rope knot".split()

LLAMA = {"family": "llama", "hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 64}
GPT2_WITH_DROPOUT = {
    **LLAMA,
    "family": "gpt2",
    "overrides": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
}


def write_corpus(folder: Path, *, num_files: int = 60) -> Path:
    """Texts of a few hundred bytes, no two alike."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        words = [WORDS[(number * 7 + i * i * (1 + number % 5) + i) % len(WORDS)] for i in range(60)]
        (folder / f"{number:03d}.txt").write_text(f"{number}: {' '.join(words)}\n", encoding="utf-8")
    return folder


def tiny_config(folder: Path, **changes: Any) -> TrainConfig:
    """Two llamas, H=3, eight steps (the last round is a partial one), in `folder`/run; `changes` are settings."""
    settings: dict[str, Any] = {
        "model": LLAMA,
        "data": {"source": str(folder / "corpus"), "held_out_percent": 20.0},
        "sequence_length": 16,
        "batch_size": 2,
        "max_steps": 8,
        "inner_steps": 3,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "replicas": 2,
        "outer_momentum": 0.6,
        "engine": "local",
        "threads": 1,
        "device": "cpu",
        "seed": 1,
        "eval_sequences": 8,
        "timeout_s": 60.0,
        "output_dir": str(folder / "run"),
    }
    if not (folder / "corpus").exists():
        write_corpus(folder / "corpus")
    return build_config(settings | changes)


@cache
def _load(source: str, held_out_percent: float, sequence_length: int, replicas: int, seed: int) -> TextData:
    config = build_config({"data": {"source": source, "held_out_percent": held_out_percent}}).data
    return load_data(config, sequence_length=sequence_length, num_replicas=replicas, seed=seed)


def tiny_run(
    config: TrainConfig,
    *,
    schedule: Schedule | None = None,
    signals: Signals | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """A run of the local engine, ready to train, quiet."""
    signals = signals or Signals()
    percent = config.data.held_out_percent
    return build_run(
        config,
        LocalGroup(config.replicas).endpoints(),
        stopper=LocalStopper(signals),
        signals=signals,
        num_processes=1,
        quiet=True,
        schedule=schedule,
        data=_load(config.data.source, percent, config.sequence_length, config.replicas, config.seed),
        clock=clock,
    )


def finish(run: Run) -> Run:
    """Train `run` to its end."""
    try:
        train(run)
    finally:
        run.close()
    return run


def train_tiny(config: TrainConfig, *, schedule: Schedule | None = None) -> Run:
    return finish(tiny_run(config, schedule=schedule))


def but(config: TrainConfig, **changes: Any) -> TrainConfig:
    """`config` with other settings."""
    return build_config(config.model_dump() | changes)


def checkpoint(config: TrainConfig, step: int) -> Path:
    return Path(config.output_dir) / "checkpoints" / f"step-{step:06d}"


def contents(config: TrainConfig, step: int) -> Mapping[str, str]:
    """SHA-256 of every file of a checkpoint: parameters, all state, random numbers, data positions, step."""
    return {name: entry["sha256"] for name, entry in read_manifest(checkpoint(config, step))["files"].items()}


def metrics(config: TrainConfig, event: str | None = None) -> list[dict[str, Any]]:
    """What was logged, all of it or one kind of event."""
    lines = read_metrics(Path(config.output_dir) / "metrics.jsonl")
    return [line for line in lines if event in (None, line["event"])]


def history(config: TrainConfig) -> list[dict[str, Any]]:
    """What was logged in an order that no process decides, without times."""
    lines = [{key: value for key, value in line.items() if key not in TIMES} for line in metrics(config)]
    return sorted(lines, key=lambda line: (line["step"], line["event"], line.get("replica") or 0))


def after_each_step(run: Run, action: Callable[[int], None]) -> None:
    """Have `action(step)` called between the gradients of a step and the updates made of them."""
    first = run.members[0].replica
    compute = first.compute_gradients

    def compute_and_act(step: int) -> None:
        compute(step)
        action(step)

    first.compute_gradients = compute_and_act  # type: ignore[method-assign]
