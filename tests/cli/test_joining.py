"""`atoll host`, and what is looked at before a machine joins."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinators import running

from atoll.cli.host import invitation, port_range
from atoll.cli.joining import data_words, disk_words, link_words, memory_words
from atoll.elastic.addresses import dials
from atoll.elastic.coordinator import _is_translated
from atoll.elastic.link import LinkRate, measure_link
from atoll.elastic.tokens import Token
from atoll.errors import ConfigError, StorageError
from atoll.train.config import build_config

TOKEN = Token(("10.0.0.5:29400",), "ab" * 32, "12" * 8, "34" * 8, 0.0, "join", "cd" * 32).encode()


def test_the_invitation_shows_the_token_to_a_terminal_only(tmp_path: Path) -> None:
    (tmp_path / "coordinator").mkdir()
    assert TOKEN in "\n".join(invitation(TOKEN, tmp_path, to_terminal=True))
    lines = "\n".join(invitation(TOKEN, tmp_path, to_terminal=False))
    assert TOKEN not in lines
    assert "10.0.0.5:29400" in lines
    assert (tmp_path / "coordinator/join.token").read_text() == TOKEN


def test_ports_are_those_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "range").write_text("32768\t60999\n")
    assert port_range(tmp_path / "range") == "32768-60999"


def test_a_sync_is_foretold_from_the_slower_direction() -> None:
    words = link_words(LinkRate(0.0, up=1e6, down=2e6), 1_000_000, inner_s=9.0)
    assert "about 1 s" in words
    assert "10% of a round" in words


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="memory"):
        memory_words(build_config({"device": "cpu"}), 10**15)
    with pytest.raises(StorageError, match="disk"):
        disk_words(tmp_path, 10**15)


def test_texts_that_are_elsewhere_are_told() -> None:
    with pytest.raises(ConfigError, match="not on this machine"):
        data_words(build_config({"data": {"source": "/nowhere/texts"}}))


def test_the_link_to_a_coordinator_is_measured(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        link = measure_link(run.token())
    assert min(link.latency_s, link.up, link.down) > 0


def test_an_island_behind_a_router_is_known_by_its_address() -> None:
    assert _is_translated("192.168.0.2", "10.77.0.2")
    assert not _is_translated("10.77.0.2", "::ffff:10.77.0.2")
    assert dials("192.168.0.2", "10.77.0.1")
    assert not dials("10.1.0.2", "10.77.0.1")
