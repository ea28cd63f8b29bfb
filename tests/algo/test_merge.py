from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.algo.merge import WEIGHTS, Ballot, geometry, received_share, refused, weigh
from atoll.errors import DesyncError

DIGEST = b"0123456789abcdef"


def ballots(*changes: dict[str, object]) -> list[bytes]:
    return [Ballot(**{"round": 3, "digest": DIGEST, "weight": 1.0, **change}).pack() for change in changes]


@given(st.integers(1, 2**60), st.binary(min_size=16, max_size=16), st.floats(0, 1e300), st.booleans(), st.booleans())
def test_a_ballot_survives_the_wire(round: int, digest: bytes, weight: float, finite: bool, present: bool) -> None:
    ballot = Ballot(round, digest, weight, finite, present)
    assert Ballot.unpack(ballot.pack()) == ballot and len(ballot.pack()) == 34


def test_absent_and_refused_replicas_weigh_nothing() -> None:
    seen = ballots(
        {"weight": 2.0}, {"present": False}, {"finite": False}, {"weight": 0.0}, {"finite": False, "present": False}
    )
    assert weigh(seen) == [2.0, 0.0, 0.0, 0.0, 0.0]
    assert refused(seen) == [2], "an absent replica offered nothing that could be refused"


def test_the_received_share_counts_the_absent() -> None:
    assert received_share(ballots({"weight": 3.0}, {"weight": 1.0, "present": False})) == 0.75


@pytest.mark.parametrize(
    ("change", "word"),
    [({"round": 4}, "round by replica: 0: 3, 1: 4"), ({"digest": b"f" * 16}, "digest by replica: 0: 30313233")],
)
def test_replicas_that_start_from_other_anchors_are_told_so(change: dict[str, object], word: str) -> None:
    with pytest.raises(DesyncError) as caught:
        weigh(ballots({}, change))
    message = str(caught.value)
    assert word in message and "resume all from one checkpoint" in message and len(message.splitlines()) <= 3


def test_even_an_absent_replica_must_share_the_anchor() -> None:
    with pytest.raises(DesyncError):
        weigh(ballots({}, {"digest": b"f" * 16, "present": False}))


@pytest.mark.parametrize(("rule", "weight"), [("uniform", 1.0), ("examples", 30.0), ("tokens", 4096.0)])
def test_weights_by_merge_rule(rule: str, weight: float) -> None:
    assert WEIGHTS[rule](30, 4096) == weight


def test_geometry_is_that_of_the_vectors() -> None:
    vectors = torch.tensor([[3.0, 0.0], [0.0, 4.0], [3.0, 4.0]], dtype=torch.float64)
    seen = geometry(vectors @ vectors.T, [1.0, 1.0, 2.0])
    assert seen.norms == [3.0, 4.0, 5.0]
    assert seen.cosines[0] == pytest.approx([1.0, 0.0, 0.6]) and seen.cosines[1][2] == pytest.approx(0.8)
    assert seen.cosine_mean == pytest.approx((0.0 + 0.6 + 0.8) / 3)
    mean = (vectors[0] + vectors[1] + 2 * vectors[2]) / 4
    assert seen.delta_norm == pytest.approx(mean.norm().item())


def test_who_did_not_count_spoils_no_cosine() -> None:
    gram = torch.tensor([[1.0, math.nan, 0.5], [math.nan, math.nan, math.nan], [0.5, math.nan, 1.0]])
    seen = geometry(gram, [1.0, 0.0, 1.0])
    assert (
        seen.cosine_mean == 0.5
        and seen.cosines[1] == [None, None, None]
        and seen.delta_norm == pytest.approx(0.75**0.5)
    )


def test_a_round_without_contributors_or_movement_has_no_cosine() -> None:
    for gram, weights in ((torch.ones(2, 2), [0.0, 0.0]), (torch.zeros(2, 2), [1.0, 1.0])):
        seen = geometry(gram, weights)
        assert seen.cosine_mean is None and seen.delta_norm == 0.0


def test_the_norm_of_the_mean_of_independent_contributions_falls_as_one_over_root_m() -> None:
    for num_replicas in (4, 16):
        gram = torch.eye(num_replicas, dtype=torch.float64)
        assert geometry(gram, [1.0] * num_replicas).delta_norm == pytest.approx(num_replicas**-0.5)
