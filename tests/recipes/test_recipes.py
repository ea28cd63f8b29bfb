"""Recipes: each is a whole run, of the size that its name says, with the numbers of its paper."""

import pytest

from atoll.compress import Feedback, bits_per_parameter
from atoll.errors import ConfigError
from atoll.models import count_parameters
from atoll.plan.presets import PRESETS
from atoll.recipes import RECIPES, recipe
from atoll.train.build import make_compressor, make_schedule, warnings_of
from atoll.train.config import TrainConfig, build_config, flatten

BYTES = 259
PAPERS = [name for name in RECIPES if name.startswith(("diloco_", "opendiloco_"))]
DILOCOX = [name for name in RECIPES if name.startswith("dilocox")]
every_recipe = pytest.mark.parametrize("name", RECIPES)
every_paper = pytest.mark.parametrize("name", PAPERS)


def config_of(name: str) -> TrainConfig:
    return build_config(recipe(name))


def num_parameters(config: TrainConfig) -> int:
    vocab_size = BYTES if config.data.tokenizer == "bytes" else config.data.bpe_vocab_size
    return count_parameters(config.model, vocab_size=vocab_size, sequence_length=config.sequence_length)


def num_embeddings(config: TrainConfig) -> int:
    tables = 1 if config.model.tie_embeddings else 2
    return tables * config.data.bpe_vocab_size * config.model.hidden_size


@every_recipe
def test_a_recipe_is_a_complete_configuration(name: str) -> None:
    assert config_of(name).output_dir == f"runs/{name}"


@every_recipe
def test_a_recipe_is_fresh_at_each_call(name: str) -> None:
    recipe(name)["model"]["hidden_size"] = 7
    recipe(name)["data"] = {}
    assert recipe(name) == RECIPES[name]()
    assert recipe(name)["model"]["hidden_size"] != 7


@every_recipe
def test_a_recipe_is_explained(name: str) -> None:
    assert "parameters" in (RECIPES[name].__doc__ or "")


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("quickstart", 0.8e6, 2e6),
        ("small", 10e6, 15e6),
        ("diloco_60m", 57e6, 63e6),
        ("diloco_150m", 145e6, 155e6),
        ("diloco_400m", 380e6, 420e6),
        ("opendiloco_1b", 1.05e9, 1.15e9),
        ("dilocox_tiny", 0.8e6, 2e6),
        ("dilocox_opt_1_3b", 1.3e9, 1.35e9),
        ("dilocox_107b", 106.5e9, 107.5e9),
        ("streaming_1b", 1.2e9, 1.35e9),
        ("sparseloco_1b", 1.05e9, 1.15e9),
    ],
)
def test_a_recipe_has_as_many_parameters_as_its_name_says(name: str, low: float, high: float) -> None:
    assert low <= num_parameters(config_of(name)) <= high


def test_opendiloco_150m_is_named_without_its_untied_embeddings() -> None:
    config = config_of("opendiloco_150m")
    assert num_parameters(config) == 214_983_680
    assert 145e6 <= num_parameters(config) - num_embeddings(config) <= 155e6


@every_paper
def test_the_numbers_both_papers_share(name: str) -> None:
    config = config_of(name)
    assert (config.sequence_length, config.data.bpe_vocab_size, config.inner_steps) == (1024, 32_000, 500)
    assert (config.outer_optimizer, config.outer_lr, config.outer_momentum) == ("nesterov", 0.7, 0.9)
    assert (config.optimizer, config.learning_rate, config.warmup_steps) == ("adamw", 4e-4, 1000)
    assert (config.weight_decay, config.adam_beta1, config.adam_beta2, config.max_grad_norm) == (0.1, 0.9, 0.95, 1.0)
    assert (config.lr_schedule, config.min_lr_ratio) == ("cosine", 0.0)


@every_paper
def test_the_batch_of_a_replica_is_the_papers(name: str) -> None:
    config = config_of(name)
    batch, replicas = config.batch_size * config.gradient_accumulation_steps, config.replicas
    assert (batch, replicas) == ((2048, 4) if name == "opendiloco_1b" else (512, 8))


@every_paper
def test_only_diloco_pretrains_and_only_opendiloco_sends_fp16(name: str) -> None:
    config = config_of(name)
    open_diloco = name.startswith("opendiloco")
    assert config.pretrain_steps == (0 if open_diloco else 24_000)
    assert config.compressor == ("fp16" if open_diloco else "identity")


@every_paper
def test_all_steps_are_whole_rounds(name: str) -> None:
    config = config_of(name)
    rounds, rest = divmod(config.max_steps - config.pretrain_steps, config.inner_steps)
    assert (rounds, rest) == ((176, 0) if name.startswith("opendiloco") else (128, 0))


@pytest.mark.parametrize("name", [*DILOCOX, "streaming_1b", "sparseloco_1b"])
def test_all_steps_of_the_compressed_runs_are_whole_rounds(name: str) -> None:
    config = config_of(name)
    assert config.max_steps % config.inner_steps == 0
    assert config.max_steps // config.inner_steps >= 32


@pytest.mark.parametrize("name", DILOCOX)
def test_dilocox_lands_late_with_outer_settings_that_bear_it(name: str) -> None:
    config = config_of(name)
    schedule = make_schedule(config)
    assert 0 < schedule.delay <= schedule.inner_steps and schedule.blocking_first
    assert (config.resolved_adopt, config.resolved_carry_share) == ("carry", 1 / 2)
    assert config.outer_lr / (1 - config.outer_momentum) == pytest.approx(1.0)
    assert isinstance(make_compressor(config), Feedback)


@pytest.mark.parametrize("name", ["dilocox_opt_1_3b", "dilocox_107b"])
def test_the_numbers_of_dilocox(name: str) -> None:
    """125 steps a round, 4,000 in all; 32,768 tokens a step over both islands, and 20 times that to feed 80 stages."""
    config = config_of(name)
    assert (config.inner_steps, config.max_steps, config.outer_optimizer) == (125, 4000, "nesterov")
    sequences = config.replicas * config.batch_size * config.gradient_accumulation_steps
    assert sequences * config.sequence_length == (32_768 if name == "dilocox_opt_1_3b" else 20 * 32_768)
    assert config.compressor == ("int4" if name == "dilocox_opt_1_3b" else "lowrank+int4")
    assert name == "dilocox_opt_1_3b" or config.rank == 2048


def test_the_numbers_of_streaming_diloco() -> None:
    config = config_of("streaming_1b")
    schedule = make_schedule(config)
    assert (schedule.num_fragments, schedule.delay, schedule.inner_steps // schedule.num_fragments) == (8, 1, 13)
    assert config.model.num_layers == 3 * config.fragments
    assert (config.outer_lr, config.compressor, config.resolved_adopt) == (0.4, "fp4", "lerp")
    assert not isinstance(make_compressor(config), Feedback)


def test_the_numbers_of_sparseloco() -> None:
    config = config_of("sparseloco_1b")
    matrix = (config.model.hidden_size, config.model.hidden_size)
    assert bits_per_parameter(make_compressor(config), matrix) == pytest.approx(0.219, rel=0.02)
    assert (config.inner_steps, config.outer_optimizer, config.outer_lr) == (30, "sgd", 1.0)


@pytest.mark.parametrize("name", ["dilocox_tiny", "dilocox_opt_1_3b", "streaming_1b", "sparseloco_1b"])
def test_nothing_is_wrong_with_these_recipes(name: str) -> None:
    config = config_of(name)
    width = config.model.hidden_size
    assert warnings_of(config, [(width, width), (config.model.intermediate_size, width), (width,)]) == []


def test_the_attention_matrices_of_107b_are_said_to_go_by_int4_alone() -> None:
    config = config_of("dilocox_107b")
    (warning,) = warnings_of(config, [(8192, 8192), (46_976, 8192), (152_064, 8192)])
    assert "8192×8192" in warning and "46976" not in warning


@pytest.mark.parametrize("name", ["dilocox_opt_1_3b", "dilocox_107b", "streaming_1b", "sparseloco_1b"])
def test_the_planner_knows_a_run_of_that_name_by_the_same_numbers(name: str) -> None:
    config, preset = config_of(name), PRESETS[name]
    assert (preset.inner_steps, preset.compressor, preset.islands) == (
        config.inner_steps,
        config.compressor,
        config.replicas,
    )
    assert preset.shape.num_parameters == num_parameters(config)


@every_recipe
def test_every_setting_of_a_recipe_is_one_that_a_flag_can_change(name: str) -> None:
    settings = config_of(name).model_dump()
    assert flatten(recipe(name)).keys() <= flatten(settings).keys()


def test_an_unknown_recipe_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'diloco_60' is not a recipe\. Did you mean 'diloco_60m'"):
        recipe("diloco_60")
