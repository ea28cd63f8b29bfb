"""The picture of a simulation: the whole run as a rate, and some rounds of it as a time line, an island a row.

The upper half of a row is what training does, the lower one what goes over the link beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MultipleLocator

from atoll.plan.sim import tracks as kinds
from atoll.plan.sim.outcome import Happening, rate_over_time
from atoll.plan.sim.tracks import Span
from atoll.plan.simulate import Simulation
from atoll.plan.units import format_seconds

INK, GREY, LIGHT = "#222222", "#5f5f5f", "#e4e4e4"
# Okabe and Ito's colours, told apart by every kind of colour vision.
COLOURS = {
    kinds.COMPUTE: "#0072B2",
    kinds.WAIT: "#D9D9D9",
    kinds.LAND: "#009E73",
    kinds.FETCH: "#56B4E9",
    kinds.FROZEN: "#F0E442",
    kinds.DOWN: "#FFFFFF",
    kinds.ENCODE: "#CC79A7",
    kinds.SEND: "#E69F00",
}
NAMES = {
    kinds.COMPUTE: "compute",
    kinds.WAIT: "wait",
    kinds.LAND: "outer step",
    kinds.ENCODE: "encode",
    kinds.SEND: "send",
    kinds.FETCH: "fetch the state",
    kinds.FROZEN: "frozen",
    kinds.DOWN: "away",
}
RED = "#D55E00"
MARKS = {
    "kill": ("X", RED, "killed"),
    "stop": ("s", "#F0E442", "stopped"),
    "leave": ("v", GREY, "left"),
    "join": ("^", "#009E73", "joined"),
    "slow": ("d", "#CC79A7", "slowed"),
}
ROWS = 24
WIDTH_IN, DPI, BINS = 11.0, 150, 160
MOST_TICKS = 9
TICK_STEPS = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 21600, 43200, 86400),
)


def plot_simulation(found: Simulation, path: str | Path, window: tuple[float, float] | None = None) -> None:
    """Write the picture to `path`, in the format that its ending names."""
    draw_simulation(found, window or found.window).savefig(path, dpi=DPI)


def draw_simulation(found: Simulation, window: tuple[float, float]) -> Figure:
    """window: of the time line, seconds."""
    rows = shown_sites(found, window)
    height = 3.4 + 0.36 * max(3, len(rows))
    figure = Figure(figsize=(WIDTH_IN, height), facecolor="white")
    inch = 1 / height
    line_height = (0.36 * max(3, len(rows))) * inch
    lines = figure.add_axes((0.085, 0.85 * inch, 0.895, line_height))
    whole = figure.add_axes((0.085, 0.85 * inch + line_height + 0.75 * inch, 0.895, 0.75 * inch))
    _draw_rate(whole, found, window)
    _draw_rows(lines, found, rows, window)
    _draw_legend(figure, found, rows, window)
    figure.text(0.015, 1 - 0.28 * inch, _title(found), fontsize=14, color=INK, weight="bold")
    figure.text(0.015, 1 - 0.52 * inch, _subtitle(found), fontsize=10.5, color=GREY)
    return figure


def shown_sites(found: Simulation, window: tuple[float, float]) -> list[int]:
    """Islands that have a row: those to which something happens in the window, then the first ones."""
    known = {span.site for span in found.outcome.window(*window)}
    struck = [event.site for event in _in_window(found, window) if event.what in MARKS and event.site in known]
    order = list(dict.fromkeys([*struck, *sorted(known)]))
    return sorted(order[:ROWS])


def _in_window(found: Simulation, window: tuple[float, float]) -> list[Happening]:
    return [event for event in found.outcome.happened if window[0] <= event.time_s <= window[1]]


def _draw_rate(axes: Axes, found: Simulation, window: tuple[float, float]) -> None:
    """Committed tokens a second over the whole run, over what it is without faults."""
    outcome = found.outcome
    bins = max(1, min(BINS, len(outcome.commits) // 8))
    full = found.fault_free.tokens_per_s or 1.0
    rates = np.array(rate_over_time(outcome.commits, outcome.simulated_s, bins)) / full
    edges = np.linspace(0, outcome.simulated_s, bins + 1)
    axes.stairs(100 * rates, edges, fill=True, color=COLOURS[kinds.COMPUTE], alpha=0.85)
    axes.axhline(100, color=GREY, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.axvspan(*window, color="#000000", alpha=0.12, linewidth=0)
    for event in outcome.happened:
        if event.what in ("kill", "stop"):
            axes.plot([event.time_s], [-6], marker=MARKS[event.what][0], color=RED, markersize=4, clip_on=False)
    axes.set_xlim(0, outcome.simulated_s)
    axes.set_ylim(0, max(110.0, 105 * float(rates.max(initial=1.0))))
    axes.set_yticks([0, 100])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0f} %"))
    axes.set_title("committed tokens over the whole run, against no faults", fontsize=10, color=GREY, loc="left", pad=4)
    _plain(axes)


def _draw_rows(axes: Axes, found: Simulation, rows: Sequence[int], window: tuple[float, float]) -> None:
    place = {site: len(rows) - 1 - number for number, site in enumerate(rows)}
    for (site, lane, kind), spans in _by_kind(found.outcome.window(*window)).items():
        if site in place:
            low, height = (-0.40, 0.28) if lane == kinds.WIRE else (-0.10, 0.5)
            ranges = [(span.start_s, span.end_s - span.start_s) for span in spans]
            edge = {"edgecolor": GREY, "linewidth": 0.4, "hatch": "////"} if kind == kinds.DOWN else {"linewidth": 0}
            axes.broken_barh(ranges, (place[site] + low, height), facecolor=COLOURS[kind], **edge)
    for event in _in_window(found, window):
        if event.what == "void":
            axes.axvline(event.time_s, color=RED, linewidth=1.0, linestyle=(0, (1, 1.5)))
        elif event.what in MARKS and event.site in place:
            marker, colour, _ = MARKS[event.what]
            axes.plot(
                *([event.time_s], [place[event.site] + 0.15], marker),
                color=colour,
                markersize=9,
                markeredgecolor=INK,
                markeredgewidth=0.8,
                zorder=5,
            )
    axes.set_xlim(*window)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_yticks([place[site] for site in rows], [f"island {site}" for site in rows])
    axes.set_title("some rounds of it: training above, its link below", fontsize=10, color=GREY, loc="left", pad=4)
    _plain(axes)


def _by_kind(spans: Sequence[Span]) -> dict[tuple[int, str, str], list[Span]]:
    grouped: dict[tuple[int, str, str], list[Span]] = defaultdict(list)
    for span in spans:
        grouped[span.site, span.lane, span.kind].append(span)
    return grouped


def _draw_legend(figure: Figure, found: Simulation, rows: Sequence[int], window: tuple[float, float]) -> None:
    there = {span.kind for span in found.outcome.window(*window) if span.site in rows}
    handles: list[Patch | Line2D] = [
        Patch(facecolor=COLOURS[kind], edgecolor=GREY, linewidth=0.5, label=name, hatch="////" * (kind == kinds.DOWN))
        for kind, name in NAMES.items()
        if kind in there
    ]
    events = {event.what for event in _in_window(found, window)}
    handles += [
        Line2D([], [], marker=marker, color=colour, markeredgecolor=INK, linestyle="", markersize=7, label=name)
        for what, (marker, colour, name) in MARKS.items()
        if what in events
    ]
    if "void" in events:
        handles.append(Line2D([], [], color=RED, linestyle=(0, (1, 1.5)), label="averaging void"))
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.07, 0.0), ncols=6, fontsize=9, frameon=False)


def _plain(axes: Axes) -> None:
    start_s, end_s = axes.get_xlim()
    step = next((step for step in TICK_STEPS if (end_s - start_s) / step <= MOST_TICKS), (end_s - start_s) / MOST_TICKS)
    axes.xaxis.set_major_locator(MultipleLocator(step))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: clock_text(seconds, step)))
    axes.tick_params(labelsize=9, colors=INK, length=0, pad=6)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT)


def clock_text(seconds: float, step: float = 1.0) -> str:
    """A time as on a clock, in tenths where ticks are that close.

    >>> clock_text(75), clock_text(3725), clock_text(7.5, 0.5), clock_text(90000)
    ('1:15', '1:02:05', '0:07.5', '25:00:00')
    """
    minutes, rest = divmod(max(0.0, seconds), 60)
    hours, minutes = divmod(int(minutes), 60)
    second = f"{rest:04.1f}" if step < 1 else f"{rest:02.0f}"
    return f"{hours}:{minutes:02d}:{second}" if hours else f"{minutes}:{second}"


def _title(found: Simulation) -> str:
    outcome = found.outcome
    if outcome is found.fault_free:
        return f"Computes {100 * outcome.utilisation:.3g} % of the time, {outcome.rounds:,.5g} rounds"
    return (
        f"{100 * found.goodput:.3g} % of the fault-free tokens are committed; islands compute "
        f"{100 * outcome.utilisation:.3g} % of the time"
    )


def _subtitle(found: Simulation) -> str:
    scenario = found.scenario
    return (
        f"{scenario.network.describe()}, {scenario.method.describe()}, "
        f"{format_seconds(scenario.workload.step_s)} a step, {format_seconds(found.outcome.simulated_s)} simulated"
    )
