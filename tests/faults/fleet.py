"""A coordinator and islands as real processes of this machine, to be killed, frozen, thawed and replaced.

Processes come from one fork server that has everything imported, so that an island is there in a fraction of a second.

    with Fleet(folder, replicas=3) as fleet:
        fleet.start()
        fleet.wait_round(2)
        fleet.kill(1)
        fleet.wait_round(4)
        fleet.check()
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from faults import worker

from atoll.elastic.leases import count, merged
from atoll.train.config import TrainConfig, build_config
from atoll.train.elastic_launch import _go_back

TINY = {
    "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 64},
    "sequence_length": 16,
    "batch_size": 1,
    "eval_sequences": 8,
    "threads": 1,
    "lr_schedule": "constant",
    "warmup_steps": 0,
}
FOREVER = 10_000_000  # inner steps
POLL_S = 0.004
PRELOAD = ["atoll.train.engine", "atoll.train.elastic", "atoll.train.elastic_service", "faults.worker"]

_server: forkserver.ForkServer | None = None


@contextmanager
def our_server() -> Iterator[None]:
    """Within the block processes are forked from a server of ours, whatever other tests have loaded into theirs."""
    global _server
    if _server is None:
        _server = forkserver.ForkServer()
        _server.set_forkserver_preload(PRELOAD)
        _server.ensure_running()
    before = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = _server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = before


def stop_server() -> None:
    """End the server; processes that still run are not touched."""
    global _server
    if _server is not None:
        _server._stop()
        _server = None


@dataclass(frozen=True)
class Resources:
    """What a process takes of the machine."""

    descriptors: int
    threads: int
    resident_bytes: int


@dataclass
class Life:
    """One process: of an island in one life, or of the coordinator since one start."""

    name: str
    process: ForkServerProcess
    pipe: Connection

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive()

    def is_frozen(self) -> bool:
        """Whether a SIGSTOP holds it."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def last_words(self) -> tuple[int, str] | None:
        """Exit code and message that it left, if it ended by itself and not well."""
        try:
            return self.pipe.recv()[:2] if self.pipe.poll() else None
        except EOFError:
            return None


class Fleet:
    """A run. step_s: the least that an inner step takes on an island, by seat."""

    def __init__(
        self,
        folder: Path,
        *,
        replicas: int = 3,
        inner_steps: int = 8,
        step_s: float = 0.004,
        slow: dict[int, float] | None = None,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.run_dir.mkdir(parents=True, exist_ok=True)
        given = {
            **TINY,
            "data": {"source": str(_corpus(folder))},
            "elastic": True,
            "replicas": replicas,
            "inner_steps": inner_steps,
            "max_steps": FOREVER,
        }
        given |= {"output_dir": str(self.run_dir), "save_steps": FOREVER}
        given |= {"adapt_inner_steps": False, **settings}
        self.config: TrainConfig = build_config(given)
        self.step_s = step_s
        self.slow = slow or {}
        self.islands: dict[int, Life] = {}
        self.everyone: list[Life] = []
        self.coordinator: Life | None = None
        self.token = ""
        self.events: list[tuple[float, dict[str, Any]]] = []
        self.waits_s: list[float] = []  # from faults to the next commit, for whoever measures
        self._read = 0
        self._plan: list[str] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *failure: object) -> None:
        for life in self.everyone:
            if life.is_alive:
                life.process.kill()
            life.process.join()
            life.pipe.close()

    # --- processes

    def start(self) -> None:
        """The coordinator, and an island for each seat."""
        self.go_back()
        self.start_coordinator()
        for seat in range(self.config.replicas):
            self.add(seat)

    def go_back(self) -> None:
        """As `atoll train --resume auto` does before it starts anything."""
        _go_back(self.config, self.run_dir)

    def start_coordinator(self) -> None:
        """The first time, or again; waits until it serves."""
        life = self._life("coordinator", worker.coordinator, self.config.model_dump())
        assert life.pipe.poll(30.0), f"the coordinator did not start:\n{self.log(life)}"
        kind, self.token = life.pipe.recv()
        assert kind == "token", self.token
        self.coordinator = life

    def add(self, seat: int, *, token: str = "", shape: dict[str, Any] | None = None) -> Life:
        """An island; it takes `seat` if that is free. shape: how it lies on its workers, where not as the run says."""
        step_s = self.slow.get(seat, self.step_s)
        settings = self.config.model_dump() | (shape or {})
        self.islands[seat] = self._life(
            f"island-{seat}", worker.island, settings, token or self.token, seat, step_s=step_s
        )
        return self.islands[seat]

    def next_name(self, kind: str) -> str:
        """What the next process of a kind ("coordinator", "island-2") will be called."""
        return f"{kind}.{sum(life.name.startswith(f'{kind}.') for life in self.everyone)}"

    def _life(self, kind: str, target: Callable[..., None], *given: Any, step_s: float | None = None) -> Life:
        name = self.next_name(kind)
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe(duplex=False)
        pace = [] if step_s is None else [step_s]
        process = context.Process(target=target, args=(*given, name, str(self.folder), *pace, theirs))
        with our_server():
            process.start()
        theirs.close()
        self.everyone.append(Life(name, process, ours))
        return self.everyone[-1]

    def send(self, seat: int, signum: int) -> None:
        os.kill(self.islands[seat].pid, signum)

    def kill(self, *seats: int) -> None:
        """SIGKILL, and wait for the end."""
        for seat in seats:
            self.send(seat, signal.SIGKILL)
        for seat in seats:
            self.islands[seat].process.join()

    def others_of(self, seat: int) -> list[int]:
        """Processes of the workers that an island's leader leads."""
        pid = self.islands[seat].pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def kill_coordinator(self) -> None:
        assert self.coordinator is not None
        self.coordinator.process.kill()
        self.coordinator.process.join()

    def forget_log(self) -> None:
        """The coordinator's log is lost; who it is is not."""
        for path in (self.run_dir / "coordinator").glob("log.sqlite*"):
            path.unlink()

    def log(self, life: Life) -> str:
        """What a process said."""
        path = self.folder / f"{life.name}.log"
        return path.read_text() if path.exists() else ""

    # --- what is planned

    def plan(self, life: str, point: str, signum: int = signal.SIGKILL, *, skip: int = 0) -> None:
        """The process called `life` gets `signum` at a crash point, after it passed there `skip` times."""
        self._plan.append(f"{life} {point} {signum:d} {skip}")
        self._write(worker.PLAN, self._plan)

    def clear_plan(self) -> None:
        self._plan = []
        self._write(worker.PLAN, self._plan)

    def deed(self, life: str, point: str, what: str) -> None:
        """The island called `life` does something wrong when it passes a crash point."""
        self._write(worker.DEEDS, [f"{life} {point} {what}"])

    def _write(self, name: str, lines: list[str]) -> None:
        draft = self.folder / f"{name}.draft"
        draft.write_text("".join(f"{line}\n" for line in lines))
        draft.replace(self.folder / name)

    # --- what is seen

    def poll(self) -> None:
        """Read what the run has logged since."""
        path = self.run_dir / "metrics.jsonl"
        if not path.exists() or path.stat().st_size == self._read:
            return
        now = time.perf_counter()
        with path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]
        self._read += len(data)
        self.events += [(now, event) for line in data.splitlines() if (event := json.loads(line))["event"] != "step"]

    def of(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Events of a kind, with these values."""
        self.poll()
        found = [event for _, event in self.events if event["event"] == kind]
        return [event for event in found if all(event[name] == value for name, value in fields.items())]

    @property
    def tokens_a_step(self) -> int:
        """Of one island."""
        return self.config.batch_size * self.config.sequence_length

    @property
    def tokens_a_round(self) -> int:
        """Of an island that does all its inner steps."""
        return self.config.inner_steps * self.tokens_a_step

    @property
    def round(self) -> int:
        """The newest committed round."""
        rounds = self.of("round")
        return rounds[-1]["round"] if rounds else 0

    def wait(self, until: Callable[[], object], what: str, *, timeout_s: float = 30.0) -> None:
        """Poll until something is true; at the deadline everything that was said is shown."""
        deadline = time.perf_counter() + timeout_s
        while not until():
            if time.perf_counter() > deadline:
                raise AssertionError(f"after {timeout_s:g} s still waiting for {what}\n{self.story()}")
            time.sleep(POLL_S)

    def wait_round(self, number: int, *, timeout_s: float = 30.0) -> None:
        self.wait(lambda: self.round >= number, f"round {number}", timeout_s=timeout_s)

    def wait_rounds(self, more: int, *, timeout_s: float = 30.0) -> None:
        """So many more than there are now."""
        self.wait_round(self.round + more, timeout_s=timeout_s)

    def wait_counted(self, *seats: int, timeout_s: float = 30.0) -> None:
        """Until a round that is committed from now on holds work of all these."""
        since = self.round

        def counted() -> bool:
            rounds = [event["weights"] for event in self.of("round") if event["round"] > since]
            return any(all(weights.get(str(seat), 0) > 0 for seat in seats) for weights in rounds)

        self.wait(counted, f"a round with work of {seats}", timeout_s=timeout_s)

    def wait_end(self, life: Life, *, timeout_s: float = 15.0) -> int | None:
        """Until a process ends; its exit code."""
        self.wait(lambda: not life.is_alive, f"the end of {life.name}", timeout_s=timeout_s)
        return life.process.exitcode

    def story(self) -> str:
        """What the processes said last, and the plan: for a test that fails."""
        said = [f"--- {life.name} (alive: {life.is_alive})\n{self.log(life)[-2500:]}" for life in self.everyone[-6:]]
        return "\n".join([f"plan: {self._plan}", *said])

    def steps(self) -> int:
        """Inner steps of all islands so far."""
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b'{"event": "step"') if path.exists() else 0

    def resources(self, life: Life) -> Resources:
        """What a process of this fleet takes."""
        proc = Path(f"/proc/{life.pid}")
        fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        resident_bytes = 1024 * int(fields["VmRSS"].split()[0])
        return Resources(len(list((proc / "fd").iterdir())), int(fields["Threads"]), resident_bytes)

    def saved(self) -> dict[str, Any]:
        """What the newest checkpoint says of itself."""
        folder = self.run_dir / (self.run_dir / "latest").read_text().strip()
        return json.loads((folder / "state.json").read_text())

    # --- what must always hold

    def committed(self) -> list[dict[str, Any]]:
        """The committed rounds that the coordinator's log holds, oldest first."""
        return [json.loads(row[0]) for row in self._query("SELECT payload FROM rounds ORDER BY round")]

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Everything of a kind that the coordinator wrote down."""
        return [json.loads(row[0]) for row in self._query(f"SELECT payload FROM records WHERE kind = '{kind}'")]

    def _query(self, query: str) -> list[tuple[Any, ...]]:
        path = self.run_dir / "coordinator" / "log.sqlite"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
            return database.execute(query).fetchall()

    def check(self, *, known: Sequence[dict[str, Any]] = (), desync: bool = False) -> None:
        """Every round is committed once and none is missing; no sample is in two of them; nobody held another anchor.

        known: rounds of a log that was lost. desync: an anchor was damaged on purpose.
        """
        rounds = self.of("round")
        numbers = [event["round"] for event in rounds]
        assert numbers == list(range(1, len(numbers) + 1)), numbers
        digests = {event["round"]: event["anchor_digest"] for event in rounds}
        logged = [*known, *self.committed()]
        assert [payload["round"] for payload in logged] == list(range(1, len(logged) + 1))
        assert all(digests[payload["round"]] == payload["digest"] for payload in logged if payload["round"] in digests)
        used = [(start, stop) for payload in logged for pairs in payload["used"].values() for start, stop in pairs]
        assert count(used) == count(merged(used)), f"a sample is in two committed rounds: {overlaps(used)}"
        alarming = {"two digests", "ahead", "tie", "late truth"} | ({"desync"} - {"desync" * desync})
        strange = [event for event in self.of("fault") if event["what"] in alarming]
        assert not strange, strange


def _corpus(folder: Path) -> Path:
    """Sentences of a few words: quick to read, and quick to learn from."""
    path = folder / "corpus.txt"
    if not path.exists():
        words = "the island sends one round of weights to every other island and waits for none".split()
        chance = random.Random(7)
        path.write_text("".join(" ".join(chance.choices(words, k=12)) + ".\n" for _ in range(2000)))
    return path


def overlaps(ranges: list[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Neighbours among sorted ranges that share samples."""
    return [(one, other) for one, other in itertools.pairwise(sorted(ranges)) if other[0] < one[1]]
