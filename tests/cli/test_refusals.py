"""Bad input: exit code 2, at most three lines, no traceback, and nothing that was saved is touched."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import write_corpus


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["quickstat"], "quickstart"),
        (["quickstart", "--iner-steps", "5"], "--inner-steps"),
        (["--inner-steps", "0"], "inner_steps=0"),
        (["--inner-steps", "ten"], "inner_steps='ten'"),
        (["--outer-lr", "-1"], "outer_lr=-1"),
        (["--learning-rate", "nan"], "learning_rate=nan"),
        (["--outer-optimizer", "nestrov"], "nesterov"),
        (["--compressor", "gzip"], "identity"),
        (["--method", "local-sgd"], "'diloco'"),
        (["--max-steps", "10", "--inner-steps", "20"], "Use at most 10"),
        (["--model.hidden-size", "30"], "model.hidden_size=32"),
    ],
)
def test_a_setting_that_cannot_be_used(refused, tmp_path: Path, args: list[str], hint: str) -> None:
    assert hint in refused("train", *args, "--output-dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_not_there(refused, tmp_path: Path) -> None:
    assert "there is no file" in refused("train", tmp_path / "none.toml")


def test_a_file_that_is_not_toml(refused, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text("max_steps = = 3\n")
    assert "line 1" in refused("train", file)


def test_a_file_with_an_unknown_key(refused, tmp_path: Path) -> None:
    file = tmp_path / "typo.toml"
    file.write_text("iner_steps = 3\n")
    assert "inner_steps" in refused("train", file)


def test_a_corpus_that_is_not_there(refused, tiny: list[str], tmp_path: Path) -> None:
    message = refused("train", *tiny, "--data.source", tmp_path / "nothing", "--output-dir", tmp_path / "run")
    assert "does not exist" in message


def test_a_corpus_with_no_documents(refused, tiny: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    message = refused("train", *tiny, "--data.source", tmp_path / "empty", "--output-dir", tmp_path / "run")
    assert "holds no document" in message


def test_a_batch_larger_than_the_data(refused, tiny: list[str], tmp_path: Path) -> None:
    message = refused("train", *tiny, "--batch-size", "100000", "--output-dir", tmp_path / "run")
    assert "100000" in message


def test_more_replicas_than_domains(refused, tiny: list[str], tmp_path: Path) -> None:
    args = ["--replicas", "3", "--data.shard", "domain", "--output-dir", tmp_path / "run"]
    assert "3" in refused("train", *tiny, *args)


def test_more_replicas_than_sequences(refused, tiny: list[str], tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("one island after another\n" * 20)
    args = ["--replicas", "40", "--data.source", text, "--output-dir", tmp_path / "run"]
    assert "40" in refused("train", *tiny, *args)


def test_a_folder_that_holds_a_run_already(refused, tiny: list[str], trained: Path) -> None:
    before = contents(trained)
    assert "--resume auto" in refused("train", *tiny, "--output-dir", trained)
    assert contents(trained) == before


def test_a_run_that_failed_before_its_first_step_is_in_nobodys_way(
    atoll, refused, tiny: list[str], tmp_path: Path
) -> None:
    refused("train", *tiny, "--batch-size", "100000", "--output-dir", tmp_path / "run")
    assert atoll("train", *tiny, "--output-dir", tmp_path / "run").code == 0


def test_a_run_of_other_settings_is_not_gone_on_with(refused, tiny: list[str], trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    before = contents(tmp_path / "run")
    message = refused("train", *tiny, "--seed", "5", "--resume", "auto", "--output-dir", tmp_path / "run")
    assert "seed=0 (now 5)" in message
    assert contents(tmp_path / "run") == before


def test_a_truncated_checkpoint_is_named(refused, tiny: list[str], trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    broken = tmp_path / "run" / "checkpoints" / "step-000012"
    os.truncate(broken / "outer.safetensors", 100)
    message = refused("train", *tiny, "--resume", broken, "--output-dir", tmp_path / "run")
    assert "outer.safetensors has 100 bytes" in message
    assert "step-000006" in message
    assert "outer.safetensors" in refused("generate", broken)


def test_a_port_in_use(refused, tiny: list[str], busy_port: int, tmp_path: Path) -> None:
    args = ["--engine", "torchdist", "--port", str(busy_port), "--output-dir", tmp_path / "run"]
    message = refused("train", *tiny, *args)
    assert f"port={busy_port}" in message
    assert "--port 0" in message


@pytest.mark.parametrize("command", ["train", "demo"])
def test_an_output_folder_that_is_a_file(refused, tmp_path: Path, command: str) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    refused(command, "--output-dir", file)
    refused(command, "--output-dir", file / "run")
    assert file.read_text() == "precious"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_folder_without_permission(refused, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "permission" in refused("train", "--output-dir", tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "hint"), [(["small"], "'small'"), (["--method", "diloco"], "--method"), (["--sed", "1"], "--seed")]
)
def test_what_is_not_for_the_demo(refused, tmp_path: Path, words: list[str], hint: str) -> None:
    assert hint in refused("demo", "--output-dir", tmp_path / "demo", *words)
    assert hint in refused("demo", *words, "--output-dir", tmp_path / "demo", "--quick")
    assert not (tmp_path / "demo").exists()


def test_a_run_that_is_not_there(refused, tmp_path: Path) -> None:
    assert "there is no folder" in refused("generate", tmp_path / "none")
    assert "there is no folder" in refused("export", tmp_path / "none", tmp_path / "model")


def test_a_folder_without_a_model(refused, tmp_path: Path) -> None:
    assert "neither checkpoints nor a model" in refused("generate", write_corpus(tmp_path / "texts", domains=1))


def test_a_run_without_a_checkpoint(refused, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert "has no checkpoint yet" in refused("generate", tmp_path)


def test_a_temperature_that_is_negative(refused, trained: Path) -> None:
    assert "temperature=-1.0" in refused("generate", trained, "--temperature", "-1")


def test_export_overwrites_nothing(refused, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    assert "is not empty" in refused("export", trained, tmp_path)
    assert "is a file" in refused("export", trained, tmp_path / "mine.txt")
    assert contents(tmp_path) == {"mine.txt": b"precious"}
