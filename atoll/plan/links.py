"""What joins the islands: bandwidth and latency, the same between all or a matrix, and how long bytes take on it.

All that the devices of one island send leaves through that island's link, so bytes are counted by island. Bandwidths
are of one direction, bytes a second; both directions work at once.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError
from atoll.plan.units import format_bandwidth, parse_bandwidth, parse_seconds

SEARCHED_RINGS = 8  # islands up to which every order of a ring is tried
NOTHING = ("", "-", "0", "0.0", "none")


@dataclass(frozen=True)
class Network:
    """The links between M islands.

    uplinks: what each island can send in all, bytes a second (infinite: bounded by its links alone).
    links[i][j]: what i can send to j (infinite: bounded by the uplinks alone). latency_s[i][j]: of one message.
    """

    uplinks: tuple[float, ...]
    links: tuple[tuple[float, ...], ...]
    latency_s: tuple[tuple[float, ...], ...]

    @property
    def num_islands(self) -> int:
        return len(self.uplinks)

    @property
    def slowest_bytes_per_s(self) -> float:
        """The smallest bandwidth anywhere; what a picture marks as the user's link."""
        return min(*self.uplinks, self.slowest_pair_bytes_per_s)

    @cached_property
    def slowest_pair_bytes_per_s(self) -> float:
        return min(min(row) for row in _distinct(self.links))

    @cached_property
    def longest_latency_s(self) -> float:
        return max(max(row) for row in _distinct(self.latency_s))

    def exchange_s(self, sent_bytes: float) -> float:
        """Seconds in which every island sends `sent_bytes` in all, as much to each of the others.

        That is how Atoll averages: every island owns a slice, receives it from all and sends the mean to all. Bounded
        by the slowest uplink and by the slowest pair, since a round ends when the last slice is there; no latency.

        >>> uniform(2, 125e6).exchange_s(125e6)
        1.0
        """
        if self.num_islands == 1 or not sent_bytes:
            return 0.0
        by_pair = sent_bytes / (self.num_islands - 1)
        return max(sent_bytes / min(self.uplinks), by_pair / self.slowest_pair_bytes_per_s)

    def ring_s(self, payload_bytes: float, order: Sequence[int]) -> float:
        """Seconds of a ring all-reduce of `payload_bytes` in `order`: 2(M−1)/M payloads over its slowest link.

        Bytes alone; its latencies (2(M−1) of them) are those of `cost.ring_latency_s`.
        """
        size = self.num_islands
        if size == 1:
            return 0.0
        hops = list(zip(order, [*order[1:], order[0]], strict=True))
        slowest = min(min(self.links[i][j], self.uplinks[i]) for i, j in hops)
        return 2 * (size - 1) / size * payload_bytes / slowest

    @cached_property
    def best_ring(self) -> tuple[int, ...]:
        """The order of a ring whose slowest link is fastest; for many islands the order they were given in."""
        given = tuple(range(self.num_islands))
        if self.num_islands > SEARCHED_RINGS or len(_distinct(self.links)) == 1:
            return given
        orders = [(0, *rest) for rest in itertools.permutations(given[1:])]
        return min(orders, key=lambda order: self.ring_s(1e9, order))

    def describe(self) -> str:
        """
        >>> uniform(2, 125e6, latency_s=0.05).describe()
        '2 islands, 1 Gbit/s, 50 ms'
        """
        fastest = max(min(max(row), uplink) for row, uplink in self._rows())
        speeds = sorted({self.slowest_bytes_per_s, fastest})
        span = " to ".join(format_bandwidth(speed) for speed in speeds)
        latency = f", {self.longest_latency_s * 1e3:g} ms" if self.longest_latency_s else ""
        return f"{self.num_islands} island{'s' * (self.num_islands > 1)}, {span}{latency}"

    def _rows(self) -> list[tuple[tuple[float, ...], float]]:
        """What each island can send to each other, without the diagonal, and in all."""
        if len(_distinct(self.links)) == 1:
            return [(self.links[0], uplink) for uplink in set(self.uplinks)]
        return [((*row[:i], *row[i + 1 :]), self.uplinks[i]) for i, row in enumerate(self.links)]


def uniform(num_islands: int, bytes_per_s: float, *, latency_s: float = 0.0) -> Network:
    """Islands that each send at most `bytes_per_s` in all, to whomever."""
    if num_islands < 1:
        raise ConfigError(f"islands={num_islands} is not positive; there must be one that trains. Use 2 or more.")
    _check_bandwidth(bytes_per_s, "the link")
    links = _filled(num_islands, math.inf)
    return Network((bytes_per_s,) * num_islands, links, _filled(num_islands, _checked_latency(latency_s)))


def read_network(link: str, num_islands: int, *, latency_s: float = 0.0) -> Network:
    """The network of a bandwidth (`1gbit`) or of a matrix file (.csv or .json).

    A matrix has a row an island that sends and a column an island that receives, each entry a bandwidth with its unit;
    the diagonal may hold what an island can send in all, or `-`. JSON is that list of lists, or an object with `links`
    and, in the same form or as one value, `latency`.
    """
    path = Path(link)
    if path.suffix.lower() not in (".csv", ".json"):
        return uniform(num_islands, parse_bandwidth(link), latency_s=latency_s)
    rows, latency = _read_matrix(path)
    if len(rows) != num_islands or any(len(row) != num_islands for row in rows):
        shape = f"{len(rows)} rows of {sorted({len(row) for row in rows})} entries"
        raise ConfigError(
            f"{link} has {shape} for {num_islands} islands; it needs a row and a column each. "
            f"Use --islands {len(rows)} or complete the matrix."
        )
    pairs = [[_entry(cell, i, j, link) for j, cell in enumerate(row)] for i, row in enumerate(rows)]
    uplinks = tuple(pairs[i][i] for i in range(num_islands))
    links = tuple(tuple(math.inf if i == j else pairs[i][j] for j in range(num_islands)) for i in range(num_islands))
    return Network(uplinks, links, _latencies(latency, num_islands, latency_s, link))


def _read_matrix(path: Path) -> tuple[list[list[str]], Any]:
    """Cells as text, and what the file says about latency."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".csv":
            return [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row], None
        content = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as a matrix of links: {error}. Mend it.") from None
    rows = content.get("links") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ConfigError(f'{str(path)!r} holds no matrix. Write [["-", "1gbit"], ["1gbit", "-"]], a row an island.')
    latency = content.get("latency") if isinstance(content, dict) else None
    return [["-" if cell is None else str(cell).strip() for cell in row] for row in rows], latency


def _entry(cell: str, i: int, j: int, link: str) -> float:
    if i == j and cell.lower() in NOTHING:
        return math.inf
    where = f"{link}, row {i + 1}, column {j + 1}"
    if cell.lower() in NOTHING:
        raise ConfigError(
            f"{where} says island {i} cannot reach island {j}; all average with all. "
            "Give what it reaches through others, as 10mbit."
        )
    speed = parse_bandwidth(cell)
    _check_bandwidth(speed, where)
    return speed


def _latencies(latency: Any, num_islands: int, given_s: float, link: str) -> tuple[tuple[float, ...], ...]:
    if latency is None:
        return _filled(num_islands, _checked_latency(given_s))
    if not isinstance(latency, list):
        return _filled(num_islands, _checked_latency(parse_seconds(str(latency))))
    if len(latency) != num_islands or any(not isinstance(row, list) or len(row) != num_islands for row in latency):
        raise ConfigError(f"{link}: latency is not one value or {num_islands} rows of {num_islands}. Complete it.")
    return tuple(
        tuple(0.0 if i == j else _checked_latency(parse_seconds(str(cell))) for j, cell in enumerate(row))
        for i, row in enumerate(latency)
    )


def _distinct(rows: tuple[tuple[float, ...], ...]) -> list[tuple[float, ...]]:
    """Rows without repeats of the same object: ten thousand equal islands share one."""
    return list({id(row): row for row in rows}.values())


def _filled(size: int, value: float) -> tuple[tuple[float, ...], ...]:
    return ((value,) * size,) * size


def _check_bandwidth(bytes_per_s: float, where: str) -> None:
    if not bytes_per_s > 0:
        raise ConfigError(
            f"{where} carries {bytes_per_s * 8:g} bit/s: nothing would ever arrive. Give what it carries, as 10mbit."
        )


def _checked_latency(latency_s: float) -> float:
    if not 0 <= latency_s < math.inf:
        raise ConfigError(f"latency={latency_s:g} s is not a time from 0. Give it as 50ms.")
    return latency_s
