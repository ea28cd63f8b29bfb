"""Replicas of many workers are the replicas of one worker that they stand for."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from train.tiny import GPT2_WITH_DROPOUT, but, checkpoint, contents, history, metrics, train_tiny
from train.worker_runs import (
    DELAYED,
    LOW_RANK,
    STREAMING,
    TWO_LAYERS,
    anchor,
    break_one_worker,
    die_in_one_worker,
    farthest,
    losses,
    rounds_noted,
    told_to_stop_in_one_worker,
    train_and_note_rounds,
    worker_config,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from atoll.algo.merge import geometry
from atoll.errors import AtollError, ConfigError
from atoll.train import engine
from atoll.train.config import TrainConfig
from atoll.train.launch import WorkersFailed, run_workers
from atoll.train.layout import make_layout
from atoll.train.memory import predict_memory
from atoll.train.stopping import Signals
from atoll.train.sync import RoundReport
from atoll.train.workers import OneWorker, WorkerStopper, _gram, _pack, _unpack, all_say

SHAPES: dict[str, dict[str, Any]] = {
    "2 stages": {"pipeline_stages": 2},
    "2 data": {"data_workers": 2},
    "2 shards": {"data_workers": 2, "sharding": "shard"},
}
CASES: dict[str, dict[str, Any]] = {
    "blocking": {},
    "delayed low-rank int4": DELAYED | LOW_RANK,
    "delayed": DELAYED,
    "streaming": STREAMING,
}
# Rows of a matrix have a subspace of their own, so that low rank over data workers is another approximation.
OTHER_BY_DESIGN = {("delayed low-rank int4", "2 data"), ("delayed low-rank int4", "2 shards")}


@pytest.fixture(autouse=True)
def no_waiting_for_the_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workers")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, TrainConfig]:
    """Each case with replicas of one worker, trained."""
    configs = {name: worker_config(folder, f"alone-{name}", engine="local", **case) for name, case in CASES.items()}
    for config in configs.values():
        train_tiny(config)
    return configs


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_anchors_are_those_of_one_worker(
    case: str, shape: str, folder: Path, alone: dict[str, TrainConfig]
) -> None:
    config = worker_config(folder, f"{case} {shape}", **CASES[case], **SHAPES[shape])
    run_workers(config, train_and_note_rounds)
    single, many = losses(alone[case]), losses(config)
    assert many == pytest.approx(single, abs=0.1 if (case, shape) in OTHER_BY_DESIGN else 1e-5)
    distance = farthest(anchor(alone[case]), anchor(config))
    assert distance < (0.1 if (case, shape) in OTHER_BY_DESIGN else 1e-5)
    _check_rounds(config, alone[case])
    _check_memory(config)


def _check_memory(config: TrainConfig) -> None:
    """What each worker holds after the last round, when nothing is in flight any more, is what was foretold."""
    layout = make_layout(config, vocab_size=anchor(config)["model.embed_tokens.weight"].shape[0])
    for worker in range(config.num_workers):
        held = json.loads(Path(config.output_dir, f"memory-{worker}.json").read_text())
        foretold = predict_memory(layout, worker // config.data_workers, worker % config.data_workers)
        slack = 4 * 8 * len(layout.names) + (0.02 * foretold["weights"] if config.sharding == "shard" else 0)
        for state in foretold.keys() - {"in flight"}:  # steps are counted, and the rows of shards may be one more
            assert abs(held.get(state, 0) - foretold[state]) <= 2 * slack, (worker, state)


def _check_rounds(config: TrainConfig, single: TrainConfig) -> None:
    """All processes know the same digest in every round, and the leader logs what one worker a replica would."""
    noted = rounds_noted(config)
    assert len(noted[0]) >= 20 and all(rounds == noted[0] for rounds in noted)
    ours, theirs = metrics(config, "round"), metrics(single, "round")
    assert [line["anchor_digest"] for line in ours] == [line["digest"] for line in noted[0]]
    assert [(line["round"], line["step"]) for line in ours] == [(line["round"], line["step"]) for line in theirs]
    if config.compressor == "identity":
        assert sum(line["payload_bytes"] for line in ours) == sum(line["payload_bytes"] for line in theirs)
        assert ours[5]["norms"] == pytest.approx(theirs[5]["norms"], rel=1e-4)
        assert ours[5]["delta_norm"] == pytest.approx(theirs[5]["delta_norm"], rel=1e-4)
        assert ours[5]["cosine_mean"] == pytest.approx(theirs[5]["cosine_mean"], abs=1e-4)


def test_one_replica_of_two_stages_and_two_data_workers_is_one_process(folder: Path) -> None:
    single = worker_config(folder, "2x2 alone", replicas=1, engine="local")
    train_tiny(single)
    many = worker_config(folder, "2x2", replicas=1, pipeline_stages=2, data_workers=2, pipeline_schedule="gpipe")
    engine.run(many)
    assert losses(many) == pytest.approx(losses(single), abs=1e-5)
    assert farthest(anchor(single), anchor(many)) < 1e-5
    assert metrics(many, "eval")[-1]["loss"] == pytest.approx(metrics(single, "eval")[-1]["loss"], abs=1e-5)


OTHER_SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"activation_checkpointing": True, "batch_size": 2, "gradient_accumulation_steps": 4},
    "interleaved": {"microbatches": 4, "batch_size": 8},
    "zero-bubble": {"microbatches": 8, "batch_size": 8},
}


@pytest.mark.parametrize("schedule", OTHER_SCHEDULES)
def test_every_pipeline_schedule_is_one_process(schedule: str, folder: Path) -> None:
    """Of a model that is loaded, and whose tied ends lie on one worker in `zero-bubble`."""
    four = {"model": {**TWO_LAYERS, "num_layers": 4}, "max_steps": 8}
    first = worker_config(folder, f"{schedule} first", engine="local", **four, seed=5)
    if not Path(first.output_dir).exists():
        train_tiny(first)
    settings = four | OTHER_SCHEDULES[schedule] | {"init_from": str(checkpoint(first, 8))}
    single = worker_config(folder, f"{schedule} alone", **settings | {"engine": "local", "microbatches": 0})
    train_tiny(single)
    many = worker_config(folder, schedule, **settings, pipeline_stages=2, pipeline_schedule=schedule)
    engine.run(many)
    assert losses(many) == pytest.approx(losses(single), abs=1e-5)
    assert farthest(anchor(single), anchor(many)) < 1e-5


def test_the_model_loads_with_transformers_and_has_the_same_logits(folder: Path) -> None:
    """Tied embeddings across two stages, from rows of two files."""
    config = worker_config(folder, "exported", max_steps=4, pipeline_stages=2)
    single = worker_config(folder, "exported-alone", max_steps=4, engine="local")
    engine.run(config)
    train_tiny(single)
    tokens = torch.arange(12)[None]
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(checkpoint(one, 4), local_files_only=True).eval()
        for one in (config, single)
    )
    assert type(ours) is type(theirs)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(checkpoint(config, 4), local_files_only=True).vocab_size > 0
    assert not list(checkpoint(config, 4).glob("*.part"))


# --- resuming


RESUMED: dict[str, dict[str, Any]] = {
    "2 stages, delayed, low rank": DELAYED | LOW_RANK | {"pipeline_stages": 2, "outer_state": "host"},
    "2 shards, streaming, dropout": STREAMING
    | {"data_workers": 2, "sharding": "shard", "max_steps": 12, "compressor": "int4", "error_feedback": True}
    | {"model": {**GPT2_WITH_DROPOUT, "num_layers": 2}},
    "2 data, carried fragments": STREAMING | {"data_workers": 2, "max_steps": 12, "adopt": "carry", "delay": 2},
    "a stage without a fragment": STREAMING
    | {"pipeline_stages": 2, "max_steps": 12, "delay": 3, "model": {**GPT2_WITH_DROPOUT, "num_layers": 2}},
}


def _resume(config: TrainConfig, step: int, name: str, **changes: Any) -> TrainConfig:
    """Go on from a checkpoint of `config`, in a folder of its own."""
    run_dir = Path(config.output_dir)
    resumed = but(
        config, output_dir=str(run_dir.parent / name), resume=str(checkpoint(config, step)), save_steps=0, **changes
    )
    Path(resumed.output_dir).mkdir()
    for file in ("metrics.jsonl", "config.toml"):
        shutil.copy(run_dir / file, resumed.output_dir)
    engine.run(resumed)
    return resumed


@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(case: str, folder: Path) -> None:
    config = worker_config(folder, case, **({"max_steps": 12} | RESUMED[case] | {"max_steps": 12, "save_steps": 7}))
    engine.run(config)
    resumed = _resume(config, 7, f"{case} resumed")
    assert contents(resumed, 12) == contents(config, 12)
    assert _without_geometry(resumed) == _without_geometry(config)


def _without_geometry(config: TrainConfig) -> list[dict[str, Any]]:
    """Inner products are summed as tensors happen to lie in memory: equal to rounding."""
    inexact = ("norms", "cosines", "cosine_mean", "delta_norm")
    return [{key: value for key, value in line.items() if key not in inexact} for line in history(config)]


MOVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1 worker to 2 stages": ({}, {"pipeline_stages": 2}),
    "2 stages to 1 worker": ({"pipeline_stages": 2}, {"pipeline_stages": 1}),
    "2 stages to 2 shards": ({"pipeline_stages": 2}, SHAPES["2 shards"] | {"pipeline_stages": 1}),
    "2 data to 2 stages": ({"data_workers": 2}, {"data_workers": 1, "pipeline_stages": 2}),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_run_goes_on_with_other_workers_to_rounding(move: str, folder: Path, alone: dict[str, TrainConfig]) -> None:
    """A round is in flight and something is owed; what is compared is the run of one worker that was never stopped."""
    before, after = MOVES[move]
    settings = DELAYED | {"compressor": "bf16", "error_feedback": True, "max_steps": 13, "inner_steps": 3}
    whole = worker_config(folder, f"{move} whole", engine="local", **settings)
    train_tiny(whole)
    config = worker_config(folder, move, save_steps=7, **settings, **before)
    engine.run(config)
    resumed = _resume(config, 7, f"{move} moved", **after)
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-4)
    assert farthest(anchor(resumed), anchor(whole)) < 1e-4


# --- what goes wrong


@pytest.mark.parametrize("shape", ["2 stages", "2 shards"])
def test_a_nan_on_one_worker_refuses_the_whole_replica(shape: str, folder: Path) -> None:
    config = worker_config(folder, f"nan {shape}", **SHAPES[shape])
    run_workers(config, break_one_worker)
    noted = rounds_noted(config)
    assert all(rounds == noted[0] for rounds in noted)
    assert [number for number, line in enumerate(noted[0], start=1) if line["refused"] == [1]] == [3, 9]
    assert sum(bool(line["refused"]) for line in noted[0]) == 2
    refused = [line for line in metrics(config, "round") if line["refused"]]
    assert [line["contributors"] for line in refused] == [1, 1]
    assert all(loss == loss for loss in losses(config).values())  # it began again from the anchor


def test_one_worker_that_dies_ends_the_run_with_its_name(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = worker_config(folder, "dies", pipeline_stages=2)
    with pytest.raises(WorkersFailed, match=r"replica 1, worker 1 was ended by exit code 9\.\s*Go on") as failed:
        run_workers(config, die_in_one_worker)
    assert len(str(failed.value).splitlines()) <= 3


def test_a_signal_to_one_worker_stops_all_after_one_step_and_the_run_goes_on(folder: Path) -> None:
    config = worker_config(folder, "told", pipeline_stages=2, max_steps=10, inner_steps=3)
    with pytest.raises(WorkersFailed, match=r"stopped after step \d/10; saved") as failed:
        run_workers(config, told_to_stop_in_one_worker)
    assert failed.value.exit_code == 75
    engine.run(but(config, resume="auto"))
    whole = but(config, output_dir=str(folder / "told-whole"))
    engine.run(whole)
    assert contents(config, 10) == contents(whole, 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_stages": 3}, r"pipeline_stages=3 is too many.*Use at most 2"),
        ({"pipeline_stages": 2, "microbatches": 1}, r"microbatches=1 is less.*Use at least 2"),
        ({"pipeline_stages": 2, "microbatches": 3}, r"Use batch_size=6, or microbatches=\d"),
        ({"data_workers": 3}, r"Use batch_size=6"),
        ({"pipeline_stages": 2, "pipeline_schedule": "interleaved"}, r"too many.*Use at most 1"),
        ({"pipeline_stages": 2, "method": "data-parallel"}, r"method='data-parallel'.*Leave it"),
        ({"pipeline_stages": 2, "engine": "local"}, r"engine='local'.*Leave it"),
        ({"pipeline_stages": 2, "average_inner_state": True}, r"average_inner_state=True"),
        ({"microbatches": 4}, r"Use gradient_accumulation_steps=4"),
    ],
    ids=str,
)
def test_what_cannot_be_laid_out_is_refused_with_the_value_that_would_do(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        engine.run(worker_config(folder, "refused", **changes))
    assert len(str(refused.value).splitlines()) <= 3
    assert not (folder / "refused").exists()


def test_another_model_is_not_resumed(folder: Path) -> None:
    config = worker_config(folder, "other", max_steps=4, pipeline_stages=2)
    engine.run(config)
    other = but(config, output_dir=str(folder / "other-2"), resume=str(checkpoint(config, 4)), seed=5)
    with pytest.raises(AtollError, match="seed=1 "):
        engine.run(other)


# --- parts


class SaysAfterwards(OneWorker):
    """The first of two workers: the other one says what is given, in turn."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload, self._answers.pop(0)]


def test_all_must_say_yes() -> None:
    assert all_say(OneWorker(), True) and not all_say(OneWorker(), False)
    assert all_say(SaysAfterwards(b"\1"), True) and not all_say(SaysAfterwards(b"\0"), True)


def test_inner_products_survive_being_told() -> None:
    gram = torch.tensor([[4.0, -1.0, 0.5], [-1.0, 9.0, 2.0], [0.5, 2.0, 1.0]], dtype=torch.float64)
    told = geometry(gram, [1.0, 1.0, 0.0])
    report = RoundReport(0, 1, [1.0, 1.0, 0.0], [], 77, told, "0" * 32)
    digest, sent, again = _unpack(_pack(report), 3)
    assert (digest, sent) == (bytes(16), 77)
    assert again is not None
    expected = gram.clone()
    expected[2, :2] = expected[:2, 2] = 0  # of a replica that did not count, its norm alone is known
    torch.testing.assert_close(again, expected)
    assert geometry(again, [1.0, 1.0, 0.0]).cosine_mean == pytest.approx(told.cosine_mean)
    assert geometry(again, [1.0, 1.0, 0.0]).delta_norm == pytest.approx(told.delta_norm)
    assert _gram(told) == pytest.approx(expected.flatten().tolist())


def test_only_the_first_worker_speaks_for_a_replica() -> None:
    with pytest.raises(AssertionError, match="first worker"):
        WorkerStopper(OneWorker(), Signals(), speaker=None)
