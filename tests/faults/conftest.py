"""Fleets of real processes in a folder that goes away, and the one server that they are forked from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from faults.fleet import Fleet, stop_server


@pytest.fixture(scope="session", autouse=True)
def _server() -> Iterator[None]:
    yield
    stop_server()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Makes and starts a fleet; the checks that hold for every run are made at the end."""
    with ExitStack() as stack:

        def start(**settings: Any) -> Fleet:
            fleet = stack.enter_context(Fleet(tmp_path, **settings))
            fleet.start()
            return fleet

        yield start
