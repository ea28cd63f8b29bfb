import io
import math
import queue
import re
import threading

import pytest

from atoll.train import console
from atoll.train.console import Console
from atoll.train.metrics import EvalEvent, RoundEvent, StepEvent


def step_event(step: int, *, loss: float = 3.214) -> StepEvent:
    return StepEvent(step=step, replica=0, loss=loss, grad_norm=0.81, lr=3e-4, tokens=9, tokens_per_s=18_240.0)


def round_event(*, payload_bytes: int = 48_000_000, refused: tuple[int, ...] = ()) -> RoundEvent:
    return RoundEvent(
        round=12,
        step=1200,
        replicas=4,
        contributors=4 - len(refused),
        payload_bytes=payload_bytes,
        sync_s=3.1,
        exposed_s=0.4,
        inner_s=60.0,
        anchor_digest="9f3c1a77d0",
        delta_norm=0.5,
        refused=refused,
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


# --- lines ---


def test_the_step_line_is_the_one_of_the_documentation() -> None:
    assert console.format_step(step_event(1200), max_steps=5000, round=12, eta_s=7380) == (
        "step 1200/5000 (24%) | loss 3.214 | grad_norm 0.81 | lr 3.0e-4 | 18,240 tok/s | round 12 | eta 2h03m"
    )


def test_the_round_line_is_the_one_of_the_documentation() -> None:
    assert console.format_round(round_event(), data_parallel_bytes=212 * 48_000_000) == (
        "round 12 committed in 3.1 s | 4/4 replicas | sent 48 MB (212x less than data parallel) | waited 0.4 s | "
        "clipped 0 | refused 0 | anchor 9f3c1a"
    )


def test_a_refused_contribution_is_named() -> None:
    line = console.format_round(round_event(refused=(2,)), data_parallel_bytes=0, clipped=1)
    assert "| 3/4 replicas |" in line and "| clipped 1 | refused 1 (replica 2) |" in line


def test_a_run_that_sends_nothing_claims_no_saving() -> None:
    assert "| sent 0 B |" in console.format_round(round_event(payload_bytes=0), data_parallel_bytes=1e9)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_still_makes_a_line(loss: float) -> None:
    assert f"loss {loss}" in console.format_step(step_event(1, loss=loss), max_steps=10, round=0, eta_s=math.nan)
    line = console.format_eval(EvalEvent(step=1, round=0, loss=loss, perplexity=loss, tokens=1))
    assert f"perplexity {loss}" in line


@pytest.mark.parametrize("seconds", [10**exponent * factor for exponent in range(-4, 7) for factor in (1, 5.949, 9.96)])
def test_durations_never_carry_a_sixty(seconds: float) -> None:
    text = console.format_duration(seconds)
    assert not re.search(r"60 ?[sm]", text) and len(text) <= 7


def test_bytes_have_at_most_three_digits() -> None:
    for exponent in range(0, 15):
        for factor in (1, 9.949, 9.96, 9.9999):
            assert re.fullmatch(
                r"\d{1,3} k?B|\d{1,3} [MGTP]B|\d\.\d [kMGTP]B", console.format_bytes(10**exponent * factor)
            )


# --- waiting ---


def test_waiting_says_so_each_interval_and_asks_who_each_time() -> None:
    missing = iter(["replica 2, 3", "replica 3"])
    answers = iter([False, False, True])
    lines = console.waiting_lines(lambda: next(missing), lambda _: next(answers), interval_s=5)
    assert list(lines) == ["waiting for replica 2, 3 ... 5 s", "waiting for replica 3 ... 10 s"]


def test_waiting_talks_while_the_block_is_stuck_and_stops_with_it() -> None:
    lines: queue.Queue[str] = queue.Queue()
    with console.waiting("replica 1", emit=lines.put, interval_s=0.001):
        assert lines.get(timeout=30).startswith("waiting for replica 1 ... ")
        assert lines.get(timeout=30).startswith("waiting for replica 1 ... ")
    assert "atoll-waiting" not in [thread.name for thread in threading.enumerate()]


def test_a_short_wait_is_silent_and_an_error_passes_through() -> None:
    lines: list[str] = []
    with pytest.raises(KeyError), console.waiting("replica 1", emit=lines.append):
        raise KeyError
    assert lines == []


def test_the_waiting_thread_never_keeps_a_process_alive() -> None:
    with console.waiting("replica 1"):
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "atoll-waiting"]
        assert thread.daemon


# --- Console ---


def test_without_a_terminal_there_are_only_plain_lines() -> None:
    file = io.StringIO()
    with Console(max_steps=5000, file=file, clock=iter([0.0, 10.0]).__next__) as screen:
        screen.committed(round_event(), data_parallel_bytes=0)
        screen.step(step_event(1200))
        screen.evaluated(EvalEvent(step=1200, round=12, loss=3.1, perplexity=22.2, tokens=64))
        screen.line("[bold]as it is[/bold]")
    lines = file.getvalue().split("\n")
    assert [line.split()[0] for line in lines[:3]] == ["round", "step", "eval"]
    assert "| round 12 | eta 32 s" in lines[1]
    assert lines[3:] == ["[bold]as it is[/bold]", ""] and "\x1b" not in file.getvalue()


def test_each_line_is_flushed() -> None:
    class Recorder(io.StringIO):
        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    file = Recorder()
    Console(max_steps=10, file=file).line("first")
    assert file.flushed == "first\n"


def test_on_a_terminal_the_lines_stand_whole_above_a_bar() -> None:
    file = Terminal()
    with Console(max_steps=5000, file=file, clock=iter([0.0, 10.0]).__next__) as screen:
        screen.step(step_event(1200))
        screen.line("[12] brackets stay")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "loss 3.214 | grad_norm 0.81 | lr 3.0e-4 | 18,240 tok/s | round 0 | eta 32 s\n" in text
    assert "[12] brackets stay" in text and "1200/5000 steps" in text
    assert file.getvalue().rfind("\x1b[?25h") > file.getvalue().rfind("\x1b[?25l")  # the cursor is back


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    file = Terminal()
    with Console(max_steps=10, file=file) as screen:
        screen.line("plain")
    assert file.getvalue() == "plain\n"


def test_a_resumed_run_counts_its_pace_from_where_it_resumed() -> None:
    screen = Console(max_steps=100, first_step=50, file=io.StringIO(), clock=iter([0.0, 10.0]).__next__)
    assert screen.eta_s(60) == 40.0
    assert math.isnan(screen.eta_s(50))


def test_the_set_up_before_the_start_does_not_count_as_pace() -> None:
    screen = Console(max_steps=100, file=io.StringIO(), clock=iter([0.0, 1000.0, 1010.0]).__next__)
    screen.start(50)
    assert screen.eta_s(60) == 40.0


def test_waiting_lines_go_through_the_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "waiting_lines", lambda what, _, interval_s: iter([f"waiting for {what} ... 5 s"]))
    file = io.StringIO()
    with Console(max_steps=10, file=file).waiting("start-up"):
        pass
    assert file.getvalue() == "waiting for start-up ... 5 s\n"


def test_lines_without_a_console_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_line("before the run")
    assert capsys.readouterr().out == "before the run\n"
