from __future__ import annotations

import pytest
import torch

from atoll.algo.adopt import ADOPT_RULES, Landing, carry, eager, lerp, replace


def landing(**changes: object) -> Landing:
    values = {
        "anchor": torch.tensor([10.0]),
        "params": torch.tensor([4.0]),
        "unsent": torch.tensor([3.0]),
        "flying": torch.tensor([5.0]),
        "num_contributors": 4,
        "gain": 1.5,
    }
    return Landing(**{**values, **changes})


@pytest.mark.parametrize(
    ("rule", "params"),
    [
        (replace(), 10.0),
        (lerp(0.0), 10.0),
        (lerp(0.25), 8.5),
        (lerp(1.0), 4.0),
        (carry(0.0), 10.0),
        (carry(0.5), 14.0),
        (carry(1.0), 18.0),
        (eager(), 13.0),
    ],
)
def test_parameters_become(rule: object, params: float) -> None:
    assert rule.adopt(landing()).tolist() == [params]


@pytest.mark.parametrize("name", ADOPT_RULES)
def test_with_nothing_new_every_rule_leaves_the_parameters_on_the_anchor(name: str) -> None:
    nothing = torch.zeros(1)
    agreed = landing(params=torch.tensor([10.0]), unsent=nothing, flying=nothing)
    assert ADOPT_RULES[name](0.5, 0.5).adopt(agreed).tolist() == [10.0]


def test_rules_take_their_own_knob() -> None:
    assert ADOPT_RULES["lerp"](0.25, 0.9).adopt(landing()).tolist() == [8.5]
    assert ADOPT_RULES["carry"](0.9, 0.5).adopt(landing()).tolist() == [14.0]
