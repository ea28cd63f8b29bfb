"""Averaging between replicas of different shapes: who holds what, cut where anybody's rows end.

Island 0 has 2 workers, island 1 has 3; a parameter of 12 elements:

    island 0    0 ───────── 0 │ 1 ───────── 1
    island 1    0 ──── 0 │ 1 ──── 1 │ 2 ─── 2
    pieces      └─(0,0)─┘└(0,1)┘└(1,1)┘└(1,2)┘

A piece is held whole by one worker of each island, so those workers average it among themselves: their numbers, one an
island, are its *holders*. Islands of one shape give each worker its counterparts alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.errors import ConfigError

FlatRange = tuple[int, int]
Owners = Sequence[Mapping[str, FlatRange]]  # of one island: for each of its workers, the range it owns of each name


@dataclass(frozen=True, order=True)
class Piece:
    """The elements [start, stop) of one flattened parameter."""

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


def refine(islands: Sequence[Owners]) -> dict[tuple[int, ...], list[Piece]]:
    """The largest pieces that one worker of every island holds, by their holders (a worker of each island, in order).

    Holders come in ascending order, and their pieces by name and start, whatever the order of the input: every worker
    draws the same conclusion. Empty ranges count for nothing.

    >>> two = [{"w": (0, 6)}, {"w": (6, 12)}]
    >>> three = [{"w": (0, 4)}, {"w": (4, 8)}, {"w": (8, 12)}]
    >>> for holders, pieces in refine([two, three]).items():
    ...     print(holders, [(piece.start, piece.stop) for piece in pieces])
    (0, 0) [(0, 4)]
    (0, 1) [(4, 6)]
    (1, 1) [(6, 8)]
    (1, 2) [(8, 12)]

    Raises ConfigError where an island owns an element twice or not at all that another owns.
    """
    covers = [_covers(owners, island) for island, owners in enumerate(islands)]
    _check_names(covers)
    grouped: dict[tuple[int, ...], list[Piece]] = defaultdict(list)
    for name in sorted(covers[0] if covers else ()):
        for holders, start, stop in _meet([cover[name] for cover in covers]):
            grouped[holders].append(Piece(name, start, stop))
    return {holders: grouped[holders] for holders in sorted(grouped)}


_Cover = list[tuple[int, int, int]]  # (start, stop, worker), one after the other from 0


def _covers(owners: Owners, island: int) -> dict[str, _Cover]:
    covers: dict[str, _Cover] = defaultdict(list)
    for worker, ranges in enumerate(owners):
        for name, (start, stop) in ranges.items():
            if stop > start:
                covers[name].append((start, stop, worker))
    for name, cover in covers.items():
        cover.sort()
        expected = 0
        for start, stop, worker in cover:
            if start != expected:
                raise ConfigError(
                    f"island {island} owns elements {min(start, expected)} to {max(start, expected)} of {name} "
                    f"{'twice' if start < expected else 'not at all'} (worker {worker}); every element needs one owner."
                )
            expected = stop
    return covers


def _check_names(covers: Sequence[Mapping[str, _Cover]]) -> None:
    for island, cover in enumerate(covers):
        for name in sorted(cover.keys() ^ covers[0].keys()):
            raise ConfigError(
                f"{name} is a parameter of island {island if name in cover else 0} and not of island "
                f"{0 if name in cover else island}. All islands must train one model."
            )
        for name in sorted(cover):
            if cover[name][-1][1] != covers[0][name][-1][1]:
                raise ConfigError(
                    f"{name} has {covers[0][name][-1][1]} elements on island 0 and {cover[name][-1][1]} on island "
                    f"{island}. All islands must train one model."
                )


def _meet(covers: Sequence[_Cover]) -> list[tuple[tuple[int, ...], int, int]]:
    """Pieces of one parameter in order: cut wherever a range of any island ends."""
    cuts = sorted({stop for cover in covers for _, stop, _ in cover})
    at = [0] * len(covers)
    pieces = []
    start = 0
    for stop in cuts:
        pieces.append((tuple(cover[i][2] for cover, i in zip(covers, at, strict=True)), start, stop))
        at = [i + (cover[i][1] == stop) for cover, i in zip(covers, at, strict=True)]
        start = stop
    return pieces
