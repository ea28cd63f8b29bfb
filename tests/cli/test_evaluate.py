"""`atoll eval`: the numbers of the run again, on any text, of any model folder."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from atoll.train.metrics import read_metrics

CHECKPOINT = "checkpoints/step-000012"


def score(atoll, *args: object) -> dict[str, Any]:
    answer = atoll("eval", *args, "--json")
    assert answer.code == 0, answer
    return json.loads(answer.out)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "test.txt"
    path.write_text("the island sends one round; né\n" * 40, encoding="utf-8")
    return path


def test_the_loss_is_that_of_the_runs_last_evaluation(atoll, trained: Path) -> None:
    last = [event for event in read_metrics(trained / "metrics.jsonl") if event["event"] == "eval"][-1]
    found = score(atoll, trained)
    assert found["tokens"] == last["tokens"]
    assert found["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert found["perplexity"] == pytest.approx(last["perplexity"], rel=1e-5)


def test_bits_a_byte_follow_from_the_bytes_of_the_text(atoll, trained: Path, text: Path) -> None:
    found = score(atoll, trained, "--data", text, "--split", "all", "--sequences", 0)
    # Every byte is a token; sequences of 32 lose their first, and the end of the text is a token of no byte.
    assert found["bytes"] in (found["tokens"], found["tokens"] - 1)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] * found["tokens"] / math.log(2) / found["bytes"])


def test_a_run_a_checkpoint_and_an_exported_folder_score_alike(
    atoll, trained: Path, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    assert atoll("export", trained, folder).code == 0
    given = ("--data", text, "--split", "all", "--sequence-length", 32)
    scores = [score(atoll, place, *given) for place in (trained, trained / CHECKPOINT, folder)]
    assert len({found["loss"] for found in scores}) == 1


def test_the_line_for_other_benchmarks_names_a_folder_that_loads(atoll, trained: Path) -> None:
    out = atoll("eval", trained).out
    (named,) = [word for word in out.split() if word.startswith("pretrained=")]
    assert "lm_eval --model hf --model_args pretrained=" in out
    folder = named.removeprefix("pretrained=")
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == len(AutoTokenizer.from_pretrained(folder))


def test_fewer_sequences_can_be_asked_for(atoll, trained: Path) -> None:
    assert score(atoll, trained, "--sequences", 3)["sequences"] == 3


def test_a_model_without_a_run_needs_a_text(refused, trained: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained / CHECKPOINT, tmp_path / "alone")
    assert "Name some with --data" in refused("eval", folder)


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["--sequence-length", "4000"], "positions"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--split", "most"], "most"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(refused, trained: Path, args: list[str], hint: str) -> None:
    assert hint in refused("eval", trained, *args)


def test_a_text_too_short_for_a_sequence_is_refused(refused, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    assert "makes no sequence" in refused("eval", trained, "--data", tmp_path / "short.txt", "--split", "all")
