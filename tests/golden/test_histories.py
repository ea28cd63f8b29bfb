"""Anchors round by round, small enough to follow on paper (histories.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from laws.driver import Fleet, settings_for

from atoll.algo.outer import OUTER_OPTIMIZERS, Nesterov
from atoll.algo.schedule import Schedule

HISTORIES = json.loads((Path(__file__).parent / "histories.json").read_text())


@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
def test_anchors_follow_the_history(history: dict[str, Any]) -> None:
    schedule = Schedule(2)  # a round of two steps of half the move

    def move(replica: int, step: int, params: dict[str, torch.Tensor]) -> None:
        params["x"] += history["moves"][replica] / 2

    optimizer = OUTER_OPTIMIZERS[history["optimizer"]](history["momentum"], 0.1)
    settings = settings_for(schedule, optimizer=optimizer, lr=lambda step: history["lr"])
    fleet = Fleet(len(history["moves"]), settings, schedule, move=move, start=lambda: {"x": torch.zeros(1)})
    seen = [fleet.run(2).anchor()["x"].item() for _ in history["anchor"]]
    assert seen == pytest.approx(history["anchor"], abs=1e-5)


def test_the_factors_of_a_constant_pseudo_gradient_rise_to_7() -> None:
    anchor, optimizer = torch.zeros(1, dtype=torch.float64), Nesterov()
    state = optimizer.init(anchor)
    factors = []
    for count in range(1, 301):
        before = anchor.item()
        optimizer.step_(anchor, torch.ones(1, dtype=torch.float64), state, lr=0.7, count=count)
        factors.append(before - anchor.item())
    assert factors[:3] == pytest.approx([1.33, 1.897, 2.4073])
    assert factors[-1] == pytest.approx(7.0)


def test_an_fp32_anchor_sees_small_steps_that_bf16_loses() -> None:
    """Fifty rounds of 1e-4 on parameters at 1.0: the anchor ends at 0.9706."""
    schedule = Schedule(1)

    def move(replica: int, step: int, params: dict[str, torch.Tensor]) -> None:
        params["x"] -= 1e-4

    fleet = Fleet(2, settings_for(schedule), schedule, move=move, start=lambda: {"x": torch.ones(4)}).run(50)
    assert fleet.anchor()["x"].dtype == torch.float32
    assert fleet.anchor()["x"][0].item() == pytest.approx(0.9706, abs=5e-5)

    anchor = torch.ones(4, dtype=torch.bfloat16)
    state = Nesterov().init(anchor)
    for count in range(1, 51):
        Nesterov().step_(anchor, torch.full_like(anchor, 1e-4), state, lr=0.7, count=count)
    assert anchor[0].item() == 1.0
