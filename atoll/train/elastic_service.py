"""The coordinator of a run, from the run's settings: what `atoll train --elastic` and `atoll coordinator` start."""

from __future__ import annotations

import json
import math
import mmap
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import atoll
from atoll.elastic.coordinator import Coordinator, Service, run_coordinator
from atoll.elastic.evaluations import Evaluation
from atoll.elastic.membership import Rules
from atoll.elastic.tokens import JOIN
from atoll.train.config import TrainConfig, settings_digest
from atoll.train.console import format_eval, print_line
from atoll.train.folder import METRICS
from atoll.train.metrics import EvalEvent, MetricsWriter, open_trackers, perplexity, scalars_of


def rules_of(config: TrainConfig) -> Rules:
    """What the coordinator must know of a run."""
    return Rules(
        num_rounds=-(-config.max_steps // config.inner_steps),
        settings_digest=settings_digest(config),
        version=atoll.__version__,
        replicas=config.replicas,
        min_replicas=config.min_replicas,
        quorum=config.quorum,
        deadline_s=config.deadline_s,
        clip_ratio=config.clip_ratio,
    )


def serve_run(
    config: TrainConfig,
    *,
    host: str,
    port: int,
    allow_public: bool = False,
    begin_with: int = 0,
    say: Callable[[str], None] = print_line,
    started: Callable[[str], None] = lambda token: None,
) -> int:
    """Serve the run that `config` describes until it is over; returns its exit code.

    begin_with: islands that a new run waits for; 0: all `config.replicas`. started: gets a token that lets islands in,
    once they can come.
    """
    folder = Path(config.output_dir)

    def evaluated(evaluation: Evaluation) -> None:
        event = _eval_event(config, evaluation)
        metrics.write(event)
        trackers.log(scalars_of(event), event.step)
        say(format_eval(event))

    def happened(event: Mapping[str, Any]) -> None:
        metrics.append(event)
        if event["event"] == "round":
            trackers.log(round_scalars(event), event["step"])

    def begun(coordinator: Coordinator) -> None:
        started(coordinator.create_token(JOIN, note="first"))
        say(f"to watch it: atoll status {shlex.quote(str(folder))}, or in a browser with --page")

    with MetricsWriter(folder / METRICS) as metrics, _Trackers(config) as trackers:
        service = Service(
            settings=config.model_dump(exclude_none=True),
            rules=replace(rules_of(config), replicas=begin_with or config.replicas),
            folder=folder,
            host=host,
            port=port,
            step_of=lambda round: _step_of(config, round),
            evaluated=evaluated,
            told_round=last_round(folder / METRICS),
            past=lambda: past_events(folder / METRICS),
            metrics=happened,
            say=say,
            allow_public=allow_public,
        )
        return run_coordinator(service, started=begun)


def last_round(path: Path) -> int:
    """The newest round in a metrics.jsonl that a coordinator writes; 0 where there is none."""
    if not path.exists() or path.stat().st_size == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        start = text.rfind(b'{"event": "round"')
        line = text[start : text.find(b"\n", start)] if start >= 0 else b""
    return int(json.loads(line)["round"]) if line else 0


def past_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a metrics.jsonl but for inner steps, which are by far the most.

    Only what is shown to people comes from them: a line that was torn when its writer died stops no coordinator.
    """
    with path.open("rb") as file:
        for line in file:
            if not line.startswith(b'{"event": "step"'):
                with suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict):
                        yield event


def round_scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round, under the names that trackers group by.

    >>> round_scalars({"event": "round", "round": 3, "step": 30, "loss": 2.5, "islands": {}, "idle_s": None})
    {'round/round': 3, 'round/loss': 2.5}
    """
    numbers = {key: value for key, value in event.items() if type(value) in (int, float) and key not in ("step", "at")}
    return {f"round/{key}": value for key, value in numbers.items() if math.isfinite(value)}


class _Trackers:
    """The trackers that the settings name, open within the block."""

    def __init__(self, config: TrainConfig) -> None:
        self._open = open_trackers(config.report_to, config.output_dir, config.model_dump())

    def log(self, scalars: dict[str, float], step: int) -> None:
        for tracker in self._open:
            tracker.log(scalars, step)

    def __enter__(self) -> _Trackers:
        return self

    def __exit__(self, *caught: object) -> None:
        for tracker in self._open:
            tracker.close()


def _step_of(config: TrainConfig, round: int) -> int:
    return min(round * config.inner_steps, config.max_steps)


def _eval_event(config: TrainConfig, evaluation: Evaluation) -> EvalEvent:
    return EvalEvent(
        step=_step_of(config, evaluation.round),
        round=evaluation.round,
        loss=evaluation.loss,
        perplexity=perplexity(evaluation.loss),
        tokens=evaluation.tokens,
    )
