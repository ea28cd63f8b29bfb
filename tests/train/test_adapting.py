"""Runs whose rank and round length follow their pseudo-gradients."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from train.tiny import LLAMA, but, checkpoint, contents, finish, history, metrics, tiny_config, tiny_run

from atoll.errors import ConfigError
from atoll.train.adapting import logged_rounds, replay
from atoll.train.config import TrainConfig
from atoll.train.run import Run

ADAPTIVE: dict[str, Any] = {
    "adaptive": True,
    "compressor": "lowrank+int4",
    "rank": 4,
    "adaptive_window": 2,
    "adaptive_energy": 0.6,
    "inner_steps": 4,
    "max_steps": 22,
    "error_feedback": False,
}
DELAYED = ADAPTIVE | {"schedule": "delayed"}


@pytest.fixture(autouse=True)
def no_waiting_for_the_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Ticking:
    """A clock that moves on whenever it is read: a sync of many tensors takes long, a step does not."""

    def __init__(self) -> None:
        self._ticks: Iterator[int] = count()

    def __call__(self) -> float:
        return float(next(self._ticks)) / 1024


def no_time_passes() -> float:
    return 0.0


def train_adaptive(config: TrainConfig, *, clock: Callable[[], float] = no_time_passes) -> Run:
    return finish(tiny_run(config, clock=clock))


@pytest.mark.parametrize("settings", [ADAPTIVE, DELAYED, DELAYED | {"error_feedback": True, "first_round": "delayed"}])
def test_rank_and_length_of_rounds_follow_the_log(settings: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config(tmp_path, **settings)
    run = train_adaptive(config)
    rounds = logged_rounds(metrics(config))
    decisions = replay(config, metrics(config))
    assert len(decisions) == len(rounds) > 5
    assert len({member.sync.digest() for member in run.members}) == 1
    steps = [event["step"] for event in rounds]
    assert steps == sorted(steps)


def test_rank_falls_and_rounds_get_shorter_where_little_is_to_be_said(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, **ADAPTIVE)
    train_adaptive(config)
    rounds = logged_rounds(metrics(config))
    assert rounds[0]["rank"] == 4 and rounds[0]["inner_steps"] == 4
    assert rounds[-1]["rank"] < 4 and rounds[-1]["inner_steps"] < 4
    assert rounds[-1]["payload_bytes"] < rounds[0]["payload_bytes"]


def test_rounds_grow_to_hide_a_long_sync(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, **DELAYED | {"max_steps": 60})
    train_adaptive(config, clock=Ticking())
    last = logged_rounds(metrics(config))[-1]
    assert last["inner_steps"] > config.inner_steps
    assert last["inner_steps"] * last["observed"]["step_s"] >= last["observed"]["sync_s"] > 0
    replay(config, metrics(config))


def test_a_changed_log_is_found_out(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, **ADAPTIVE)
    train_adaptive(config)
    events = metrics(config)
    for event in logged_rounds(events)[:3]:
        event["observed"]["effective_rank"] = 4.0
    with pytest.raises(ConfigError, match="the log leads to"):
        replay(config, events)


@pytest.mark.parametrize("clock", [lambda: no_time_passes, Ticking], ids=["no time", "ticking"])
@pytest.mark.parametrize("settings", [ADAPTIVE, DELAYED | {"error_feedback": True}], ids=["blocking", "delayed"])
def test_an_adaptive_run_goes_on_exactly(
    settings: dict[str, Any], clock: Callable[[], Callable[[], float]], tmp_path: Path
) -> None:
    whole = tiny_config(tmp_path, save_steps=1, keep_last=100, **settings)
    train_adaptive(whole, clock=clock())
    for step in range(5, whole.max_steps, 5):
        resumed = but(
            whole, output_dir=str(tmp_path / f"from-{step}"), resume=str(checkpoint(whole, step)), save_steps=0
        )
        Path(resumed.output_dir).mkdir()
        for name in ("metrics.jsonl", "config.toml"):
            shutil.copy(Path(whole.output_dir, name), resumed.output_dir)
        train_adaptive(resumed, clock=clock())
        assert history(resumed) == history(whole), f"resumed after step {step}"
        assert contents(resumed, whole.max_steps) == contents(whole, whole.max_steps), f"resumed after step {step}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compressor": "int4"}, "compressor=lowrank"),
        ({"schedule": "streaming", "fragments": 2}, "schedule=delayed"),
        ({"replica_schedule": "ramp-up"}, "replica_schedule"),
        ({"elastic": True, "engine": "torchdist"}, "elastic=True"),
    ],
)
def test_what_cannot_adapt_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_config(tmp_path, **(ADAPTIVE | {"model": LLAMA} | changes))
