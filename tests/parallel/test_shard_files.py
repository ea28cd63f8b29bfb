"""A checkpoint of any layout is loaded by any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from parallel import parallel_work as work
from parallel.parallel_work import Case, hf_config
from safetensors.torch import save_file
from spawn import run_replicas

from atoll.errors import CheckpointError
from atoll.models import load_model
from atoll.parallel.pipeline import ParallelSettings
from atoll.parallel.shard_files import ShardReader, export_model, write_shards
from atoll.parallel.sharding import Shard

LAYOUTS = [  # (data, stage), settings: 2 stages, then 4, then 1
    ((1, 2), ParallelSettings("zero-bubble", 4)),
    ((1, 4), ParallelSettings("1f1b", 4)),
    ((2, 1), ParallelSettings("gpipe", 2, sharding="shard")),
    ((1, 1), ParallelSettings("gpipe", 1)),
]


@pytest.mark.parametrize(("family", "tie"), [("gpt2", True), ("llama", False)])
def test_a_run_goes_on_with_another_number_of_stages(family: str, tie: bool, tmp_path: Path) -> None:
    load, losses = "", []
    for number, ((num_data, num_stages), settings) in enumerate(LAYOUTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        steps = (2 * number, 2 * number + 2)
        layout = (num_data * num_stages, num_data, num_stages)
        case = Case(family, settings, tie=tie)
        losses += run_replicas(work.train_and_save, *layout, case, steps, load, str(folder))[0].losses
        load = str(folder)
    single = work.train_alone(family, steps=len(losses), tie=tie)
    assert losses == pytest.approx(single.losses, abs=3e-6)
    for folder in (tmp_path / "1", tmp_path / "3"):
        export_model(
            ShardReader(folder.glob("model-*.safetensors")),
            folder / "hf",
            hf_config(family, tie=tie),
            max_file_bytes=9000,
        )
        assert len([*(folder / "hf").glob("*.safetensors")]) > 1
    exported = dict(load_model(tmp_path / "3" / "hf").named_parameters())
    assert exported.keys() == single.rows.keys()
    for name, (_, value) in single.rows.items():
        torch.testing.assert_close(exported[name].detach(), value, atol=5e-5, rtol=0)
    assert load_model(tmp_path / "1" / "hf").get_input_embeddings().weight.shape == (63, 32)


def shard(values: list[float], start: int, shape: tuple[int, ...]) -> Shard:
    return Shard(torch.tensor(values).view(-1, *shape[1:]), start, start + len(values), torch.Size(shape))


def test_rows_are_found_in_whichever_file_has_them(tmp_path: Path) -> None:
    write_shards(tmp_path / "b.safetensors", {"w": shard([4, 5], 4, (3, 2)), "v": shard([], 0, (0,))})
    write_shards(tmp_path / "a.safetensors", {"w": shard([0, 1, 2, 3], 0, (3, 2))})
    save_file({"s": torch.tensor(7.0)}, tmp_path / "c.safetensors")
    reader = ShardReader(tmp_path.iterdir())
    assert reader.read("w", 2, 6).tolist() == [2, 3, 4, 5]
    assert reader.whole("w").tolist() == [[0, 1], [2, 3], [4, 5]]
    assert reader.whole("s").tolist() == 7.0
    target = shard([9, 9], 2, (3, 2))
    reader.fill_([("w", target)])
    assert target.tensor.tolist() == [[2, 3]]


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path / "a.safetensors", {"w": shard([0, 1], 0, (3, 2))})
    reader = ShardReader(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="lacks elements 2 to 6 of w"):
        reader.read("w", 0, 6)
    with pytest.raises(CheckpointError, match="lacks the tensor v"):
        reader.read("v", 0, 1)
    with pytest.raises(CheckpointError, match=r"w is \[3, 2\] in the checkpoint and \[4, 2\] in the model"):
        reader.fill_([("w", shard([0, 0], 0, (4, 2)))])


@pytest.mark.parametrize(
    "header",
    ["no json", '["w"]', '{"w": [0, 2, 2, 9]}', '{"w": [-2, 4, 2]}', '{"w": [9, 3, 2]}', '{"w": []}', '{"w": [0, 4]}',
     '{"w": 4}', '{"w": [true, 4, 2]}', '{"w": [1e99, 4, 2]}'],
)  # fmt: skip
def test_a_header_that_lies_is_refused(header: str, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2, 2)}, tmp_path / "a.safetensors", metadata={"atoll.rows": header})
    with pytest.raises(CheckpointError, match=r"a\.safetensors"):
        ShardReader(tmp_path.iterdir())


def test_files_of_two_models_and_torn_files_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path / "a.safetensors", {"w": shard([0, 1], 0, (3, 2))})
    write_shards(tmp_path / "b.safetensors", {"w": shard([0, 1], 2, (4, 2))})
    with pytest.raises(CheckpointError, match="belong to different models"):
        ShardReader(tmp_path.iterdir())
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"b\.safetensors cannot be read"):
        ShardReader(tmp_path.iterdir())


def test_the_index_of_an_export_names_every_tensor_once(tmp_path: Path) -> None:
    save_file({name: torch.zeros(4, 4) for name in "abc"}, tmp_path / "model-0.safetensors")
    export_model(
        ShardReader([tmp_path / "model-0.safetensors"]), tmp_path / "hf", hf_config("llama"), max_file_bytes=128
    )
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {"a", "b", "c"} and index["metadata"]["total_size"] == 192
