"""`--dry-run`: what a run would hold and send, with nothing started; and replicas of many workers from the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from atoll.cli.dry_run import options_from
from atoll.errors import ConfigError
from atoll.train.metrics import read_metrics

LARGE = ("dilocox_107b", "--outer-state=device", "--no-activation-checkpointing")


def answer_of(atoll: Any, *args: object) -> dict[str, Any]:
    answer = atoll("train", *args, "--dry-run", "--json")
    assert answer.code == 0, answer
    return json.loads(answer.out)


def test_107_billion_parameters_are_laid_out_in_seconds(atoll) -> None:
    found = answer_of(atoll, *LARGE, "--step-time", "8.79")
    assert found["parameters"] == 106_931_724_288
    assert (found["processes"], found["microbatches"], len(found["stages"])) == (320, 80, 80)
    assert found["bubble"] == pytest.approx(79 / 159)
    assert [layer for stage in found["stages"] for layer in stage["layers"]] == list(range(80))
    assert sum(stage["parameters"] for stage in found["stages"]) == found["parameters"]
    assert not found["fits"] and "--outer-state host" in found["way_out"]
    assert found["sent_bytes_a_round"] == pytest.approx(
        2 * sum(s["sent_bytes_a_round"] for s in found["stages"]), rel=0.01
    )
    tokens = 2 * 160 * 2048
    assert found["tokens_per_s"] == pytest.approx(tokens / 8.79, rel=0.01)  # the sync hides behind 125 steps


def test_the_way_out_is_one(atoll) -> None:
    found = answer_of(atoll, "dilocox_107b", "--outer-state=host", "--activation-checkpointing")
    assert found["fits"] and not found["way_out"]
    assert all(stage["device_bytes"] <= 40e9 for stage in found["stages"])
    assert set(found["stages"][0]["on_host"]) == {"anchor", "outer state", "base", "in flight", "compressor"}
    assert not set(found["stages"][0]["on_host"]) & set(found["stages"][0]["on_device"])


def test_more_memory_is_a_way_out_too(atoll) -> None:
    assert answer_of(atoll, *LARGE, "--memory", "200GB")["fits"]


def test_stages_that_are_alike_are_one_line(atoll) -> None:
    answer = atoll("train", *LARGE, "--dry-run")
    lines = answer.out.splitlines()
    assert any(line.startswith("1-78") for line in lines)
    assert len(lines) < 12 and all(len(line) <= 180 for line in lines)
    assert "does not fit 40 GB: stage 0" in answer.out


def test_nothing_is_started_or_written(atoll, tmp_path: Path) -> None:
    answer = atoll("train", "quickstart", "--dry-run", "--pipeline-stages=2", "--output-dir", tmp_path / "run")
    assert answer.code == 0 and "nothing is started" in answer.out
    assert not (tmp_path / "run").exists()


def test_one_worker_holds_the_whole_model(atoll) -> None:
    found = answer_of(atoll, "quickstart")
    (stage,) = found["stages"]
    assert stage["parameters"] == found["parameters"] == 935_424
    assert stage["on_device"]["anchor"] == 4 * 935_424
    assert math.isclose(found["bubble"], 0.0) and found["tokens_per_s"] is None


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["quickstart", "--json"], "Add --dry-run"),
        (["quickstart", "--dry-run", "--memory", "40"], "'40'"),
        (["quickstart", "--dry-run", "--memory"], "--memory needs a value"),
        (["quickstart", "--dry-run", "--step-time", "soon"], "'soon'"),
        (["quickstart", "--dry-run", "--pipeline-stages=3"], "Use at most 2"),
        (["dilocox_107b", "--dry-run", "--gradient-accumulation-steps=8"], "Use batch_size=20"),
        (["quickstart", "--pipeline-stages=3"], "Use at most 2"),
        (["quickstart", "--pipeline-stages=2", "--microbatches=1"], "Use at least 2"),
        (["quickstart", "--pipeline-stages=2", "--microbatches=3"], "microbatches=2"),
        (["quickstart", "--data-workers=3"], "Use batch_size=6"),
        (["quickstart", "--pipeline-stages=2", "--engine=local"], "engine='local'"),
        (["quickstart", "--pipeline-stages=2", "--pipeline-schedule=gpip"], "pipeline_schedule='gpip'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(refused, tmp_path: Path, args: list[str], hint: str) -> None:
    assert hint in refused("train", *args, "--output-dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_flags_of_a_dry_run_are_told_from_settings() -> None:
    options, rest = options_from(["x.toml", "--memory=80GB", "--seed", "1", "--step-time", "50ms", "--json"])
    assert options is not None and rest == ["x.toml", "--seed", "1"]
    assert (options.memory_bytes, options.step_s, options.as_json) == (80e9, 0.05, True)
    assert options_from(["quickstart"]) == (None, ["quickstart"])
    with pytest.raises(ConfigError, match="needs a value"):
        options_from(["--link"])


def test_two_replicas_of_two_stages_train_from_the_command(atoll, tmp_path: Path) -> None:
    small = "--data.max-bytes 200000 --eval-sequences 8 --sequence-length 32"
    words = f"train quickstart --pipeline-stages 2 --replicas 2 --max-steps 20 --inner-steps 5 {small}".split()
    answer = atoll(*words, "--output-dir", tmp_path / "run")
    assert answer.code == 0, answer.err
    rounds = [event for event in read_metrics(tmp_path / "run" / "metrics.jsonl") if event["event"] == "round"]
    assert [event["contributors"] for event in rounds] == [2, 2, 2, 2]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-000020", local_files_only=True)
    assert sum(param.numel() for param in model.parameters()) == 935_424
