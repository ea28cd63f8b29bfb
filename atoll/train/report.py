"""report.md and its plots: what one run, or several runs side by side, came to.

    summarise      a run folder (config.toml, metrics.jsonl) as numbers
    write_report   report.md and plots/*.png from the summaries of one or several runs

Every sentence and every title is computed from the numbers: a run that loses says that it loses.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import textwrap
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path as MatplotlibPath
from matplotlib.text import Annotation, Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox

from atoll.errors import ConfigError, StorageError
from atoll.train.config import flatten
from atoll.train.console import format_bytes, format_duration, format_factor
from atoll.train.metrics import perplexity, read_metrics

LEVEL = 0.005  # two losses nearer than this, in nats a token, are called the same


@dataclass(frozen=True)
class Point:
    """A loss (nats a token) after `step` inner steps and after one replica had sent `sent_bytes`."""

    step: int
    loss: float
    sent_bytes: int


@dataclass(frozen=True)
class RunSummary:
    """What a run came to.

    settings: of config.toml, with dotted keys. steps: the last inner step seen.
    curve: training loss, a mean over the replicas, smoothed. evals: the anchor's loss on held-out text.
    sent_bytes: for parameters, by replica 0; sent_bytes_all: by all replicas. tokens: trained on, by all replicas.
    wall_s: of training and syncs, without start-up, evaluations and saves. utilisation: the share of it that computed.
    digest: of the last anchor. Where no round was recorded utilisation is None and digest empty.
    """

    settings: Mapping[str, Any]
    steps: int
    rounds: int
    curve: Sequence[Point]
    evals: Sequence[Point]
    sent_bytes: int
    sent_bytes_all: int
    tokens: int
    wall_s: float
    utilisation: float | None
    digest: str
    num_refused: int = 0
    fault_lines: Sequence[str] = field(default=())

    @property
    def replicas(self) -> int:
        return int(self.settings.get("replicas", 1))

    @property
    def role(self) -> str:
        """What the run stands for in a comparison: "alone", "data-parallel" or "diloco"."""
        return "alone" if self.replicas == 1 else str(self.settings.get("method", "diloco"))


# --- from a run folder ---


def summarise(run_dir: str | Path) -> RunSummary:
    """Read a run folder. Raises `ConfigError` where its config.toml or metrics.jsonl is missing or broken."""
    run_dir = Path(run_dir)
    settings = _read_settings(run_dir / "config.toml")
    events: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in read_metrics(run_dir / "metrics.jsonl"):
        events[event["event"]].append(event)
    return _summary(
        settings, steps=events["step"], rounds=events["round"], evals=events["eval"], faults=events["fault"]
    )


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        return flatten(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). Give the folder of a run.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}. Give the folder of a run.") from None


Events = Sequence[Mapping[str, Any]]


def _summary(settings: dict[str, Any], *, steps: Events, rounds: Events, evals: Events, faults: Events) -> RunSummary:
    sent = _Sent(rounds)
    inner_s, exposed_s = _total(rounds, "inner_s"), _total(rounds, "exposed_s")
    busy_s = inner_s + exposed_s
    return RunSummary(
        settings=settings,
        steps=max((event["step"] for event in itertools.chain(steps, rounds, evals)), default=0),
        rounds=max((event["round"] for event in rounds), default=0),
        curve=_smooth([Point(step, loss, sent.until(step)) for step, loss in _mean_losses(steps)]),
        evals=[Point(e["step"], e["loss"], sent.until(e["step"])) for e in evals if e["loss"] is not None],
        sent_bytes=sum(event["payload_bytes"] for event in rounds),
        sent_bytes_all=sum(event["payload_bytes"] * event["replicas"] for event in rounds),
        tokens=sum({event["replica"]: event["tokens"] for event in steps}.values()),
        wall_s=busy_s or _seconds_of_steps(steps),
        utilisation=inner_s / busy_s if busy_s else None,
        digest=rounds[-1]["anchor_digest"] if rounds else "",
        num_refused=sum(len(event["refused"]) for event in rounds),
        fault_lines=[_fault_line(event) for event in faults],
    )


class _Sent:
    """How much one replica had sent by a step."""

    def __init__(self, rounds: Events) -> None:
        by_step = sorted((event["step"], event["payload_bytes"]) for event in rounds)
        self._steps = [step for step, _ in by_step]
        self._totals = [0, *itertools.accumulate(sent for _, sent in by_step)]

    def until(self, step: int) -> int:
        total: int = self._totals[bisect.bisect_right(self._steps, step)]
        return total


def _total(events: Events, key: str) -> float:
    return math.fsum(event[key] or 0.0 for event in events)


def _mean_losses(steps: Events) -> list[tuple[int, float]]:
    """The mean over the replicas of the training loss, at each step where one was finite."""
    losses: dict[int, list[float]] = defaultdict(list)
    for event in steps:
        if event["loss"] is not None:
            losses[event["step"]].append(event["loss"])
    return [(step, math.fsum(values) / len(values)) for step, values in sorted(losses.items())]


def _smooth(points: Sequence[Point]) -> list[Point]:
    """The mean of each point and those before it, over a window of a twentieth of the curve."""
    window = max(1, len(points) // 20)
    smoothed = []
    for last, point in enumerate(points, start=1):
        seen = points[max(0, last - window) : last]
        smoothed.append(Point(point.step, math.fsum(p.loss for p in seen) / len(seen), point.sent_bytes))
    return smoothed


def _seconds_of_steps(steps: Events) -> float:
    """Time of the steps of replica 0, for a run without rounds."""
    seconds, tokens = 0.0, 0
    for event in steps:
        if event["replica"] == 0 and event["tokens_per_s"]:
            seconds += (event["tokens"] - tokens) / event["tokens_per_s"]
            tokens = event["tokens"]
    return seconds


def _fault_line(event: Mapping[str, Any]) -> str:
    who = "" if event.get("replica") is None else f", replica {event['replica']}"
    detail = f": {event['detail']}" if event.get("detail") else ""
    return f"step {event['step']}{who}: {event['what']}{detail}"


# --- what the numbers say ---


@dataclass(frozen=True)
class Series:
    """One loss of each run, one kind for all: held-out where every run was evaluated, else smoothed training loss."""

    kind: str
    points: Mapping[str, Sequence[Point]]

    @property
    def last_step(self) -> int:
        """The last step that every run reached: where they are compared."""
        return min((points[-1].step for points in self.points.values()), default=0)

    def loss(self, name: str) -> float:
        """Of a run at `last_step`, on the line between the points on both sides."""
        points, step = self.points[name], self.last_step
        for left, right in itertools.pairwise(points):
            if left.step <= step < right.step:
                return left.loss + (right.loss - left.loss) * (step - left.step) / (right.step - left.step)
        return points[-1].loss


def series_of(runs: Mapping[str, RunSummary]) -> Series:
    """The series of those runs that have one."""
    if all(run.evals for run in runs.values()):
        return Series("held-out loss", {name: run.evals for name, run in runs.items()})
    return Series("training loss", {name: run.curve for name, run in runs.items() if run.curve})


def compare(loss: float, other: float) -> str:
    """
    >>> compare(2.31, 2.45), compare(2.31, 2.28), compare(2.31, 2.312)
    ('0.140 lower than', '0.030 higher than', 'level with')
    """
    if abs(loss - other) < LEVEL:
        return "level with"
    return f"{abs(loss - other):.3f} {'lower' if loss < other else 'higher'} than"


def loss_finding(runs: Mapping[str, RunSummary]) -> str:
    """One sentence on the losses; empty where no loss was recorded."""
    series = series_of(runs)
    if not series.points:
        return ""
    subject = _subject(runs, list(series.points))
    others = [name for name in series.points if name != subject]
    if not others:
        return _course(series, subject)
    baselines = [name for name in others if runs[name].role in ("alone", "data-parallel")]
    named = (baselines or others)[:2]
    against = " and ".join(f"{compare(series.loss(subject), series.loss(other))} {other}" for other in named)
    return f"{subject} ends with a loss {against} after {series.last_step:,} steps"


def bytes_finding(runs: Mapping[str, RunSummary]) -> str:
    """One sentence on what was sent for which loss; empty where nothing was sent or no loss was recorded."""
    series = series_of(runs)
    pair = _senders(runs, series)
    if pair is None:
        return ""
    subject, baseline = pair
    if baseline is None:
        sent = format_bytes(runs[subject].sent_bytes)
        return f"{subject}: {series.kind} {series.loss(subject):.3f} after each replica sent {sent}"
    amount = _amount(runs[subject].sent_bytes, runs[baseline].sent_bytes)
    return f"{subject} sends {amount} {baseline}, {_price(series, subject, baseline)}"


def _senders(runs: Mapping[str, RunSummary], series: Series) -> tuple[str, str | None] | None:
    """Among the runs that sent something: the subject, and the data parallel run it is measured against."""
    names = [name for name in series.points if any(point.sent_bytes for point in series.points[name])]
    if not names:
        return None
    subject = _subject(runs, names)
    return subject, next((name for name in names if runs[name].role == "data-parallel" and name != subject), None)


def _subject(runs: Mapping[str, RunSummary], names: Sequence[str]) -> str:
    """The run that the report is about: the first of several replicas that is not data parallel, else the first."""
    return next((name for name in names if runs[name].role not in ("alone", "data-parallel")), names[0])


def _course(series: Series, name: str) -> str:
    first, last = series.points[name][0], series.points[name][-1]
    what = series.kind.capitalize()
    if first.step == last.step:
        return f"{what} {last.loss:.3f} after {last.step:,} steps"
    verb = "stayed at" if abs(last.loss - first.loss) < LEVEL else "fell to" if last.loss < first.loss else "rose to"
    return f"{what} {verb} {last.loss:.3f} in {last.step:,} steps, from {first.loss:.3f} at step {first.step:,}"


def _amount(sent: int, baseline: int) -> str:
    ratio = baseline / sent
    if 1 / 1.05 < ratio < 1.05:
        return "as much as"
    return f"{format_factor(max(ratio, 1 / ratio))} {'less' if ratio > 1 else 'more'} than"


def _price(series: Series, subject: str, baseline: str) -> str:
    loss, other = series.loss(subject), series.loss(baseline)
    if abs(loss - other) < LEVEL:
        return f"for the same loss ({loss:.3f})"
    return f"for a loss {abs(loss - other):.3f} {'lower' if loss < other else 'higher'}"


# --- plots ---

INK, GREY, LIGHT = "#222222", "#5f5f5f", "#e4e4e4"
# Okabe and Ito's colours, told apart by every kind of colour vision. A role has one and the same in every picture.
ROLE_COLOURS = {"diloco": "#0072B2", "data-parallel": "#D55E00", "alone": "#5f5f5f"}
OTHER_COLOURS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
ROLE_MARKERS = {"diloco": "o", "data-parallel": "s", "alone": "D"}
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
    series = series_of(runs)
    figure, axes = _frame(width_in, title=loss_finding(runs), kind=series.kind)
    colours = colours_of(runs)
    for name, points in series.points.items():
        _line(axes, [(p.step, p.loss) for p in points], colours[name], _marker(runs[name], points))
    last = max(points[-1].step for points in series.points.values())
    axes.set_xlim(0, 1.012 * last or 1)
    axes.set_xlabel("inner steps", fontsize=LABEL_SIZE)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    _limit_losses(axes, list(series.points.values()), room_below_in=0.3)
    ends = [_End(name, points[-1].step, points[-1].loss, colours[name]) for name, points in series.points.items()]
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


# --- report.md ---


def write_report(
    runs: Mapping[str, RunSummary],
    output_dir: str | Path,
    *,
    command: str = "",
    sample: str = "",
    prompt: str = "",
    sample_of: str = "",
    title: str = "",
) -> Path:
    """Write OUTPUT/report.md and OUTPUT/plots/*.png; returns the path of report.md.

    runs: by the name a reader knows them by ("DiLoCo, 4 replicas"), in the order they are shown.
    command: makes the same report again. sample: text generated after `prompt` by the run named `sample_of`.
    Raises `StorageError` where the disk refuses.
    """
    assert runs, "a report needs at least one run"
    output_dir = Path(output_dir)
    sections = [
        f"# {title or ' / '.join(runs)}",
        *(f"**{finding}.**" for finding in (loss_finding(runs), bytes_finding(runs)) if finding),
        _results_table(runs),
        _READING,
    ]
    try:
        sections += _write_plots(runs, output_dir / "plots")
        sections += [_settings_table(runs), _digests(runs), *_faults(runs)]
        sections += [*_sample_section(sample, prompt, sample_of), *_command_section(command)]
        path = output_dir / "report.md"
        path.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{output_dir}: the report cannot be written ({error.strerror}).") from None
    return path


_READING = (
    "Loss is of the anchor on held-out text, in nats a token; perplexity is its exponential. Bytes are those sent for "
    "parameters or gradients. Time is training and syncing, without start-up, evaluation and saving; computing is the "
    "share of it in which replica 0 did not wait for others. One run of each: a difference smaller than that between "
    "two seeds says nothing."
)


def _write_plots(runs: Mapping[str, RunSummary], folder: Path) -> list[str]:
    """Draw what there is something to draw of; returns the lines that show the pictures."""
    series = series_of(runs)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    if series.points:
        plot_loss_by_steps(runs).savefig(folder / "loss_by_steps.png")
        pictures.append(f"![{series.kind} against inner steps](plots/loss_by_steps.png)")
    if _senders(runs, series) is not None:
        plot_loss_by_bytes(runs).savefig(folder / "loss_by_bytes.png")
        pictures.append(f"![{series.kind} against megabytes sent by one replica](plots/loss_by_bytes.png)")
    return pictures


def _results_table(runs: Mapping[str, RunSummary]) -> str:
    head = [
        "",
        "steps",
        "rounds",
        "held-out loss",
        "perplexity",
        "sent by one replica",
        "sent by all",
        "tokens",
        "time",
        "computing",
    ]
    return _table(head, [[name, *_results(run)] for name, run in runs.items()])


def _results(run: RunSummary) -> list[str]:
    loss = run.evals[-1].loss if run.evals else None
    return [
        f"{run.steps:,}",
        f"{run.rounds:,}",
        "not evaluated" if loss is None else f"{loss:.3f}",
        "" if loss is None else f"{perplexity(loss):,.2f}",
        format_bytes(run.sent_bytes),
        format_bytes(run.sent_bytes_all),
        f"{run.tokens:,}",
        format_duration(run.wall_s),
        "" if run.utilisation is None else f"{100 * run.utilisation:.1f} %",
    ]


def _settings_table(runs: Mapping[str, RunSummary]) -> str:
    """Settings that differ between the runs first; then, in a fold, those that all share."""
    keys = [
        key for key in dict.fromkeys(key for run in runs.values() for key in run.settings) if key not in OF_THE_PLACE
    ]
    shared = [key for key in keys if len({_text(run.settings.get(key, "")) for run in runs.values()}) == 1]
    rows = [
        [f"`{key}`", *(_text(run.settings.get(key, "")) for run in runs.values())] for key in keys if key not in shared
    ]
    first = next(iter(runs.values()))
    same = _table(["setting", "value"], [[f"`{key}`", _text(first.settings[key])] for key in shared])
    differing = ["", _table(["", *runs], rows), ""] if rows else [""]
    fold = ["<details><summary>Settings that are the same in all runs</summary>", "", same, "", "</details>"]
    return "\n".join(["## Settings", *differing, *(["", same] if len(runs) == 1 else fold)])


# Settings of the place where a run ran, which say nothing about its result.
OF_THE_PLACE = frozenset({"output_dir", "resume", "port"})


def _digests(runs: Mapping[str, RunSummary]) -> str:
    rows = [[name, f"`{run.digest}`" if run.digest else "no round", str(run.num_refused)] for name, run in runs.items()]
    return "## Anchors\n\n" + _table(["", "digest of the last anchor", "contributions refused"], rows)


def _faults(runs: Mapping[str, RunSummary]) -> list[str]:
    lines = [f"- {name}, {line}" for name, run in runs.items() for line in run.fault_lines]
    return ["## Faults\n\n" + "\n".join(lines)] if lines else []


def _sample_section(sample: str, prompt: str, sample_of: str) -> list[str]:
    if not sample:
        return []
    intro = "Text written" + (f" by {sample_of}" if sample_of else "") + (f" after `{prompt}`" if prompt else "")
    return [f"## A sample\n\n{intro}:\n\n{_fenced(sample)}"]


def _command_section(command: str) -> list[str]:
    return [f"## The command that makes this again\n\n{_fenced(command)}"] if command else []


def _fenced(text: str) -> str:
    """A block that nothing inside can close: its fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    printable = "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
    return f"{fence}text\n{printable}\n{fence}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _text(value: object) -> str:
    return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)
