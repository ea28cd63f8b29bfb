"""Models built from settings: every family, from a seed alone, leaving no trace."""

import pytest
import torch
from transformers import GPT2LMHeadModel, LlamaForCausalLM, OPTForCausalLM, PreTrainedModel, Qwen2ForCausalLM

from atoll.errors import ConfigError
from atoll.models import FAMILIES, build_model, count_parameters
from atoll.train.config import ModelConfig

VOCAB_SIZE, SEQUENCE_LENGTH = 61, 16
CLASSES = {"llama": LlamaForCausalLM, "gpt2": GPT2LMHeadModel, "opt": OPTForCausalLM, "qwen2": Qwen2ForCausalLM}
every_family = pytest.mark.parametrize("family", FAMILIES)


def tiny(family: str, **changes: object) -> ModelConfig:
    sizes = {"hidden_size": 24, "num_layers": 2, "num_heads": 4, "intermediate_size": 40}
    return ModelConfig.model_validate({"family": family, **sizes, **changes})


def build(config: ModelConfig, *, seed: int = 0) -> PreTrainedModel:
    return build_model(config, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH, seed=seed)


def count(config: ModelConfig) -> int:
    return count_parameters(config, vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH)


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(VOCAB_SIZE, (2, SEQUENCE_LENGTH), generator=generator)


def shape_by_name(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@every_family
def test_a_family_is_its_transformers_class_in_fp32_with_sdpa_and_in_training_mode(family: str) -> None:
    model = build(tiny(family))
    assert type(model) is CLASSES[family]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == "sdpa"
    assert model.training and not model.config.use_cache


@every_family
def test_every_parameter_receives_a_gradient(family: str) -> None:
    model = build(tiny(family))
    loss = model(input_ids=batch(), labels=batch()).loss
    loss.backward()
    # a key bias moves all scores of a query alike, so softmax hides it: its gradient is zero, but it is there
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    assert loss.item() == pytest.approx(4.11, abs=0.15)  # ln 61


@every_family
def test_the_sizes_are_those_asked_for(family: str) -> None:
    shapes = set(shape_by_name(build(tiny(family))).values())
    assert (VOCAB_SIZE, 24) in shapes
    assert {(24, 40), (40, 24)} & shapes


@every_family
def test_tied_embeddings_are_one_tensor_and_counted_once(family: str) -> None:
    tied, untied = build(tiny(family)), build(tiny(family, tie_embeddings=False))
    assert tied.get_input_embeddings().weight is tied.get_output_embeddings().weight
    assert untied.get_input_embeddings().weight is not untied.get_output_embeddings().weight
    assert count(tiny(family, tie_embeddings=False)) - count(tiny(family)) == VOCAB_SIZE * 24


@every_family
def test_the_count_without_memory_is_the_count_of_the_built_model(family: str) -> None:
    assert count(tiny(family)) == sum(parameter.numel() for parameter in build(tiny(family)).parameters())


def test_counting_allocates_nothing() -> None:
    """3.3e13 parameters are 130 TB in fp32; only a count can be had of them."""
    huge = tiny("llama", hidden_size=2**20, intermediate_size=2**22, num_heads=2**13)
    assert count(huge) > 3e13


@every_family
def test_same_seed_same_weights_bit_for_bit_whatever_the_global_generator(family: str) -> None:
    torch.manual_seed(1)
    first = build(tiny(family), seed=5).state_dict()
    torch.manual_seed(2)
    second = build(tiny(family), seed=5).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_other_seed_other_weights() -> None:
    name = "model.embed_tokens.weight"
    first, second = (build(tiny("llama"), seed=seed).state_dict() for seed in (0, 1))
    assert not torch.equal(first[name], second[name])


@every_family
def test_building_and_counting_leave_the_global_generator_as_it_was(family: str) -> None:
    before = torch.random.get_rng_state()
    build(tiny(family))
    count(tiny(family))
    assert torch.equal(before, torch.random.get_rng_state())


@every_family
def test_two_passes_in_training_mode_are_equal_because_nothing_is_dropped(family: str) -> None:
    model = build(tiny(family))
    assert torch.equal(model(batch()).logits, model(batch()).logits)


def test_a_dropout_that_is_overridden_drops() -> None:
    model = build(tiny("gpt2", overrides={"resid_pdrop": 0.5}))
    assert not torch.equal(model(batch()).logits, model(batch()).logits)


@every_family
def test_no_row_of_the_embedding_is_frozen_and_only_generation_knows_the_padding(family: str) -> None:
    model = build_model(
        tiny(family), vocab_size=VOCAB_SIZE, sequence_length=SEQUENCE_LENGTH, seed=0, eos_token_id=2, pad_token_id=1
    )
    assert model.get_input_embeddings().padding_idx is None
    assert model.config.pad_token_id is None
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 1)


def test_overrides_reach_the_transformers_configuration() -> None:
    model = build(tiny("llama", overrides={"num_key_value_heads": 2, "rope_theta": 500.0, "rms_norm_eps": 1e-5}))
    assert model.config.num_key_value_heads == 2
    assert model.config.rope_parameters["rope_theta"] == 500.0
    assert shape_by_name(model)["model.layers.0.self_attn.k_proj.weight"] == (12, 24)


def test_vocabulary_and_positions_may_be_larger_than_needed() -> None:
    model = build(tiny("opt", vocab_size=64, max_positions=32))
    assert model.get_input_embeddings().num_embeddings == 64
    assert model.config.max_position_embeddings == 32


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"overrides": {"rms_norm_epsilon": 1e-5}}, "Did you mean 'rms_norm_eps'"),
        ("gpt2", {"overrides": {"resid_drop": 0.1}}, "Did you mean 'resid_pdrop'"),
        ("qwen2", {"overrides": {"zzz": 1}}, "is not a setting of family 'qwen2'"),
        ("gpt2", {"overrides": {"n_embd": 32}}, "Use model.hidden_size"),
        ("gpt2", {"overrides": {"hidden_size": 32}}, "Use model.hidden_size"),
        ("llama", {"overrides": {"hidden_act": 3}}, "expected str, got int"),
        ("llama", {"overrides": {"hidden_act": "sliu"}}, "sliu"),
        ("llama", {"overrides": {"num_key_value_heads": 3}}, "does not divide num_heads=4"),
        ("llama", {"overrides": {"head_dim": 0}}, "cannot be used with family 'llama'"),
        ("llama", {"overrides": {"rope_theta": "x"}}, "cannot be used with family 'llama'"),
        ("opt", {"overrides": {"dropout": 1.5}}, "dropout=1.5 is not a rate"),
        ("gpt2", {"overrides": {"attn_pdrop": "a"}}, "attn_pdrop='a' is not a rate"),
        ("qwen2", {"hidden_size": 20}, "heads of size 5"),
        ("opt", {"vocab_size": 60}, "model.vocab_size=60 is less than the 61 needed"),
        ("opt", {"max_positions": 8}, "model.max_positions=8 is less than the 16 needed"),
    ],
)
def test_settings_that_cannot_be_built_are_named_with_the_way_out(
    family: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tiny(family, **changes))
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3
