"""An island that is told to go saves, says so and leaves; the others go on. So do all together, and go on later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.fleet import Fleet

from atoll.train.config import write_config_file

pytestmark = pytest.mark.slow

LEAVES_S = 10.0
CODES = {signal.SIGINT: 130, signal.SIGTERM: 75}


@pytest.mark.parametrize("signum", CODES)
def test_an_island_that_is_told_to_go_saves_and_leaves_and_the_others_go_on(
    fleet: Callable[..., Fleet], signum: int
) -> None:
    run = fleet(replicas=3)
    run.wait_round(2)
    leaver = run.islands[1]
    run.send(1, signum)
    run.wait_end(leaver, timeout_s=LEAVES_S)
    code, words = leaver.last_words()
    assert (code, leaver.process.exitcode) == (CODES[signum], CODES[signum])
    assert words.startswith("replica 1 left after round")
    assert str(run.run_dir) in words
    assert (run.run_dir / "islands" / "seat-1-worker-0.safetensors").exists()
    assert run.saved()["round"] >= 2
    run.wait_rounds(3)
    assert [event["pid"] for event in run.of("member", what="left", replica=1)] == [leaver.pid]
    run.check()


def test_an_island_that_waits_for_a_frozen_one_leaves_as_quickly(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=3)
    run.wait_round(2)
    run.plan(run.islands[2].name, "island.connected", signal.SIGSTOP)
    run.wait(run.islands[2].is_frozen, "the freeze")
    run.clear_plan()
    run.send(1, signal.SIGTERM)
    assert run.wait_end(run.islands[1], timeout_s=LEAVES_S) == 75
    run.send(2, signal.SIGCONT)
    run.wait_counted(0, 2)
    run.check()


def test_a_run_ends_well_although_islands_and_the_coordinator_die_in_its_last_rounds(
    fleet: Callable[..., Fleet],
) -> None:
    run = fleet(replicas=3, inner_steps=8, max_steps=80)
    run.plan(run.islands[1].name, "island.reached", skip=8)
    run.plan(run.coordinator.name, "coordinator.recorded_committed", skip=9)
    run.wait_end(run.islands[1])
    run.wait_end(run.coordinator)
    run.start_coordinator()
    codes = [run.wait_end(run.islands[seat], timeout_s=20) for seat in (0, 2)]
    assert codes == [0, 0]
    assert run.wait_end(run.coordinator) == 0
    assert run.round == 10
    assert run.saved()["anchor_digest"] == run.of("round")[-1]["anchor_digest"]
    assert run.of("eval")[-1]["loss"] < 5.0
    run.check()


def test_ctrl_c_to_the_launcher_saves_everything_and_resume_goes_on_from_there(tmp_path: Path) -> None:
    settings = {"replicas": 3, "max_steps": 80, "inner_steps": 8, "save_steps": 0}
    run = Fleet(tmp_path, **settings)
    began = _launch(run, tmp_path / "first.log")
    run.wait_round(3, timeout_s=60)
    began.send_signal(signal.SIGINT)
    asked = time.perf_counter()
    assert began.wait(30) == 130
    assert time.perf_counter() - asked < LEAVES_S
    saved, committed = run.saved(), run.committed()
    assert saved["round"] == committed[-1]["round"] == run.round
    assert all((run.run_dir / "islands" / f"seat-{seat}-worker-0.safetensors").exists() for seat in range(3))

    again = _launch(run, tmp_path / "second.log", "--resume", "auto")
    assert again.wait(90) == 0, (tmp_path / "second.log").read_text()
    resumed = Fleet(tmp_path, **settings)
    assert resumed.round == 10
    assert resumed.of("eval")[-1]["loss"] < 5.0
    resumed.check(known=committed)


def _launch(run: Fleet, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    """`atoll train` with the settings of a fleet."""
    path = log.with_suffix(".toml")
    write_config_file(run.config, path)
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "atoll", "train", str(path), *flags],
            stdout=out,
            stderr=out,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
