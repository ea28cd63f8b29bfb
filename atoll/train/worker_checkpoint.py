"""Checkpoints of replicas of many workers: the layout of every other one, with a file a worker for what is its own.

    config.json, model*.safetensors, tokenizer files     the anchor, put together from the rows of all workers
    outer-worker-0.safetensors, ...                      outer state, of the rows each worker of replica 0 owns
    replica-0-worker-0.rows.safetensors, ...             parameters, inner state, bases, residuals, rounds in flight
    replica-0-worker-0.safetensors, ...                  random numbers, data position, warm starts, ballots

Going on with as many stages and data workers is exact, bit for bit. With others, with one worker, or from a checkpoint
of replicas of one worker, everything is cut anew: exact to rounding. Then dropout draws other numbers, and the warm
start of a matrix whose rows lie otherwise begins afresh.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from atoll.algo.fragments import strided_fragments
from atoll.algo.merge import Ballot
from atoll.errors import CheckpointError
from atoll.models.load import without_progress_bars
from atoll.parallel import ParallelModel, Shard, ShardReader, export_model, write_shards
from atoll.parallel.sharding import held_shards
from atoll.train.checkpoint import CheckpointWriter, load_state
from atoll.train.replica import Member, Replica
from atoll.train.sync import ReplicaSync
from atoll.train.worker_state import (
    FragmentState,
    Rows,
    Shards,
    WholeTensors,
    load_replica,
    pack_fragment,
    replica_about,
    replica_rows,
    rows_of_one_worker,
    unpack_fragment,
)
from atoll.train.workers import ModelPart, ShardSync

if TYPE_CHECKING:
    from atoll.train.run import Run

OUTER = "outer.safetensors"  # outer state of replicas of one worker


def worker_file(replica: int, worker: int) -> str:
    return f"replica-{replica}-worker-{worker}.safetensors"


def rows_file(replica: int, worker: int | str) -> str:
    return f"replica-{replica}-worker-{worker}.rows.safetensors"


def outer_file(worker: int | str) -> str:
    return f"outer-worker-{worker}.safetensors"


def expected_files(run: Run) -> list[str]:
    """What all workers together must have written."""
    workers, replicas = range(run.config.num_workers), range(run.config.replicas)
    own = [name(r, w) for r in replicas for w in workers for name in (worker_file, rows_file)]
    return [*own, *(outer_file(worker) for worker in workers), "config.json"]


# --- saving


def save_worker(run: Run, writer: CheckpointWriter) -> None:
    """Write what is this worker's own, and of replica 0 its rows of what all replicas hold alike. Collective."""
    member, worker = run.members[0], run.workers.index
    replica, sync = member.replica, member.sync
    assert isinstance(replica.trainee, ModelPart) and isinstance(sync, ShardSync)
    part = replica.trainee
    fragments = _pack_fragments(sync, part.shards, elementwise=sync.rows.settings.compressor.elementwise)
    rows = replica_rows(replica, part)
    for fragment in fragments.values():
        rows |= fragment.rows
    own = {index: {"codes": fragment.codes, "flights": fragment.flights} for index, fragment in fragments.items()}
    votes = {index: [ballot.pack().hex() for ballot in sync.votes(index)] for index in range(len(sync.counts))}
    write_rows(writer, rows_file(member.index, worker), rows)
    writer.save_state(worker_file(member.index, worker), replica_about(replica) | {"fragments": own, "votes": votes})
    if member.index == 0:
        write_rows(writer, outer_file(worker), named_rows(sync.rows.shared_state()["outer"], part.shards))
        write_rows(writer, anchor_file(worker), named_rows(sync.anchor(), part.shards))
    run.workers.gather(b".")  # the rows of the anchor are all there


def save_whole_model(writer: CheckpointWriter, model: ParallelModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Put the rows of the anchor together to one Hugging Face folder. By the leading process, when they are there."""
    built = model.stages[0].model
    config = copy.deepcopy(model.config)
    config.architectures = [type(built).__name__]

    def write(folder: Path) -> None:
        parts = sorted(folder.glob(anchor_file("*")))
        export_model(ShardReader(parts), folder, config)
        for path in parts:
            writer.disk.remove(path)
        generation = copy.deepcopy(built.generation_config)
        generation.use_cache = True
        with without_progress_bars():
            generation.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for path in folder.glob("model*.safetensors"):
            _open_to_readers(path)

    writer.save_files(write)


def anchor_file(worker: int | str) -> str:
    """Rows of the anchor, until the model is put together."""
    return f"anchor-worker-{worker}.part"


def write_rows(writer: CheckpointWriter, name: str, rows: Shards) -> None:
    """One file of a worker."""

    def write(folder: Path) -> None:
        write_shards(folder / name, rows)
        _open_to_readers(folder / name)
        writer.disk.sync(folder / name)  # on a network filesystem only who wrote a file can

    writer.save_files(write)


def _open_to_readers(path: Path) -> None:
    """The usual mode; safetensors lets only the owner read what it writes."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def _pack_fragments(sync: ShardSync, shards: Shards, *, elementwise: bool) -> dict[int, FragmentState]:
    """Of the fragments that this worker owns rows of, by their numbers in the whole model."""
    states = sync.rows.replica_state()["fragments"]
    held = [index for index, names in enumerate(sync.fragments) if names]
    assert isinstance(states, list)
    return {
        index: pack_fragment({name: shards[name] for name in sync.fragments[index]}, state, elementwise=elementwise)
        for index, state in zip(held, states, strict=True)
    }


def named_rows(values: Any, shards: Shards) -> Shards:
    """Tensors named KEY.NAME, or NAME, as rows; the parameters say which."""
    by_name: Shards = {}
    for key, value in values.items():
        shard = shards[_parameter(key, shards)]
        by_name[key] = Shard(value, shard.start, shard.stop, shard.full_shape)
    return by_name


def _parameter(key: str, known: Collection[str]) -> str:
    """The name of the parameter in NAME or STATE.NAME.

    >>> _parameter("momentum.model.norm", ["model.norm"]), _parameter("model.norm", ["model.norm"])
    ('model.norm', 'model.norm')
    """
    return key if key in known else key.partition(".")[2]


# --- going on


@dataclass(frozen=True)
class _Saved:
    """One replica in a checkpoint, as far as this process needs it.

    rows: of parameters and all state of their shapes. about: what `replica_about` said. fragments: by number, other
    state of compressors and the flights. votes: ballots of fragments that this worker owns nothing of.
    """

    rows: Rows
    about: Mapping[str, Any]
    fragments: Mapping[int, Mapping[str, Any]]
    votes: Mapping[int, Sequence[str]]
    same_place: bool


@dataclass(frozen=True)
class _Now:
    """What this process holds of a replica. fragments: the names it owns rows of, by number in the whole model."""

    replica: Replica
    sync: ReplicaSync
    shards: Shards
    fragments: Sequence[Sequence[str]]

    @property
    def held(self) -> list[int]:
        return [index for index, names in enumerate(self.fragments) if names]

    def shards_of(self, index: int) -> Shards:
        return {name: self.shards[name] for name in self.fragments[index]}


def load_member(
    member: Member, folder: Path, summary: Mapping[str, Any], *, worker: int, layout: Mapping[str, object] | None
) -> None:
    """Put one replica, or the worker that this process is of one, where the checkpoint `folder` was taken.

    layout: data workers and stages, None for one worker; the summary has those of who saved.
    """
    now = _held_now(member)
    counts = _load_shared(now, folder, summary)
    if "layout" not in summary:
        saved = _saved_by_one(member, now, folder)
    elif summary["layout"] == layout:
        saved = _saved_here(member.index, worker, folder)
    else:
        saved = _saved_by_others(member.index, now, folder, summary["layout"])
    load_replica(now.replica, saved.rows, saved.about, same_place=saved.same_place)
    now.sync.load_replica_state({"fragments": _fragments(now, saved)})
    if isinstance(member.sync, ShardSync):
        member.sync.counts = counts
        for index, votes in saved.votes.items():
            for ballot in votes:
                member.sync.vote(index, Ballot.unpack(bytes.fromhex(ballot)))


def _held_now(member: Member) -> _Now:
    replica, sync = member.replica, member.sync
    if isinstance(sync, ShardSync):
        return _Now(replica, sync.rows, sync.part.shards, sync.fragments)
    assert isinstance(sync, ReplicaSync), "settings keep many workers and data parallelism apart"
    params = replica.trainable()
    return _Now(replica, sync, held_shards(params), strided_fragments(list(params), sync.num_fragments))


def _load_shared(now: _Now, folder: Path, summary: Mapping[str, Any]) -> list[int]:
    """Take over the anchor and the outer state; returns the counts of outer steps of all fragments."""
    anchor = ShardReader(folder.glob("model*.safetensors"))
    if "layout" in summary:
        outer: Rows = ShardReader(folder.glob(outer_file("*")))
        counts = list(summary["counts"])
    else:
        saved = load_state(folder / OUTER)
        outer, counts = WholeTensors(saved["outer"]), list(saved["counts"])
    names = now.sync.shared_state()["outer"]
    assert isinstance(names, Mapping)
    tensors = {key: read_rows(outer, key, now.shards[_parameter(key, now.shards)]) for key in names}
    now.sync.load_shared_state(
        {name: read_rows(anchor, name, shard) for name, shard in now.shards.items()},
        {"outer": tensors, "counts": [counts[index] for index in now.held]},
    )
    return counts


def _saved_here(replica: int, worker: int, folder: Path) -> _Saved:
    """By this very worker of the same layout."""
    about = load_state(folder / worker_file(replica, worker))
    rows = ShardReader(folder.glob(rows_file(replica, "*")))
    return _Saved(rows, about, about["fragments"], about["votes"], same_place=True)


def _saved_by_one(member: Member, now: _Now, folder: Path) -> _Saved:
    """By a replica of one worker."""
    own = load_state(folder / f"replica-{member.index}.safetensors")
    elementwise = now.sync.settings.compressor.elementwise
    whole = strided_fragments(list(own["replica"]["params"]), len(now.fragments))
    rows, about, packed = rows_of_one_worker(own, whole, elementwise=elementwise)
    fragments = {index: {"codes": item.codes, "flights": item.flights} for index, item in enumerate(packed)}
    return _Saved(rows, about, fragments, _votes(now, fragments), same_place=False)


def _saved_by_others(replica: int, now: _Now, folder: Path, then: Mapping[str, int]) -> _Saved:
    """By the workers of another layout. One file at a time: of most there is nothing to keep."""
    first: Mapping[str, Any] = {}
    fragments: dict[int, dict[str, Any]] = {}
    for worker in range(then["data_workers"] * then["pipeline_stages"]):
        about = load_state(folder / worker_file(replica, worker))
        first = first or about
        for index, saved in about["fragments"].items():
            kept = fragments.setdefault(index, {"codes": {}, "flights": saved["flights"]})
            kept["codes"] |= {name: code for name, code in saved["codes"].items() if _fits(now, name, code)}
    rows = ShardReader(folder.glob(rows_file(replica, "*")))
    return _Saved(rows, first, fragments, _votes(now, fragments), same_place=False)


def _votes(now: _Now, fragments: Mapping[int, Mapping[str, Any]]) -> dict[int, list[str]]:
    """The ballots in flight of the fragments that this worker owns nothing of: as those who do voted."""
    absent = set(range(len(now.fragments))) - set(now.held)
    return {index: [flown["ballot"] for flown in fragments[index]["flights"]] for index in sorted(absent)}


def _fits(now: _Now, name: str, code: Mapping[str, Any]) -> bool:
    return name in now.shards and code["rows"] == list(now.shards[name].flat_range)


def _fragments(now: _Now, saved: _Saved) -> list[dict[str, Any]]:
    """What `load_replica_state` takes."""
    begun = now.sync.replica_state()["fragments"]
    assert isinstance(begun, list)
    return [
        unpack_fragment(now.shards_of(index), saved.rows, saved.fragments[index], fresh=state["codes"])
        for index, state in zip(now.held, begun, strict=True)
    ]


def read_rows(rows: Rows, name: str, shard: Shard) -> Tensor:
    """What `rows` has of a tensor where `shard` lies, in its shape. Raises CheckpointError."""
    if rows.shapes.get(name) != shard.full_shape:
        raise CheckpointError(
            f"the checkpoint has no {name!r} of shape {list(shard.full_shape)}; it belongs to another model. "
            "Resume with the model it was saved from."
        )
    return rows.read(name, shard.start, shard.stop).view(shard.tensor.shape)
