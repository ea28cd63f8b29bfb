"""The coordinator of a run, from the run's settings: what `atoll train --elastic` and `atoll coordinator` start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import atoll
from atoll.elastic.coordinator import Service, run_coordinator
from atoll.elastic.membership import Rules
from atoll.elastic.tokens import JOIN
from atoll.train.config import TrainConfig, settings_digest
from atoll.train.console import print_line
from atoll.train.folder import METRICS
from atoll.train.metrics import MetricsWriter


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
    say: Callable[[str], None] = print_line,
    started: Callable[[str], None] = lambda token: None,
) -> int:
    """Serve the run that `config` describes until it is over; returns its exit code.

    started: gets a token that lets islands in, once they can come.
    """
    folder = Path(config.output_dir)
    with MetricsWriter(folder / METRICS) as metrics:
        service = Service(
            settings=config.model_dump(exclude_none=True),
            rules=rules_of(config),
            folder=folder,
            host=host,
            port=port,
            step_of=lambda round: min(round * config.inner_steps, config.max_steps),
            metrics=metrics.append,
            say=say,
            allow_public=allow_public,
        )
        return run_coordinator(
            service, started=lambda coordinator: started(coordinator.create_token(JOIN, note="first"))
        )
