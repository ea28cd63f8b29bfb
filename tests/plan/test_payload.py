"""Bytes a round: what the planner says is what the trainer sends."""

import pytest
import torch

from atoll.comm.local import LocalGroup
from atoll.comm.torchdist import LAG as TRANSPORT_LAG
from atoll.compress import COMPRESSORS, CompressorOptions, build_compressor
from atoll.errors import ConfigError
from atoll.models import build_model
from atoll.plan.estimate import LAG
from atoll.plan.payload import BUCKET_ELEMENTS, IDENTITY, Coding, check_coding, compression, fragment_payloads
from atoll.plan.presets import PRESETS
from atoll.plan.shapes import shape_of_settings
from atoll.recipes import recipe
from atoll.train import sync
from atoll.train.config import build_config

RANK = 16


def declared(coding: Coding, *, num_islands: int, num_fragments: int = 1) -> int:
    shape = shape_of_settings(recipe("quickstart"))
    payloads = fragment_payloads(shape, coding, num_islands=num_islands, num_fragments=num_fragments)
    return sum(payload.sent_bytes for payload in payloads)


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("num_islands", [2, 3])
def test_bytes_of_a_round_are_those_the_trainer_declares(name: str, num_islands: int) -> None:
    config = build_config(recipe("quickstart"))
    shape = shape_of_settings(recipe("quickstart"))
    model = build_model(config.model, vocab_size=shape.vocab_size, sequence_length=config.sequence_length, seed=0)
    settings = sync.OuterSettings(compressor=build_compressor(name, CompressorOptions(rank=RANK)))
    transport = LocalGroup(num_islands).endpoints()[0]
    trained = sync.ReplicaSync(dict(model.named_parameters()), transport, settings)
    coding = Coding(name, RANK if "lowrank" in name else 0)
    assert declared(coding, num_islands=num_islands) == pytest.approx(trained.sent_bytes(0), rel=1e-3)


def test_constants_are_those_of_trainer_and_transport() -> None:
    assert BUCKET_ELEMENTS == sync.BUCKET_ELEMENTS
    assert LAG == TRANSPORT_LAG


@pytest.mark.parametrize("name", COMPRESSORS)
def test_fragments_share_out_the_bytes_of_a_round(name: str) -> None:
    coding = Coding(name, RANK if "lowrank" in name else 0)
    whole = declared(coding, num_islands=2)
    assert declared(coding, num_islands=2, num_fragments=2) == pytest.approx(whole, rel=0.02)


def test_the_107b_model_shrinks_20_times_by_rank_2048_and_int4() -> None:
    preset = PRESETS["dilocox_107b"]
    (payload,) = fragment_payloads(preset.shape, Coding(preset.compressor, preset.rank), num_islands=2)
    assert 16 < compression(payload.sent_bytes, preset.shape, 2) < 24
    assert payload.exchanges == len(preset.shape.tensors)


def test_opt_1_3b_shrinks_nearly_8_times_by_int4() -> None:
    shape = PRESETS["dilocox_opt_1_3b"].shape
    (payload,) = fragment_payloads(shape, Coding("int4"), num_islands=2)
    assert compression(payload.sent_bytes, shape, 2) == pytest.approx(32 / 4.125, rel=1e-3)


def test_fp32_is_no_compression_whatever_the_number_of_islands() -> None:
    shape = PRESETS["streaming_1b"].shape
    for islands in (2, 3, 8):
        (payload,) = fragment_payloads(shape, IDENTITY, num_islands=islands)
        assert compression(payload.sent_bytes, shape, islands) == pytest.approx(1, rel=1e-6)


def test_gathered_codes_cost_more_with_every_island_and_those_with_owners_hardly() -> None:
    few, many = (declared(Coding("topk+stat2"), num_islands=islands) for islands in (2, 16))
    assert many == 15 * few
    assert declared(Coding("int4"), num_islands=16) < 2 * declared(Coding("int4"), num_islands=2)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_owes_is_what_has_error_feedback(name: str) -> None:
    assert Coding(name, feedback=True).owes
    assert not Coding(name, feedback=False).owes
    state = Coding(name).compressor.init((8, 8))
    assert Coding(name).owes == any(key.startswith("own.") for key in state)
    assert all(isinstance(value, torch.Tensor) for value in state.values())


def test_a_compressor_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="int8"):
        check_coding(Coding("int9"), PRESETS["streaming_1b"].shape)


def test_a_rank_larger_than_every_matrix_names_one_that_would_do() -> None:
    with pytest.raises(ConfigError, match="Use rank="):
        check_coding(Coding("lowrank", 10**6), PRESETS["streaming_1b"].shape)
