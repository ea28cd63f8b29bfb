from __future__ import annotations

import copy
import io
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from integrations.threaded import run_together
from torch import Tensor, nn

import atoll
from atoll.algo.outer import OUTER_OPTIMIZERS, Nesterov
from atoll.comm.base import Transport
from atoll.comm.local import LocalGroup
from atoll.errors import CheckpointError, ConfigError
from atoll.integrations.outer_sync import OuterSync
from atoll.train.sync import OuterSettings, ReplicaSync

SEEDING = threading.Lock()  # replicas in threads share the default generator


def build_mlp(seed: int = 0) -> nn.Sequential:
    with SEEDING, torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def batches(replica: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(100 + replica)
    while True:
        yield torch.randn(4, 5, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, stream: Iterator[Tensor], steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(next(stream)).square().mean().backward()
        optimizer.step()


def moved_by(optimizer: torch.optim.Optimizer, gradient: float) -> None:
    """One step of which every parameter's gradient is `gradient`."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.full_like(param, gradient) if param.requires_grad else None
    optimizer.step()


def one_number() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1))})
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


# --- the algorithm


def test_two_replicas_that_move_by_minus_one_give_the_golden_anchors() -> None:
    def work(transport: Transport) -> list[float]:
        model, optimizer = one_number()
        with OuterSync(model, optimizer, inner_steps=2, transport=transport) as sync:
            anchors = []
            for _ in range(4):
                moved_by(optimizer, 0.25)
                moved_by(optimizer, 0.75)
                anchors.append(sync.anchor()["w"].item())
            return anchors

    for anchors in run_together(work, 2):
        assert anchors == pytest.approx([-1.33, -3.227, -5.6343, -8.50087], abs=1e-5)


@pytest.mark.parametrize("inner_steps", [1, 2, 5])
def test_every_round_has_exactly_h_steps_from_the_first(inner_steps: int) -> None:
    model, optimizer = one_number()
    seen = []
    with OuterSync(model, optimizer, inner_steps=inner_steps) as sync:
        for _ in range(3 * inner_steps):
            moved_by(optimizer, 1.0)
            seen.append((sync.round, sync.inner_step))
    assert seen == [(step // inner_steps, step % inner_steps) for step in range(1, 3 * inner_steps + 1)]


def test_replicas_hold_the_same_anchor_bit_for_bit_and_adopt_it() -> None:
    def work(transport: Transport) -> tuple[str, bool]:
        model = build_mlp()
        optimizer = adamw(model)
        with OuterSync(model, optimizer, inner_steps=3, transport=transport) as sync:
            train(model, optimizer, batches(transport.replica), 9)
            equal = all(torch.equal(sync.anchor()[name], param) for name, param in model.named_parameters())
            return sync.digest(), equal

    digests, adopted = zip(*run_together(work, 3), strict=True)
    assert len(set(digests)) == 1 and all(adopted)


def test_it_gives_the_anchors_of_replica_sync_over_the_local_group_bit_for_bit() -> None:
    def work(transport: Transport) -> dict[str, Tensor]:
        model = build_mlp()
        optimizer = adamw(model)
        with OuterSync(model, optimizer, inner_steps=4, transport=transport) as sync:
            train(model, optimizer, batches(transport.replica), 12)
            return {name: value.clone() for name, value in sync.anchor().items()}

    models = [build_mlp() for _ in range(3)]
    optimizers, streams = [adamw(model) for model in models], [batches(replica) for replica in range(3)]
    syncs = [
        ReplicaSync(dict(model.named_parameters()), transport, OuterSettings(Nesterov(0.9), lambda step: 0.7))
        for model, transport in zip(models, LocalGroup(3).endpoints(), strict=True)
    ]
    for _ in range(3):
        for model, optimizer, stream in zip(models, optimizers, streams, strict=True):
            train(model, optimizer, stream, 4)
        for sync in syncs:
            sync.launch(0)
        for sync in syncs:
            sync.apply(0, step=0)
    for anchor in run_together(work, 3):
        assert all(torch.equal(anchor[name], value) for name, value in syncs[0].anchor().items())


def test_one_replica_with_outer_sgd_is_lookahead() -> None:
    model, plain = build_mlp(), build_mlp()
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    start = [param.detach().clone() for param in plain.parameters()]
    train(plain, plain_optimizer, batches(0), 5)
    with OuterSync(model, optimizer, inner_steps=5, outer_optimizer="sgd", outer_lr=0.5):
        train(model, optimizer, batches(0), 5)
    for param, before, after in zip(model.parameters(), start, plain.parameters(), strict=True):
        torch.testing.assert_close(param, before + 0.5 * (after - before))


@pytest.mark.parametrize("name", OUTER_OPTIMIZERS)
def test_one_replica_with_every_outer_optimizer_follows_its_rule(name: str) -> None:
    model, optimizer = one_number()
    rule = OUTER_OPTIMIZERS[name](0.8, 0.1)
    anchor = torch.zeros(1)
    state = rule.init(anchor)
    with OuterSync(model, optimizer, inner_steps=1, outer_optimizer=name, outer_momentum=0.8) as sync:
        for count in range(1, 4):
            rule.step_(anchor, torch.full((1,), 0.5 * count), state, lr=0.7, count=count)
            moved_by(optimizer, 0.5 * count)
            torch.testing.assert_close(sync.anchor()["w"], anchor)


def test_every_step_synced_with_inner_sgd_and_unit_outer_step_is_synchronous_sgd() -> None:
    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def work(transport: Transport) -> nn.Module:
        model = build_mlp()
        optimizer = sgd(model)
        with OuterSync(model, optimizer, 1, outer_optimizer="sgd", outer_lr=1.0, transport=transport):
            train(model, optimizer, batches(transport.replica), 4)
        return model

    whole = build_mlp()
    optimizer, streams = sgd(whole), [batches(0), batches(1)]
    for _ in range(4):
        train(whole, optimizer, iter([torch.cat([next(stream) for stream in streams])]), 1)
    for model in run_together(work, 2):
        for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(param, expected)


def test_the_mean_is_weighted_and_a_weight_may_change_from_round_to_round() -> None:
    def work(transport: Transport) -> list[float]:
        model, optimizer = one_number()
        weights = iter([3.0 - 2.0 * transport.replica, float(transport.replica)])
        settings = {"outer_optimizer": "sgd", "outer_lr": 1.0, "transport": transport, "weight": lambda: next(weights)}
        anchors = []
        with OuterSync(model, optimizer, 1, **settings) as sync:
            for _ in range(2):
                moved_by(optimizer, 1.0 + transport.replica)
                anchors.append(sync.anchor()["w"].item())
        return anchors

    for anchors in run_together(work, 2):
        assert anchors == pytest.approx([-(3 * 1 + 1 * 2) / 4, -5 / 4 - 2])


def test_lerp_keeps_a_share_of_the_replicas_own_parameters() -> None:
    model, optimizer = one_number()
    with OuterSync(model, optimizer, 1, outer_optimizer="sgd", outer_lr=0.5, adopt="lerp", alpha=0.25) as sync:
        moved_by(optimizer, 1.0)
        assert sync.anchor()["w"].item() == -0.5
        assert model["w"].item() == pytest.approx(0.25 * -1.0 + 0.75 * -0.5)


@pytest.mark.parametrize(("compressor", "itemsize"), [("identity", 4), ("bf16", 2), ("fp16", 2)])
def test_the_bytes_sent_are_those_of_the_compressor(compressor: str, itemsize: int) -> None:
    def work(transport: Transport) -> int:
        model = build_mlp()
        optimizer = adamw(model)
        with OuterSync(model, optimizer, 1, compressor=compressor, transport=transport) as sync:
            train(model, optimizer, batches(transport.replica), 1)
            assert sync.last_report is not None
            return sync.last_report.payload_bytes

    numel = sum(param.numel() for param in build_mlp().parameters())
    assert run_together(work, 2) == [numel * itemsize] * 2


# --- the inner optimizer and the loop


def test_the_state_of_the_optimizer_is_untouched_by_a_round() -> None:
    model, plain = build_mlp(), build_mlp()
    optimizer, plain_optimizer = adamw(model), adamw(plain)
    train(plain, plain_optimizer, batches(0), 3)
    with OuterSync(model, optimizer, inner_steps=3) as sync:
        train(model, optimizer, batches(0), 3)
    assert sync.round == 1
    states = [list(opt.state_dict()["state"].values()) for opt in (optimizer, plain_optimizer)]
    for state, expected in zip(*states, strict=True):
        assert all(torch.equal(state[key], expected[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_a_step_with_a_closure_is_one_step() -> None:
    model = build_mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    batch, calls = next(batches(0)), 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    with OuterSync(model, optimizer, inner_steps=3) as sync:
        optimizer.step(closure)
        assert (sync.round, sync.inner_step) == (0, 1) and calls > 1


def test_a_step_that_the_grad_scaler_leaves_out_is_no_step() -> None:
    model, optimizer = one_number()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with OuterSync(model, optimizer, inner_steps=5) as sync:
        for factor in (1.0, float("inf")):
            optimizer.zero_grad()
            scaler.scale((model["w"] * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert sync.inner_step == 1


def test_hooks_are_gone_after_the_block_and_the_loop_goes_on_alone() -> None:
    model, optimizer = one_number()
    with OuterSync(model, optimizer, inner_steps=1) as sync:
        moved_by(optimizer, 1.0)
    moved_by(optimizer, 1.0)
    assert sync.round == 1 and model["w"].item() == pytest.approx(-2.33)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


# --- leaving


@pytest.mark.parametrize(("final_sync", "rounds"), [(True, 2), (False, 1)])
def test_leaving_syncs_a_partial_round_if_wanted(final_sync: bool, rounds: int) -> None:
    def work(transport: Transport) -> tuple[int, float]:
        model, optimizer = one_number()
        with OuterSync(model, optimizer, 3, final_sync=final_sync, transport=transport, outer_optimizer="sgd") as sync:
            for _ in range(5):
                moved_by(optimizer, 1.0 + transport.replica)
        sync.close()  # a second time: nothing
        return sync.round, model["w"].item()

    (rounds_0, first), (rounds_1, second) = run_together(work, 2)
    assert rounds_0 == rounds_1 == rounds
    assert (first == second) is final_sync


def test_nothing_is_sent_when_the_block_is_left_by_an_exception() -> None:
    model, optimizer = one_number()
    with pytest.raises(KeyError), OuterSync(model, optimizer, inner_steps=3) as sync:
        moved_by(optimizer, 1.0)
        raise KeyError
    assert (sync.round, model["w"].item()) == (0, -1.0)
    assert not optimizer._optimizer_step_post_hooks
    sync.close()
    assert sync.round == 0


@pytest.mark.parametrize("steps", [(6, 8), (8, 6), (7, 8), (0, 7), (3, 12), (0, 0)])
def test_replicas_with_uneven_data_stay_together_to_the_end(steps: tuple[int, int]) -> None:
    def work(transport: Transport) -> tuple[str, int, int, float]:
        model = build_mlp()
        optimizer = adamw(model)
        with OuterSync(model, optimizer, 3, transport=transport) as sync:
            train(model, optimizer, batches(transport.replica), steps[transport.replica])
        last, first = sync.last_report, next(model.parameters()).sum().item()
        return sync.digest(), sync.round, last.contributors if last else 0, first

    outcomes = run_together(work, 2)
    assert outcomes[0] == outcomes[1]
    most, least = max(steps), min(steps)
    assert outcomes[0][1] == -(-most // 3)
    assert outcomes[0][2] == (0 if most == 0 else 2 if -(-most // 3) == -(-least // 3) else 1)


def test_the_progress_of_a_replica_that_ended_early_still_counts() -> None:
    def work(transport: Transport) -> list[float]:
        model, optimizer = one_number()
        with OuterSync(model, optimizer, 3, outer_optimizer="sgd", outer_lr=1.0, transport=transport):
            for _ in range(4 if transport.replica == 0 else 6):
                moved_by(optimizer, 1.0)
        return model["w"].item()

    # round 1: both −3; round 2: the mean of −1 and −3
    assert run_together(work, 2) == [-5.0, -5.0]


# --- any module


class Zoo(nn.Module):
    """A parameter of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 5)
        self.head = nn.Linear(5, 6, bias=False)
        self.head.weight = self.embed.weight
        self.transposed = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.images = nn.Parameter(torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.bf16 = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.fp64 = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.full((4,), 0.1), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2))


def shaken(model: Zoo, replica: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + replica)
    for name, param in model.named_parameters():
        if param.requires_grad and name != "unused":
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def test_tensors_of_every_kind_become_the_mean_of_the_replicas() -> None:
    def trained(replica: int) -> Zoo:
        torch.manual_seed(0)
        model = Zoo()
        optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if n != "unused"], lr=0.5)
        shaken(model, replica, 1)
        optimizer.step()
        return model

    alone = [trained(replica) for replica in range(2)]
    torch.manual_seed(0)
    models = [Zoo(), Zoo()]
    models[1].load_state_dict(models[0].state_dict())

    def work(transport: Transport) -> list[str]:
        model = models[transport.replica]
        optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if n != "unused"], lr=0.5)
        with OuterSync(model, optimizer, 1, outer_optimizer="sgd", outer_lr=1.0, transport=transport) as sync:
            shaken(model, transport.replica, 1)
            optimizer.step()
            assert all(value.dtype == torch.float32 for value in sync.anchor().values())
            return list(sync.anchor())

    names = run_together(work, 2)[0]
    assert set(names) == {"embed.weight", "transposed", "images", "scalar", "empty", "bf16", "fp64", "unused"}
    assert len(names) == 8
    for model in models:
        assert model.head.weight is model.embed.weight
        assert not model.transposed.is_contiguous()
        assert model.images.is_contiguous(memory_format=torch.channels_last)
        for name, param in model.named_parameters():
            left, right = (dict(other.named_parameters())[name].detach() for other in alone)
            expected = ((left.double() + right.double()) / 2).to(param.dtype)
            torch.testing.assert_close(param.detach(), expected, msg=name)
        assert torch.equal(model.frozen, torch.full((4,), 0.1))
        assert torch.equal(model.unused, torch.ones(2))
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left, right)


def test_small_steps_of_a_bf16_parameter_add_up_in_the_fp32_anchor() -> None:
    model = nn.ParameterDict({"w": nn.Parameter(torch.ones(1, dtype=torch.bfloat16))})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with OuterSync(model, optimizer, 1, outer_optimizer="sgd", outer_lr=0.125) as sync:
        for _ in range(8):
            moved_by(optimizer, 2.0**-7)
    assert sync.anchor()["w"].item() == 1 - 2.0**-7
    assert model["w"].item() == 1 - 2.0**-7


def test_a_trainable_parameter_that_the_optimizer_does_not_hold_follows_the_others() -> None:
    def work(transport: Transport) -> float:
        model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(1)), "other": nn.Parameter(torch.zeros(1))})
        held = ["w", "other"] if transport.replica == 0 else ["w"]
        optimizer = torch.optim.SGD([model[name] for name in held], lr=1.0)
        with OuterSync(model, optimizer, 1, outer_optimizer="sgd", outer_lr=1.0, transport=transport):
            moved_by(optimizer, 1.0)
        return model["other"].item()

    assert run_together(work, 2) == [-0.5, -0.5]


# --- buffers


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


def run_with_buffers(policy: str, value_of: Callable[[int], float]) -> list[Buffers]:
    def work(transport: Transport) -> Buffers:
        model = Buffers()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with OuterSync(model, optimizer, 1, buffers=policy, transport=transport):
            value = value_of(transport.replica)
            model.norm.running_mean = torch.full((2,), value)  # another tensor in its place
            model.scratch.fill_(value)
            model.norm.num_batches_tracked.fill_(transport.replica)
            moved_by(optimizer, 1.0)
        return model

    return run_together(work, 2)


def test_buffers_are_averaged_but_for_integers_masks_and_unsaved_ones() -> None:
    for replica, model in enumerate(run_with_buffers("mean", lambda replica: 2.0 + 2.0 * replica)):
        assert model.norm.running_mean.tolist() == [3.0, 3.0]
        assert model.scratch.item() == 2.0 + 2.0 * replica
        assert model.norm.num_batches_tracked.item() == replica
        assert model.mask.tolist() == [0.0, float("-inf")]


def test_local_buffers_stay() -> None:
    models = run_with_buffers("local", lambda replica: 2.0 + 2.0 * replica)
    assert [model.norm.running_mean.tolist() for model in models] == [[2.0, 2.0], [4.0, 4.0]]


def test_the_nan_of_one_replicas_buffers_does_not_reach_the_others() -> None:
    models = run_with_buffers("mean", lambda replica: 2.0 if replica == 0 else float("nan"))
    assert [model.norm.running_mean.tolist() for model in models] == [[2.0, 2.0]] * 2


def test_the_nan_of_one_replicas_parameters_is_refused_and_said(caplog: pytest.LogCaptureFixture) -> None:
    def work(transport: Transport) -> tuple[float, list[int]]:
        model, optimizer = one_number()
        with OuterSync(model, optimizer, 1, outer_optimizer="sgd", outer_lr=1.0, transport=transport) as sync:
            moved_by(optimizer, float("nan") if transport.replica else 1.0)
            assert sync.last_report is not None
            return model["w"].item(), sync.last_report.refused

    with caplog.at_level(logging.WARNING, logger="atoll"):
        assert run_together(work, 2) == [(-1.0, [1])] * 2
    assert "replica 1 holds NaN or infinity" in caplog.text


# --- beginning alike


def start_apart(initial: str, change: Callable[[Zoo], None]) -> list[Zoo]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Zoo())
    change(models[1])

    def work(transport: Transport) -> Zoo:
        model = models[transport.replica]
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with OuterSync(model, optimizer, 2, initial=initial, transport=transport):
            shaken(model, 0, 1)
            optimizer.step()
        return model

    return run_together(work, 2)


@pytest.mark.parametrize("name", ["embed.weight", "transposed", "scalar", "bf16", "frozen"])
@torch.no_grad()
def test_replicas_that_start_apart_are_refused_naming_the_first_different_tensor(name: str) -> None:
    def change(model: Zoo) -> None:
        model.get_parameter(name).add_(0.25)
        model.frozen.add_(1.0)

    with pytest.raises(ConfigError, match=rf"parameter '{name}' differs between replicas") as caught:
        start_apart("check", change)
    assert "initial='broadcast'" in str(caught.value) and len(str(caught.value).splitlines()) <= 3


def test_broadcast_takes_everything_from_replica_0_bit_for_bit() -> None:
    def work(transport: Transport) -> tuple[nn.Module, nn.Module]:
        with SEEDING:
            torch.manual_seed(transport.replica)
            zoo = Zoo()
        zoo.register_buffer("big", torch.tensor([2**40 + 1 + transport.replica, -3]))
        zoo.register_buffer("flag", torch.tensor([transport.replica == 0]))
        zoo.register_buffer("nan", torch.tensor([float("nan"), 1.0]))
        zoo.frozen.data.add_(transport.replica)
        zoo.fp64.data.add_((1 + transport.replica) * 1e-12)
        before = copy.deepcopy(zoo)
        OuterSync(zoo, torch.optim.SGD(zoo.parameters()), initial="broadcast", transport=transport)
        return before, zoo

    with torch.random.fork_rng():
        (first, taken_0), (second, taken_1) = run_together(work, 2)
    assert not torch.equal(first.frozen, second.frozen)
    for taken in (taken_0, taken_1):
        for name, value in first.state_dict().items():
            assert torch.equal(taken.state_dict()[name].contiguous().reshape(-1).view(torch.uint8),
                               value.contiguous().reshape(-1).view(torch.uint8)), name  # fmt: skip
        assert not taken.transposed.is_contiguous()


def test_replicas_with_other_settings_or_another_model_are_refused_at_once() -> None:
    def with_other_steps(transport: Transport) -> None:
        model, optimizer = one_number()
        OuterSync(model, optimizer, inner_steps=5 + transport.replica, transport=transport)

    def with_another_model(transport: Transport) -> None:
        model = build_mlp() if transport.replica == 0 else nn.Sequential(*build_mlp(), nn.Linear(3, 1))
        OuterSync(model, adamw(model), transport=transport)

    with pytest.raises(ConfigError, match="replica 0 has inner_steps: 5, replica 1 has inner_steps: 6"):
        run_together(with_other_steps, 2)
    with pytest.raises(ConfigError, match=r"replica 0 has nothing more, replica 1 has parameter '3.weight'"):
        run_together(with_another_model, 2)


def test_weights_changed_behind_its_back_are_refused_at_the_first_step() -> None:
    model, optimizer = one_number()
    with pytest.raises(ConfigError, match="not those that OuterSync started from"), OuterSync(model, optimizer):
        model.load_state_dict({"w": torch.ones(1)})
        moved_by(optimizer, 1.0)


# --- going on


def saved(**states: Any) -> dict[str, Any]:
    """Through a file that holds plain values and tensors only."""
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def bits(model: nn.Module, optimizer: torch.optim.Optimizer, sync: OuterSync) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sync": sync.state_dict()})


def assert_same_bits(left: Any, right: Any) -> None:
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same_bits(left[key], right[key])
    elif isinstance(left, list):
        for one, other in zip(left, right, strict=True):
            assert_same_bits(one, other)
    else:
        assert left == right


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("stop", [3, 4, 5])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    num_replicas: int, stop: int, model_first: bool
) -> None:
    def uninterrupted(transport: Transport) -> tuple[dict[str, Any], dict[str, Any]]:
        model = build_mlp()
        optimizer, stream = adamw(model), batches(transport.replica)
        with OuterSync(model, optimizer, 3, transport=transport) as sync:
            train(model, optimizer, stream, stop)
            state = saved(model=model.state_dict(), optimizer=optimizer.state_dict(), sync=sync.state_dict())
            train(model, optimizer, stream, 8 - stop)
            end = bits(model, optimizer, sync)
        return state, end

    def resumed(transport: Transport) -> dict[str, Any]:
        state = states[transport.replica]
        model = build_mlp(seed=5)
        optimizer, stream = adamw(model), batches(transport.replica)
        for _ in range(stop):
            next(stream)
        if model_first:
            model.load_state_dict(state["model"])
        with OuterSync(model, optimizer, 3, transport=transport) as sync:
            sync.load_state_dict(state["sync"])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            assert (sync.round, sync.inner_step) == divmod(stop, 3)
            train(model, optimizer, stream, 8 - stop)
            end = bits(model, optimizer, sync)
        return end

    states, ends = zip(*run_together(uninterrupted, num_replicas), strict=True)
    for end, expected in zip(run_together(resumed, num_replicas), ends, strict=True):
        assert_same_bits(end, expected)


def test_the_saved_state_is_just_this() -> None:
    def shape_of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return f"{value.dtype} {list(value.shape)}"
        if isinstance(value, dict):
            return {key: shape_of(item) for key, item in value.items()}
        return [shape_of(item) for item in value] if isinstance(value, list) else type(value).__name__

    model = nn.Linear(2, 3)
    state = OuterSync(model, torch.optim.SGD(model.parameters(), lr=0.1)).state_dict()
    assert shape_of(state) == {
        "inner_step": "int",
        "num_steps": "int",
        "settings": {"outer_optimizer": "str", "compressor": "str"},
        "params_digest": "str",
        "anchor": {"weight": "torch.float32 [3, 2]", "bias": "torch.float32 [3]"},
        "outer": {"momentum.weight": "torch.float32 [3, 2]", "momentum.bias": "torch.float32 [3]"},
        "counts": ["int"],
        "fragments": [{"base": "NoneType", "codes": [{}], "flights": []}],
    }


def test_a_saved_state_does_not_move_with_the_run() -> None:
    model, optimizer = one_number()
    with OuterSync(model, optimizer, 1) as sync:
        state = sync.state_dict()
        moved_by(optimizer, 1.0)
    assert state["anchor"]["w"].item() == 0.0 and state["outer"]["momentum.w"].item() == 0.0


def test_a_state_that_does_not_fit_is_refused_and_nothing_is_taken_over() -> None:
    model, optimizer = one_number()
    sync = OuterSync(model, optimizer, inner_steps=3)
    for _ in range(2):
        moved_by(optimizer, 1.0)
    state = sync.state_dict()
    other = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match="parameter 'bias': the saved state has none"):
        OuterSync(other, torch.optim.SGD(other.parameters(), lr=1.0)).load_state_dict(state)
    with pytest.raises(CheckpointError, match="outer_optimizer='adam', but the state was saved with 'nesterov'"):
        OuterSync(model, optimizer, outer_optimizer="adam").load_state_dict(state)
    with pytest.raises(CheckpointError, match="inner_steps=2, but the state is 2 steps into a round"):
        OuterSync(model, optimizer, inner_steps=2).load_state_dict(state)
    with pytest.raises(CheckpointError, match="the saved state has no 'anchor'"):
        sync.load_state_dict({name: value for name, value in state.items() if name != "anchor"})
    assert (sync.round, sync.inner_step) == (0, 2)


def test_resuming_without_the_models_own_state_is_refused() -> None:
    model, optimizer = one_number()
    sync = OuterSync(model, optimizer, inner_steps=3)
    moved_by(optimizer, 1.0)
    state = sync.state_dict()
    fresh, fresh_optimizer = one_number()
    again = OuterSync(fresh, fresh_optimizer, inner_steps=3)
    again.load_state_dict(state)
    with pytest.raises(ConfigError, match="load the model's state of the same step"):
        moved_by(fresh_optimizer, 1.0)


def test_replicas_that_resume_from_different_steps_are_refused() -> None:
    model, optimizer = one_number()
    states = []
    with OuterSync(model, optimizer, 1) as sync:
        for _ in range(2):
            states.append(saved(model=model.state_dict(), sync=sync.state_dict()))
            moved_by(optimizer, 1.0)

    def work(transport: Transport) -> None:
        state = states[transport.replica]
        own, own_optimizer = one_number()
        own.load_state_dict(state["model"])
        with OuterSync(own, own_optimizer, 1, transport=transport) as again:
            again.load_state_dict(state["sync"])
            moved_by(own_optimizer, 1.0)

    with pytest.raises(
        ConfigError, match="round differs between replicas: replica 0 has round: 0, replica 1 has round: 1"
    ):
        run_together(work, 2)


# --- what cannot be used


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inner_steps": 0}, "inner_steps=0 is not a positive whole number"),
        ({"inner_steps": 2.5}, "inner_steps=2.5"),
        ({"inner_steps": True}, "inner_steps=True"),
        ({"outer_lr": -0.7}, "outer_lr=-0.7 is not a positive number"),
        ({"outer_lr": float("nan")}, "outer_lr=nan"),
        ({"outer_lr": float("inf")}, "outer_lr=inf"),
        ({"outer_momentum": 1.0}, r"outer_momentum=1.0 is not in \[0, 1\)"),
        ({"outer_epsilon": 0.0}, "outer_epsilon=0.0"),
        ({"alpha": 1.5}, r"alpha=1.5 is not in \[0, 1\]"),
        ({"outer_optimizer": "nestrov"}, "Did you mean 'nesterov'"),
        ({"compressor": "int3"}, "compressor='int3' is not known"),
        ({"adopt": "replac"}, "Did you mean 'replace'"),
        ({"buffers": "avg"}, "buffers='avg' is not known"),
        ({"initial": "brodcast"}, "Did you mean 'broadcast'"),
        ({"weight": -1.0}, "weight=-1.0 is not a finite number of 0 or more"),
        ({"weight": float("nan")}, "weight=nan"),
        ({"timeout_s": 0}, "timeout_s=0 is not a positive number of seconds"),
    ],
)
def test_settings_that_cannot_be_used_are_named(settings: dict[str, Any], message: str) -> None:
    model, optimizer = one_number()
    with pytest.raises(ConfigError, match=message) as caught:
        OuterSync(model, optimizer, **settings)
    assert len(str(caught.value).splitlines()) <= 3
    assert not optimizer._optimizer_step_post_hooks


def test_a_weight_that_a_function_gives_is_checked_at_its_round() -> None:
    model, optimizer = one_number()
    with pytest.raises(ConfigError, match="weight=-1"), OuterSync(model, optimizer, 1, weight=lambda: -1.0):
        moved_by(optimizer, 1.0)


def complex_numbers() -> nn.Module:
    return nn.ParameterDict({"w": nn.Parameter(torch.ones(1, dtype=torch.complex64))})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no trainable parameter"),
        (lambda: nn.ParameterDict({"w": nn.Parameter(torch.empty(0))}), "no trainable parameter"),
        (lambda: nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
        (complex_numbers, "'w' is complex"),
    ],
)
def test_modules_that_cannot_sync_are_refused(build: Callable[[], nn.Module], message: str) -> None:
    model = build()
    with pytest.raises(ConfigError, match=message):
        OuterSync(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_lazy_module_must_see_a_batch_first() -> None:
    model = nn.LazyLinear(3)
    with pytest.raises(ConfigError, match="'weight' has no shape yet"):
        OuterSync(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    backbone, head = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1)
    with pytest.raises(ConfigError, match=r"2 of the 4 parameters that optimizer trains .* are not in model"):
        OuterSync(backbone, optimizer)
    with pytest.raises(ConfigError, match="optimizer is a object, which has no step hooks"):
        OuterSync(backbone, object())  # type: ignore[arg-type]


def test_the_package_offers_it_by_name() -> None:
    assert atoll.OuterSync is OuterSync
    assert "OuterSync" in dir(atoll)
    with pytest.raises(AttributeError, match="no attribute 'InnerSync'"):
        _ = atoll.InnerSync
