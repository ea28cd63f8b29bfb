"""Starting the workers of all replicas on this machine, a process each, and looking after them.

Workers come from a fork server that has torch loaded, so that each starts in a tenth of a second. Each has a pipe of
its own to say what went wrong. They stand in process groups of their own: a Ctrl-C on the terminal reaches the launcher
alone, which passes it on; and each ends itself when the launcher is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import FrameType
from typing import Any

from atoll.errors import AtollError, ConfigError, TransportError
from atoll.train.config import TrainConfig, build_config
from atoll.train.console import waiting
from atoll.train.fork_server import start_fork_server
from atoll.train.stopping import watch_signals

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
GRACE_S = 5.0  # between asking the other workers to end and ending them
LOOK_S = 1.0  # a signal that comes just before a wait begins does not end it: it is heard at the next look


@dataclass(frozen=True)
class _Failure:
    """What a worker says before it ends. exit_code: what the launcher should return."""

    exit_code: int
    message: str
    transport: bool


class WorkersFailed(AtollError):
    """A worker ended in error; the message is its own."""

    def __init__(self, failure: _Failure) -> None:
        super().__init__(failure.message)
        self.exit_code = failure.exit_code


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def work_in_engine(config: TrainConfig, store: Any, rank: int, *, num_processes: int) -> None:
    """One worker, as a target of `run_workers`: the launcher itself need not load the engine."""
    from atoll.train.engine import run_worker

    run_worker(config, store, rank, num_processes=num_processes)


def run_workers(config: TrainConfig, target: Callable[..., None]) -> None:
    """Run `target(config, store, rank, num_processes=...)` in a process a worker until all are done.

    Raises ConfigError before any is started where a replica cannot be laid out over its workers; afterwards what the
    first worker to fail said, and the others are ended.
    """
    start_fork_server()
    check_layout(config)
    store, port = _open_store(config)
    workers: list[tuple[ForkServerProcess, Connection]] = []
    with _passing_signals_on(workers) as signals:
        with waiting("the workers to load torch"):
            for rank in range(config.num_processes):
                workers.append(_start_worker(config, target, rank, port))
                signals.deliver()
        failure = _watch(config, workers)
    del store
    if len(signals.received) > 1:
        failure = _Failure(130, "interrupted twice; left at once, without saving", False)
    if failure is not None:
        raise WorkersFailed(failure)


def check_layout(config: TrainConfig) -> None:
    """Raises ConfigError where a replica cannot be laid out over its workers."""
    if config.num_workers > 1:
        from atoll.train.layout import make_layout  # transformers takes a second to load, and one worker needs no plan

        make_layout(config)


def name_of(config: TrainConfig, rank: int) -> str:
    """What process `rank` is called.

    >>> name_of(build_config({"replicas": 2, "pipeline_stages": 2, "batch_size": 2}), 3)
    'replica 1, worker 1'
    """
    replica, worker = divmod(rank, config.num_workers)
    return f"replica {replica}" + (f", worker {worker}" if config.num_workers > 1 else "")


def _start_worker(
    config: TrainConfig, target: Callable[..., None], rank: int, port: int
) -> tuple[ForkServerProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    arguments = (target, config.model_dump(), rank, port, theirs)
    process = context.Process(target=_work, args=arguments, name=f"worker-{rank}")
    process.start()
    theirs.close()
    return process, ours


def _open_store(config: TrainConfig) -> tuple[Any, int]:
    """The rendezvous store on loopback, in this process; it outlives every worker."""
    import torch.distributed as dist

    try:
        store = dist.TCPStore("127.0.0.1", config.port, is_master=True, wait_for_workers=False)
    except (RuntimeError, dist.DistError) as error:
        raise ConfigError(
            f"port={config.port} cannot be used on loopback: {str(error).splitlines()[0][:160]}\n"
            "Use --port 0 for any free one."
        ) from None
    return store, store.port


def _work(target: Callable[..., None], settings: dict[str, Any], rank: int, port: int, pipe: Connection) -> None:
    """The worker process."""
    os.setpgid(0, 0)
    _end_with_launcher()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    failure = None
    config = build_config(settings)
    try:
        import torch.distributed as dist

        with watch_signals():
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            target(config, store, rank, num_processes=config.num_processes)
    except AtollError as error:
        failure = _Failure(error.exit_code, str(error), isinstance(error, TransportError))
    except KeyboardInterrupt:
        failure = _Failure(130, "interrupted twice; left at once, without saving", False)
    except BaseException:
        failure = _Failure(1, f"{name_of(config, rank)} failed:\n{traceback.format_exc()}", False)
    if failure is not None:
        pipe.send((failure.exit_code, failure.message, failure.transport))
        pipe.close()
        sys.stdout.flush()
        os._exit(failure.exit_code)  # a collective that lost its peers may never let an orderly exit finish


def _end_with_launcher() -> None:
    """End this process when the launcher is gone, whatever it is doing."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None

    def watch() -> None:
        launcher.join()
        os._exit(1)

    threading.Thread(target=watch, name="atoll-launcher-watch", daemon=True).start()


class _Signals:
    """SIGINTs and SIGTERMs that came to the launcher, and how many of them each worker has got."""

    def __init__(self, workers: Sequence[tuple[ForkServerProcess, Connection]]) -> None:
        self.received: list[int] = []
        self._workers = workers
        self._got: dict[int, int] = {}

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)
        self.deliver()

    def deliver(self) -> None:
        """Give every worker what it has not got yet; one that started after a signal gets it now."""
        for rank, (process, _) in enumerate(self._workers):
            while self._got.get(rank, 0) < len(self.received):
                self._got[rank] = self._got.get(rank, 0) + 1
                first = self._got[rank] == 1
                _signal_all([process], self.received[0] if first else signal.SIGKILL)


@contextmanager
def _passing_signals_on(workers: Sequence[tuple[ForkServerProcess, Connection]]) -> Iterator[_Signals]:
    """Within the block SIGINT and SIGTERM go to the workers; a second one of either ends them."""
    signals = _Signals(workers)
    before = {signum: signal.signal(signum, signals) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _watch(config: TrainConfig, workers: list[tuple[ForkServerProcess, Connection]]) -> _Failure | None:
    """Wait for all workers; when one fails, end the others. The failure that tells most is returned."""
    failures: list[_Failure] = []
    running = dict(enumerate(workers))
    deadline: float | None = None
    while running:
        timeout = LOOK_S if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([process.sentinel for process, _ in running.values()], timeout)
        for rank, (process, pipe) in list(running.items()):
            if process.sentinel in ready:
                del running[rank]
                failures += _last_words(name_of(config, rank), process, pipe)
        if failures and running and deadline is None:
            deadline = time.monotonic() + GRACE_S
            if not _stopped_together(failures):
                _signal_all(_processes(running), signal.SIGTERM)
        elif deadline is not None and time.monotonic() >= deadline:
            _signal_all(_processes(running), signal.SIGKILL)
            deadline = time.monotonic() + GRACE_S
    return min(failures, key=_rank_of_interest, default=None)


def _last_words(name: str, process: ForkServerProcess, pipe: Connection) -> list[_Failure]:
    process.join()
    if pipe.poll():
        try:
            return [_Failure(*pipe.recv())]
        except EOFError:
            pass
    if process.exitcode == 0:
        return []
    return [_Failure(1, f"{name} was ended by {_cause(process.exitcode)}.\nGo on with --resume auto.", False)]


def _cause(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"signal {signal.Signals(-exitcode).name}"
    return f"exit code {exitcode}"


def _stopped_together(failures: list[_Failure]) -> bool:
    return all(failure.exit_code in (75, 130) for failure in failures)


def _rank_of_interest(failure: _Failure) -> tuple[bool, bool]:
    """A cause comes before its consequences: a lost peer is named before the broken connections it left."""
    return (failure.transport, failure.exit_code in (75, 130))


def _processes(running: Mapping[int, tuple[ForkServerProcess, Connection]]) -> list[ForkServerProcess]:
    return [process for process, _ in running.values()]


def _signal_all(processes: Sequence[ForkServerProcess], signum: int) -> None:
    for process in processes:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signum)
