"""Loss against time on a slow link: what all the hiding and compressing is for.

    python benchmarks/wall_time.py [--mbit 10] [--minutes 4]

Two islands are two hosts of benchmarks/hosts.py, each a process with one thread and paced steps (benchmarks/paced.py).
Every method trains for as long; the loss is that of the anchor on held-out text, against this machine's clock since the
first step. Inner rate and warm-up are the same for all, outer settings those that docs/results.md found. Writes
results/wall_time.json, .md and .png. Nothing else should run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from hosts import Hosts, missing

HERE = Path(__file__).parent / "results"
ISLANDS = ["a", "b"]
STEP_MS = 60
INNER_STEPS = 50
DELAYED = ("--schedule", "delayed", "--outer-lr", "0.4", "--outer-momentum", "0")
METHODS: dict[str, tuple[str, ...]] = {
    "AllReduce": ("--method", "data-parallel", "--eval-steps", "10"),
    "DiLoCo": ("--schedule", "blocking", "--outer-lr", "0.7", "--outer-momentum", "0.3"),
    "streaming": (
        *("--schedule", "streaming", "--fragments", "2", "--delay", "25", "--alpha", "0.5"),
        *("--outer-lr", "0.4", "--outer-momentum", "0"),
    ),
    "delayed": DELAYED,
    "DiLoCoX": (*DELAYED, "--compressor", "lowrank+int4", "--rank", "64"),
}


def train(hosts: Hosts, folder: Path, method: tuple[str, ...], *, seconds: float) -> list[tuple[float, int, float]]:
    """Seconds since the first step, inner step and loss, at every evaluation of one run."""
    data_parallel = "data-parallel" in method
    flags = [
        *("--replicas", str(len(ISLANDS)), "--inner-steps", "1" if data_parallel else str(INNER_STEPS)),
        *("--max-steps", "1000000", "--warmup-steps", "50", "--lr-schedule", "constant", "--learning-rate", "1e-3"),
        *("--sequence-length", "64", "--batch-size", "2", "--eval-sequences", "64", "--threads", "1"),
        *("--output-dir", str(folder), "--eval-steps", str(2 * INNER_STEPS), "--save-steps", "0", *method),
    ]
    command = [sys.executable, str(Path(__file__).parent / "paced.py"), str(STEP_MS), "train", *flags]
    folder.parent.mkdir(parents=True, exist_ok=True)
    out = folder.parent / "out.txt"
    processes = [
        hosts.run(name, command, env=_environment(hosts, name, rank), stdout=out.open("a"), stderr=subprocess.STDOUT)
        for rank, name in enumerate(ISLANDS)
    ]
    try:
        return _watch(folder / "metrics.jsonl", processes, out, seconds=seconds)
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _environment(hosts: Hosts, name: str, rank: int) -> dict[str, str]:
    return {
        **os.environ,
        **{"RANK": str(rank), "WORLD_SIZE": str(len(ISLANDS)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": hosts.address(ISLANDS[0]), "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "benchmark"},
        **{"GLOO_SOCKET_IFNAME": hosts.interface(name), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    }


def _watch(metrics: Path, processes: list[Any], out: Path, *, seconds: float) -> list[tuple[float, int, float]]:
    began, read = None, 0
    seen: list[tuple[float, int, float]] = []
    while began is None or time.perf_counter() - began < seconds:
        time.sleep(0.02)
        if any(process.poll() is not None for process in processes):
            raise SystemExit(f"an island ended early:\n{out.read_text()[-2000:]}")
        if not metrics.exists():
            continue
        with metrics.open() as file:
            file.seek(read)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        read += len(whole.encode())
        for event in map(json.loads, whole.splitlines()):
            if began is None and event["event"] == "step":
                began = time.perf_counter()
            if event["event"] == "eval" and began is not None:
                seen.append((time.perf_counter() - began, event["step"], event["loss"]))
    return seen


def draw(found: dict[str, list[tuple[float, int, float]]], mbit: float) -> None:
    """Loss against seconds, and against inner steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for name, points in found.items():
        left.plot([p[0] for p in points], [p[2] for p in points], label=name, marker=".", markersize=3)
        right.plot([p[1] for p in points], [p[2] for p in points], label=name, marker=".", markersize=3)
    left.set(xlabel="seconds", ylabel="held-out loss (nats a byte)", title=f"On a link of {mbit:g} Mbit/s")
    right.set(xlabel="inner steps of a replica", title="The same runs against steps", xscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend()
    figure.tight_layout()
    figure.savefig(HERE / "wall_time.png", dpi=130)


def write(found: dict[str, list[tuple[float, int, float]]]) -> None:
    """What each reached at the end, and when it was where AllReduce ended."""
    goal = found["AllReduce"][-1][2] if "AllReduce" in found else float("-inf")
    lines = ["| | inner steps | loss at the end | seconds to AllReduce's last loss |", "|---|---|---|---|"]
    for name, points in found.items():
        reached = next((seconds for seconds, _, loss in points if loss <= goal), None)
        when = f"{reached:.0f}" if reached is not None else "not reached"
        lines.append(f"| {name} | {points[-1][1]:,} | {points[-1][2]:.3f} | {when} |")
    (HERE / "wall_time.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=10)
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    options = parser.parse_args()
    if why := missing():
        raise SystemExit(f"hosts cannot be made here: {why}")
    found = {}
    with tempfile.TemporaryDirectory() as made, Hosts(ISLANDS, rate_mbit=options.mbit) as hosts:
        for number, name in enumerate(options.methods):
            folder = Path(made) / str(number) / "run"
            found[name] = train(hosts, folder, METHODS[name], seconds=60 * options.minutes)
            print(f"{name}: step {found[name][-1][1]:,}, loss {found[name][-1][2]:.3f}", flush=True)
    (HERE / "wall_time.json").write_text(json.dumps(found) + "\n")
    write(found)
    draw(found, options.mbit)


if __name__ == "__main__":
    main()
