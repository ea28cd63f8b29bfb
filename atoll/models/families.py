"""One vocabulary of sizes for several families of models.

transformers names the same size differently in each family (`hidden_size` is `n_embd` in GPT-2). The table below says
which name each of our settings stands for. A new family is one line in `FAMILIES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from atoll.errors import ConfigError, nearest

if TYPE_CHECKING:
    from atoll.train.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """How transformers names the sizes of one family.

    sizes: our setting -> the name that it owns in the transformers configuration.
    follows: a name that defaults to one of our settings, but may be overridden -> that setting.
    dropouts: every rate of the family that drops something at random; 0 unless overridden.
    extra: names that the configuration takes although it has no field for them.
    """

    sizes: Mapping[str, str]
    dropouts: tuple[str, ...]
    follows: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extra: tuple[str, ...] = ()


_COMMON = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}
_GPT2 = {
    "hidden_size": "n_embd",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_positions": "n_positions",
    "tie_embeddings": "tie_word_embeddings",
}

FAMILIES: dict[str, Family] = {
    "llama": Family(_COMMON, ("attention_dropout",), {"num_key_value_heads": "num_heads"}, ("rope_theta",)),
    "gpt2": Family(_GPT2, ("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout")),
    "opt": Family(
        {**_COMMON, "intermediate_size": "ffn_dim"},
        ("dropout", "attention_dropout", "layerdrop"),
        {"word_embed_proj_dim": "hidden_size"},
    ),
    "qwen2": Family(_COMMON, ("attention_dropout",), {"num_key_value_heads": "num_heads"}, ("rope_theta",)),
}


def transformers_config(config: ModelConfig, *, vocab_size: int, sequence_length: int) -> PreTrainedConfig:
    """The transformers configuration that `config` stands for.

    vocab_size: tokens of the tokenizer; `config.vocab_size`, where given, may be larger (rows that are never used).
    sequence_length: tokens of a training sequence; `config.max_positions`, where given, may be larger.

    Raises ConfigError for sizes that do not fit together and for overrides that the family does not have.
    """
    family = FAMILIES[config.family]
    _check_overrides(config, family)
    sizes = config.model_dump() | {"max_positions": _at_least("max_positions", config.max_positions, sequence_length)}
    settings: dict[str, Any] = {
        "vocab_size": _at_least("vocab_size", config.vocab_size, vocab_size),
        "use_cache": False,  # keys and values of earlier tokens are of no use in training
        "bos_token_id": None,  # ids of the family's own tokenizer mean nothing in ours; a pad id would even
        "eos_token_id": None,  # freeze its row of the embedding
        "pad_token_id": None,
    }
    settings |= {name: sizes[setting] for setting, name in family.sizes.items()}
    settings |= {name: sizes[setting] for name, setting in family.follows.items()}
    settings |= dict.fromkeys(family.dropouts, 0.0)
    try:
        built = AutoConfig.for_model(config.family, **(settings | config.overrides))
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise refused(config, error) from error
    _check_heads(built)
    return built


def refused(config: ModelConfig, error: Exception) -> ConfigError:
    """The error for settings that transformers itself will not have."""
    reason = " ".join(str(error).split())
    return ConfigError(
        f"model.overrides={config.overrides} cannot be used with family {config.family!r}: {reason}\n"
        f"Correct the value, or leave it out for the default of transformers."
    )


def _at_least(name: str, value: int, needed: int) -> int:
    """`value`, or `needed` where `value` is 0 (not given)."""
    if 0 < value < needed:
        raise ConfigError(
            f"model.{name}={value} is less than the {needed} needed. Use at least {needed}, or 0 for {needed}."
        )
    return value or needed


def _check_overrides(config: ModelConfig, family: Family) -> None:
    owned = {name: setting for setting, name in family.sizes.items()} | {setting: setting for setting in family.sizes}
    owned["vocab_size"] = "vocab_size"
    known = _override_names(config.family, family) - owned.keys()
    for key in config.overrides:
        if key in owned:
            raise ConfigError(f"model.overrides.{key} is what model.{owned[key]} sets. Use model.{owned[key]}.")
        if key not in known:
            raise ConfigError(
                f"model.overrides.{key} is not a setting of family {config.family!r}.{nearest(key, known)}\n"
                f"Any field of its transformers configuration can be overridden."
            )
        if key in family.dropouts:
            _check_rate(key, config.overrides[key])


def _check_rate(name: str, rate: Any) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ConfigError(f"model.overrides.{name}={rate!r} is not a rate from 0 to below 1. Use 0 for none, or 0.1.")


def _override_names(name: str, family: Family) -> set[str]:
    fields = {field.name for field in dataclasses.fields(type(AutoConfig.for_model(name)))}
    return fields - {"dtype", "transformers_version"} | set(family.extra)


def _check_heads(built: PreTrainedConfig) -> None:
    """transformers builds heads that do not fit together, and fails at the first batch."""
    heads, groups = built.num_attention_heads, getattr(built, "num_key_value_heads", None)
    if groups is not None and (groups < 1 or heads % groups):
        raise ConfigError(
            f"num_key_value_heads={groups} does not divide num_heads={heads}; heads share them evenly. "
            f"Use one of {[count for count in range(1, heads + 1) if heads % count == 0]}."
        )
    head_dim = getattr(built, "head_dim", None) or built.hidden_size // heads
    if hasattr(built, "rope_parameters") and head_dim % 2:
        raise ConfigError(
            f"heads of size {head_dim} (model.hidden_size={built.hidden_size}, model.num_heads={heads}) are odd; "
            f"rotary positions turn pairs of numbers. Use model.hidden_size={heads * (head_dim + 1)}."
        )
