"""Models from a folder on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from atoll.errors import CheckpointError


def load_model(path: str | Path) -> PreTrainedModel:
    """The model in a Hugging Face folder or in a checkpoint of Atoll, in fp32, on the CPU, in training mode.

    The folder holds `config.json` and safetensors, at its top or in `model/`. Only this folder is read: nothing is
    downloaded, nothing is unpickled, no code of the folder is run. Dropouts are as its configuration says.

    Raises CheckpointError for a folder that is not there, is no causal language model, or lacks weights.
    """
    folder = _model_folder(Path(path))
    try:
        with without_progress_bars(), _only_errors():
            model, found = _from_folder(folder)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError, StrictDataclassError) as error:
        raise CheckpointError(
            f"{folder} holds no model that can be loaded: {_first_sentence(error)}\n"
            f"A config.json of a causal language model and whole safetensors are needed. Use another checkpoint."
        ) from error
    if found["missing_keys"]:
        raise CheckpointError(
            f"{folder} lacks {len(found['missing_keys'])} of its tensors, such as {min(found['missing_keys'])!r}.\n"
            f"Every weight must be in the safetensors. Use another checkpoint."
        )
    model.config.use_cache = False
    return model.train()


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers draws no bar while it loads or saves inside the block."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _only_errors() -> Iterator[None]:
    """Hold back the table of missing weights that transformers logs: we say it in our own words."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _from_folder(folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(folder),
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        dtype=torch.float32,
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    model, found = loaded
    return model, found


def _model_folder(path: Path) -> Path:
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file():
            return folder
    what = "has no config.json, at its top or in model/" if path.is_dir() else "is not a folder"
    raise CheckpointError(
        f"{path} {what}. Give a checkpoint (RUN/checkpoints/step-...) or a folder written by save_pretrained; "
        f"names of models on a hub are not fetched."
    )


def _first_sentence(error: Exception) -> str:
    return str(error).split("\n")[0].split(". ")[0]
