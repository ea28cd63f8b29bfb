"""What the coordinator of a run takes from its folder, and what it hands on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.train import elastic_service
from atoll.train.config import build_config
from atoll.train.elastic_service import past_events


def test_events_of_earlier_starts_are_read_without_steps_and_without_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"event": "step", "step": 1}, {"event": "member", "what": "joined"}, {"event": "round", "round": 1}]
    torn = "12\n" + '{"event": "mem{"event": "step", "step": 2}\n'
    path.write_text(torn + "".join(json.dumps(line) + "\n" for line in lines) + '{"event": "round", "rou')
    assert [event["event"] for event in past_events(path)] == ["member", "round"]


def test_trackers_are_given_the_rounds_of_an_elastic_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logged: list[Any] = []

    class Tracker:
        def log(self, scalars: dict[str, float], step: int) -> None:
            logged.append((scalars["round/loss"], step))

        def close(self) -> None:
            logged.append("closed")

    def serve(service: Any, **about: Any) -> int:
        service.metrics({"event": "member", "what": "joined", "step": 0})
        service.metrics({"event": "round", "round": 1, "step": 10, "loss": 2.5, "islands": {}})
        return 0

    monkeypatch.setattr(elastic_service, "open_trackers", lambda *given: [Tracker()])
    monkeypatch.setattr(elastic_service, "run_coordinator", serve)
    config = build_config({"elastic": True, "output_dir": str(tmp_path), "report_to": ["tensorboard"]})
    assert elastic_service.serve_run(config, host="127.0.0.1", port=0, say=lambda line: None) == 0
    assert logged == [(2.5, 10), "closed"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
