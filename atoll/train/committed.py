"""The committed state of a run as named tensors, whole or in pieces: what a joiner receives.

    anchor.NAME@START                    the agreed parameters, fp32: the rows that begin at element START
    outer.KEY.NAME@START                 state of the outer optimizer, of the same rows
    codes.KEY.START.STOP.NAME            what compressors hold alike on all islands (warm starts), of just these rows

Each worker of the island that gives it names its own rows, and each worker of the one that takes it reads those that it
has, however either of them is laid out. A warm start of rows that nobody has as they are there begins anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from atoll.compress.base import shared_part
from atoll.errors import CheckpointError
from atoll.exchange import State
from atoll.train.anchor_digest import OwnedRows
from atoll.train.sync import Arrived, ReplicaSync

Tensors = dict[str, Tensor]


def capture_rows(sync: ReplicaSync, owned: Sequence[OwnedRows]) -> tuple[Tensors, dict[str, Any]]:
    """A copy of the committed state of the rows of one worker, and what belongs to it: counts, whole shapes."""
    outer = sync.shared_state()["outer"]
    assert isinstance(outer, Mapping)
    rows = {one.name: one for one in owned}
    tensors, shapes = {}, {}
    values = {f"anchor.{name}": (name, value) for name, value in sync.anchor().items()}
    values |= {f"outer.{key}": (key if key in rows else key.partition(".")[2], value) for key, value in outer.items()}
    for key, (name, value) in values.items():
        tensors[f"{key}@{rows[name].start}"] = value.detach().cpu().clone()
        shapes[key] = list(rows[name].shape)
    for code, one in tensor_codes(sync, owned):
        for key, value in shared_part(code).items():
            tensors[f"codes.{key}.{one.span}"] = value.detach().cpu().clone()
    return tensors, {"shapes": shapes, "counts": [sync.round]}


def foresee_rows(
    sync: ReplicaSync, owned: Sequence[OwnedRows], arrived: Arrived, *, step: int
) -> tuple[Tensors, dict[str, Any]]:
    """As `capture_rows`, of the state that landing `arrived` at inner step `step` will leave; `sync` does not move.

    For rounds that are committed and land later: until then nobody holds their state, and a joiner needs it.
    """
    ahead = ReplicaSync({name: value.clone() for name, value in sync.anchor().items()}, sync.transport, sync.settings)
    CommittedRows.of(sync).put_back(ahead)
    ahead.take(0, weight=1.0)
    means = [(mean.clone(), code) for mean, code in arrived.means]  # an outer optimizer may write into them
    ahead.land(0, replace(arrived, means=means), step=step)
    return capture_rows(ahead, owned)


@dataclass(frozen=True)
class CommittedRows:
    """A copy of everything committed that one worker holds, to be put back."""

    anchor: Tensors
    shared: dict[str, object]
    codes: list[State]

    @classmethod
    def of(cls, sync: ReplicaSync) -> CommittedRows:
        shared = sync.shared_state()
        outer = shared["outer"]
        assert isinstance(outer, Mapping)
        copied = {"outer": {name: value.clone() for name, value in outer.items()}, "counts": shared["counts"]}
        anchor = {name: value.clone() for name, value in sync.anchor().items()}
        return cls(anchor, copied, [dict(code) for _, _, code in sync.bucket_codes(0)])

    def put_back(self, sync: ReplicaSync) -> None:
        sync.load_shared_state(self.anchor, self.shared)
        sync.set_codes(0, self.codes)


class PiecedState:
    """A state as it came, from which any rows can be read. about: the whole `shapes` by name, `counts` of outer steps.

    Raises CheckpointError where it is not whole.
    """

    def __init__(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        self.codes = {name: value for name, value in tensors.items() if name.startswith("codes.")}
        self.shapes, self.counts = _shapes(about.get("shapes")), _counts(about.get("counts"))
        self._parts: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
        for name, value in tensors.items():
            if name not in self.codes:
                key, _, start = name.rpartition("@")
                self._parts[key].append((_count(start), value.reshape(-1)))
        for parts in self._parts.values():
            parts.sort(key=lambda part: part[0])

    def of(self, owned: Sequence[OwnedRows]) -> Tensors:
        """What a worker that owns these rows holds of it, by names without a start."""
        rows = {one.name: one for one in owned}
        held = {}
        for key, shape in self.shapes.items():
            one = rows.get(parameter_of(key, rows))
            if one is not None:
                if shape != one.shape:
                    raise CheckpointError(f"the state has {key} of shape {list(shape)}, not {list(one.shape)}.")
                held[key] = self._read(key, one.start, one.stop).view(one.local_shape)
        return held | {name: value for name, value in self.codes.items() if _is_of(name, rows)}

    def _read(self, key: str, start: int, stop: int) -> Tensor:
        read, at = [], start
        for begin, flat in self._parts[key]:
            if at < stop and begin <= at < begin + flat.numel():
                part = flat[at - begin : stop - begin]
                read.append(part)
                at += part.numel()
        if at < stop:
            raise CheckpointError(f"the state lacks elements {at} to {stop} of {key}. Fetch it from another island.")
        return read[0] if len(read) == 1 else torch.cat(read) if read else torch.empty(0)


def cut_to(name: str, tensor: Tensor, owned: Sequence[OwnedRows]) -> Tensors:
    """Of a named piece what a worker that owns these rows needs, named as such a piece: nothing, or one."""
    rows = {one.name: one for one in owned}
    if name.startswith("codes."):
        return {name: tensor} if name.count(".") > 3 and _is_of(name, rows) else {}
    key, _, begins = name.rpartition("@")
    one, start = rows.get(parameter_of(key, rows)), _count(begins)
    if one is None or tensor.dtype != torch.float32:
        return {}
    first, last = max(start, one.start), min(start + tensor.numel(), one.stop)
    return {f"{key}@{first}": tensor.reshape(-1)[first - start : last - start]} if first < last else {}


def parameter_of(key: str, known: Container[str]) -> str:
    """The parameter that `anchor.NAME`, `outer.NAME` or `outer.KEY.NAME` is of."""
    kind, _, rest = key.partition(".")
    return rest if kind == "anchor" or rest in known else rest.partition(".")[2]


def load_rows(
    sync: ReplicaSync, owned: Sequence[OwnedRows], tensors: Mapping[str, Tensor], *, counts: Sequence[int]
) -> None:
    """Take over what `PiecedState.of` gave. The parameters are left as they are: see `ReplicaSync.rebase`."""
    sync.load_shared_state(_part(tensors, "anchor."), {"outer": _part(tensors, "outer."), "counts": list(counts)})
    load_codes(sync, owned, tensors)


def load_codes(sync: ReplicaSync, owned: Sequence[OwnedRows], tensors: Mapping[str, Tensor]) -> None:
    """What compressors hold alike; of rows of which nothing came it begins anew. What a replica owes stays."""
    by_rows: dict[str, State] = defaultdict(dict)
    for name, value in _part(tensors, "codes.").items():
        key, rows = name.split(".", 1)
        by_rows[rows][key] = value
    names = {id(code): one.span for code, one in tensor_codes(sync, owned)}
    codes = []
    for _, shape, code in sync.bucket_codes(0):
        own = {key: value for key, value in code.items() if key not in shared_part(code)}
        fresh = shared_part(sync.settings.compressor.init(shape))
        codes.append(fresh | by_rows.get(names.get(id(code), ""), {}) | own)
    sync.set_codes(0, codes)


def tensor_codes(sync: ReplicaSync, owned: Sequence[OwnedRows]) -> list[tuple[State, OwnedRows]]:
    """The state of compressors that look at tensors, with the rows it is of; none of others: they share nothing."""
    if sync.settings.compressor.elementwise:
        return []
    held = [one for one in owned if one.numel]
    return [(code, one) for (_, _, code), one in zip(sync.bucket_codes(0), held, strict=True)]


def _is_of(name: str, rows: Mapping[str, OwnedRows]) -> bool:
    _, _, start, stop, parameter = name.split(".", 4)
    one = rows.get(parameter)
    return one is not None and one.span == f"{start}.{stop}.{parameter}"


def _part(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _shapes(told: object) -> dict[str, tuple[int, ...]]:
    if not isinstance(told, Mapping) or not all(_are_counts(shape) for shape in told.values()):
        raise CheckpointError("the state says no shapes of its tensors. Fetch it from another island.")
    return {str(key): tuple(shape) for key, shape in told.items()}


def _counts(told: object) -> list[int]:
    if not isinstance(told, list) or len(told) != 1 or not _are_counts(told):
        raise CheckpointError(f"the state says {str(told)[:40]} for its outer steps. Fetch it from another island.")
    return told


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise CheckpointError(f"the state has a tensor that begins at {text[:20]!r}, which is no element.")
    return int(text)
