"""`atoll coordinator`, `join`, `status`, `token`, `stop`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coordinators import PATIENCE_S, Talker, running, talking

from atoll.elastic.link import fetch_settings
from atoll.elastic.tokens import PREFIX, Token, parse_token


@pytest.fixture
def run(tmp_path: Path):
    with running(tmp_path / "run") as run:
        run.folder = tmp_path / "run"
        yield run


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tokens that `atoll join` would train with."""
    tokens: list[str] = []
    module = SimpleNamespace(join=lambda line, **about: tokens.append(line))
    monkeypatch.setitem(sys.modules, "atoll.train.elastic", module)
    monkeypatch.setattr("atoll.cli.joining.check_before_joining", lambda line, **about: None)
    return tokens


@pytest.fixture
def failed(atoll) -> Callable[..., str]:
    """Run a command that must fail with this code, in at most three lines; the message."""

    def fail(code: int, *args: object) -> str:
        answer = atoll(*args)
        assert answer.code == code, answer
        assert len(answer.err.splitlines()) <= 3, answer.err
        assert "Traceback" not in answer.err + answer.out
        return answer.err

    return fail


# --- status ---


def test_status_shows_the_islands(atoll, run) -> None:
    island = Talker(run.token(), name="lab[bold]")
    with talking(island):
        island.link.events.get(timeout=PATIENCE_S)
        while not run.status()["members"]:
            pass
        out = atoll("status", run.folder).out
    assert out.startswith("round 0/3 | 1 islands here")
    assert "lab[bold]" in out
    assert "training" in out
    assert "waiting for: 1 more islands" in out


def test_status_json_is_what_the_coordinator_says(atoll, run) -> None:
    known = json.loads(atoll("status", run.folder, "--json").out)
    assert (known["round"], known["num_rounds"], known["coordinator"]["port"]) == (0, 3, run.coordinator.address.port)


def test_status_takes_a_token_as_well(atoll, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = run.token_line()
    (tmp_path / "token.txt").write_text(line)
    assert json.loads(atoll("status", f"@{tmp_path / 'token.txt'}", "--json").out)["round"] == 0
    monkeypatch.setenv("ATOLL_TOKEN", line)
    assert json.loads(atoll("status", "--json").out)["round"] == 0


def test_status_of_a_run_whose_coordinator_is_gone(failed, tmp_path: Path) -> None:
    with running(tmp_path):
        pass
    assert "no coordinator answers" in failed(3, "status", tmp_path)


def test_status_of_what_is_no_run_between_machines(failed, tmp_path: Path) -> None:
    assert "there is no coordinator" in failed(2, "status", tmp_path)


# --- tokens ---


def test_a_token_is_created_used_listed_and_revoked(atoll, failed, run) -> None:
    created = atoll("token", "create", run.folder, "--hours", "2", "--note", "lab")
    line = created.out.strip()
    token = parse_token(line)
    assert created.out == line + "\n", "nothing but the token, so that it can be piped"
    assert fetch_settings(token)["run"] == token.run
    listed = {info["id"]: info for info in json.loads(atoll("token", "list", run.folder, "--json").out)}
    assert (listed[token.id]["state"], listed[token.id]["note"]) == ("valid", "lab")
    table = atoll("token", "list", run.folder).out
    assert token.id in table
    assert token.secret not in table
    assert token.id in atoll("token", "revoke", run.folder, token.id[:8]).out
    assert "revoked" in failed(3, "status", line)


def test_a_token_id_that_is_not_there_is_told(failed, run) -> None:
    assert "begins 'zz'" in failed(2, "token", "revoke", run.folder, "zz")


def test_a_lifetime_that_makes_no_sense_is_told(failed, run) -> None:
    assert "lifetime_s=-3600" in failed(2, "token", "create", run.folder, "--hours", "-1")


def test_tokens_need_a_coordinator_that_runs(failed, tmp_path: Path) -> None:
    assert "there is no coordinator" in failed(2, "token", "create", tmp_path)


def test_stop_tells_the_coordinator(atoll, run) -> None:
    assert atoll("stop", run.folder).code == 0
    assert run.finished() == 75


# --- join ---


def test_join_takes_the_token_in_every_way(
    atoll, joined: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Token(("10.0.0.5:1",), "ab" * 32, "12" * 8, "34" * 8, 0.0, "join", "cd" * 32).encode()
    (tmp_path / "token.txt").write_text(line + "\n")
    assert atoll("join", line).code == 0
    assert atoll("join", f"@{tmp_path / 'token.txt'}").code == 0
    monkeypatch.setenv("ATOLL_TOKEN", line)
    assert atoll("join").code == 0
    assert joined == [line] * 3


@pytest.mark.parametrize("given", ["hello", PREFIX + "AAAA", "@/nonexistent", ""])
def test_join_refuses_what_is_no_token(failed, joined: list[str], given: str) -> None:
    assert "token" in failed(2, "join", given)
    assert not joined


def test_a_token_on_the_command_line_is_taken_off_it(tmp_path: Path) -> None:
    """The process that goes on shows no token to those who list processes."""
    line = Token(("127.0.0.1:1",), "ab" * 32, "12" * 8, "34" * 8, 0.0, "join", "cd" * 32).encode()
    code = (
        "import os, sys, types\n"
        "from atoll.cli.main import main\n"
        "def join(token, **about):\n"
        "    print(open('/proc/self/cmdline').read().count('atoll1.'), token, 'ATOLL_TOKEN' in os.environ)\n"
        "sys.modules['atoll.train.elastic'] = types.SimpleNamespace(join=join)\n"
        "checks = types.SimpleNamespace(check_before_joining=lambda line, **about: None)\n"
        "sys.modules['atoll.cli.joining'] = checks\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    (tmp_path / "program.py").write_text(code)
    command = [sys.executable, tmp_path / "program.py", "join", line]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"0 {line} False\n"


# --- coordinator ---


@contextmanager
def served(tiny: list[str], folder: Path, *args: str):
    """`atoll coordinator` as a process of its own, once it listens: its first lines, and the process."""
    command = [sys.executable, "-m", "atoll", "coordinator", *tiny_settings(tiny), f"--output-dir={folder}", *args]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield [process.stdout.readline() for _ in range(2)], process
        finally:
            process.kill()


def tiny_settings(tiny: list[str]) -> list[str]:
    return [flag for flag in tiny if not flag.startswith("--engine")]


def test_a_coordinator_says_where_it_is_and_ends_when_told(tiny: list[str], atoll, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with served(tiny, folder, "--host", "127.0.0.1") as (lines, process):
        assert lines[0].startswith("coordinator at 127.0.0.1:")
        assert "join.token" in lines[1], "the token itself goes to a terminal only"
        assert PREFIX not in "".join(lines)
        token = parse_token((folder / "coordinator" / "join.token").read_text())
        assert fetch_settings(token)["settings"]["inner_steps"] == 4
        assert json.loads(atoll("status", folder, "--json").out)["num_rounds"] == 3
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130


def test_an_island_that_joins_tells_its_own_terminal_how_it_goes(tiny: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with served(tiny, folder, "--host", "127.0.0.1", "--replicas", "1") as (_, process):
        place = ["join", f"@{folder / 'coordinator' / 'join.token'}", "--output-dir", str(tmp_path / "joined")]
        command = [sys.executable, "-m", "atoll", *place, "--threads", "1"]
        joined = subprocess.run(command, capture_output=True, text=True, timeout=6 * PATIENCE_S)
        assert joined.returncode == 0, joined.stderr
        assert process.wait(3 * PATIENCE_S) == 0
    lines = joined.stdout.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("ok  ")] == [
        *("host", "version", "model", "link", "memory", "disk", "data")
    ]
    told = [line for line in lines if line.startswith(("joined", "step 12/12", "round 3"))]
    assert told[0] == "joined after round 0 as replica 0"
    assert [line.split()[0] for line in told] == ["joined", "step", "round"]


def test_a_run_that_is_stopped_ends_with_a_report(tiny: list[str], atoll, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with served(tiny, folder, "--host", "127.0.0.1") as (_, process):
        assert atoll("stop", folder).code == 0
        assert process.wait(3 * PATIENCE_S) == 75
    report = (folder / "report.md").read_text()
    assert "| `inner_steps` | 4 |" in report
    assert f"atoll coordinator {tiny_settings(tiny)[0]}" in report
    assert "atoll join TOKEN  # on 2 machines" in report


def test_a_coordinator_refuses_a_port_in_use(refused, tiny: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = ["--host", "127.0.0.1", "--port", port, "--output-dir", tmp_path / "run"]
        assert f"port {port} of 127.0.0.1" in refused("coordinator", *tiny_settings(tiny), *place)


def test_a_coordinator_refuses_the_folder_of_a_run_with_other_settings(
    refused, tiny: list[str], trained: Path, tmp_path: Path
) -> None:
    place = ["--host", "127.0.0.1", "--output-dir", trained]
    before = (trained / "config.toml").read_bytes()
    refused("coordinator", *tiny_settings(tiny), *place, "--seed", "7")
    assert (trained / "config.toml").read_bytes() == before


def test_a_coordinator_refuses_an_address_of_another_machine(refused, tiny: list[str], tmp_path: Path) -> None:
    place = ["--host", "192.0.2.77", "--output-dir", tmp_path / "run"]
    assert "no address of this machine" in refused("coordinator", *tiny_settings(tiny), *place)


@pytest.mark.parametrize("command", ["coordinator", "join", "status", "token", "stop"])
def test_every_command_explains_itself_with_an_example(atoll, command: str) -> None:
    answer: Any = atoll(command, "--help")
    assert answer.code == 0
    assert f"  atoll {command} " in answer.out
