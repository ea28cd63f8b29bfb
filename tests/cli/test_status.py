"""`atoll status`: what is shown, once and live."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinators import PATIENCE_S, Talker, running, talking
from rich.console import Console

from atoll.cli.status import view


def member(seat: int, **changes: Any) -> dict[str, Any]:
    base = {"seat": seat, "name": f"island-{seat}", "state": "training", "connected": True, "round": 3, "step": 40}
    told = {"seen_s_ago": 0.3, "tokens_per_s": 1234.5, "tokens": 9.0, "loss": 3.25, "link_bytes_per_s": 25e6}
    return base | told | changes


def known(**changes: Any) -> dict[str, Any]:
    """A status as a coordinator tells it."""
    summary = {
        **{"step": 300, "max_steps": 1000, "loss": 3.5, "eval_loss": 3.4, "eval_step": 200, "rounds": 3},
        **{"goodput_tokens_per_s": 2000.0, "utilisation": 0.971, "round_s": 60.0, "sync_s": 3.1, "waited_s": 0.4},
        **{"eta_s": 7380.0, "sent_bytes": 48e6, "data_parallel_bytes": 10_176e6, "refused": 1, "voids": 2},
    }
    base = {"round": 3, "num_rounds": 10, "liveness": [0, 1], "breadth": 1.0, "participation": {"0": 30.0, "1": 10.0}}
    state = {"averaging": False, "settled": True, "waiting_for": [], "alarms": [], "finished": None}
    return base | state | {"members": [member(0), member(1)], "summary": summary} | changes


def shown(status: dict[str, Any], *, trouble: str = "", width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(view(status, trouble=trouble))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_view_tells_what_a_run_is_worth() -> None:
    lines = [line.rstrip() for line in shown(known()).splitlines()]
    assert lines[0] == "round 3/10 | 2 islands here | 100% of them in the last mean"
    assert lines[1] == "step 300/1000 | loss 3.500 | held-out 3.400 at step 200 | eta 2h03m"
    traffic = (
        "goodput 2,000 tok/s | utilisation 97.1 % | last sync 3.1 s | waited 0.4 s | sent 48 MB (212x less than data"
    )
    assert " ".join(lines[2:4]).startswith(traffic)
    assert "refused 1 | tried again 2" in shown(known(), width=200)
    row = next(line for line in lines if "island-0" in line)
    for cell in ("training", "1,234", "75%", "3.250", "200 Mbit/s", "0.3 s ago"):
        assert cell in row


def test_the_view_fits_a_terminal_of_eighty_columns() -> None:
    text = shown(known(), width=80)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    assert "200 Mbit/s" in text


def test_islands_that_went_come_last_and_only_the_newest() -> None:
    gone = [member(number, name=f"gone-{number}", state="lost", seen_s_ago=100.0 - number) for number in range(2, 12)]
    text = shown(known(members=[*gone, member(0)]))
    assert text.index("island-0") < text.index("gone-11") < text.index("gone-8")
    assert "gone-7" not in text


def test_alarms_waits_and_troubles_are_told() -> None:
    alarm = {"what": "lone commit", "detail": "round 3 has one contributor"}
    stalled = known(alarms=[alarm], waiting_for=["island-1"], members=[member(0, state="ready"), member(1)])
    text = shown(stalled, trouble="no answer")
    assert "alarm: lone commit: round 3" in text
    assert "waiting for: island-1" in text
    assert "no answer" in text
    assert "waiting for" not in shown(known(waiting_for=["island-0", "island-1"])), "both train"
    away = shown(known(members=[member(0, connected=False)]))
    assert "training, away" in away


def test_a_run_without_a_round_and_one_of_an_earlier_version_are_shown() -> None:
    empty = dict.fromkeys(known()["summary"], None) | {"rounds": 0, "step": 0, "max_steps": 1000, "refused": 0}
    assert "no round is committed yet" in shown(known(summary=empty))
    before = {key: value for key, value in known().items() if key != "summary"}
    assert shown(before).startswith("round 3/10")


def test_status_without_a_terminal_is_printed_once(atoll, tmp_path: Path) -> None:
    with running(tmp_path) as run:
        island = Talker(run.token())
        with talking(island):
            while not run.status()["members"]:
                pass
            out = atoll("status", tmp_path).out
        assert len([line for line in out.splitlines() if "island-0" in line]) == 1
        keys = json.loads(atoll("status", tmp_path, "--json").out)
        assert {"summary", "name", "members", "coordinator", "round"} <= keys.keys()


def test_a_token_to_watch_is_made_and_shows_the_run(atoll, refused, tmp_path: Path) -> None:
    path = tmp_path / "watch.token"
    with running(tmp_path / "run"):
        path.write_text(atoll("token", "create", tmp_path / "run", "--role", "watch").out)
        assert json.loads(atoll("status", f"@{path}", "--json").out)["round"] == 0
        assert "this run is of" not in atoll("join", f"@{path}").err
        assert "is for watch" in atoll("join", f"@{path}").err


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *args: str) -> None:
        ours, theirs = pty.openpty()
        self._ours = ours
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "atoll", *args], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        self.text = ""

    def read_until(self, true: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + 3 * PATIENCE_S
        while not true(self.text):
            assert time.monotonic() < deadline, self.text
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self._ours, 65536).decode(errors="replace")
                except OSError:  # its end
                    assert true(self.text), self.text

    def end(self) -> int:
        try:
            return self.process.wait(3 * PATIENCE_S)
        finally:
            self.process.kill()
            os.close(self._ours)


def test_on_a_terminal_status_is_live_and_ctrl_c_leaves_quietly(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        terminal = Terminal("status", str(tmp_path))
        terminal.read_until(lambda text: "0 islands here" in text)
        island = Talker(run.token())
        with talking(island):
            terminal.read_until(lambda text: "island-0" in text)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0
    assert "Traceback" not in terminal.text
    assert "interrupted" not in terminal.text


def test_the_live_view_outlasts_the_coordinator(tmp_path: Path) -> None:
    with running(tmp_path):
        terminal = Terminal("status", str(tmp_path))
        terminal.read_until(lambda text: "0 islands here" in text)
    terminal.read_until(lambda text: "trying again" in text)
    with running(tmp_path) as run:
        island = Talker(run.token())
        with talking(island):
            terminal.read_until(lambda text: "island-0" in text)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 0


@pytest.mark.parametrize("once", [True, False])
def test_page_and_status_of_nothing_are_refused(refused, tmp_path: Path, once: bool) -> None:
    assert "there is no coordinator" in refused("status", tmp_path, "--once" if once else "--page")
