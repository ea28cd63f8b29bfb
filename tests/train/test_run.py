"""When replicas sync, what is logged and evaluated, and what becomes of what is not a number."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train.tiny import (
    GPT2_WITH_DROPOUT,
    LLAMA,
    after_each_step,
    but,
    checkpoint,
    contents,
    finish,
    metrics,
    tiny_config,
    tiny_run,
    train_tiny,
)

from atoll.algo.schedule import Schedule
from atoll.errors import CheckpointError, ConfigError, DataError, DesyncError
from atoll.train.config import TrainConfig, build_config
from atoll.train.run import Run

KEYS = {
    "step": ["event", "step", "replica", "loss", "grad_norm", "lr", "tokens", "tokens_per_s"],
    "round": [
        "event",
        "round",
        "step",
        "replicas",
        "contributors",
        "payload_bytes",
        "sync_s",
        "exposed_s",
        "inner_s",
        "anchor_digest",
        "delta_norm",
        "cosine_mean",
    ],
    "eval": ["event", "step", "round", "loss", "perplexity", "tokens"],
}


@pytest.fixture(autouse=True)
def no_waiting_for_the_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def parameters(run: Run, index: int) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in run.members[index].replica.trainable().items()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def anchor_copy(run: Run) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in run.members[0].sync.anchor().items()}


def spoil(run: Run, index: int) -> None:
    """A NaN in one number of one replica's parameters."""
    with torch.no_grad():
        next(iter(run.members[index].replica.trainable().values())).view(-1)[3] = math.nan


def at_step(run: Run, step: int, action: Callable[[], None]) -> None:
    after_each_step(run, lambda now: action() if now == step else None)


# ---------------------------------------------------------------------------------------------------------------------
# What is logged


def test_metrics_have_the_keys_that_scripts_rely_on(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    train_tiny(config)
    for line in metrics(config):
        assert list(line)[: len(KEYS[line["event"]])] == KEYS[line["event"]]
    assert all(list(line) == KEYS["step"] for line in metrics(config, "step"))
    assert all(list(line) == KEYS["eval"] for line in metrics(config, "eval"))


def test_every_replica_logs_every_step_once(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, replicas=3, gradient_accumulation_steps=2)
    train_tiny(config)
    steps = [(line["step"], line["replica"]) for line in metrics(config, "step")]
    assert sorted(steps) == [(step, replica) for step in range(1, 9) for replica in range(3)]
    assert all(line["tokens"] == line["step"] * 2 * 2 * 16 for line in metrics(config, "step"))


def test_bytes_sent_are_those_of_the_parameters(tmp_path: Path) -> None:
    sent = {}
    for compressor in ("identity", "bf16", "fp16"):
        config = tiny_config(tmp_path, compressor=compressor, output_dir=str(tmp_path / compressor))
        run = train_tiny(config)
        (sent[compressor],) = {line["payload_bytes"] for line in metrics(config, "round")}
        numel = sum(param.numel() for param in run.members[0].replica.trainable().values())
        assert sent[compressor] == numel * (4 if compressor == "identity" else 2)  # two replicas: 2(M-1)/M = 1


def test_the_only_replica_sends_nothing(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, replicas=1)
    train_tiny(config)
    assert {(line["payload_bytes"], line["contributors"]) for line in metrics(config, "round")} == {(0, 1)}


def test_replicas_differ_within_a_round_and_their_geometry_is_logged(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, replicas=3)
    train_tiny(config)
    for line in metrics(config, "round"):
        assert len(line["norms"]) == 3 and min(line["norms"]) > 0
        pairs = [line["cosines"][i][j] for i in range(3) for j in range(i)]
        assert all(-1 <= cosine < 1 for cosine in pairs)
        assert line["cosine_mean"] == pytest.approx(sum(pairs) / 3)


# ---------------------------------------------------------------------------------------------------------------------
# When replicas sync


@pytest.mark.parametrize("inner_steps", [1, 2, 3, 4])
def test_every_round_has_exactly_h_steps(inner_steps: int, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, inner_steps=inner_steps, max_steps=3 * inner_steps, warmup_steps=1)
    train_tiny(config)
    assert [(line["round"], line["step"]) for line in metrics(config, "round")] == [
        (number, number * inner_steps) for number in (1, 2, 3)
    ]
    steps_before = 0
    lines = metrics(config)
    for position, line in enumerate(lines):
        if line["event"] == "round":
            assert sum(step["event"] == "step" for step in lines[:position]) - steps_before == 2 * inner_steps
            steps_before += 2 * inner_steps


def test_the_last_partial_round_is_synced(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    run = train_tiny(config)
    assert [line["step"] for line in metrics(config, "round")] == [3, 6, 8]
    assert equal(parameters(run, 0), anchor_copy(run))
    assert equal(parameters(run, 0), parameters(run, 1))


@pytest.mark.parametrize(
    "schedule", [Schedule(3, delay=3, blocking_first=True), Schedule(4, num_fragments=2, delay=2)], ids=str
)
def test_a_run_ends_with_nothing_in_flight_whatever_the_schedule(schedule: Schedule, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, inner_steps=schedule.inner_steps, model={**LLAMA, "num_layers": 2})
    run = train_tiny(config, schedule=schedule)
    for member in run.members:
        assert all(not fragment["flights"] for fragment in member.sync.replica_state()["fragments"])
        assert equal(parameters(run, member.index), anchor_copy(run))


def test_all_replicas_hold_one_anchor_after_every_round(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, replicas=3, model=GPT2_WITH_DROPOUT)
    run = tiny_run(config)
    digests = []
    apply = run.apply

    def apply_and_look(fragment: int, step: int) -> None:
        apply(fragment, step)
        digests.append({member.sync.digest() for member in run.members})

    run.apply = apply_and_look  # type: ignore[method-assign]
    finish(run)
    assert [len(found) for found in digests] == [1, 1, 1]
    assert [found.pop() for found in digests] == [line["anchor_digest"] for line in metrics(config, "round")]


def test_nobody_asks_whether_to_stop_after_the_last_step(tmp_path: Path) -> None:
    """Who asked would wait for the others' answers, and they for it in the last evaluation."""
    run = tiny_run(tiny_config(tmp_path))
    asked: list[int] = []
    run._stopper.stop_after = asked.append  # type: ignore[assignment]
    finish(run)
    assert asked == [1, 2, 3, 4, 5, 6, 7]


def test_replicas_that_begin_with_other_weights_are_refused(tmp_path: Path) -> None:
    run = tiny_run(tiny_config(tmp_path))
    with torch.no_grad():
        run.members[1].sync._fragments[0].anchor[0] += 1
    run.members[1].sync._fragments[0].digest = b"x" * 16
    with pytest.raises(DesyncError, match="different anchors"):
        run.check_same_start()
    run.close()


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def test_the_anchor_is_evaluated_and_not_a_replica(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, eval_steps=3, adopt="lerp", alpha=0.5)
    run = tiny_run(config)
    seen: list[tuple[int, bool, bool]] = []
    for member in run.members:
        evaluate = member.replica.evaluate

        def look(sequences: Tensor, weights: dict[str, Tensor], member: Any = member, evaluate: Any = evaluate) -> Any:
            is_anchor = equal(dict(weights), anchor_copy(run))
            seen.append((run.step, is_anchor, member.sync.round == run.members[0].sync.round))
            return evaluate(sequences, weights)

        member.replica.evaluate = look
    finish(run)
    assert seen == [(step, True, True) for step in (3, 6, 8) for _ in range(2)]


@pytest.mark.parametrize(
    ("eval_steps", "evaluated"), [(0, [8]), (1, [3, 6, 8]), (2, [3, 6, 8]), (4, [6, 8]), (7, [8]), (100, [8])]
)
def test_evaluated_at_the_next_outer_step_and_at_the_end(eval_steps: int, evaluated: list[int], tmp_path: Path) -> None:
    config = tiny_config(tmp_path, eval_steps=eval_steps)
    train_tiny(config)
    assert [line["step"] for line in metrics(config, "eval")] == evaluated


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_replicas_share_the_held_out_text_without_loss(replicas: int, tmp_path: Path) -> None:
    """Also where there are fewer sequences than replicas."""
    losses = []
    for sequences in (3, 8):
        config = tiny_config(
            tmp_path,
            replicas=replicas,
            max_steps=3,
            eval_sequences=sequences,
            output_dir=str(tmp_path / str(sequences)),
        )
        run = train_tiny(config)
        line = metrics(config, "eval")[0]
        alone = run.members[0].replica.evaluate(run._held_out, anchor_copy(run))
        assert line["tokens"] == alone[1] == sequences * 15
        assert line["loss"] == pytest.approx(alone[0] / alone[1], rel=1e-6)
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
        losses.append(line["loss"])
    assert losses[0] != losses[1]


# ---------------------------------------------------------------------------------------------------------------------
# Rates


@pytest.mark.parametrize("replica_schedule", ["constant", "ramp-up", "doubling", "ramp-down"])
def test_the_rate_is_a_function_of_the_global_step(replica_schedule: Any, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, replicas=3, max_steps=12, warmup_steps=4, replica_schedule=replica_schedule)
    train_tiny(config)
    rates: dict[int, set[float]] = {}
    for line in metrics(config, "step"):
        rates.setdefault(line["step"], set()).add(line["lr"])
    assert all(len(found) == 1 for found in rates.values())
    assert max(rates, key=lambda step: max(rates[step])) == 4


def test_a_late_joiner_begins_from_the_anchor_without_inner_state(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, replicas=2, inner_steps=2, replica_schedule="doubling")
    run = tiny_run(config)
    joiner, moments, same = run.members[1].replica, [], []
    compute = joiner.compute_gradients

    def look(step: int) -> None:
        moments.append((step, len(joiner.inner_moments())))
        same.append(equal(parameters(run, 1), anchor_copy(run)))
        compute(step)

    joiner.compute_gradients = look  # type: ignore[method-assign]
    finish(run)
    assert moments[0] == (5, 0) and all(count for _, count in moments[1:])
    assert same[0]
    assert [line["contributors"] for line in metrics(config, "round")] == [1, 1, 2, 2]


def test_the_outer_cosine_lets_every_round_count(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, outer_lr_schedule="cosine", lr_schedule="constant", max_steps=6)
    train_tiny(config)
    first, last = metrics(config, "round")
    assert first["anchor_digest"] != last["anchor_digest"]


# ---------------------------------------------------------------------------------------------------------------------
# What is not a number


def test_a_step_whose_gradient_is_not_finite_is_left_out_and_named(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    run = tiny_run(config)

    def break_gradient() -> None:
        next(iter(run.members[1].replica.trainable().values())).grad = None
        param = next(iter(run.members[0].replica.trainable().values()))
        assert param.grad is not None
        param.grad.view(-1)[0] = math.inf

    at_step(run, 4, break_gradient)
    finish(run)
    (fault,) = metrics(config, "fault")
    assert (fault["replica"], fault["step"]) == (0, 4) and "left out" in fault["what"]
    (line,) = [line for line in metrics(config, "step") if (line["step"], line["replica"]) == (4, 0)]
    assert line["grad_norm"] is None and line["loss"] > 0
    assert [line["contributors"] for line in metrics(config, "round")] == [2, 2, 2]


def test_a_replica_that_is_not_finite_is_refused_named_and_healed(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, replicas=3)
    run = tiny_run(config)
    at_step(run, 2, lambda: spoil(run, 1))
    finish(run)
    assert [line["contributors"] for line in metrics(config, "round")] == [2, 3, 3]
    assert [line["refused"] for line in metrics(config, "round")] == [[1], [], []]
    refusals = [line for line in metrics(config, "fault") if "refused" in line["what"]]
    assert [(line["replica"], line["step"]) for line in refusals] == [(1, 3)]
    losses = [line["loss"] for line in metrics(config, "step") if line["replica"] == 1 and line["step"] > 3]
    assert len(losses) == 5 and all(losses)
    assert equal(parameters(run, 1), parameters(run, 0))


def test_a_refused_contribution_is_as_one_never_made(tmp_path: Path) -> None:
    """The round equals, bit for bit, one in which that replica was away."""
    broken = tiny_run(tiny_config(tmp_path, replicas=3, max_steps=3, output_dir=str(tmp_path / "broken")))
    at_step(broken, 3, lambda: spoil(broken, 2))
    away = tiny_run(tiny_config(tmp_path, replicas=3, max_steps=3, output_dir=str(tmp_path / "away")))
    launch = away.members[2].sync.launch
    away.members[2].sync.launch = lambda *given, **named: launch(*given, **{**named, "present": False})
    for run in (broken, away):
        finish(run)
    assert equal(anchor_copy(broken), anchor_copy(away))
    assert metrics(broken.config, "round")[0]["refused"] == [2]
    assert metrics(away.config, "round")[0]["refused"] == []


@pytest.mark.parametrize("replicas", [1, 2])
def test_where_all_are_refused_the_round_is_void_and_all_are_healed(replicas: int, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, replicas=replicas)
    run = tiny_run(config)
    start = anchor_copy(run)
    after_first: list[bool] = []

    def spoil_all() -> None:
        for index in range(replicas):
            spoil(run, index)

    def act(step: int) -> None:
        if step == 3:
            spoil_all()
        if step == 4:
            after_first.append(equal(anchor_copy(run), start))

    after_each_step(run, act)
    finish(run)
    assert after_first == [True]
    assert [line["contributors"] for line in metrics(config, "round")] == [0, replicas, replicas]
    assert [line["round"] for line in metrics(config, "round")] == [0, 1, 2]
    assert len([line for line in metrics(config, "fault") if "refused" in line["what"]]) == replicas
    assert all(line["loss"] for line in metrics(config, "step") if line["step"] > 3)


def test_an_inner_state_that_is_not_finite_is_healed_too(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    run = tiny_run(config)

    def spoil_moments() -> None:
        for moment in run.members[1].replica.inner_moments():
            moment.fill_(math.nan)

    at_step(run, 2, spoil_moments)
    finish(run)
    assert [line["refused"] for line in metrics(config, "round")] == [[1], [], []]


# ---------------------------------------------------------------------------------------------------------------------
# The experiments of the paper


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compressor": "bf16"},
        {"prune_fraction": 0.9},
        {"drop_merge": "all", "drop_probability": 0.01},
        {"adopt": "lerp", "alpha": 0.9},
        {"outer_optimizer": "adam"},
    ],
    ids=str,
)
def test_after_pretraining_all_replicas_are_the_pretrained_model(changes: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the outer loop does to later rounds."""
    config = tiny_config(tmp_path, replicas=3, pretrain_steps=4, inner_steps=2, **changes)
    run = tiny_run(config)
    pretrained: list[dict[str, Tensor]] = []
    begun: list[list[dict[str, Tensor]]] = []
    update = run.members[0].replica.update

    def update_and_keep(step: int) -> Any:
        report = update(step)
        if step == 4:
            pretrained.append(parameters(run, 0))
        return report

    run.members[0].replica.update = update_and_keep  # type: ignore[method-assign]
    at_step(run, 5, lambda: begun.append([parameters(run, index) for index in range(3)]))
    finish(run)
    for replica in begun[0]:
        assert equal(replica, begun[0][0])
        for name, tensor in replica.items():
            torch.testing.assert_close(tensor, pretrained[0][name], rtol=1e-6, atol=1e-7)


def test_pretraining_is_of_one_replica_and_followed_by_a_second_warm_up(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, pretrain_steps=4, inner_steps=2, warmup_steps=2, lr_schedule="constant", learning_rate=1e-3
    )
    train_tiny(config)
    steps = metrics(config, "step")
    assert [line["step"] for line in steps if line["replica"] == 1] == [5, 6, 7, 8]
    rates = [line["lr"] for line in steps if line["replica"] == 0]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 1e-3, 0.5e-3, 1e-3, 1e-3, 1e-3])
    assert [(line["round"], line["step"], line["contributors"]) for line in metrics(config, "round")] == [
        (0, 4, 1),
        (1, 6, 2),
        (2, 8, 2),
    ]


def test_token_weights_count_the_tokens_of_the_round_alone(tmp_path: Path) -> None:
    """After pretraining replica 0 has seen many more; in a round all see as many."""
    by_tokens = tiny_config(tmp_path, pretrain_steps=4, inner_steps=2, merge="tokens", output_dir=str(tmp_path / "a"))
    uniform = but(by_tokens, merge="uniform", output_dir=str(tmp_path / "b"))
    digests = []
    for config in (by_tokens, uniform):
        train_tiny(config)
        digests.append([line["anchor_digest"] for line in metrics(config, "round")])
    assert digests[0] == digests[1]


def test_dropped_replicas_go_on_from_their_own_parameters(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, replicas=4, drop_probability=0.5, inner_steps=2, max_steps=12, seed=3)
    run = train_tiny(config)
    contributors = [line["contributors"] for line in metrics(config, "round")]
    assert min(contributors) < 4 and len(contributors) == 6
    assert len({member.sync.digest() for member in run.members}) == 1


def test_inner_state_is_averaged_on_request(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, average_inner_state=True, replicas=3)
    run = train_tiny(config)
    moments = [member.replica.inner_moments() for member in run.members]
    assert moments[0]
    for others in moments[1:]:
        assert all(torch.equal(left, right) for left, right in zip(moments[0], others, strict=True))


def test_identical_shards_and_seeds_equal_one_replica(tmp_path: Path) -> None:
    """A mean of equal pseudo-gradients is each of them: two replicas that see the same batches are as one."""
    together = tiny_run(tiny_config(tmp_path))
    state = together.members[0].replica.stream.state_dict()
    assert state["position"] == 0
    together.members[1].replica.stream = type(together.members[0].replica.stream)(
        together.members[0].replica.stream._shard, identity=together.members[0].replica.stream._identity
    )
    finish(together)
    alone = tiny_run(tiny_config(tmp_path, replicas=1, output_dir=str(tmp_path / "alone")))
    alone.members[0].replica.stream = type(together.members[0].replica.stream)(
        together.members[0].replica.stream._shard, identity=together.members[0].replica.stream._identity
    )
    finish(alone)
    assert equal(anchor_copy(together), anchor_copy(alone))


def test_data_parallel_equals_one_replica_with_all_their_sequences(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, method="data-parallel", replicas=4, max_steps=5)
    four = tiny_run(config)
    batches: dict[int, list[Tensor]] = {}
    for member in four.members:
        draw = member.replica.stream.next_batch

        def keep(batch_size: int, index: int = member.index, draw: Any = draw) -> Tensor:
            batch = draw(batch_size)
            batches.setdefault(index, []).append(batch)
            return batch

        member.replica.stream.next_batch = keep  # type: ignore[method-assign]
    finish(four)
    one = tiny_run(
        but(config, method="diloco", replicas=1, batch_size=8, inner_steps=5, output_dir=str(tmp_path / "one"))
    )
    merged = iter([torch.cat(parts) for parts in zip(*batches.values(), strict=True)])
    one.members[0].replica.stream.next_batch = lambda batch_size: next(merged)  # type: ignore[method-assign]
    before_sync: list[dict[str, Tensor]] = []
    launch = one.launch

    def keep_and_launch(fragment: int, step: int) -> None:
        before_sync.append(parameters(one, 0))
        launch(fragment, step)

    one.launch = keep_and_launch  # type: ignore[method-assign]
    finish(one)
    for name, tensor in parameters(four, 0).items():
        torch.testing.assert_close(tensor, before_sync[0][name], rtol=1e-4, atol=1e-5)
    assert all(equal(parameters(four, 0), parameters(four, index)) for index in (1, 2, 3))
    norms = [line["grad_norm"] for line in metrics(config, "step") if line["replica"] == 0]
    expected = [line["grad_norm"] for line in metrics(one.config, "step")]
    assert norms == pytest.approx(expected, rel=1e-4)


def test_data_parallel_refuses_what_only_rounds_have() -> None:
    for changes in ({"pretrain_steps": 5}, {"drop_probability": 0.5}, {"replica_schedule": "ramp-up"}):
        with pytest.raises(ConfigError, match="has no rounds"):
            build_config({"method": "data-parallel", "max_steps": 20, "inner_steps": 5, **changes})


# ---------------------------------------------------------------------------------------------------------------------
# Where a run begins


def test_a_run_can_begin_from_a_checkpoint_of_another(tmp_path: Path) -> None:
    first = tiny_config(tmp_path, model={**LLAMA, "tie_embeddings": True})
    anchor = anchor_copy(train_tiny(first))
    second = but(first, seed=7, init_from=str(checkpoint(first, 8)), output_dir=str(tmp_path / "second"))
    run = tiny_run(second)
    assert all(equal(parameters(run, index), anchor) for index in (0, 1))
    assert equal(anchor_copy(run), anchor)
    assert run.step == 0
    finish(run)
    assert metrics(second, "step")[0]["loss"] < metrics(first, "step")[0]["loss"]


def test_a_model_that_does_not_know_the_tokens_is_refused(tmp_path: Path) -> None:
    first = tiny_config(tmp_path)
    train_tiny(first)
    folder = checkpoint(first, 8)
    settings = json.loads((folder / "config.json").read_text())
    assert settings["vocab_size"] >= 256
    long = but(first, sequence_length=64, init_from=str(folder), output_dir=str(tmp_path / "long"))
    with pytest.raises(ConfigError, match="at 16 positions"):
        tiny_run(long)


def test_a_model_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        tiny_run(tiny_config(tmp_path, init_from=str(tmp_path / "nowhere")))


def test_the_same_settings_give_the_same_files(tmp_path: Path) -> None:
    def run_in(name: str) -> TrainConfig:
        config = tiny_config(tmp_path, model=GPT2_WITH_DROPOUT, output_dir=str(tmp_path / name))
        train_tiny(config)
        return config

    assert contents(run_in("a"), 8) == contents(run_in("b"), 8)


def test_another_seed_gives_another_run(tmp_path: Path) -> None:
    digests = set()
    for seed in (1, 2):
        config = tiny_config(tmp_path, seed=seed, max_steps=3, output_dir=str(tmp_path / str(seed)))
        train_tiny(config)
        digests.add(metrics(config, "round")[0]["anchor_digest"])
    assert len(digests) == 2


def test_replicas_with_other_data_are_refused(tmp_path: Path) -> None:
    run = tiny_run(tiny_config(tmp_path, replicas=2))

    def exchange(payloads: Sequence[bytes]) -> list[bytes]:
        another_corpus = b"f" * len(payloads[1])
        return [payloads[0], payloads[1] if len(payloads[1]) == 16 else another_corpus]

    run.exchange = exchange  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"replicas found different data(.|\n)*same package versions"):
        run.check_same_start()
    run.close()
