"""The commands that use a trained run, and those that look around."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from atoll.cli import doctor
from atoll.cli.demo import claim_folder, contenders_of, demo_settings, results_table
from atoll.train.config import build_config, read_config_file
from atoll.train.metrics import read_metrics


def test_train_leaves_metrics_a_checkpoint_and_a_report(trained: Path) -> None:
    assert {event["event"] for event in read_metrics(trained / "metrics.jsonl")} == {"step", "round", "eval"}
    assert (trained / "latest").read_text().strip() == "checkpoints/step-000012"
    assert "held-out loss" in (trained / "report.md").read_text().lower()
    assert (trained / "plots" / "loss_by_steps.png").stat().st_size > 1000


def test_train_says_what_can_be_done_next(atoll, tiny: list[str], trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    answer = atoll("train", *tiny, "--resume", "auto", "--output-dir", tmp_path / "run")
    assert answer.code == 0
    assert "resumed from step-000012" in answer.out
    assert answer.out.splitlines()[-1].startswith(f"next: atoll generate {tmp_path / 'run'}")


def test_a_run_folder_alone_is_enough_to_go_on(atoll, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-000012").rename(tmp_path / "gone")
    answer = atoll("train", tmp_path / "run", "--resume", "auto", "--output-dir", tmp_path / "run")
    assert "resumed from step-000006" in answer.out
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 12


def test_settings_of_the_run_are_kept_beside_it(trained: Path) -> None:
    config = read_config_file(trained / "config.toml")
    assert (config.replicas, config.inner_steps, config.model.hidden_size) == (2, 4, 32)


def test_generate_writes_the_prompt_and_goes_on(atoll, trained: Path) -> None:
    text = atoll("generate", trained, "-p", "the island", "--max-new-tokens", "20").out
    assert text.startswith("the island")
    assert len(text) > len("the island\n")


def test_the_same_seed_writes_the_same_text(atoll, trained: Path) -> None:
    def write(seed: int) -> str:
        return atoll("generate", trained, "-p", "the", "--seed", seed, "--max-new-tokens", "40").out

    assert write(1) == write(1) != write(2)


def test_generate_takes_a_run_a_checkpoint_or_a_model_folder(atoll, trained: Path, tmp_path: Path) -> None:
    atoll("export", trained, tmp_path / "model")
    places = [trained, trained / "checkpoints" / "step-000012", tmp_path / "model"]
    assert len({atoll("generate", place, "-p", "the", "--temperature", "0").out for place in places}) == 1


def test_generate_passes_over_a_damaged_checkpoint_and_says_so(atoll, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-000012" / "model.safetensors").write_bytes(b"")
    answer = atoll("generate", tmp_path / "run", "-p", "the", "--max-new-tokens", "5")
    assert answer.code == 0
    assert "step-000012 is damaged" in answer.err


def test_an_exported_model_is_the_checkpoint_to_transformers(atoll, trained: Path, tmp_path: Path) -> None:
    assert atoll("export", trained, tmp_path / "model").code == 0
    checkpoint = trained / "checkpoints" / "step-000012"
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")("the island", return_tensors="pt")["input_ids"]
    exported, saved = (AutoModelForCausalLM.from_pretrained(place) for place in (tmp_path / "model", checkpoint))
    assert torch.equal(exported(tokens).logits, saved(tokens).logits)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names
    assert not {"manifest.json", "outer.safetensors", "replica-0.safetensors"} & names


def test_an_exported_model_can_be_read_by_others(atoll, trained: Path, tmp_path: Path) -> None:
    atoll("export", trained, tmp_path / "model")
    readable = {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    (tmp_path / "trial").write_text("")
    assert readable == {(tmp_path / "trial").stat().st_mode & 0o777}


# --- doctor ---


def test_doctor_finds_this_machine_ready(atoll, tmp_path: Path) -> None:
    answer = atoll("doctor", "--output-dir", tmp_path)
    assert answer.code == 0, answer.out
    assert "gloo works on loopback" in answer.out
    assert answer.out.splitlines()[-1] == "Ready. Next: atoll demo"


def test_doctor_names_what_failed_and_exits_with_2(atoll, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[float]:
        raise RuntimeError("Unable to find interface lo")

    monkeypatch.setattr(doctor, "all_reduce_on_loopback", broken)
    answer = atoll("doctor", "--output-dir", tmp_path)
    assert answer.code == 2
    assert "fail gloo does not work on loopback: Unable to find interface lo" in answer.out


def test_doctor_fails_where_no_run_can_be_written() -> None:
    assert doctor.check_disk(Path("/proc/runs")).status == "fail"


# --- the parts of the demo ---


def test_contenders_differ_in_nothing_but_who_talks_to_whom() -> None:
    settings = demo_settings(["--seed", "3"], quick=False)
    configs = [build_config(settings | contender.settings) for contender in contenders_of(build_config(settings))]
    assert [(config.method, config.replicas) for config in configs] == [
        ("diloco", 4),
        ("data-parallel", 1),
        ("data-parallel", 4),
    ]
    assert [config.compressor for config in configs] == ["fp16", "identity", "identity"]
    alike = [config.model_dump(exclude={"method", "replicas", "compressor"}) for config in configs]
    assert alike[0] == alike[1] == alike[2]
    assert alike[0]["seed"] == 3


def test_a_demo_never_writes_where_something_is(tmp_path: Path) -> None:
    folders = [claim_folder(tmp_path / "demo") for _ in range(3)]
    assert [folder.name for folder in folders] == ["demo", "demo-2", "demo-3"]


def test_results_table_has_a_row_for_each_run(trained: Path) -> None:
    from atoll.train.summary import summarise

    table = results_table({"one": summarise(trained), "two": summarise(trained)})
    assert table.row_count == 2
