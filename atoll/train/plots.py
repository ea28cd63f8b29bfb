"""The pictures of a report: held-out loss against steps, and against bytes sent."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path as MatplotlibPath
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox

from atoll.train.console import format_factor
from atoll.train.summary import (
    Point,
    RunSummary,
    Series,
    _senders,
    bytes_finding,
    loss_finding,
    series_of,
    time_finding,
)

INK, GREY, LIGHT = "#222222", "#5f5f5f", "#e4e4e4"
# Okabe and Ito's colours, told apart by every kind of colour vision. A role has one and the same in every picture.
ROLE_COLOURS = {"diloco": "#0072B2", "data-parallel": "#D55E00", "alone": "#5f5f5f"}
OTHER_COLOURS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
ROLE_MARKERS = {"diloco": "o", "data-parallel": "s", "alone": "D"}
UNITS_OF_TIME = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))
DPI = 150
TITLE_SIZE, LABEL_SIZE, TICK_SIZE = 14, 12, 11
MARGIN_IN = 0.22  # between the axes and the names in the right margin


def colours_of(runs: Mapping[str, RunSummary]) -> dict[str, str]:
    """The role's colour for the first run of a role, one of the others for those after it."""
    spare = itertools.cycle(OTHER_COLOURS)
    colours: dict[str, str] = {}
    for name, run in runs.items():
        own = ROLE_COLOURS.get(run.role)
        colours[name] = next(spare) if own is None or own in colours.values() else own
    return colours


def plot_loss_by_steps(runs: Mapping[str, RunSummary], *, width_in: float = 8.5) -> Figure:
    """Loss against inner steps, a line a run, named where it ends. Needs at least one run with a loss."""
    return _plot(runs, lambda point: point.step, width_in=width_in, title=loss_finding(runs), label="inner steps")


def plot_loss_by_time(runs: Mapping[str, RunSummary], *, width_in: float = 8.5) -> Figure:
    """Loss against the time of training and syncing, a line a run. Needs at least one run with both."""
    longest = max(points[-1].seconds for points in series_of(runs).points.values())
    unit, name = next((unit, name) for unit, name in UNITS_OF_TIME if longest >= 3 * unit or unit == 1)
    label = f"time of training and syncing ({name})"
    return _plot(runs, lambda point: point.seconds / unit, width_in=width_in, title=time_finding(runs), label=label)


def _plot(
    runs: Mapping[str, RunSummary], x: Callable[[Point], float], *, width_in: float, title: str, label: str
) -> Figure:
    """A line a run, named where it ends."""
    series = series_of(runs)
    figure, axes = _frame(width_in, title=title, kind=series.kind)
    colours = colours_of(runs)
    for name, points in series.points.items():
        _line(axes, [(x(p), p.loss) for p in points], colours[name], _marker(runs[name], points))
    last = max(x(points[-1]) for points in series.points.values())
    axes.set_xlim(0, 1.012 * last or 1)
    axes.set_xlabel(label, fontsize=LABEL_SIZE)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=last >= 5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    _limit_losses(axes, list(series.points.values()), room_below_in=0.3)
    ends = [_End(name, x(points[-1]), points[-1].loss, colours[name]) for name, points in series.points.items()]
    _name_ends(figure, axes, ends)
    return figure


def plot_loss_by_bytes(runs: Mapping[str, RunSummary], *, width_in: float = 8.5) -> Figure:
    """Loss against megabytes sent by one replica, log scale. A run that sends nothing is a level line at its last loss.

    Needs at least one run that sent something and has a loss after it.
    """
    series = series_of(runs)
    figure, axes = _frame(width_in, title=bytes_finding(runs), kind=series.kind)
    colours = colours_of(runs)
    sent = {name: _reached(points) for name, points in series.points.items()}
    ends = []
    for name, points in sent.items():
        last = points[-1]
        if last.sent_bytes:
            _line(axes, [(p.sent_bytes / 1e6, p.loss) for p in points], colours[name], _marker(runs[name], points))
            ends.append(_End(name, last.sent_bytes / 1e6, last.loss, colours[name]))
        else:
            axes.axhline(last.loss, color=colours[name], linewidth=1.8, linestyle=(0, (5, 3)))
            ends.append(_End(name, math.inf, last.loss, colours[name], note=", sends nothing"))
    _limit_megabytes(axes, [p.sent_bytes / 1e6 for points in sent.values() for p in points if p.sent_bytes])
    _limit_losses(axes, list(sent.values()), room_below_in=0.8)
    _name_ends(figure, axes, ends)
    _mark_saving(axes, runs, series)
    return figure


def plot_adapted(name: str, run: RunSummary, *, width_in: float = 8.5) -> Figure:
    """Rank, inner steps, and sync and exposed time of each round of a run that adapted, one above the other."""
    figure = Figure(figsize=(width_in, 7.5), dpi=DPI, facecolor="white", layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    numbers = range(1, len(run.adapted) + 1)
    seen = [event["observed"] or {} for event in run.adapted]
    lines: list[list[tuple[str, list[float]]]] = [
        [
            ("rank in use", [event["rank"] for event in run.adapted]),
            ("effective rank", [each.get("effective_rank", math.nan) for each in seen]),
        ],
        [("inner steps", [event["inner_steps"] for event in run.adapted])],
        [
            ("sync", [each.get("sync_s", math.nan) for each in seen]),
            ("exposed", [event["exposed_s"] for event in run.adapted]),
        ],
    ]
    for axes, drawn, label in zip(panels, lines, ("rank", "inner steps", "seconds"), strict=True):
        for (title, values), colour in zip(drawn, ROLE_COLOURS.values(), strict=False):
            axes.plot(numbers, values, color=colour, linewidth=1.8, marker="o", markersize=3, label=title)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(label, fontsize=LABEL_SIZE)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color=LIGHT, linewidth=0.8)
        axes.legend(frameon=False, fontsize=TICK_SIZE)
    panels[-1].set_xlabel("round", fontsize=LABEL_SIZE)
    panels[-1].xaxis.set_major_locator(MaxNLocator(8, integer=True))
    figure.suptitle(f"{name}: rank and round length as decided", size=TITLE_SIZE, weight="bold", color=INK)
    return figure


def _reached(points: Sequence[Point]) -> list[Point]:
    """The last loss at each number of bytes: steps between two rounds send nothing. Without any: the last point."""
    last_at = {point.sent_bytes: point for point in points}
    return [point for sent, point in last_at.items() if sent] or [points[-1]]


def _frame(width_in: float, *, title: str, kind: str) -> tuple[Figure, Axes]:
    """An empty picture under its title, with the margins that all pictures share."""
    height_in = max(4.2, 0.58 * width_in)
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
    lines = _balanced(title, int(8.2 * width_in))
    figure.text(0.02, 0.98, "\n".join(lines), size=TITLE_SIZE, weight="bold", color=INK, va="top", parse_math=False)
    axes = figure.add_subplot()
    top = 1 - (0.3 + 0.24 * len(lines)) / height_in
    figure.subplots_adjust(left=0.85 / width_in, bottom=0.62 / height_in, top=top)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)
    axes.grid(True, color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=TICK_SIZE, colors=INK, length=3)
    axes.set_ylabel(f"{kind} (lower is better)", fontsize=LABEL_SIZE)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    return figure, axes


def _balanced(text: str, width: int) -> list[str]:
    """`text` in as few lines as `width` characters allow, all of much the same length.

    >>> _balanced("four words and one orphan", 21)
    ['four words and', 'one orphan']
    """
    lines = textwrap.wrap(text, width)
    for narrower in range(width, 12, -1):
        candidate = textwrap.wrap(text, narrower)
        if len(candidate) > len(lines):
            break
        lines = candidate
    return lines


def _line(axes: Axes, points: Sequence[tuple[float, float]], colour: str, marker: str) -> None:
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, color=colour, linewidth=2.2, marker=marker, markersize=5, solid_capstyle="round")


def _marker(run: RunSummary, points: Sequence[object]) -> str:
    """Markers tell lines apart without colour, where there are few enough points for them to be seen."""
    return ROLE_MARKERS.get(run.role, "^") if len(points) <= 40 else ""


def _limit_losses(axes: Axes, lines: Sequence[Sequence[Point]], *, room_below_in: float) -> None:
    """Leave out the fall of the first tenth, which would press all differences into the bottom of the picture.

    Never less than a twentieth of the loss from bottom to top: noise must not look like a difference.
    room_below_in: inches kept free under the lowest loss.
    """
    lowest = min(point.loss for points in lines for point in points)
    highest = max(loss for points in lines for loss in _after_first_tenth(points))
    span = max(highest - lowest, 0.05 * lowest, 1e-3)
    below = room_below_in * DPI / axes.bbox.height
    above = 0.05
    nats = span / (1 - below - above)
    axes.set_ylim(lowest - below * nats, lowest + (1 - below) * nats)


def _after_first_tenth(points: Sequence[Point]) -> list[float]:
    shown = [point.loss for point in points if point.step >= points[-1].step / 10]
    return shown if len(points) > 4 else [point.loss for point in points]


def _limit_megabytes(axes: Axes, megabytes: Sequence[float]) -> None:
    left, right = min(megabytes), max(megabytes)
    narrow = right < 2 * left
    axes.set_xscale("log")
    axes.set_xlim(left / (4 if narrow else 1.3), right * (4 if narrow else 1.1))
    axes.set_xlabel("sent by one replica (MB, log scale)", fontsize=LABEL_SIZE)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if right < 30 * left else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _mark_saving(axes: Axes, runs: Mapping[str, RunSummary], series: Series) -> None:
    """An arrow along the bottom, from all that data parallel sends to all that the subject sends."""
    pair = _senders(runs, series)
    if pair is None or pair[1] is None or runs[pair[1]].sent_bytes < 2 * runs[pair[0]].sent_bytes:
        return
    less, more = runs[pair[0]].sent_bytes / 1e6, runs[pair[1]].sent_bytes / 1e6
    across = axes.get_xaxis_transform()
    height = 0.14 * DPI / axes.bbox.height
    arrow = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=(less, height), xytext=(more, height), xycoords=across, textcoords=across, arrowprops=arrow)
    axes.annotate(
        f"{format_factor(more / less)} less",
        xy=(math.sqrt(less * more), height),
        xycoords=across,
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        color=GREY,
        size=LABEL_SIZE,
        weight="bold",
    )


# --- the names of lines, where the lines end ---


@dataclass(frozen=True)
class _End:
    """The end of a run's line. x: infinity for a line without an end. note: said after the loss."""

    name: str
    x: float
    loss: float
    colour: str
    note: str = ""


def _name_ends(figure: Figure, axes: Axes, ends: Sequence[_End]) -> None:
    """Name each line beside its end where that place is empty, else in the right margin at the height of its end."""
    labels = [_label(axes, end) for end in ends]
    widest = max(_size(label)[0] for label in labels)
    figure.subplots_adjust(right=1 - (widest / DPI + MARGIN_IN + 0.1) / figure.get_figwidth())
    _move_apart(axes, [label for label in labels if not _put_beside_end(axes, label)])


def _label(axes: Axes, end: _End) -> Annotation:
    """In the margin, joined to the end of its line."""
    right = axes.get_xlim()[1]
    return axes.annotate(
        "\n".join([*textwrap.wrap(end.name, 22), f"{end.loss:.3f}{end.note}"]),
        xy=(min(end.x, right), end.loss),
        xytext=(1, end.loss),
        textcoords=axes.get_yaxis_transform(),
        color=end.colour,
        size=LABEL_SIZE,
        va="center",
        parse_math=False,
        arrowprops={"arrowstyle": "-", "color": end.colour, "linewidth": 0.8, "linestyle": ":", "relpos": (0, 0.5)},
    )


def _size(label: Annotation) -> tuple[float, float]:
    """Width and height of the text in pixels, without its arrow."""
    extent = Text.get_window_extent(label)
    return extent.width, extent.height


def _put_beside_end(axes: Axes, label: Annotation) -> bool:
    """Move a label to the right of its line's end: level with it, below or above, where it touches no line."""
    width, height = _size(label)
    x, y = axes.transData.transform(label.xy)
    gap = 0.08 * DPI
    for middle in (y, y - height / 2 - gap / 2, y + height / 2 + gap / 2):
        box = Bbox.from_bounds(x + gap, middle - height / 2, width + gap, height)
        if box.x1 < axes.bbox.x1 and not any(_path(line).intersects_bbox(box, filled=False) for line in axes.lines):
            _put(axes, label, box.x0, middle)
            if label.arrow_patch is not None:
                label.arrow_patch.set_visible(False)
            return True
    return False


def _put(axes: Axes, label: Annotation, x: float, y: float) -> None:
    """At a place given in pixels."""
    label.set_position((axes.transAxes.inverted().transform((x, y))[0], axes.transData.inverted().transform((x, y))[1]))


def _path(line: Line2D) -> MatplotlibPath:
    path: MatplotlibPath = line.get_transform().transform_path(line.get_path())
    return path


def _move_apart(axes: Axes, labels: Sequence[Annotation]) -> None:
    """Into the margin, touching labels pushed apart, each by half of what they overlap; pixels, y up."""
    middles = [axes.transData.transform(label.xy)[1] for label in labels]
    heights = [1.1 * _size(label)[1] for label in labels]
    order = sorted(range(len(labels)), key=middles.__getitem__)
    for _ in range(100):
        for lowest in order[:1]:
            middles[lowest] = max(middles[lowest], axes.bbox.y0 + heights[lowest] / 2)
        for below, above in itertools.pairwise(order):
            overlap = (heights[below] + heights[above]) / 2 - (middles[above] - middles[below])
            if overlap > 0:
                middles[below] -= overlap / 2
                middles[above] += overlap / 2
    for label, middle in zip(labels, middles, strict=True):
        _put(axes, label, axes.bbox.x1 + MARGIN_IN * DPI, middle)
