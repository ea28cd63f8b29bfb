"""Step time, sync time and overhead from the metrics of a real run, in place of guesses.

Read from metrics.jsonl: round events (`inner_s`, `sync_s`, `exposed_s`, `payload_bytes`) and step events (`tokens`).
Medians over rounds, the first one left out: it holds warm-ups.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from atoll.errors import ConfigError


@dataclass(frozen=True)
class Measured:
    """Medians of one run. step_s: of an inner step. tokens_per_step: over all replicas, 0 if no step was logged.

    sync_s: from launch to landing; exposed_s: what of that training stood still. rounds: that were looked at.
    """

    rounds: int
    replicas: int
    inner_steps: int
    step_s: float
    sync_s: float
    exposed_s: float
    payload_bytes: float
    tokens_per_step: float
    compressor: str

    @property
    def overlapped(self) -> bool:
        """Whether syncs ran beside the inner steps."""
        return self.exposed_s < 0.9 * self.sync_s

    @property
    def utilisation(self) -> float:
        compute = self.inner_steps * self.step_s
        return compute / (compute + self.exposed_s)

    def overhead_s(self, link_bytes_per_s: float | None = None) -> float:
        """What of a sync was not sending. Without the link of that run all of it counts, as on one machine it is."""
        sending = self.payload_bytes / link_bytes_per_s if link_bytes_per_s else 0.0
        return max(0.0, self.sync_s - sending)

    @property
    def landing_s(self) -> float:
        """What training stood still although the sync was hidden; 0 where none was."""
        return self.exposed_s if self.overlapped else 0.0


def read_run(run: str | Path) -> Measured:
    """What the run in folder `run` measured. Raises ConfigError where it has no two rounds yet."""
    path = Path(run)
    path = path / "metrics.jsonl" if path.is_dir() else path
    events = list(_events(path))
    rounds = [event for event in events if event.get("event") == "round"]
    timed = [event for event in rounds if event.get("inner_s") and event.get("sync_s") is not None]
    if len(timed) < 2:
        raise ConfigError(
            f"{str(path)!r} holds {len(timed)} timed round(s); the first is a warm-up, so two or more are needed. "
            "Measure a longer run."
        )
    return measure_rounds(timed, events)


def measure_rounds(rounds: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> Measured:
    """Medians over `rounds`, oldest first; inner steps from the distance between them."""
    inner_steps = _inner_steps(rounds)
    steady = [after for before, after in pairwise(rounds) if after["step"] - before["step"] == inner_steps]
    replicas = int(steady[-1]["replicas"])
    return Measured(
        rounds=len(steady),
        replicas=replicas,
        inner_steps=inner_steps,
        step_s=median(event["inner_s"] for event in steady) / inner_steps,
        sync_s=median(event["sync_s"] for event in steady),
        exposed_s=median(event["exposed_s"] for event in steady),
        payload_bytes=median(event["payload_bytes"] for event in steady),
        tokens_per_step=replicas * _tokens_a_step(events),
        compressor=str(steady[-1].get("compressor", "identity")),
    )


def _inner_steps(rounds: Sequence[Mapping[str, Any]]) -> int:
    distances = [after["step"] - before["step"] for before, after in pairwise(rounds)]
    longest = max(distances)
    if longest < 1:
        raise ConfigError("the rounds of that run lie at one inner step; their length is not known. Measure another.")
    return int(longest)


def _tokens_a_step(events: Sequence[Mapping[str, Any]]) -> float:
    steps = [event for event in events if event.get("event") == "step" and event.get("replica") == 0]
    if not steps or not steps[-1]["step"]:
        return 0.0
    return float(steps[-1]["tokens"] / steps[-1]["step"])


def _events(path: Path) -> list[dict[str, Any]]:
    """Every whole line; the last may be torn by a run that is still going."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error}. Give the folder of a run that has started."
        ) from None
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            if number < len(lines):
                raise ConfigError(f"{path}, line {number} is not JSON. Give the metrics of a run of Atoll.") from None
            continue
        if isinstance(event, dict):
            events.append(event)
    return events
