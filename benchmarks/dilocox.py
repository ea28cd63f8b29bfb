"""The throughput table of DiLoCoX at its own ratio of communication to compute, on links that are really that slow.

    python benchmarks/dilocox.py [--kappa 31 390] [--inner-steps 125] [--stages 2]

κ is the time that an uncompressed all-reduce of the parameters takes on the link, over the time of an inner step. The
paper's two models have κ 31 (OPT-1.3B) and 390 (107B) at 1 Gbit/s; a small model on a link slowed to the same κ has the
same table (docs/algorithms.md). Two islands are two hosts of benchmarks/hosts.py, each a process with one thread. First
the inner step is timed on an open link, then the rate of the link follows from κ.

    allreduce         data parallel: fp32 gradients are averaged in every step
    diloco            rounds of H steps, fp32, training waits for the sync
    no_compression    the sync travels while the next round trains, fp32
    no_overlap        low-rank factors in int4, training waits
    full              low-rank factors in int4 while the next round trains

With --stages an island is a pipeline: its stages are processes of one host and share its link. A step then takes the
time of its microbatches and of the bubble: (m + p − 1) / m of what m microbatches alone take, on every worker. Data
parallelism has no pipeline here; its line is the closed form alone.

Tokens a second are of both islands, by this machine's clock, between landings once the first rounds are over; predicted
are the closed forms. Nothing else should run beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hosts import Hosts, missing

from atoll.compress import CompressorOptions, build_compressor
from atoll.plan.cost import ring_factor
from atoll.train.config import ModelConfig

ISLANDS = ["a", "b"]
PAYLOAD_SHARE = 0.956  # of a link's rate: the rest is headers (docs/benchmarks.md)
SEQUENCE, BATCH = 64, 1
MODEL = {"hidden_size": 192, "num_layers": 2, "num_heads": 4, "intermediate_size": 512}
RANK = 32
STEP_S, UPDATE_S = 0.045, 0.006  # of a step; the last of it after the gradients
MICROBATCHES = 4  # of a pipeline's step, of one sequence each
PIPELINE_STEP_S = 0.16  # of a pipeline's step without its bubble: two processes share a core here


@dataclass(frozen=True)
class Row:
    """One line of the table. rounds: to time, after `skip` that are not."""

    name: str
    flags: tuple[str, ...]
    rounds: int
    skip: int = 1


@dataclass(frozen=True)
class Pace:
    """What a step is made to take, and what it trains on. stages: of each island."""

    stages: int

    @property
    def batch(self) -> int:
        return BATCH if self.stages == 1 else MICROBATCHES

    @property
    def step_s(self) -> float:
        """With the bubble: m microbatches pass p stages in m + p − 1 beats."""
        bubble = (MICROBATCHES + self.stages - 1) / MICROBATCHES
        return STEP_S if self.stages == 1 else PIPELINE_STEP_S * bubble

    @property
    def tokens(self) -> int:
        """Of both islands in a step."""
        return len(ISLANDS) * SEQUENCE * self.batch

    def flags(self) -> tuple[str, ...]:
        words = ("--batch-size", str(self.batch))
        if self.stages == 1:
            return words
        return (*words, "--pipeline-stages", str(self.stages), "--microbatches", str(MICROBATCHES))


ROWS = (
    Row("allreduce", ("--method", "data-parallel"), rounds=5, skip=2),
    Row("diloco", ("--schedule", "blocking"), rounds=3),
    Row("no_compression", ("--schedule", "delayed"), rounds=3, skip=2),
    Row("no_overlap", ("--schedule", "blocking", "--compressor", "lowrank+int4"), rounds=4),
    Row("full", ("--schedule", "delayed", "--compressor", "lowrank+int4"), rounds=5, skip=2),
)


def work(step_s: float, flags: list[str]) -> None:
    """In a host: `atoll train`, its steps as long as `step_s`."""
    from atoll.cli.main import main as atoll
    from atoll.train.replica import Replica

    def paced(method: Callable[[Replica, int], Any], seconds: float) -> Callable[[Replica, int], Any]:
        def call(replica: Replica, step: int) -> Any:
            until = time.perf_counter() + seconds
            answer = method(replica, step)
            time.sleep(max(0.0, until - time.perf_counter()))
            return answer

        return call

    Replica.compute_gradients = paced(Replica.compute_gradients, step_s - UPDATE_S)  # type: ignore[method-assign]
    Replica.update = paced(Replica.update, UPDATE_S)  # type: ignore[method-assign]
    sys.exit(atoll(["train", *flags]))


def train(hosts: Hosts, folder: Path, row: Row, *, inner_steps: int, pace: Pace) -> float:
    """Tokens a second of both islands, of one run on the hosts as they are now."""
    per_round = 1 if row.name == "allreduce" else inner_steps
    folder.parent.mkdir(parents=True, exist_ok=True)
    processes = start(hosts, folder, row, per_round=per_round, pace=pace)
    marks = _watch(folder / "metrics.jsonl", processes, needed=row.rounds + row.skip)
    for process in processes:
        process.kill()
        process.wait()
    rounds = marks[row.skip - 1 :]
    seconds = (rounds[-1][0] - rounds[0][0]) / (len(rounds) - 1)
    return per_round * pace.tokens / seconds


def start(hosts: Hosts, folder: Path, row: Row, *, per_round: int, pace: Pace, work: str = __file__) -> list[Any]:
    """Start all processes of a run. work: the program that each is, with the duration of a step and its flags."""
    flags = [
        *("--replicas", str(len(ISLANDS)), "--inner-steps", str(per_round)),
        *("--max-steps", str(per_round * (row.rounds + row.skip + 1))),
        *("--output-dir", str(folder), "--sequence-length", str(SEQUENCE), *pace.flags()),
        *("--data.max-bytes", "500000", "--eval-sequences", "1", "--logging-steps", "1000000", "--rank", str(RANK)),
        *("--outer-lr", "0.6", "--outer-momentum", "0.4", "--lr-schedule", "constant", "--threads", "1"),
        *(word for key, value in MODEL.items() for word in (f"--model.{key.replace('_', '-')}", str(value))),
        *row.flags,
    ]
    return [
        hosts.run(
            name,
            [sys.executable, work, "--work", str(pace.step_s), *flags],
            env=_environment(hosts, name, island * pace.stages + stage, stages=pace.stages),
            stdout=(folder.parent / f"{row.name}-{name}{stage}.out").open("w"),
            stderr=None,
        )
        for island, name in enumerate(ISLANDS)
        for stage in range(pace.stages)
    ]


def _environment(hosts: Hosts, name: str, rank: int, *, stages: int) -> dict[str, str]:
    return {
        **os.environ,
        **{"RANK": str(rank), "WORLD_SIZE": str(len(ISLANDS) * stages)},
        **{"LOCAL_RANK": str(rank % stages), "LOCAL_WORLD_SIZE": str(stages)},
        **{"MASTER_ADDR": hosts.address(ISLANDS[0]), "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "benchmark"},
        **{"GLOO_SOCKET_IFNAME": hosts.interface(name), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    }


def _watch(metrics: Path, processes: list, *, needed: int) -> list[tuple[float, dict]]:
    """When each round was logged, and what was logged."""
    marks: list[tuple[float, dict]] = []
    read = 0
    while len(marks) < needed:
        time.sleep(0.002)
        if any(process.poll() is not None for process in processes) and read == metrics.stat().st_size:
            raise SystemExit(f"an island ended early; see {metrics.parent.parent}")
        if not metrics.exists() or metrics.stat().st_size == read:
            continue
        now = time.perf_counter()
        with metrics.open() as file:
            file.seek(read)
            lines = file.readlines()
            whole = [line for line in lines if line.endswith("\n")]
            read += sum(len(line) for line in whole)
        marks += [(now, event) for line in whole if (event := json.loads(line))["event"] == "round"]
    return marks


def predicted(pace: Pace, kappa: float, *, inner_steps: int, compression: float) -> dict[str, float]:
    """Tokens a second by the closed forms: a round takes max(H·t, S) overlapped and H·t + S otherwise."""
    step_s, tokens = pace.step_s, pace.tokens
    exchange_s, work_s = kappa * step_s, inner_steps * step_s
    rounds = {
        "diloco": work_s + exchange_s,
        "no_compression": max(work_s, exchange_s),
        "no_overlap": work_s + exchange_s / compression,
        "full": max(work_s, exchange_s / compression),
    }
    rates = {name: inner_steps * tokens / seconds for name, seconds in rounds.items()}
    return {"allreduce": tokens / (step_s + exchange_s), **rates}


def compression(shapes: list[tuple[int, ...]]) -> float:
    """How many times fewer bytes than fp32 an island sends in a round of low-rank factors in int4."""
    codes = build_compressor("lowrank+int4", CompressorOptions(rank=RANK))
    sent = sum(codes.sent_bytes(shape, num_replicas=len(ISLANDS), replica=0) for shape in shapes)
    return 4 * sum(torch.Size(shape).numel() for shape in shapes) / sent


def _shapes() -> list[tuple[int, ...]]:
    from atoll.data.tokenizer import byte_tokenizer
    from atoll.models import build_model

    model = build_model(ModelConfig(**MODEL), vocab_size=len(byte_tokenizer()), sequence_length=SEQUENCE, seed=0)
    return [tuple(param.shape) for param in model.parameters()]


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(float(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kappa", type=float, nargs="+", default=[31, 390])
    parser.add_argument("--inner-steps", type=int, default=125)
    parser.add_argument("--stages", type=int, default=1, help="of each island: a pipeline of so many processes")
    parser.add_argument(
        "--rows", nargs="+", default=[row.name for row in ROWS], help="allreduce first; speed-up is of the last"
    )
    options = parser.parse_args()
    if why := missing():
        raise SystemExit(f"hosts cannot be made here: {why}")
    shapes = _shapes()
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    saving = compression(shapes)
    print(f"{numel / 1e6:.2f} M parameters, rank {RANK} + int4 sends {saving:.1f} times fewer bytes", flush=True)
    lines = []
    with tempfile.TemporaryDirectory() as made, Hosts(ISLANDS, rate_mbit=10_000) as hosts:
        folder = Path(made)
        for kappa in options.kappa:
            lines.append(_table(hosts, folder / f"kappa-{kappa:g}", kappa, numel, saving, options))
    for line in lines:
        print(json.dumps(line))


def _table(hosts: Hosts, folder: Path, kappa: float, numel: int, saving: float, options: argparse.Namespace) -> dict:
    inner_steps, pace = options.inner_steps, Pace(options.stages)
    payload_mbit = ring_factor(len(ISLANDS)) * numel * 32 / (kappa * pace.step_s) / 1e6
    for name in ISLANDS:
        hosts.set_rate(name, payload_mbit / PAYLOAD_SHARE)
    print(
        f"\nκ = {kappa:g}: {payload_mbit:.2f} Mbit/s of payload, H = {inner_steps}, {pace.step_s:g} s a step",
        flush=True,
    )
    print(f"{'':16}{'measured tok/s':>16}{'predicted':>12}{'ratio':>8}{'speed-up':>10}", flush=True)
    foretold = predicted(pace, kappa, inner_steps=inner_steps, compression=saving)
    base, rows = foretold["allreduce"], {}  # speed-up is over what was measured, where it was
    for row in (row for row in ROWS if row.name in options.rows):
        rows[row.name] = {"measured_tok_s": None, "predicted_tok_s": round(foretold[row.name], 3)}
        if row.name == "allreduce" and pace.stages > 1:
            print(f"{row.name:16}{'–':>16}{base:12,.1f}", flush=True)
            continue
        measured = train(hosts, folder / row.name, row, inner_steps=inner_steps, pace=pace)
        base = measured if row.name == "allreduce" else base
        rows[row.name]["measured_tok_s"] = round(measured, 3)
        ratio, speed_up = measured / foretold[row.name], measured / base
        print(f"{row.name:16}{measured:16,.1f}{foretold[row.name]:12,.1f}{ratio:8.3f}{speed_up:9.1f}x", flush=True)
    best = rows[options.rows[-1]]["measured_tok_s"]
    return {"kappa": kappa, "rows": rows, "speedup": best and round(best / base, 1)}


if __name__ == "__main__":
    main()
