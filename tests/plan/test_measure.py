"""Times taken from the metrics of a run."""

import json

import pytest

from atoll.errors import ConfigError
from atoll.plan.measure import read_run


def round_event(number: int, **changes) -> dict:
    event = {"event": "round", "round": number, "step": 10 * number, "replicas": 4, "contributors": 4}
    event |= {"payload_bytes": 1_000_000, "sync_s": 3.0, "exposed_s": 3.0, "inner_s": 20.0, "compressor": "int8"}
    return event | changes


def step_event(step: int) -> dict:
    return {"event": "step", "step": step, "replica": 0, "tokens": 256 * step}


def write(tmp_path, events: list[dict], tail: str = "") -> str:
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "metrics.jsonl").write_text(lines + tail)
    return str(tmp_path)


def test_medians_leave_out_the_first_round_and_rounds_of_another_length(tmp_path) -> None:
    rounds = [round_event(n) for n in range(1, 6)]
    rounds[0] |= {"inner_s": 500.0, "sync_s": 90.0}
    rounds.append(round_event(6, step=53, inner_s=1.0, sync_s=0.1))
    found = read_run(write(tmp_path, [*rounds, step_event(50)]))
    assert (found.step_s, found.sync_s, found.inner_steps, found.rounds) == (2.0, 3.0, 10, 4)
    assert found.tokens_per_step == 4 * 256
    assert (found.replicas, found.compressor) == (4, "int8")
    assert found.utilisation == pytest.approx(20 / 23)


def test_overhead_is_what_the_link_does_not_explain(tmp_path) -> None:
    found = read_run(write(tmp_path, [round_event(n) for n in range(1, 4)]))
    assert found.overhead_s() == 3.0
    assert found.overhead_s(1e6) == pytest.approx(2.0)
    assert found.overhead_s(1e5) == 0.0
    assert found.landing_s == 0.0


def test_of_an_overlapped_run_the_exposed_time_is_what_landings_take(tmp_path) -> None:
    found = read_run(write(tmp_path, [round_event(n, exposed_s=0.2) for n in range(1, 4)]))
    assert found.overlapped
    assert found.landing_s == 0.2


def test_a_torn_last_line_is_left_out(tmp_path) -> None:
    run = write(tmp_path, [round_event(n) for n in range(1, 4)], tail='{"event": "rou')
    assert read_run(run).rounds == 2


@pytest.mark.parametrize("events", [[], [round_event(1)], [step_event(1)]])
def test_a_run_without_two_rounds_is_refused(tmp_path, events: list[dict]) -> None:
    with pytest.raises(ConfigError, match="two or more"):
        read_run(write(tmp_path, events))


def test_files_that_are_no_metrics_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(tmp_path / "nothing")
    (tmp_path / "metrics.jsonl").write_text("no json\n{}\n")
    with pytest.raises(ConfigError, match="line 1"):
        read_run(tmp_path)
