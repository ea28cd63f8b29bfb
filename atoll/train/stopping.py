"""Stopping together.

A signal reaches each process at another step, and a process that waits in a sync cannot look for signals. All must stop
after the same step, or one would wait for ever for the others. How they agree, through a key-value store:

    a process that was told to stop proposes its step and waits (without training) for the proposals of the others
    a process about to wait in a sync leaves word of its step, and of the step that all must reach for it to go on
    for those who have not reached that one, it cannot go on without them: its word counts as its proposal
    the largest proposal is the step to stop after; the first to see them all writes it down
    after every sync, and while waiting for proposals, each looks whether that was written

    A at step 15 is told to stop, proposes 15 and waits.     B stands in the sync of step 20, waiting for A.
    A sees 15 and B's 20, writes 20, trains on to 20, syncs.   B leaves the sync, reads 20, and stops as well.

Why the second step: where rounds land after a delay, B may wait at step 22 for what A launched at 20. If A stands
at 21, B is about to go on, and its 22 is old news.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from atoll.errors import AtollError, TransportError


class Interrupted(AtollError):
    """The run was told to stop, and has saved its state."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 130 if signum == signal.SIGINT else 75


class Stopper(Protocol):
    """Decides, the same for all replicas, after which step a run stops early."""

    def before_sync(self, step: int, *, needs: int | None = None) -> None:
        """This process stands at `step` and waits there until all have come as far as `needs` (default: `step`)."""
        ...

    def after_sync(self, step: int) -> None:
        """The sync of `step` is over."""
        ...

    def stop_after(self, step: int) -> int | None:
        """The step to stop after, once all have agreed on one; asked after each step `step`."""
        ...


class Signals:
    """Remembers the first SIGINT or SIGTERM; the second one of either ends the process at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = signum

    def stop(self) -> None:
        """As if this process had been told to end."""
        if self.received is None:
            self.received = signal.SIGTERM


@contextmanager
def watch_signals() -> Iterator[Signals]:
    """Within the block the first interrupt is only remembered; a block within a block shares its memory."""
    outer = signal.getsignal(signal.SIGINT)
    signals = outer if isinstance(outer, Signals) else Signals()
    before = {signum: signal.signal(signum, signals) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class LocalStopper:
    """All replicas are in this process: stop after the step at which the signal is seen."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals

    def before_sync(self, step: int, *, needs: int | None = None) -> None:
        pass

    def after_sync(self, step: int) -> None:
        pass

    def stop_after(self, step: int) -> int | None:
        return step if self._signals.received is not None else None


class KeyValueStore(Protocol):
    """The part of torch.distributed's stores that is needed."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class StoreStopper:
    """One of several processes that agree through a store. timeout_s: how long to wait for the others' proposals."""

    def __init__(
        self,
        store: KeyValueStore,
        *,
        rank: int,
        num_ranks: int,
        signals: Signals,
        timeout_s: float,
        poll_s: float = 0.01,
    ) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._signals = signals
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._stop_after: int | None = None

    def before_sync(self, step: int, *, needs: int | None = None) -> None:
        self._store.set(f"stop/sync/{self._rank}", f"{step} {step if needs is None else needs}")

    def after_sync(self, step: int) -> None:
        self._stop_after = self._agreed()

    def stop_after(self, step: int) -> int | None:
        if self._stop_after is None and self._signals.received is not None:
            self._store.set(f"stop/proposal/{self._rank}", str(step))
            self._stop_after = self._agree(step)
            self._store.set("stop/after", str(self._stop_after))
        return self._stop_after

    def _agreed(self) -> int | None:
        return int(self._store.get("stop/after")) if self._store.check(["stop/after"]) else None

    def _agree(self, step: int) -> int:
        deadline = time.monotonic() + self._timeout_s
        while (agreed := self._agreed()) is None:
            proposals = [self._proposal(rank, step) for rank in range(self._num_ranks)]
            known = [proposal for proposal in proposals if proposal is not None]
            if len(known) == self._num_ranks:
                return max(known)
            if time.monotonic() > deadline:
                silent = [rank for rank, proposal in enumerate(proposals) if proposal is None]
                raise TransportError(
                    f"replicas {silent} did not answer within {self._timeout_s:.0f} s when told to stop."
                )
            time.sleep(self._poll_s)
        return agreed

    def _proposal(self, rank: int, step: int) -> int | None:
        """What `rank` proposed, or the step where it waits for this process, which stands at `step`."""
        if self._store.check([f"stop/proposal/{rank}"]):
            return int(self._store.get(f"stop/proposal/{rank}"))
        if self._store.check([f"stop/sync/{rank}"]):
            standing, needed = map(int, self._store.get(f"stop/sync/{rank}").split())
            return standing if needed > step else None
        return None
