"""The coordinator's state machine, rule by rule: what happens, and what is never allowed to."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from atoll.elastic.membership import Effect, Membership, Record, Rules, Send
from atoll.elastic.messages import (
    Beat,
    Failed,
    Finish,
    Go,
    Have,
    Hello,
    Lease,
    Leave,
    Meet,
    Reached,
    Ready,
    Want,
    Welcome,
)

RULES = Rules(num_rounds=50, settings_digest="s" * 32, version="1.2.3", replicas=3)


class Run:
    """A coordinator and those who talk to it: what each was sent, and all that was recorded."""

    def __init__(self, membership: Membership | None = None, **rules: Any) -> None:
        self.membership = membership or Membership(replace(RULES, **rules), boot="b1", secret=b"secret")
        self.now = 0.0
        self.sent: list[tuple[str, Any]] = []
        self.records: list[Record] = []
        self.closed: list[str] = []
        self.effects: list[Effect] = []

    def take(self, effects: list[Effect]) -> list[Effect]:
        self.effects = effects
        for effect in effects:
            if isinstance(effect, Send):
                self.sent.append((effect.to, effect.message))
            elif isinstance(effect, Record):
                self.records.append(effect)
            else:
                self.closed.append(effect.member)
        return effects

    def connect(self, member: str, round: int = 0, digest: str = "d0", **hello: Any) -> None:
        fields = {"founder": round == 0, "settings_digest": RULES.settings_digest, "version": "1.2.9"} | hello
        message = Hello(
            member, name=f"island-{member}", address=f"10.0.0.{member}", port=7, pid=1, num_workers=1,
            round=round, digest=digest, **fields,
        )  # fmt: skip
        self.take(self.membership.connect(member, message, self.now))

    def say(self, member: str, message: Any) -> None:
        self.take(self.membership.receive(member, message, self.now))

    def disconnect(self, member: str) -> None:
        self.take(self.membership.disconnect(member, self.now))

    def wait(self, seconds: float, *, beats: str = "") -> None:
        """Time passes; the members named in `beats` say that they are alive."""
        end = self.now + seconds
        while self.now < end:
            due = self.membership.next_deadline()
            self.now = min([end, self.now + 0.25, *([due] if due is not None and due > self.now else [])])
            for member in beats:
                self.say(member, Beat())
            self.take(self.membership.tick(self.now))

    def ready(self, member: str, **fields: Any) -> None:
        status = self.membership.status(self.now)
        values = {"round": status["round"] + 1, "base": status["digest"], "weight": 100.0, "norm": 1.0} | fields
        self.say(member, Ready(finite=values.pop("finite", True), steps=10, **values))

    def reached(self, *members: str, digest: str = "", **fields: Any) -> None:
        go = self.last("Go", members[0])
        for member in members:
            self.say(member, Reached(go.round, go.attempt, digest or f"d{go.round}", **fields))

    def round(self, *members: str) -> None:
        for member in members:
            self.ready(member)
        self.reached(*members)

    def heard(self, kind: str, member: str = "") -> list[Any]:
        return [m for to, m in self.sent if type(m).__name__ == kind and member in ("", to)]

    def last(self, kind: str, member: str = "") -> Any:
        messages = self.heard(kind, member)
        assert messages, f"{member or 'nobody'} was sent no {kind}"
        return messages[-1]

    def recorded(self, kind: str, **payload: Any) -> list[dict[str, Any]]:
        return [r.payload for r in self.records if r.kind == kind and payload.items() <= r.payload.items()]

    def state(self, member: str) -> str:
        status = self.membership.status(self.now)
        return next(m["state"] for m in status["members"] if m["member"] == member)

    def restarted(self, *, with_log: bool = True, **rules: Any) -> Run:
        """Another coordinator, from what this one recorded."""
        new = replace(self.membership.rules, **rules)
        if with_log:
            state = json.loads(json.dumps(self.recorded("state")[-1]))
            membership = Membership.restore(new, boot="b2", state=state, secret=b"secret")
        else:
            membership = Membership(new, boot="b2", secret=b"secret")
        run = Run(membership)
        run.now = self.now + 1.0
        return run


def three(**rules: Any) -> Run:
    run = Run(**rules)
    for member in "123":
        run.connect(member)
    return run


def weights(go: Go) -> dict[str, float]:
    return {participant.member: participant.weight for participant in go.participants}


# --- the start


def test_the_start_waits_for_the_islands_that_are_expected() -> None:
    run = Run()
    run.connect("1")
    assert run.last("Welcome") == Welcome("b1", 0, 0, "d0", True, 50, 0.5, settled=False)
    run.connect("2")
    run.ready("1")
    assert not run.recorded("founded")
    run.connect("3")
    assert run.recorded("founded", round=0, digest="d0")
    assert all(run.last("Welcome", member).settled for member in "123")


def test_the_start_does_not_wait_for_ever() -> None:
    run = Run(deadline_s=10.0)
    run.connect("1")
    run.wait(9.9, beats="1")
    assert not run.recorded("founded")
    run.wait(0.2, beats="1")
    assert run.recorded("founded")
    assert run.membership.status(run.now)["waiting_for"] == ["island-1"]


def test_the_first_founder_says_what_round_0_is_and_others_take_it_over() -> None:
    run = Run()
    run.connect("1", digest="mine")
    run.connect("2", digest="other")
    run.connect("3", digest="other")
    assert run.last("Welcome", "1").current
    assert not run.last("Welcome", "2").current
    assert run.last("Donor", "2").member == run.last("Donor", "3").member == "1"


def test_a_fresh_process_founds_nothing() -> None:
    run = Run(replicas=1, deadline_s=1.0)
    run.connect("1", round=-1, digest="")
    run.wait(20.0, beats="1")
    assert not run.recorded("founded")
    run.ready("1")
    assert not run.heard("Go")


def test_another_version_or_other_settings_are_refused_with_cause_and_way_out() -> None:
    run = three()
    run.connect("4", version="1.3.0")
    assert run.last("Refused", "4").exit_code == 3
    assert "atoll==1.2.3" in run.last("Refused", "4").why
    run.connect("5", settings_digest="x" * 32)
    assert "the run's own settings" in run.last("Refused", "5").why
    assert run.closed == ["4", "5"]
    assert len(run.recorded("member", what="refused")) == 2
    assert len(run.membership.status(0.0)["members"]) == 3


def test_seats_are_the_lowest_free_the_wished_for_and_kept() -> None:
    run = Run()
    run.connect("a")
    run.connect("b", seat=5)
    run.connect("c", seat=5)
    assert [run.last("Welcome", member).seat for member in "abc"] == [0, 5, 1]
    run.disconnect("b")
    run.connect("b", seat=0)
    assert run.last("Welcome", "b").seat == 5


def test_a_restarted_island_takes_the_seat_of_its_dead_process_at_once() -> None:
    run = three()
    run.disconnect("2")
    run.connect("4", round=0, seat=1)
    assert run.last("Welcome", "4").seat == 1
    assert run.state("2") == "lost"


# --- closing a round


def test_when_all_are_ready_the_averaging_begins_at_once_in_the_order_of_seats() -> None:
    run = three()
    for member, tokens in (("3", 30.0), ("1", 10.0), ("2", 20.0)):
        assert not run.heard("Go")
        run.ready(member, weight=tokens)
    go = run.last("Go", "1")
    assert [(p.member, p.seat, p.weight) for p in go.participants] == [("1", 0, 10.0), ("2", 1, 20.0), ("3", 2, 30.0)]
    assert run.last("Go", "2") == run.last("Go", "3") == go


def test_after_quorum_the_rest_has_a_share_of_the_median_round_and_listens_then() -> None:
    run = three()
    run.wait(10.0, beats="123")
    run.ready("1")
    run.wait(5.0, beats="123")
    assert not run.heard("Go"), "one of three is no quorum"
    run.ready("2")
    run.wait(0.15 * 15.0 - 0.1, beats="123")
    assert not run.heard("Go")
    run.wait(0.2, beats="123")
    assert weights(run.last("Go", "3")) == {"1": 100.0, "2": 100.0, "3": 0.0}


def test_grace_is_never_longer_than_the_deadline() -> None:
    run = three(deadline_s=2.0)
    run.wait(1000.0, beats="123")
    run.ready("1")
    run.ready("2")
    run.wait(2.1, beats="123")
    assert run.heard("Go")


def test_who_was_not_heard_lately_is_left_out() -> None:
    run = three()
    run.wait(2.0, beats="12")
    run.ready("1")
    run.ready("2")
    run.wait(1.0, beats="12")
    assert weights(run.last("Go", "1")) == {"1": 100.0, "2": 100.0}
    run.reached("1", "2")
    assert run.state("3") == "syncing"
    assert [r["member"] for r in run.recorded("member", what="carried")] == ["3"]


def test_a_round_without_a_contributor_is_not_closed() -> None:
    run = three()
    run.wait(100.0, beats="123")
    for member in "123":
        run.ready(member, weight=0.0)
    run.wait(100.0, beats="123")
    assert not run.heard("Go")


def test_the_rendezvous_is_told_to_the_others() -> None:
    run = three()
    for member in "123":
        run.ready(member)
    run.say("2", Meet(1, "10.0.0.2", 1))
    assert not run.heard("Meet"), "only the first participant holds it"
    run.say("1", Meet(1, "10.0.0.1", 99))
    assert run.heard("Meet", "2") == run.heard("Meet", "3") == [Meet(1, "10.0.0.1", 99)]
    assert not run.heard("Meet", "1")


# --- committing


def test_what_is_committed_is_recorded_before_anyone_is_told() -> None:
    run = three()
    run.round("1", "2", "3")
    kinds = [type(effect).__name__ for effect in run.effects]
    assert kinds == sorted(kinds), "records stand before sends"
    assert [r.kind for r in run.effects if isinstance(r, Record)] == ["state", "committed"]
    assert run.effects[0].payload["committed"]["round"] == 1
    assert run.heard("Commit") == [run.last("Commit")] * 3
    assert run.last("Commit").weights == {0: 100.0, 1: 100.0, 2: 100.0}


def test_nothing_is_committed_before_all_who_are_there_have_reached_it() -> None:
    run = three()
    for member in "123":
        run.ready(member)
    run.reached("1", "2")
    assert not run.heard("Commit")
    run.reached("3")
    assert run.heard("Commit")


def test_the_divisor_is_the_contributors() -> None:
    run = three()
    run.ready("1", weight=10.0)
    run.ready("2", weight=30.0)
    run.wait(35.0, beats="123")
    run.reached("1", "2", "3")
    assert run.last("Commit").weights == {0: 10.0, 1: 30.0}
    assert run.recorded("committed")[0]["listeners"] == [2]
    assert run.membership.status(run.now)["breadth"] == pytest.approx(2 / 3)


def test_a_participant_that_dies_when_the_others_have_its_work_is_in_the_mean() -> None:
    run = three()
    for member in "123":
        run.ready(member)
    run.say("1", Meet(1, "10.0.0.1", 99))
    run.disconnect("3")
    run.reached("1", "2")
    assert run.last("Commit", "1").weights == {0: 100.0, 1: 100.0, 2: 100.0}
    assert not run.heard("Commit", "3")
    run.connect("3")
    assert run.last("Welcome", "3").contributed == 1
    assert run.last("Commit", "3") == run.last("Commit", "1"), "it may have the result, and is told that it counts"
    run.say("3", Have(1, "d1"))
    assert run.state("3") == "training"


def test_survivors_that_do_not_finish_are_not_waited_for_long() -> None:
    run = three()
    for member in "123":
        run.ready(member, sync_s=2.0)
    run.say("1", Meet(1, "10.0.0.1", 99))
    run.disconnect("3")
    run.wait(5.9, beats="12")
    assert not run.heard("Void")
    run.wait(0.3, beats="12")
    assert run.last("Void", "1").attempt == 1
    assert weights(run.last("Go", "1")) == {"1": 100.0, "2": 100.0}


def test_without_the_holder_of_the_rendezvous_there_is_nothing_to_wait_for() -> None:
    run = three()
    for member in "123":
        run.ready(member)
    run.disconnect("1")
    assert weights(run.last("Go", "2")) == {"2": 100.0, "3": 100.0}


def test_the_first_failure_voids_the_attempt_and_the_rest_tries_again() -> None:
    run = three()
    for member in "123":
        run.ready(member)
    run.disconnect("3")
    run.say("1", Failed(1, 1, "connection reset"))
    assert run.heard("Void", "2") and run.recorded("void", attempt=1)
    assert run.last("Go", "2").attempt == 2
    assert weights(run.last("Go", "2")) == {"1": 100.0, "2": 100.0}


def test_a_void_attempt_changes_nothing() -> None:
    run = three()
    run.round("1", "2", "3")
    for member in "123":
        run.say(member, Want(10))
        run.ready(member, used=(run.last("Lease", member).ranges))
    before = run.membership.snapshot()
    run.say("1", Failed(2, 2, "reset"))
    run.wait(0.2, beats="123")
    after = run.membership.snapshot()
    assert after.pop("attempt") == before.pop("attempt") + 1
    assert after == before
    assert weights(run.last("Go", "1")) == dict.fromkeys("123", 100.0)


def test_a_lone_commit_is_an_alarm() -> None:
    run = three(quorum=0.3)
    run.ready("1")
    run.wait(40.0, beats="123")
    run.reached("1", "2", "3")
    assert run.last("Commit").lone
    assert run.membership.status(run.now)["alarms"][0]["what"] == "lone commit"


def test_a_run_of_one_island_is_no_alarm() -> None:
    run = Run(replicas=1)
    run.connect("1")
    run.round("1")
    assert not run.last("Commit").lone
    assert not run.membership.status(0.0)["alarms"]


def test_the_run_ends_for_all_after_its_last_round_also_for_those_who_come_later() -> None:
    run = three(num_rounds=1)
    run.round("1", "2", "3")
    assert [to for to, message in run.sent if isinstance(message, Finish)] == ["1", "2", "3"]
    assert run.membership.next_deadline() is None
    run.connect("4", round=-1, digest="")
    assert run.last("Finish", "4") == Finish(1)
    assert run.last("Donor", "4").round == 1
    again = run.restarted()
    again.connect("1", round=0)
    assert isinstance(again.sent[-1][1], Finish)
    assert again.last("Commit", "1").round == 1


# --- contributions that are not let in

BAD: dict[str, tuple[dict[str, Any], str, bool]] = {
    "not finite": ({"finite": False}, "not finite", True),
    "norm is nan": ({"norm": float("nan")}, "norm nan", True),
    "norm is infinite": ({"norm": float("inf")}, "norm inf", True),
    "norm is absurd": ({"norm": 1e30}, "norm 1e+30", True),
    "norm is negative": ({"norm": -1.0}, "norm -1", True),
    "no weight": ({"weight": 0.0}, "weight 0.0 is not positive", False),
    "negative weight": ({"weight": -5.0}, "weight -5.0", False),
    "infinite weight": ({"weight": float("inf")}, "weight inf", False),
    "weight is nan": ({"weight": float("nan")}, "weight nan", False),
    "another round": ({"round": 7}, "round 7 is not the next, which is 1", False),
    "samples of others": ({"used": ((0, 10),)}, "not leased to it", True),
    "samples of nobody": ({"used": ((5, 5),)}, "not leased to it", True),
}


@pytest.mark.parametrize(("fields", "why", "drop"), BAD.values(), ids=BAD)
def test_a_bad_contribution_is_refused_by_name_and_its_member_listens(
    fields: dict[str, Any], why: str, drop: bool
) -> None:
    run = three()
    run.say("1", Want(100))
    run.ready("3", **fields)
    rejected = run.last("Rejected", "3")
    assert why in rejected.why
    assert (rejected.drop, rejected.benched) == (drop, False)
    assert run.recorded("fault", what="refused", replica=2)
    run.ready("1")
    run.ready("2")
    run.wait(31.0, beats="123")
    assert weights(run.last("Go", "3"))["3"] == 0.0


def test_a_refused_member_may_bring_a_better_one() -> None:
    run = three()
    run.ready("3", finite=False)
    run.ready("3")
    run.ready("1")
    run.ready("2")
    assert weights(run.last("Go", "3"))["3"] == 100.0


def test_what_was_refused_is_not_let_in_because_it_is_said_again() -> None:
    run = three()
    for member in "123":
        run.ready(member)
    run.say("1", Meet(1, "10.0.0.1", 99))
    run.disconnect("2")
    run.connect("2")
    run.reached("1", "2", "3", norms=(1.0, float("inf"), 1.0))
    run.ready("2")  # it crossed the Rejected on its way
    assert weights(run.last("Go", "2")) == {"1": 100.0, "2": 0.0, "3": 100.0}
    run.say("1", Failed(1, 2, "reset"))
    run.wait(0.3, beats="123")
    assert weights(run.last("Go", "2"))["2"] == 0.0


def test_three_strikes_bench_a_member_and_its_samples_come_back() -> None:
    run = three()
    run.say("3", Want(10))
    for _ in range(3):
        run.ready("3", finite=False, norm=1.0 + len(run.sent))
    assert [rejected.benched for rejected in run.heard("Rejected", "3")] == [False, False, True]
    assert run.state("3") == "benched"
    run.ready("3")
    assert run.last("Rejected", "3").benched
    assert run.membership.status(0.0)["leases"]["returned"] == 10
    run.ready("1")
    run.ready("2")
    assert weights(run.last("Go", "3"))["3"] == 0.0, "it is not waited for, and may listen"


def test_a_second_contribution_of_one_member_to_one_round_is_refused() -> None:
    run = three()
    run.ready("1")
    run.ready("1")
    assert not run.heard("Rejected"), "the same one, said again"
    run.ready("1", weight=7.0)
    assert "in already" in run.last("Rejected", "1").why
    run.ready("2")
    run.ready("3")
    assert weights(run.last("Go", "1"))["1"] == 100.0


def test_a_norm_far_above_the_running_median_is_refused_once_enough_are_known() -> None:
    run = three()
    run.ready("1", norm=50.0)
    run.ready("2")
    run.ready("3")
    run.reached("1", "2", "3")
    assert not run.heard("Rejected")
    run.ready("1", norm=10.1)
    assert "10.1 is not within [0, 10]" in run.last("Rejected", "1").why


def test_a_contribution_that_arrives_broken_voids_the_attempt_and_the_next_is_without_it() -> None:
    run = three()
    for member in "123":
        run.ready(member)
    run.reached("1", "2", "3", norms=(1.0, float("inf"), 1.0))
    assert run.last("Void", "1").attempt == 1
    assert run.last("Rejected", "2").drop
    assert weights(run.last("Go", "1")) == {"1": 100.0, "2": 0.0, "3": 100.0}
    run.reached("1", "2", "3", norms=(1.0, 0.0, 1.0))
    assert run.last("Commit").refused == (1,)
    assert run.last("Commit").weights == {0: 100.0, 2: 100.0}


def test_one_member_cannot_have_another_refused() -> None:
    run = three()
    for member in "123":
        run.ready(member)
    run.reached("1", "2", norms=(1.0, 1.0, 1.0))
    run.reached("3", norms=(float("nan"), 1.0, 1.0))
    assert run.last("Commit").weights == {0: 100.0, 1: 100.0, 2: 100.0}
    run.ready("1", norm=2.0)
    assert not run.heard("Rejected"), "its false report is not in the median either"


def test_a_late_contribution_is_not_a_strike() -> None:
    run = three()
    run.round("1", "2", "3")
    run.say("1", Ready(1, "d0", 100.0, 1.0, True, 10))
    assert "committed already" in run.last("Rejected", "1").why
    assert not run.recorded("fault")


# --- members that hold something else


def test_a_flipped_bit_is_found_at_the_next_contribution_and_healed() -> None:
    run = three()
    run.ready("2", base="flipped")
    assert run.recorded("fault", what="desync", replica=1)
    assert run.last("Donor", "2").member in ("1", "3")
    assert run.state("2") == "syncing"
    run.say("2", Have(0, "d0"))
    run.ready("2")
    assert run.state("2") == "ready"


def test_a_minority_that_reached_another_anchor_takes_the_state_anew() -> None:
    run = three()
    for member in "123":
        run.ready(member)
    run.reached("1", "3")
    run.reached("2", digest="else")
    assert run.last("Void", "1") and run.last("Donor", "2").member == "1"
    assert weights(run.last("Go", "1")) == {"1": 100.0, "3": 100.0}
    assert run.recorded("fault", what="desync", replica=1)


def test_who_averaged_from_another_base_is_the_deviant_even_of_two() -> None:
    run = Run(replicas=2)
    run.connect("1")
    run.connect("2")
    run.ready("1")
    run.ready("2")
    run.reached("1", base="d0")
    run.reached("2", base="flipped", digest="else")
    assert run.state("2") == "syncing"
    assert weights(run.last("Go", "1")) == {"1": 100.0}


def test_a_tie_is_tried_once_more_and_then_one_side_makes_the_round() -> None:
    run = Run(replicas=2)
    run.connect("1")
    run.connect("2")
    for attempt in (1, 2):
        run.ready("1")
        run.ready("2")
        assert run.last("Go").attempt == attempt
        run.reached("1")
        run.reached("2", digest="else")
        assert run.last("Void").attempt == attempt
    assert len(run.heard("Rejected", "1")) == 1, "after the first tie both look at their anchors again"
    assert weights(run.last("Go", "1")) == {"1": 100.0}
    assert run.last("Go", "2").attempt == 2
    assert run.membership.status(0.0)["alarms"][0]["what"] == "tie"


def test_a_member_that_moves_on_with_an_older_state_is_told_so_by_its_hello() -> None:
    run = three()
    run.round("1", "2", "3")
    run.disconnect("3")
    run.round("1", "2")
    run.connect("3", round=1, digest="d1")
    assert not run.last("Welcome", "3").current
    assert run.last("Donor", "3").round == 2
    assert run.recorded("member", what="carried", member="3")


# --- joining


def test_a_joiner_is_given_a_donor_that_knows_of_it_first() -> None:
    run = three()
    run.connect("4", round=-1, digest="")
    kinds = [(to, type(message).__name__) for to, message in run.sent[-2:]]
    assert kinds == [("1", "Serve"), ("4", "Donor")]
    serve, donor = run.last("Serve"), run.last("Donor")
    assert serve.ticket == donor.ticket and serve.member == "4" and len(donor.ticket) == 32
    run.say("4", Have(0, "d0"))
    assert run.state("4") == "training"
    assert run.recorded("synced", member="4", transfers=1)


def test_tickets_cannot_be_guessed_without_the_secret_and_are_never_the_same() -> None:
    tickets = set()
    for secret in (b"one", b"two"):
        run = Run(Membership(RULES, boot="b1", secret=secret))
        for member in "123":
            run.connect(member)
        run.connect("4", round=-1, digest="")
        run.connect("5", round=-1, digest="")
        tickets |= {donor.ticket for donor in run.heard("Donor")}
    assert len(tickets) == 4


def test_transfers_are_spread_and_only_holders_of_the_state_are_donors() -> None:
    run = three()
    for member in "4567":
        run.connect(member, round=-1, digest="")
    donors = [donor.member for donor in run.heard("Donor")]
    assert sorted(donors[:3]) == ["1", "2", "3"]
    assert set(donors) <= set("123")


def test_another_donor_is_named_when_the_first_one_dies() -> None:
    run = three()
    run.connect("4", round=-1, digest="")
    assert run.last("Donor", "4").member == "1"
    run.disconnect("1")
    assert run.last("Donor", "4").member == "2"


def test_a_donor_that_could_not_be_used_is_not_named_again_while_there_are_others() -> None:
    run = three()
    run.connect("4", round=-1, digest="")
    for _ in range(2):
        run.say("4", Have(-1, ""))
        run.wait(1.0, beats="1234")
    assert [donor.member for donor in run.heard("Donor", "4")] == ["1", "2", "3"]


def test_a_transfer_that_the_run_overtakes_is_followed_by_another() -> None:
    run = three()
    run.connect("4", round=-1, digest="")
    run.round("1", "2", "3")
    run.say("4", Have(0, "d0"))
    assert run.last("Donor", "4").round == 1
    run.say("4", Have(1, "d1"))
    assert run.recorded("synced", member="4", round=1, transfers=2)


def test_a_round_waits_once_for_a_joiner_that_it_would_overtake_for_ever() -> None:
    run = three()
    run.connect("4", round=-1, digest="")
    for _ in range(2):
        run.round("1", "2", "3")
        run.say("4", Have(run.membership.status(0.0)["round"] - 1, "old"))
    for member in "123":
        run.ready(member)
    assert len(run.heard("Go", "1")) == 2
    run.wait(29.0, beats="1234")
    run.say("4", Have(2, "d2"))
    assert weights(run.last("Go", "4")) == {"1": 100.0, "2": 100.0, "3": 100.0, "4": 0.0}


def test_a_joiner_contributes_only_what_it_did_itself() -> None:
    run = three()
    run.say("1", Want(10))
    used = run.last("Lease", "1").ranges
    run.connect("4", round=-1, digest="")
    run.say("4", Have(0, "d0"))
    run.ready("4", used=used)
    assert "not leased to it" in run.last("Rejected", "4").why


# --- going and coming back


def test_a_member_that_leaves_is_gone_at_once_and_its_samples_are_free() -> None:
    run = three()
    run.say("3", Want(10))
    run.say("3", Leave("SIGTERM"))
    assert run.recorded("member", what="left", why="SIGTERM")
    run.say("1", Want(4))
    assert run.last("Lease", "1").ranges == ((0, 4),)
    run.ready("1")
    run.ready("2")
    assert run.heard("Go")


def test_a_silent_member_is_evicted_and_its_connection_closed() -> None:
    run = three()
    run.wait(4.9, beats="12")
    assert run.state("3") == "training"
    run.wait(0.2, beats="12")
    assert run.state("3") == "lost" and run.closed == ["3"]
    assert run.recorded("member", what="lost", replica=2)


def test_a_killed_member_is_not_waited_for() -> None:
    run = three()
    run.ready("1")
    run.ready("2")
    run.disconnect("3")
    assert weights(run.last("Go", "1")) == {"1": 100.0, "2": 100.0}


def test_the_samples_of_a_lost_member_wait_for_it_and_then_go_to_others() -> None:
    run = three(deadline_s=10.0)
    run.say("3", Want(10))
    run.disconnect("3")
    run.wait(14.9, beats="12")
    run.say("1", Want(1))
    assert run.last("Lease", "1").ranges == ((10, 11),)
    run.wait(0.2, beats="12")
    run.say("1", Want(4))
    assert run.last("Lease", "1").ranges == ((0, 4),)
    run.connect("3", leased=((0, 10),), books=run.last("Welcome", "1").books)
    assert run.last("Welcome", "3").leased == ((4, 10),)


def test_a_member_that_knows_no_books_keeps_what_is_leased_to_it() -> None:
    run = three()
    run.say("3", Want(10))
    run.disconnect("3")
    run.connect("3", leased=((0, 6), (20, 30)))
    assert run.last("Welcome", "3").leased == ((0, 6),)


def test_what_a_zombie_says_changes_nothing_and_is_recorded_once() -> None:
    run = three()
    for member in "123":
        run.ready(member)
    run.wait(9.0, beats="12")
    before = run.membership.status(run.now)
    run.say("3", Reached(1, 1, "d1"))
    run.say("3", Ready(1, "d0", 1.0, 1.0, True, 1))
    run.say("9", Reached(1, 1, "d1"))
    assert run.membership.status(run.now) == before
    assert len(run.recorded("fault", what="zombie")) == 2
    run.say("1", Reached(1, 7, "d1"))
    assert run.recorded("fault", what="stale", replica=0)
    run.reached("1", "2")
    run.say("1", Reached(1, 1, "other"))
    assert run.membership.status(run.now)["digest"] == "d1"


def test_the_newer_connection_of_a_member_wins() -> None:
    run = three()
    run.ready("1")
    run.connect("1")
    assert run.state("1") == "training", "it says Ready again"
    assert len(run.membership.status(0.0)["members"]) == 3
    assert len(run.recorded("member", what="joined")) == 3


def test_the_first_to_come_back_from_a_cut_that_hit_all_does_not_go_on_alone() -> None:
    run = three()
    for member in "123":
        run.disconnect(member)
    run.wait(0.5)
    run.connect("1")
    run.ready("1")
    run.wait(1.0, beats="1")
    assert not run.heard("Go")
    run.connect("2")
    run.connect("3")
    run.ready("2")
    run.ready("3")
    assert weights(run.last("Go", "1")) == dict.fromkeys("123", 100.0)


def test_a_participant_whose_connection_blinked_goes_on_with_its_attempt() -> None:
    run = three()
    for member in "123":
        run.ready(member)
    run.say("1", Meet(1, "10.0.0.1", 99))
    run.disconnect("2")
    run.connect("2")
    assert [go.attempt for go in run.heard("Go", "2")] == [1, 1]
    assert len(run.heard("Meet", "2")) == 2
    run.wait(5.0, beats="123")
    run.reached("1", "2", "3")
    assert run.heard("Commit", "2") and not run.heard("Void")


def test_with_too_few_islands_for_too_long_the_run_ends_with_exit_code_5() -> None:
    run = three(min_replicas=2, deadline_s=10.0)
    run.say("1", Leave())
    run.say("2", Leave())
    run.wait(9.9, beats="3")
    assert not run.heard("Finish")
    run.wait(0.2, beats="3")
    assert run.last("Finish", "3").exit_code == 5
    assert "min_replicas=2" in run.last("Finish", "3").why


def test_two_thirds_lost_at_once_roll_nothing_back() -> None:
    run = Run(replicas=9)
    for member in "123456789":
        run.connect(member)
    run.round(*"123456789")
    for member in "456789":
        run.disconnect(member)
    for member in "123":
        run.ready(member)
    run.wait(5.1, beats="123")
    run.reached("1", "2", "3")
    assert run.membership.status(run.now)["round"] == 2


# --- peers that cannot reach each other


def fail(run: Run, member: str, *unreachable: str) -> None:
    go = run.last("Go", member)
    run.say(member, Failed(go.round, go.attempt, "timed out", unreachable))


def test_who_cannot_be_reached_by_the_others_is_left_out_where_it_is_named() -> None:
    run = three()
    for member in "123":
        run.ready(member)
    for _ in range(2):
        fail(run, "1", "2")
        run.say("3", Failed(1, 0, "timed out", ("2",)))
        run.wait(0.5, beats="123")
    assert weights(run.last("Go", "1")) == {"1": 100.0, "3": 100.0}


@pytest.mark.parametrize("outcast", "123")
def test_where_nobody_is_named_one_after_the_other_is_left_out(outcast: str) -> None:
    run = three()
    for member in "123":
        run.ready(member)
    for _ in range(9):
        go = run.last("Go")
        if outcast not in weights(go):
            break
        fail(run, go.participants[0].member)
        run.wait(2.1, beats="123")
    assert set(weights(run.last("Go"))) == set("123") - {outcast}


def test_an_averaging_that_never_ends_is_given_up() -> None:
    run = three(deadline_s=10.0)
    for member in "123":
        run.ready(member, sync_s=1.0)
    run.wait(19.9, beats="123")
    assert not run.heard("Void")
    run.wait(0.2, beats="123")
    assert run.heard("Void")


# --- samples


def test_samples_are_committed_with_the_round_that_holds_them_and_stay_leased_otherwise() -> None:
    run = three()
    for member in "123":
        run.say(member, Want(10))
    run.ready("1", used=((0, 10),))
    run.ready("2", used=((10, 15),))
    run.wait(35.0, beats="123")
    run.reached("1", "2", "3")
    leases = run.membership.status(run.now)["leases"]
    assert (leases["committed"], leases["leased"]) == (15, 15)
    assert run.last("Commit").position == 30
    run.ready("1", used=((0, 10),))
    assert "not leased" in run.last("Rejected", "1").why, "no sample counts twice"


def test_a_lease_is_on_disk_before_it_is_given() -> None:
    run = three()
    run.say("1", Want(10))
    record, send = run.effects
    assert isinstance(record, Record) and record.payload["leases"]["leased"] == {"1": [[0, 10]]}
    assert isinstance(send, Send) and send.message == Lease(((0, 10),), 10)


@pytest.mark.parametrize("samples", [0, -1, 2**60])
def test_an_absurd_wish_for_samples_is_not_granted(samples: int) -> None:
    run = three()
    run.say("1", Want(samples))
    assert not run.heard("Lease") and run.recorded("fault", what="lease refused")


# --- a coordinator that comes back


def test_from_its_log_it_is_where_it_was() -> None:
    run = three()
    run.round("1", "2", "3")
    run.say("1", Want(10))
    again = run.restarted()
    status = again.membership.status(again.now)
    assert (status["round"], status["digest"], status["settled"]) == (1, "d1", True)
    assert again.membership.snapshot() == run.membership.snapshot()
    for member in "321":
        again.connect(
            member,
            round=1,
            digest="d1",
            leased=((0, 10),) if member == "1" else (),
            books=run.last("Welcome", "1").books,
        )
    assert again.last("Welcome", "1").boot == "b2"
    assert [again.last("Welcome", member).seat for member in "123"] == [0, 1, 2]
    assert again.last("Welcome", "1").leased == ((0, 10),)
    again.round("1", "2", "3")
    assert again.last("Commit").attempt == 2, "numbers of attempts are never used again"


def test_samples_of_those_who_do_not_come_back_to_it_go_to_others() -> None:
    run = three(deadline_s=10.0)
    run.say("3", Want(10))
    again = run.restarted()
    again.connect("1")
    again.say("1", Want(1))
    assert again.last("Lease").ranges == ((10, 11),)
    again.wait(10.1, beats="1")
    again.say("1", Want(1))
    assert again.last("Lease").ranges == ((0, 1),)


def test_the_first_to_find_it_again_does_not_go_on_alone() -> None:
    run = three()
    run.round("1", "2", "3")
    again = run.restarted()
    again.connect("1", round=1, digest="d1")
    again.ready("1")
    again.wait(1.9, beats="1")
    assert not again.heard("Go")
    again.wait(0.2, beats="1")
    assert again.heard("Go"), "and does not wait for ever"


def test_those_who_reached_a_round_that_nobody_was_told_of_adopt_it() -> None:
    run = three()
    run.round("1", "2", "3")
    again = run.restarted()  # it died before it said Commit
    for member in "123":
        again.connect(member, round=0, digest="d0", in_flight_round=1)
        assert not again.last("Welcome", member).current
        assert again.last("Welcome", member).contributed == 1
        assert again.last("Commit", member) == run.last("Commit")
        again.say(member, Have(1, "d1"))
    assert [again.state(member) for member in "123"] == ["training"] * 3


def test_a_participant_without_the_result_is_given_a_donor() -> None:
    run = three()
    run.round("1", "2", "3")
    again = run.restarted()
    again.connect("1", round=1, digest="d1")
    again.connect("2", round=0, digest="d0")
    again.say("2", Failed(1, 1, "no result"))
    assert again.last("Donor", "2").member == "1"


def test_without_its_log_it_takes_the_newest_state_that_any_island_holds() -> None:
    run = three().restarted(with_log=False)
    run.connect("1", round=4, digest="d4")
    run.connect("2", round=5, digest="d5", attempt=17)
    run.connect("3", round=0, digest="d0", founder=True)
    run.wait(1.9, beats="123")
    assert not run.recorded("founded") and not run.heard("Donor")
    run.wait(0.2, beats="123")
    assert run.recorded("founded", round=5, digest="d5")
    assert run.last("Welcome", "2").current and run.last("Donor", "1").member == "2"
    run.say("1", Have(5, "d5"))
    run.ready("1")
    run.ready("2")
    run.wait(31.0, beats="123")
    assert run.last("Go", "1").attempt == 18


def test_without_its_log_it_takes_what_most_hold_where_they_differ_and_says_so() -> None:
    run = three().restarted(with_log=False)
    for member, digest in (("1", "odd"), ("2", "d5"), ("3", "d5")):
        run.connect(member, round=5, digest=digest)
    run.wait(2.1, beats="123")
    assert run.recorded("founded", digest="d5")
    assert run.recorded("fault", what="two digests", alarm=True)
    assert run.last("Donor", "1").member in ("2", "3")


def test_a_newer_state_that_comes_late_is_still_the_truth_if_nothing_was_decided() -> None:
    run = three().restarted(with_log=False)
    run.connect("1", round=4, digest="d4")
    run.wait(3.0, beats="1")
    assert run.recorded("founded", round=4)
    run.connect("2", round=5, digest="d5")
    run.wait(2.1, beats="12")
    assert run.recorded("founded", round=5)
    assert run.recorded("fault", what="late truth", alarm=True)
    assert not run.last("Welcome", "1").current


def test_a_state_of_another_history_is_taken_over_by_nobody_and_is_an_alarm() -> None:
    run = three()
    run.round("1", "2", "3")
    run.connect("4", round=9, digest="theirs")
    assert run.membership.status(run.now)["round"] == 1
    assert run.recorded("fault", what="ahead", alarm=True, replica=3)
    assert run.last("Donor", "4").round == 1


def test_a_run_that_is_over_is_over_without_its_log_too() -> None:
    run = three(num_rounds=5).restarted(with_log=False)
    run.connect("1", round=5, digest="d5")
    run.connect("2", round=4, digest="d4")
    run.wait(2.1, beats="12")
    assert [type(message).__name__ for to, message in run.sent if to == "2"][-2:] == ["Donor", "Finish"]


def test_numbers_out_of_this_world_do_no_harm() -> None:
    run = three().restarted(with_log=False)
    run.connect("1", round=1, digest="d1", attempt=2**62, position=2**62, leased=((-5, 3), (7, 7), (0, 2**62)))
    run.wait(2.1, beats="1")
    run.say("1", Want(5))
    assert run.last("Lease").ranges == ((2**53, 2**53 + 5),)
    run.ready("1")
    assert run.last("Go").attempt == 2**53 + 1


def test_without_its_log_no_sample_is_given_out_again() -> None:
    run = three().restarted(with_log=False)
    run.connect("1", round=5, digest="d5", position=100, leased=((40, 50),), books="b1")
    run.connect("2", round=5, digest="d5", position=120, leased=((110, 120),), books="b1")
    run.say("1", Want(5))
    assert not run.heard("Lease"), "nobody knows yet which samples are free"
    run.wait(2.1, beats="12")
    run.say("1", Want(5))
    assert run.last("Lease", "1").ranges == ((120, 125),)
    assert run.membership.status(run.now)["leases"] == {
        "position": 125, "committed": 0, "leased": 25, "returned": 0, "skipped": 100,
    }  # fmt: skip


def test_without_its_log_a_contribution_of_unknown_fate_counts_as_committed() -> None:
    run = three().restarted(with_log=False)
    run.connect("1", round=5, digest="d5", position=100, books="b1")
    run.connect("2", round=4, digest="d4", in_flight=((80, 90),), in_flight_round=5, books="b1")
    run.connect("3", round=5, digest="d5", in_flight=((90, 95),), in_flight_round=6, books="b1")
    run.wait(2.1, beats="123")
    assert run.last("Welcome", "2").contributed == 5
    assert run.last("Welcome", "2").leased == ()
    assert run.last("Welcome", "3").leased == ((90, 95),), "no round 6 is committed"


def test_claims_from_books_that_the_newest_state_does_not_know_are_not_believed() -> None:
    run = three().restarted(with_log=False)
    run.connect("1", round=5, digest="d5", position=100, leased=((90, 95),), books="b7")
    run.connect("2", round=3, digest="d3", position=60, leased=((50, 60),), books="b6")
    run.wait(2.1, beats="12")
    assert run.last("Welcome", "1").leased == ((90, 95),)
    assert run.last("Welcome", "2").leased == (), "they may have been given to others since, and committed"


def test_a_fresh_process_is_no_quorum_of_one_when_committed_state_exists() -> None:
    run = three()
    run.round("1", "2", "3")
    again = run.restarted(replicas=1)
    again.connect("9", round=0, digest="d0", founder=True)
    again.wait(3.0, beats="9")
    again.say("9", Ready(2, "d1", 1.0, 1.0, True, 1))
    again.say("9", Ready(1, "d0", 1.0, 1.0, True, 1))
    again.wait(60.0, beats="9")
    assert not again.heard("Go") and not again.heard("Donor")
    alarms = [alarm["what"] for alarm in again.membership.status(again.now)["alarms"]]
    assert alarms == ["nobody holds the state"]


# --- what people see, and the whole


def test_the_status_is_plain_and_tells_liveness_participation_and_breadth_apart() -> None:
    run = three()
    run.ready("1")
    run.ready("2")
    run.wait(35.0, beats="12")
    run.reached("1", "2")
    run.connect("4", round=-1, digest="")
    run.say("1", Beat(step=5, tokens_per_s=1000.0))
    status = json.loads(json.dumps(run.membership.status(run.now)))
    assert status["liveness"] == [0, 1, 2]
    assert status["participation"] == {"0": 100.0, "1": 100.0}
    assert status["breadth"] == pytest.approx(2 / 3)
    first = status["members"][0]
    assert (first["name"], first["tokens"], first["tokens_per_s"], first["step"]) == ("island-1", 100.0, 1000.0, 5)
    assert {m["member"]: m["state"] for m in status["members"]} == {
        "1": "training",
        "2": "training",
        "4": "syncing",
        "3": "lost",
    }


def test_time_never_stands_still() -> None:
    run = three()
    for member in "123":
        run.say(member, Want(5))
        run.ready(member, used=run.last("Lease", member).ranges)
    run.disconnect("3")
    for _ in range(200):
        deadline = run.membership.next_deadline()
        if deadline is None:
            break
        assert deadline >= run.now
        run.now = deadline
        run.take(run.membership.tick(run.now))
        after = run.membership.next_deadline()
        assert after is None or after > run.now


def test_the_same_history_has_the_same_effects() -> None:
    def history() -> list[Any]:
        run = three()
        run.round("1", "2", "3")
        run.connect("4", round=-1, digest="")
        run.disconnect("2")
        run.wait(20.0, beats="134")
        return [*run.sent, *run.records]

    assert history() == history()


def test_thousands_of_members_that_come_and_go_leave_nothing_behind() -> None:
    run = three()
    for i in range(2000):
        member = f"m{i}"
        run.wait(0.25, beats="123")
        run.connect(member, round=-1, digest="")
        run.say(member, Have(0, "d0"))
        run.say(member, Want(3))
        run.say(member, Leave()) if i % 2 else run.disconnect(member)
    run.wait(60.0, beats="123")
    assert len(run.membership.status(run.now)["members"]) <= 3 + 64
    assert len(json.dumps(run.membership.snapshot())) < 60_000
    assert run.membership.status(run.now)["leases"]["leased"] == 0
