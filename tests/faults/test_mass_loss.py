"""Most islands may die at once, and all may: what is committed, or saved, is where the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from faults.fleet import Fleet

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("point", ["step", "connected"])
def test_the_rest_go_on_when_two_thirds_die_at_once(fleet: Callable[..., Fleet], point: str) -> None:
    run = fleet(replicas=6, inner_steps=4)
    run.wait_round(2)
    run.plan(run.islands[2].name, f"island.{point}")
    run.wait_end(run.islands[2])
    run.clear_plan()
    run.kill(1, 3, 5)
    before = run.round
    run.wait_round(before + 2)
    assert all(set(event["weights"]) <= {"0", "4"} for event in run.of("round") if event["round"] > before + 1)
    for seat in (1, 2, 3, 5):
        run.add(seat)
    run.wait_counted(*range(6))
    run.check()


def test_when_all_die_the_run_goes_on_from_the_last_saved_round(tmp_path: Path) -> None:
    with Fleet(tmp_path, replicas=3, save_steps=8) as run:
        run.start()
        run.wait_round(4)
        run.kill(0, 1, 2)
        run.kill_coordinator()
        known = run.committed()
    with Fleet(tmp_path, replicas=3, save_steps=8, resume="auto") as again:
        again.go_back()
        start = again.round
        assert 3 <= start <= known[-1]["round"]
        again.start()
        again.wait_round(start + 3)
        digests = {event["round"]: event["anchor_digest"] for event in again.of("round")}
        assert digests[start] == next(payload["digest"] for payload in known if payload["round"] == start)
        again.check(known=known[:start])
