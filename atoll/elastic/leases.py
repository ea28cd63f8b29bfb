"""Who trains on which samples: one global order 0, 1, 2, ... of which every sample is given to one member at a time.

Below `position` each sample is in exactly one of four places; from `position` on nothing has been given out yet:

    0 ───────────────────────────────────────────── position ──────▶
      committed | leased | returned | skipped          never leased

committed: went into a committed round, for good. leased: a member trains on it. returned: it was leased, its member
went without having contributed it, and it is given out again before anything new. skipped: after the loss of the log
nobody knows whether it was committed, so it is not given out again, but counted.

Committed samples are what is left over, so they take no room: the state is a few ranges for every member that trains.

>>> leases = Leases()
>>> leases.grant("a", 10), leases.grant("b", 10)
(((0, 10),), ((10, 20),))
>>> leases.commit("a", [(0, 6)])
>>> leases.release("a")
>>> leases.grant("c", 7)
((6, 10), (20, 23))
>>> leases.totals()
{'position': 23, 'committed': 6, 'leased': 17, 'returned': 0, 'skipped': 0}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Range = tuple[int, int]


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same samples as few sorted ranges.

    >>> merged([(5, 7), (0, 2), (2, 4), (6, 9)])
    [(0, 4), (5, 9)]
    """
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        elif start < stop:
            result.append((start, stop))
    return result


def without(ranges: Iterable[Range], taken: Iterable[Range]) -> list[Range]:
    """The samples of `ranges` that are not in `taken`.

    >>> without([(0, 10)], [(2, 3), (8, 12)])
    [(0, 2), (3, 8)]
    """
    holes = merged(taken)
    result: list[Range] = []
    for start, stop in merged(ranges):
        for hole_start, hole_stop in holes:
            if hole_stop <= start or hole_start >= stop:
                continue
            if start < hole_start:
                result.append((start, hole_start))
            start = hole_stop
        if start < stop:
            result.append((start, stop))
    return result


def common(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """The samples that are in both.

    >>> common([(0, 10)], [(8, 12), (2, 3)])
    [(2, 3), (8, 10)]
    """
    all_of_them = merged(ranges)
    return without(all_of_them, without(all_of_them, others))


def count(ranges: Iterable[Range]) -> int:
    """How many samples; the ranges must not overlap."""
    return sum(stop - start for start, stop in ranges)


class Leases:
    """The books of the global order of samples; `state` is what `snapshot` returned."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        state = state or {}
        self.position: int = state.get("position", 0)
        self._leased = {member: _pairs(ranges) for member, ranges in state.get("leased", {}).items()}
        self._returned = _pairs(state.get("returned", ()))
        self._skipped = _pairs(state.get("skipped", ()))

    def snapshot(self) -> dict[str, Any]:
        """As plain data, for `Leases(state)`."""
        leased = {member: [list(pair) for pair in ranges] for member, ranges in self._leased.items()}
        returned, skipped = ([list(pair) for pair in ranges] for ranges in (self._returned, self._skipped))
        return {"position": self.position, "leased": leased, "returned": returned, "skipped": skipped}

    def grant(self, member: str, samples: int) -> tuple[Range, ...]:
        """Lease the lowest `samples` free samples to `member`: those that came back first, then new ones."""
        if samples < 1:
            raise ValueError(f"samples={samples} cannot be leased; ask for 1 or more.")
        given: list[Range] = []
        missing = samples
        while missing and self._returned:
            start, stop = self._returned.pop(0)
            end = min(stop, start + missing)
            given.append((start, end))
            missing -= end - start
            if end < stop:
                self._returned.insert(0, (end, stop))
        if missing:
            given.append((self.position, self.position + missing))
            self.position += missing
        self._leased[member] = merged([*self.held(member), *given])
        return tuple(merged(given))

    def held(self, member: str) -> tuple[Range, ...]:
        """What is leased to `member` and not committed."""
        return tuple(self._leased.get(member, ()))

    def members(self) -> list[str]:
        """Everyone to whom something is leased."""
        return list(self._leased)

    def holds(self, member: str, ranges: Iterable[Range]) -> bool:
        """Whether all of `ranges` are proper ranges that are leased to `member`."""
        ranges = list(ranges)
        return all(start < stop for start, stop in ranges) and not without(ranges, self.held(member))

    def commit(self, member: str, used: Iterable[Range]) -> None:
        """`used`, leased to `member`, went into a committed round."""
        used = list(used)
        if not self.holds(member, used):
            raise ValueError(f"{without(used, self.held(member))} is not leased to {member} and cannot be committed.")
        self._keep(member, without(self.held(member), used))

    def release(self, member: str) -> None:
        """`member` is gone: what it leased and did not contribute is free again."""
        self._returned = merged([*self._returned, *self.held(member)])
        self._keep(member, [])

    def reclaim(self, member: str, ranges: Iterable[Range]) -> tuple[Range, ...]:
        """`member` is back and says that it holds `ranges`. Returns those that are its own from now on.

        It may keep what is leased to it still, what came back and was not given to another yet, and what was skipped.
        The rest is committed or another's. What was leased to it and is not in `ranges` (the message was lost on its
        way) comes back.
        """
        own = self.held(member)
        kept = common(ranges, [*own, *self._returned, *self._skipped])
        self._returned = without([*self._returned, *own], kept)
        self._skipped = without(self._skipped, kept)
        self._keep(member, kept)
        return tuple(kept)

    def presume(self, position: int) -> None:
        """Everything below `position` was given out, by books that are lost: skip it, unless its holder claims it."""
        if position > self.position:
            self._skipped = merged([*self._skipped, (self.position, position)])
            self.position = position

    def totals(self) -> dict[str, int]:
        """How many samples are where."""
        leased = sum(count(ranges) for ranges in self._leased.values())
        returned, skipped = count(self._returned), count(self._skipped)
        committed = self.position - leased - returned - skipped
        return {
            "position": self.position,
            "committed": committed,
            "leased": leased,
            "returned": returned,
            "skipped": skipped,
        }

    def _keep(self, member: str, ranges: list[Range]) -> None:
        if ranges:
            self._leased[member] = ranges
        else:
            self._leased.pop(member, None)


def _pairs(ranges: Iterable[Iterable[int]]) -> list[Range]:
    return [(start, stop) for start, stop in ranges]
