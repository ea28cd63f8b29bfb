"""From flags to settings, without running anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli.flags import SETTINGS, parse_flags, settings_from
from atoll.errors import ConfigError
from atoll.train.config import build_config, flatten, known_keys, write_config_file


def test_every_setting_is_a_flag() -> None:
    assert {key.removesuffix(".overrides") for key in SETTINGS} == {
        key.removesuffix(".overrides") for key in known_keys()
    }


@pytest.mark.parametrize(
    "words",
    [
        ["--max-steps", "40", "--model.hidden-size", "128"],
        ["--max-steps=40", "--model.hidden-size=128"],
        ["--max_steps", "40", "--model.hidden_size=128"],
    ],
    ids=["two words", "equals", "underscores"],
)
def test_a_flag_may_be_written_in_any_of_the_usual_ways(words: list[str]) -> None:
    assert parse_flags(words) == (None, {"max_steps": 40, "model": {"hidden_size": 128}})


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--average-inner-state"], True),
        (["--no-average-inner-state"], False),
        (["--average-inner-state", "false"], False),
        (["--average-inner-state=true"], True),
        (["--average-inner-state", "--seed", "1"], True),
    ],
)
def test_a_switch_may_be_on_off_or_given_a_value(words: list[str], value: bool) -> None:
    assert build_config(settings_from(words)).average_inner_state is value


def test_a_switch_does_not_swallow_the_recipe() -> None:
    assert parse_flags(["--average-inner-state", "quickstart"]) == ("quickstart", {"average_inner_state": True})


def test_a_switch_of_a_section_can_be_turned_off() -> None:
    assert not build_config(settings_from(["--no-model.tie-embeddings"])).model.tie_embeddings


@pytest.mark.parametrize(
    "words",
    [
        ["--report-to", "wandb", "--report-to", "trackio"],
        ["--report-to=wandb,trackio"],
        ["--report-to", "wandb, trackio"],
    ],
)
def test_a_list_is_repeated_or_separated_by_commas(words: list[str]) -> None:
    assert build_config(settings_from(words)).report_to == ["wandb", "trackio"]


def test_overrides_keep_their_names_and_get_their_types() -> None:
    words = [
        "--model.overrides.rope_theta",
        "1e4",
        "--model.overrides.hidden_act=silu",
        "--model.overrides.a-b",
        "true",
    ]
    assert build_config(settings_from(words)).model.overrides == {"rope_theta": 1e4, "hidden_act": "silu", "a-b": True}


def test_numbers_arrive_as_numbers() -> None:
    config = build_config(settings_from(["--learning-rate", "1e-4", "--seed", "7", "--timeout-s", "5"]))
    assert (config.learning_rate, config.seed, config.timeout_s) == (1e-4, 7, 5.0)


def test_a_negative_number_is_a_value() -> None:
    assert parse_flags(["--outer-lr", "-1"]) == (None, {"outer_lr": -1})


def test_flags_come_after_the_recipe() -> None:
    config = build_config(settings_from(["quickstart", "--inner-steps", "10"]))
    assert (config.inner_steps, config.replicas) == (10, 4)


def test_flags_come_after_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('seed = 3\n[model]\nhidden_size = 64\nfamily = "gpt2"\n')
    config = build_config(settings_from([str(file), "--model.hidden-size", "32"]))
    assert (config.seed, config.model.hidden_size, config.model.family) == (3, 32, "gpt2")


def test_a_run_folder_gives_the_settings_of_its_run(tmp_path: Path) -> None:
    config = build_config({"seed": 9, "model": {"num_layers": 3, "overrides": {"rope_theta": 5.0}}})
    write_config_file(config, tmp_path / "config.toml")
    assert flatten(build_config(settings_from([str(tmp_path)])).model_dump()) == flatten(config.model_dump())


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--iner-steps", "5"], "Did you mean --inner-steps?"),
        (["--hidden-size", "5"], "Did you mean --model.hidden-size?"),
        (["--modle.num-layers", "5"], "Did you mean --model.num-layers?"),
        (["--no-seed"], "--no-seed is not a flag"),
        (["-s", "5"], "settings are --name value"),
        (["--seed"], "--seed needs a value, as in --seed 0"),
        (["--init-from", "--seed", "1"], "--init-from needs a value"),
        (["--model.overrides", "5"], "needs a key of its own"),
        (["quickstart", "small"], "'small' is one name too many after 'quickstart'"),
        (["quickstat"], "Did you mean 'quickstart'?"),
        (["nowhere.toml"], "there is no file 'nowhere.toml'"),
        (["runs/none"], "'runs/none' is neither a TOML file nor the folder of a run"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_way_out(words: list[str], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_from(words)
    assert hint in str(caught.value)
