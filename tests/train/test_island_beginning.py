"""An island that was never let in: it does not wait for ever."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest
from train.test_crew import island_worker
from train.tiny import tiny_config

from atoll.elastic import messages as m
from atoll.elastic.link import LinkBack, LinkLost
from atoll.errors import TransportError
from atoll.train import island as island_module
from atoll.train.build import make_schedule
from atoll.train.crew import Crew
from atoll.train.island import Island


class Silence:
    """A link that says only what it is given to say."""

    def __init__(self, *events: Any) -> None:
        self.events: queue.Queue[Any] = queue.Queue()
        for event in events:
            self.events.put(event)

    def send(self, message: Any, *, connection: int | None = None) -> None:
        """Nobody hears it."""


class Listener:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def stepped(self, report: Any, *, step: int) -> None:
        raise AssertionError("nothing is to be trained")

    def committed(self, landing: Any) -> None:
        raise AssertionError("nothing was committed")

    def line(self, text: str) -> None:
        self.lines.append(text)


def make_island(folder: Path, link: Silence, watcher: Listener) -> Island:
    config = tiny_config(folder, elastic=True, engine="torchdist")
    return Island(
        config,
        introduction=m.Hello("ab" * 8, "here", "1", "", "127.0.0.1", 0, pid=1, num_workers=1, round=-1, digest=""),
        crew=Crew(island_worker(config), {}),
        digest="",
        schedule=make_schedule(config),
        link=link,
        watcher=watcher,
        fetch=lambda donor: pytest.fail("there is no donor"),
        should_stop=lambda: False,
    )


def test_an_island_that_is_never_let_in_says_so_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(island_module, "FIRST_WORD_S", 0.0)
    watcher = Listener()
    with pytest.raises(TransportError, match="has said nothing") as caught:
        make_island(tmp_path, Silence(LinkLost("nobody answers")), watcher).run()
    assert caught.value.exit_code == 3
    assert len(str(caught.value).splitlines()) <= 3


def test_an_island_that_comes_when_the_run_is_over_ends_well(tmp_path: Path) -> None:
    island = make_island(tmp_path, Silence(LinkBack(1), m.Finish(4)), Listener())
    island.run()
    assert island.finish is not None and not island.has_state
