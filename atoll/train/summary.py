"""What a run came to, read from its folder, and what several runs say side by side, in one line each."""

from __future__ import annotations

import bisect
import itertools
import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError
from atoll.train.adapting import logged_rounds
from atoll.train.config import flatten
from atoll.train.console import format_bytes, format_duration, format_factor
from atoll.train.metrics import read_metrics

LEVEL = 0.005  # two losses nearer than this, in nats a token, are called the same


@dataclass(frozen=True)
class Point:
    """A loss (nats a token) after `step` inner steps: one replica had sent `sent_bytes`, and trained for `seconds`."""

    step: int
    loss: float
    sent_bytes: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Island:
    """What an island did for an elastic run: rounds that hold work of it, tokens in them, bytes it sent for them."""

    name: str
    rounds: int
    tokens: float
    sent_bytes: int


@dataclass(frozen=True)
class RunSummary:
    """What a run came to.

    settings: of config.toml, with dotted keys. steps: the last inner step seen.
    curve: training loss, a mean over the replicas, smoothed. evals: the anchor's loss on held-out text.
    sent_bytes: for parameters, by replica 0; sent_bytes_all: by all replicas. tokens: trained on, by all replicas.
    wall_s: of training and syncs, without start-up, evaluations and saves. utilisation: the share of it that computed.
    digest: of the last anchor, digests: of every round's. Where no round was recorded utilisation is None and digest
    empty. data_parallel_bytes: that all replicas would have sent for the same steps, 0 where that was not counted.
    num_voids: averagings that were tried again. islands: of an elastic run, by seat. members: how often islands joined,
    left and so on.
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
    digests: Mapping[int, str] = field(default_factory=dict)
    data_parallel_bytes: int = 0
    num_voids: int = 0
    islands: Mapping[int, Island] = field(default_factory=dict)
    members: Mapping[str, int] = field(default_factory=dict)
    adapted: Sequence[Mapping[str, Any]] = ()  # round events of a run whose rounds adapted

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
        if event["event"] in ("fault", "member"):
            events["news"].append(event)
    return _summary(settings, events)


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        return flatten(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). Give the folder of a run.") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}. Give the folder of a run.") from None


Events = Sequence[Mapping[str, Any]]


def _summary(settings: dict[str, Any], events: Mapping[str, Events]) -> RunSummary:
    steps, rounds, evals = events["step"], events["round"], events["eval"]
    last = max((event["step"] for event in itertools.chain(steps, rounds, evals)), default=0)
    alone_s = _seconds_of_steps(steps)
    until = _Until(rounds, step_s=alone_s / last if last and not rounds else 0.0)
    inner_s, exposed_s = _total(rounds, "inner_s"), math.fsum(map(_exposed_s, rounds))
    busy_s = inner_s + exposed_s
    return RunSummary(
        settings=settings,
        steps=last,
        rounds=max((event["round"] for event in rounds), default=0),
        curve=_smooth([until.point(step, loss) for step, loss in _mean_losses(steps) or _losses_of_rounds(rounds)]),
        evals=[until.point(e["step"], e["loss"]) for e in evals if e["loss"] is not None],
        sent_bytes=sum(event["payload_bytes"] for event in rounds),
        sent_bytes_all=sum(event.get("wire_bytes") or event["payload_bytes"] * event["replicas"] for event in rounds),
        tokens=_tokens(steps, rounds),
        wall_s=busy_s or alone_s,
        utilisation=inner_s / busy_s if busy_s else None,
        digest=rounds[-1]["anchor_digest"] if rounds else "",
        num_refused=sum(len(event["refused"]) for event in rounds),
        fault_lines=[_fault_line(event) for event in events["news"] if _is_news(event)],
        digests={event["round"]: event["anchor_digest"] for event in rounds},
        data_parallel_bytes=sum(event.get("data_parallel_bytes") or 0 for event in rounds),
        num_voids=sum(event.get("voids") or 0 for event in rounds),
        islands=_islands(rounds, events["member"]),
        members=Counter(event["what"] for event in events["member"]),
        adapted=logged_rounds(rounds),
    )


class _Until:
    """How much one replica had sent by a step, and how long it had trained and synced.

    step_s: seconds of an inner step, which tell the time where no round does.
    """

    def __init__(self, rounds: Events, *, step_s: float = 0.0) -> None:
        self._step_s = step_s
        by_step = sorted(rounds, key=lambda event: (event["step"], event["round"]))
        self._steps = [event["step"] for event in by_step]
        self._sent = [0, *itertools.accumulate(event["payload_bytes"] for event in by_step)]
        self._seconds = [0.0, *itertools.accumulate((e["inner_s"] or 0.0) + _exposed_s(e) for e in by_step)]

    def point(self, step: int, loss: float) -> Point:
        """A loss at a step, with what had been sent by then; time goes evenly between two rounds."""
        place = bisect.bisect_right(self._steps, step)
        seconds = self._seconds[place]
        before = self._steps[place - 1] if place else 0
        if place == len(self._steps):
            seconds += (step - before) * self._step_s
        else:
            share = (step - before) / max(1, self._steps[place] - before)
            seconds += share * (self._seconds[place + 1] - seconds)
        return Point(step, loss, self._sent[place], seconds)


def _exposed_s(event: Mapping[str, Any]) -> float:
    """The time of a round in which nothing was trained; elastic rounds measure it between offers."""
    idle = event.get("idle_s")
    return (event["exposed_s"] if idle is None else idle) or 0.0


def _tokens(steps: Events, rounds: Events) -> int:
    """Of an elastic run those that are in committed rounds: an island that came back counts its own from 0 again."""
    committed = sum(sum(event["weights"].values()) for event in rounds if event.get("weights"))
    return int(committed) or sum({event["replica"]: event["tokens"] for event in steps}.values())


def _losses_of_rounds(rounds: Events) -> list[tuple[int, float]]:
    """Where inner steps were logged elsewhere: what islands told with each round."""
    return [(event["step"], event["loss"]) for event in rounds if event.get("loss") is not None]


def _islands(rounds: Events, members: Events) -> dict[int, Island]:
    names = {event["replica"]: event["name"] for event in members if event["replica"] >= 0}
    found: dict[int, Island] = {}
    for event in rounds:
        for seat, weight in (event.get("weights") or {}).items():
            known = found.get(int(seat), Island(names.get(int(seat), ""), 0, 0.0, 0))
            sent = (event.get("islands") or {}).get(seat, {}).get("sent_bytes", 0)
            found[int(seat)] = Island(known.name, known.rounds + 1, known.tokens + weight, known.sent_bytes + sent)
    return dict(sorted(found.items()))


def _is_news(event: Mapping[str, Any]) -> bool:
    """Faults, and islands that came after the start or went."""
    if event["event"] == "fault":
        return True
    return event["what"] in ("lost", "left", "refused") or (event["what"] == "joined" and event["round"] > 0)


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
        smoothed.append(replace(point, loss=math.fsum(p.loss for p in seen) / len(seen)))
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
    who = "" if event.get("replica") in (None, -1) else f", replica {event['replica']}"
    told = event.get("detail") or event.get("why")
    detail = f": {told}" if told else ""
    when = f"step {event['step']}" if "step" in event else "meanwhile"
    return f"{when}{who}: {event['what']}{detail}"


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


def time_finding(runs: Mapping[str, RunSummary]) -> str:
    """One sentence on how long which loss took; empty where no loss or no time was recorded."""
    series = series_of(runs)
    timed = [name for name in series.points if series.points[name][-1].seconds > 0]
    if not timed:
        return ""
    subject = _subject(runs, timed)
    last = series.points[subject][-1]
    return f"{subject}: {series.kind} {last.loss:.3f} after {format_duration(last.seconds)} of training and syncing"


def faults_finding(run: RunSummary) -> str:
    """What an elastic run went through, in one sentence; empty for any other.

    >>> faults_finding(replace(_NOTHING, members={"lost": 2, "left": 1}, num_voids=1, rounds=7))
    '7 rounds were committed while 2 islands were lost and 1 left; averagings tried again: 1, contributions refused: 0'
    """
    if not run.members:
        return ""
    lost, left = run.members.get("lost", 0), run.members.get("left", 0)
    lost_many = f"{lost} island{' was' if lost == 1 else 's were'} lost"
    return (
        f"{run.rounds} rounds were committed while {lost_many} and {left} left; averagings tried again: "
        f"{run.num_voids}, contributions refused: {run.num_refused}"
    )


_NOTHING = RunSummary({}, 0, 0, [], [], 0, 0, 0, 0.0, None, "")


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
