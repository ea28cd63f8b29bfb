"""`atoll generate` and `atoll export`: what a trained model is used for."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import CheckpointError, ConfigError, StorageError
from atoll.train.checkpoint import MANIFEST, find_checkpoint, verify_checkpoint


def generate(run: str, prompt: str, *, max_new_tokens: int, temperature: float, top_k: int, seed: int) -> None:
    """Print `prompt` and what the model of `run` makes of it."""
    folder = find_model(run)
    sample = write_sample(
        folder, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed
    )
    print(printable(sample))


def export(run: str, folder: Path) -> None:
    """Write model and tokenizer of `run` to `folder` as transformers does; whole or not at all."""
    source = find_model(run)
    _refuse_full(folder)
    from atoll.data import load_tokenizer
    from atoll.models import load_model, save_model

    model, tokenizer = load_model(source), load_tokenizer(source)
    with _whole_folder(folder) as part:
        save_model(model, tokenizer, part)
    parameters = sum(param.numel() for param in model.parameters())
    print(f"{parameters / 1e6:.2f} M parameters of {source} written to {folder}")
    print(f"in Python: AutoModelForCausalLM.from_pretrained({str(folder)!r})")


def find_model(run: str) -> Path:
    """The folder with the model of `run`: the newest whole checkpoint of a run, a checkpoint, or any model folder."""
    path = Path(run)
    if not path.is_dir():
        raise ConfigError(f"there is no folder {run!r}. Give a run folder (runs/NAME), a checkpoint or a model folder.")
    if (path / "checkpoints").is_dir():
        return _newest(path)
    if (path / MANIFEST).exists() and (problems := verify_checkpoint(path)):
        raise CheckpointError(
            f"{path} is damaged: {problems[0]}.\nUse another checkpoint of that run, or the run folder."
        )
    if not (path / "config.json").is_file() and not (path / "model" / "config.json").is_file():
        raise ConfigError(f"{run!r} holds neither checkpoints nor a model (config.json). Give the folder of a run.")
    return path if (path / "config.json").is_file() else path / "model"


def write_sample(folder: Path, prompt: str, *, max_new_tokens: int, temperature: float, top_k: int, seed: int) -> str:
    """`prompt` and what the model in `folder` makes of it."""
    import torch

    from atoll.data import load_tokenizer
    from atoll.models import generate_text, load_model

    model = load_model(folder).to("cuda" if torch.cuda.is_available() else "cpu")
    return generate_text(
        model,
        load_tokenizer(folder),
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )


def printable(text: str) -> str:
    r"""`text` without characters that would steer a terminal: a model that has learnt little may write anything.

    >>> printable("a\tb\x1b[2Jc\n")
    'a\tb�[2Jc\n'
    """
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _newest(run_dir: Path) -> Path:
    folder = find_checkpoint(run_dir, "auto", warn=lambda line: print(line, file=sys.stderr))
    if folder is None:
        raise CheckpointError(f"{run_dir} has no checkpoint yet. Train on until one is saved (--save-steps).")
    return folder


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to that takes the name `folder` at the end of the block, or leaves nothing behind."""
    part = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        part.mkdir(parents=True)
        yield part
        os.replace(part, folder)
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error.strerror}. Nothing was left there. Choose another folder."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _refuse_full(folder: Path) -> None:
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{str(folder)!r} is not empty; nothing is overwritten. Give a folder that is new or empty.")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file. Give a folder that is new or empty.")
