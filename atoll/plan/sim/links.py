"""The network of a simulation as arrays: what every island can send and receive in all, pairs, latencies.

An island's place on the network is a *site*. An island that comes back after a crash has its old site; one that joins
anew gets another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.errors import ConfigError
from atoll.plan.links import Network

Floats = NDArray[np.float64]
Sites = NDArray[np.int64]


@dataclass(frozen=True)
class Links:
    """up, down: (S,) bytes a second of each site. pair: (S, S), from row to column, or None where nothing bounds it.

    latency: (S, S) seconds of one message, or (1, 1) where all are equal. The coordinator stands at site 0.
    """

    up: Floats
    down: Floats
    pair: Floats | None
    latency: Floats

    @property
    def num_sites(self) -> int:
        return len(self.up)

    def latency_s(self, one: int, other: int) -> float:
        """Of a message between two sites."""
        if one == other:
            return 0.0
        return float(self.latency[0, 0] if self.latency.size == 1 else self.latency[one, other])

    def longest_latency_s(self, sites: Sites) -> float:
        """Between any two of `sites`."""
        if len(sites) < 2:
            return 0.0
        return float(self.latency[0, 0] if self.latency.size == 1 else self.latency[np.ix_(sites, sites)].max())

    def exchange_s(self, sites: Sites, sent_bytes: float) -> float:
        """Seconds in which each of `sites` sends `sent_bytes`, as much to each of the others; no latency."""
        others = len(sites) - 1
        if others < 1 or not sent_bytes:
            return 0.0
        seconds = sent_bytes / min(self.up[sites].min(), self.down[sites].min())
        if self.pair is not None:
            between = self.pair[np.ix_(sites, sites)].copy()
            np.fill_diagonal(between, math.inf)
            seconds = max(seconds, sent_bytes / others / between.min())
        return float(seconds)

    def transfer_s(self, source: int, target: int, num_bytes: float) -> float:
        """Seconds to send `num_bytes` from one site to another on an idle network."""
        speed = min(self.up[source], self.down[target])
        if self.pair is not None:
            speed = min(speed, self.pair[source, target])
        return float(num_bytes / speed) + self.latency_s(source, target)


def links_of(network: Network, *, down_bytes_per_s: Sequence[float] = (), more_sites: int = 0) -> Links:
    """`network` as arrays, with `more_sites` for islands that join later, which have the links of the last one.

    down_bytes_per_s: what islands can receive in all: one value for all, or one each; none: as much as they can send.
    """
    _check_down(down_bytes_per_s, network.num_islands)
    islands, sites = network.num_islands, network.num_islands + more_sites
    uniform = len({id(row) for row in network.links}) == 1 and len({id(row) for row in network.latency_s}) == 1
    if more_sites and not uniform:
        raise ConfigError(
            f"a matrix of {islands} islands says nothing about the links of {more_sites} more that join. Give --link "
            "one bandwidth, or let only islands join that were killed or left."
        )
    up = _of_sites(network.uplinks, sites)
    down = _of_sites(down_bytes_per_s, sites) if down_bytes_per_s else up
    if uniform:
        unbounded = math.isinf(network.links[0][0])
        pair = None if unbounded else np.full((sites, sites), network.links[0][0])
        return Links(up, down, pair, np.full((1, 1), network.latency_s[0][0]))
    return Links(up, down, np.array(network.links), np.array(network.latency_s))


def _of_sites(values: Sequence[float], sites: int) -> Floats:
    """Values of the first sites, and the last of them for all others."""
    return np.array([*values, *(values[-1],) * (sites - len(values))], dtype=float)


def _check_down(down_bytes_per_s: Sequence[float], islands: int) -> None:
    if not all(speed > 0 for speed in down_bytes_per_s):
        raise ConfigError("--down 0 lets nothing arrive: no round would ever end. Give what comes in, as 50mbit.")
    if len(down_bytes_per_s) not in (0, 1, islands):
        raise ConfigError(
            f"--down has {len(down_bytes_per_s)} values for {islands} islands. Give one for all, or one each."
        )
