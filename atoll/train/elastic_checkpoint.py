"""Checkpoints of an elastic run: the committed state, and beside it what each island has of its own.

The committed state is written by one island, in the layout of every other checkpoint without the `replica-N` files, so
that it can be generated from, exported and resumed. What an island has of its own goes where no other island writes:

    islands/seat-K.safetensors    inner optimizer state, random numbers, and the progress no committed round holds yet
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from atoll.data.stream import LeasedStream
from atoll.elastic.crash import crash_point
from atoll.errors import CheckpointError
from atoll.models import save_model
from atoll.train.checkpoint import CheckpointWriter, load_json, load_state, refuse_other_config, save_state
from atoll.train.config import TrainConfig, essential
from atoll.train.elastic_saved import ISLANDS
from atoll.train.resume import OUTER, STATE, load_anchor

if TYPE_CHECKING:
    from atoll.train.replica import Replica
    from atoll.train.sync import ReplicaSync


def save_committed(
    config: TrainConfig,
    *,
    replica: Replica,
    sync: ReplicaSync,
    tokenizer: PreTrainedTokenizerBase,
    step: int,
    last_eval_step: int,
    position: int,
) -> Path:
    """Write the committed state after global inner step `step`; returns the folder.

    position: the first sample that was never leased, so that a resumed run reads none twice.
    """
    crash_point("island.save")
    writer = CheckpointWriter(config.output_dir, step, keep_last=config.keep_last)
    model, anchor = replica.model, sync.anchor()
    assert isinstance(model, PreTrainedModel)
    writer.save_files(lambda folder: save_model(model, tokenizer, folder, weights=anchor))
    crash_point("island.saving")
    writer.save_state(OUTER, sync.shared_state() | {"codes": sync.shared_codes()})
    about = {
        "step": step,
        "round": sync.round,
        "anchor_digest": sync.digest(),
        "last_eval_step": last_eval_step,
        "settings": essential(config),
        "position": position,
    }
    writer.save_json(STATE, about)
    crash_point("island.before_publish")
    return writer.commit(expected_files=[OUTER, STATE, "config.json", "model.safetensors"])


def load_committed(folder: Path, config: TrainConfig, *, replica: Replica, sync: ReplicaSync) -> dict[str, Any]:
    """Take over the committed state of a checkpoint; the parameters become the anchor. Returns what is said of it."""
    about = load_json(folder / STATE)
    refuse_other_config(about["settings"], essential(config))
    shared = load_state(folder / OUTER)
    sync.load_shared_state(load_anchor(folder, replica), shared)
    sync.load_shared_codes(shared.get("codes", {}))
    sync.rebase(None)
    if sync.digest() != about["anchor_digest"]:
        raise CheckpointError(
            f"{folder.name} says digest {about['anchor_digest'][:8]} and holds {sync.digest()[:8]}. Use another one."
        )
    return about


def save_own(
    run_dir: Path,
    *,
    seat: int,
    replica: Replica,
    sync: ReplicaSync,
    steps: int,
    progress: Sequence[Tensor],
    books: str,
) -> None:
    """Keep what this island has of its own, for the next island that takes its seat here.

    progress: what no committed round holds, made in `steps` inner steps. books: those in which the samples of its
    stream are its own.
    """
    assert isinstance(replica.stream, LeasedStream)
    state = replica.state_dict()
    del state["params"]
    own = {"round": sync.round, "replica": state, "steps": steps, "progress": list(progress), "books": books}
    own["codes"] = [fragment["codes"] for fragment in _fragments(sync)]
    path = _own_path(run_dir, seat)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_state(path.with_suffix(".partial"), own)
    path.with_suffix(".partial").replace(path)


def load_own(
    run_dir: Path, *, seat: int, replica: Replica, sync: ReplicaSync, warn: Callable[[str], None]
) -> tuple[int, str]:
    """Go on from what the last island of this seat kept, if it is of the round that `sync` holds.

    Returns the inner steps that its progress is made of, and the books: 0 and "" where there is nothing.
    """
    path = _own_path(run_dir, seat)
    if not path.exists():
        return 0, ""
    try:
        own = load_state(path)
    except CheckpointError as error:
        warn(f"what replica {seat} had of its own is lost: {str(error).splitlines()[0]}")
        return 0, ""
    if own["round"] != sync.round:
        return 0, ""
    sync.load_replica_state({"fragments": [{"base": None, "codes": codes, "flights": []} for codes in own["codes"]]})
    sync.rebase(own["progress"])
    params = {name: param.detach() for name, param in replica.trainable().items()}
    replica.load_state_dict({**own["replica"], "params": params})
    return int(own["steps"]), str(own["books"])


def _own_path(run_dir: Path, seat: int) -> Path:
    return run_dir / ISLANDS / f"seat-{seat}.safetensors"


def _fragments(sync: ReplicaSync) -> list[dict[str, Any]]:
    fragments = sync.replica_state()["fragments"]
    assert isinstance(fragments, list)
    return fragments
