"""Islands of many workers: as those of one that they stand for; one dead worker is one dead island, and no more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faults.fleet import Fleet
from safetensors.torch import load_file
from torch import Tensor

from atoll.algo.schedule import Launch
from atoll.comm.local import LocalGroup
from atoll.data import load_data
from atoll.data.stream import LeasedStream
from atoll.models import build_model
from atoll.train.build import make_schedule, outer_settings
from atoll.train.config import TrainConfig
from atoll.train.metrics import read_metrics
from atoll.train.replica import Replica
from atoll.train.sync import ReplicaSync

pytestmark = pytest.mark.slow

LAYERS = {"family": "llama", "hidden_size": 32, "num_layers": 4, "num_heads": 2, "intermediate_size": 64}
ONE: dict[str, Any] = {}
STAGES = {"pipeline_stages": 2}
SHARDS = {"data_workers": 2, "sharding": "shard"}
FOUR = {"pipeline_stages": 4}
DELAYED = {"schedule": "delayed", "outer_lr": 0.6, "outer_momentum": 0.4}
MANY = {"model": LAYERS, "batch_size": 4}
ROUNDS = 10


def trained_alone(config: TrainConfig, used: list[dict[str, Any]]) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses by replica, and the anchor, of replicas of one worker in this process, on the same samples.

    used: by round, the samples of each replica.
    """
    transports = LocalGroup(config.replicas).endpoints()
    schedule = make_schedule(config)
    data = load_data(config.data, sequence_length=config.sequence_length, num_replicas=1, seed=config.seed)
    replicas, syncs = [], []
    for index, transport in enumerate(transports):
        model = build_model(
            config.model, vocab_size=data.vocab_size, sequence_length=config.sequence_length, seed=config.seed
        )
        stream = LeasedStream(data.stream(0))
        stream.lease(tuple(pair) for round_ in used for pair in round_[str(index)])
        replicas.append(Replica(index, model=model, stream=stream, config=config, device=torch.device("cpu")))
        syncs.append(ReplicaSync(replicas[-1].trainable(), transport, outer_settings(config, schedule)))
    losses: list[list[float]] = [[] for _ in replicas]
    for step in range(1, config.max_steps + 1):
        for replica in replicas:
            replica.compute_gradients(step)
            losses[replica.index].append(replica.update(step).loss)
        events = schedule.events(step) + (schedule.finish(step) if step == config.max_steps else ())
        for event in events:
            for sync in syncs:
                if isinstance(event, Launch):
                    sync.launch(0, weight=1.0)
            for sync in syncs:
                if not isinstance(event, Launch):
                    sync.apply(0, step=step)
    return losses, syncs[0].anchor()


@pytest.mark.parametrize(
    ("schedule", "shape"),
    [(ONE, STAGES), (ONE, SHARDS), (DELAYED, STAGES)],
    ids=["2 stages", "2 shards", "delayed, 2 stages"],
)
def test_losses_and_anchors_are_those_of_one_worker(
    fleet: Callable[..., Fleet], schedule: dict[str, Any], shape: dict[str, Any]
) -> None:
    settings = {"inner_steps": 3, "max_steps": 3 * ROUNDS, "quorum": 1.0, "deadline_s": 60.0, "save_steps": 0}
    run = fleet(replicas=2, **MANY, **settings, **schedule, **shape)
    assert [run.wait_end(island, timeout_s=60) for island in run.islands.values()] == [0, 0]
    rounds = run.committed()
    assert len(rounds) == ROUNDS and all(len(payload["weights"]) == 2 for payload in rounds)
    losses, anchor = trained_alone(run.config, [payload["used"] for payload in rounds])
    steps = [event for event in read_metrics(run.run_dir / "metrics.jsonl") if event["event"] == "step"]
    for seat in (0, 1):
        logged = [event["loss"] for event in steps if event["replica"] == seat]
        assert logged == pytest.approx(losses[seat], abs=1e-5)
    saved = load_file(run.run_dir / (run.run_dir / "latest").read_text().strip() / "model.safetensors")
    assert max(float((saved[name] - value).abs().max()) for name, value in anchor.items()) < 1e-5
    run.check()


PHASES = {
    "inner": ("stepped",),
    "launch": ("take", "connected"),
    "in flight": ("averaged",),
    "commit": ("landed",),
    "checkpoint": ("saved",),
}
BACK = {"stepped": ONE, "take": FOUR}  # with other workers, by where one died; else with as many


@pytest.mark.parametrize("phase", PHASES)
def test_one_worker_may_die_in_any_phase_of_a_round(fleet: Callable[..., Fleet], phase: str) -> None:
    delayed = DELAYED if phase in ("launch", "in flight") else ONE
    run = fleet(replicas=2, **MANY, **STAGES, **delayed, inner_steps=6, step_s=0.02, save_steps=6)
    run.add(2, shape=ONE)
    run.wait_counted(0, 1, 2)
    for skip, point in enumerate(PHASES[phase]):
        seat = 0 if phase == "checkpoint" else 1  # the island of the lowest seat saves
        victim = run.islands[seat]
        run.plan(f"{victim.name}/1", f"worker.{point}", skip=skip)
        run.wait_end(victim)
        run.clear_plan()
        assert victim.last_words() == (3, f"replica {seat}: worker 1 of this island is gone")
        run.wait_rounds(2)
        run.add(seat, shape=BACK.get(point))
        run.wait_counted(0, 1, 2)
        if point in BACK:
            run.kill(seat)
            run.add(seat)
            run.wait_counted(0, 1, 2)
    run.check()
    assert _tokens_out_of_rounds(run, 2) <= 3 * run.tokens_a_round


def _tokens_out_of_rounds(run: Fleet, seat: int) -> float:
    """Tokens that an island trained on and that are in no committed round: at most its last rounds."""
    events = read_metrics(run.run_dir / "metrics.jsonl")
    steps = sum(event["event"] == "step" and event["replica"] == seat for event in events)
    return steps * run.tokens_a_step - sum(event["weights"].get(str(seat), 0) for event in run.of("round"))


def test_islands_of_all_shapes_make_rounds_together(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=2, **MANY, inner_steps=6, compressor="lowrank+int4", rank=4, error_feedback=True)
    run.wait_round(2)
    for seat, shape in enumerate((STAGES, SHARDS), start=2):
        run.add(seat, shape=shape)
        run.wait_counted(*range(seat + 1))
    run.kill(0)
    run.wait_rounds(2)
    run.add(0, shape=FOUR)
    run.wait_counted(0, 1, 2, 3)
    run.check()


def test_an_island_that_leaves_comes_back_with_other_workers_and_all_it_did(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=2, **MANY, **STAGES, inner_steps=6, step_s=0.02)
    run.wait_round(2)
    for seat in (0, 1):
        run.send(seat, signal.SIGTERM)
    assert [run.wait_end(run.islands[seat]) for seat in (0, 1)] == [75, 75]
    saved = run.saved()
    assert saved["layout"]["pipeline_stages"] == 2
    known = run.committed()
    run.kill_coordinator()
    again = Fleet(run.folder, replicas=2, **MANY, inner_steps=6, resume="auto")
    with again:
        again.go_back()
        again.start_coordinator()
        for seat, shape in enumerate((ONE, FOUR)):
            again.add(seat, shape=shape)
        again.wait_round(saved["round"] + 3)
        again.check(known=known)


def test_a_signal_to_any_worker_lets_the_island_leave(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=2, **MANY, **STAGES, inner_steps=6, step_s=0.02)
    run.wait_round(2)
    os.kill(run.others_of(1)[0], signal.SIGTERM)
    began = time.perf_counter()
    assert run.wait_end(run.islands[1]) == 75
    assert time.perf_counter() - began < 10
    run.wait_rounds(2)
    run.check()


def test_nobody_is_left_when_the_leader_dies(fleet: Callable[..., Fleet]) -> None:
    run = fleet(replicas=2, **MANY, **FOUR, inner_steps=6, step_s=0.02)
    run.wait_round(2)
    others = run.others_of(1)
    assert len(others) == 3
    run.kill(1)
    run.wait(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in others), "the other workers to end")
    run.wait_rounds(1)
    run.check()
