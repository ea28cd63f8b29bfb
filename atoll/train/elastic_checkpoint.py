"""Checkpoints of an elastic run: the committed state, and beside it what each island has of its own.

The committed state is written by one island, in the layout of every other checkpoint without the `replica-N` files, so
that it can be generated from, exported and resumed: by an island of one worker as one of one, by an island of many with
a file of rows a worker. What an island has of its own goes where no other island writes:

    islands/seat-K-worker-W.rows.safetensors    inner optimizer, what is owed, and the progress no committed round holds
    islands/seat-K-worker-W.safetensors         the rest: random numbers, samples, counts

Rows are read by full parameter names, so that the next island of a seat may have other stages, or other data workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from atoll.compress.feedback import RESIDUAL
from atoll.elastic.crash import crash_point
from atoll.errors import CheckpointError
from atoll.models import save_model
from atoll.parallel import Shard, ShardReader, optimizer_values, write_shards
from atoll.parallel.sharding import held_shards
from atoll.train.checkpoint import CheckpointWriter, load_json, load_state, refuse_other_config, save_state
from atoll.train.committed import capture_rows, load_rows
from atoll.train.config import essential
from atoll.train.elastic_saved import ISLANDS
from atoll.train.resume import OUTER, STATE, layout_summary, load_anchor
from atoll.train.worker_checkpoint import (
    anchor_file,
    named_rows,
    outer_file,
    read_rows,
    save_whole_model,
    write_rows,
)
from atoll.train.worker_state import Rows, Shards, WholeTensors, load_inner_state, replica_about, replica_rows

if TYPE_CHECKING:
    from atoll.train.crew import Crew
    from atoll.train.island_worker import IslandWorker

CODES = "codes."


def codes_file(worker: int | str) -> str:
    return f"codes-worker-{worker}.safetensors"


# --- the committed state


def save_committed(crew: Crew, *, digest: str, step: int, last_eval_step: int, position: int) -> Path:
    """Write the committed state after global inner step `step`; returns the folder.

    position: the first sample that was never leased, so that a resumed run reads none twice.
    """
    crash_point("island.save")
    worker, config = crew.worker, crew.worker.config
    writer = CheckpointWriter(config.output_dir, step, keep_last=config.keep_last)
    crew.save(step=step)
    crash_point("island.saving")
    about = {
        "step": step,
        "round": crew.round,
        "anchor_digest": digest,
        "last_eval_step": last_eval_step,
        "settings": essential(config),
        "position": position,
    }
    expected = [STATE, "config.json"]
    if worker.part is not None:
        save_whole_model(writer, worker.part.model, worker.data.tokenizer)
        about |= {"layout": layout_summary(config), "counts": [crew.round]}
        expected += [name(index) for index in range(crew.num_workers) for name in (outer_file, codes_file)]
    else:
        expected += [OUTER, "model.safetensors"]
    writer.save_json(STATE, about)
    crash_point("island.before_publish")
    return writer.commit(expected_files=expected)


def save_worker_rows(worker: IslandWorker, *, step: int) -> None:
    """Write this worker's rows of the committed state, or all of it where there is no other worker."""
    config, sync = worker.config, worker.sync
    writer = CheckpointWriter(config.output_dir, step, keep_last=config.keep_last)
    codes = _codes(worker)
    if worker.part is None:
        model, anchor = worker.replica.model, sync.anchor()
        assert isinstance(model, PreTrainedModel)
        writer.save_files(lambda folder: save_model(model, worker.data.tokenizer, folder, weights=anchor))
        writer.save_state(OUTER, sync.shared_state() | {"codes": codes})
        return
    outer = sync.shared_state()["outer"]
    write_rows(writer, outer_file(worker.index), named_rows(outer, worker.shards))
    write_rows(writer, anchor_file(worker.index), named_rows(sync.anchor(), worker.shards))
    writer.save_state(codes_file(worker.index), {"codes": codes})


def _codes(worker: IslandWorker) -> dict[str, Tensor]:
    tensors, _ = capture_rows(worker.sync, worker.owned)
    return {name: value for name, value in tensors.items() if name.startswith(CODES)}


def load_worker(worker: IslandWorker, folder: Path, *, seat: int) -> dict[str, Any]:
    """Take over the committed state of a checkpoint, and what the last island of this seat kept of its own.

    The parameters become the anchor, less the progress that was kept. Returns what is said of the checkpoint, with the
    inner steps that progress is made of, and the books: 0 and "" where there is nothing.
    """
    about = load_json(folder / STATE)
    refuse_other_config(about["settings"], essential(worker.config))
    _load_shared(worker, folder, about)
    worker.sync.rebase(None)
    steps, books, lost = _load_own(worker, Path(worker.config.output_dir), seat=seat)
    return about | {"steps": steps, "books": books, "lost": lost}


def _load_shared(worker: IslandWorker, folder: Path, about: Mapping[str, Any]) -> None:
    anchor = _anchor(worker, folder)
    if "layout" in about:
        outer: Rows = ShardReader(folder.glob(outer_file("*")))
        paths = sorted(folder.glob(codes_file("*")))
        codes = {name: value for path in paths for name, value in load_state(path)["codes"].items()}
        counts = list(about["counts"])
    else:
        saved = load_state(folder / OUTER)
        outer, counts = WholeTensors(saved["outer"]), list(saved["counts"])
        codes = saved.get("codes", {})
    names = worker.sync.shared_state()["outer"]
    assert isinstance(names, Mapping)
    held = {f"anchor.{name}": read_rows(anchor, name, shard) for name, shard in worker.shards.items()}
    for key in names:
        name = key if key in worker.shards else key.partition(".")[2]
        held[f"outer.{key}"] = read_rows(outer, key, worker.shards[name])
    load_rows(worker.sync, worker.owned, held | codes, counts=counts)


def _anchor(worker: IslandWorker, folder: Path) -> Rows:
    if worker.part is None and (folder / "model.safetensors").exists():
        return WholeTensors(load_anchor(folder, worker.replica))  # finds a tied weight under either of its names
    return ShardReader(folder.glob("model*.safetensors"))


# --- what is an island's own


def forget_own(run_dir: Path, *, seat: int) -> None:
    """What the last island of this seat kept: it may have had other workers."""
    for path in (run_dir / ISLANDS).glob(f"seat-{seat}-worker-*"):
        path.unlink(missing_ok=True)


def save_worker_own(worker: IslandWorker, *, seat: int, steps: int, books: str, workers: int) -> None:
    """Keep what this worker has of its own, for the next island that takes its seat here.

    Its progress, which no committed round holds, was made in `steps` inner steps. books: those in which the samples of
    its stream are its own. workers: of the island.
    """
    assert worker.progress is not None, "a worker withdraws before it keeps what it has"
    rows = _optimizer_rows(worker) | _flat_rows("progress/", worker.progress[0], worker.shards)
    residual = [code[RESIDUAL].reshape(-1) for _, _, code in worker.sync.bucket_codes(0) if RESIDUAL in code]
    if residual:
        rows |= _flat_rows("residual/", torch.cat(residual), worker.shards)
    about = {"replica": replica_about(worker.replica), "round": worker.sync.round, "steps": steps, "books": books}
    path = _own_path(Path(worker.config.output_dir), seat, worker.index)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".partial")
    write_shards(draft, rows)
    draft.replace(_rows_of(path))
    save_state(draft, about | {"workers": workers})
    draft.replace(path)


def _optimizer_rows(worker: IslandWorker) -> Shards:
    if worker.part is not None:
        rows = replica_rows(worker.replica, worker.part)
    else:
        values = optimizer_values(worker.replica.trainable(), worker.replica.optimizer)
        rows = {
            f"optimizer/{key}/{name}": shard for key, of in values.items() for name, shard in held_shards(of).items()
        }
    return {name: shard for name, shard in rows.items() if name.startswith("optimizer/")}


def _load_own(worker: IslandWorker, run_dir: Path, *, seat: int) -> tuple[int, str, str]:
    """Inner steps, books, and why there is nothing where there should be."""
    paths = sorted((run_dir / ISLANDS).glob(f"seat-{seat}-worker-*[0-9].safetensors"))
    if not paths:
        return 0, "", ""
    try:
        abouts = [load_state(path) for path in paths]
        first = abouts[0]
        whole = {(about["workers"], about["round"], about["steps"]) for about in abouts}
        if len(whole) > 1 or len(paths) != first["workers"]:
            return 0, "", f"what replica {seat} had of its own is not whole"
        if first["round"] != worker.sync.round:
            return 0, "", ""
        same_place = len(paths) == worker.config.num_workers
        own = abouts[worker.index if same_place else 0]
        _take_own(worker, ShardReader(_rows_of(path) for path in paths), own, same_place=same_place)
    except CheckpointError as error:
        return 0, "", f"what replica {seat} had of its own is lost: {str(error).splitlines()[0]}"
    return int(first["steps"]), str(first["books"]), ""


def _take_own(worker: IslandWorker, rows: ShardReader, about: Mapping[str, Any], *, same_place: bool) -> None:
    """Parameters are not among the rows: they follow from the anchor and the progress."""
    sync = worker.sync
    _fill_residual(worker, rows)
    progress = _flat_of("progress/", rows, worker.shards)
    load_inner_state(worker.replica, rows, about["replica"], same_place=same_place)
    sync.rebase([progress.to(sync.flat_anchors()[0].device)])


def _fill_residual(worker: IslandWorker, rows: ShardReader) -> None:
    if not any(name.startswith("residual/") for name in rows.shapes):
        return
    flat, codes = _flat_of("residual/", rows, worker.shards), []
    for span, shape, code in worker.sync.bucket_codes(0):
        own = {RESIDUAL: flat[span].view(shape).to(code[RESIDUAL])} if RESIDUAL in code else {}
        codes.append(code | own)
    worker.sync.set_codes(0, codes)


def _flat_rows(prefix: str, flat: Tensor, shards: Shards) -> Shards:
    parts = flat.split([shard.tensor.numel() for shard in shards.values()])
    return {
        prefix + name: Shard(part.view(shard.tensor.shape), shard.start, shard.stop, shard.full_shape)
        for (name, shard), part in zip(shards.items(), parts, strict=True)
    }


def _flat_of(prefix: str, rows: ShardReader, shards: Shards) -> Tensor:
    return torch.cat([rows.read(prefix + name, shard.start, shard.stop).float() for name, shard in shards.items()])


def _own_path(run_dir: Path, seat: int, worker: int) -> Path:
    return run_dir / ISLANDS / f"seat-{seat}-worker-{worker}.safetensors"


def _rows_of(path: Path) -> Path:
    return path.with_suffix(".rows.safetensors")
