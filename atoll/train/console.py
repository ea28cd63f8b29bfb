"""What a person sees while a run goes on: one line a step, one line a round, in a fixed order; never silent for long.

The `format_*` functions are pure. `Console` prints their lines, above a progress bar where there is a terminal.

>>> format_duration(7380), format_bytes(48_000_000), format_rate(3e-4)
('2h03m', '48 MB', '3.0e-4')
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import TextIO

import rich.console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from atoll.train.metrics import EvalEvent, RoundEvent, StepEvent

SILENCE_S = 5.0  # the longest a person is left without a line

# --- numbers ---


def format_bytes(num_bytes: float) -> str:
    """Decimal units, two digits or more.

    >>> [format_bytes(n) for n in (0, 999, 1_000, 9_960_000, 48_123_456, 1.2e9)]
    ['0 B', '999 B', '1.0 kB', '10 MB', '48 MB', '1.2 GB']
    """
    value, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if round(value) < 1000:
            break
        value, unit = value / 1000, larger
    return f"{_two_digits(value) if unit != 'B' else round(value)} {unit}"


def format_duration(seconds: float) -> str:
    """The two largest units of a time; "?" for one that is not known.

    >>> [format_duration(s) for s in (0, 0.0123, 0.4, 3.14, 42.4, 59.7, 187, 7380, 277_200, math.nan)]
    ['0 s', '12 ms', '0.4 s', '3.1 s', '42 s', '1m00s', '3m07s', '2h03m', '3d05h', '?']
    """
    if not math.isfinite(seconds) or seconds < 0:
        return "?"
    if round(seconds) < 60:
        return _short_duration(seconds)
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 48 else f"{hours // 24}d{hours % 24:02d}h"


def _short_duration(seconds: float) -> str:
    if 0 < seconds < 0.0995:
        return f"{max(1, round(seconds * 1000))} ms"
    return f"{_two_digits(seconds)} s" if seconds else "0 s"


def _two_digits(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def format_rate(rate: float) -> str:
    """A learning rate with two digits and a short exponent.

    >>> [format_rate(rate) for rate in (3e-4, 1.0, 0.0, 2.5e-12)]
    ['3.0e-4', '1.0e0', '0', '2.5e-12']
    """
    if not rate or not math.isfinite(rate):
        return f"{rate:g}"
    digits, exponent = f"{rate:.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def format_saving(sent_bytes: float, data_parallel_bytes: float) -> str:
    """How much less was sent than data parallel sends for the same steps; empty where there is nothing to compare.

    >>> format_saving(48e6, 10_176e6), format_saving(2e6, 7e6), format_saving(3e6, 1e6), format_saving(1e6, 1e6)
    ('212x less than data parallel', '3.5x less than data parallel', '3x more than data parallel', 'as data parallel')
    >>> format_saving(0, 1e6)
    ''
    """
    if sent_bytes <= 0 or data_parallel_bytes <= 0:
        return ""
    less = data_parallel_bytes / sent_bytes
    if 1 / 1.05 < less < 1.05:
        return "as data parallel"
    factor = format_factor(max(less, 1 / less))
    return f"{factor} {'less' if less > 1 else 'more'} than data parallel"


def format_factor(factor: float) -> str:
    """
    >>> format_factor(3.46), format_factor(2.02), format_factor(1234.5)
    ('3.5x', '2x', '1,234x')
    """
    digits = f"{factor:,.0f}" if factor >= 9.95 else f"{factor:.1f}".removesuffix(".0")
    return f"{digits}x"


# --- lines ---


def format_step(event: StepEvent, *, max_steps: int, round: int, eta_s: float) -> str:
    """The line of an inner step. `round`: how many are committed so far.

    >>> step = StepEvent(step=1200, replica=0, loss=3.214, grad_norm=0.81, lr=3e-4, tokens=9, tokens_per_s=18_240.4)
    >>> format_step(step, max_steps=5000, round=12, eta_s=7380)
    'step 1200/5000 (24%) | loss 3.214 | grad_norm 0.81 | lr 3.0e-4 | 18,240 tok/s | round 12 | eta 2h03m'
    """
    return " | ".join(
        [
            f"step {event.step}/{max_steps} ({100 * event.step // max_steps}%)",
            f"loss {event.loss:.3f}",
            f"grad_norm {event.grad_norm:.2f}",
            f"lr {format_rate(event.lr)}",
            f"{event.tokens_per_s:,.0f} tok/s",
            f"round {round}",
            f"eta {format_duration(eta_s)}",
        ]
    )


def format_round(event: RoundEvent, *, data_parallel_bytes: float, clipped: int = 0) -> str:
    """The line of a committed round. `data_parallel_bytes`: what data parallel sends for the same inner steps.

    >>> round_12 = RoundEvent(
    ...     round=12, step=1200, replicas=4, contributors=4, payload_bytes=48_000_000, sync_s=3.1, exposed_s=0.4,
    ...     inner_s=60.0, anchor_digest="9f3c1a77d0", delta_norm=0.5,
    ... )
    >>> print(format_round(round_12, data_parallel_bytes=10.176e9).replace(" | waited", "\\n  | waited"))
    round 12 committed in 3.1 s | 4/4 replicas | sent 48 MB (212x less than data parallel)
      | waited 0.4 s | clipped 0 | refused 0 | anchor 9f3c1a
    """
    saving = format_saving(event.payload_bytes, data_parallel_bytes)
    return " | ".join(
        [
            f"round {event.round} committed in {format_duration(event.sync_s)}",
            f"{event.contributors}/{event.replicas} replicas",
            f"sent {format_bytes(event.payload_bytes)}" + (f" ({saving})" if saving else ""),
            f"waited {format_duration(event.exposed_s)}",
            f"clipped {clipped}",
            f"refused {format_refused(event)}",
            f"anchor {event.anchor_digest[:6]}",
        ]
    )


def format_refused(event: RoundEvent) -> str:
    """How many contributions were refused, and whose: "1 (replica 3)"."""
    if not event.refused:
        return "0"
    return f"{len(event.refused)} (replica {', '.join(str(replica) for replica in event.refused)})"


def format_eval(event: EvalEvent) -> str:
    """The line of an evaluation of the anchor.

    >>> format_eval(EvalEvent(step=1200, round=12, loss=3.1012, perplexity=22.224, tokens=32_768))
    'eval at step 1200 | anchor of round 12 | held-out loss 3.101 | perplexity 22.2 | 32,768 tokens'
    """
    ppl = f"{event.perplexity:,.1f}" if event.perplexity < 1e6 else f"{event.perplexity:.1e}"
    return (
        f"eval at step {event.step} | anchor of round {event.round} | held-out loss {event.loss:.3f} | "
        f"perplexity {ppl} | {event.tokens:,} tokens"
    )


# --- never silent ---


def waiting_lines(
    what: str | Callable[[], str], stopped: Callable[[float], bool], *, interval_s: float = SILENCE_S
) -> Iterator[str]:
    """A line for every `interval_s` that goes by until `stopped(seconds)`, which waits that long at most, says so.

    `what` may be a function, asked each time: who is waited for can change.

    >>> answers = iter([False, False, True])
    >>> list(waiting_lines("replica 2, 3", lambda _: next(answers)))
    ['waiting for replica 2, 3 ... 5 s', 'waiting for replica 2, 3 ... 10 s']
    """
    waited_s = 0.0
    while not stopped(interval_s):
        waited_s += interval_s
        yield f"waiting for {what if isinstance(what, str) else what()} ... {waited_s:.0f} s"


def print_line(line: str) -> None:
    """One line to standard output, flushed."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def waiting(
    what: str | Callable[[], str], *, emit: Callable[[str], None] = print_line, interval_s: float = SILENCE_S
) -> Iterator[None]:
    """Say who is waited for, every `interval_s`, for as long as the block lasts.

    The lines come from a daemon thread: the block may sit in a collective, which holds the main thread but not the
    interpreter. A block that ends sooner than `interval_s` prints nothing, and after the block no line follows.
    """
    done = threading.Event()

    def talk() -> None:
        for line in waiting_lines(what, done.wait, interval_s=interval_s):
            emit(line)

    thread = threading.Thread(target=talk, name="atoll-waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# --- the console of a run ---


class Console:
    """Prints the lines of a run: plain and flushed in a pipe or a file, above a progress bar on a terminal.

    `first_step`: the step a resumed run starts from. `clock` gives seconds and is read for the remaining time only.
    `on_closed`: called once if who reads along leaves (`atoll train | head`); from then on nothing is written.

    >>> step = StepEvent(step=50, replica=0, loss=2.0, grad_norm=1.0, lr=0.1, tokens=9, tokens_per_s=9.0)
    >>> with Console(max_steps=100, clock=iter([0.0, 30.0]).__next__) as console:
    ...     console.step(step)
    step 50/100 (50%) | loss 2.000 | grad_norm 1.00 | lr 1.0e-1 | 9 tok/s | round 0 | eta 30 s
    """

    def __init__(
        self,
        *,
        max_steps: int,
        first_step: int = 0,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self.max_steps = max_steps
        self.round = 0
        self._first_step = first_step
        self._clock = clock
        self._on_closed = on_closed
        self._started = clock()
        self._file = sys.stdout if file is None else file
        self._progress = _open_bar(self._file) if _is_terminal(self._file) else None
        if self._progress is not None:
            self._progress.add_task("training", total=max_steps, completed=first_step)

    def start(self, step: int) -> None:
        """Training begins, or goes on, after `step`: the pace counts from now, without the set-up before."""
        self._first_step = step
        self._started = self._clock()
        self.advance(step)

    def line(self, text: str) -> None:
        """Any line. Safe from any thread."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._write(f"{text}\n")

    def step(self, event: StepEvent) -> None:
        """The line of an inner step; the bar moves."""
        self.advance(event.step)
        self.line(format_step(event, max_steps=self.max_steps, round=self.round, eta_s=self.eta_s(event.step)))

    def advance(self, step: int) -> None:
        """Move the bar without a line: for the steps between two step lines."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step)

    def committed(self, event: RoundEvent, *, data_parallel_bytes: float, clipped: int = 0) -> None:
        """The line of a committed round."""
        self.round = event.round
        self.line(format_round(event, data_parallel_bytes=data_parallel_bytes, clipped=clipped))

    def evaluated(self, event: EvalEvent) -> None:
        """The line of an evaluation."""
        self.line(format_eval(event))

    def waiting(self, what: str | Callable[[], str]) -> AbstractContextManager[None]:
        """`waiting`, through this console: its lines do not break the bar."""
        return waiting(what, emit=self.line)

    def eta_s(self, step: int) -> float:
        """Seconds to the last step at the mean pace since the start, syncs included; NaN before the first."""
        done = step - self._first_step
        if done <= 0:
            return math.nan
        return (self._clock() - self._started) / done * (self.max_steps - step)

    def close(self) -> None:
        """Take the bar away and leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except BrokenPipeError:
            # what the file still holds back would fail again at the end of the process: let it go nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())
            self._on_closed()

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_terminal(file: TextIO) -> bool:
    return file.isatty() and not rich.console.Console(file=file).is_dumb_terminal


def _open_bar(file: TextIO) -> Progress:
    """A bar that stays below the lines, drawn twice a second: a drawing costs a core that trains a millisecond."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=rich.console.Console(file=file),
        refresh_per_second=2,
        transient=True,
    )
    progress.start()
    return progress
