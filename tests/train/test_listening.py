"""A replica that was not ready in time adopts a round that others made, and keeps its own progress for the next."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from atoll.algo.adopt import ADOPT_RULES
from atoll.algo.merge import Ballot
from atoll.algo.outer import SGD
from atoll.exchange import Traffic
from atoll.train.sync import Arrived, OuterSettings, ReplicaSync


class NoTransport:
    num_replicas = 1
    replica = 0


def made_by_others(sync: ReplicaSync, mean: Tensor, *, counts: bool = False) -> Arrived:
    """A round with this replica in the second place."""
    digest = bytes.fromhex(sync.digest())
    ballots = [Ballot(sync.round + 1, digest, weight) for weight in (1.0, float(counts))]
    return Arrived([b.pack() for b in ballots], [(mean.clone(), {})], Traffic(), 1, sync.digest(), "")


def replica(*, keep_contribution: bool, rule: str) -> tuple[Tensor, ReplicaSync]:
    params = torch.tensor([1.0, 2.0, 3.0])
    settings = OuterSettings(
        optimizer=SGD(), lr=lambda step: 1.0, adopt=ADOPT_RULES[rule](0.5, 0.5), keep_contribution=keep_contribution
    )
    return params, ReplicaSync({"w": params}, NoTransport(), settings)


@pytest.mark.parametrize(("keep_contribution", "rule"), [(False, "replace"), (True, "carry"), (True, "lerp")])
@pytest.mark.parametrize("taken", [False, True])
def test_what_a_listener_did_is_carried_onto_the_new_anchor_and_still_owed(
    keep_contribution: bool, rule: str, taken: bool
) -> None:
    params, sync = replica(keep_contribution=keep_contribution, rule=rule)
    done = torch.tensor([0.5, -0.25, 0.125])
    params += done
    if taken:
        sync.take(0, weight=1.0)
    for step in (1, 2):  # it may come too late twice
        sync.land(0, made_by_others(sync, torch.full((3,), 0.25)), step=step)
        anchor = sync.anchor()["w"]
        assert torch.equal(params, anchor + done)
        assert torch.equal(sync.progress()[0], -done)
    assert sync.take(0, weight=1.0).norm == pytest.approx(float(done.norm()))


def test_once_it_counts_nothing_is_owed_any_more() -> None:
    params, sync = replica(keep_contribution=False, rule="replace")
    params += 0.5
    sync.land(0, made_by_others(sync, torch.full((3,), 0.25)), step=1)
    sync.take(0, weight=1.0)
    sync.land(0, made_by_others(sync, torch.full((3,), -0.5), counts=True), step=2)
    assert torch.equal(params, sync.anchor()["w"])
    assert not sync.progress()[0].any()
