"""Text from a model and its tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase

from atoll.errors import ConfigError
from atoll.models.seeding import seeded


def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
) -> str:
    """`prompt` and what the model makes of it, until its end-of-text token or `max_new_tokens`.

    temperature: 0 takes the likeliest token each time; 1 draws from the model's own distribution.
    top_k: draw from the k likeliest tokens only; 0: from all.

    A text longer than the model's positions goes on from the second half of what came before, window after window. The
    same seed gives the same text; the global generators and the model's mode are left as they were.

    Raises ConfigError for settings out of range, an empty prompt without a token to start from, and a prompt with
    tokens that the model does not have.
    """
    settings = _sampling(max_new_tokens, temperature, top_k)
    settings.eos_token_id = tokenizer.eos_token_id
    settings.pad_token_id = tokenizer.eos_token_id or 0  # one sequence is never padded; set, so that none is guessed
    tokens = _encode(model, tokenizer, prompt).to(model.device)
    with _evaluating(model), seeded(seed, model.device), torch.no_grad():
        tokens = _continue(model, tokens, settings)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True))


def _sampling(max_new_tokens: int, temperature: float, top_k: int) -> GenerationConfig:
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} asks for no text. Use 1 or more.")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ConfigError(f"temperature={temperature} is not a finite number of at least 0. Use 0 (likeliest) or 0.8.")
    if top_k < 0:
        raise ConfigError(f"top_k={top_k} is negative. Use 0 for all tokens, or 1 or more.")
    settings = GenerationConfig(max_new_tokens=max_new_tokens, use_cache=True, do_sample=temperature > 0)
    if temperature > 0:
        settings.temperature, settings.top_k, settings.top_p = temperature, top_k, 1.0
    return settings


def _encode(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> Tensor:
    """Tokens of `prompt`, [1, length]; of an empty one, the token that stands between documents."""
    tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if not tokens:
        start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if start is None:
            raise ConfigError(
                "prompt='' leaves nothing to go on from: the tokenizer has no start token. Give some text."
            )
        tokens = [start]
    if max(tokens) >= model.config.vocab_size:
        raise ConfigError(
            f"token {max(tokens)} of the prompt is not among the {model.config.vocab_size} of the model: the tokenizer "
            f"is another model's. Use the one saved with the model."
        )
    return torch.tensor([tokens])


def _continue(model: PreTrainedModel, tokens: Tensor, settings: GenerationConfig) -> Tensor:
    """`tokens` [1, length] with at most `settings.max_new_tokens` more."""
    generator = cast(GenerationMixin, model)  # every causal language model of transformers is one
    wanted = tokens.shape[1] + settings.max_new_tokens
    window = getattr(model.config, "max_position_embeddings", None) or wanted
    while tokens.shape[1] < wanted:
        context = tokens if tokens.shape[1] < window else tokens[:, -max(1, window // 2) :]
        settings.max_new_tokens = min(wanted - tokens.shape[1], window - context.shape[1])
        grown = generator.generate(context, attention_mask=torch.ones_like(context), generation_config=settings)
        tokens = torch.cat([tokens, grown[:, context.shape[1] :]], dim=1)
        if tokens[0, -1] == settings.eos_token_id:
            break
    return tokens


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
