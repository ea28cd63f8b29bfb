"""Write a model as a Hugging Face folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from atoll.models.load import without_progress_bars


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write `model` and `tokenizer` to `folder`, as `from_pretrained` of transformers loads them.

    weights: take the place of the model's own parameters of those names (tied ones under any of their names); the model
    is left as it is.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    state = {
        key: (weights or {}).get(names.get(id(value), ""), value.detach())
        for key, value in model.state_dict(keep_vars=True).items()
    }
    with without_progress_bars():
        model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)
    _open_to_readers(Path(folder))


def _open_to_readers(folder: Path) -> None:
    """The usual mode for every file; safetensors lets only the owner read what it writes."""
    umask = os.umask(0)
    os.umask(umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)
