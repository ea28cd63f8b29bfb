"""`atoll verify`: every altered byte of a checkpoint is found, and its file named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from atoll.train.checkpoint import MANIFEST, read_manifest


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def flip_a_bit(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1
    path.write_bytes(data)


def test_whole_checkpoints_are_told_one_a_line(atoll, run: Path) -> None:
    answer = atoll("verify", run)
    assert answer.code == 0
    assert [line.split(" |")[0] for line in answer.out.splitlines()] == ["step-000006 ok", "step-000012 ok"]


def test_one_checkpoint_can_be_named(atoll, run: Path) -> None:
    assert atoll("verify", run / "checkpoints/step-000006").out.startswith("step-000006 ok")


def test_a_flipped_bit_in_any_file_is_found_and_the_file_named(atoll, run: Path) -> None:
    folder = run / "checkpoints/step-000012"
    names = [*read_manifest(folder)["files"], MANIFEST]
    assert len(names) > 5
    for number, name in enumerate(names):
        flip_a_bit(folder / name, 7919 * number)
        answer = atoll("verify", run)
        assert answer.code == 2
        assert f"step-000012 damaged: {name} " in answer.out
        assert f"1 of 2 checkpoints damaged: {folder}: {name} " in answer.err
        assert f"Whole is {run / 'checkpoints/step-000006'}." in answer.err
        assert len(answer.err.splitlines()) <= 3
        flip_a_bit(folder / name, 7919 * number)
    assert atoll("verify", run).code == 0


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_file_that_is_not_whole_is_named(atoll, run: Path, damage: str) -> None:
    path = run / "checkpoints/step-000006/outer.safetensors"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    answer = atoll("verify", run)
    assert answer.code == 2
    assert "step-000006 damaged: outer.safetensors" in answer.out


def test_json_has_the_same_answer(atoll, run: Path) -> None:
    flip_a_bit(run / "checkpoints/step-000006/state.json", 3)
    answer = atoll("verify", run, "--json")
    first, second = json.loads(answer.out)
    assert answer.code == 2
    assert first["problem"].startswith("state.json") and second["problem"] is None
    assert second["files"] > 5 and second["bytes"] > 1000


def test_what_is_no_run_is_refused(refused, tmp_path: Path) -> None:
    assert "there is no folder" in refused("verify", tmp_path / "nowhere")
    assert "holds neither a manifest" in refused("verify", tmp_path)
