"""A run that is stopped after any inner step and resumed is the run that was never stopped, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from train.tiny import (
    GPT2_WITH_DROPOUT,
    LLAMA,
    after_each_step,
    but,
    checkpoint,
    contents,
    finish,
    history,
    metrics,
    tiny_config,
    tiny_run,
    train_tiny,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from atoll.algo.schedule import Schedule
from atoll.errors import CheckpointError, ConfigError, DataError
from atoll.train.checkpoint import load_json
from atoll.train.config import TrainConfig

STEPS = 8


@pytest.fixture(autouse=True)
def no_waiting_for_the_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def assert_resume_is_exact(
    config: TrainConfig, tmp_path: Path, *, schedule: Schedule | None = None, eval_steps: int = 2
) -> None:
    """Save after every step of one run; resume each in fresh objects; compare the files at the end, and the log."""
    whole = but(config, save_steps=1, keep_last=100, eval_steps=eval_steps)
    train_tiny(whole, schedule=schedule)
    for step in range(1, config.max_steps):
        resumed = but(
            whole, output_dir=str(tmp_path / f"from-{step}"), resume=str(checkpoint(whole, step)), save_steps=0
        )
        Path(resumed.output_dir).mkdir()
        for name in ("metrics.jsonl", "config.toml"):
            shutil.copy(Path(whole.output_dir, name), resumed.output_dir)
        train_tiny(resumed, schedule=schedule)
        assert history(resumed) == history(whole), f"resumed after step {step}"
        assert contents(resumed, config.max_steps) == contents(whole, config.max_steps), f"resumed after step {step}"


SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "dropout": {"model": GPT2_WITH_DROPOUT},
    "gradient accumulation": {"model": GPT2_WITH_DROPOUT, "gradient_accumulation_steps": 2},
    "dropped, measured from the anchor": {"drop_probability": 0.5, "replicas": 3},
    "dropped, measured from its own": {
        "drop_probability": 0.5,
        "drop_base": "own",
        "drop_merge": "all",
        "replicas": 3,
        "inner_steps": 2,
    },
    "ramp-up": {"replica_schedule": "ramp-up", "replicas": 3},
    "halving": {"replica_schedule": "halving", "merge": "tokens"},
    "pretraining": {"pretrain_steps": 4, "inner_steps": 2, "merge": "tokens"},
    "averaged inner state": {"average_inner_state": True},
    "cosine outer rate": {"outer_lr_schedule": "cosine"},
    "outer Adam, pruned, fp16": {"outer_optimizer": "adam", "prune_fraction": 0.5, "compressor": "fp16"},
    "lerp": {"adopt": "lerp", "alpha": 0.3},
    "one replica, plain SGD": {"replicas": 1, "optimizer": "sgd", "outer_optimizer": "sgd"},
    "data parallel": {"method": "data-parallel", "model": GPT2_WITH_DROPOUT},
}


@pytest.mark.parametrize("changes", SETTINGS.values(), ids=SETTINGS)
def test_resumed_after_any_step_equals_uninterrupted(changes: dict[str, Any], tmp_path: Path) -> None:
    assert_resume_is_exact(tiny_config(tmp_path, **changes), tmp_path)


SCHEDULES: dict[str, tuple[Schedule, dict[str, Any]]] = {
    "delay of a round": (Schedule(3, delay=3, blocking_first=True), {"adopt": "carry", "carry_share": 0.5}),
    "delay of a round, eager": (Schedule(3, delay=3), {"adopt": "eager"}),
    "delay of a round, reset": (Schedule(2, delay=2, blocking_first=True), {"adopt": "replace"}),
    "streaming": (Schedule(4, num_fragments=2, delay=1), {"adopt": "lerp", "alpha": 0.5}),
    "streaming, long delay": (Schedule(4, num_fragments=2, delay=3), {"adopt": "carry", "compressor": "bf16"}),
    "delay and drops": (Schedule(2, delay=1), {"adopt": "carry", "drop_probability": 0.5, "prune_fraction": 0.3}),
}


@pytest.mark.parametrize(("schedule", "changes"), SCHEDULES.values(), ids=SCHEDULES)
def test_resumed_with_rounds_in_flight_equals_uninterrupted(
    schedule: Schedule, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = {**LLAMA, "num_layers": 2}
    config = tiny_config(tmp_path, inner_steps=schedule.inner_steps, model=model, **changes)
    assert_resume_is_exact(config, tmp_path, schedule=schedule)


def test_a_resumed_run_is_evaluated_when_the_uninterrupted_one_is(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_steps=11)
    assert_resume_is_exact(config, tmp_path, eval_steps=5)
    assert [line["step"] for line in metrics(config, "eval")] == [6, 11]


def test_saving_changes_nothing(tmp_path: Path) -> None:
    saving = tiny_config(tmp_path, save_steps=1, eval_steps=1, model=GPT2_WITH_DROPOUT)
    silent = but(saving, save_steps=0, output_dir=str(tmp_path / "silent"))
    train_tiny(saving)
    train_tiny(silent)
    assert contents(saving, STEPS) == contents(silent, STEPS)


def test_evaluating_changes_nothing_of_the_model(tmp_path: Path) -> None:
    often = tiny_config(tmp_path, eval_steps=1, model=GPT2_WITH_DROPOUT)
    once = but(often, eval_steps=0, output_dir=str(tmp_path / "once"))
    train_tiny(often)
    train_tiny(once)
    assert contents(often, STEPS) == contents(once, STEPS)


# ---------------------------------------------------------------------------------------------------------------------
# What is resumed from


def test_auto_goes_on_from_the_newest_checkpoint_and_forgets_what_was_logged_after_it(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, save_steps=5, eval_steps=1)
    train_tiny(config)
    before, files = history(config), contents(config, STEPS)
    shutil.rmtree(checkpoint(config, STEPS))
    run = tiny_run(but(config, resume="auto"))
    assert run.step == 5
    assert max(line["step"] for line in metrics(config)) == 5
    finish(run)
    assert history(config) == before
    assert contents(config, STEPS) == files


def test_resuming_a_finished_run_adds_nothing(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, eval_steps=3)
    train_tiny(config)
    log = Path(config.output_dir, "metrics.jsonl").read_text()
    manifest = (checkpoint(config, STEPS) / "manifest.json").read_text()
    train_tiny(but(config, resume="auto"))
    assert Path(config.output_dir, "metrics.jsonl").read_text() == log
    assert (checkpoint(config, STEPS) / "manifest.json").read_text() == manifest


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_it_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from atoll.train.engine import run_local

    config = tiny_config(tmp_path, save_steps=3)
    train_tiny(config)
    before, files = history(config), contents(config, STEPS)
    with open(checkpoint(config, STEPS) / "replica-1.safetensors", "r+b") as file:
        file.truncate(100)
    run_local(but(config, resume="auto"))
    said = capsys.readouterr().out
    assert "step-000008 is damaged and passed over" in said
    assert "resumed from step-000006 after step 6" in said
    assert history(config) == before
    assert contents(config, STEPS) == files


def test_auto_begins_anew_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    train_tiny(config)
    before = history(config)
    shutil.rmtree(Path(config.output_dir, "checkpoints"))
    train_tiny(but(config, resume="auto"))
    assert history(config) == before


def test_a_folder_that_holds_a_run_is_refused_untouched(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    train_tiny(config)
    log = Path(config.output_dir, "metrics.jsonl").read_text()
    with pytest.raises(ConfigError, match="already holds a run"):
        tiny_run(config)
    assert Path(config.output_dir, "metrics.jsonl").read_text() == log


def test_a_checkpoint_of_elsewhere_does_not_overwrite_another_run(tmp_path: Path) -> None:
    here, there = tiny_config(tmp_path), tiny_config(tmp_path, seed=2, output_dir=str(tmp_path / "there"))
    train_tiny(here)
    train_tiny(there)
    log = Path(here.output_dir, "metrics.jsonl").read_text()
    with pytest.raises(CheckpointError, match=r"seed=1 \(now 2\)"):
        tiny_run(but(there, output_dir=here.output_dir, resume=str(checkpoint(there, STEPS))))
    assert Path(here.output_dir, "metrics.jsonl").read_text() == log


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 2),
        ("inner_steps", 4),
        ("outer_momentum", 0.9),
        ("learning_rate", 1e-3),
        ("batch_size", 1),
        ("replicas", 3),
        ("compressor", "bf16"),
        ("max_steps", 9),
    ],
)
def test_another_setting_that_matters_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, save_steps=3)
    train_tiny(config)
    with pytest.raises(CheckpointError, match=rf"{key}=.*\(now {value!r}\)"):
        tiny_run(but(config, resume="auto", **{key: value}))


def test_another_model_is_refused_by_its_dotted_name(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    train_tiny(config)
    with pytest.raises(CheckpointError, match=r"model\.hidden_size=32 \(now 64\)"):
        tiny_run(but(config, resume="auto", model={**LLAMA, "hidden_size": 64}))


def test_settings_that_change_nothing_may_change(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, save_steps=3)
    train_tiny(config)
    shutil.rmtree(checkpoint(config, STEPS))
    run = tiny_run(but(config, resume="auto", save_steps=2, eval_steps=1, logging_steps=1, eval_sequences=4))
    assert run.step == 6
    run.close()


def test_a_constant_rate_lets_a_run_be_prolonged(tmp_path: Path) -> None:
    short = tiny_config(tmp_path, max_steps=6, lr_schedule="constant")
    train_tiny(short)
    train_tiny(but(short, max_steps=12, resume="auto"))
    long = but(short, max_steps=12, output_dir=str(tmp_path / "long"))
    train_tiny(long)
    assert metrics(short, "round")[-1]["anchor_digest"] == metrics(long, "round")[-1]["anchor_digest"]


def test_other_texts_are_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    train_tiny(config)
    shutil.rmtree(checkpoint(config, STEPS) / "..", ignore_errors=True)
    (tmp_path / "corpus" / "new.txt").write_text("another text " * 50)
    from train import tiny

    tiny._load.cache_clear()
    train_tiny(but(config, output_dir=str(tmp_path / "second"), save_steps=3))
    (tmp_path / "corpus" / "new.txt").unlink()
    tiny._load.cache_clear()
    with pytest.raises(DataError, match="belongs to other data"):
        tiny_run(but(config, output_dir=str(tmp_path / "second"), resume="auto"))


# ---------------------------------------------------------------------------------------------------------------------
# What a checkpoint holds


FAMILIES = [(family, tied) for family in ("llama", "gpt2", "opt", "qwen2") for tied in (True, False)]


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_the_model_part_loads_in_transformers_with_the_logits_of_the_anchor(
    family: str, tied: bool, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, save_steps=4, model={**LLAMA, "family": family, "tie_embeddings": tied})
    run = train_tiny(config)
    lead = run.members[0]
    anchor = lead.sync.anchor()
    with torch.no_grad():
        for name, param in lead.replica.trainable().items():
            param.copy_(anchor[name])
    for step in (4, STEPS):  # in mid-round too: the anchor there is that of the round before
        loaded = AutoModelForCausalLM.from_pretrained(checkpoint(config, step))
        assert isinstance(loaded, PreTrainedModel)
        inputs, outputs = loaded.get_input_embeddings(), loaded.get_output_embeddings()
        assert (inputs.weight is outputs.weight) == tied
    tokens = torch.arange(24).view(2, 12)
    assert torch.equal(loaded.eval()(tokens).logits, lead.replica.model.eval()(tokens).logits)


def test_the_model_part_in_mid_round_is_the_anchor_and_not_a_replica(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, save_steps=1, keep_last=9)
    run = train_tiny(config)
    assert run.step == STEPS
    weights = [contents(config, step)["model.safetensors"] for step in range(1, STEPS + 1)]
    changes = [step for step in range(2, STEPS + 1) if weights[step - 1] != weights[step - 2]]
    assert changes == [3, 6, 8]


def test_the_tokenizer_loads_in_transformers(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_steps=3)
    train_tiny(config)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(config, 3))
    text = "naïve reef — 島\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_digest_beside_a_checkpoint_is_that_of_its_round(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, save_steps=4)
    train_tiny(config)
    rounds = {line["round"]: line["anchor_digest"] for line in metrics(config, "round")}
    for step, last_round in ((4, 1), (8, 3)):
        summary = load_json(checkpoint(config, step) / "state.json")
        assert (summary["step"], summary["round"]) == (step, last_round)
        assert summary["anchor_digest"] == rounds[last_round]


# ---------------------------------------------------------------------------------------------------------------------
# SIGKILL


KILLED = """
import json, os, signal, sys
from atoll.train.config import build_config
from atoll.train import engine, run

config, kill_at = build_config(json.loads(sys.argv[1])), int(sys.argv[2])
log_step = run.Run.log_step

def log_step_and_die(self, report):
    log_step(self, report)
    if report.step == kill_at and report.replica == 1:
        os.kill(os.getpid(), signal.SIGKILL)

run.Run.log_step = log_step_and_die
engine.run_local(config)
"""


def test_killed_after_a_save_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, save_steps=4, model=GPT2_WITH_DROPOUT)
    command = [sys.executable, "-c", KILLED, json.dumps(config.model_dump()), "5"]
    died = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert "saved step-000004" in died.stdout
    assert max(line["step"] for line in metrics(config)) == 5
    train_tiny(but(config, resume="auto"))
    whole = but(config, output_dir=str(tmp_path / "whole"))
    train_tiny(whole)
    assert contents(config, STEPS) == contents(whole, STEPS)
    assert history(config) == history(whole)


def test_a_signal_saves_at_the_end_of_the_step_and_the_resumed_run_is_exact(tmp_path: Path) -> None:
    from atoll.train.stopping import Interrupted, Signals

    config = tiny_config(tmp_path, model=GPT2_WITH_DROPOUT)
    for signum, code in ((signal.SIGINT, 130), (signal.SIGTERM, 75)):
        signals = Signals()
        run = tiny_run(but(config, resume="auto"), signals=signals)
        after_each_step(
            run, lambda step, signals=signals, signum=signum: signals(signum, None) if step in (4, 5) else None
        )
        with pytest.raises(Interrupted, match=f"stopped after step {4 if code == 130 else 5}/8; saved") as stopped:
            finish(run)
        assert stopped.value.exit_code == code
    train_tiny(but(config, resume="auto"))
    whole = but(config, output_dir=str(tmp_path / "whole"))
    train_tiny(whole)
    assert contents(config, STEPS) == contents(whole, STEPS)
    assert history(config) == history(whole)
