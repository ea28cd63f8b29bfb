"""The state of a replica of many workers on disk: rows of tensors by full parameter names, whatever the layout.

    params/NAME            optimizer/KEY/NAME
    base/NAME              flight-0/NAME                 residual/NAME        rows, as their owner holds them
    everything else        one small file a worker: random numbers, data position, warm starts, ballots

A worker reads the rows that it has, from whichever files have them: of the same layout it gets back its own, bit for
bit, and of another one (other stages, other data workers, one worker alone) what the others had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.compress.feedback import RESIDUAL
from atoll.errors import CheckpointError
from atoll.parallel import Shard, make_optimizer_state_, optimizer_values
from atoll.parallel.sharding import held_shards
from atoll.train.replica import Replica
from atoll.train.workers import ModelPart

Shards = dict[str, Shard]


class Rows(Protocol):
    """Where rows are read from. shapes: of the whole tensors, by name."""

    shapes: dict[str, torch.Size]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """The elements [start, stop) of the flattened tensor."""
        ...


class WholeTensors:
    """Rows of tensors that are in memory whole."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.shapes = {name: tensor.shape for name, tensor in tensors.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"the checkpoint lacks the tensor {name}; it belongs to another model.")
        return self._tensors[name].reshape(-1)[start:stop]


@dataclass
class FragmentState:
    """One fragment of one worker: what `ReplicaSync.replica_state` says of it, by names instead of flat.

    shards: the rows this worker owns of it, in the order in which they lie in flat buffers. rows: by key and name.
    codes: other state of compressors, by parameter and key, with the rows it belongs to. flights: of each, without its
    contribution, which is among the rows.
    """

    shards: Shards
    rows: Shards = field(default_factory=dict)
    codes: dict[str, Any] = field(default_factory=dict)
    flights: list[dict[str, Any]] = field(default_factory=list)


def pack_fragment(shards: Shards, state: Mapping[str, Any], *, elementwise: bool) -> FragmentState:
    """Name what `replica_state` holds of a fragment. elementwise: whether compressors see buckets, or tensors."""
    packed = FragmentState(shards)
    if state["base"] is not None:
        packed.rows |= _by_name("base/", state["base"], shards)
    for number, flown in enumerate(state["flights"]):
        if flown["contribution"] is not None:
            packed.rows |= _by_name(f"flight-{number}/", flown["contribution"], shards)
        packed.flights.append({key: value for key, value in flown.items() if key != "contribution"})
    residuals = [code[RESIDUAL].reshape(-1) for code in state["codes"] if RESIDUAL in code]
    if residuals:
        packed.rows |= _by_name("residual/", torch.cat(residuals), shards)
    others = [{key: value for key, value in code.items() if key != RESIDUAL} for code in state["codes"]]
    if elementwise:
        assert not any(others), "say here how the state of buckets is cut into rows"
    else:
        for (name, shard), code in zip(shards.items(), others, strict=True):
            packed.codes[name] = {"rows": list(shard.flat_range), "code": code}
    return packed


def unpack_fragment(
    shards: Shards, rows: Rows, saved: Mapping[str, Any], *, fresh: Sequence[Mapping[str, Tensor]]
) -> dict[str, Any]:
    """What `load_replica_state` takes for a fragment, for a worker that owns `shards` of it.

    rows: of whoever saved it. saved: its `codes` and `flights`. fresh: the state that compressors begin with, by
    bucket: it stays where what was saved belongs to other rows.
    """
    base = _flat("base/", shards, rows)
    flights = [
        {**flown, "contribution": _flat(f"flight-{number}/", shards, rows)}
        for number, flown in enumerate(saved["flights"])
    ]
    codes = [dict(code) for code in fresh]
    for name, code in zip(shards, codes, strict=False):
        was = saved["codes"].get(name)
        if was is not None and was["rows"] == list(shards[name].flat_range):
            code.update(was["code"])
    residual = _flat("residual/", shards, rows)
    if residual is not None:
        _fill_residuals(codes, residual)
    return {"base": base, "codes": codes, "flights": flights}


def _by_name(prefix: str, flat: Tensor, shards: Shards) -> Shards:
    parts = flat.split([shard.tensor.numel() for shard in shards.values()])
    return {
        prefix + name: Shard(part.view(shard.tensor.shape), shard.start, shard.stop, shard.full_shape)
        for (name, shard), part in zip(shards.items(), parts, strict=True)
    }


def _flat(prefix: str, shards: Shards, rows: Rows) -> Tensor | None:
    """The rows of a key one after the other; None where nothing of it was saved."""
    if not any(prefix + name in rows.shapes for name in shards):
        return None
    device = next(iter(shards.values())).tensor.device
    parts = [rows.read(prefix + name, shard.start, shard.stop) for name, shard in shards.items()]
    return torch.cat(parts).to(device)


def _fill_residuals(codes: Sequence[dict[str, Tensor]], flat: Tensor) -> None:
    owing = [code for code in codes if RESIDUAL in code]
    parts = flat.split([code[RESIDUAL].numel() for code in owing])
    for code, part in zip(owing, parts, strict=True):
        code[RESIDUAL] = part.view(code[RESIDUAL].shape).to(code[RESIDUAL].dtype)


# --- the replica's own


def replica_rows(replica: Replica, part: ModelPart) -> Shards:
    """Parameters and inner optimizer, of the rows this worker owns."""
    rows = {f"params/{name}": shard for name, shard in part.shards.items()}
    for key, values in optimizer_values(part.params, replica.optimizer).items():
        owned = part.model.shards(values)
        rows |= {f"optimizer/{key}/{name}": shard for name, shard in owned.items() if shard.stop > shard.start}
    return rows


def replica_about(replica: Replica) -> dict[str, Any]:
    """The rest: random numbers, data position, counts."""
    counts = [int(state["step"]) for state in replica.optimizer.state.values() if "step" in state]
    return {
        "random_state": replica.random_state,
        "stream": replica.stream.state_dict(),
        "tokens": replica.tokens,
        "tokens_at_sync": replica.tokens_at_sync,
        "optimizer_steps": max(counts, default=0),
    }


@torch.no_grad()
def load_replica(replica: Replica, rows: Rows, about: Mapping[str, Any], *, same_place: bool) -> None:
    """Take over a replica's state. same_place: it is that of the same worker of the same layout."""
    _fill(held_by(replica, replica.trainable()), rows, "params/")
    load_inner_state(replica, rows, about, same_place=same_place)


@torch.no_grad()
def load_inner_state(replica: Replica, rows: Rows, about: Mapping[str, Any], *, same_place: bool) -> None:
    """As `load_replica`, without the parameters."""
    replica.start_afresh()
    keys = sorted({name.split("/")[1] for name in rows.shapes if name.startswith("optimizer/")})
    if keys:
        make_optimizer_state_(replica.trainable(), replica.optimizer, keys=keys, step=about["optimizer_steps"])
        for key, values in optimizer_values(replica.trainable(), replica.optimizer).items():
            _fill(held_by(replica, values), rows, f"optimizer/{key}/")
    if same_place:
        replica.random_state = about["random_state"]
    replica.stream.load_state_dict(about["stream"])
    replica.tokens = about["tokens"]
    replica.tokens_at_sync = about["tokens_at_sync"]


def held_by(replica: Replica, values: Mapping[str, Tensor]) -> list[tuple[str, Shard]]:
    """The rows of `values` that this process holds, under the names of their owners."""
    if isinstance(replica.trainee, ModelPart):
        return replica.trainee.model.held(values)
    return list(held_shards(values).items())


def _fill(held: Sequence[tuple[str, Shard]], rows: Rows, prefix: str) -> None:
    for name, shard in held:
        if rows.shapes.get(prefix + name) != shard.full_shape:
            raise CheckpointError(
                f"the checkpoint has no {prefix + name} of shape {list(shard.full_shape)}; it belongs to another "
                "model. Resume with the model it was saved from."
            )
        shard.tensor.copy_(rows.read(prefix + name, shard.start, shard.stop).view(shard.tensor.shape))


# --- a replica that was saved by one worker


def rows_of_one_worker(
    own: Mapping[str, Any], fragments: Sequence[Sequence[str]], *, elementwise: bool
) -> tuple[WholeTensors, dict[str, Any], list[FragmentState]]:
    """The state of a replica of one worker, as it is in its file, in the form of many: rows, about, fragments."""
    replica = own["replica"]
    params: Mapping[str, Tensor] = replica["params"]
    tensors = {f"params/{name}": value for name, value in params.items()}
    steps = 0
    for name, state in _optimizer_states(params, replica["optimizer"]):
        steps = int(state.get("step", 0))
        tensors |= {f"optimizer/{key}/{name}": value for key, value in state.items() if key != "step"}
    whole = {name: Shard(value, 0, value.numel(), value.shape) for name, value in params.items()}
    packed = [
        pack_fragment({name: whole[name] for name in names}, state, elementwise=elementwise)
        for names, state in zip(fragments, own["sync"]["fragments"], strict=True)
    ]
    for fragment in packed:
        tensors |= {name: shard.tensor for name, shard in fragment.rows.items()}
    about = {key: replica[key] for key in ("random_state", "stream", "tokens", "tokens_at_sync")}
    return WholeTensors(tensors), about | {"optimizer_steps": steps}, packed


def _optimizer_states(
    params: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """State by name: an optimizer numbers its parameters, matrices first (`build_inner_optimizer`)."""
    names = [name for name, value in params.items() if value.dim() >= 2]
    names += [name for name, value in params.items() if value.dim() < 2]
    for number, state in saved["state"].items():
        yield names[number], state
