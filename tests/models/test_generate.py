"""Text from a model: of the length asked for, the same for the same seed, leaving no trace."""

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from atoll.data.tokenizer import byte_tokenizer
from atoll.errors import ConfigError
from atoll.models import FAMILIES, build_model, generate_text
from atoll.train.config import ModelConfig

WINDOW = 16


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return tiny("llama", vocab_size=len(tokenizer))


def tiny(family: str, *, vocab_size: int) -> PreTrainedModel:
    sizes = {"hidden_size": 24, "num_layers": 1, "num_heads": 4, "intermediate_size": 40}
    config = ModelConfig.model_validate({"family": family, **sizes})
    return build_model(config, vocab_size=vocab_size, sequence_length=WINDOW, seed=0)


def never_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """`model`, its weights changed so that "a" is by far the likeliest token after anything."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    head = torch.nn.Linear(24, len(tokenizer))
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    with torch.no_grad():
        head.bias[ord("a")] = 50.0
    model.set_output_embeddings(head)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_of_several_windows_goes_on_to_its_length(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    endless = never_ends(tiny(family, vocab_size=len(tokenizer)), tokenizer)
    text = generate_text(endless, tokenizer, "x = ", max_new_tokens=5 * WINDOW, temperature=0)
    assert text == "x = " + "a" * 5 * WINDOW


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_a_prompt_of_any_length_is_kept_whole(length: int, tokenizer: PreTrainedTokenizerFast) -> None:
    endless = never_ends(tiny("gpt2", vocab_size=len(tokenizer)), tokenizer)
    assert generate_text(endless, tokenizer, "b" * length, max_new_tokens=2) == "b" * length + "aa"


def test_the_text_ends_where_the_model_ends_it(tokenizer: PreTrainedTokenizerFast) -> None:
    ending = never_ends(tiny("llama", vocab_size=len(tokenizer)), tokenizer)
    with torch.no_grad():
        ending.get_output_embeddings().bias[tokenizer.eos_token_id] = 100.0
    assert generate_text(ending, tokenizer, "done", max_new_tokens=50) == "done"


def test_same_seed_same_text_and_another_seed_another(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    texts = [generate_text(model, tokenizer, "def ", max_new_tokens=12, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_likeliest_text_is_that_of_the_one_likeliest_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    greedy = generate_text(model, tokenizer, "def ", max_new_tokens=12, temperature=0, seed=1)
    assert greedy == generate_text(model, tokenizer, "def ", max_new_tokens=12, top_k=1, seed=2)


def test_generating_leaves_generator_and_mode_as_they_were_and_prints_nothing(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, capfd: pytest.CaptureFixture[str]
) -> None:
    before = torch.random.get_rng_state()
    capfd.readouterr()
    generate_text(model, tokenizer, "def ", max_new_tokens=2 * WINDOW)
    assert model.training
    assert torch.equal(before, torch.random.get_rng_state())
    assert capfd.readouterr() == ("", "")


def test_an_empty_prompt_starts_a_document(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    assert generate_text(model, tokenizer, "", max_new_tokens=12)


@pytest.mark.parametrize(
    ("max_new_tokens", "temperature", "top_k", "message"),
    [
        (0, 1.0, 0, "max_new_tokens=0"),
        (1, -1.0, 0, "temperature=-1.0"),
        (1, float("nan"), 0, "temperature=nan"),
        (1, 1.0, -1, "top_k=-1"),
    ],
)
def test_settings_out_of_range_are_refused(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        generate_text(model, tokenizer, "x", max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k)


def test_a_tokenizer_of_another_model_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ConfigError, match="not among the 61 of the model"):
        generate_text(tiny("llama", vocab_size=61), tokenizer, "x")
