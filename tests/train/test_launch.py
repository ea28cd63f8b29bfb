"""Workers are looked after: stopped together, named when they fail, and never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from train import workers
from train.tiny import LLAMA, but, checkpoint, contents, history, metrics, tiny_config, train_tiny

from atoll.errors import ConfigError
from atoll.train.config import TrainConfig
from atoll.train.launch import GRACE_S, WorkersFailed, run_workers

DEADLINE_S = 90.0  # far beyond what any of this takes; a hang, and nothing else, reaches it
ENDLESS = {"max_steps": 1_000_000, "inner_steps": 20, "lr_schedule": "constant", "engine": "torchdist"}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.01)


def pids(config: TrainConfig) -> list[int]:
    """Process ids that the workers left, those written in full."""
    texts = [path.read_text() for path in sorted(Path(config.output_dir).glob("pid-*"))]
    return [int(text) for text in texts if text]


def ps(pid: int, column: str) -> str:
    return subprocess.run(["ps", "-o", f"{column}=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()


def is_gone(pid: int) -> bool:
    return ps(pid, "stat")[:1] in ("", "Z")


def steps_logged(config: TrainConfig) -> dict[int, int]:
    """The last step of each replica."""
    with suppress(ConfigError):
        return {line["replica"]: line["step"] for line in metrics(config, "step")}
    return {}


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """`action` in a thread, while this one is in the launcher."""
    errors: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGINT)  # whatever the block waits for will not come
            raise

    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()
    assert not errors


@pytest.mark.parametrize(("signum", "code", "replicas"), [(signal.SIGINT, 130, 2), (signal.SIGTERM, 75, 4)])
def test_a_signal_to_the_launcher_saves_and_the_resumed_run_is_exact(
    signum: int, code: int, replicas: int, tmp_path: Path
) -> None:
    endless = tiny_config(tmp_path, replicas=replicas, **ENDLESS)

    def interrupt() -> None:
        wait_until(lambda: len(pids(endless)) == replicas and min(steps_logged(endless).values()) > 30, "30 steps")
        os.kill(os.getpid(), signum)

    with meanwhile(interrupt), pytest.raises(WorkersFailed, match="Go on with --resume auto") as stopped:
        run_workers(endless, workers.train_and_leave_pid)
    assert stopped.value.exit_code == code
    last = steps_logged(endless)
    assert len(last) == replicas and len(set(last.values())) == 1
    assert checkpoint(endless, last[0]).exists()
    assert all(is_gone(pid) for pid in pids(endless))

    resumed = but(endless, max_steps=last[0] + 15, resume="auto", engine="local")
    train_tiny(resumed)
    whole = but(resumed, resume="never", output_dir=str(tmp_path / "whole"))
    train_tiny(whole)
    assert contents(resumed, resumed.max_steps) == contents(whole, whole.max_steps)


def test_a_killed_worker_is_named_the_others_end_and_the_resumed_run_is_exact(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, replicas=3, save_steps=4, engine="torchdist")
    with pytest.raises(WorkersFailed, match="replica 1 was ended by signal SIGKILL") as failed:
        run_workers(config, workers.train_until_killed)
    assert failed.value.exit_code == 1
    assert len(pids(config)) == 3 and all(is_gone(pid) for pid in pids(config))
    run_workers(but(config, resume="auto"), workers.train_and_leave_pid)
    whole = but(config, engine="local", output_dir=str(tmp_path / "whole"))
    train_tiny(whole)
    assert contents(config, 8) == contents(whole, 8)
    losses = [[line["loss"] for line in history(run) if line["event"] == "step"] for run in (config, whole)]
    assert losses[0] == losses[1]


def test_a_bug_in_one_worker_is_told_with_its_traceback(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, **ENDLESS)
    with pytest.raises(WorkersFailed, match=r"replica 1 failed:\n(.|\n)*RuntimeError: a bug of replica one") as failed:
        run_workers(config, workers.fail_in_one)
    assert failed.value.exit_code == 1


def test_what_one_worker_refuses_is_told_as_it_said_it(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, **ENDLESS)
    with pytest.raises(WorkersFailed) as failed:
        run_workers(config, workers.refuse_in_one)
    assert (str(failed.value), failed.value.exit_code) == ("seed=1 is unlucky. Use 2.", 2)


def test_a_second_signal_ends_workers_that_hear_none(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, **ENDLESS)

    def interrupt_twice() -> None:
        wait_until(lambda: len(pids(config)) == 2, "the workers")
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    with meanwhile(interrupt_twice), pytest.raises(WorkersFailed, match="interrupted twice") as stopped:
        run_workers(config, workers.wait_for_ever)
    assert stopped.value.exit_code == 130
    assert all(is_gone(pid) for pid in pids(config))


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port={port} cannot be used(.|\n)*--port 0"):
            run_workers(tiny_config(tmp_path, port=port, engine="torchdist"), workers.train_and_leave_pid)


def test_workers_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, model=LLAMA, **ENDLESS)
    script = (
        "import json, sys; from atoll.train.config import build_config; from atoll.train.launch import run_workers\n"
        "from train import workers; run_workers(build_config(json.loads(sys.argv[1])), workers.wait_for_ever)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", script, json.dumps(config.model_dump())]
    launcher = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(pids(config)) == 2, "the workers")
        family = {*pids(config), *(int(ps(pid, "ppid")) for pid in pids(config))}  # the fork server too
        assert len(family) == 3 and not any(is_gone(pid) for pid in family)
    finally:
        launcher.kill()
        launcher.wait()
    try:
        wait_until(lambda: all(is_gone(pid) for pid in family), "the workers outlive their launcher")
    except TimeoutError:
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise


def test_there_is_time_to_save_before_workers_are_ended() -> None:
    assert 2 <= GRACE_S <= 10
