"""Loss at equal tokens under delay and compression: what hiding the sync, and sending less, costs.

    python benchmarks/delay_loss.py map        outer rate × momentum for no delay and each adopt rule, one seed
    python benchmarks/delay_loss.py share      how much of the progress in flight `carry` should keep
    python benchmarks/delay_loss.py short      delays shorter than a round, one seed
    python benchmarks/delay_loss.py rows       every row at its best outer setting of the map, three seeds
    python benchmarks/delay_loss.py table      results/delay_loss.md and .png from what has run

0.94 M parameters, two replicas, 100 rounds of 8 inner steps, 128 tokens a replica and step; loss of the anchor on
held-out text. As benchmarks/loss.py it keeps every run as one JSON file (results/delay_loss), goes on where it was
stopped, and several processes share the work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from atoll.comm.local import LocalGroup
from atoll.data import TextData, load_data
from atoll.train.build import build_run
from atoll.train.config import TrainConfig, build_config
from atoll.train.loop import train
from atoll.train.metrics import read_metrics
from atoll.train.stopping import LocalStopper, watch_signals

HERE = Path(__file__).parent / "results"
RESULTS = HERE / "delay_loss"
REPLICAS, INNER_STEPS, STEPS = 2, 8, 800
LEARNING_RATE = 1e-3
SEEDS = (0, 1, 2)
MAP = [(lr, momentum) for momentum in (0.0, 0.3, 0.6) for lr in (0.4, 0.7, 1.0)]


@dataclass(frozen=True)
class Point:
    """One training run. side: all-reduce ("batch"), one replica ("alone"), or rounds ("rounds")."""

    row: str
    side: str = "rounds"
    outer_lr: float = 0.9
    outer_momentum: float = 0.1
    seed: int = 0
    settings: tuple[tuple[str, object], ...] = ()

    @property
    def name(self) -> str:
        outer = f"-o{self.outer_lr:g}-{self.outer_momentum:g}" if self.side == "rounds" else ""
        return f"{self.row}{outer}-seed{self.seed}".replace(" ", "_").replace("/", "by")


def delayed(adopt: str, **more: object) -> tuple[tuple[str, object], ...]:
    return tuple({"schedule": "delayed", "adopt": adopt, **more}.items())


LOW_RANK = {"compressor": "lowrank+int4", "error_feedback": True}
# row -> settings, and whose outer setting of the map it takes
ROWS: dict[str, tuple[tuple[tuple[str, object], ...], str]] = {
    "blocking": ((), "blocking"),
    "delay, reset": (delayed("replace"), "delay, reset"),
    "delay, carry all": (delayed("carry", carry_share=1.0), "delay, carry all"),
    "delay, carry 1/M": (delayed("carry", carry_share=0.5), "delay, carry 1/M"),
    "delay, eager": (delayed("eager"), "delay, eager"),
    "delay 1 of 8, carry all": (delayed("carry", carry_share=1.0, delay=1), "blocking"),
    "delay 1 of 8, carry 1/M": (delayed("carry", carry_share=0.5, delay=1), "blocking"),
    "delay 2 of 8, carry all": (delayed("carry", carry_share=1.0, delay=2), "blocking"),
    "delay 2 of 8, carry 1/M": (delayed("carry", carry_share=0.5, delay=2), "blocking"),
    "delay 4 of 8, carry 1/M": (delayed("carry", carry_share=0.5, delay=4), "blocking"),
    "delay 4 of 8, eager": (delayed("eager", delay=4), "blocking"),
    "streaming": (tuple({"schedule": "streaming", "fragments": 2, "alpha": 0.5}.items()), "streaming"),
    "int8": ((("compressor", "int8"),), "blocking"),
    "int4": ((("compressor", "int4"),), "blocking"),
    "int4 + feedback": ((("compressor", "int4"), ("error_feedback", True)), "blocking"),
    "fp4": ((("compressor", "fp4"),), "blocking"),
    "2-bit + feedback": ((("compressor", "stat2"),), "blocking"),
    "2-bit, no feedback": ((("compressor", "stat2"), ("error_feedback", False)), "blocking"),
    "top-k + feedback": ((("compressor", "topk+stat2"),), "blocking"),
    "rank 64 + int4": (tuple({**LOW_RANK, "rank": 64}.items()), "blocking"),
    "rank 32 + int4": (tuple({**LOW_RANK, "rank": 32}.items()), "blocking"),
    "rank 64 + int4, no feedback": (tuple({**LOW_RANK, "rank": 64, "error_feedback": False}.items()), "blocking"),
    "DiLoCoX": (delayed("carry", carry_share=0.5, rank=64, **LOW_RANK), "delay, carry 1/M"),
    "DiLoCoX, delay 1 of 8": (delayed("carry", carry_share=0.5, delay=1, rank=64, **LOW_RANK), "blocking"),
    "DiLoCoX, delay 2 of 8": (delayed("carry", carry_share=0.5, delay=2, rank=64, **LOW_RANK), "blocking"),
    "DiLoCoX, eager": (delayed("eager", rank=64, **LOW_RANK), "delay, eager"),
    "delay after 96 steps alone, carry 1/M": (delayed("carry", carry_share=0.5, pretrain_steps=96), "delay, carry 1/M"),
    "Muon, blocking": ((("optimizer", "muon"),), "blocking"),
    "Muon, delay, reset": (delayed("replace", optimizer="muon"), "delay, reset"),
    "Muon, delay, carry 1/M": (delayed("carry", carry_share=0.5, optimizer="muon"), "delay, carry 1/M"),
    "Muon, DiLoCoX": (
        delayed("carry", carry_share=0.5, optimizer="muon", rank=64, **LOW_RANK),
        "delay, carry 1/M",
    ),
    "adaptive": (delayed("carry", carry_share=0.5, rank=64, adaptive=True, **LOW_RANK), "delay, carry 1/M"),
    "DiLoCoX, reset": (delayed("replace", rank=64, **LOW_RANK), "delay, reset"),
}
MAPPED = ("blocking", "delay, carry 1/M", "delay, eager", "delay, reset", "delay, carry all", "streaming")
SHARES = (0.25, 0.4, 0.5, 0.6, 0.75)


def config_of(point: Point, output_dir: str) -> TrainConfig:
    """The settings of one run."""
    rounds = point.side == "rounds"
    return build_config(
        {
            "method": "diloco" if rounds else "data-parallel",
            "replicas": REPLICAS if rounds else 1,
            "batch_size": 2 * (REPLICAS if point.side == "batch" else 1),
            "max_steps": STEPS,
            "inner_steps": INNER_STEPS if rounds else 1,
            "learning_rate": LEARNING_RATE / (2 if point.side == "alone" else 1),
            "warmup_steps": 50,
            "min_lr_ratio": 0.1,
            "outer_lr": point.outer_lr,
            "outer_momentum": point.outer_momentum,
            "sequence_length": 64,
            "seed": point.seed,
            "eval_steps": STEPS // 5,
            "eval_sequences": 384,
            "engine": "local",
            "threads": 1,
            "output_dir": output_dir,
            **dict(point.settings),
        }
    )


class Runner:
    """Runs points that no process has run yet."""

    def __init__(self) -> None:
        self._data: dict[tuple[int, int], TextData] = {}

    def run(self, point: Point) -> dict | None:
        """The result of `point`, or None while another process is at it."""
        path = RESULTS / f"{point.name}.json"
        if path.exists():
            return json.loads(path.read_text())
        RESULTS.mkdir(parents=True, exist_ok=True)
        try:
            claim = os.open(path.with_suffix(".claim"), os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return None
        try:
            result = self._train(point)
            path.write_text(json.dumps(result) + "\n")
        finally:
            os.close(claim)
            path.with_suffix(".claim").unlink()
        print(f"{point.name}: {result['loss']:.4f} in {result['seconds']:.0f} s", flush=True)
        return result

    def _train(self, point: Point) -> dict:
        with tempfile.TemporaryDirectory() as folder, watch_signals() as signals:
            began = time.perf_counter()
            config = config_of(point, str(Path(folder) / "run"))
            run = build_run(
                config,
                LocalGroup(config.replicas).endpoints(),
                stopper=LocalStopper(signals),
                signals=signals,
                num_processes=1,
                quiet=True,
                data=self._load(config),
            )
            train(run)
            run.close()
            events = read_metrics(run.run_dir / "metrics.jsonl")
        evals = [event for event in events if event["event"] == "eval"]
        sent = [event["payload_bytes"] for event in events if event["event"] == "round"]
        return {
            **asdict(point),
            "loss": evals[-1]["loss"],
            "curve": [(event["step"], event["loss"]) for event in evals],
            "bytes_a_round": statistics.fmean(sent) if sent else 0.0,
            "seconds": time.perf_counter() - began,
        }

    def _load(self, config: TrainConfig) -> TextData:
        key = (config.replicas, config.seed)
        if key not in self._data:
            self._data[key] = load_data(config.data, sequence_length=64, num_replicas=config.replicas, seed=config.seed)
        return self._data[key]


def map_points() -> Iterator[Point]:
    for lr, momentum in MAP:
        for row in MAPPED:
            yield Point(row, outer_lr=lr, outer_momentum=momentum, settings=ROWS[row][0])


def share_points() -> Iterator[Point]:
    lr, momentum = best_outer("delay, carry 1/M")
    for share in SHARES:
        settings = delayed("carry", carry_share=share)
        yield Point(f"delay, carry {share:g}", outer_lr=lr, outer_momentum=momentum, settings=settings)


def short_points() -> Iterator[Point]:
    lr, momentum = best_outer("blocking")
    for row, (settings, _) in ROWS.items():
        if " of 8" in row or row == "DiLoCoX, eager":
            yield Point(row, outer_lr=lr, outer_momentum=momentum, settings=settings)


def best_outer(row: str) -> tuple[float, float]:
    """The outer setting of the map with the lowest loss of `row`; ties and gaps go to the first."""
    found = []
    for point in map_points():
        path = RESULTS / f"{point.name}.json"
        if point.row == row and path.exists():
            found.append((json.loads(path.read_text())["loss"], point))
    point = min(found, key=lambda item: item[0])[1]
    return point.outer_lr, point.outer_momentum


def row_points() -> Iterator[Point]:
    for seed in SEEDS:
        yield Point("all-reduce", "batch", seed=seed)
        yield Point("one replica", "alone", seed=seed)
        for row, (settings, mapped) in ROWS.items():
            lr, momentum = best_outer(mapped)
            yield Point(row, outer_lr=lr, outer_momentum=momentum, seed=seed, settings=settings)


STAGES = {"map": map_points, "share": share_points, "short": short_points, "rows": row_points}


def write_table() -> None:
    """The rows as Markdown, and the courses of the runs as a picture."""
    losses: dict[str, list[dict]] = {}
    for point in row_points():
        path = RESULTS / f"{point.name}.json"
        if path.exists():
            losses.setdefault(point.row, []).append(json.loads(path.read_text()))
    blocking = {result["seed"]: result["loss"] for result in losses["blocking"]}
    lines = [
        "| | outer | bytes a round | seeds | loss | ± | perplexity against blocking |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, results in losses.items():
        values = [result["loss"] for result in results]
        mean = statistics.fmean(values)
        spread = statistics.stdev(values) if len(values) > 1 else float("nan")
        outer = f"{results[0]['outer_lr']:g}/{results[0]['outer_momentum']:g}" if results[0]["side"] == "rounds" else ""
        apart = [result["loss"] - blocking[result["seed"]] for result in results if result["seed"] in blocking]
        change = 100 * math.expm1(statistics.fmean(apart))
        sent = f"{results[0]['bytes_a_round'] / 1e3:,.0f} kB" if results[0]["bytes_a_round"] else ""
        lines.append(
            f"| {row} | {outer} | {sent} | {len(values)} | {mean:.4f} | {spread:.4f} | {change:+.1f} % |".replace(
                "nan", ""
            )
        )
    lines += ["", "Outer rate/momentum, one seed:", "", "| | " + " | ".join(f"{a:g}/{b:g}" for a, b in MAP) + " |"]
    lines.append("|---" * (len(MAP) + 1) + "|")
    for row in MAPPED:
        cells = [_map_cell(row, lr, momentum) for lr, momentum in MAP]
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    (HERE / "delay_loss.md").write_text("\n".join(lines) + "\n")
    _draw(losses)
    print("\n".join(lines))


def _map_cell(row: str, lr: float, momentum: float) -> str:
    path = RESULTS / f"{Point(row, outer_lr=lr, outer_momentum=momentum).name}.json"
    return f"{json.loads(path.read_text())['loss']:.3f}" if path.exists() else ""


def _draw(losses: dict[str, list[dict]]) -> None:
    shown = ["one replica", "delay, reset", "delay, carry 1/M", "DiLoCoX", "DiLoCoX, delay 2 of 8", "streaming"]
    shown += ["blocking", "all-reduce"]
    figure, axes = plt.subplots(figsize=(7, 4.2))
    for row in (row for row in shown if row in losses):
        steps = [step for step, _ in losses[row][0]["curve"]]
        curves = zip(*([loss for _, loss in result["curve"]] for result in losses[row]), strict=True)
        axes.plot(steps, [statistics.fmean(values) for values in curves], marker="o", markersize=3, label=row)
    axes.set(xlabel="inner steps of a replica", ylabel="held-out loss (nats a byte)", title="What delay and codes cost")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(HERE / "delay_loss.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=[*STAGES, "table"])
    stage = parser.parse_args().stage
    torch.set_num_threads(1)
    if stage == "table":
        write_table()
        return
    runner = Runner()
    waiting = list(STAGES[stage]())
    while waiting:
        waiting = [point for point in waiting if runner.run(replace(point)) is None]
        time.sleep(1)


if __name__ == "__main__":
    main()
