"""Models from settings: random weights from a seed, or no weights at all where only their number is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from atoll.models.families import refused, transformers_config
from atoll.models.seeding import seeded

if TYPE_CHECKING:
    from atoll.train.config import ModelConfig

CPU = torch.device("cpu")


def build_model(
    config: ModelConfig,
    *,
    vocab_size: int,
    sequence_length: int,
    seed: int,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> PreTrainedModel:
    """A causal language model with random fp32 weights, on the CPU, in training mode.

    Attention is torch's scaled_dot_product_attention, all dropouts are 0 unless overridden, and no cache is kept in
    training. The weights depend on `seed` alone: they are drawn on the CPU, and the global generator is left as it was.

    vocab_size: tokens of the tokenizer. sequence_length: tokens of a training sequence.
    eos_token_id: ends a generated text. pad_token_id: goes into the generation settings only, because in the
    model's configuration it would freeze that row of the embedding.

    Raises ConfigError for sizes that do not fit together and for overrides that the family does not have.
    """
    built = transformers_config(config, vocab_size=vocab_size, sequence_length=sequence_length)
    if eos_token_id is not None:
        built.eos_token_id = eos_token_id
    with seeded(seed, CPU):
        model = _instantiate(config, built, CPU)
    model.generation_config.pad_token_id = pad_token_id
    model.generation_config.use_cache = True  # for those who generate with the saved model
    return model.train()


def count_parameters(config: ModelConfig, *, vocab_size: int, sequence_length: int) -> int:
    """Trainable numbers of the model, tied ones counted once. Nothing is allocated, so any size can be asked.

    Raises ConfigError as `build_model` does.
    """
    built = transformers_config(config, vocab_size=vocab_size, sequence_length=sequence_length)
    model = _instantiate(config, built, torch.device("meta"))
    return sum(parameter.numel() for parameter in model.parameters())


def _instantiate(config: ModelConfig, built: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    try:
        with device:
            return AutoModelForCausalLM.from_config(built, attn_implementation="sdpa", dtype=torch.float32)
    except (KeyError, ValueError, TypeError, ArithmeticError, AssertionError) as error:
        if not config.overrides:
            raise
        raise refused(config, error) from error  # a value (activation, rope type) that transformers does not check
