"""What test_trainer.py starts with torchrun: an island by the Trainer, by a plain loop, and resumed in mid-round.

Prints one line of JSON: digests of the anchor and of the model after each.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from atoll.errors import ConfigError
from atoll.integrations.island import Island, own_island
from atoll.integrations.outer_sync import OuterSync
from atoll.integrations.start import fingerprint
from atoll.integrations.trainer import OuterSyncCallback
from atoll.models import build_model
from atoll.train.config import ModelConfig

MODEL = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32)
STEPS, INNER_STEPS, SAVED, ACCUMULATION, BATCH = 7, 3, 5, 2, 2
RATE = 0.01


class Sequences(Dataset):
    """The part of the data that one island trains on."""

    def __init__(self, replica: int) -> None:
        generator = torch.Generator().manual_seed(replica)
        self.rows = torch.randint(31, (STEPS * ACCUMULATION * BATCH, 8), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class InOrder(Trainer):
    """A Trainer that does not shuffle, so that a plain loop can read the same batches."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def new_model() -> Any:
    return build_model(MODEL, vocab_size=31, sequence_length=8, seed=0)


def trainer_of(island: Island, folder: Path, model: Any, callback: OuterSyncCallback, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "optim": "adamw_torch",
        "save_steps": SAVED,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = TrainingArguments(str(folder), **{**settings, **changes})
    data = Sequences(island.replica)
    return InOrder(model, args, train_dataset=data, eval_dataset=data, callbacks=[callback])


def by_trainer(island: Island, folder: Path) -> dict[str, Any]:
    callback = OuterSyncCallback(island, inner_steps=INNER_STEPS)
    trainer = trainer_of(island, folder, new_model(), callback)
    trainer.train()
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return outcome(callback.sync, trainer.model) | {"evaluated": evaluated}


def resumed(island: Island, folder: Path) -> dict[str, Any]:
    callback = OuterSyncCallback(island, inner_steps=INNER_STEPS)
    trainer = trainer_of(island, folder, new_model(), callback)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}"))
    return outcome(callback.sync, trainer.model)


def batches(replica: int) -> Iterator[list[dict[str, Tensor]]]:
    parts = Sequences(replica).rows.split(BATCH)
    for step in range(STEPS):
        rows = parts[step * ACCUMULATION : (step + 1) * ACCUMULATION]
        yield [{"input_ids": part, "labels": part} for part in rows]


def by_plain_loop(island: Island) -> dict[str, Any]:
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    with (
        island.link(torch.device("cpu")) as link,
        OuterSync(model, optimizer, inner_steps=INNER_STEPS, transport=link) as sync,
    ):
        for micro in batches(island.replica):
            count = sum(part["labels"][:, 1:].numel() for part in micro)
            for part in micro:
                model(**part, num_items_in_batch=torch.tensor(count)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return outcome(sync, model)


def refused(island: Island, folder: Path, checkpoint: Path | None) -> str:
    trainer = trainer_of(island, folder, new_model(), OuterSyncCallback(island, inner_steps=INNER_STEPS))
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except ConfigError as error:
        return str(error)
    return "not refused"


def outcome(sync: OuterSync, model: Any) -> dict[str, Any]:
    return {"round": sync.round, "anchor": sync.digest(), "model": fingerprint(model.parameters())}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    island = own_island()
    place = folder / f"island-{island.replica}"
    found = {
        "replica": island.replica,
        "trainer": by_trainer(island, place),
        "loop": by_plain_loop(island),
        "resumed": resumed(island, place),
        "one folder": refused(island, folder / "shared", None),
        "two beginnings": refused(island, place, place / f"checkpoint-{SAVED}" if island.replica else None),
    }
    os.write(1, (json.dumps(found) + "\n").encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
