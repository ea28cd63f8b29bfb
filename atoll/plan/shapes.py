"""Models as lists of tensors: names and shapes from the numbers of a configuration, without building anything.

What a compressor sends depends on the shape of every tensor, and what a fragment holds on their names, so both are
listed as transformers names them. The number of parameters is their sum; a test holds it equal to the built model's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError, nearest

Shape = tuple[int, ...]
TensorShapes = dict[str, Shape]


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one causal language model.

    num_kv_heads, head_dim, intermediate_size: 0 for the family's default. positions: learned ones (gpt2, opt).
    assumed: what was filled in by us because it was not given; shown beside the figures.
    """

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    positions: int = 2048
    tie_embeddings: bool = True
    num_kv_heads: int = 0
    head_dim: int = 0
    assumed: str = ""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            hint = nearest(self.family, FAMILIES)
            raise ConfigError(
                f"the planner has no formula for family {self.family!r}.{hint} It knows {', '.join(FAMILIES)}.\n"
                "Give --params and --layers instead."
            )
        for name in ("hidden_size", "num_layers", "num_heads", "intermediate_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is not positive; a model needs every size. Use 1 or more."
                )

    @cached_property
    def tensors(self) -> TensorShapes:
        """Every trainable tensor by name, tied ones once."""
        return FAMILIES[self.family](self)

    @cached_property
    def num_parameters(self) -> int:
        """
        >>> ModelShape("opt", 2048, 24, 32, 8192, 50272).num_parameters
        1315758080
        """
        return sum(math.prod(shape) for shape in self.tensors.values())

    @property
    def width_of_head(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads


def _llama(shape: ModelShape, *, attention_bias: bool = False) -> TensorShapes:
    """RMS norms, gated feed-forward, rotary positions (no parameters); keys and values may be shared by heads."""
    d, f = shape.hidden_size, shape.intermediate_size
    q = shape.num_heads * shape.width_of_head
    kv = (shape.num_kv_heads or shape.num_heads) * shape.width_of_head
    layer: TensorShapes = {}
    for name, width in (("q", q), ("k", kv), ("v", kv)):
        layer[f"self_attn.{name}_proj.weight"] = (width, d)
        if attention_bias:
            layer[f"self_attn.{name}_proj.bias"] = (width,)
    layer["self_attn.o_proj.weight"] = (d, q)
    layer |= {"mlp.gate_proj.weight": (f, d), "mlp.up_proj.weight": (f, d), "mlp.down_proj.weight": (d, f)}
    layer |= {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
    first: TensorShapes = {"model.embed_tokens.weight": (shape.vocab_size, d)}
    return _assemble(shape, first, "model.layers", layer, {"model.norm.weight": (d,)})


def _qwen2(shape: ModelShape) -> TensorShapes:
    """As Llama, with biases on queries, keys and values."""
    return _llama(shape, attention_bias=True)


def _gpt2(shape: ModelShape) -> TensorShapes:
    """Learned positions, layer norms, one matrix for queries, keys and values, stored input by output."""
    d, f = shape.hidden_size, shape.intermediate_size
    layer = {
        **_norm("ln_1", d),
        **_linear("attn.c_attn", (d, 3 * d), bias=3 * d),
        **_linear("attn.c_proj", (d, d), bias=d),
        **_norm("ln_2", d),
        **_linear("mlp.c_fc", (d, f), bias=f),
        **_linear("mlp.c_proj", (f, d), bias=d),
    }
    first: TensorShapes = {
        "transformer.wte.weight": (shape.vocab_size, d),
        "transformer.wpe.weight": (shape.positions, d),
    }
    return _assemble(shape, first, "transformer.h", layer, _norm("transformer.ln_f", d))


def _opt(shape: ModelShape) -> TensorShapes:
    """Learned positions (two rows more than positions), layer norms, biases everywhere."""
    d, f = shape.hidden_size, shape.intermediate_size
    layer: TensorShapes = {}
    for name in ("k", "v", "q", "out"):
        layer |= _linear(f"self_attn.{name}_proj", (d, d), bias=d)
    layer |= _norm("self_attn_layer_norm", d)
    layer |= _linear("fc1", (f, d), bias=f) | _linear("fc2", (d, f), bias=d) | _norm("final_layer_norm", d)
    root = "model.decoder"
    first: TensorShapes = {f"{root}.embed_tokens.weight": (shape.vocab_size, d)}
    first[f"{root}.embed_positions.weight"] = (shape.positions + 2, d)
    first |= _norm(f"{root}.final_layer_norm", d)
    return _assemble(shape, first, f"{root}.layers", layer, {})


def _assemble(
    shape: ModelShape, first: TensorShapes, layers: str, layer: TensorShapes, last: Mapping[str, Shape]
) -> TensorShapes:
    blocks = {f"{layers}.{i}.{name}": size for i in range(shape.num_layers) for name, size in layer.items()}
    head: TensorShapes = {} if shape.tie_embeddings else {"lm_head.weight": (shape.vocab_size, shape.hidden_size)}
    return {**first, **blocks, **last, **head}


def _norm(name: str, width: int) -> TensorShapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _linear(name: str, weight: Shape, *, bias: int) -> TensorShapes:
    return {f"{name}.weight": weight, f"{name}.bias": (bias,)}


FAMILIES: dict[str, Callable[[ModelShape], TensorShapes]] = {
    "llama": _llama,
    "gpt2": _gpt2,
    "opt": _opt,
    "qwen2": _qwen2,
}

# --- where sizes come from

# What the settings of a run leave out; equal by test to the defaults of the trainer.
MODEL_DEFAULTS = {
    "family": "llama",
    "hidden_size": 192,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 0,
    "max_positions": 0,
    "tie_embeddings": True,
}
SEQUENCE_LENGTH, BPE_VOCAB_SIZE, BYTES_VOCAB_SIZE = 128, 4096, 259


def shape_of_settings(settings: Mapping[str, Any]) -> ModelShape:
    """The model of a recipe or a file of settings.

    The vocabulary of a tokenizer that exists only as a folder is not known here: it must be in model.vocab_size.

    >>> shape_of_settings({"model": {"hidden_size": 192}}).num_parameters
    935424
    """
    model = {**MODEL_DEFAULTS, **settings.get("model", {})}
    overrides = model.get("overrides", {})
    return ModelShape(
        family=model["family"],
        hidden_size=model["hidden_size"],
        num_layers=model["num_layers"],
        num_heads=model["num_heads"],
        intermediate_size=model["intermediate_size"],
        vocab_size=model["vocab_size"] or _vocab_size(settings.get("data", {})),
        positions=model["max_positions"] or settings.get("sequence_length", SEQUENCE_LENGTH),
        tie_embeddings=model["tie_embeddings"],
        num_kv_heads=overrides.get("num_key_value_heads", 0),
        head_dim=overrides.get("head_dim") or 0,
    )


def _vocab_size(data: Mapping[str, Any]) -> int:
    tokenizer = data.get("tokenizer", "bytes")
    if tokenizer not in ("bytes", "bpe"):
        raise ConfigError(
            f"data.tokenizer={tokenizer!r} is a folder; the planner does not read tokenizers. Set model.vocab_size."
        )
    return BYTES_VOCAB_SIZE if tokenizer == "bytes" else data.get("bpe_vocab_size", BPE_VOCAB_SIZE)


def shape_of_hf_config(path: str | Path) -> ModelShape:
    """The model of a Hugging Face config.json, or of the folder it is in."""
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{str(path)!r} cannot be read as a model configuration: {error}. Give a config.json."
        ) from None
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigError(f"{str(path)!r} has no model_type; it is not a configuration of transformers. Give another.")
    return shape_of_hf(config)


def shape_of_hf(config: Mapping[str, Any]) -> ModelShape:
    """The model of a transformers configuration as a dict; each family has names of its own.

    >>> shape_of_hf({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
    ...              "vocab_size": 50257}).num_parameters
    124439808
    """
    gpt2 = config["model_type"] == "gpt2"
    names = _GPT2_NAMES if gpt2 else _NAMES
    missing = [name for name in (*names[:3], "vocab_size") if name not in config]
    if missing:
        raise ConfigError(f"the model configuration lacks {', '.join(missing)}. Add it, or give --params and --layers.")
    hidden, layers, heads = (config[name] for name in names[:3])
    inner = next((config[name] for name in names[3] if config.get(name)), 4 * hidden)
    return ModelShape(
        family=config["model_type"],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        intermediate_size=inner,
        vocab_size=config["vocab_size"],
        positions=config.get(names[4], 1024 if gpt2 else 2048),
        tie_embeddings=config.get("tie_word_embeddings", config["model_type"] in ("gpt2", "opt")),
        num_kv_heads=config.get("num_key_value_heads") or 0,
        head_dim=config.get("head_dim") or 0,
    )


_NAMES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads"),
    ("intermediate_size", "ffn_dim"),
    "max_position_embeddings",
)
_GPT2_NAMES = ("n_embd", "n_layer", "n_head", ("n_inner",), "n_positions")

HEAD_DIM = 64


def shape_of_count(num_parameters: float, num_layers: int) -> ModelShape:
    """A Llama of about `num_parameters` and exactly `num_layers`, where no more is known.

    Width d from 12·L·d² + 32000·d = N (feed-forward 8/3·d, tied embeddings), in whole heads of 64; the feed-forward
    width then takes up what is left.

    >>> shape = shape_of_count(1.3e9, 24)
    >>> shape.hidden_size, round(shape.num_parameters / 1e9, 3)
    (2048, 1.3)
    """
    if num_layers < 1:
        raise ConfigError(f"--layers {num_layers} is not positive; a model has a layer or more. Use 1 or more.")
    vocab = 32_000
    smallest = vocab * HEAD_DIM + num_layers * HEAD_DIM * (4 * HEAD_DIM + 3)
    if not smallest <= num_parameters < 1e15:
        raise ConfigError(
            f"--params {num_parameters:g} with {num_layers} layers is no model: {vocab:,} tokens and layers of width "
            f"{HEAD_DIM} take {smallest / 1e6:.1f} M. Give more parameters (below 1e15), or a configuration."
        )
    ideal = (math.sqrt(vocab**2 + 48 * num_layers * num_parameters) - vocab) / (24 * num_layers)
    hidden = max(HEAD_DIM, round(ideal / HEAD_DIM) * HEAD_DIM)
    rest = num_parameters - vocab * hidden - hidden - num_layers * (4 * hidden**2 + 2 * hidden)
    inner = max(1, round(rest / (3 * num_layers * hidden)))
    return ModelShape(
        *("llama", hidden, num_layers, hidden // HEAD_DIM, inner, vocab),
        assumed=f"a Llama of width {hidden} and feed-forward {inner} over {vocab:,} tokens",
    )
