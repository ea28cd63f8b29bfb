"""Two engines, one result: M replicas in one process, or a process a replica."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from train.tiny import (
    GPT2_WITH_DROPOUT,
    LLAMA,
    but,
    checkpoint,
    contents,
    history,
    tiny_config,
    train_tiny,
)
from train.workers import train_with_rounds_in_flight

from atoll.algo.schedule import Schedule
from atoll.errors import ConfigError
from atoll.train import engine
from atoll.train.config import TrainConfig
from atoll.train.launch import run_workers

GEOMETRY = ("norms", "cosines", "cosine_mean", "delta_norm")  # inner products, summed in another order


def without(lines: list[dict[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in keys} for line in lines]


def assert_same_run(one: TrainConfig, other: TrainConfig) -> None:
    """Every file of the last checkpoint, every loss, anchor and byte sent, bit for bit; geometry to rounding."""
    assert contents(one, one.max_steps) == contents(other, one.max_steps)
    ours, theirs = history(one), history(other)
    assert without(ours, GEOMETRY) == without(theirs, GEOMETRY)
    for left, right in zip(ours, theirs, strict=True):
        for key in ("delta_norm", "cosine_mean", "norms"):
            if left.get(key) is not None:
                assert left[key] == pytest.approx(right[key], rel=1e-5), (key, left["step"])


@pytest.mark.parametrize(
    "changes",
    [
        {"replicas": 2, "model": GPT2_WITH_DROPOUT},
        {"replicas": 3, "compressor": "bf16", "drop_probability": 0.3, "average_inner_state": True},
        {"replicas": 4, "merge": "examples", "pretrain_steps": 2, "inner_steps": 2},
        {"replicas": 2, "method": "data-parallel"},
    ],
    ids=str,
)
def test_processes_and_turns_in_one_process_give_the_same_run(changes: dict[str, Any], tmp_path: Path) -> None:
    local = tiny_config(tmp_path, save_steps=5, eval_steps=3, **changes)
    processes = but(local, engine="torchdist", output_dir=str(tmp_path / "processes"))
    train_tiny(local)
    engine.run(processes)
    assert_same_run(local, processes)


def test_a_run_of_one_engine_is_resumed_by_the_other(tmp_path: Path) -> None:
    """Rounds in flight included."""
    schedule = Schedule(3, delay=3, blocking_first=True)
    whole = tiny_config(tmp_path, adopt="carry", carry_share=0.5, save_steps=4, model=LLAMA)
    train_tiny(whole, schedule=schedule)
    moved = but(whole, output_dir=str(tmp_path / "moved"), engine="torchdist", resume="auto")
    shutil.copytree(whole.output_dir, moved.output_dir)
    shutil.rmtree(checkpoint(moved, 8))
    run_workers(moved, train_with_rounds_in_flight)
    assert_same_run(whole, moved)


def test_the_local_engine_returns_the_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(tmp_path)
    assert engine.run_local(config).step == 8
    said = capsys.readouterr().out
    for words in ("data: ", "model: llama", "step 1/8", "round 1 committed", "eval at step 8", "saved step-000008"):
        assert words in said


def test_one_replica_needs_no_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("started workers for one replica")

    monkeypatch.setattr(engine, "run_workers", refuse)
    config = tiny_config(tmp_path, replicas=1, engine="torchdist")
    engine.run(config)
    assert contents(config, 8)


def test_torchrun_with_another_number_of_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    for name, value in (settings | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}).items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(ConfigError, match=r"torchrun started 1 processes.*\s*.*--replicas 1"):
        engine.run(tiny_config(tmp_path))
