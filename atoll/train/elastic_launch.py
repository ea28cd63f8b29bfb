"""`atoll train --elastic`: a coordinator and its islands as processes of this machine, by the code that runs between
machines. The launcher starts them and looks after them: a coordinator that dies is started again, an island that dies
is told and its work goes on with the others (`atoll join` brings another one in).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from atoll.elastic.coordinator import FOLDER
from atoll.elastic.log import LOG
from atoll.errors import AtollError, ConfigError, TransportError
from atoll.train.checkpoint import find_checkpoint, load_json, prepare_run_dir, refuse_other_config
from atoll.train.config import TrainConfig, build_config, essential, read_config_file, write_config_file
from atoll.train.console import print_line, waiting
from atoll.train.elastic_saved import forget_saved
from atoll.train.folder import CONFIG, METRICS, holds_run, refuse_taken
from atoll.train.fork_server import start_fork_server
from atoll.train.island_processes import fork_followers, meet_here, meet_there
from atoll.train.launch import WorkersFailed, _end_with_launcher, _Failure, _passing_signals_on, _signal_all
from atoll.train.metrics import truncate_metrics
from atoll.train.resume import STATE
from atoll.train.worker_channel import Channel

COORDINATOR_S = 60.0  # to start, torch included
GRACE_S = 10.0  # for the coordinator to end after the last island did
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Reach:
    """Where the coordinator listens, and how many a new run waits for, as for `serve_run`. started: gets its token."""

    host: str = HOST
    allow_public: bool = False
    begin_with: int = 0
    started: Callable[[str], None] = lambda token: None

    @property
    def listening(self) -> tuple[str, bool, int]:
        """What the coordinator's process must know."""
        return self.host, self.allow_public, self.begin_with


def run_elastic(config: TrainConfig, *, islands: int = 0, reach: Reach | None = None) -> None:
    """Run coordinator and islands until all islands are done. Raises `WorkersFailed` where none came to the end.

    islands: on this machine; 0 for `config.replicas`. Others come from elsewhere where `reach` lets them.
    """
    islands = islands or config.replicas
    run_dir = Path(config.output_dir)
    refuse_taken(config)
    prepare_run_dir(run_dir, warn=print_line)
    _go_back(config, run_dir)
    start_fork_server()
    coordinator = _Coordinator(config, reach or Reach())
    workers: list[tuple[ForkServerProcess, Connection]] = []
    with _passing_signals_on(workers) as signals:
        try:
            with waiting("the coordinator and the islands to load torch"):
                token = coordinator.start()
                for seat in range(islands):
                    workers.append(_start(_work, config, token, seat, islands))
                    signals.deliver()
            if reach is not None:
                reach.started(token)
            outcomes = _watch(workers, coordinator)
        finally:
            coordinator.stop()
    if len(signals.received) > 1:
        raise WorkersFailed(_Failure(130, "interrupted twice; left at once, without saving", False))
    failures = [failure for failure in outcomes if failure is not None]
    if failures and len(failures) == len(outcomes):
        raise WorkersFailed(min(failures, key=lambda failure: (failure.transport, failure.exit_code in (75, 130))))


def _go_back(config: TrainConfig, run_dir: Path) -> None:
    """On resume, forget what was logged after the checkpoint; the settings are written anew."""
    if holds_run(run_dir):
        refuse_other_config(essential(read_config_file(run_dir / CONFIG)), essential(config))
    write_config_file(config, run_dir / CONFIG)
    forget_saved(run_dir)
    folder = find_checkpoint(run_dir, config.resume, warn=print_line)
    if (run_dir / METRICS).exists():
        truncate_metrics(run_dir / METRICS, load_json(folder / STATE)["step"] if folder is not None else 0)
    for log in (run_dir / FOLDER).glob(f"{LOG}*"):
        log.unlink()  # it may know of rounds that no island holds any more; what the islands hold is the truth


def _start(target: Callable[..., None], *arguments: Any) -> tuple[ForkServerProcess, Connection]:
    """A process of this launcher with a pipe of its own to say things through."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    given = [argument.model_dump() if isinstance(argument, TrainConfig) else argument for argument in arguments]
    process = context.Process(target=target, args=(*given, theirs))
    process.start()
    theirs.close()
    return process, ours


class _Coordinator:
    """The coordinator's process, started again when it dies."""

    def __init__(self, config: TrainConfig, reach: Reach) -> None:
        self._config = config
        self._reach = reach
        self._pipe: Connection | None = None
        self.process: ForkServerProcess | None = None

    def start(self) -> str:
        """Start it and wait until it serves; returns a token for the islands."""
        if self._pipe is not None:
            self._pipe.close()
        self.process, pipe = _start(_coordinate, self._config, *self._reach.listening)
        self._pipe = pipe
        if not pipe.poll(COORDINATOR_S):
            raise TransportError(f"the coordinator did not start within {COORDINATOR_S:.0f} s. See what it printed.")
        try:
            kind, text = pipe.recv()
        except EOFError:
            raise TransportError("the coordinator ended before it served. See what it printed.") from None
        if kind == "failed":
            raise ConfigError(text)
        return str(text)

    def look_after(self) -> None:
        """Start it again if it died: islands come back to it, and nothing that was committed is lost."""
        if self.process is not None and not self.process.is_alive():
            print_line("the coordinator died; it is started again from its log")
            self.start()

    def stop(self) -> None:
        """End it, by force if it does not want to."""
        if self.process is None:
            return
        self.process.join(GRACE_S if not self.process.is_alive() else 0.5)
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if self.process.is_alive():
                _signal_all([self.process], signum)
                self.process.join(GRACE_S)


def _watch(workers: list[tuple[ForkServerProcess, Connection]], coordinator: _Coordinator) -> list[_Failure | None]:
    """Wait until every island has ended; returns how each did, None for well."""
    outcomes: list[_Failure | None] = []
    running = dict(enumerate(workers))
    while running:
        sentinels = [process.sentinel for process, _ in running.values()]
        if coordinator.process is not None:
            sentinels.append(coordinator.process.sentinel)
        wait(sentinels, timeout=5.0)
        for seat, (process, pipe) in list(running.items()):
            if not process.is_alive():
                del running[seat]
                outcomes.append(_outcome(seat, process, pipe))
                _tell(seat, outcomes[-1], num_left=len(running))
        if running and None not in outcomes:
            _look_after(coordinator, [process for process, _ in running.values()])
    return outcomes


def _look_after(coordinator: _Coordinator, islands: list[ForkServerProcess]) -> None:
    """Start a coordinator that died again; where that fails, let the islands save what they have."""
    try:
        coordinator.look_after()
    except AtollError as error:
        print_line(f"the coordinator cannot be started again: {error}\nThe islands save what they have and leave.")
        coordinator.process = None
        _signal_all(islands, signal.SIGTERM)


def _outcome(seat: int, process: ForkServerProcess, pipe: Connection) -> _Failure | None:
    process.join()
    if pipe.poll():
        try:
            return _Failure(*pipe.recv())
        except EOFError:
            pass
    if process.exitcode == 0:
        return None
    return _Failure(1, f"replica {seat} ended with exit code {process.exitcode}", True)


def _tell(seat: int, failure: _Failure | None, *, num_left: int) -> None:
    if failure is not None and num_left and failure.exit_code not in (75, 130):
        print_line(f"{failure.message.splitlines()[0]}; the run goes on with {num_left}")


# --- in the processes


def _coordinate(settings: dict[str, Any], host: str, allow_public: bool, begin_with: int, pipe: Connection) -> None:
    """The coordinator's process."""
    os.setpgid(0, 0)
    _end_with_launcher()
    try:
        from atoll.train.elastic_service import serve_run

        serve_run(
            build_config(settings),
            host=host,
            allow_public=allow_public,
            begin_with=begin_with,
            port=settings["port"],
            started=lambda token: pipe.send(("token", token)),
        )
    except AtollError as error:
        pipe.send(("failed", str(error)))


def _work(settings: dict[str, Any], token: str, seat: int, islands: int, pipe: Connection) -> None:
    """The process that leads an island. It forks the island's other workers before it starts any thread."""
    os.setpgid(0, 0)
    config = build_config(settings)
    channels = fork_followers(config, lambda index, channel: _follow(config, token, index, channel, pipe))
    _end_with_launcher()

    def lost(why: str) -> None:
        """An island without one of its workers is dead, whatever its other threads wait for."""
        pipe.send((TransportError("").exit_code, f"replica {seat}: {why}", True))
        os._exit(TransportError("").exit_code)

    failure = _run_island(config, token, seat, islands, channels, lost)
    if failure is not None:
        pipe.send((failure.exit_code, failure.message, failure.transport))
        pipe.close()
    sys.stdout.flush()
    os._exit(failure.exit_code if failure is not None else 0)  # a wait inside gloo may never let an orderly exit finish


def _follow(config: TrainConfig, token: str, index: int, channel: Channel, pipe: Connection) -> None:
    """Another worker of the island, in a process of its own."""
    pipe.close()
    from atoll.elastic.tokens import parse_token
    from atoll.train.elastic import follow_leader

    follow_leader(config, parse_token(token), index, channel, meet_there(channel))


def _run_island(
    config: TrainConfig,
    token: str,
    seat: int,
    islands: int,
    channels: Mapping[int, Channel],
    lost: Callable[[str], None],
) -> _Failure | None:
    try:
        from atoll.elastic.tokens import parse_token
        from atoll.train.elastic import run_island

        run_island(
            config,
            parse_token(token),
            seat=seat,
            founder=True,
            num_processes=islands * config.num_workers,
            fellows=meet_here(channels),
            lost=lost,
        )
    except AtollError as error:
        return _Failure(error.exit_code, str(error), isinstance(error, TransportError))
    except KeyboardInterrupt:
        return _Failure(130, "interrupted twice; left at once, without saving", False)
    except BaseException:
        return _Failure(1, f"replica {seat} failed:\n{traceback.format_exc()}", False)
    return None
