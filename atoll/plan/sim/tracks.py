"""Who did what when: seconds of each kind in all, and spans for a picture.

Every site has two lanes. `train` is what its training does: compute, wait, land (outer step and adopting), fetch (the
committed state), frozen, down. `wire` is what goes on beside it: encode, send. Blocking rounds show the second under a
wait of the first; overlapped ones under computing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

COMPUTE, WAIT, LAND, FETCH, FROZEN, DOWN = "compute", "wait", "land", "fetch", "frozen", "down"
ENCODE, SEND = "encode", "send"
TRAIN, WIRE = "train", "wire"
PRESENT = (COMPUTE, WAIT, LAND, FETCH, FROZEN)  # an island that is there does one of these
MOST_SPANS = 400_000  # that are kept, the first ones


class Span(NamedTuple):
    """One thing that a site did, without a break."""

    site: int
    lane: str
    kind: str
    start_s: float
    end_s: float


class Tracks:
    """Collects what sites do. seconds: by kind, over all sites."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        self._open: dict[tuple[int, str], tuple[str, float]] = {}

    def begin(self, site: int, kind: str, now: float, *, lane: str = TRAIN) -> str:
        """`site` does `kind` from now on, "" for nothing. Returns what it did until now."""
        before, since = self._open.get((site, lane), ("", now))
        if kind == before:
            return before
        self._add(site, lane, before, since, now)
        self._open[site, lane] = (kind, now)
        return before

    def close(self, now: float) -> None:
        """The end of the simulation."""
        for (site, lane), (kind, since) in self._open.items():
            self._add(site, lane, kind, since, now)
        self._open.clear()
        self.spans.sort(key=lambda span: (span.start_s, span.site))

    def add(self, site: int, kind: str, start_s: float, end_s: float, *, lane: str = TRAIN) -> None:
        """A whole span that counts in the picture alone; `seconds` are added up elsewhere."""
        if end_s > start_s and len(self.spans) < MOST_SPANS:
            self.spans.append(Span(site, lane, kind, start_s, end_s))

    def cut(self, site: int, now: float) -> None:
        """What `site` was to do after `now`, as far as it was added last, does not happen."""
        for place in range(len(self.spans) - 1, -1, -1):
            span = self.spans[place]
            if (span.site, span.lane) == (site, TRAIN):
                self.spans[place] = span._replace(end_s=max(span.start_s, min(span.end_s, now)))
                return

    def _add(self, site: int, lane: str, kind: str, start_s: float, end_s: float) -> None:
        if kind and end_s > start_s:
            self.seconds[kind] += end_s - start_s
            self.add(site, kind, start_s, end_s, lane=lane)
