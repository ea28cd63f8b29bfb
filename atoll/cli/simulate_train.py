"""`atoll simulate --train RECIPE`: real gradients of a small model, and time that is simulated.

All replicas train in this process, one after the other; the same once more with data parallelism. What was trained is
exact; when it would have been on islands with the given link is simulated: losses by step become losses by time.

    metrics of the run   step 1, 2, 3, ... with losses; evaluations
    simulated time line  when step s was done, and when what it led to had landed
    data parallel        s · (T + U)
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from atoll.cli import plan as planning
from atoll.cli.flags import merge, settings_from
from atoll.cli.simulating import Asked, build_scenario
from atoll.errors import ConfigError
from atoll.plan.estimate import Method, estimate
from atoll.plan.recommend import OF_THE_METHOD
from atoll.plan.sim.outcome import Outcome
from atoll.plan.sim.scenario import Patience, Scenario
from atoll.plan.sim.tracks import COMPUTE, TRAIN
from atoll.plan.simulate import simulate
from atoll.plan.units import format_seconds
from atoll.train.config import TrainConfig, build_config
from atoll.train.folder import METRICS
from atoll.train.metrics import read_metrics

PARALLEL = "data-parallel"
WARM_UP_STEPS = 3  # that say little about how long a step takes
COLUMNS = ("method", "kind", "step", "simulated_s", "loss")
EVERYBODY = Patience(quorum=1.0, deadline_s=1e9, lost_after_s=1e9, adapt=False)  # no round goes on without an island
OF_THE_RUN = ("schedule", "compressor", "rank", "inner_steps", "fragments", "delay")


@dataclass(frozen=True)
class Curve:
    """Losses of one method. step_s: of an inner step. steps, times, losses: of evaluations; trained: of inner steps."""

    method: str
    step_s: float
    steps: NDArray[np.int64]
    times_s: NDArray[np.float64]
    losses: NDArray[np.float64]
    trained: list[tuple[int, float, float]]  # step, simulated seconds, loss: a mean over replicas

    def loss_at(self, time_s: float) -> float | None:
        """The newest evaluation by then; None before the first."""
        done = np.flatnonzero(self.times_s <= time_s)
        return float(self.losses[done[-1]]) if len(done) else None

    def time_of(self, loss: float) -> float | None:
        """When an evaluation was first this good; None if none was."""
        reached = np.flatnonzero(self.losses <= loss)
        return float(self.times_s[reached[0]]) if len(reached) else None


def train_simulated(options: planning.Options, asked: Asked, flags: Sequence[str]) -> None:
    """Train, simulate, and say how the loss falls over simulated time."""
    _refuse_faults(asked)
    folder = Path(asked.output_dir or f"runs/simulated-{Path(asked.train).stem}")
    settings = run_settings(options, asked, flags)
    configs = [
        _config(settings, folder / "run"),
        _config(parallel_settings(settings), folder / PARALLEL),
    ]
    events = [_train(config, quiet=options.json) for config in configs]
    step_s = planning.parse_seconds(options.step_time) if options.step_time else measured_step_s(events[0], configs[0])
    scenario = scenario_of(configs[0], replace(options, step_time=f"{step_s}s"), asked)
    curves = [simulated_curve(scenario, configs[0], events[0]), parallel_curve(scenario, events[1])]
    _write(folder, curves, options.plot)
    if options.json:
        print(json.dumps(as_json(curves), indent=2))
        return
    console = planning._console()
    console.print(results_table(curves))
    console.print(finding(curves), highlight=False)
    console.print(f"table: {folder / 'loss.csv'}   picture: {options.plot or folder / 'loss.png'}", highlight=False)


def run_settings(options: planning.Options, asked: Asked, flags: Sequence[str]) -> dict[str, Any]:
    """Those of the recipe, changed by the flags after -- and by what the simulation was told of the method."""
    settings = settings_from([asked.train, *flags])
    told = {"schedule": asked.schedule} | {name: getattr(options, name) for name in OF_THE_RUN[1:]}
    settings = merge(settings, {name: value for name, value in told.items() if value})
    if options.islands:
        settings["replicas"] = options.islands
    if settings.get("method", "diloco") != "diloco" or asked.schedule == PARALLEL:
        raise ConfigError("data parallelism is what --train compares with. Name a schedule of its own, as blocking.")
    if settings.get("replicas", 1) < 2:
        raise ConfigError("one island has nothing to send. Use --islands 2 or more.")
    return settings | {"method": "diloco"}


def parallel_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same model, batches and steps, with gradients averaged in full before every step."""
    kept = {name: value for name, value in settings.items() if name not in OF_THE_METHOD}
    return kept | {"method": PARALLEL}


def scenario_of(config: TrainConfig, options: planning.Options, asked: Asked) -> Scenario:
    """The run on its link: all islands, all rounds, no faults."""
    source = planning._of_settings(config.model_dump(exclude_none=True))
    told = replace(
        asked,
        schedule=config.schedule,
        rounds=-(-config.max_steps // config.inner_steps),
        hours=0.0,
    )
    taken = replace(
        options,
        model="",
        islands=config.replicas,
        inner_steps=config.inner_steps,
        fragments=config.fragments,
        delay=config.resolved_delay if config.schedule == "streaming" else 0,
        compressor=config.compressor,
        rank=config.rank,
        tokens_per_step=options.tokens_per_step or str(source.tokens_per_step),
    )
    scenario = build_scenario(taken, told, source=source)
    return replace(scenario, patience=EVERYBODY)


# --- when what happened


class StepTimes:
    """When island 0 had done how many steps, from its simulated time line."""

    def __init__(self, outcome: Outcome, num_steps: int) -> None:
        spans = [s for s in outcome.spans if s.site == 0 and s.lane == TRAIN and s.kind == COMPUTE]
        seconds = np.array([span.end_s - span.start_s for span in spans])
        steps = seconds / seconds.sum() * num_steps
        self._before = np.concatenate([[0.0], np.cumsum(steps)])
        self._starts = np.array([span.start_s for span in spans])
        self._ends = np.array([span.end_s for span in spans])
        self._last_s = outcome.simulated_s

    def done_s(self, step: int) -> float:
        """When step `step` was done, whatever had to land before it."""
        place = int(np.clip(np.searchsorted(self._before, step - 1e-6) - 1, 0, len(self._starts) - 1))
        share = (step - self._before[place]) / (self._before[place + 1] - self._before[place])
        return float(self._starts[place] + min(1.0, share) * (self._ends[place] - self._starts[place]))

    def landed_s(self, step: int) -> float:
        """When what landed after step `step` had landed: the next step begins."""
        place = int(np.searchsorted(self._before, step + 1e-6) - 1)
        if place >= len(self._starts):
            return max(self._last_s, self.done_s(step))
        return max(float(self._starts[place]), self.done_s(step))


def simulated_curve(scenario: Scenario, config: TrainConfig, events: Sequence[Mapping[str, Any]]) -> Curve:
    """Losses of the run over its simulated time."""
    found = simulate(scenario)
    rounds = scenario.num_rounds
    times = StepTimes(found.outcome, rounds * config.inner_steps)
    last_s = times.landed_s(config.max_steps)
    if config.resolved_delay or config.max_steps % config.inner_steps:
        last_s = times.done_s(config.max_steps) + found.estimate.sync_s  # what is in flight lands at the end

    def landed_s(step: int) -> float:
        return last_s if step == config.max_steps else times.landed_s(step)

    name = scenario.method.describe()
    evals = [(event["step"], landed_s(event["step"]), event["loss"]) for event in _of_kind(events, "eval")]
    trained = [(step, times.done_s(step), loss) for step, loss in _mean_losses(events)]
    return _curve(name, scenario.workload.step_s, evals, trained)


def parallel_curve(scenario: Scenario, events: Sequence[Mapping[str, Any]]) -> Curve:
    """Losses of data parallelism: every step waits for its gradients."""
    each_s = estimate(Method(PARALLEL, None), scenario.workload, scenario.network).round_s
    evals = [(event["step"], event["step"] * each_s, event["loss"]) for event in _of_kind(events, "eval")]
    trained = [(step, step * each_s, loss) for step, loss in _mean_losses(events)]
    return _curve("data parallel, fp32", scenario.workload.step_s, evals, trained)


def _curve(
    name: str, step_s: float, evals: Sequence[tuple[int, float, float]], trained: list[tuple[int, float, float]]
) -> Curve:
    steps, times_s, losses = zip(*evals, strict=True)
    return Curve(name, step_s, np.array(steps), np.array(times_s, dtype=float), np.array(losses, dtype=float), trained)


def measured_step_s(events: Sequence[Mapping[str, Any]], config: TrainConfig) -> float:
    """The median step of a replica on this machine, which trained alone at the time."""
    tokens = config.batch_size * config.gradient_accumulation_steps * config.sequence_length
    steps = [event for event in _of_kind(events, "step") if event["step"] > WARM_UP_STEPS] or list(
        _of_kind(events, "step")
    )
    return median(tokens / event["tokens_per_s"] for event in steps)


def _of_kind(events: Sequence[Mapping[str, Any]], kind: str) -> Iterator[Mapping[str, Any]]:
    return (event for event in events if event["event"] == kind)


def _mean_losses(events: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """The loss of every step, a mean over replicas."""
    losses: dict[int, list[float]] = {}
    for event in _of_kind(events, "step"):
        if event["loss"] is not None:
            losses.setdefault(event["step"], []).append(event["loss"])
    return [(step, sum(values) / len(values)) for step, values in sorted(losses.items())]


# --- training


def _refuse_faults(asked: Asked) -> None:
    given = [name for name in ("kill_rate", "stop_rate", "leave_rate", "join_rate") if getattr(asked, name) != "0"]
    given += [name for name in ("faults", "hours", "rounds", "window") if getattr(asked, name)]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise ConfigError(
            f"--train runs every round of its recipe with every island; {flag} is not for it. Leave it out, or "
            "simulate without --train. The length is --max-steps, after --."
        )


def _config(settings: Mapping[str, Any], folder: Path) -> TrainConfig:
    """Replicas in this process; a run that is there already is not trained again."""
    return build_config({**settings, "engine": "local", "resume": "auto", "output_dir": str(folder)})


def _train(config: TrainConfig, *, quiet: bool) -> list[dict[str, Any]]:
    from atoll.train.engine import run_local

    if not quiet:
        print(f"--- {config.method}, {config.replicas} replicas, {config.max_steps} steps: {config.output_dir}")
    else:
        print(f"training {config.output_dir}", file=sys.stderr, flush=True)
    run_local(config, quiet=quiet)
    return read_metrics(Path(config.output_dir) / METRICS)


# --- what is told


def as_json(curves: Sequence[Curve]) -> dict[str, Any]:
    """Losses and times as plain values."""
    ours, parallel = curves
    return {
        "step_s": ours.step_s,
        "methods": {
            name: {
                "method": curve.method,
                "final_loss": float(curve.losses[-1]),
                "simulated_s": float(curve.times_s[-1]),
                "evals": [
                    {"step": int(step), "simulated_s": float(time_s), "loss": float(loss)}
                    for step, time_s, loss in zip(curve.steps, curve.times_s, curve.losses, strict=True)
                ],
            }
            for name, curve in (("run", ours), (PARALLEL, parallel))
        },
        "data_parallel_loss_when_run_ends": parallel.loss_at(float(ours.times_s[-1])),
        "data_parallel_s_to_the_loss_of_run": parallel.time_of(float(ours.losses[-1])),
    }


def results_table(curves: Sequence[Curve]) -> Table:
    """How each ended."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("method")
    for name in ("steps", "held-out loss", "simulated time", "a step"):
        table.add_column(name, justify="right")
    for curve in curves:
        each_s = float(curve.times_s[-1]) / int(curve.steps[-1])
        table.add_row(
            curve.method,
            f"{int(curve.steps[-1]):,}",
            f"{curve.losses[-1]:.3f}",
            format_seconds(float(curve.times_s[-1])),
            format_seconds(each_s),
        )
    return table


def finding(curves: Sequence[Curve]) -> str:
    """Where data parallelism stands when the run is done."""
    ours, parallel = curves
    end_s, loss = float(ours.times_s[-1]), float(ours.losses[-1])
    then, reached_s = parallel.loss_at(end_s), parallel.time_of(loss)
    first = f"after {format_seconds(end_s)} the run is at {loss:.3f}, "
    first += f"data parallel at {then:.3f}" if then is not None else "data parallel before its first evaluation"
    if reached_s is None:
        return f"{first}; in its {int(parallel.steps[-1]):,} steps it does not get there."
    return f"{first}; it gets there after {format_seconds(reached_s)}, {reached_s / end_s:.1f} times as long."


def _write(folder: Path, curves: Sequence[Curve], plot: str) -> None:
    from atoll.plan.sim.loss_plot import plot_losses

    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for curve in curves:
        writer.writerows((curve.method, "train", step, f"{time_s:.6g}", loss) for step, time_s, loss in curve.trained)
        evals = zip(curve.steps, curve.times_s, curve.losses, strict=True)
        writer.writerows((curve.method, "eval", int(step), f"{time_s:.6g}", loss) for step, time_s, loss in evals)
    _write_text(folder / "loss.csv", text.getvalue())
    _write_text(folder / "simulated.json", json.dumps(as_json(curves), indent=2))
    lines = {
        curve.method: (curve.times_s, curve.losses, [(time_s, loss) for _, time_s, loss in curve.trained])
        for curve in curves
    }
    planning._written(plot or str(folder / "loss.png"), lambda path: plot_losses(lines, path, title=_title(curves)))


def _write_text(path: Path, text: str) -> None:
    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8")

    planning._written(str(path), write)


def _title(curves: Sequence[Curve]) -> str:
    ours, parallel = curves
    reached_s = parallel.time_of(float(ours.losses[-1]))
    end_s = float(ours.times_s[-1])
    if reached_s is None:
        return f"Data parallel does not reach {ours.losses[-1]:.3f} in as many steps"
    return f"Data parallel takes {reached_s / end_s:.1f} times as long to a held-out loss of {ours.losses[-1]:.3f}"
