"""The picture of a run that was trained: loss against simulated time, a line a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from atoll.plan.units import format_seconds

INK, GREY, LIGHT = "#222222", "#5f5f5f", "#e4e4e4"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito's
WIDTH_IN, HEIGHT_IN, DPI = 9.5, 5.0, 150
LOG_FROM = 4.0  # times that one method takes as long as another

Line = tuple[NDArray[np.float64], NDArray[np.float64], Sequence[tuple[float, float]]]


def plot_losses(lines: Mapping[str, Line], path: str | Path, *, title: str) -> None:
    """Write the picture. lines: by method, times and losses of evaluations, and (time, loss) of training steps."""
    draw_losses(lines, title=title).savefig(path, dpi=DPI)


def draw_losses(lines: Mapping[str, Line], *, title: str) -> Figure:
    """Evaluations as dots on a line; the training loss, smoothed, faint behind it."""
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), facecolor="white")
    axes = figure.add_axes((0.09, 0.125, 0.86, 0.74))
    ends = [float(times[-1]) for times, _, _ in lines.values()]
    if max(ends) > LOG_FROM * min(ends):
        axes.set_xscale("log")
    for (name, (times, losses, trained)), colour in zip(lines.items(), COLOURS, strict=False):
        steps = np.array([point[0] for point in trained])
        axes.plot(steps, _smoothed([point[1] for point in trained]), color=colour, linewidth=1, alpha=0.3)
        axes.plot(times, losses, "o-", color=colour, linewidth=2.2, markersize=5, label=name)
        axes.annotate(
            f"{losses[-1]:.3f} after {format_seconds(float(times[-1]))}",
            (times[-1], losses[-1]),
            xytext=(0, -14),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=9.5,
            color=colour,
        )
    low = min(float(losses.min()) for _, losses, _ in lines.values())
    high = max(float(losses.max()) for _, losses, _ in lines.values())
    first_s = min(float(times[0]) for times, _, _ in lines.values())
    axes.set_xlim(left=first_s / 2 if axes.get_xscale() == "log" else 0.0)
    axes.set_ylim(low - 0.18 * (high - low + 1e-9), high + 0.08 * (high - low + 1e-9))
    axes.set_xlabel("simulated time", fontsize=11, color=INK)
    axes.set_ylabel("loss, nats a token", fontsize=11, color=INK)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_seconds(max(0.0, seconds))))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda seconds, _: ""))
    axes.grid(color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", labelsize=10, colors=INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, fontsize=10, loc="upper right")
    figure.text(0.02, 0.93, title, fontsize=13, color=INK, weight="bold")
    return figure


def _smoothed(losses: Sequence[float]) -> NDArray[np.float64]:
    """A mean over a twentieth of the steps, shorter at the ends."""
    values = np.array(losses, dtype=float)
    width = max(1, len(values) // 20)
    kernel = np.ones(width)
    return np.asarray(np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same"))
