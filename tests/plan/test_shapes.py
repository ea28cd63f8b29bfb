"""Names, shapes and numbers of parameters from configuration numbers alone, equal to those of the built model."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from atoll.errors import ConfigError
from atoll.models import count_parameters
from atoll.models.families import transformers_config
from atoll.plan.presets import PRESETS
from atoll.plan.shapes import (
    MODEL_DEFAULTS,
    SEQUENCE_LENGTH,
    ModelShape,
    shape_of_count,
    shape_of_hf,
    shape_of_hf_config,
    shape_of_settings,
)
from atoll.recipes import RECIPES, recipe
from atoll.train.config import ModelConfig, TrainConfig, build_config

VOCAB, POSITIONS = 503, 32

MODELS = [
    {"family": "llama"},
    {"family": "llama", "tie_embeddings": False, "overrides": {"num_key_value_heads": 2, "head_dim": 10}},
    {"family": "qwen2", "overrides": {"num_key_value_heads": 2}},
    {"family": "qwen2", "tie_embeddings": False},
    {"family": "gpt2"},
    {"family": "gpt2", "tie_embeddings": False, "max_positions": 64},
    {"family": "opt"},
    {"family": "opt", "tie_embeddings": False, "max_positions": 64},
]


def settings_of(model: dict) -> dict:
    sizes = {"hidden_size": 24, "num_layers": 3, "num_heads": 4, "intermediate_size": 40, "vocab_size": VOCAB}
    return {"model": sizes | model, "sequence_length": POSITIONS}


def built_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        built = transformers_config(config, vocab_size=VOCAB, sequence_length=POSITIONS)
        model = AutoModelForCausalLM.from_config(built)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_tensors_have_the_names_shapes_and_order_of_the_built_model(model: dict) -> None:
    settings = settings_of(model)
    shape = shape_of_settings(settings)
    built = built_shapes(ModelConfig.model_validate(settings["model"]))
    assert list(shape.tensors.items()) == list(built.items())
    assert shape.num_parameters == count_parameters(
        ModelConfig.model_validate(settings["model"]), vocab_size=VOCAB, sequence_length=POSITIONS
    )


@pytest.mark.parametrize("name", RECIPES)
def test_parameters_of_every_recipe_are_those_that_train(name: str) -> None:
    shape = shape_of_settings(recipe(name))
    config = build_config(recipe(name))
    assert shape.num_parameters == count_parameters(
        config.model, vocab_size=shape.vocab_size, sequence_length=config.sequence_length
    )


def test_defaults_are_those_of_the_trainer() -> None:
    config = TrainConfig().model_dump()
    assert {key: config["model"][key] for key in MODEL_DEFAULTS} == MODEL_DEFAULTS
    assert config["sequence_length"] == SEQUENCE_LENGTH


@pytest.mark.parametrize(
    ("name", "billions"),
    [("dilocox_107b", 107), ("dilocox_opt_1_3b", 1.3158), ("streaming_1b", 1.275), ("sparseloco_1b", 1.1)],
)
def test_presets_have_the_size_they_are_named_after(name: str, billions: float) -> None:
    assert PRESETS[name].shape.num_parameters / 1e9 == pytest.approx(billions, rel=0.001)


def test_a_hugging_face_configuration_is_read_from_its_file_or_folder(tmp_path) -> None:
    config = transformers_config(
        ModelConfig(family="qwen2", hidden_size=24, num_layers=2, num_heads=4, intermediate_size=40),
        vocab_size=VOCAB,
        sequence_length=POSITIONS,
    )
    config.save_pretrained(tmp_path)
    expected = ModelConfig(family="qwen2", hidden_size=24, num_layers=2, num_heads=4, intermediate_size=40)
    parameters = count_parameters(expected, vocab_size=VOCAB, sequence_length=POSITIONS)
    assert shape_of_hf_config(tmp_path).num_parameters == parameters
    assert shape_of_hf_config(tmp_path / "config.json").num_parameters == parameters


def test_gpt2_and_opt_keep_names_of_their_own() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    opt = {
        "model_type": "opt",
        **{"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192},
        **{"vocab_size": 50272, "max_position_embeddings": 2048},
    }
    assert shape_of_hf(gpt2).num_parameters == 124_439_808
    assert shape_of_hf(opt).num_parameters == 1_315_758_080


@pytest.mark.parametrize("num_parameters", [60e6, 350e6, 1.3e9, 70e9, 400e9])
@pytest.mark.parametrize("num_layers", [12, 24, 80])
def test_a_model_of_which_only_the_size_is_known_has_that_size(num_parameters: float, num_layers: int) -> None:
    shape = shape_of_count(num_parameters, num_layers)
    assert shape.num_parameters == pytest.approx(num_parameters, rel=0.02)
    assert shape.num_layers == num_layers
    assert shape.assumed


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mixtral", "hidden_size": 8}, "mixtral|lacks"),
        ({"model_type": "llama", "vocab_size": 5}, "hidden_size"),
        ({"hidden_size": 8}, "model_type"),
    ],
)
def test_a_configuration_the_planner_cannot_use_is_refused_by_name(tmp_path, config: dict, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=said):
        shape_of_hf_config(path)


def test_too_few_parameters_for_the_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="no model"):
        shape_of_count(1e6, 24)
    with pytest.raises(ConfigError, match="layers 0"):
        shape_of_count(1e9, 0)


def test_a_size_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_heads=0"):
        ModelShape("llama", 64, 2, 0, 128, 100)


def test_a_tokenizer_folder_needs_a_vocabulary_size() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        shape_of_settings({"data": {"tokenizer": "somewhere"}})
