"""What an elastic run survives, and how much of its time it computes.

    python benchmarks/elastic.py kills [--kills 100]          from a SIGKILL to the survivors' next commit
    python benchmarks/elastic.py stops [--stops 10]           the same for SIGSTOP
    python benchmarks/elastic.py churn [--minutes 10]         eight islands, a fault every 30 s: what is lost
    python benchmarks/elastic.py links                        sync times, bytes and utilisation on shaped links

`kills`, `stops` and `churn` run coordinator and islands as processes of this machine, from a fork server, so that an
island is replaced in a fraction of a second. `links` runs each island in a host of its own (benchmarks/hosts.py), with
paced steps (benchmarks/paced.py) and rounds as long as 20 times what their bytes take on the link.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hosts import Hosts, missing
from paced import pace

from atoll.plan.cost import ring_factor
from atoll.train.config import TrainConfig, build_config
from atoll.train.elastic_launch import Reach, _Coordinator, _start, _work
from atoll.train.fork_server import start_fork_server

TINY = {
    "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "intermediate_size": 128},
    "data": {"max_bytes": 300_000},
    "sequence_length": 32,
    "batch_size": 1,
    "eval_sequences": 8,
    "threads": 1,
}
FOREVER = 10_000_000  # inner steps
CHURN_STEP_S = 0.06  # paced as well, so that those who are left do not get faster
STEP_S = 0.12  # of `links`: paced, so that two cores are enough for four islands
PARAMETERS = 7.1e6  # of `links`
SYNCS_A_ROUND = 20


class Fleet:
    """A coordinator and islands on this machine."""

    def __init__(self, config: TrainConfig, *, step_s: float = 0.0) -> None:
        self.config = config
        self._step_s = step_s
        self.run_dir = Path(config.output_dir)
        self.run_dir.mkdir(parents=True)
        start_fork_server()
        self.coordinator = _Coordinator(config, Reach())
        self.token = self.coordinator.start()
        self.islands: dict[int, Any] = {}
        self._read = 0
        self.events: list[tuple[float, dict[str, Any]]] = []

    def add(self, seat: int) -> None:
        """Start an island; it takes `seat` if that is free."""
        self.islands[seat], _ = _start(_paced_work, self.config, self.token, seat, self._step_s)

    def signal(self, seat: int, signum: int) -> None:
        os.kill(self.islands[seat].pid, signum)

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

    def rounds(self) -> list[tuple[float, dict[str, Any]]]:
        return [(when, event) for when, event in self.events if event["event"] == "round"]

    def wait(self, until: Callable[[], bool], *, timeout_s: float) -> None:
        """Poll until something is true."""
        deadline = time.perf_counter() + timeout_s
        while not until():
            if time.perf_counter() > deadline:
                raise SystemExit(f"nothing for {timeout_s:.0f} s; last: {self.events[-3:]}")
            time.sleep(0.003)
            self.poll()

    def wait_round(self, number: int, *, timeout_s: float = 60.0) -> None:
        self.wait(lambda: bool(self.rounds()) and self.rounds()[-1][1]["round"] >= number, timeout_s=timeout_s)

    def last_round(self) -> int:
        return self.rounds()[-1][1]["round"] if self.rounds() else 0

    def losses(self) -> list[tuple[float, float]]:
        """Tokens committed so far, and the loss of the anchor, at every evaluation."""
        after = dict(zip((event["round"] for _, event in self.rounds()), self._committed(), strict=True))
        return [(after[e["round"]], e["loss"]) for _, e in self.events if e["event"] == "eval" and e["round"] in after]

    def loss_at(self, tokens: float) -> float:
        """Between the evaluations on both sides of so many tokens."""
        seen, losses = zip(*self.losses(), strict=True)
        return float(np.interp(tokens, seen, losses))

    def tokens_per_s(self, began: float, ended: float) -> float:
        """That were committed between two times, from the first commit to the last."""
        marks = [
            (when, tokens)
            for (when, _), tokens in zip(self.rounds(), self._committed(), strict=True)
            if began <= when <= ended
        ]
        return (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])

    def _committed(self) -> list[float]:
        return list(itertools.accumulate(sum(event["weights"].values()) for _, event in self.rounds()))

    def close(self) -> None:
        for process in self.islands.values():
            if process.is_alive():
                process.kill()
        self.coordinator.stop()


def _paced_work(settings: dict[str, Any], token: str, seat: int, step_s: float, pipe: Any) -> None:
    """An island's process."""
    if step_s:
        pace(step_s)
    _work(settings, token, seat, settings["replicas"], pipe)


def _config(folder: str, replicas: int, inner_steps: int, **more: Any) -> TrainConfig:
    settings = {**TINY, "elastic": True, "replicas": replicas, "inner_steps": inner_steps, "max_steps": FOREVER}
    settings |= {"output_dir": f"{folder}/run", "lr_schedule": "constant", "save_steps": FOREVER, **more}
    return build_config(settings)


def interruptions(signum: int, count: int, *, replicas: int = 4, inner_steps: int = 20) -> None:
    """From a signal to one island to the next commit of the others, `count` times, at random points of a round."""
    chance = random.Random(0)
    waits: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(_config(folder, replicas, inner_steps))
        try:
            for seat in range(replicas):
                fleet.add(seat)
            fleet.wait_round(3, timeout_s=120)
            for number in range(count):
                waits.append(_interrupt(fleet, chance.randrange(replicas), signum, chance))
                if sys.stdout.isatty() or number % 10 == 9:
                    print(f"{number + 1}: {statistics.median(waits):.2f} s median", flush=True)
        finally:
            fleet.close()
        times = [when for when, _ in fleet.rounds()]
        numbers = [event["round"] for _, event in fleet.rounds()]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    waits.sort()
    print(f"{count} times {signal.Signals(signum).name} to one of {replicas} islands:")
    print(f"  next commit p50 {statistics.median(waits):.2f} s, p99 {waits[int(0.99 * (count - 1))]:.2f} s")
    print(
        f"  median round {statistics.median(gaps):.2f} s; {len(numbers)} rounds, each committed once: "
        f"{numbers == sorted(set(numbers))}"
    )


def _interrupt(fleet: Fleet, seat: int, signum: int, chance: random.Random) -> float:
    """Signal one island, wait for two commits of the others, bring in another one, wait until it takes part."""
    time.sleep(chance.random())
    fleet.poll()
    round_before, began = fleet.last_round(), time.perf_counter()
    fleet.signal(seat, signum)
    fleet.wait_round(round_before + 1)
    fleet.wait_round(round_before + 2)  # the first may have been under way with the victim's work in it
    waited = fleet.rounds()[-1][0] - began if signum == signal.SIGSTOP else _first_after(fleet, began)
    if signum == signal.SIGSTOP:
        fleet.signal(seat, signal.SIGKILL)
    fleet.islands[seat].join()
    fleet.add(seat)
    fleet.wait(lambda: _takes_part(fleet, seat, began), timeout_s=60)
    return waited


def _first_after(fleet: Fleet, began: float) -> float:
    return next(when for when, _ in fleet.rounds() if when > began) - began


def _takes_part(fleet: Fleet, seat: int, since: float) -> bool:
    joined = [when for when, event in fleet.events if event["event"] == "member" and event["what"] == "joined"]
    counted = [event["weights"].get(str(seat), 0) for when, event in fleet.rounds() if joined and when > joined[-1]]
    return bool(joined) and joined[-1] > since and any(counted)


def churn(minutes: float, *, replicas: int = 8, inner_steps: int = 40, every_s: float = 30.0) -> None:
    """Faults of all kinds, one every 30 s; then the same run without, to as many tokens."""
    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as made:
        more = {"eval_steps": 2 * inner_steps, "eval_sequences": 64}
        fleet = Fleet(_config(f"{made}/faults", replicas, inner_steps, **more), step_s=CHURN_STEP_S)
        faults = 0
        try:
            for seat in range(replicas):
                fleet.add(seat)
            fleet.wait_round(2, timeout_s=180)
            began = time.perf_counter()
            while time.perf_counter() - began < 60 * minutes - every_s:
                _pause(fleet, every_s)
                faults += 1
                _fault(fleet, chance)
            _pause(fleet, every_s)
            seconds = time.perf_counter() - began
            fleet.wait_round(fleet.last_round() + 2)
        finally:
            fleet.close()
        calm = Fleet(_config(f"{made}/calm", replicas, inner_steps, **more), step_s=CHURN_STEP_S)
        try:
            for seat in range(replicas):
                calm.add(seat)
            tokens, loss = fleet.losses()[-1]
            calm.wait(lambda: bool(calm.losses()) and calm.losses()[-1][0] >= tokens, timeout_s=60 * minutes + 120)
        finally:
            calm.close()
    rounds = [event for _, event in fleet.rounds()]
    rate = fleet.tokens_per_s(began, began + seconds)
    calm_rate = calm.tokens_per_s(calm.rounds()[1][0], math.inf)
    print(
        f"{minutes:g} minutes, {replicas} islands, {faults} faults: {len(rounds)} rounds, each once: "
        f"{[event['round'] for event in rounds] == list(range(1, len(rounds) + 1))}"
    )
    print(f"  contributors a round {statistics.fmean(event['contributors'] for event in rounds):.2f}")
    print(
        f"  tokens committed a second {rate:,.0f}, without faults {calm_rate:,.0f}: "
        f"goodput {100 * rate / calm_rate:.1f} %"
    )
    print(f"  loss after {tokens:,.0f} tokens {loss:.4f}, without faults {calm.loss_at(tokens):.4f}")


def _pause(fleet: Fleet, seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        time.sleep(0.02)
        fleet.poll()
        fleet.coordinator.look_after()


def _fault(fleet: Fleet, chance: random.Random) -> None:
    seat = chance.choice(list(fleet.islands))
    kind = chance.choice(["kill", "kill", "stop", "coordinator"])
    if kind == "coordinator":
        assert fleet.coordinator.process is not None
        fleet.coordinator.process.kill()
    elif kind == "kill":
        fleet.signal(seat, signal.SIGKILL)
        fleet.islands[seat].join()
        fleet.add(seat)
    else:
        fleet.signal(seat, signal.SIGSTOP)
        _pause(fleet, 8.0)
        fleet.signal(seat, signal.SIGCONT)


def links() -> None:
    """Two and four islands on links of 100 and 20 Mbit/s: what a sync takes against what its bytes take."""
    print(
        f"{'islands':>8}{'Mbit/s':>8}{'code':>10}{'H':>6}{'sync s':>9}{'physical':>10}{'ratio':>8}{'declared MB':>13}"
        f"{'at interface':>14}{'computes':>10}{'formula':>9}",
        flush=True,
    )
    for islands, mbit, code in (
        (2, 100, "identity"),
        (2, 100, "int8"),
        (4, 100, "identity"),
        (4, 100, "int8"),
        (4, 20, "int8"),
    ):
        _link(islands, mbit, code)


def _link(islands: int, mbit: float, code: str) -> None:
    """One line of the table. Rounds are as long as 20 times their bytes on the link."""
    names = [f"h{number}" for number in range(islands)]
    payload = PARAMETERS * (1 if code == "int8" else 4) * ring_factor(islands)
    inner_steps = math.ceil(SYNCS_A_ROUND * payload * 8 / (mbit * 1e6) / STEP_S)
    with tempfile.TemporaryDirectory() as made, Hosts(names, rate_mbit=mbit) as hosts:
        run = Path(made) / "run"
        flags = [
            *("--replicas", str(islands), "--inner-steps", str(inner_steps), "--max-steps", str(FOREVER)),
            *("--compressor", code, "--output-dir", str(run), "--data.max-bytes", "300000"),
            *("--sequence-length", "32", "--batch-size", "1", "--lr-schedule", "constant", "--threads", "1"),
            *("--model.hidden-size", "512", "--model.num-layers", "2", "--model.intermediate-size", "1536"),
            *("--eval-sequences", "8", "--eval-steps", str(FOREVER)),
        ]
        host = hosts.address(names[0])
        atoll = [sys.executable, str(Path(__file__).parent / "paced.py"), str(1000 * STEP_S)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        quiet["env"] = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [hosts.run(names[0], [*atoll, "coordinator", *flags, "--host", host], **quiet)]
        token = run / "coordinator" / "join.token"
        while not token.exists():
            time.sleep(0.1)
        processes += [
            hosts.run(name, [*atoll, "join", f"@{token}"], cwd=str(_folder(Path(made), name)), **quiet)
            for name in names
        ]
        rounds, sent, wall_s = _rounds(run / "metrics.jsonl", hosts, names[1], needed=3)
        for process in processes:
            process.kill()
    payload = statistics.fmean(event["payload_bytes"] for event in rounds)
    sync_s = statistics.median(event["sync_s"] for event in rounds)
    physical_s = payload * 8 / (mbit * 1e6)
    compute_s = inner_steps * STEP_S
    print(
        f"{islands:8}{mbit:8g}{code:>10}{inner_steps:6}{sync_s:9.2f}{physical_s:10.2f}{sync_s / physical_s:8.2f}"
        f"{payload / 1e6:13.2f}{sent / 1e6:14.2f}{100 * compute_s / wall_s:9.1f}%"
        f"{100 * compute_s / (compute_s + physical_s):8.1f}%",
        flush=True,
    )


def _folder(made: Path, name: str) -> Path:
    folder = made / name
    folder.mkdir()
    return folder


def _rounds(metrics: Path, hosts: Hosts, name: str, *, needed: int) -> tuple[list[dict[str, Any]], float, float]:
    """Round events after the first, the payload one host sent a round by its interface, and seconds of a round."""
    found: list[dict[str, Any]] = []
    first_bytes, began = 0, 0.0
    while len(found) < needed + 1:
        time.sleep(0.02)
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        before = len(found)
        found = [event for line in lines if (event := json.loads(line))["event"] == "round"]
        if before < 1 <= len(found):
            first_bytes, began, began_at = hosts.payload_sent(name), time.perf_counter(), len(found)
    rounds = len(found) - began_at
    sent, seconds = hosts.payload_sent(name) - first_bytes, time.perf_counter() - began
    return found[1:], sent / rounds, seconds / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kills", "stops", "churn", "links"])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    if options.what == "kills":
        interruptions(signal.SIGKILL, options.kills)
    elif options.what == "stops":
        interruptions(signal.SIGSTOP, options.stops)
    elif options.what == "churn":
        churn(options.minutes)
    elif why := missing():
        raise SystemExit(f"hosts cannot be made here: {why}")
    else:
        links()


if __name__ == "__main__":
    main()
