"""Models from a folder: the same logits, and a clear word about anything less than a whole model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from atoll.errors import CheckpointError
from atoll.models import FAMILIES, build_model, load_model
from atoll.models.load import without_progress_bars
from atoll.train.config import ModelConfig

TOKENS = torch.arange(12).reshape(1, 12)


def tiny(family: str = "llama", *, tie_embeddings: bool = True) -> PreTrainedModel:
    sizes = {"hidden_size": 24, "num_layers": 2, "num_heads": 4, "intermediate_size": 40}
    config = ModelConfig.model_validate({"family": family, "tie_embeddings": tie_embeddings, **sizes})
    return build_model(config, vocab_size=61, sequence_length=16, seed=0)


def save(model: PreTrainedModel, folder: Path) -> Path:
    with without_progress_bars():
        model.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tiny(), tmp_path / "saved")


@pytest.mark.parametrize("tie_embeddings", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_gives_the_same_logits(family: str, tie_embeddings: bool, tmp_path: Path) -> None:
    model = tiny(family, tie_embeddings=tie_embeddings)
    loaded = load_model(save(model, tmp_path))
    assert torch.equal(model(TOKENS).logits, loaded(TOKENS).logits)
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == tie_embeddings


def test_transformers_alone_loads_what_was_saved(folder: Path) -> None:
    with without_progress_bars():
        loaded = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert torch.equal(tiny()(TOKENS).logits, loaded(TOKENS).logits)


def test_the_model_folder_of_a_checkpoint_is_found(tmp_path: Path) -> None:
    save(tiny(), tmp_path / "step-000040" / "model")
    assert torch.equal(tiny()(TOKENS).logits, load_model(tmp_path / "step-000040")(TOKENS).logits)


def test_a_loaded_model_is_as_a_built_one(tmp_path: Path) -> None:
    half = tiny()
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16()
    loaded = load_model(str(save(half, tmp_path)))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert loaded.training and not loaded.config.use_cache
    assert loaded.config._attn_implementation == "sdpa"


def test_loading_leaves_the_global_generator_as_it_was_and_prints_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = torch.random.get_rng_state()
    capfd.readouterr()
    load_model(folder)
    assert torch.equal(before, torch.random.get_rng_state())
    assert capfd.readouterr() == ("", "")


def test_a_name_on_a_hub_is_not_fetched() -> None:
    with pytest.raises(CheckpointError, match=r"gpt2 is not a folder.*not fetched"):
        load_model("gpt2")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize("kept", [0, 100, 5000])
def test_truncated_weights_are_refused(folder: Path, kept: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    _assert_refused(folder)


def test_absent_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    _assert_refused(folder)


def test_a_pickle_is_never_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    _assert_refused(folder)


@pytest.mark.parametrize(
    "content", ["", "{", "{}", '{"model_type": "no-such"}', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_broken_configuration_is_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    _assert_refused(folder)


def test_a_missing_tensor_is_named_and_not_invented(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "'model.norm.weight'" in _assert_refused(folder)


def test_a_tensor_of_another_shape_is_refused(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"intermediate_size": 44}))
    _assert_refused(folder)


def _assert_refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert len(message.splitlines()) <= 3
    return message
