"""What happened in a run, kept small enough to be shown: curves, the last rounds, events, totals.

It is fed the events of the run, those of earlier starts of the coordinator first, and what islands say in between.
Nothing is decided by it. Its size is bounded, however long the run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from atoll.elastic.messages import Beat
from atoll.elastic.page_watch import finite
from atoll.elastic.wire import printable

MOST_POINTS = 400  # of a curve
MOST_TOKENS = 2.0**53  # that are believed of a round
RECENT_ROUNDS = 24  # that are kept in full,
MOST_TRACKS = 32  # with the times of so many islands
PACE_ROUNDS = 8  # over which pace and utilisation are taken
MOST_EVENTS = 200

Event = Mapping[str, Any]


class Curve:
    """Training loss against inner steps: means over stretches of `width` steps, which doubles when there are too many.

    >>> curve = Curve(most=2)
    >>> for step in range(4):
    ...     _ = curve.add(step, at=10.0 * step, loss=4.0 - step)
    >>> curve.width, curve.points()
    (2, [(1, 10.0, 3.5), (3, 30.0, 1.5)])
    """

    def __init__(self, *, most: int = MOST_POINTS) -> None:
        self.width = 1
        self._most = most
        self._parts: dict[int, list[float]] = {}  # stretch -> sum, weight, last step, last time

    def add(self, step: int, *, at: float | None, loss: float, weight: float = 1.0) -> bool:
        """A loss at `step`, seen at `at`. Returns whether a stretch begins with it."""
        is_new = step // self.width not in self._parts
        part = self._parts.setdefault(step // self.width, [0.0, 0.0, 0.0, 0.0])
        part[0] += weight * loss
        part[1] += weight
        part[2:] = [max(part[2], step), max(part[3], at or 0.0)]
        while len(self._parts) > self._most:
            self._widen()
        return is_new

    def points(self) -> list[tuple[int, float | None, float]]:
        """Step, time (None: not known) and loss, in the order of steps."""
        return [(int(step), at or None, total / weight) for _, (total, weight, step, at) in sorted(self._parts.items())]

    def _widen(self) -> None:
        self.width *= 2
        old, self._parts = self._parts, {}
        for index, (total, weight, step, at) in sorted(old.items()):
            part = self._parts.setdefault(index // 2, [0.0, 0.0, 0.0, 0.0])
            part[0] += total
            part[1] += weight
            part[2:] = [max(part[2], step), max(part[3], at)]


class History:
    """The history of one run.

    step_of: the inner step at which a round ends. version: changes whenever there is something new to show.
    Times are seconds since 1970.
    """

    def __init__(self, *, num_rounds: int, step_of: Callable[[int], int]) -> None:
        self.version = 0
        self._num_rounds = num_rounds
        self._step_of = step_of
        self._round = 0
        self._at: float | None = None  # when that was committed
        self._curve = Curve()
        self._evals: list[tuple[int, float | None, float]] = []
        self._progress: list[dict[str, Any]] = []  # a few numbers a round
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_ROUNDS)
        self._events: deque[dict[str, Any]] = deque(maxlen=MOST_EVENTS)
        self._loss: float | None = None
        self._totals: Counter[str] = Counter()
        self._kinds: dict[str, Counter[str]] = {"member": Counter(), "fault": Counter()}
        self._handlers: dict[str, Callable[[Event], None]] = {
            "round": self._note_round,
            "eval": self._note_eval,
            "member": self._note_other,
            "fault": self._note_other,
        }

    def note(self, event: Event) -> None:
        """A line of the run's metrics.jsonl."""
        handler = self._handlers.get(event.get("event", ""))
        if handler is not None:
            handler(event)
            self.version += 1

    def beat(self, beat: Beat, at: float) -> None:
        """An island trains on."""
        loss = finite(beat.loss)
        if loss is None or beat.step <= 0:
            return
        step = min(self._step_of(self._round) + beat.step, self._step_of(self._round + 1))
        self.version += self._curve.add(step, at=at, loss=loss)

    def summary(self, now: float) -> dict[str, Any]:
        """How the run is doing, in a few numbers; None for what is not known yet."""
        last = list(self._recent)[-PACE_ROUNDS:]
        timed = [one for one in last if one["seconds"]]
        seconds = sum(one["seconds"] for one in timed)
        newest = last[-1] if last else {}
        return {
            "step": self._step_of(self._round),
            "max_steps": self._step_of(self._num_rounds),
            "loss": self._loss,
            "eval_loss": self._evals[-1][2] if self._evals else None,
            "eval_step": self._evals[-1][0] if self._evals else None,
            "goodput_tokens_per_s": sum(one["tokens"] for one in timed) / seconds if seconds else None,
            "utilisation": _utilisation(last),
            "round_s": median(one["seconds"] for one in timed) if timed else None,
            "sync_s": newest.get("sync_s"),
            "waited_s": newest.get("waited_s"),
            "eta_s": self._eta_s(now, timed),
            "committed_at": self._at,
            **{name: self._totals[name] for name in TOTALS},
            "members": dict(self._kinds["member"]),
            "faults": dict(self._kinds["fault"]),
        }

    def plain(self) -> dict[str, Any]:
        """All there is to draw, plain JSON."""
        return {
            "training": [list(point) for point in self._curve.points()],
            "held_out": [list(point) for point in self._evals],
            "progress": list(self._progress),
            "rounds": list(self._recent),
            "events": list(self._events),
        }

    # --- events ---

    def _note_round(self, event: Event) -> None:
        """Anything may be missing in lines that an earlier version wrote."""
        at, islands = event.get("at"), event.get("islands") or {}
        tokens = min(max(0.0, sum((event.get("weights") or {}).values())), MOST_TOKENS)
        self._count_round(event, tokens)
        about = {
            "round": event["round"],
            "step": event["step"],
            "at": at,
            "tokens": tokens,
            "seconds": self._seconds_of(event, at),
            "utilisation": _share(event),
            "train_s": event.get("inner_s"),
            "idle_s": _idle_s(event),
            **{key: event.get(key) for key in ("sync_s", "waited_s", "contributors", "replicas", "loss")},
            "weights": event.get("weights") or {},
            "refused": event.get("refused") or [],
            "voids": event.get("voids") or 0,
            "islands": dict(sorted(islands.items(), key=lambda pair: int(pair[0]))[:MOST_TRACKS]),
        }
        self._add_loss(event, at)
        self._round, self._at = event["round"], at
        self._recent.append(about)
        self._add_progress(about)

    def _count_round(self, event: Event, tokens: float) -> None:
        self._totals["rounds"] += 1
        self._totals["tokens"] += int(tokens)
        self._totals["sent_bytes"] += event.get("wire_bytes") or 0
        self._totals["data_parallel_bytes"] += event.get("data_parallel_bytes") or 0
        self._totals["refused"] += len(event.get("refused") or ())
        self._totals["voids"] += event.get("voids") or 0
        self._totals["lone"] += bool(event.get("lone"))

    def _add_loss(self, event: Event, at: float | None) -> None:
        """The mean over a round stands in its middle."""
        loss = event.get("loss")
        if loss is None:
            return
        self._loss = loss
        steps = event["step"] - self._step_of(event["round"] - 1)
        weight = float(max(1, steps) * max(1, event.get("contributors") or 1))
        self._curve.add(event["step"] - steps // 2, at=at, loss=loss, weight=weight)

    def _add_progress(self, about: Event) -> None:
        """A few numbers of every round; of every second one once there are too many."""
        seconds = about["seconds"]
        self._progress.append(
            {
                "round": about["round"],
                "step": about["step"],
                "at": about["at"],
                "utilisation": about["utilisation"],
                "goodput": about["tokens"] / seconds if seconds else None,
                "sent_bytes": self._totals["sent_bytes"],
                "data_parallel_bytes": self._totals["data_parallel_bytes"],
            }
        )
        if len(self._progress) > MOST_POINTS:
            del self._progress[:-1:2]

    def _note_eval(self, event: Event) -> None:
        if event.get("loss") is None:
            return
        self._evals.append((event["step"], event.get("at", self._at), event["loss"]))
        if len(self._evals) > MOST_POINTS:
            del self._evals[:-1:2]

    def _note_other(self, event: Event) -> None:
        kind = event["event"]
        self._kinds[kind][str(event["what"])] += 1
        if (kind, event["what"]) == ("member", "carried"):
            return  # each round that an island was late for: counted, and no news
        detail = event.get("why") if kind == "member" else event.get("detail")
        self._events.append(
            {
                "kind": kind,
                "what": printable(str(event["what"])),
                "at": event.get("at"),
                "round": event.get("round"),
                "replica": event.get("replica"),
                "name": printable(str(event.get("name") or ""), limit=40),
                "detail": printable(str(detail or ""), limit=300),
            }
        )

    # --- time ---

    def _seconds_of(self, event: Event, at: float | None) -> float | None:
        """From commit to commit. Of the first round: as long as its slowest island was at it."""
        if at is not None and self._at is not None and self._round == event["round"] - 1:
            return max(0.0, at - self._at)
        tracks = (event.get("islands") or {}).values()
        return max((track["train_s"] + track["offered_s"] for track in tracks if "train_s" in track), default=None)

    def _eta_s(self, now: float, timed: list[dict[str, Any]]) -> float | None:
        if self._round >= self._num_rounds:
            return 0.0
        if not timed or self._at is None:
            return None
        each = median(one["seconds"] for one in timed)
        return max(0.0, each * (self._num_rounds - self._round) - min(each, max(0.0, now - self._at)))


TOTALS = ("rounds", "tokens", "sent_bytes", "data_parallel_bytes", "refused", "voids", "lone")


def _idle_s(event: Event) -> float | None:
    """Time that contributors did not train: measured between their offers, or else from offer to commit."""
    idle: float | None = event.get("idle_s")
    return event.get("exposed_s") if idle is None else idle


def _share(event: Event) -> float | None:
    """Of the time of its contributors, the share in which they trained."""
    train, idle = event.get("inner_s") or 0.0, _idle_s(event) or 0.0
    return train / (train + idle) if train + idle > 0 else None


def _utilisation(rounds: list[dict[str, Any]]) -> float | None:
    train = sum(one["train_s"] or 0.0 for one in rounds)
    idle = sum(one["idle_s"] or 0.0 for one in rounds)
    return train / (train + idle) if train + idle > 0 else None
