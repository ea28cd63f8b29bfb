"""Where the time of a round went, as far as what islands say tells."""

from __future__ import annotations

import math
from typing import Any

import pytest

from atoll.elastic.messages import Beat, Leave, Reached, Ready
from atoll.elastic.page_watch import MOST_MEMBERS, Watch


def ready(number: int, **changes: Any) -> Ready:
    return Ready(**({"round": number, "base": "", "weight": 10.0, "norm": 1.0, "finite": True, "steps": 5} | changes))


def reached(number: int, **changes: Any) -> Reached:
    return Reached(**({"round": number, "attempt": number, "digest": "d", "payload_bytes": 800} | changes))


def payload(number: int, *counted: int) -> dict[str, Any]:
    """As the record of a committed round, of two islands."""
    weights = {seat: 10.0 for seat in counted}
    return {"round": number, "attempt": number, "members": {0: "a", 1: "b"}, "weights": weights}


def test_a_round_is_told_apart_into_training_waiting_and_averaging() -> None:
    watch = Watch()
    watch.heard("a", ready(1, inner_s=4.0, loss=3.0), 10.0)
    watch.heard("b", ready(1, inner_s=6.0, loss=2.0), 12.0)
    for member in "ab":
        watch.heard(member, reached(1, wire_s=2.0, meet_s=0.5, send_s=1.0, outer_s=0.25, step_bytes=100), 14.0)
    told = watch.round(payload(1, 0, 1), 15.0)
    assert (told["inner_s"], told["exposed_s"], told["idle_s"], told["loss"]) == (5.0, 4.0, None, 2.5)
    assert told["data_parallel_bytes"] == 2 * 5 * 100
    assert told["islands"]["0"] == {
        **{"offered_s": 5.0, "train_s": 4.0, "steps": 5, "idle_s": None, "loss": 3.0},
        **{"reached_s": 1.0, "wire_s": 2.0, "sent_bytes": 800, "meet_s": 0.5, "send_s": 1.0, "outer_s": 0.25},
    }
    assert watch.about("a")["link_bytes_per_s"] == 800 / 1.25


def test_idle_time_is_what_was_not_training_between_two_offers() -> None:
    watch = Watch()
    watch.heard("a", ready(1, inner_s=4.0), 10.0)
    watch.round(payload(1, 0), 11.0)
    watch.heard("a", ready(2, inner_s=6.0), 18.0)
    watch.heard("a", ready(2, inner_s=6.0), 19.0)  # said again, after the connection was lost
    assert watch.round(payload(2, 0), 20.0)["idle_s"] == 2.0


def test_work_that_is_carried_over_is_counted_with_the_round_that_holds_it() -> None:
    watch = Watch()
    watch.heard("b", ready(1, inner_s=4.0), 10.0)
    watch.round(payload(1, 1), 10.0)
    watch.heard("b", ready(2, inner_s=5.0), 20.0)
    told = watch.round(payload(2, 0), 21.0)
    assert (told["idle_s"], told["inner_s"]) == (None, 0.0), "it listened"
    watch.heard("b", ready(3, inner_s=15.0), 30.0)
    assert watch.round(payload(3, 0, 1), 30.0)["idle_s"] == 5.0


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_a_loss_that_is_no_number_is_none(loss: float | None) -> None:
    watch = Watch()
    watch.heard("a", Beat(1, 1.0, loss), 1.0)
    watch.heard("a", ready(1, loss=loss), 2.0)
    assert watch.about("a")["loss"] is None
    assert watch.round(payload(1, 0), 3.0)["loss"] is None


def test_an_averaging_of_an_earlier_attempt_is_not_this_rounds() -> None:
    watch = Watch()
    watch.heard("a", ready(2), 1.0)
    watch.heard("a", reached(1, step_bytes=100), 2.0)
    told = watch.round(payload(2, 0), 3.0)
    assert told["data_parallel_bytes"] == 0
    assert "wire_s" not in told["islands"]["0"]


def test_members_that_come_and_go_leave_nothing_behind() -> None:
    watch = Watch()
    for number in range(3 * MOST_MEMBERS):
        watch.heard(f"m{number}", Beat(1, 1.0, 2.0), 1.0)
        watch.heard(f"n{number}", Leave(), 1.0)
    assert len(watch._seen) == MOST_MEMBERS
