"""The table and the picture of `benchmarks/loss.py` from the runs that are there."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
NAMES = {
    "alone": "one replica",
    "diloco": "DiLoCo",
    "batch": "M-times-batch data parallel",
    "updates": "M-times updates",
}
COLOURS = {"alone": "#5f5f5f", "diloco": "#0072B2", "batch": "#D55E00", "updates": "#009E73"}


@dataclass(frozen=True)
class Cell:
    """Losses of one side at one place of the table, a value a seed; curves: (step, loss) of each seed."""

    losses: tuple[float, ...]
    curves: tuple[list[tuple[int, float]], ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.losses) if len(self.losses) > 1 else 0.0

    def mean_curve(self) -> list[tuple[int, float]]:
        """Steps, and the mean loss over seeds at each."""
        return [
            (points[0][0], statistics.mean(loss for _, loss in points)) for points in zip(*self.curves, strict=True)
        ]

    def __str__(self) -> str:
        return f"{math.exp(self.mean):.3f} ± {math.exp(self.mean) * self.deviation:.3f}"


Key = tuple[bool, int, int, str]  # pretrained, M, steps of a replica, side


def read_cells(settings: dict[str, dict]) -> dict[Key, Cell]:
    """The runs with the tuned `settings` of each side, by place in the table."""
    runs: dict[Key, dict[int, dict]] = defaultdict(dict)
    for path in sorted((RESULTS / "loss").glob("*.json")):
        run = json.loads(path.read_text())
        side = "diloco of 8" if run["method"] == "diloco" and run["replicas"] == 8 else run["method"]
        if any(run[key] != value for key, value in settings[side].items()):
            continue
        for key in places(run):
            runs[key][run["seed"]] = run
    return {key: cell_of([found[seed] for seed in sorted(found)]) for key, found in runs.items()}


def cell_of(runs: list[dict]) -> Cell:
    return Cell(tuple(run["loss"] for run in runs), tuple(run["curve"] for run in runs))


def places(run: dict) -> Iterable[Key]:
    """Where a run counts: one replica with k·S steps is "M-times updates" for M = k at S steps."""
    start, steps = run["pretrained"], run["steps"]
    if run["method"] != "alone":
        yield start, run["replicas"], steps, run["method"]
        return
    for replicas in (2, 4, 8):
        yield start, replicas, steps, "alone"
        if steps % replicas == 0:
            yield start, replicas, steps // replicas, "updates"


def rows(cells: dict[Key, Cell], lengths: Iterable[int]) -> list[str]:
    """Markdown rows of perplexities (a byte), the gap to data parallel, and the share of its gain that is reached."""
    table = []
    for start in (False, True):
        for replicas in (2, 4, 8):
            for steps in lengths:
                found = {side: cells.get((start, replicas, steps, side)) for side in NAMES}
                if found["diloco"] is None or found["batch"] is None or found["alone"] is None:
                    continue
                gap = math.exp(found["diloco"].mean - found["batch"].mean) - 1
                gain = found["alone"].mean - found["batch"].mean
                share = (found["alone"].mean - found["diloco"].mean) / gain
                shown = " | ".join(str(found[side] or "–") for side in NAMES)
                begin = "pretrained" if start else "scratch"
                seeds = min(len(found[side].losses) for side in ("alone", "diloco", "batch"))
                table.append(f"| {begin} | {replicas} | {steps} | {seeds} | {shown} | {gap:+.1%} | {share:.0%} |")
    return table


def batch_rows(settings: dict[str, dict], steps: int) -> list[str]:
    """The same for other batches of a replica, M = 4, one seed."""
    table = []
    for batch in (2, 4, 8):
        cells = read_cells({side: values | {"batch": batch} for side, values in settings.items()})
        found = [cells.get((False, 4, steps, side)) for side in ("alone", "diloco", "batch")]
        if None not in found:
            alone, diloco, parallel = (cell.losses[0] for cell in found if cell is not None)
            shown = " | ".join(f"{math.exp(loss):.3f}" for loss in (alone, diloco, parallel))
            share = (alone - diloco) / (alone - parallel)
            table.append(f"| {batch * 64} | {shown} | {math.exp(diloco - parallel) - 1:+.1%} | {share:.0%} |")
    return table


def write_table(settings: dict[str, dict], lengths: tuple[int, ...]) -> None:
    """benchmarks/results/loss.md and loss.png."""
    cells = read_cells(settings)
    head = (
        "| start | M | steps | seeds | "
        + " | ".join(NAMES.values())
        + " | DiLoCo against data parallel | share of its gain |\n"
        "|" + "---|" * 10
    )
    names = NAMES | {"diloco of 8": "DiLoCo, M = 8"}
    told = "\n".join(f"- {names[side]}: {json.dumps(values)}" for side, values in settings.items())
    text = f"Held-out perplexity a byte, mean ± standard deviation over seeds. Tuned settings:\n\n{told}\n\n{head}\n"
    (RESULTS / "loss.md").write_text(
        text
        + "\n".join(rows(cells, lengths))
        + f"\n\nOther batches of a replica, M = 4, {lengths[0]} steps, one seed:\n\n"
        + "| tokens a step | one replica | DiLoCo | M-times-batch data parallel | DiLoCo against it | share |\n"
        + "|---|---|---|---|---|---|\n"
        + "\n".join(batch_rows(settings, lengths[0]))
        + "\n"
    )
    draw(cells, lengths)
    print((RESULTS / "loss.md").read_text())


def draw(cells: dict[Key, Cell], lengths: tuple[int, ...]) -> None:
    """A panel for each M: final loss against the length of the run above, the course of the longest run below."""
    figure, (panels, courses) = plt.subplots(2, 3, figsize=(13, 9), sharey="row", layout="constrained")
    for course, replicas in zip(courses, (2, 4, 8), strict=True):
        draw_course(course, cells, replicas, lengths[-1])
    courses[0].set_ylabel("held-out loss, nats a byte", fontsize=12)
    for panel, replicas in zip(panels, (2, 4, 8), strict=True):
        for side, name in NAMES.items():
            draw_side(panel, [(s, cells[k]) for s in lengths if (k := (False, replicas, s, side)) in cells], side, name)
        panel.set_title(f"M = {replicas} replicas", fontsize=13)
        panel.set_xscale("log", base=2)
        panel.set_xticks(lengths, [f"{steps:,}" for steps in lengths])
        panel.minorticks_off()
        panel.set_xlabel("length of the run, steps of a replica", fontsize=12)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss at the end, nats a byte", fontsize=12)
    panels[0].legend(fontsize=11, frameon=False)
    figure.savefig(RESULTS / "loss.png", dpi=130)


def draw_course(panel: Axes, cells: dict[Key, Cell], replicas: int, steps: int) -> None:
    """Loss against the share of the run that is done: M-times updates makes M steps where the others make one."""
    for side in NAMES:
        cell = cells.get((False, replicas, steps, side))
        if cell is not None:
            curve = cell.mean_curve()
            shares = [100 * step / curve[-1][0] for step, _ in curve]
            panel.plot(shares, [loss for _, loss in curve], color=COLOURS[side], marker="o")
    panel.set_title(f"the course of {steps:,} steps", fontsize=13)
    panel.set_xlabel("% of the run", fontsize=12)
    panel.grid(alpha=0.3)


def draw_side(panel: Axes, points: list[tuple[int, Cell]], side: str, name: str) -> None:
    panel.errorbar(
        [steps for steps, _ in points],
        [cell.mean for _, cell in points],
        yerr=[cell.deviation for _, cell in points],
        color=COLOURS[side],
        marker="o",
        capsize=3,
        label=name,
    )
