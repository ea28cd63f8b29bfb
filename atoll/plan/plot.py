"""The picture of a plan: share of the time computed against bandwidth, a line a method, the user's link marked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from atoll.plan.estimate import Estimate, utilisation_curve
from atoll.plan.plan import Plan
from atoll.plan.units import format_bandwidth, format_count, format_rate, format_seconds

INK, GREY, LIGHT = "#222222", "#5f5f5f", "#e4e4e4"
# Okabe and Ito's colours, told apart by every kind of colour vision.
COLOURS = {
    "allreduce": "#D55E00",
    "diloco": "#0072B2",
    "streaming": "#009E73",
    "delayed": "#56B4E9",
    "dilocox": "#CC79A7",
}
NAMES = {"allreduce": "data parallel", "diloco": "DiLoCo", "delayed": "one-round delay", "dilocox": "DiLoCoX"}
WIDTH_IN, HEIGHT_IN, DPI = 9.5, 5.2, 150
POINTS = 240


def plot_plan(plan: Plan, path: str | Path) -> None:
    """Write the picture of `plan` to `path`, in the format that its ending names."""
    draw_plan(plan).savefig(path, dpi=DPI)


def draw_plan(plan: Plan) -> Figure:
    """Utilisation of every method of `plan` from a thousandth of the link to what the hungriest needs."""
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), facecolor="white")
    axes = figure.add_axes((0.09, 0.125, 0.64, 0.68))
    speeds = _span(plan)
    for name, found in plan.methods.items():
        shares = utilisation_curve(found.method, found.workload, found.network, speeds)
        axes.plot(speeds * 8, 100 * shares, color=COLOURS[name], linewidth=2.4, solid_capstyle="round")
    _mark_link(axes, plan)
    _name_methods(axes, plan)
    _finish(axes, speeds)
    figure.text(0.02, 0.94, _title(plan), fontsize=14, color=INK, weight="bold")
    figure.text(0.02, 0.885, _subtitle(plan), fontsize=11, color=GREY)
    return figure


def _span(plan: Plan) -> np.ndarray:
    """Bandwidths that show where every method rises, and the user's link with room around it."""
    link = plan.request.network.slowest_bytes_per_s
    reached = [speed for found in plan.methods.values() for speed in _rise(found)]
    if np.isfinite(link):
        reached += [link / 5, link * 5]
    low, high = min(reached, default=1e5), max(reached, default=1e10)
    return np.geomspace(max(low / 2, 1e2), min(high * 2, 1e14), POINTS)


def _rise(found: Estimate) -> list[float]:
    return [speed for target in (0.5, 0.95) if (speed := found.bandwidths[target]) is not None]


def _mark_link(axes: Axes, plan: Plan) -> None:
    """A line at the user's link, and a dot where each method stands on it."""
    link = plan.request.network.slowest_bytes_per_s
    if not np.isfinite(link):
        return
    axes.axvline(link * 8, color=INK, linewidth=1.1, linestyle=(0, (4, 3)), zorder=1)
    label = f"your link: {format_bandwidth(link)}"
    axes.annotate(label, (link * 8, 103), ha="center", va="bottom", fontsize=10, color=INK, annotation_clip=False)
    for name, found in plan.methods.items():
        here = utilisation_curve(found.method, found.workload, found.network, np.array([link]))
        axes.plot([link * 8], 100 * here, "o", color=COLOURS[name], markersize=8, markeredgecolor="white", zorder=4)


def _name_methods(axes: Axes, plan: Plan) -> None:
    """Names at the right, from the best on this link down, each with its share and rate."""
    order = sorted(plan.methods, key=lambda name: -plan.methods[name].utilisation)
    axes.text(1.03, 0.985, "On your link", transform=axes.transAxes, fontsize=11, weight="bold", color=INK, va="top")
    for place, name in enumerate(order):
        found = plan.methods[name]
        top = 0.9 - place * 0.165
        axes.text(
            *(1.03, top, f"{NAMES.get(name, name)}, {_sends(found)}"),
            transform=axes.transAxes,
            fontsize=11,
            color=COLOURS[name],
            weight="bold",
            va="top",
        )
        rate = f"{100 * found.utilisation:.3g} %, {format_rate(found.tokens_per_s)} tokens/s"
        axes.text(1.03, top - 0.058, rate, transform=axes.transAxes, fontsize=10, color=GREY, va="top")


def _sends(found: Estimate) -> str:
    return "fp32" if found.method.coding.name == "identity" else found.method.coding.name


def _finish(axes: Axes, speeds: np.ndarray) -> None:
    axes.set_xscale("log")
    axes.set_xlim(speeds[0] * 8, speeds[-1] * 8)
    axes.set_ylim(0, 102)
    axes.set_xlabel("bandwidth of an island's link", fontsize=11, color=INK)
    axes.set_ylabel("time spent computing", fontsize=11, color=INK)
    axes.xaxis.set_major_locator(LogLocator(10, numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda bits, _: format_bandwidth(bits / 8)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0f} %"))
    axes.tick_params(labelsize=10, colors=INK, length=0)
    axes.grid(color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _title(plan: Plan) -> str:
    best = max(plan.methods, key=lambda name: plan.methods[name].utilisation)
    share = 100 * plan.methods[best].utilisation
    parallel = 100 * plan.methods["allreduce"].utilisation
    return f"{NAMES.get(best, best)} computes {share:.3g} % of the time; data parallel {parallel:.2g} %"


def _subtitle(plan: Plan) -> str:
    request = plan.request
    return (
        f"{format_count(plan.shape.num_parameters)} parameters, {request.network.num_islands} islands, "
        f"{format_seconds(request.workload.step_s)} a step, H {request.inner_steps}"
    )
