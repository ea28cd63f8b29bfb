"""What workers do in the tests of engine and launcher: importable, so that a fork server can be told to do it."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

from atoll.algo.schedule import Schedule
from atoll.errors import ConfigError
from atoll.train import build, engine
from atoll.train.config import TrainConfig
from atoll.train.run import Run

KILLED_AT = 5


def train_and_leave_pid(config: TrainConfig, store: Any, rank: int, *, num_processes: int) -> None:
    """Trains; its process id stands in a file of the run folder from the first step on."""
    _on_step(lambda run, step: _leave_pid(run) if step == 1 else None)
    engine.run_worker(config, store, rank, num_processes=num_processes)


def train_until_killed(config: TrainConfig, store: Any, rank: int, *, num_processes: int) -> None:
    """Trains; replica 1 is killed after a step."""

    def kill(run: Run, step: int) -> None:
        if step == 1:
            _leave_pid(run)
        if step == KILLED_AT and run.members[0].index == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    _on_step(kill)
    engine.run_worker(config, store, rank, num_processes=num_processes)


def train_with_rounds_in_flight(config: TrainConfig, store: Any, rank: int, *, num_processes: int) -> None:
    """Trains with a delay of a round."""
    schedule = Schedule(config.inner_steps, delay=config.inner_steps, blocking_first=True)
    engine.build_run = functools.partial(build.build_run, schedule=schedule)  # type: ignore[attr-defined]
    engine.run_worker(config, store, rank, num_processes=num_processes)


def fail_in_one(config: TrainConfig, store: Any, rank: int, *, num_processes: int) -> None:
    """Replica 1 has a bug."""
    if rank == 1:
        raise RuntimeError("a bug of replica one")
    engine.run_worker(config, store, rank, num_processes=num_processes)


def refuse_in_one(config: TrainConfig, store: Any, rank: int, *, num_processes: int) -> None:
    """Replica 1 cannot use a setting."""
    if rank == 1:
        raise ConfigError("seed=1 is unlucky. Use 2.")
    engine.run_worker(config, store, rank, num_processes=num_processes)


def wait_for_ever(config: TrainConfig, store: Any, rank: int, *, num_processes: int) -> None:
    """Deaf to signals and without a word to the store, as in a collective that never ends."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    Path(config.output_dir, f"pid-{rank}").write_text(str(os.getpid()))
    while True:
        time.sleep(60)


def _leave_pid(run: Run) -> None:
    (run.run_dir / f"pid-{run.members[0].index}").write_text(str(os.getpid()))


def _on_step(action: Any) -> None:
    """Have `action(run, step)` called when a step was logged, before its sync."""
    log_step = Run.log_step

    def log_and_act(run: Run, report: Any) -> None:
        log_step(run, report)
        action(run, report.step)

    Run.log_step = log_and_act  # type: ignore[method-assign]
