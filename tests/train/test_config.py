from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from atoll.errors import ConfigError
from atoll.train.config import (
    FREE,
    DataConfig,
    ModelConfig,
    TrainConfig,
    build_config,
    essential,
    flatten,
    known_keys,
    read_config_file,
    read_settings,
    write_config_file,
)

SECTIONS = {"": TrainConfig, "model.": ModelConfig, "data.": DataConfig}

# what names a file, a folder, a data set or a column, and is checked when it is opened
NAMES = {
    "init_from", "output_dir", "resume", "data.source", "data.tokenizer", "data.hf_split", "data.hf_text_column",
    "model.overrides",
}  # fmt: skip
# what is chosen from a registry
REGISTRIES = {"outer_optimizer", "adopt", "compressor"}


def fields() -> list[tuple[str, Any]]:
    return [
        (prefix + name, field)
        for prefix, section in SECTIONS.items()
        for name, field in section.model_fields.items()
        if name not in ("model", "data")
    ]


def nested(key: str, value: object) -> dict[str, Any]:
    section, _, name = key.rpartition(".")
    return {section: {name: value}} if section else {name: value}


def refusal(settings: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        build_config(settings)
    message = str(caught.value)
    assert len(message.splitlines()) <= 3
    return message


def test_the_defaults_are_a_run() -> None:
    assert build_config({}) == TrainConfig()


# --- every field has a bound or a choice


@pytest.mark.parametrize(("key", "field"), fields(), ids=[key for key, _ in fields()])
def test_every_field_has_a_bound_or_a_choice(key: str, field: Any) -> None:
    kind = field.annotation
    if kind in (int, float):
        assert any(hasattr(rule, "ge") or hasattr(rule, "gt") for rule in field.metadata), (
            "a number needs a lower bound"
        )
    elif get_origin(kind) is list:
        assert get_args(get_args(kind)[0])
    else:
        assert kind is bool or get_args(kind) or key in NAMES | REGISTRIES


NUMBERS = [(key, field) for key, field in fields() if field.annotation in (int, float)]


@pytest.mark.parametrize(("key", "field"), NUMBERS, ids=[key for key, _ in NUMBERS])
def test_a_negative_number_is_refused_with_its_name_and_value(key: str, field: Any) -> None:
    message = refusal(nested(key, -1))
    assert f"{key}=-1" in message and "greater than" in message


FLOATS = [key for key, field in fields() if field.annotation is float]


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_refused(key: str, value: float) -> None:
    message = refusal(nested(key, value))
    assert f"{key}={value}" in message and ("finite" in message or "less than" in message or "greater than" in message)


CHOICES = [key for key, field in fields() if get_origin(field.annotation) is Literal and key not in NAMES]


@pytest.mark.parametrize("key", [*CHOICES, *sorted(REGISTRIES)])
def test_an_unknown_choice_is_refused_with_what_there_is(key: str) -> None:
    known = flatten(TrainConfig().model_dump())[key]
    message = refusal(nested(key, "nonsense"))
    assert f"{key}='nonsense'" in message and known in message


# --- bad input, one by one


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"inner_steps": 0}, ["inner_steps=0", "greater than or equal to 1"]),
        ({"learning_rate": 0}, ["learning_rate=0", "greater than 0"]),
        ({"outer_momentum": 1.0}, ["outer_momentum=1.0", "less than 1"]),
        ({"drop_probability": 1.5}, ["drop_probability=1.5", "less than 1"]),
        ({"inner_steps": 2.5}, ["inner_steps=2.5", "integer"]),
        ({"inner_steps": "many"}, ["inner_steps='many'", "integer"]),
        ({"seed": 2**32}, ["seed=4294967296", "less than"]),
        ({"iner_steps": 5}, ["'iner_steps'", "Did you mean 'inner_steps'?"]),
        ({"model": {"hiden_size": 5}}, ["'model.hiden_size'", "Did you mean 'model.hidden_size'?"]),
        ({"data": {"sorce": "x"}}, ["'data.sorce'", "Did you mean 'data.source'?"]),
        ({"outer_optimizer": "nestrov"}, ["outer_optimizer='nestrov'", "Did you mean 'nesterov'?", "adam"]),
        ({"compressor": "int3"}, ["compressor='int3'", "identity, bf16, fp16"]),
        ({"adopt": "cary"}, ["adopt='cary'", "Did you mean 'carry'?"]),
        ({"model": {"family": "bert"}}, ["model.family='bert'", "llama"]),
        ({"model": {"hidden_size": 100, "num_heads": 3}}, ["100", "model.num_heads=3", "model.hidden_size=102"]),
        ({"inner_steps": 50, "max_steps": 40}, ["inner_steps=50", "at most 40"]),
        ({"inner_steps": 50, "max_steps": 60, "pretrain_steps": 20}, ["inner_steps=50", "at most 40"]),
        ({"max_steps": 60, "pretrain_steps": 60, "inner_steps": 1}, ["pretrain_steps=60", "at most 59"]),
        ({"average_inner_state": True, "optimizer": "sgd"}, ["average_inner_state", "adamw"]),
        ({"average_inner_state": True, "replica_schedule": "doubling"}, ["average_inner_state", "constant"]),
        ({"method": "data-parallel", "drop_probability": 0.5}, ["data-parallel", "drop_probability", "diloco"]),
        ({"report_to": ["mlflow"]}, ["mlflow", "tensorboard"]),
        ({"port": 70000}, ["port=70000", "65535"]),
        ({"model": 3}, ["model=3"]),
        ({"elastic": True, "data": {"source": "hf:wikitext"}}, ["hf:wikitext", "from its beginning", "token shards"]),
    ],
    ids=str,
)
def test_bad_settings_are_refused_with_value_rule_and_way_out(settings: dict[str, Any], words: list[str]) -> None:
    message = refusal(settings)
    for word in words:
        assert word in message, message


def test_many_mistakes_still_make_a_short_message() -> None:
    message = refusal({"inner_steps": 0, "batch_size": 0, "replicas": 0, "seed": -1, "nonsense": 1})
    assert len(message.splitlines()) == 3


@pytest.mark.parametrize("key", known_keys())
def test_a_misspelt_key_is_told_what_it_may_have_meant(key: str) -> None:
    if key == "model.overrides":
        return
    assert f"Did you mean {key!r}?" in refusal(nested(key + "x", 1))


# --- files


def test_settings_survive_the_file(tmp_path: Path) -> None:
    config = build_config(
        {
            "inner_steps": 7,
            "learning_rate": 3.0e-4,
            "output_dir": 'runs/"quoted" ünïcode',
            "report_to": ["tensorboard", "wandb"],
            "model": {"family": "gpt2", "overrides": {"attn_pdrop": 0.1, "nested": {"a": [1, 2]}, "flag": True}},
            "data": {"source": "hf:a/b", "held_out_percent": 1.5},
        }
    )
    write_config_file(config, tmp_path / "config.toml")
    assert read_config_file(tmp_path / "config.toml") == config


def test_every_key_is_in_the_file(tmp_path: Path) -> None:
    write_config_file(TrainConfig(), tmp_path / "config.toml")
    unset = {key for key, value in flatten(TrainConfig().model_dump()).items() if value is None}
    assert set(flatten(read_settings(tmp_path / "config.toml"))) == set(known_keys()) - unset


def test_a_file_that_is_not_there_or_not_toml_is_told_in_a_few_words(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("inner_steps = = 3\n")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, word in (
        (tmp_path / "none.toml", "there is no file"),
        (bad, "TOML"),
        (binary, "TOML"),
        (tmp_path, "TOML"),
    ):
        with pytest.raises(ConfigError, match=word) as caught:
            read_config_file(path)
        assert path.name in str(caught.value) and len(str(caught.value).splitlines()) <= 3


def test_a_typo_in_a_file_is_not_accepted_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[model]\nnum_layer = 3\n")
    with pytest.raises(ConfigError, match=r"Did you mean 'model\.num_layers'"):
        read_config_file(path)


# --- what a resumed run must share


def test_what_a_run_computes_is_essential_and_where_it_runs_is_not() -> None:
    keys = set(essential(TrainConfig()))
    assert {"inner_steps", "seed", "replicas", "model.hidden_size", "data.source", "outer_lr", "compressor"} <= keys
    assert not keys & {"output_dir", "device", "engine", "save_steps", "port", "resume"}
    assert keys | FREE >= set(known_keys()) and set(known_keys()) >= FREE


@pytest.mark.parametrize(
    ("changes", "is_essential"),
    [
        ({}, True),
        ({"lr_schedule": "constant"}, False),
        ({"lr_schedule": "constant", "outer_lr_schedule": "cosine"}, True),
        ({"lr_schedule": "constant", "replica_schedule": "ramp-up"}, True),
    ],
    ids=str,
)
def test_the_length_of_a_run_is_essential_where_something_is_stretched_over_it(
    changes: dict[str, str], is_essential: bool
) -> None:
    assert ("max_steps" in essential(build_config(changes))) == is_essential


def test_essential_settings_tell_runs_apart() -> None:
    assert essential(build_config({"inner_steps": 10})) != essential(build_config({"inner_steps": 20}))
    assert essential(build_config({"output_dir": "a"})) == essential(build_config({"output_dir": "b"}))
