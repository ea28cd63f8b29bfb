"""What a checkpoint of a run holds, and how a run goes on from one.

The files:

    config.json, model.safetensors, tokenizer files    the anchor, as transformers' `from_pretrained` loads it
    outer.safetensors                                  outer state and outer step counts
    replica-0.safetensors, ...                         each replica's parameters, inner state, data position, random
                                                       numbers, bases, compressor state and rounds in flight
    state.json                                         step, the settings that matter, the last evaluation

Where a replica has several workers each writes files of its own: see `atoll.train.worker_checkpoint`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from atoll.errors import CheckpointError
from atoll.models import save_model
from atoll.train.checkpoint import CheckpointWriter, load_json, load_state, refuse_other_config
from atoll.train.config import TrainConfig, essential
from atoll.train.worker_checkpoint import OUTER, expected_files, load_member, save_whole_model, save_worker
from atoll.train.workers import ModelPart, ShardSync

if TYPE_CHECKING:
    from atoll.train.replica import Replica
    from atoll.train.run import Run

STATE = "state.json"


def save_run(run: Run, step: int) -> None:
    """Write a checkpoint of `run` after inner step `step`; all processes take part, the leading one commits."""
    writer = CheckpointWriter(run.run_dir, step, keep_last=run.config.keep_last)
    expected = _save_parts(run, writer, step) if run.layout is not None else _save_replicas(run, writer, step)
    run.barrier()
    if run.leads:
        writer.commit(expected_files=[*expected, STATE, "config.json"])
        run.output.line(f"saved {writer.folder.name} to {writer.folder}")
    run.barrier()


def _save_replicas(run: Run, writer: CheckpointWriter, step: int) -> list[str]:
    """The files of replicas of one worker each; returns the names of all."""
    names = [f"replica-{index}.safetensors" for index in range(run.config.replicas)]
    for member in run.members:
        assert not isinstance(member.sync, ShardSync)
        own: dict[str, Any] = {"replica": member.replica.state_dict(), "sync": member.sync.replica_state()}
        if run.adapting is not None:
            own["pace"] = list(member.replica.pace)
        writer.save_state(names[member.index], own)
    if run.leads:
        lead = run.members[0]
        model = lead.replica.model
        assert isinstance(model, PreTrainedModel)
        assert not isinstance(lead.sync, ShardSync)
        anchor = lead.sync.anchor()
        writer.save_files(lambda folder: save_model(model, run.data.tokenizer, folder, weights=anchor))
        writer.save_state(OUTER, lead.sync.shared_state())
        writer.save_json(STATE, _summary(run, step, digest=lead.sync.digest()))
    return [*names, OUTER, "model.safetensors"]


def _save_parts(run: Run, writer: CheckpointWriter, step: int) -> list[str]:
    """The files of a replica of many workers; returns the names of all."""
    member, layout = run.members[0], run.layout
    sync, part = member.sync, member.replica.trainee
    assert isinstance(sync, ShardSync) and isinstance(part, ModelPart) and layout is not None
    digest = sync.digest()
    save_worker(run, writer)
    if run.leads:
        save_whole_model(writer, part.model, run.data.tokenizer)
        parts = {"layout": layout_summary(run.config), "counts": sync.counts}
        writer.save_json(STATE, _summary(run, step, digest=digest) | parts)
    return expected_files(run)


def resume_run(run: Run, folder: Path) -> None:
    """Put `run` exactly where the checkpoint `folder` was taken."""
    summary = load_json(folder / STATE)
    refuse_other_config(summary["settings"], essential(run.config))
    if run.adapting is not None:
        run.schedule = run.adapting.load_state_dict(summary["adaptive"], run.schedule)
        run.set_rank()
    if run.layout is None and "layout" not in summary:
        _load_replicas(run, folder)
    else:
        layout = layout_summary(run.config) if run.layout is not None else None
        for member in run.members:
            load_member(member, folder, summary, worker=run.workers.index, layout=layout)
    run.step = summary["step"]
    run.last_eval_step = summary["last_eval_step"]
    if folder.resolve().parent == (run.run_dir / "checkpoints").resolve():
        run.saved_step = run.step


def _load_replicas(run: Run, folder: Path) -> None:
    """Replicas of one worker each, from files of such."""
    anchor = load_anchor(folder, run.members[0].replica)
    shared = load_state(folder / OUTER)
    for member in run.members:
        assert not isinstance(member.sync, ShardSync)
        own = load_state(folder / f"replica-{member.index}.safetensors")
        member.sync.load_shared_state(anchor, shared)
        member.replica.load_state_dict(own["replica"])
        member.sync.load_replica_state(own["sync"])
        if run.adapting is not None:
            seconds, steps = own["pace"]
            member.replica.pace = (seconds, steps)


def layout_summary(config: TrainConfig) -> dict[str, object]:
    """What a checkpoint says of the workers who wrote it: whatever decides which rows each of them has."""
    names = ("data_workers", "pipeline_stages", "pipeline_schedule", "sharding")
    return {name: getattr(config, name) for name in names}


def _summary(run: Run, step: int, *, digest: str) -> dict[str, object]:
    return {
        "step": step,
        "round": run.members[0].sync.round,
        "anchor_digest": digest,
        "last_eval_step": run.last_eval_step,
        "settings": essential(run.config),
        "adaptive": None if run.adapting is None else run.adapting.state_dict(run.schedule),
    }


def load_anchor(folder: Path, replica: Replica) -> dict[str, Tensor]:
    """The anchor by the names of the model's trainable parameters; a tied weight is saved under one of its names."""
    saved = load_file(folder / "model.safetensors")
    aliases: dict[int, list[str]] = {}
    for name, param in replica.model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(param), []).append(name)
    anchor = {}
    for name, param in replica.trainable().items():
        found = [alias for alias in aliases[id(param)] if alias in saved]
        if not found:
            raise CheckpointError(
                f"{folder.name} has no weights {name!r}: it belongs to another model. Use that model."
            )
        anchor[name] = saved[found[0]]
    return anchor
