"""Loss at equal tokens a replica: one replica, DiLoCo, M-times-batch data parallel, M-times updates.

    python benchmarks/loss.py tune       find inner and outer settings for each side (M=4, shortest length, one seed)
    python benchmarks/loss.py final      3 seeds, M = 2, 4, 8, lengths x1, x2, x4, from scratch and pretrained
    python benchmarks/loss.py batch      how the gap closes with the batch of a replica (M=4, shortest length)
    python benchmarks/loss.py inner-steps, quickstart       the inner steps of a round; the settings of that recipe
    python benchmarks/loss.py table      results/loss.md, results/loss.png from what has run

Each run is kept as one JSON file in benchmarks/results/loss, and is not run again: a benchmark that was stopped goes on
where it was, and several of these processes share the work. M-times-batch data parallel is one replica with an M-fold
batch, which is the same arithmetic; M-times updates is one replica with M-fold steps.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from loss_table import write_table

from atoll.comm.local import LocalGroup
from atoll.data import TextData, load_data
from atoll.train.build import build_run
from atoll.train.config import TrainConfig, build_config
from atoll.train.loop import train
from atoll.train.metrics import read_metrics
from atoll.train.stopping import LocalStopper, watch_signals

RESULTS = Path(__file__).parent / "results" / "loss"
STEPS = 400  # the shortest length: 100 rounds of 4
INNER_STEPS = 4
BATCH = 2  # sequences of 64 tokens a replica takes a step
SEEDS = (0, 1, 2)
LENGTHS = (1, 2, 4)
REPLICAS = (2, 4, 8)
PRETRAIN_STEPS = 400
PRETRAIN_SEED = 100
LEARNING_RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
OUTER = ((1.0, 0.0), (0.7, 0.6), (0.9, 0.3), (0.6, 0.8))
OUTER_FINE = ((1.2, 0.0), (0.9, 0.1))  # around the best of those, at the best inner rate
OUTER_OF_EIGHT = ((0.9, 0.1), (1.2, 0.2))  # eight replicas: does a longer outer step do better?


@dataclass(frozen=True)
class Point:
    """One training run. method: alone, diloco or batch (M-times-batch data parallel)."""

    method: str
    replicas: int
    steps: int
    seed: int
    learning_rate: float
    outer_lr: float = 0.0
    outer_momentum: float = 0.0
    inner_steps: int = 0
    batch: int = BATCH
    pretrained: bool = False

    @property
    def name(self) -> str:
        start = "pre" if self.pretrained else "raw"
        outer = f"-o{self.outer_lr}-{self.outer_momentum}-H{self.inner_steps}" if self.method == "diloco" else ""
        size = f"M{self.replicas}-s{self.steps}-b{self.batch}"
        return f"{self.method}-{size}-{start}-lr{self.learning_rate}{outer}-seed{self.seed}"


def settings(point: Point, output_dir: str, init_from: str) -> TrainConfig:
    """The settings of one run."""
    diloco = point.method == "diloco"
    return build_config(
        {
            "method": "diloco" if diloco else "data-parallel",
            "replicas": point.replicas if diloco else 1,
            "batch_size": point.batch * (point.replicas if point.method == "batch" else 1),
            "max_steps": point.steps,
            "inner_steps": point.inner_steps or 1,
            "learning_rate": point.learning_rate,
            "warmup_steps": min(50, point.steps // 8),
            "min_lr_ratio": 0.1,
            "outer_lr": point.outer_lr or 1.0,
            "outer_momentum": point.outer_momentum,
            "sequence_length": 64,
            "seed": point.seed,
            "eval_steps": max(point.steps // 5, 1),
            "eval_sequences": 384,
            "engine": "local",
            "threads": 1,
            "init_from": init_from,
            "output_dir": output_dir,
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
        init_from = str(pretrained_model(self, point.seed)) if point.pretrained else ""
        with tempfile.TemporaryDirectory() as folder, watch_signals() as signals:
            began = time.perf_counter()
            config = settings(point, str(Path(folder) / "run"), init_from)
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
            evals = [e for e in read_metrics(run.run_dir / "metrics.jsonl") if e["event"] == "eval"]
            if point.seed >= PRETRAIN_SEED:
                keep_model(run.run_dir, point)
        return {
            **asdict(point),
            "loss": evals[-1]["loss"],
            "curve": [(e["step"], e["loss"]) for e in evals],
            "seconds": time.perf_counter() - began,
        }

    def _load(self, config: TrainConfig) -> TextData:
        key = (config.replicas, config.seed)
        if key not in self._data:
            self._data = {
                key: load_data(config.data, sequence_length=64, num_replicas=config.replicas, seed=config.seed)
            }
        return self._data[key]


def pretrained_model(runner: Runner, seed: int) -> Path:
    """A model that one replica trained for PRETRAIN_STEPS steps on another order of the data, as a folder."""
    point = replace(best("alone"), steps=PRETRAIN_STEPS, seed=PRETRAIN_SEED + seed)
    if not model_folder(point).exists():
        (RESULTS / f"{point.name}.json").unlink(missing_ok=True)
    while not model_folder(point).exists():
        runner.run(point)
        time.sleep(1)
    return model_folder(point)


def model_folder(point: Point) -> Path:
    return Path(tempfile.gettempdir()) / "atoll-loss-benchmark" / point.name


def keep_model(run_dir: Path, point: Point) -> None:
    """Copy the model of a finished run to where `pretrained_model` looks."""
    draft = model_folder(point).with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(run_dir / (run_dir / "latest").read_text().strip(), draft)
    draft.rename(model_folder(point))


def tuning_points() -> Iterator[Point]:
    for rate in LEARNING_RATES:
        yield Point("alone", 1, STEPS, 0, rate)
        yield Point("batch", 4, STEPS, 0, rate)
    for rate in LEARNING_RATES:
        for lr, momentum in OUTER:
            yield Point("diloco", 4, STEPS, 0, rate, lr, momentum, INNER_STEPS)
    for lr, momentum in OUTER_FINE:
        yield Point("diloco", 4, STEPS, 0, 1e-3, lr, momentum, INNER_STEPS)
    for lr, momentum in OUTER_OF_EIGHT:
        yield Point("diloco", 8, STEPS, 0, 1e-3, lr, momentum, INNER_STEPS)


def best(method: str, *, eight: bool = False) -> Point:
    """The tuned settings of a side: the lowest loss among its tuning runs; DiLoCo of eight replicas has its own."""
    points = [p for p in tuning_points() if p.method == method and (p.replicas == 8) == eight]
    done = [(json.loads((RESULTS / f"{p.name}.json").read_text())["loss"], p) for p in points]
    return min(done, key=lambda item: item[0])[1]


def tuned(point: Point) -> dict[str, float]:
    """What tuning settled for a side."""
    keys = ["learning_rate", "batch"]
    if point.method == "diloco":
        keys += ["outer_lr", "outer_momentum", "inner_steps"]
    return {key: getattr(point, key) for key in keys}


def final_points() -> Iterator[Point]:
    alone, batch, diloco = best("alone"), best("batch"), best("diloco")
    for length in LENGTHS:
        for seed in SEEDS:
            for pretrained in (False, True):
                yield replace(alone, steps=STEPS * length, seed=seed, pretrained=pretrained)
                for replicas in REPLICAS:
                    shape = {"replicas": replicas, "steps": STEPS * length, "seed": seed, "pretrained": pretrained}
                    yield replace(diloco if replicas < 8 else best("diloco", eight=True), **shape)
                    yield replace(batch, **shape)
                    yield replace(alone, **shape | {"replicas": 1, "steps": STEPS * length * replicas})


def cheapest_first(points: Iterable[Point]) -> list[Point]:
    return sorted(points, key=lambda point: point.replicas * point.steps * point.batch)


def batch_points() -> Iterator[Point]:
    for factor in (1, 2, 4):
        for chosen in (best("alone"), best("batch"), best("diloco")):
            yield replace(chosen, batch=BATCH * factor)


def h_points() -> Iterator[Point]:
    for inner_steps in (2, 4, 8, 16, 32):
        yield replace(best("diloco"), steps=STEPS * 4, inner_steps=inner_steps)


def quickstart_points() -> Iterator[Point]:
    for lr, momentum in ((0.9, 0.1), (0.9, 0.3), (0.7, 0.6)):
        yield Point("diloco", 4, 500, 0, 1e-3, lr, momentum, 20, batch=4)
    yield Point("diloco", 4, 500, 0, 2e-3, 0.9, 0.1, 20, batch=4)


STAGES = {
    "tune": tuning_points,
    "final": final_points,
    "batch": batch_points,
    "inner-steps": h_points,
    "quickstart": quickstart_points,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=[*STAGES, "table"])
    stage = parser.parse_args().stage
    torch.set_num_threads(1)
    runner = Runner()
    if stage == "table":
        sides = {side: tuned(best(side)) for side in ("alone", "batch", "diloco")}
        sides["diloco of 8"] = tuned(best("diloco", eight=True))
        write_table(sides, tuple(STEPS * n for n in LENGTHS))
        return
    waiting = cheapest_first(STAGES[stage]())
    while waiting:
        waiting = [point for point in waiting if runner.run(point) is None]
        time.sleep(1)


if __name__ == "__main__":
    main()
