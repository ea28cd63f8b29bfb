"""The coordinator's log: what was appended is found again, and damage is never read."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.elastic.log import Entry, Log, LogError
from atoll.errors import StorageError


def committed(number: int, digest: str) -> Entry:
    return Entry("committed", {"round": number, "digest": digest, "weights": {"0": 1.5}})


def open_log(folder: Path) -> Log:
    return Log(folder / "log.sqlite", clock=lambda: 7.0)


def test_a_new_log_holds_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert (log.committed(), log.rounds(), log.entries(), log.get("snapshot")) == (None, [], [], None)
    log.close()


def test_everything_is_read_back_in_order(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    entries = [Entry("member", {"what": "joined"}), committed(1, "a"), committed(2, "b")]
    log.append(entries[:2], snapshot={"round": 1})
    log.append(entries[2:], snapshot={"round": 2})
    log.put("settings_digest", "s")
    log.close()
    again = open_log(tmp_path)
    assert again.entries() == entries
    assert again.entries(after=2) == entries[2:]
    assert again.committed() == (2, "b")
    assert [entry["round"] for entry in again.rounds()] == [1, 2]
    assert (again.get("snapshot"), again.get("settings_digest")) == ({"round": 2}, "s")
    again.close()


def test_a_committed_round_is_never_written_over(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append([committed(1, "a")], snapshot={"round": 1})
    log.append([committed(1, "a")])
    with pytest.raises(LogError, match="committed with anchor a"):
        log.append([Entry("member", {}), committed(1, "b")], snapshot={"round": 9})
    assert log.committed() == (1, "a")
    assert log.get("snapshot") == {"round": 1}
    assert len(log.entries()) == 2, "of a transaction that failed nothing is left"
    log.close()


def test_what_was_appended_survives_a_kill(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from atoll.elastic.log import Entry, Log\n"
        "log = Log(Path(sys.argv[1]), clock=time.time)\n"
        "for number in range(1, 10**6):\n"
        "    log.append([Entry('committed', {'round': number, 'digest': str(number)})], snapshot={'round': number})\n"
        "    print(number, flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "log.sqlite")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stdout is not None
        for _ in range(5):
            acknowledged = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.wait()
    log = open_log(tmp_path)
    found = log.committed()
    assert found is not None
    assert found[0] >= acknowledged
    assert log.get("snapshot") == {"round": found[0]}
    assert [entry["round"] for entry in log.rounds()] == list(range(1, found[0] + 1))
    log.close()


@pytest.mark.parametrize("place", [0, 20, 4096, 8192])
def test_a_damaged_log_is_refused_and_the_way_out_is_told(tmp_path: Path, place: int) -> None:
    log = open_log(tmp_path)
    log.append([committed(number, "x" * 200) for number in range(1, 200)])
    log.close()
    with open(tmp_path / "log.sqlite", "r+b") as file:
        file.seek(place)
        file.write(b"\xa5" * 700)
    with pytest.raises(LogError, match="Move it"):
        open_log(tmp_path)


def test_a_log_of_another_layout_is_refused(tmp_path: Path) -> None:
    open_log(tmp_path).close()
    with sqlite3.connect(tmp_path / "log.sqlite") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(LogError, match="layout 99"):
        open_log(tmp_path)


def test_a_log_that_cannot_be_opened_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "log.sqlite").mkdir()
    with pytest.raises(StorageError, match="cannot be opened"):
        open_log(tmp_path)


def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.append([committed(1, "a")])
    log._database.execute("PRAGMA max_page_count = 8")  # SQLite's own "database or disk is full"
    with pytest.raises(StorageError, match="full"):
        log.append([Entry("fault", {"detail": "x" * 100_000})])
    assert log.committed() == (1, "a")
    assert len(log.entries()) == 1
    log.close()
