"""Atoll beside torchft's DiLoCo and hivemind's averager: the same payload, the same links, the same machine.

    python3 -m venv .venv-side-by-side                   once: the others, in an environment of their own
    .venv-side-by-side/bin/pip install -c constraints.txt torch -r benchmarks/requirements-side-by-side.txt
    python benchmarks/side_by_side.py [--others .venv-side-by-side/bin/python] [--only sync kill slow]

Islands are hosts of benchmarks/hosts.py, one process and one thread each. A round is 20 inner steps of 50 ms.

    sync   two islands: a round's exchange, seconds and bytes at the interface
    kill   three islands, one gets SIGKILL in its inner steps: the others' next commit, and what they throw away
    slow   three islands, one ten times slower: how long rounds take, and its share of what was agreed on

All have their default settings; plain outer SGD, so that shares can be read from what was agreed on. Elastic Atoll
trains a real model of as many parameters by `atoll join`; the others move as many numbers at the same pace.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hosts import Hosts, missing

import atoll

PEERS = str(Path(__file__).with_name("side_by_side_peers.py"))
STEP_S, INNER_STEPS = 0.05, 20
MODEL = {"hidden_size": 512, "num_layers": 3, "num_heads": 8, "intermediate_size": 1376}
NUMEL = 9_622_528  # of MODEL with the byte tokenizer, checked before anything runs
TOKENS_A_STEP = 16  # of the model that elastic Atoll trains
SLOWER = 10


class Peers:
    """Islands that print a JSON line a round; what they printed, with the bytes their interfaces had sent by then."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.processes: list[subprocess.Popen[str]] = []
        self._lines: queue.Queue[tuple[int, dict[str, Any], int]] = queue.Queue()
        self.heard: list[tuple[int, dict[str, Any], int]] = []

    def start(self, python: str, library: str, *words: str, step_s: float = STEP_S) -> int:
        """Start the next island; its number."""
        island = len(self.processes)
        name = self.hosts.names[island]
        argv = [python, PEERS, library, "--island", str(island), "--address", self.hosts.address(name)]
        argv += ["--numel", str(NUMEL), "--inner-steps", str(INNER_STEPS), "--step-s", str(step_s), *words]
        pipe = subprocess.PIPE
        env = environment(self.hosts, name, island)
        process = self.hosts.run(name, argv, stdin=pipe, stdout=pipe, stderr=log(library), env=env, text=True)
        self.processes.append(process)
        threading.Thread(target=self._listen, args=(island, process), daemon=True).start()
        return island

    def hear(self, wanted: Callable[[int, dict[str, Any]], bool], *, timeout_s: float) -> dict[str, Any]:
        """The next line that is `wanted`."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                raise SystemExit(f"nothing was heard for {timeout_s:.0f} s; see {LOGS}") from None
            self.heard.append(line)
            if wanted(line[0], line[1]):
                return line[1]

    def wait_rounds(self, island: int, count: int, *, timeout_s: float) -> None:
        for _ in range(count):
            self.hear(lambda i, line: i == island and line["what"] == "round" and line["ok"], timeout_s=timeout_s)

    def rounds(self, island: int) -> list[tuple[dict[str, Any], int]]:
        return [(line, sent) for i, line, sent in self.heard if i == island and line["what"] == "round"]

    def _listen(self, island: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        for text in process.stdout:
            if text.startswith("{"):
                self._lines.put((island, json.loads(text), self.hosts.payload_sent(self.hosts.names[island])))


LOGS = Path(tempfile.gettempdir()) / "atoll-side-by-side"


def log(name: str) -> Any:
    LOGS.mkdir(exist_ok=True)
    return (LOGS / f"{name}.log").open("a")


def environment(hosts: Hosts, name: str, rank: int) -> dict[str, str]:
    return {
        **os.environ,
        **{"RANK": str(rank), "WORLD_SIZE": str(len(hosts.names)), "LOCAL_RANK": "0"},
        **{"MASTER_ADDR": hosts.address(hosts.names[0]), "MASTER_PORT": "29400"},
        **{"GLOO_SOCKET_IFNAME": hosts.interface(name), "TP_SOCKET_IFNAME": hosts.interface(name)},
        **{"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    }


def islands(count: int) -> list[str]:
    return [f"h{number}" for number in range(count)]


# --- the others, and Atoll in the same loop


def lighthouse(hosts: Hosts, python: str, least: int) -> str:
    """Start torchft's coordinator on the first island; its address."""
    program = str(Path(python).with_name("torchft_lighthouse"))
    words = [program, "--min_replicas", str(least), "--bind", "0.0.0.0:29510"]
    hosts.run(hosts.names[0], words, stdout=log("lighthouse"), stderr=log("lighthouse"))
    time.sleep(1.0)
    return hosts.address(hosts.names[0])


def torchft_islands(hosts: Hosts, python: str, least: int, *, slow: bool = False) -> Peers:
    first = lighthouse(hosts, python, least)
    peers = Peers(hosts)
    for number in range(len(hosts.names)):
        pace = STEP_S * (SLOWER if slow and number == len(hosts.names) - 1 else 1)
        peers.start(python, "torchft", "--first", first, "--least", str(least), step_s=pace)
    return peers


def sync_in_loop(library: str, python: str, rate_mbit: float, code: str, rounds: int) -> dict[str, Any]:
    with Hosts(islands(2), rate_mbit=rate_mbit) as hosts:
        if library == "torchft":
            peers = torchft_islands(hosts, python, 2)
        else:
            peers = Peers(hosts)
            for _ in hosts.names:
                peers.start(python, library, "--code", code)
        peers.wait_rounds(1, rounds + 1, timeout_s=120)
        return summary(peers.rounds(1))


def sync_of_hivemind(python: str, rate_mbit: float, code: str, rounds: int) -> dict[str, Any]:
    with Hosts(islands(2), rate_mbit=rate_mbit) as hosts:
        peers = Peers(hosts)
        words = ("--code", code, "--least", "2")
        peers.start(python, "hivemind", *words)
        first = peers.hear(lambda i, line: line["what"] == "ready", timeout_s=60)["maddr"]
        peers.start(python, "hivemind", *words, "--first", first)
        peers.hear(lambda i, line: line["what"] == "ready", timeout_s=60)
        for _ in range(rounds + 1):
            for process in peers.processes:
                assert process.stdin
                process.stdin.write("\n")
                process.stdin.flush()
            for _ in peers.processes:
                peers.hear(lambda island, line: line["what"] == "round", timeout_s=90)
        return summary(peers.rounds(1))


def summary(rounds: list[tuple[dict[str, Any], int]]) -> dict[str, Any]:
    """Of all rounds but the first: median seconds, bytes a round."""
    sent = (rounds[-1][1] - rounds[0][1]) / (len(rounds) - 1)
    facts = {
        key: round(statistics.median(line[key] for line, _ in rounds[1:]), 3)
        for key in ("sync_s", "exchange_s")
        if key in rounds[0][0]
    }
    return {**facts, "sent_mb": round(sent / 1e6, 2)}


def kill_torchft(python: str, rate_mbit: float) -> dict[str, Any]:
    with Hosts(islands(3), rate_mbit=rate_mbit) as hosts:
        peers = torchft_islands(hosts, python, 2)
        peers.wait_rounds(0, 3, timeout_s=180)
        time.sleep(0.3)
        peers.processes[2].kill()
        killed = time.time()
        number = peers.rounds(0)[-1][0]["number"]
        peers.hear(lambda i, line: i == 0 and line["what"] == "round" and line["number"] > number, timeout_s=180)
        after = [line for line, _ in peers.rounds(0) if line["at"] > killed]
    lost = sum(not line["ok"] for line in after) * INNER_STEPS
    return {"next_commit_s": round(after[-1]["at"] - killed, 2), "steps_discarded": lost}


def slow_torchft(python: str, rate_mbit: float, rounds: int) -> dict[str, Any]:
    with Hosts(islands(3), rate_mbit=rate_mbit) as hosts:
        peers = torchft_islands(hosts, python, 2, slow=True)
        peers.wait_rounds(0, rounds + 1, timeout_s=240)
        heard = [line for line, _ in peers.rounds(0) if line["ok"]]
    moved = [b - a for a, b in zip(heard[0]["marks"], heard[-1]["marks"], strict=True)][:3]
    seconds = (heard[-1]["at"] - heard[0]["at"]) / (len(heard) - 1)
    return {"round_s": round(seconds, 2), "share_of_slow": round(moved[2] / sum(moved), 3)}


# --- elastic Atoll


class Elastic:
    """A coordinator on the first host and an island of `atoll join` on each."""

    def __init__(self, hosts: Hosts, made: Path, *, code: str = "identity", slow: bool = False) -> None:
        self.hosts, self.run = hosts, made / "run"
        self.metrics = self.run / "metrics.jsonl"
        first = hosts.names[0]
        words = [sys.executable, "-m", "atoll", "coordinator", *self._flags(code), "--host", hosts.address(first)]
        self._start(first, words, made)
        token = self.run / "coordinator" / "join.token"
        while not token.exists():
            time.sleep(0.1)
        self.processes = []
        for number, name in enumerate(hosts.names):
            pace = STEP_S * (SLOWER if slow and number == len(hosts.names) - 1 else 1)
            join = [sys.executable, __file__, "--join", str(pace), f"@{token}"]
            folder = made / name
            folder.mkdir()
            self.processes.append(self._start(name, join, folder))
        self._sent: list[int] = []

    def _start(self, name: str, words: list[str], folder: Path) -> subprocess.Popen[Any]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return self.hosts.run(name, words, stdout=log("atoll"), stderr=log("atoll"), env=env, cwd=folder)

    def _flags(self, code: str) -> list[str]:
        return [
            *("--replicas", str(len(self.hosts.names)), "--inner-steps", str(INNER_STEPS), "--max-steps", "10000000"),
            *("--compressor", code, "--output-dir", str(self.run), "--data.max-bytes", "300000", "--threads", "1"),
            *(
                "--sequence-length",
                str(TOKENS_A_STEP),
                "--batch-size",
                "1",
                "--lr-schedule",
                "constant",
                "--eval-sequences",
                "2",
            ),
            *("--outer-optimizer", "sgd", "--outer-lr", "1.0"),
            *(word for key, value in MODEL.items() for word in (f"--model.{key.replace('_', '-')}", str(value))),
        ]

    def rounds(self, count: int, *, timeout_s: float) -> list[dict[str, Any]]:
        """Round events once there are `count`."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            lines = self.metrics.read_text().splitlines() if self.metrics.exists() else []
            found = [event for line in lines if (event := json.loads(line))["event"] == "round"]
            self._sent += [self.hosts.payload_sent(self.hosts.names[1])] * (len(found) - len(self._sent))
            if len(found) >= count:
                return found
            time.sleep(0.02)
        raise SystemExit(f"{count} rounds were not made in {timeout_s:.0f} s; see {LOGS}")

    def sent_mb(self, first: int) -> float:
        return (self._sent[-1] - self._sent[first]) / (len(self._sent) - 1 - first) / 1e6


def sync_elastic(rate_mbit: float, code: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made, Hosts(islands(2), rate_mbit=rate_mbit) as hosts:
        elastic = Elastic(hosts, Path(made), code=code)
        found = elastic.rounds(rounds + 2, timeout_s=180)[2:]
        seconds = statistics.median(event["sync_s"] for event in found)
        return {"sync_s": round(seconds, 3), "sent_mb": round(elastic.sent_mb(1), 2)}


def kill_elastic(rate_mbit: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made, Hosts(islands(3), rate_mbit=rate_mbit) as hosts:
        elastic = Elastic(hosts, Path(made))
        found = elastic.rounds(4, timeout_s=180)
        time.sleep(0.3)
        elastic.processes[2].kill()
        killed = time.time()
        after = elastic.rounds(len(found) + 1, timeout_s=120)
        waited = time.time() - killed
        final = elastic.rounds(len(after) + 2, timeout_s=120)
    made_tokens = sum(sum(event["weights"].get(seat, 0) for seat in ("0", "1")) for event in final[len(found) :])
    trained = made_tokens / (len(final) - len(found)) / 2 / TOKENS_A_STEP
    return {"next_commit_s": round(waited, 2), "steps_discarded": round(max(0.0, INNER_STEPS - trained), 1)}


def slow_elastic(rate_mbit: float, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made, Hosts(islands(3), rate_mbit=rate_mbit) as hosts:
        elastic = Elastic(hosts, Path(made), slow=True)
        elastic.rounds(3, timeout_s=240)
        began = time.time()
        found = elastic.rounds(3 + rounds, timeout_s=240)[3:]
        seconds = (time.time() - began) / rounds
    tokens: dict[str, float] = {}
    for event in found:
        for seat, weight in event["weights"].items():
            tokens[seat] = tokens.get(seat, 0) + weight
    share = min(tokens.values()) / sum(tokens.values()) if len(tokens) == 3 else 0.0
    return {"round_s": round(seconds, 2), "share_of_slow": round(share, 3)}


def join(step_s: float, words: list[str]) -> None:
    """In a host: `atoll join`, no inner step shorter than `step_s`."""
    from atoll.cli.main import main as run_atoll
    from atoll.train.replica import Replica

    compute = Replica.compute_gradients

    def paced(replica: Replica, step: int) -> Any:
        until = time.perf_counter() + step_s
        answer = compute(replica, step)
        time.sleep(max(0.0, until - time.perf_counter()))
        return answer

    Replica.compute_gradients = paced  # type: ignore[method-assign]
    sys.exit(run_atoll(["join", *words]))


# --- the tables


def measured(rows: dict[str, Callable[[], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Each row measured, told as it is done."""
    results = {}
    for name, measure in rows.items():
        results[name] = measure()
        print(f"{name}: {results[name]}", flush=True)
    return results


def table(title: str, rows: dict[str, dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    print(f"\n{title}\n| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}", flush=True)
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(str(row.get(column, '–')) for column in columns)} |", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--join"]:
        join(float(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--others", default=".venv-side-by-side/bin/python", help="python of their environment")
    parser.add_argument("--rate-mbit", type=float, default=100.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=["sync", "kill", "slow"], default=["sync", "kill", "slow"])
    options = parser.parse_args()
    if why := missing():
        raise SystemExit(f"hosts cannot be made here: {why}")
    check_size()
    print(f"Atoll {atoll.__version__}; {others(options.others)}; {NUMEL:,} fp32 parameters", flush=True)
    physical = NUMEL * 32 / (options.rate_mbit * 1e6)
    python, rate, rounds = options.others, options.rate_mbit, options.rounds
    results: dict[str, dict[str, Any]] = {}
    if "sync" in options.only:
        results["sync"] = measured(
            {
                "Atoll, elastic": lambda: sync_elastic(rate, "identity", rounds),
                "Atoll, elastic, fp16": lambda: sync_elastic(rate, "fp16", rounds),
                "Atoll, OuterSync": lambda: sync_in_loop("atoll", sys.executable, rate, "identity", rounds),
                "Atoll, OuterSync, fp16": lambda: sync_in_loop("atoll", sys.executable, rate, "fp16", rounds),
                "torchft DiLoCo": lambda: sync_in_loop("torchft", python, rate, "identity", rounds),
                "hivemind averager": lambda: sync_of_hivemind(python, rate, "identity", rounds),
                "hivemind averager, fp16": lambda: sync_of_hivemind(python, rate, "fp16", rounds),
            }
        )
        table(f"Two islands, {rate:g} Mbit/s: fp32 bytes alone take {physical:.2f} s", results["sync"])
    if "kill" in options.only:
        results["kill"] = measured(
            {"Atoll, elastic": lambda: kill_elastic(rate), "torchft DiLoCo": lambda: kill_torchft(python, rate)}
        )
        table("Three islands, one killed in its inner steps", results["kill"])
    if "slow" in options.only:
        results["slow"] = measured(
            {
                "Atoll, elastic": lambda: slow_elastic(rate, rounds),
                "torchft DiLoCo": lambda: slow_torchft(python, rate, rounds),
            }
        )
        table(f"Three islands, one {SLOWER} times slower", results["slow"])
    print(f"\n{json.dumps(results)}")


def check_size() -> None:
    from atoll.data.tokenizer import byte_tokenizer
    from atoll.models import build_model
    from atoll.train.config import ModelConfig

    model = build_model(ModelConfig(**MODEL), vocab_size=len(byte_tokenizer()), sequence_length=TOKENS_A_STEP, seed=0)
    numel = sum(param.numel() for param in model.parameters())
    assert numel == NUMEL, f"the model has {numel} parameters"


def others(python: str) -> str:
    """Versions of what `python` has."""
    names = ["torchft", "hivemind", "torch"]
    ask = "from importlib.metadata import version; import sys; print(*map(version, sys.argv[1:]))"
    done = subprocess.run([python, "-c", ask, *names], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"{python} lacks torchft or hivemind; how to make it: python benchmarks/side_by_side.py --help"
        )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
