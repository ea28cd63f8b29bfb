"""A coordinator on loopback in a thread of its own, and islands that only talk: for tests."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import atoll
from atoll.elastic.coordinator import Coordinator
from atoll.elastic.driver import Service
from atoll.elastic.link import Link
from atoll.elastic.membership import Rules
from atoll.elastic.messages import Hello, Welcome
from atoll.elastic.tokens import Token, parse_token

PATIENCE_S = 10.0  # before a test that waits for what never comes gives up

E = TypeVar("E")


def rules(**changes: Any) -> Rules:
    """A run of three rounds by two islands. A round waits for both, however slow the machine is."""
    base = Rules(3, "settings", atoll.__version__, replicas=2, quorum=1.0, beat_s=0.05, lost_after_s=30.0)
    return replace(base, **changes)


@dataclass
class Kept:
    """What a coordinator told. clock: of its tokens, to be moved by the test."""

    events: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    now: float = 1_000_000.0


def service(folder: Path, kept: Kept, **changes: Any) -> Service:
    base = Service(
        settings={"inner_steps": 10},
        rules=rules(),
        folder=folder,
        host="127.0.0.1",
        port=0,
        step_of=lambda round: 10 * round,
        metrics=lambda event: kept.events.append(dict(event)),
        say=kept.lines.append,
        clock=lambda: kept.now,
    )
    return replace(base, **changes)


class Running:
    """A coordinator that is served. token: lets islands in."""

    def __init__(self, coordinator: Coordinator, loop: asyncio.AbstractEventLoop, kept: Kept) -> None:
        self.coordinator = coordinator
        self.kept = kept
        self._loop = loop

    def token(self, role: str = "join", **about: Any) -> Token:
        return parse_token(self.token_line(role, **about))

    def token_line(self, role: str = "join", **about: Any) -> str:
        async def create() -> str:
            return self.coordinator.create_token(role, **about)

        return asyncio.run_coroutine_threadsafe(create(), self._loop).result(PATIENCE_S)

    def status(self) -> dict[str, Any]:
        async def ask() -> dict[str, Any]:
            return self.coordinator.status()

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(PATIENCE_S)

    def finished(self) -> int:
        return asyncio.run_coroutine_threadsafe(self.coordinator.finished(), self._loop).result(PATIENCE_S)


@contextmanager
def running(folder: Path, kept: Kept | None = None, **changes: Any) -> Iterator[Running]:
    """Serve the run in `folder` within the block. Leaving it is as abrupt as the end of the process is for members."""
    kept = kept or Kept()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    coordinator = Coordinator(service(folder, kept, **changes))
    try:
        asyncio.run_coroutine_threadsafe(coordinator.start(), loop).result(PATIENCE_S)
        yield Running(coordinator, loop, kept)
    finally:
        asyncio.run_coroutine_threadsafe(coordinator.stop(), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


def hello(number: int = 0, **changes: Any) -> Hello:
    base = Hello(
        member=f"{number:016x}",
        name=f"island-{number}",
        version=atoll.__version__,
        settings_digest="settings",
        address="127.0.0.1",
        port=1,
        pid=100 + number,
        num_workers=1,
        round=0,
        digest="anchor-0",
        founder=True,
        seat=number,
    )
    return replace(base, **changes)


class Talker:
    """An island that only talks."""

    def __init__(self, token: Token, number: int = 0, **about: Any) -> None:
        self.said = hello(number, **about)
        self.link = Link(token, lambda: self.said, beat_s=0.05)
        self.link.start()

    def hear(self, kind: type[E]) -> E:
        """The next event of that kind; those before it are passed over."""
        while True:
            try:
                event = self.link.events.get(timeout=PATIENCE_S)
            except queue.Empty:
                raise AssertionError(f"no {kind.__name__} came") from None
            if isinstance(event, kind):
                return event

    def settle(self) -> Welcome:
        """The Welcome of a coordinator that knows what is committed."""
        while not (welcome := self.hear(Welcome)).settled:
            pass
        return welcome


@contextmanager
def talking(*talkers: Talker) -> Iterator[None]:
    """Close the links of `talkers` at the end, whatever happens."""
    try:
        yield
    finally:
        for talker in talkers:
            talker.link.close()
