"""`atoll eval`: how well a trained model predicts text that it was not trained on."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from atoll.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from atoll.train.config import TrainConfig

BATCH_TOKENS = 8192
LONGEST = 1024  # tokens of a sequence, of a model that came without a run
TASKS = "hellaswag,arc_easy,piqa,winogrande"


@dataclass(frozen=True)
class Options:
    """What is asked. data: a source, or "" for the run's own. sequences: at most; 0: all. sequence_length: or 0."""

    data: str = ""
    split: str = "heldout"
    sequences: int = 1024
    sequence_length: int = 0
    as_json: bool = False


@dataclass(frozen=True)
class Score:
    """loss: nats a token. bits_per_byte: of UTF-8 text, which models of different tokenizers share; None: no text."""

    model: str
    data: str
    split: str
    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    bytes: int
    sequences: int
    sequence_length: int


@click.command(
    "eval", context_settings={"help_option_names": ["-h", "--help"]}, short_help="A model's loss on held-out text."
)
@click.argument("run")
@click.option("--data", default="", help="Text, as data.source names it. [default: what the run trained on]")
@click.option("--split", type=click.Choice(["heldout", "all"]), default="heldout", show_default=True)
@click.option("--sequences", type=click.IntRange(min=0), default=1024, show_default=True, help="At most; 0: all.")
@click.option("--sequence-length", type=click.IntRange(min=0), default=0, help="[default: the run's]")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def command(run: str, data: str, split: str, sequences: int, sequence_length: int, as_json: bool) -> None:
    """Print loss, perplexity and bits per byte of RUN on text, and the line that runs other benchmarks.

    RUN is a run folder (its newest checkpoint is taken: the anchor), a checkpoint, or a Hugging Face folder. heldout
    are the documents that training leaves out, chosen by a hash of their text; a file made for testing is read with
    --split all.

    \b
    atoll eval runs/quickstart
    atoll eval my-model --data test.txt --split all --json
    """
    evaluate(run, Options(data, split, sequences, sequence_length, as_json))


def evaluate(run: str, options: Options) -> None:
    """Print the score of `run`."""
    from atoll.cli.models import find_model

    folder = find_model(run)
    score = score_model(folder, _settings(Path(run), folder, options), options)
    harness = f"lm_eval --model hf --model_args pretrained={shlex.quote(str(folder))} --tasks {TASKS}"
    if options.as_json:
        print(json.dumps(asdict(score) | {"lm_eval": harness}))
        return
    bits = "" if score.bits_per_byte is None else f" | {score.bits_per_byte:.3f} bits a byte"
    print(f"{score.model}: loss {score.loss:.4f} | perplexity {score.perplexity:.2f}{bits}")
    print(f"{score.tokens:,} tokens of {score.sequences:,} sequences, {score.split} of {score.data}")
    print(f"other benchmarks, by pip install lm_eval: {harness}")


def score_model(folder: Path, config: TrainConfig, options: Options) -> Score:
    """The score of the model in `folder` on the text that `config` and `options` name."""
    import torch

    from atoll.data import load_tokenizer
    from atoll.data.evaluation import load_sequences, predicted_bytes
    from atoll.models import load_model

    model = load_model(folder).to("cuda" if torch.cuda.is_available() else "cpu").eval()
    tokenizer = load_tokenizer(folder)
    _refuse_misfit(folder, model, tokenizer, length=config.sequence_length)
    sequences = load_sequences(config.data, tokenizer, split=options.split, sequence_length=config.sequence_length)
    sequences = sequences[: options.sequences or None]
    total = summed_loss(model, sequences)
    tokens, size = sequences[:, 1:].numel(), predicted_bytes(tokenizer, sequences)
    return Score(
        model=str(folder),
        data=config.data.source,
        split=options.split,
        loss=total / tokens,
        perplexity=_exp(total / tokens),
        bits_per_byte=total / math.log(2) / size if size else None,
        tokens=tokens,
        bytes=size,
        sequences=len(sequences),
        sequence_length=config.sequence_length,
    )


def summed_loss(model: PreTrainedModel, sequences: Tensor) -> float:
    """Nats of all predicted tokens of `sequences` [number, length], in fp32."""
    import torch

    total = 0.0
    with torch.no_grad():
        for batch in sequences.split(max(1, BATCH_TOKENS // sequences.shape[1])):
            batch = batch.to(model.device)
            total += float(model(input_ids=batch, labels=batch).loss) * batch[:, 1:].numel()
    return total


def _settings(run: Path, folder: Path, options: Options) -> TrainConfig:
    """The settings of the run that the model is of, with what `options` changes; defaults for a model without a run."""
    from atoll.train.config import TrainConfig, read_config_file

    place = run.resolve()
    written = (place.parents[1] if place.parent.name == "checkpoints" else place) / "config.toml"
    found = written if written.is_file() else None
    if found is None and not options.data:
        raise ConfigError(
            f"{str(run)!r} is not of a run, so its text is not known. Name some with --data, as --data test.txt."
        )
    config = read_config_file(found) if found else TrainConfig(sequence_length=_length(folder))
    data = config.data.model_copy(update={"source": options.data}) if options.data else config.data
    length = options.sequence_length or config.sequence_length
    return config.model_copy(update={"data": data, "sequence_length": length})


def _length(folder: Path) -> int:
    """Tokens that a model takes, as its configuration says; 1,024 at most."""
    positions = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    return min(positions, LONGEST) if isinstance(positions, int) and positions > 1 else LONGEST


def _refuse_misfit(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, length: int) -> None:
    positions = getattr(model.config, "max_position_embeddings", None) or length
    if length < 2 or length > positions:
        raise ConfigError(
            f"sequence_length={length} is not between 2 and the {positions} positions of {folder}. "
            f"Use --sequence-length {positions}."
        )
    if len(tokenizer) > model.config.vocab_size:
        raise ConfigError(
            f"the tokenizer in {folder} has {len(tokenizer)} tokens and the model {model.config.vocab_size}: it is "
            "another model's. Put the right one there."
        )


def _exp(loss: float) -> float:
    from atoll.train.metrics import perplexity

    return perplexity(loss)
