"""Bytes on their way between sites: a fluid model in which all that uses a link shares it fairly.

A flow from i to j runs through i's uplink, j's downlink and, where it has a bound, their pair. Rates are max-min fair:
every flow gets as much as it can without taking from one that has less. They change whenever a flow begins or ends.

    rates   all links share until one is full; what runs through that one keeps its share; again with the rest
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.plan.sim.clock import Clock
from atoll.plan.sim.links import Floats, Links, Sites

SHARE_OF_DONE = 1e-9  # what is missing at the end is the rounding of sums
LEAST_S = 1e-9  # a time that a clock of some hours can tell from nothing


class Owner(Protocol):
    """Whose flows these are."""

    def arrived(self, sources: Sites, targets: Sites) -> None:
        """The flows between these sites, pair by pair, have come to their end."""
        ...


def fair_rates(sources: Sites, targets: Sites, links: Links, *, blocked: NDArray[np.bool_] | None = None) -> Floats:
    """Max-min fair rates, bytes a second, of flows from `sources` to `targets`.

    blocked: (S,) sites through which nothing goes.

    >>> links = Links(np.array([100.0, 100.0, 10.0]), np.full(3, np.inf), None, np.zeros((1, 1)))
    >>> fair_rates(np.array([0, 0, 2]), np.array([1, 2, 0]), links)
    array([50., 50., 10.])
    """
    rates = np.zeros(len(sources))
    left = [links.up.copy(), links.down.copy()]
    through = [sources, targets]
    if links.pair is not None:
        left.append(links.pair.ravel().copy())
        through.append(sources * links.num_sites + targets)
    active = np.ones(len(sources), dtype=bool) if blocked is None else ~(blocked[sources] | blocked[targets])
    while active.any():
        bound = np.full(len(sources), math.inf)
        for room, where in zip(left, through, strict=True):
            count = np.bincount(where[active], minlength=len(room))
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.where(count > 0, room / count, math.inf)
            bound = np.minimum(bound, share[where])
        full = active & (bound <= bound[active].min() * (1 + 1e-12))
        rates[full] = bound[full]
        if math.isinf(bound[full][0]):
            break
        for room, where in zip(left, through, strict=True):
            room -= np.bincount(where[full], weights=rates[full], minlength=len(room))
            np.maximum(room, 0.0, out=room)
        active &= ~full
    return rates


class Fabric:
    """All flows of a simulation. sent_bytes: (S,) that each site has sent so far, in whole flows and parts."""

    def __init__(self, clock: Clock, links: Links) -> None:
        self.links = links
        self.sent_bytes = np.zeros(links.num_sites)
        self._clock = clock
        self._blocked = np.zeros(links.num_sites, dtype=bool)
        self._owners: dict[int, Owner] = {}
        self._next_owner = 0
        self._source = np.zeros(0, dtype=np.int64)
        self._target = np.zeros(0, dtype=np.int64)
        self._owner = np.zeros(0, dtype=np.int64)
        self._size = np.zeros(0)
        self._left = np.zeros(0)
        self._rate = np.zeros(0)
        self._at = 0.0  # up to when `_left` is true
        self._version = 0
        self._waits_for_refresh = False

    def send(self, owner: Owner, sources: Sites, targets: Sites, num_bytes: float) -> None:
        """Begin a flow of `num_bytes` from each of `sources` to the target beside it; `owner` is told when it ends."""
        self._settle()
        number = next((number for number, known in self._owners.items() if known is owner), None)
        if number is None:
            number, self._next_owner = self._next_owner, self._next_owner + 1
            self._owners[number] = owner
        count = len(sources)
        self._source = np.concatenate([self._source, sources])
        self._target = np.concatenate([self._target, targets])
        self._owner = np.concatenate([self._owner, np.full(count, number)])
        self._size = np.concatenate([self._size, np.full(count, num_bytes)])
        self._left = np.concatenate([self._left, np.full(count, num_bytes)])
        self._rate = np.concatenate([self._rate, np.zeros(count)])
        self._change()

    def drop(self, owner: Owner) -> None:
        """End all flows of `owner` where they are."""
        numbers = [number for number, known in self._owners.items() if known is owner]
        if numbers:
            self._settle()
            self._keep(~np.isin(self._owner, numbers))
            self._change()

    def block(self, site: int, blocked: bool) -> None:
        """Nothing goes through `site` any more, or again."""
        self._settle()
        self._blocked[site] = blocked
        self._change()

    # --- inside

    def _settle(self) -> None:
        """Account for the time since the last change."""
        passed_s, self._at = self._clock.now - self._at, self._clock.now
        if len(self._left):
            with np.errstate(invalid="ignore"):
                moved = np.where(np.isinf(self._rate), self._left, np.minimum(self._left, self._rate * passed_s))
            self._left = self._left - moved
            self.sent_bytes += np.bincount(self._source, weights=moved, minlength=len(self.sent_bytes))

    def _change(self) -> None:
        """Once everything that happens now has happened, rates are worked out anew."""
        self._version += 1
        if not self._waits_for_refresh:
            self._waits_for_refresh = True
            self._clock.after(0.0, self._refresh)

    def _refresh(self) -> None:
        self._waits_for_refresh = False
        if len(self._source):
            self._rate = fair_rates(self._source, self._target, self.links, blocked=self._blocked)
            with np.errstate(divide="ignore", invalid="ignore"):
                waits = np.where(self._left > 0, self._left / self._rate, 0.0)
            self._wake_in(float(waits.min()))

    def _wake_in(self, seconds: float) -> None:
        version = self._version
        self._clock.after(seconds, lambda: self._wake() if version == self._version else None)

    def _wake(self) -> None:
        self._settle()
        with np.errstate(invalid="ignore"):
            done = (self._left <= SHARE_OF_DONE * self._size) | (self._left <= self._rate * LEAST_S)
        ended = [(number, self._source[mine], self._target[mine]) for number, mine in self._of_owners(done)]
        self.sent_bytes += np.bincount(self._source[done], weights=self._left[done], minlength=len(self.sent_bytes))
        owners = dict(self._owners)
        self._keep(~done)
        self._change()
        for number, sources, targets in ended:
            owners[number].arrived(sources, targets)

    def _of_owners(self, chosen: NDArray[np.bool_]) -> list[tuple[int, NDArray[np.bool_]]]:
        numbers = np.unique(self._owner[chosen])
        return [(int(number), chosen & (self._owner == number)) for number in numbers]

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        self._source, self._target, self._owner = self._source[kept], self._target[kept], self._owner[kept]
        self._size, self._left, self._rate = self._size[kept], self._left[kept], self._rate[kept]
        there = set(self._owner.tolist())
        self._owners = {number: owner for number, owner in self._owners.items() if number in there}
