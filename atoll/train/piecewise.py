"""One round between islands of different shapes: each pair of rows that meet is averaged by itself.

    island 0, 2 workers    ────── worker 0 ──────┬────── worker 1 ──────
    island 1, 1 worker     ───────────────── worker 0 ─────────────────
    groups                       (0, 0)          │       (1, 0)

`atoll.parallel.refine` says which pieces are whose; here one worker averages those it has a part in, group by group in
the order that all know, and puts the results together to what it would have got from counterparts of its own shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.algo import merge
from atoll.algo.merge import Ballot
from atoll.compress.base import settle, shared_part
from atoll.compress.feedback import RESIDUAL
from atoll.exchange import Exchange, State, Traffic
from atoll.parallel import Piece
from atoll.train.anchor_digest import OwnedRows, row_width
from atoll.train.committed import tensor_codes
from atoll.train.sync import OuterSettings, ReplicaSync, WeighedTransport


@dataclass(frozen=True)
class Group:
    """Processes, one of each island, that hold `pieces` in common. transport: leads to the others."""

    transport: WeighedTransport
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Pieced:
    """What the groups of a worker came to: of each of its buckets the mean and the next state, and what was sent."""

    packed: Sequence[bytes]
    means: list[tuple[Tensor, State]]
    sent: Traffic


@dataclass(frozen=True)
class _Unit:
    """What a compressor sees at a time. spans: of the worker's flat buffer, one after the other in the unit."""

    spans: tuple[slice, ...]
    shape: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        return torch.cat([flat[span] for span in self.spans]).view(self.shape)

    def fill(self, flat: Tensor, values: Tensor) -> None:
        parts = values.reshape(-1).split([span.stop - span.start for span in self.spans])
        for span, part in zip(self.spans, parts, strict=True):
            flat[span] = part


def average_pieces(
    rows: ReplicaSync,
    owned: Sequence[OwnedRows],
    groups: Sequence[Group],
    weights: Sequence[float],
    *,
    ballot: Ballot,
    offered: bool,
    codes: frozenset[str],
) -> Pieced:
    """Average what `rows` offered, or listen, in the groups that this worker is of. Nothing of it changes.

    ballot: shown in every group. codes: the rows (`OwnedRows.span`) of which compressors hold the same on all islands;
    that of others begins anew, as of a matrix that is cut in this round.
    """
    settings = rows.settings
    numel = sum(one.numel for one in owned)
    delta = rows.oldest_offer(0) if offered else torch.zeros(numel)
    mean, residual = torch.zeros_like(delta), _residual(rows)
    before = _Codes(rows, residual, _shared(rows, owned, codes))
    shared: dict[tuple[int, int], State] = {}
    packed: Sequence[bytes] = ()
    payload_bytes, waited_s, grams = 0, 0.0, []
    for group in groups:
        units = list(_units(group.pieces, owned, settings))
        exchanges = _exchanges(units, delta, before, settings, counted=offered)
        flight = group.transport.launch(ballot.pack(), merge.weigh, exchanges, weights=weights)
        for unit, (part, state) in zip(units, flight.results(), strict=True):
            unit.fill(mean, part)
            if residual is not None and RESIDUAL in state:
                unit.fill(residual, state[RESIDUAL].to(residual.dtype))
            if len(unit.spans) == 1:
                shared[unit.spans[0].start, unit.spans[0].stop] = shared_part(state)
        packed, traffic = flight.ballots(), flight.traffic()
        payload_bytes += traffic.payload_bytes
        waited_s += traffic.waited_s
        grams.append(traffic.gram)
    whole = [gram for gram in grams if gram is not None]
    gram = torch.stack(whole).sum(0) if whole and len(whole) == len(grams) else None
    return Pieced(packed, _by_bucket(rows, mean, residual, shared), Traffic(payload_bytes, gram, waited_s))


class _Codes:
    """What compressors begin a unit with."""

    def __init__(self, rows: ReplicaSync, residual: Tensor | None, shared: Mapping[tuple[int, int], State]) -> None:
        self._compressor = rows.settings.compressor
        self._residual = None if residual is None else residual.clone()
        self._shared = shared

    def of(self, unit: _Unit) -> State:
        state = self._compressor.init(unit.shape)
        if len(unit.spans) == 1:
            state = state | self._shared.get((unit.spans[0].start, unit.spans[0].stop), {})
        if self._residual is not None:
            state[RESIDUAL] = unit.of(self._residual)
        return state


def _shared(rows: ReplicaSync, owned: Sequence[OwnedRows], codes: frozenset[str]) -> dict[tuple[int, int], State]:
    """What compressors hold alike on all islands, by place in the flat buffer."""
    shared, at = {}, 0
    for code, one in tensor_codes(rows, owned):
        if one.span in codes:
            shared[at, at + one.numel] = shared_part(code)
        at += one.numel
    return shared


def _exchanges(
    units: Sequence[_Unit], delta: Tensor, before: _Codes, settings: OuterSettings, *, counted: bool
) -> Iterator[Exchange]:
    for unit in units:
        state = before.of(unit)
        yield _settled(settings.compressor.average(unit.of(delta), state), state, counted)


def _settled(exchange: Exchange, before: State, counted: bool) -> Exchange:
    mean, code = yield from exchange
    return mean, settle(before, code, counted=counted)


def _residual(rows: ReplicaSync) -> Tensor | None:
    """What is owed by elements, flat: a copy. None without error feedback."""
    owed = [code[RESIDUAL].reshape(-1) for _, _, code in rows.bucket_codes(0) if RESIDUAL in code]
    return torch.cat(owed) if owed else None


def _units(pieces: Sequence[Piece], owned: Sequence[OwnedRows], settings: OuterSettings) -> Iterator[_Unit]:
    """The same cuts on all islands: by the pieces alone."""
    spans, shapes = _spans(pieces, owned)
    if not settings.compressor.elementwise:
        for span, shape in zip(spans, shapes, strict=True):
            yield _Unit((span,), shape)
        return
    waiting: list[slice] = []
    room = settings.bucket_elements
    for span in spans:
        start = span.start
        while start < span.stop:
            part = slice(start, min(span.stop, start + room))
            waiting.append(part)
            room -= part.stop - part.start
            start = part.stop
            if not room:
                yield _together(waiting)
                waiting, room = [], settings.bucket_elements
    if waiting:
        yield _together(waiting)


def _together(spans: Sequence[slice]) -> _Unit:
    return _Unit(tuple(spans), (sum(span.stop - span.start for span in spans),))


def _spans(pieces: Sequence[Piece], owned: Sequence[OwnedRows]) -> tuple[list[slice], list[tuple[int, ...]]]:
    """Where pieces lie in the flat buffer of a worker, and their shapes as rows."""
    begins, at = {}, 0
    for one in owned:
        begins[one.name] = (at, one)
        at += one.numel
    spans, shapes = [], []
    for piece in pieces:
        offset, one = begins[piece.name]
        start = offset + piece.start - one.start
        spans.append(slice(start, start + piece.numel))
        shapes.append((piece.numel // row_width(one.shape), *one.shape[1:]))
    return spans, shapes


def _by_bucket(
    rows: ReplicaSync, mean: Tensor, residual: Tensor | None, shared: Mapping[tuple[int, int], State]
) -> list[tuple[Tensor, State]]:
    """In the buckets of the worker itself. A matrix that was cut begins anew with what all hold alike."""
    result = []
    for span, shape, _ in rows.bucket_codes(0):
        fresh = shared_part(rows.settings.compressor.init(shape))
        state = fresh | shared.get((span.start, span.stop), {})
        if residual is not None:
            state[RESIDUAL] = residual[span].view(shape)
        result.append((mean[span].view(shape), state))
    return result
