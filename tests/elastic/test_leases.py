"""The books of the samples: every sample is with one member at a time, and in one committed round at most."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.elastic.leases import Leases, Range, common, count, merged, without

ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6)


def samples(pairs: list[Range] | tuple[Range, ...]) -> set[int]:
    return {sample for start, stop in pairs for sample in range(start, stop)}


@given(ranges)
def test_merging_keeps_the_samples_and_leaves_gaps_between_the_ranges(pairs: list[Range]) -> None:
    result = merged(pairs)
    assert samples(result) == samples(pairs)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(result))
    assert count(result) == len(samples(pairs))


@given(ranges, ranges)
def test_without_and_common_are_difference_and_intersection(one: list[Range], other: list[Range]) -> None:
    assert samples(without(one, other)) == samples(one) - samples(other)
    assert samples(common(one, other)) == samples(one) & samples(other)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_no_sample_is_ever_with_two_members_nor_in_two_rounds(seed: int) -> None:
    draw, leases = random.Random(seed), Leases()
    owner: dict[int, str] = {}
    committed: set[int] = set()
    for _ in range(60):
        member = draw.choice("abcde")
        act = draw.choice(["grant", "grant", "commit", "release", "reclaim", "reload"])
        if act == "grant":
            given = samples(leases.grant(member, draw.randint(1, 9)))
            assert not given & set(owner), "leased to another"
            assert not given & committed, "committed already"
            owner |= dict.fromkeys(given, member)
        elif act == "commit":
            used = [pair for pair in leases.held(member) if draw.random() < 0.6]
            leases.commit(member, used)
            committed |= samples(used)
            owner = {sample: who for sample, who in owner.items() if sample not in samples(used)}
        elif act == "release":
            leases.release(member)
            owner = {sample: who for sample, who in owner.items() if who != member}
        elif act == "reclaim":
            kept = samples(leases.reclaim(member, [(draw.randint(0, 30), draw.randint(30, 60))]))
            owner = {sample: who for sample, who in owner.items() if who != member}
            assert not kept & (set(owner) | committed)
            owner |= dict.fromkeys(kept, member)
        else:
            leases = Leases(json.loads(json.dumps(leases.snapshot())))
        totals = leases.totals()
        assert totals["committed"] == len(committed)
        assert totals["leased"] == len(owner)
        assert sum(totals[place] for place in ("committed", "leased", "returned", "skipped")) == totals["position"]


def test_what_came_back_is_given_out_before_anything_new_lowest_first() -> None:
    leases = Leases()
    leases.grant("a", 4)
    leases.grant("b", 4)
    leases.grant("c", 4)
    leases.release("c")
    leases.release("a")
    assert leases.grant("d", 6) == ((0, 4), (8, 10))
    assert leases.grant("d", 4) == ((10, 14),)


def test_a_member_commits_only_what_is_leased_to_it() -> None:
    leases = Leases()
    leases.grant("a", 4)
    leases.grant("b", 4)
    with pytest.raises(ValueError, match=r"\(4, 5\).*not leased to a"):
        leases.commit("a", [(3, 5)])
    assert not leases.holds("a", [(2, 2)])
    assert not leases.holds("a", [(3, 1)])
    assert leases.held("a") == ((0, 4),)


def test_a_member_that_was_away_keeps_what_nobody_else_got() -> None:
    leases = Leases()
    leases.grant("a", 10)
    leases.commit("a", [(0, 2)])
    leases.release("a")
    assert leases.grant("b", 3) == ((2, 5),)
    assert leases.reclaim("a", [(0, 10)]) == ((5, 10),)
    assert leases.held("b") == ((2, 5),)


def test_what_a_member_does_not_claim_comes_back() -> None:
    leases = Leases()
    leases.grant("a", 10)
    assert leases.reclaim("a", [(0, 4)]) == ((0, 4),)
    assert leases.grant("b", 6) == ((4, 10),)


def test_what_lost_books_gave_out_is_skipped_and_counted_unless_its_holder_claims_it() -> None:
    leases = Leases()
    leases.presume(100)
    leases.presume(50)
    assert leases.reclaim("a", [(90, 95), (100, 120)]) == ((90, 95),)
    assert leases.grant("b", 1) == ((100, 101),)
    assert leases.totals() == {"position": 101, "committed": 0, "leased": 6, "returned": 0, "skipped": 95}


def test_a_lease_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="samples=0"):
        Leases().grant("a", 0)


def test_the_books_stay_small_however_long_the_run() -> None:
    leases, draw = Leases(), random.Random(0)
    for _ in range(3000):
        member = draw.choice("abcd")
        leases.grant(member, draw.randint(1, 50))
        if draw.random() < 0.9:
            leases.commit(member, leases.held(member))
        elif draw.random() < 0.3:
            leases.release(member)
    assert len(json.dumps(leases.snapshot())) < 2000
