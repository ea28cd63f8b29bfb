"""Which layers and rows each worker has, and what that costs, before anything is built."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from train.worker_runs import DELAYED, LOW_RANK, worker_config

from atoll.errors import CheckpointError, ConfigError
from atoll.models import count_parameters
from atoll.recipes import RECIPES
from atoll.train.config import build_config
from atoll.train.layout import make_layout
from atoll.train.memory import predict_memory

FAMILIES = ("llama", "qwen2", "opt", "gpt2")


def settings(family: str, **changes: Any) -> dict[str, Any]:
    model = {"family": family, "hidden_size": 32, "num_layers": 4, "num_heads": 2, "intermediate_size": 64}
    return {"model": model, "batch_size": 8, "sequence_length": 16} | changes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("sharding", ["replicate", "shard"])
def test_every_row_has_one_owner(family: str, tie: bool, schedule: str, sharding: str) -> None:
    made = settings(family, pipeline_stages=2, data_workers=3, batch_size=12, pipeline_schedule=schedule)
    made["model"]["tie_embeddings"] = tie
    config = build_config(made | {"sharding": sharding})
    layout = make_layout(config, vocab_size=63)
    owned = [layout.owned(stage, data) for stage in range(2) for data in range(3)]
    total = sum(math.prod(shape) for worker in owned for shape in worker.values())
    assert total == layout.num_parameters == count_parameters(config.model, vocab_size=63, sequence_length=16)
    assert {name for worker in owned for name in worker} == set(layout.names)


def test_state_of_107_billion_parameters_is_foretold_in_a_moment() -> None:
    """16 bytes of inner state a parameter, 8 of outer, and base, flight and residual, over 80 stages x 2 rows."""
    config = build_config(
        RECIPES["dilocox_107b"]()
        | {"pipeline_stages": 80, "data_workers": 2, "sharding": "shard", "batch_size": 160}
        | {"gradient_accumulation_steps": 1}
    )
    layout = make_layout(config)
    assert layout.num_parameters == 106_931_724_288
    memory = predict_memory(layout, 40)
    each = sum(math.prod(shape) for shape in layout.owned(40).values())
    assert memory["weights"] == 4 * each and memory["inner optimizer"] == 8 * each
    assert memory["in flight"] == memory["base"] == memory["anchor"] == 4 * each
    assert 2 * each < memory["compressor"] < 4 * each  # a bf16 residual, and warm starts


def test_host_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        make_layout(worker_config(tmp_path, "x", pipeline_stages=2, init_from=str(tmp_path)))


def test_layerdrop_is_refused() -> None:
    made = settings("opt", pipeline_stages=2)
    made["model"]["overrides"] = {"layerdrop": 0.1}
    with pytest.raises(ConfigError, match="Use layerdrop=0"):
        make_layout(build_config(made))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pipeline_stages": 2}, 2),
        ({"pipeline_stages": 3, "batch_size": 8}, 4),
        ({"pipeline_stages": 2, "gradient_accumulation_steps": 3}, 3),
        ({"data_workers": 2, "gradient_accumulation_steps": 2}, 1),
        ({"pipeline_stages": 2, "pipeline_schedule": "interleaved", "batch_size": 6}, 2),
        ({"pipeline_stages": 2, "microbatches": 8}, 8),
    ],
    ids=str,
)
def test_as_many_microbatches_as_fit(changes: dict[str, Any], expected: int) -> None:
    assert build_config(settings("llama") | changes).resolved_microbatches == expected


def test_the_outer_state_counts_as_it_is_kept() -> None:
    config = build_config(settings("llama", pipeline_stages=2, **DELAYED, **LOW_RANK) | {"outer_optimizer": "adam"})
    layout = make_layout(config, vocab_size=63)
    memory = predict_memory(layout, 1)
    owned = sum(math.prod(shape) for shape in layout.owned(1).values())
    held = sum(math.prod(shape) for shape in layout.held(1).values())
    assert held == owned + 63 * 32  # the copy of the tied embedding
    assert memory["outer state"] == 8 * owned
    assert list(memory)[:3] == ["weights", "gradients", "inner optimizer"]
