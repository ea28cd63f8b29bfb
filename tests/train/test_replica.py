"""A replica trains alone: rate, gradients, clipping, what is left out, its own random numbers."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train.tiny import GPT2_WITH_DROPOUT, tiny_config

from atoll.data import load_data
from atoll.models import build_model
from atoll.train.config import TrainConfig
from atoll.train.replica import Replica

CPU = torch.device("cpu")
VOCAB = 300  # more than there are bytes


class FixedBatches:
    """The same batches again and again."""

    num_examples = 100

    def __init__(self, batches: list[Tensor]) -> None:
        self._batches = batches
        self._position = 0

    def next_batch(self, batch_size: int) -> Tensor:
        batch = self._batches[self._position % len(self._batches)]
        self._position += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position = state["position"]


def make_replica(config: TrainConfig, *, index: int = 0, batches: list[Tensor] | None = None) -> Replica:
    model = build_model(config.model, vocab_size=VOCAB, sequence_length=config.sequence_length, seed=config.seed)
    if batches is None:
        data = load_data(
            config.data, sequence_length=config.sequence_length, num_replicas=config.replicas, seed=config.seed
        )
        stream = data.stream(index)
    else:
        stream = FixedBatches(batches)
    return Replica(index, model=model, stream=stream, config=config, device=CPU)


def tokens(count: int, *, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (count, 16), generator=torch.Generator().manual_seed(seed))


def gradients(replica: Replica) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in replica.trainable().items() if param.grad is not None}


def parameters(replica: Replica) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in replica.trainable().items()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_inner_steps_equal_a_bare_loop_with_torch_adamw(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, max_grad_norm=0.5, gradient_accumulation_steps=2)
    batches = [tokens(2, seed=seed) for seed in range(6)]
    replica = make_replica(config, batches=batches)

    model = build_model(config.model, vocab_size=VOCAB, sequence_length=16, seed=config.seed)
    params = list(model.parameters())
    decayed = [param for param in params if param.dim() >= 2]
    others = [param for param in params if param.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in (1, 2, 3):
        replica.compute_gradients(step)
        report = replica.update(step)
        optimizer.zero_grad()
        for batch in batches[2 * step - 2 : 2 * step]:
            (model(input_ids=batch, labels=batch).loss / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5)
        for group in optimizer.param_groups:
            group["lr"] = report.lr
        optimizer.step()
        assert report.grad_norm == float(norm)
    assert equal(parameters(replica), {name: param.detach() for name, param in model.named_parameters()})


def test_accumulated_gradients_equal_those_of_one_large_batch(tmp_path: Path) -> None:
    sequences = tokens(4)
    parts = make_replica(tiny_config(tmp_path, gradient_accumulation_steps=2), batches=[sequences[:2], sequences[2:]])
    whole = make_replica(tiny_config(tmp_path), batches=[sequences])
    for replica in (parts, whole):
        replica.compute_gradients(1)
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(gradients(parts)[name], gradient)
    assert parts.update(1).loss == pytest.approx(whole.update(1).loss, rel=1e-6)
    assert parts.tokens == whole.tokens == sequences.numel()


def test_a_gradient_that_is_not_finite_is_left_out_and_said(tmp_path: Path) -> None:
    replica = make_replica(tiny_config(tmp_path), batches=[tokens(2)])
    replica.compute_gradients(1)
    replica.update(1)
    before, moments = parameters(replica), [moment.clone() for moment in replica.inner_moments()]
    replica.compute_gradients(2)
    next(iter(replica.trainable().values())).grad[0, 0] = math.nan
    report = replica.update(2)
    assert report.skipped and math.isnan(report.grad_norm)
    assert equal(parameters(replica), before)
    assert all(torch.equal(left, right) for left, right in zip(replica.inner_moments(), moments, strict=True))
    replica.compute_gradients(3)
    assert not replica.update(3).skipped


def test_clipping_can_be_turned_off(tmp_path: Path) -> None:
    clipped = make_replica(tiny_config(tmp_path, max_grad_norm=0.01), batches=[tokens(2)])
    free = make_replica(tiny_config(tmp_path, max_grad_norm=0.0), batches=[tokens(2)])
    for replica in (clipped, free):
        replica.compute_gradients(1)
    unclipped = gradients(free)
    assert clipped.update(1).grad_norm == free.update(1).grad_norm
    assert equal(gradients(free), unclipped)
    assert float(torch.cat([g.flatten() for g in gradients(clipped).values()]).norm()) == pytest.approx(0.01, rel=1e-4)


def test_every_parameter_is_given_the_rate_of_the_step(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, warmup_steps=4, max_steps=20, lr_schedule="constant", learning_rate=0.4)
    replica = make_replica(config, batches=[tokens(2)])
    for step, rate in ((1, 0.1), (2, 0.2), (4, 0.4), (9, 0.4)):
        replica.compute_gradients(step)
        assert replica.update(step).lr == pytest.approx(rate)
        assert {group["lr"] for group in replica.optimizer.param_groups} == {replica.lr(step)}


def test_vectors_are_not_decayed(tmp_path: Path) -> None:
    replica = make_replica(tiny_config(tmp_path, weight_decay=0.3), batches=[tokens(2)])
    decay = {id(p): group["weight_decay"] for group in replica.optimizer.param_groups for p in group["params"]}
    for name, param in replica.trainable().items():
        assert decay[id(param)] == (0.0 if param.dim() < 2 else 0.3), name


def test_tied_weights_are_trained_once(tmp_path: Path) -> None:
    replica = make_replica(tiny_config(tmp_path, model=GPT2_WITH_DROPOUT), batches=[tokens(2)])
    optimized = [id(param) for group in replica.optimizer.param_groups for param in group["params"]]
    assert len(optimized) == len(set(optimized)) == len(replica.trainable())
    assert "lm_head.weight" not in replica.trainable()


def test_dropout_does_not_depend_on_who_else_draws(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, model=GPT2_WITH_DROPOUT)
    alone, between = (make_replica(config, batches=[tokens(2)]) for _ in range(2))
    other = make_replica(config, index=1, batches=[tokens(2)])
    for step in (1, 2):
        alone.compute_gradients(step)
        torch.rand(step)
        other.compute_gradients(step)
        between.compute_gradients(step)
        assert equal(gradients(alone), gradients(between))
        assert not equal(gradients(alone), gradients(other))


def test_the_global_generator_is_left_as_it_was(tmp_path: Path) -> None:
    replica = make_replica(tiny_config(tmp_path, model=GPT2_WITH_DROPOUT), batches=[tokens(2)])
    before = torch.get_rng_state()
    replica.compute_gradients(1)
    replica.update(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_is_of_the_weights_given_and_leaves_the_replica_as_it_was(tmp_path: Path) -> None:
    replica = make_replica(tiny_config(tmp_path, model=GPT2_WITH_DROPOUT), batches=[tokens(2)])
    first = parameters(replica)
    held_out = tokens(5, seed=9)
    loss_of_first, count = replica.evaluate(held_out, first)
    for step in (1, 2, 3):
        replica.compute_gradients(step)
        replica.update(step)
    own, state = parameters(replica), replica.state_dict()["random_state"]["cpu"].clone()
    assert replica.evaluate(held_out, first) == (loss_of_first, count) == (loss_of_first, 5 * 15)
    assert replica.evaluate(held_out, own)[0] != loss_of_first
    assert equal(parameters(replica), own)
    assert torch.equal(replica.state_dict()["random_state"]["cpu"], state)
    assert replica.model.training


def test_evaluation_weighs_every_token_alike(tmp_path: Path) -> None:
    replica = make_replica(tiny_config(tmp_path), batches=[tokens(2)])
    held_out = tokens(37, seed=9)  # batches of 16, 16 and 5
    total, count = replica.evaluate(held_out, parameters(replica))
    with torch.no_grad():
        one_by_one = sum(float(replica.trainee.batch_loss(row[None])) * 15 for row in held_out)
    assert count == 37 * 15
    assert total == pytest.approx(one_by_one, rel=1e-5)


def test_no_sequences_have_no_loss(tmp_path: Path) -> None:
    replica = make_replica(tiny_config(tmp_path), batches=[tokens(2)])
    assert replica.evaluate(tokens(0), parameters(replica)) == (0.0, 0)


def test_a_state_goes_on_where_it_was_taken(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, model=GPT2_WITH_DROPOUT)
    first, second = make_replica(config), make_replica(config)
    for step in (1, 2):
        first.compute_gradients(step)
        first.update(step)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for replica in (first, second):
        replica.compute_gradients(3)
    assert equal(gradients(first), gradients(second))
    assert first.update(3).loss == second.update(3).loss
    assert equal(parameters(first), parameters(second))
    assert first.tokens == second.tokens


def test_starting_afresh_forgets_the_inner_state_and_keeps_the_weights(tmp_path: Path) -> None:
    replica = make_replica(tiny_config(tmp_path), batches=[tokens(2)])
    replica.compute_gradients(1)
    replica.update(1)
    before = parameters(replica)
    assert replica.inner_moments()
    replica.start_afresh()
    assert not replica.inner_moments()
    assert equal(parameters(replica), before)
