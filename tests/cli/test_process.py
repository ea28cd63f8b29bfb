"""`python -m atoll` as a process of its own: signals, exit codes, a reader that leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import atoll as package
from atoll.train.metrics import read_metrics

ROOT = Path(package.__file__).parent.parent
PATIENCE_S = 120.0  # before a process that hangs is given up; a healthy one takes seconds

# A run that goes on until it is told to stop, and says every step.
ENDLESS = ["--max-steps=1000000", "--lr-schedule=constant", "--logging-steps=1", "--inner-steps=10"]

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start the command in a session of its own; what is left of it at the end of the test is killed."""
    environment = dict(
        os.environ, PYTHONPATH=str(ROOT), PYTHONPYCACHEPREFIX=str(tmp_path_factory.getbasetemp() / "pyc")
    )
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling all of torch takes longer than the test
    processes: list[subprocess.Popen[str]] = []

    def run(*args: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "atoll", *(str(arg) for arg in args)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE_S)


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"step {step}/"):
            return
    pytest.fail(f"ended before step {step}: {process.stderr.read() if process.stderr else ''}")


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, err


def saved_step(run_dir: Path) -> int:
    return int((run_dir / "latest").read_text().strip().rpartition("-")[2])


def steps_of(run_dir: Path, replica: int) -> list[int]:
    events = read_metrics(run_dir / "metrics.jsonl")
    return [event["step"] for event in events if event["event"] == "step" and event["replica"] == replica]


@pytest.mark.slow
def test_ctrl_c_saves_and_leaves_and_the_run_goes_on(start: Start, atoll, tiny: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = [*tiny, *ENDLESS, f"--output-dir={run_dir}"]
    process = start("train", *flags, "--engine=torchdist")
    wait_for_step(process, 14)
    process.send_signal(signal.SIGINT)
    code, err = end(process)
    assert code == 130, err
    assert err.startswith("stopped after step")
    assert "--resume auto" in err
    step = saved_step(run_dir)
    answer = atoll("train", *flags, "--resume=auto", f"--max-steps={step + 6}")
    assert answer.code == 0, answer.err
    assert [steps_of(run_dir, replica) for replica in (0, 1)] == [list(range(1, step + 7))] * 2


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once(start: Start, tiny: list[str], tmp_path: Path) -> None:
    process = start("train", *tiny, *ENDLESS, f"--output-dir={tmp_path / 'run'}", "--engine=torchdist")
    wait_for_step(process, 1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    code, err = end(process)
    assert code == 130, err
    assert "Traceback" not in err


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_75(start: Start, tiny: list[str], tmp_path: Path) -> None:
    process = start("train", *tiny, *ENDLESS, f"--output-dir={tmp_path / 'run'}")
    wait_for_step(process, 3)
    process.send_signal(signal.SIGTERM)
    code, err = end(process)
    assert code == 75, err
    assert saved_step(tmp_path / "run") >= 3


@pytest.mark.slow
def test_a_reader_that_leaves_ends_the_run_saved(start: Start, tiny: list[str], tmp_path: Path) -> None:
    process = start("train", *tiny, *ENDLESS, f"--output-dir={tmp_path / 'run'}")
    wait_for_step(process, 3)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=PATIENCE_S) == 75
    assert "Traceback" not in process.stderr.read()
    assert saved_step(tmp_path / "run") >= 3


def test_a_reader_of_the_help_may_leave(start: Start) -> None:
    process = start("train", "--help")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.wait(timeout=PATIENCE_S)
    assert process.stderr.read() == ""
