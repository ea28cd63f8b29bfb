"""The state of a run in the format that Prometheus reads, at /metrics of the coordinator.

Each metric is a row of a table: its name, what it says, and how it is read from what `atoll status --json` shows. What
is not known yet is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.elastic.wire import printable

if TYPE_CHECKING:
    from prometheus_client.core import Metric

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"

Status = Mapping[str, Any]
MEMBER_EVENTS = "joined lost left refused carried".split()
STATES = "training ready averaging syncing benched lost left".split()


@dataclass(frozen=True)
class Row:
    """A metric of the run. A name that ends in _total only grows while the coordinator's files are kept."""

    name: str
    help: str
    value: Callable[[Status], float | None]


@dataclass(frozen=True)
class Labelled:
    """A metric with a value for each value of its labels."""

    name: str
    help: str
    labels: tuple[str, ...]
    values: Callable[[Status], Iterator[tuple[tuple[str, ...], float | None]]]


def _of(key: str) -> Callable[[Status], float | None]:
    return lambda status: status["summary"][key]


def _of_members(key: str) -> Callable[[Status], Iterator[tuple[tuple[str, ...], float | None]]]:
    def values(status: Status) -> Iterator[tuple[tuple[str, ...], float | None]]:
        for member in _present(status):
            yield (str(member["seat"]), printable(member["name"], limit=40)), member[key]

    return values


def _present(status: Status) -> list[dict[str, Any]]:
    """Islands that are there or expected back: one a seat, so that no label is given twice."""
    return [member for member in status["members"] if member["state"] not in ("lost", "left")]


def _states(status: Status) -> Iterator[tuple[tuple[str, ...], float | None]]:
    states = [member["state"] for member in status["members"]]
    for state in STATES:
        yield (state,), float(states.count(state))


def _counts(key: str, *known: str) -> Callable[[Status], Iterator[tuple[tuple[str, ...], float | None]]]:
    """Those that are known beforehand begin at 0, so that the first of them is seen as an increase."""

    def values(status: Status) -> Iterator[tuple[tuple[str, ...], float | None]]:
        for what, count in sorted((dict.fromkeys(known, 0) | status["summary"][key]).items()):
            yield (printable(what),), float(count)

    return values


def _weights(status: Status) -> Iterator[tuple[tuple[str, ...], float | None]]:
    whole = sum(status["participation"].values())
    for seat, weight in status["participation"].items():
        yield (str(seat),), weight / whole if whole else None


ROWS = (
    Row("atoll_round", "The newest committed round.", lambda status: status["round"]),
    Row("atoll_rounds_planned", "Rounds until the run is over.", lambda status: status["num_rounds"]),
    Row("atoll_step", "Inner steps of the newest committed round.", _of("step")),
    Row("atoll_steps_planned", "Inner steps until the run is over.", _of("max_steps")),
    Row("atoll_uptime_seconds", "Since the coordinator was started.", lambda s: s["coordinator"]["uptime_s"]),
    Row("atoll_finished", "1 once the run is over.", lambda status: float(status["finished"] is not None)),
    Row("atoll_averaging", "1 while islands average.", lambda status: float(status["averaging"])),
    Row("atoll_alarms", "Alarms that stand.", lambda status: len(status["alarms"])),
    Row("atoll_breadth_ratio", "Share of the live islands in the last mean.", lambda status: status["breadth"]),
    Row("atoll_training_loss", "Of the last round, nats a token.", _of("loss")),
    Row("atoll_held_out_loss", "Of the last evaluation, nats a token.", _of("eval_loss")),
    Row("atoll_goodput_tokens_per_second", "Committed tokens, over the last rounds.", _of("goodput_tokens_per_s")),
    Row("atoll_utilisation_ratio", "Share of the islands' time in which they trained.", _of("utilisation")),
    Row("atoll_round_seconds", "From commit to commit, median of the last rounds.", _of("round_s")),
    Row("atoll_sync_seconds", "Averaging of the last round.", _of("sync_s")),
    Row("atoll_wait_seconds", "The last round's wait for more islands after quorum.", _of("waited_s")),
    Row("atoll_eta_seconds", "Until the last round, at this pace.", _of("eta_s")),
    Row("atoll_committed_rounds_total", "Rounds that were committed.", _of("rounds")),
    Row("atoll_committed_tokens_total", "Tokens in committed rounds.", _of("tokens")),
    Row("atoll_sent_bytes_total", "Sent for parameters, by all islands.", _of("sent_bytes")),
    Row(
        "atoll_data_parallel_bytes_total",
        "That data parallelism in fp32 would have sent for the same steps.",
        _of("data_parallel_bytes"),
    ),
    Row("atoll_refused_contributions_total", "Contributions that were not let in.", _of("refused")),
    Row("atoll_void_attempts_total", "Averagings that came to nothing and were tried again.", _of("voids")),
)

ISLAND = ("seat", "island")
LABELLED = (
    Labelled("atoll_islands", "Islands by state.", ("state",), _states),
    Labelled("atoll_weight_ratio", "Share of an island in the last mean.", ("seat",), _weights),
    Labelled("atoll_island_tokens_per_second", "Speed of an island.", ISLAND, _of_members("tokens_per_s")),
    Labelled("atoll_island_tokens", "That an island contributed.", ISLAND, _of_members("tokens")),
    Labelled("atoll_island_loss", "Of an island's last inner steps, nats a token.", ISLAND, _of_members("loss")),
    Labelled("atoll_island_round", "That an island holds.", ISLAND, _of_members("round")),
    Labelled("atoll_island_step", "Inner steps of its round.", ISLAND, _of_members("step")),
    Labelled("atoll_island_link_bytes_per_second", "At which it last sent.", ISLAND, _of_members("link_bytes_per_s")),
    Labelled("atoll_island_silence_seconds", "Since it was last heard.", ISLAND, _of_members("seen_s_ago")),
    Labelled(
        "atoll_member_events_total", "Islands that joined, left, ...", ("what",), _counts("members", *MEMBER_EVENTS)
    ),
    Labelled("atoll_faults_total", "Faults, by kind.", ("what",), _counts("faults", "void")),
)

NAMES = tuple(row.name for row in (*ROWS, *LABELLED))


def exposition(status: Status) -> bytes:
    """`status` as text in the exposition format, each metric labelled with the name of the run."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(status))
    return generate_latest(registry)


class _Collector:
    """What prometheus_client asks for metrics."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def describe(self) -> list[Metric]:
        return []  # asked for when it is registered, to find names that are taken: there are none

    def collect(self) -> Iterator[Metric]:
        run = printable(self._status["name"], limit=80)
        for row in ROWS:
            family = _family(row.name, row.help, ())
            _add(family, (run,), row.value(self._status))
            yield family
        for table in LABELLED:
            family = _family(table.name, table.help, table.labels)
            for labels, value in table.values(self._status):
                _add(family, (run, *labels), value)
            yield family


def _family(name: str, help: str, labels: tuple[str, ...]) -> Any:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(name, help, labels=("run", *labels))


def _add(family: Any, labels: tuple[str, ...], value: float | None) -> None:
    if value is not None:
        family.add_metric(labels, float(value))
