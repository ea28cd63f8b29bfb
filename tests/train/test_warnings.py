"""What a run warns of before and while it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from train.tiny import finish, tiny_config, tiny_run

from atoll.errors import ConfigError
from atoll.train.build import chosen_reduction, describe_reduction, make_schedule, warnings_of
from atoll.train.config import build_config

SHAPES = [(512, 512), (64, 64), (512,)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compressor": "lowrank", "rank": 64, "outer_momentum": 0.0}, "rank=15 would factor them too"),
        ({"compressor": "stat2", "error_feedback": False, "outer_momentum": 0.0}, "error_feedback=true"),
        ({"compressor": "topk", "error_feedback": False, "outer_momentum": 0.0}, "error_feedback=true"),
        ({"compressor": "topk", "outer_momentum": 0.5}, "outer_momentum=0"),
        ({"compressor": "lowrank", "rank": 8, "outer_momentum": 0.9}, "outer_momentum=0.6 or less"),
        ({"schedule": "delayed", "outer_lr": 0.7, "outer_momentum": 0.9}, "outer_lr=0.6 and outer_momentum=0.4"),
    ],
    ids=str,
)
def test_what_trains_badly_is_named_with_what_would_do(settings: dict[str, Any], words: str) -> None:
    (warning,) = warnings_of(build_config(settings), SHAPES)
    assert words in warning


def test_fragments_that_do_not_divide_are_refused_with_those_lengths_that_would_do() -> None:
    config = build_config({"schedule": "streaming", "fragments": 3, "inner_steps": 100})
    with pytest.raises(ConfigError, match=r"inner_steps=102 or 99"):
        make_schedule(config)


def test_inner_steps_that_do_not_hide_a_sync_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, schedule="delayed", inner_steps=2, max_steps=12, compressor="lowrank", rank=2)
    ticks = iter(range(1_000_000))
    run = tiny_run(config, clock=lambda: float(next(ticks)))  # read once a tensor of a sync, and four times a step
    lines: list[str] = []
    monkeypatch.setattr(run.output, "line", lines.append)
    finish(run)
    (warning,) = [line for line in lines if "do not hide" in line]
    assert "inner_steps=2 steps" in warning and "Use inner_steps=" in warning


@pytest.mark.parametrize(
    ("replicas", "link", "latency_ms", "expected"),
    [(2, 100.0, 0.0, "gather"), (3, 100.0, 0.0, "requantise"), (3, 1e6, 500.0, "gather"), (8, 0.0, 0.0, None)],
)
def test_codes_are_averaged_the_faster_way_where_the_link_is_known(
    replicas: int, link: float, latency_ms: float, expected: str | None
) -> None:
    settings = {"compressor": "int4", "replicas": replicas, "link_mbps": link, "link_latency_ms": latency_ms}
    config = build_config(settings)
    assert chosen_reduction(config) == expected
    assert (expected or "requantise") in describe_reduction(config)
