"""What is kept of a run to be shown: whole, true, and of bounded size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atoll.elastic.messages import Beat, Reached, Ready
from atoll.elastic.page_history import MOST_EVENTS, MOST_POINTS, RECENT_ROUNDS, Curve, History
from atoll.elastic.page_watch import Watch


def history(num_rounds: int = 10) -> History:
    return History(num_rounds=num_rounds, step_of=lambda round: 10 * round)


def event(number: int, **changes: Any) -> dict[str, Any]:
    """A committed round of two islands that train for 3 s of every 4."""
    track = {"train_s": 3.0, "offered_s": 1.0, "idle_s": 1.0}
    base = {
        "event": "round",
        "round": number,
        "step": 10 * number,
        "at": 1000.0 + 4 * number,
        "contributors": 2,
        "replicas": 2,
        "weights": {"0": 30.0, "1": 50.0},
        "wire_bytes": 100,
        "data_parallel_bytes": 2000,
        "sync_s": 0.5,
        "waited_s": 0.25,
        "inner_s": 3.0,
        "idle_s": 1.0,
        "loss": 5.0 - 0.1 * number,
        "refused": [],
        "voids": 0,
        "islands": {"0": track, "1": track},
    }
    return base | changes


def test_pace_utilisation_and_bytes_follow_from_the_rounds() -> None:
    past = history()
    for number in (1, 2, 3):
        past.note(event(number, voids=number == 3, refused=[1] if number == 2 else []))
    told = past.summary(now=1013.0)
    assert (told["step"], told["max_steps"], told["loss"]) == (30, 100, 4.7)
    assert (told["goodput_tokens_per_s"], told["utilisation"], told["round_s"]) == (20.0, 0.75, 4.0)
    assert (told["sent_bytes"], told["data_parallel_bytes"], told["tokens"]) == (300, 6000, 240)
    assert (told["refused"], told["voids"], told["rounds"]) == (1, 1, 3)
    assert told["eta_s"] == 7 * 4.0 - 1.0


def test_before_the_first_round_nothing_is_made_up() -> None:
    told = history().summary(now=0.0)
    unknown = "loss eval_loss goodput_tokens_per_s utilisation round_s sync_s eta_s".split()
    assert [told[key] for key in unknown] == [None] * len(unknown)


def test_at_the_end_no_time_is_left() -> None:
    past = history(num_rounds=1)
    past.note(event(1))
    assert past.summary(now=2000.0)["eta_s"] == 0.0


def test_time_in_which_the_coordinator_was_away_counts() -> None:
    past = history()
    past.note(event(1))
    past.note(event(2, at=1100.0))
    assert past.plain()["progress"][-1]["goodput"] == 80 / 96


def test_lines_of_an_earlier_version_are_understood() -> None:
    past = history()
    past.note({"event": "round", "round": 1, "step": 10, "exposed_s": 1.0, "inner_s": 3.0})
    past.note({"event": "eval", "round": 1, "step": 10, "loss": 2.0})
    past.note({"event": "fault", "what": "lone commit", "replica": None, "step": 1})
    past.note({"event": "step", "step": 1})
    past.note({"event": "what is that"})
    assert past.summary(now=0.0)["utilisation"] == 0.75
    assert past.plain()["held_out"] == [[10, None, 2.0]]


def test_what_is_kept_is_bounded_and_plain() -> None:
    past = history(num_rounds=100_000)
    for number in range(1, 3000):
        past.note(event(number))
        past.note({"event": "eval", "round": number, "step": 10 * number, "loss": 2.0})
        past.note({"event": "fault", "what": "void", "replica": 1, "detail": "x" * 9000, "round": number})
        past.beat(Beat(5, 10.0, 3.0), at=float(number))
    plain = past.plain()
    assert len(plain["rounds"]) == RECENT_ROUNDS
    assert len(plain["events"]) == MOST_EVENTS
    assert max(len(plain[name]) for name in ("training", "held_out", "progress")) <= MOST_POINTS
    assert plain["progress"][-1]["round"] == plain["rounds"][-1]["round"] == 2999
    assert len(json.dumps(plain)) < 400_000
    assert past.summary(now=0.0)["rounds"] == 2999


def test_a_curve_keeps_its_mean_and_its_ends() -> None:
    curve = Curve(most=16)
    for step in range(1000):
        curve.add(step, at=float(step), loss=10.0 - step / 100)
    points = curve.points()
    assert 8 <= len(points) <= 16
    assert points[-1][0] == 999
    assert [loss for _, _, loss in points] == sorted((loss for _, _, loss in points), reverse=True)
    assert points[0][2] == pytest.approx(10.0 - (curve.width - 1) / 200)


def test_islands_tell_of_their_loss_between_rounds_and_a_broken_one_is_left_out() -> None:
    past = history()
    before = past.version
    past.beat(Beat(3, 10.0, 4.0), at=1.0)
    past.beat(Beat(4, 10.0, float("nan")), at=2.0)
    past.beat(Beat(0, 0.0), at=3.0)
    assert past.plain()["training"] == [[3, 1.0, 4.0]]
    assert past.version == before + 1


numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(-(2**63), 2**63 - 1)


@given(numbers, numbers, numbers, st.floats(), counts, counts)
@example(0.0, 0.0, 8e-306, 0.0, 0, 1435)
def test_whatever_islands_claim_is_shown_as_json_that_browsers_read(
    weight: float, seconds: float, more: float, loss: float, steps: int, size: int
) -> None:
    watch, past = Watch(), history()
    for number in (1, 2, 3):
        for member in "ab":
            watch.heard(member, Beat(steps, seconds, loss), 1.0)
            past.beat(Beat(steps, seconds, loss), 1.0)
            ready = Ready(number, "", weight, 1.0, True, steps, inner_s=seconds, loss=loss)
            reached = Reached(number, number, "d", payload_bytes=size, wire_s=more, meet_s=seconds, step_bytes=size)
            watch.heard(member, ready, 2.0 * number)
            watch.heard(member, reached, 2.0 * number + 1)
        payload = {"round": number, "attempt": number, "members": {0: "a", 1: "b"}, "weights": {0: weight, 1: weight}}
        told = watch.round(payload, 2.0 * number + 1)
        about = {"event": "round", "round": number, "step": 10 * number, "at": 2.0 * number, "wire_bytes": 2 * size}
        past.note(about | {"weights": {"0": weight, "1": weight}} | told)
    for shown in (past.plain(), past.summary(8.0), watch.about("a")):
        json.dumps(shown, allow_nan=False)


def test_a_strangers_name_is_fit_to_be_shown() -> None:
    past = history()
    past.note({"event": "member", "what": "joined", "replica": 0, "round": 0, "name": "a\x1b[2J\u202e", "why": ""})
    assert past.plain()["events"][0]["name"] == "a?[2J?"
