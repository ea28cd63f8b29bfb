"""What the coordinator must not forget, in SQLite: every line is on disk before anything that follows from it is said.

    rounds    the committed rounds, each with what was agreed
    records   everything the state machine recorded, in order: members, attempts, leases, faults
    state     a few named values: the run's settings, the counter of attempts, the newest snapshot

A coordinator that is killed at any moment and started again reads all of it back. Damage is told as `LogError`; the
islands' own copies of the committed state are then enough to go on from.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import AtollError, StorageError

LOG = "log.sqlite"
COMMITTED = "committed"  # what the state machine calls the record of a committed round

# Bumped when a table changes: a log of another layout is refused rather than misread.
LAYOUT = 1

TABLES = """
CREATE TABLE IF NOT EXISTS rounds
    (round INTEGER PRIMARY KEY, digest TEXT NOT NULL, payload TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS records
    (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, payload TEXT NOT NULL, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class LogError(AtollError):
    """The coordinator's log is damaged, or of another layout."""

    exit_code = 2


@dataclass(frozen=True)
class Entry:
    """One line. kind: what the state machine calls it. payload: plain JSON values."""

    kind: str
    payload: Mapping[str, Any]


def open_database(path: Path, tables: str) -> sqlite3.Connection:
    """A database where a commit is on disk when it returns. Raises LogError for a file that is damaged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.OperationalError) as error:
        raise StorageError(f"{path} cannot be opened ({error}). Choose another folder.") from None
    try:
        _prepare(database, path, tables)
    except sqlite3.DatabaseError as error:
        database.close()
        raise _damaged(path, str(error)) from None
    except LogError:
        database.close()
        raise
    return database


def _prepare(database: sqlite3.Connection, path: Path, tables: str) -> None:
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.execute("PRAGMA busy_timeout = 5000")
    verdict = database.execute("PRAGMA quick_check").fetchone()[0]
    if verdict != "ok":
        raise _damaged(path, verdict)
    layout = database.execute("PRAGMA user_version").fetchone()[0]
    if layout not in (0, LAYOUT):
        raise LogError(
            f"{path} has layout {layout}; this version of Atoll reads {LAYOUT}. Use the version that wrote it."
        )
    database.executescript(tables)
    database.execute(f"PRAGMA user_version = {LAYOUT}")


def _damaged(path: Path, why: str) -> LogError:
    return LogError(
        f"{path} is damaged ({why.splitlines()[0]}). Move it and its -wal and -shm away: the islands hold the\n"
        "committed state themselves, and a coordinator with an empty log goes on from there."
    )


@contextmanager
def transaction(database: sqlite3.Connection, path: Path) -> Iterator[sqlite3.Connection]:
    """All of the block or nothing, on disk at the end. Raises StorageError (the disk refuses) or LogError (damage)."""
    try:
        database.execute("BEGIN IMMEDIATE")
        try:
            yield database
        except BaseException:
            database.execute("ROLLBACK")
            raise
        database.execute("COMMIT")
    except sqlite3.OperationalError as error:
        raise StorageError(f"{path} cannot be written ({error}). Free some space; nothing was changed.") from None
    except sqlite3.DatabaseError as error:
        raise _damaged(path, str(error)) from None


class Log:
    """The log of one run. clock: seconds since 1970, for people; nothing is decided by it.

    >>> import tempfile
    >>> log = Log(Path(tempfile.mkdtemp()) / "log.sqlite", clock=lambda: 0.0)
    >>> log.append([Entry("committed", {"round": 1, "digest": "9f3c"}), Entry("member", {"what": "joined"})])
    >>> log.committed(), [entry.kind for entry in log.entries()]
    ((1, '9f3c'), ['committed', 'member'])
    >>> log.close()
    """

    def __init__(self, path: Path, *, clock: Callable[[], float]) -> None:
        self.path = path
        self._clock = clock
        self._database = open_database(path, TABLES)

    def append(self, entries: Iterable[Entry], *, snapshot: Mapping[str, Any] | None = None) -> None:
        """Write entries, and the state they lead to, in one transaction. A `committed` entry is a round as well.

        A round that is committed is never written over: another digest for it raises LogError.
        """
        now = self._clock()
        with transaction(self._database, self.path) as database:
            for entry in entries:
                payload = json.dumps(entry.payload)
                database.execute("INSERT INTO records (kind, payload, at) VALUES (?, ?, ?)", (entry.kind, payload, now))
                if entry.kind == COMMITTED:
                    self._add_round(entry.payload, payload, now)
            if snapshot is not None:
                self._put("snapshot", snapshot)

    def _add_round(self, payload: Mapping[str, Any], text: str, now: float) -> None:
        number, digest = payload["round"], payload["digest"]
        known = self._database.execute("SELECT digest FROM rounds WHERE round = ?", (number,)).fetchone()
        if known is not None and known[0] != digest:
            raise LogError(f"round {number} is committed with anchor {known[0]}, and not {digest}: this is a bug.")
        if known is None:
            self._database.execute("INSERT INTO rounds VALUES (?, ?, ?, ?)", (number, digest, text, now))

    def committed(self) -> tuple[int, str] | None:
        """The newest committed round and the digest of its anchor; None where none is."""
        row = self._read("SELECT round, digest FROM rounds ORDER BY round DESC LIMIT 1")
        return (row[0][0], row[0][1]) if row else None

    def rounds(self, *, after: int = 0) -> list[dict[str, Any]]:
        """What was agreed in each committed round, oldest first, but for those up to `after`."""
        rows = self._read("SELECT payload FROM rounds WHERE round > ? ORDER BY round", (after,))
        return [json.loads(row[0]) for row in rows]

    def entries(self, *, after: int = 0) -> list[Entry]:
        """Everything recorded, oldest first, but for the first `after`."""
        rows = self._read("SELECT kind, payload FROM records WHERE id > ? ORDER BY id", (after,))
        return [Entry(row[0], json.loads(row[1])) for row in rows]

    def get(self, name: str) -> Any:
        """A named value; None where it was never put."""
        row = self._read("SELECT value FROM state WHERE name = ?", (name,))
        return json.loads(row[0][0]) if row else None

    def put(self, name: str, value: Any) -> None:
        """Keep a named value (plain JSON)."""
        with transaction(self._database, self.path):
            self._put(name, value)

    def close(self) -> None:
        """Let go of the file. Closing twice is allowed."""
        self._database.close()

    def _put(self, name: str, value: Any) -> None:
        self._database.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", (name, json.dumps(value)))

    def _read(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise _damaged(self.path, str(error)) from None
