"""`atoll train`: from flags to a finished run and its report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from atoll.cli.flags import settings_from
from atoll.errors import ConfigError
from atoll.train.checkpoint import prepare_run_dir
from atoll.train.config import TrainConfig, build_config
from atoll.train.console import print_line
from atoll.train.elastic_launch import run_elastic
from atoll.train.folder import refuse_taken
from atoll.train.fork_server import start_fork_server
from atoll.train.launch import check_layout, run_workers, under_torchrun, work_in_engine


def train(args: Sequence[str]) -> None:
    """Train as `args` say, then write the report and say what can be done next."""
    from atoll.cli.dry_run import Options, dry_run, options_from, refuse_alone

    options, settings = options_from(args)
    config = build_config(settings_from(settings))
    refuse_alone(options, config)
    if config.dry_run:
        return dry_run(config, options or Options())
    if under_torchrun():
        refuse_elastic(config)
        run_in_this_process(config)
    else:
        run(config)
    if int(os.environ.get("RANK", "0")) == 0 or not under_torchrun():
        _conclude(config, command=shlex.join(["atoll", "train", *args]))


def run(config: TrainConfig) -> None:
    """Train with the engine that `config` names; a run folder that cannot be used is told before anything is loaded."""
    refuse_taken(config)
    if config.num_workers > 1:
        start_fork_server()  # it loads what the workers need while the next line does so for this process
        check_layout(config)
    prepare_run_dir(config.output_dir, warn=print_line)
    if config.elastic:
        run_elastic(config)
    elif config.engine == "local" or config.num_processes == 1:
        run_in_this_process(config)
    else:
        run_workers(config, work_in_engine)


def refuse_elastic(config: TrainConfig) -> None:
    """torchrun starts the workers of one island, and none of its own accord belongs to a run."""
    if config.elastic:
        raise ConfigError(
            "elastic=true under torchrun: torchrun starts the workers of one island, which joins a run.\n"
            "Start `atoll coordinator` with these settings, and torchrun with `-m atoll join TOKEN` for each island."
        )


def run_in_this_process(config: TrainConfig) -> None:
    """Train here: all replicas, or the one that torchrun started this process for."""
    from atoll.train import engine

    engine.run(config)


def _conclude(config: TrainConfig, *, command: str) -> None:
    from atoll.train.report import report_run

    run_dir = Path(config.output_dir)
    print_line(f"report: {report_run(run_dir, command=command)}")
    prompt = "def " if config.data.source == "python" else "The "
    print_line(f"next: atoll generate {shlex.quote(str(run_dir))} -p {shlex.quote(prompt)}")
