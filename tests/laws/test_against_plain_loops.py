"""The outer loop against loops written out by hand, as the papers state them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from laws.driver import Fleet, pull_move, settings_for
from torch import Tensor

from atoll.algo.adopt import carry, eager, lerp, replace
from atoll.algo.outer import SGD, Nesterov
from atoll.algo.schedule import Schedule

START = torch.tensor([4.0, -1.0, 0.5])


def start() -> dict[str, Tensor]:
    return {"x": START.clone()}


def inner_loop(replica: int, params: Tensor, steps: int) -> Tensor:
    """What `pull_move` does to one tensor in `steps` steps."""
    for _ in range(steps):
        params = params + 0.2 * (1.0 + replica - params)
    return params


class PlainNesterov:
    """v ← μv + Δ ; θ ← θ − η(Δ + μv)."""

    def __init__(self, lr: float, momentum: float) -> None:
        self.lr, self.momentum, self.velocity = lr, momentum, torch.zeros(3)

    def __call__(self, anchor: Tensor, delta: Tensor) -> Tensor:
        self.velocity = self.momentum * self.velocity + delta
        return anchor - self.lr * (delta + self.momentum * self.velocity)


def close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=2e-6)


def assert_follows(fleet: Fleet, step: int, anchor: Tensor, params: list[Tensor]) -> None:
    fleet.run(step - fleet.step)
    close(fleet.anchor()["x"], anchor)
    for member, expected in zip(fleet.members, params, strict=True):
        close(member.params["x"], expected)


# --- DiLoCo (2311.08105, Algorithm 1)


def test_diloco_is_algorithm_1() -> None:
    schedule = Schedule(3)
    settings = settings_for(schedule, optimizer=Nesterov(0.9), lr=lambda step: 0.7)
    fleet = Fleet(3, settings, schedule, move=pull_move, start=start)
    outer = PlainNesterov(0.7, 0.9)
    anchor = START
    for round in range(1, 6):
        trained = [inner_loop(replica, anchor, 3) for replica in range(3)]
        anchor = outer(anchor, sum(anchor - params for params in trained) / 3)
        assert_follows(fleet, 3 * round, anchor, [anchor] * 3)


# --- one-round delay (ALGORITHMS of DiLoCoX): δ is taken before θ moves, then Δ of the round before lands


def delayed_rounds(
    adopt: Callable[[Tensor, Tensor], Tensor], outer: Callable[[Tensor, Tensor], Tensor], *, blocking_first: bool
) -> list[tuple[Tensor, list[Tensor]]]:
    """(θ, parameters of both) after every round of 4 steps. adopt: from θ and this round's own d = start − φ."""
    anchor, starts, pending = START, [START, START], None
    after = []
    for round in range(1, 7):
        trained = [inner_loop(replica, params, 4) for replica, params in enumerate(starts)]
        own = [begun - params for begun, params in zip(starts, trained, strict=True)]
        mean = sum(own) / 2
        if round == 1 and blocking_first:
            anchor = outer(anchor, mean)
            starts, mean = [anchor, anchor], None
        elif pending is None:
            starts = trained
        else:
            anchor = outer(anchor, pending)
            starts = [adopt(anchor, d) for d in own]
        if mean is not None:
            pending = mean
        after.append((anchor, starts))
    return after


OUTER = {"sgd": (SGD(), 0.5, 0.5), "nesterov": (Nesterov(0.4), 0.6, 0.6 * 1.4)}


def plain_outer(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return (lambda anchor, delta: anchor - 0.5 * delta) if name == "sgd" else PlainNesterov(0.6, 0.4)


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("blocking_first", [True, False])
@pytest.mark.parametrize("share", [None, 0.0, 0.3, 1.0])
def test_one_round_delay_with_reset_or_carry(outer: str, blocking_first: bool, share: float | None) -> None:
    """share None: the rule `replace`, which is carry with a share of 0 to the letter."""
    optimizer, lr, _ = OUTER[outer]
    schedule = Schedule(4, delay=4, blocking_first=blocking_first)
    rule = replace() if share is None else carry(share)
    settings = settings_for(schedule, optimizer=optimizer, lr=lambda step: lr, adopt=rule)
    fleet = Fleet(2, settings, schedule, move=pull_move, start=start)
    expected = delayed_rounds(
        lambda anchor, d: anchor - (share or 0.0) * d, plain_outer(outer), blocking_first=blocking_first
    )
    for round, (anchor, params) in enumerate(expected, start=1):
        assert_follows(fleet, 4 * round, anchor, params)


def test_eager_is_the_paper_s_loop_in_which_every_replica_steps_its_own_anchor() -> None:
    """θᵢ ← Outer(θᵢ, Δ̄ₜ₋₁ + (Δᵢ,ₜ − Δᵢ,ₜ₋₁)/M) with SGD (2502.12996)."""
    schedule = Schedule(4, delay=4, blocking_first=True)
    settings = settings_for(schedule, optimizer=SGD(), lr=lambda step: 0.5, adopt=eager())
    fleet = Fleet(2, settings, schedule, move=pull_move, start=start)
    thetas = starts = [START, START]
    old = [torch.zeros(3)] * 2
    for round in range(1, 7):
        trained = [inner_loop(replica, params, 4) for replica, params in enumerate(starts)]
        deltas = [begun - params for begun, params in zip(starts, trained, strict=True)]
        if round == 1:  # blocks: Δ̄ lands at once, nothing is old or under way
            thetas = starts = [theta - 0.5 * sum(deltas) / 2 for theta in thetas]
        else:
            ahead = [(new - gone) / 2 for new, gone in zip(deltas, old, strict=True)]
            thetas = [theta - 0.5 * (sum(old) / 2 + own) for theta, own in zip(thetas, ahead, strict=True)]
            starts = trained if round == 2 else thetas  # no round lands at the end of the second, so all go on
            old = deltas
        fleet.run(4)
        for member, params in zip(fleet.members, starts, strict=True):
            close(member.params["x"], params)


def test_eager_moves_ahead_by_its_own_part_of_a_nesterov_step() -> None:
    optimizer, lr, gain = OUTER["nesterov"]
    schedule = Schedule(4, delay=4, blocking_first=True)
    settings = settings_for(schedule, optimizer=optimizer, lr=lambda step: lr, adopt=eager())
    fleet = Fleet(2, settings, schedule, move=pull_move, start=start)
    expected = delayed_rounds(lambda a, d: a - gain / 2 * d, plain_outer("nesterov"), blocking_first=True)
    for round, (anchor, params) in enumerate(expected, start=1):
        assert_follows(fleet, 4 * round, anchor, params)


def test_the_classic_mistake_of_launching_what_is_in_flight_would_show() -> None:
    """One replica, unit step: the anchor ends where the launched progress adds up to, no further."""
    schedule = Schedule(4, delay=4)
    for rule in (replace(), lerp(0.0), carry(0.0)):
        settings = settings_for(schedule, optimizer=SGD(), lr=lambda step: 1.0, adopt=rule)
        fleet = Fleet(1, settings, schedule, move=pull_move, start=start).run(8)
        close(fleet.anchor()["x"], inner_loop(0, START, 4))
        close(fleet.finish().anchor()["x"], inner_loop(0, START, 8))


# --- Streaming DiLoCo (2501.18512): fragment p at t: Δ = θ_p − θ_{i,p}; at t+τ: θ̃_p, then θ_{i,p} ← αθ_{i,p} + (1−α)θ̃_p


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("inner_steps", "delay"), [(4, 0), (4, 1), (6, 5)])
def test_streaming_is_the_paper_s_loop(inner_steps: int, delay: int, alpha: float) -> None:
    schedule = Schedule(inner_steps, num_fragments=2, delay=delay)
    settings = settings_for(schedule, optimizer=Nesterov(0.9), lr=lambda step: 0.4, adopt=lerp(alpha))
    names = ["a", "b"]
    fleet = Fleet(
        2,
        settings,
        schedule,
        move=pull_move,
        start=lambda: {name: START.clone() + i for i, name in enumerate(names)},
        fragments=[["a"], ["b"]],
    )
    thetas = [START, START + 1]
    locals_ = [[START, START + 1] for _ in range(2)]
    outers = [PlainNesterov(0.4, 0.9) for _ in names]
    flying: dict[tuple[int, int], Tensor] = {}
    for step in range(1, 4 * inner_steps + 1):
        locals_ = [[inner_loop(i, params, 1) for params in own] for i, own in enumerate(locals_)]
        for p in range(2):
            if step >= (p + 1) * inner_steps // 2 and (step - (p + 1) * inner_steps // 2) % inner_steps == 0:
                flying[p, step] = sum(thetas[p] - own[p] for own in locals_) / 2
        for p in range(2):
            if (p, step - delay) in flying:
                thetas[p] = outers[p](thetas[p], flying[p, step - delay])
                for own in locals_:
                    own[p] = alpha * own[p] + (1 - alpha) * thetas[p]
        fleet.run(1)
        for p, name in enumerate(names):
            close(fleet.anchor()[name], thetas[p])
            for member, own in zip(fleet.members, locals_, strict=True):
                close(member.params[name], own[p])
    assert len(flying) == 8


# --- special cases of §1


def test_outer_sgd_with_rate_1_is_fedavg() -> None:
    schedule = Schedule(5)
    settings = settings_for(schedule, optimizer=SGD(), lr=lambda step: 1.0)
    fleet = Fleet(3, settings, schedule, move=pull_move, start=start)
    average = START
    for round in range(1, 4):
        average = sum(inner_loop(replica, average, 5) for replica in range(3)) / 3
        assert_follows(fleet, 5 * round, average, [average] * 3)


def test_one_replica_with_outer_sgd_is_lookahead() -> None:
    """θ0 + a(θ_H − θ0)."""
    schedule = Schedule(5)
    settings = settings_for(schedule, optimizer=SGD(), lr=lambda step: 0.5)
    fleet = Fleet(1, settings, schedule, move=pull_move, start=start)
    slow = START
    for round in range(1, 4):
        slow = slow + 0.5 * (inner_loop(0, slow, 5) - slow)
        assert_follows(fleet, 5 * round, slow, [slow])


def test_one_replica_with_nesterov_is_snoo() -> None:
    """torch's own Nesterov on the pseudo-gradient of a single model."""
    schedule = Schedule(5)
    fleet = Fleet(1, settings_for(schedule), schedule, move=pull_move, start=start)
    slow = torch.nn.Parameter(START.clone())
    optimizer = torch.optim.SGD([slow], lr=0.7, momentum=0.9, nesterov=True)
    for round in range(1, 6):
        slow.grad = slow.detach() - inner_loop(0, slow.detach(), 5)
        optimizer.step()
        assert_follows(fleet, 5 * round, slow.detach(), [slow.detach()])


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_identical_replicas_are_one_replica_bit_for_bit(num_replicas: int) -> None:
    """Sums of M equal numbers are exact for M a power of two."""
    schedule = Schedule(3)

    def alike(replica: int, step: int, params: dict[str, Tensor]) -> None:
        pull_move(0, step, params)

    many = Fleet(num_replicas, settings_for(schedule), schedule, move=alike, start=start).run(12)
    one = Fleet(1, settings_for(schedule), schedule, move=alike, start=start).run(12)
    assert torch.equal(many.anchor()["x"], one.anchor()["x"])
    assert many.members[0].sync.digest() == one.members[0].sync.digest()
