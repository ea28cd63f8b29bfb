"""The planner against real runs on shaped links: is a round as long as it says?

    python benchmarks/predicted.py [--islands 2 4] [--mbit 10 20 50 100 1000]

Each island is a process in a host of its own (benchmarks/hosts.py) with one thread. Every method is first run on an
open link, which gives the step time and what a sync takes beside sending. Each link is measured first by a bulk
transfer both ways, as a user would (headers and acknowledgements take their share of the nominal rate). Then the round
that the planner foretells from these numbers is compared with the median of real rounds. Steps are paced
(benchmarks/paced.py), so that four islands need no more than two cores. Writes results/predicted.md and
results/predicted.png. Nothing else may run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts import Hosts, missing
from paced import pace

HERE = Path(__file__).parent / "results"
OPEN_MBIT = 20_000
PROBE_S = 2.0  # of nominal time, of the transfer that measures a link
ROUNDS = 6  # the first two are not counted
STEP_S = 0.045
STEP_TOKENS = 64
MODEL = {"family": "llama", "hidden_size": 192, "num_layers": 2, "num_heads": 4, "intermediate_size": 512}
METHODS: dict[str, dict[str, Any]] = {
    "DiLoCo": {},
    "int8": {"compressor": "int8"},
    "int4": {"compressor": "int4"},
    "delayed": {"schedule": "delayed"},
    "DiLoCoX": {"schedule": "delayed", "compressor": "lowrank+int4", "rank": 32},
}


@dataclass(frozen=True)
class Cell:
    """One method on one link. seconds of a round."""

    islands: int
    mbit: float
    method: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


# --- in the hosts


def work(rank: int, num_islands: int, address: str) -> None:
    """An island: runs what it reads, a line of settings each, and answers with what it measured."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from atoll.comm.torchdist import TorchDistTransport
    from atoll.train.build import build_run
    from atoll.train.config import build_config
    from atoll.train.loop import train
    from atoll.train.stopping import StoreStopper, watch_signals

    pace(STEP_S)
    torch.set_num_threads(1)
    store = dist.TCPStore(address, 29400, num_islands, is_master=rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_islands)
    for number, line in enumerate(sys.stdin):
        settings = json.loads(line)
        if "probe" in settings:
            print(json.dumps({"seconds": _exchange_s(settings["probe"])}), flush=True)
            continue
        config = build_config(settings)
        with watch_signals() as signals:
            stopper = StoreStopper(
                dist.PrefixStore(f"run-{number}", store),
                rank=rank,
                num_ranks=num_islands,
                signals=signals,
                timeout_s=300,
            )
            transport = TorchDistTransport(timeout_s=300)
            run = build_run(
                config, [transport], stopper=stopper, signals=signals, num_processes=num_islands, quiet=True
            )
            train(run)
            run.close()
            run.barrier()
            transport.close()
        print(json.dumps({"done": number}), flush=True)


def _exchange_s(num_bytes: int) -> float:
    """Seconds in which every island sends so much to the next one and receives as much from the one before."""
    import torch
    import torch.distributed as dist

    rank, islands = dist.get_rank(), dist.get_world_size()
    outgoing, incoming = torch.ones(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)
    dist.barrier()
    began = time.perf_counter()
    # The receive first: gloo would queue its readiness behind what is sent.
    works = [dist.irecv(incoming, (rank - 1) % islands), dist.isend(outgoing, (rank + 1) % islands)]
    for work in works:
        work.wait()
    return time.perf_counter() - began


# --- outside


class Islands:
    """The processes of one number of islands, kept over all links and methods."""

    def __init__(self, hosts: Hosts, names: list[str], folder: Path) -> None:
        self._hosts = hosts
        self._names = names
        self._folder = folder
        self._count = 0
        self._processes = [
            hosts.run(
                name,
                [sys.executable, __file__, "--work", str(rank), str(len(names)), hosts.address(names[0])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    **{"GLOO_SOCKET_IFNAME": hosts.interface(name), "OMP_NUM_THREADS": "1"},
                    "TORCH_CPP_LOG_LEVEL": "ERROR",
                },
            )
            for rank, name in enumerate(names)
        ]

    def bytes_per_s(self, mbit: float) -> float:
        """What a link carries both ways at once."""
        num_bytes = int(PROBE_S * mbit * 1e6 / 8)
        return num_bytes / max(answer["seconds"] for answer in self._ask({"probe": num_bytes}))

    def run(self, method: dict[str, Any], *, inner_steps: int) -> Path:
        """Train on the links as they are; returns the run's folder."""
        self._count += 1
        folder = self._folder / f"run-{self._count}"
        settings = {
            "model": MODEL,
            "data": {"max_bytes": 500_000},
            **{"replicas": len(self._names), "inner_steps": inner_steps, "max_steps": inner_steps * ROUNDS},
            **{"sequence_length": STEP_TOKENS, "batch_size": 1, "eval_sequences": 1, "threads": 1},
            **{"outer_lr": 0.6, "outer_momentum": 0.4, "lr_schedule": "constant", "output_dir": str(folder)},
            **method,
        }
        self._ask(settings)
        return folder

    def _ask(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit("an island ended early")
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def measure(folder: Path) -> tuple[float, Any]:
    """Seconds of a round, and what the planner reads from the run."""
    from atoll.plan.measure import read_run

    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"][2:ROUNDS]
    return statistics.median(event["inner_s"] + event["exposed_s"] for event in rounds), read_run(folder)


def predict(method: dict[str, Any], seen: Any, *, islands: int, bytes_per_s: float, inner_steps: int) -> float:
    """Seconds of a round by the planner, from what the open link showed and the rate of this one."""
    from atoll.algo.schedule import Schedule
    from atoll.plan.estimate import Method, Workload, estimate
    from atoll.plan.links import uniform
    from atoll.plan.payload import Coding
    from atoll.plan.shapes import shape_of_settings

    delay = inner_steps if method.get("schedule") == "delayed" else 0
    coding = Coding(method.get("compressor", "identity"), method.get("rank", 0))
    workload = Workload(
        shape_of_settings({"model": MODEL, "sequence_length": STEP_TOKENS}),
        step_s=seen.step_s,
        tokens_per_step=islands * STEP_TOKENS,
        overhead_s=seen.overhead_s(),
        landing_s=seen.landing_s,
    )
    planned = Method("", Schedule(inner_steps, delay=delay), coding)
    network = uniform(islands, bytes_per_s)
    return estimate(planned, workload, network).round_s


def cells(islands: int, rates: list[float], *, inner_steps: int) -> list[Cell]:
    names = [f"h{number}" for number in range(islands)]
    found = []
    with tempfile.TemporaryDirectory() as made, Hosts(names, rate_mbit=OPEN_MBIT) as hosts:
        running = Islands(hosts, names, Path(made))
        seen = {name: measure(running.run(method, inner_steps=inner_steps))[1] for name, method in METHODS.items()}
        for mbit in rates:
            for host in names:
                hosts.set_rate(host, mbit)
            bytes_per_s = running.bytes_per_s(mbit)
            print(f"{islands} islands, {mbit:g} Mbit/s: {bytes_per_s * 8e-6:.2f} Mbit/s of payload", flush=True)
            for name, method in METHODS.items():
                measured_s, _ = measure(running.run(method, inner_steps=inner_steps))
                predicted_s = predict(
                    method, seen[name], islands=islands, bytes_per_s=bytes_per_s, inner_steps=inner_steps
                )
                found.append(Cell(islands, mbit, name, predicted_s, measured_s))
                cell = found[-1]
                print(
                    f"{islands} islands, {mbit:6g} Mbit/s, {name:8} predicted {predicted_s:7.3f} s, measured "
                    f"{measured_s:7.3f} s, {100 * cell.error:+5.1f} %",
                    flush=True,
                )
        running.close()
    return found


def write(found: list[Cell]) -> None:
    """The table, and a picture of predicted against measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = ["| islands | Mbit/s | method | predicted s | measured s | error |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {c.islands} | {c.mbit:g} | {c.method} | {c.predicted_s:.3f} | {c.measured_s:.3f} | {100 * c.error:+.1f} % |"
        for c in found
    ]
    (HERE / "predicted.md").write_text("\n".join(lines) + "\n")
    figure, axes = plt.subplots(figsize=(5.6, 5.2))
    for method in METHODS:
        points = [cell for cell in found if cell.method == method]
        axes.scatter([c.measured_s for c in points], [c.predicted_s for c in points], label=method, s=22)
    span = [min(c.measured_s for c in found) * 0.8, max(c.measured_s for c in found) * 1.25]
    axes.plot(span, span, color="grey", linewidth=1)
    axes.fill_between(span, [0.95 * s for s in span], [1.05 * s for s in span], color="grey", alpha=0.2, label="± 5 %")
    axes.set(xscale="log", yscale="log", xlabel="measured round (s)", ylabel="predicted round (s)")
    axes.set_title("Planner against real rounds on shaped links")
    axes.legend()
    figure.tight_layout()
    figure.savefig(HERE / "predicted.png", dpi=130)
    within = sum(abs(cell.error) <= 0.05 for cell in found)
    print(f"{within} of {len(found)} within 5 %")


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--islands", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, nargs="+", default=[10, 20, 50, 100, 1000])
    parser.add_argument("--inner-steps", type=int, default=40)
    options = parser.parse_args()
    if why := missing():
        raise SystemExit(f"hosts cannot be made here: {why}")
    found = [cell for n in options.islands for cell in cells(n, options.mbit, inner_steps=options.inner_steps)]
    write(found)


if __name__ == "__main__":
    main()
