from __future__ import annotations

import pytest
import torch

from atoll.algo.outer import OUTER_OPTIMIZERS, SGD, Adam, Momentum, Nesterov, OuterOptimizer, cosine_lr

LR = 0.7
# ours, and torch's from a list of parameters
PAIRS = {
    "nesterov": (Nesterov(0.9), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, nesterov=True)),
    "momentum": (Momentum(0.9), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)),
    "sgd": (SGD(), lambda p: torch.optim.SGD(p, lr=LR)),
    "adam": (Adam(0.9, 0.95, 0.1), lambda p: torch.optim.Adam(p, lr=LR, betas=(0.9, 0.95), eps=0.1, foreach=False)),
}


def deltas(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(37, generator=generator) * 10.0 ** (step % 5 - 4) for step in range(steps)]


def test_every_outer_optimizer_is_compared_with_torch() -> None:
    assert set(PAIRS) == set(OUTER_OPTIMIZERS)


@pytest.mark.parametrize("name", PAIRS)
def test_steps_are_those_of_torch_bit_for_bit(name: str) -> None:
    ours, make_theirs = PAIRS[name]
    anchor = torch.linspace(-1, 1, 37)
    param = torch.nn.Parameter(anchor.clone())
    theirs = make_theirs([param])
    state = ours.init(anchor)
    for count, delta in enumerate(deltas(60), start=1):
        param.grad = delta.clone()
        theirs.step()
        ours.step_(anchor, delta.clone(), state, lr=LR, count=count)
        assert torch.equal(anchor, param.detach()), f"step {count}"


@pytest.mark.parametrize("name", PAIRS)
def test_steps_over_slices_are_steps_over_the_whole(name: str) -> None:
    optimizer: OuterOptimizer = PAIRS[name][0]
    whole, parts = torch.zeros(37), torch.zeros(37)
    whole_state, parts_state = optimizer.init(whole), optimizer.init(parts)
    for count, delta in enumerate(deltas(20), start=1):
        optimizer.step_(whole, delta.clone(), whole_state, lr=LR, count=count)
        for start, stop in ((0, 1), (1, 16), (16, 37)):
            span = {key: value[start:stop] for key, value in parts_state.items()}
            optimizer.step_(parts[start:stop], delta[start:stop].clone(), span, lr=LR, count=count)
    assert torch.equal(whole, parts) and whole.abs().min() > 0


@pytest.mark.parametrize("name", ["nesterov", "momentum", "sgd"])
def test_gain_is_how_far_the_anchor_moves_for_a_unit_more_of_delta(name: str) -> None:
    optimizer: OuterOptimizer = PAIRS[name][0]
    anchors = []
    for last in (1.0, 2.0):
        anchor = torch.zeros(1, dtype=torch.float64)
        state = optimizer.init(anchor)
        for count, delta in enumerate((0.5, -1.0, last), start=1):
            optimizer.step_(anchor, torch.tensor([delta], dtype=torch.float64), state, lr=LR, count=count)
        anchors.append(anchor.item())
    assert anchors[0] - anchors[1] == pytest.approx(optimizer.gain(LR))


@pytest.mark.parametrize("name", PAIRS)
def test_outer_state_is_fp32_and_starts_at_zero(name: str) -> None:
    state = PAIRS[name][0].init(torch.ones(5))
    assert all(value.dtype == torch.float32 and value.shape == (5,) and not value.any() for value in state.values())


@pytest.mark.parametrize(("step", "rate"), [(0, 0.7), (25, 0.597487), (50, 0.35), (100, 0.0), (140, 0.0)])
def test_cosine_rate_falls_from_full_to_nothing_and_stays_there(step: int, rate: float) -> None:
    assert cosine_lr(0.7, step=step, total_steps=100) == pytest.approx(rate, abs=1e-6)
