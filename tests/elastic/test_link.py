"""The island's end: it beats, hears, and comes back."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from coordinators import PATIENCE_S, Kept, Running, Talker, hello, rules, running, talking

from atoll.elastic.donate import fetch_state
from atoll.elastic.link import Link, LinkBack, LinkFailed, LinkLost, fetch_settings, fetch_status, operate
from atoll.elastic.messages import Beat, Donor, Finish, Go, Have, Leave, Reached, Ready, Refused, Welcome
from atoll.elastic.tokens import TokenRefused
from atoll.errors import TransportError


@pytest.fixture
def run(tmp_path: Path):
    with running(tmp_path) as run:
        yield run


def member(run: Running, number: int) -> dict:
    return next(one for one in run.status()["members"] if one["member"] == f"{number:016x}")


def wait_until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.005)


def test_an_island_is_welcomed(run: Running) -> None:
    island = Talker(run.token())
    with talking(island):
        assert island.hear(Welcome).seat == 0
        wait_until(lambda: member(run, 0)["connected"])
    wait_until(lambda: not member(run, 0)["connected"])


def test_beats_go_on_while_the_training_thread_computes(tmp_path: Path) -> None:
    steps = iter(range(10**9))
    with running(tmp_path) as run:
        link = Link(run.token(), hello, beat=lambda: Beat(next(steps), 5.0), beat_s=0.02)
        link.start()
        matrix = torch.randn(300, 300)
        wait_until(lambda: run.status()["members"])
        deadline = time.monotonic() + PATIENCE_S
        while member(run, 0)["step"] < 10:
            torch.mm(matrix, matrix)
            assert time.monotonic() < deadline, "the link starved"
        assert member(run, 0)["tokens_per_s"] == 5.0
        link.close()


def test_an_island_comes_back_after_the_coordinator_did_and_nothing_committed_is_lost(tmp_path: Path) -> None:
    kept = Kept()
    with contextlib.ExitStack() as stack:
        with running(tmp_path, kept) as run:
            token = run.token()
            islands = [Talker(token, number) for number in range(2)]
            stack.enter_context(talking(*islands))
            settle(islands)
            make_round(islands, 1, "anchor-0", "anchor-1")
        for island in islands:
            island.hear(LinkLost)
            island.said = replace(island.said, round=1, digest="anchor-1")
        with running(tmp_path, kept) as run:
            for island in islands:
                island.hear(LinkBack)
                welcome = island.settle()
                assert (welcome.round, welcome.digest, welcome.current) == (1, "anchor-1", True)
            make_round(islands, 2, "anchor-1", "anchor-2")
    assert [event["round"] for event in kept.events if event["event"] == "round"] == [1, 2]


def test_a_coordinator_that_lost_its_log_learns_what_is_committed_from_the_islands(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        with running(tmp_path) as run:
            token = run.token()
            islands = [Talker(token, number) for number in range(2)]
            stack.enter_context(talking(*islands))
            settle(islands)
            make_round(islands, 1, "anchor-0", "anchor-1")
        for island in islands:
            island.hear(LinkLost)
            island.said = replace(island.said, round=1, digest="anchor-1", founder=False)
        for path in (tmp_path / "coordinator").glob("log.sqlite*"):
            path.unlink()
        with running(tmp_path):
            for island in islands:
                island.hear(LinkBack)
                welcome = island.settle()
                assert (welcome.round, welcome.digest, welcome.current) == (1, "anchor-1", True)


def settle(islands: list[Talker]) -> None:
    for island in islands:
        island.settle()


def make_round(islands: list[Talker], number: int, before: str, after: str) -> None:
    """All offer, average to the same anchor, and hear that it is committed."""
    for island in islands:
        island.link.send(Ready(number, before, 10.0, 1.0, True, 10))
    for island in islands:
        go = island.hear(Go)
        island.link.send(Reached(number, go.attempt, after, base=before, norms=(1.0,) * len(go.participants)))
    wait_until(lambda: all(island.link.events.qsize() for island in islands))
    for island in islands:
        island.link.send(Have(number, after))


def test_what_is_sent_while_the_link_is_down_is_dropped(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        token = run.token()
    island = Talker(token)
    with talking(island):
        island.hear(LinkLost)
        assert not island.link.connected
        island.link.send(Leave("into the void"))
        with running(tmp_path) as run:
            island.hear(LinkBack)
            wait_until(lambda: run.status()["members"])
            assert member(run, 0)["state"] != "left"


def test_a_last_word_is_sent_before_the_link_closes(run: Running) -> None:
    island = Talker(run.token())
    with talking(island):
        island.hear(LinkBack)
        island.link.send(Leave("done"))
        island.link.close()
    wait_until(lambda: [one["state"] for one in run.status()["members"]] == ["left"])
    assert not island.link.connected
    assert all(thread.name != "atoll-link" for thread in threading.enumerate())


def test_closing_before_there_is_a_connection_ends_the_thread(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        token = run.token()
    never_started, looking = Link(token, hello), Talker(token).link
    for link in (never_started, looking):
        link.close()
        link.close()
    assert all(thread.name != "atoll-link" for thread in threading.enumerate())


def test_a_bug_in_what_the_link_calls_is_told_and_not_swallowed(run: Running) -> None:
    def broken() -> Beat:
        raise ZeroDivisionError("in the beat")

    link = Link(run.token(), hello, beat=broken, beat_s=0.01)
    link.start()
    event = link.events.get(timeout=PATIENCE_S)
    while not isinstance(event, LinkFailed):
        event = link.events.get(timeout=PATIENCE_S)
    assert "in the beat" in event.trace
    link.close()


def test_the_end_of_the_run_is_the_end_of_the_link(tmp_path: Path) -> None:
    with running(tmp_path, rules=rules(num_rounds=1)) as run:
        islands = [Talker(run.token(), number) for number in range(2)]
        with talking(*islands):
            settle(islands)
            make_round(islands, 1, "anchor-0", "anchor-1")
            for island in islands:
                assert island.hear(Finish) == Finish(1, 0)
        assert run.finished() == 0


# --- refusals ---


def test_a_wrong_secret_is_refused(run: Running) -> None:
    wrong = replace(run.token(), secret="0" * 64)
    for ask in (fetch_settings, fetch_status):
        with pytest.raises(TokenRefused, match="does not know this token"):
            ask(wrong)
    island = Talker(wrong)
    with talking(island):
        refused = island.hear(Refused)
    assert refused.exit_code == 3
    assert "does not know" in refused.why


def test_an_expired_token_is_refused(run: Running) -> None:
    token = run.token(lifetime_s=60.0)
    run.kept.now += 61
    with pytest.raises(TokenRefused, match="expired"):
        fetch_settings(token)


def test_another_key_at_the_address_is_refused(run: Running) -> None:
    with pytest.raises(TransportError, match="another host's key"):
        fetch_settings(replace(run.token(), fingerprint="ab" * 32))


def test_a_coordinator_that_is_down_is_told_with_what_a_loopback_token_means(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        token = run.token()
    with pytest.raises(TransportError, match=r"no coordinator answers(?s:.*)is this machine itself(?s:.*)--host"):
        fetch_settings(token)


def test_the_address_that_answers_is_taken(run: Running) -> None:
    token = run.token()
    several = replace(token, addresses=("127.0.0.1:1", *token.addresses))
    assert fetch_settings(several)["settings"] == {"inner_steps": 10}
    island = Talker(several)
    with talking(island):
        island.hear(LinkBack)


def test_an_island_of_other_settings_is_refused(run: Running) -> None:
    island = Talker(run.token(), settings_digest="others")
    with talking(island):
        refused = island.hear(Refused)
    assert (refused.exit_code, "settings" in refused.why) == (3, True)


def test_an_island_of_another_version_is_refused(run: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    token = run.token()
    monkeypatch.setattr("atoll.__version__", "9.9.0")
    with pytest.raises(TokenRefused, match="pip install atoll=="):
        fetch_settings(token)


def test_after_a_revocation_the_islands_are_out_and_stay_out(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        good, bad = run.token(), run.token()
        stays, goes = Talker(good, 0), Talker(bad, 1)
        with talking(stays, goes):
            stays.hear(LinkBack), goes.hear(LinkBack)
            wait_until(lambda: len(run.status()["liveness"]) == 2)
            answer = operate(run.token("operator"), "POST", "/v1/tokens/revoke", body={"id": bad.id})
            assert answer["members"] == [goes.said.member]
            assert goes.hear(Refused).exit_code == 4
            wait_until(lambda: len(run.status()["liveness"]) == 1)
            assert member(run, 0)["connected"]
        with pytest.raises(TokenRefused, match="revoked"):
            fetch_settings(bad)


# --- state, over the link ---


def test_a_joiner_fetches_the_state_from_the_island_that_the_coordinator_names(tmp_path: Path) -> None:
    state = {"weight": torch.randn(1000)}
    with running(tmp_path) as run:
        token = run.token()
        holders = [Talker(token, number) for number in range(2)]
        donor = Link(token, lambda: hello(2, port=port), beat_s=0.05)
        port = donor.serve_state(lambda: (state, {"round": 1}), host="127.0.0.1")
        with talking(*holders):
            settle(holders)
            make_round(holders, 1, "anchor-0", "anchor-1")
            for holder in holders:  # only the third can serve what it holds
                holder.link.send(Leave())
            wait_until(lambda: member(run, 0)["state"] == member(run, 1)["state"] == "left")
        joiner = Talker(token, 3, round=-1, digest="", founder=False)
        with talking(joiner):
            donor._hello = lambda: hello(2, port=port, round=1, digest="anchor-1")
            donor.start()
            told = joiner.hear(Donor)
            tensors, metadata = fetch_state(told, max_bytes=10_000)
            joiner.link.send(Have(1, "anchor-1"))
            wait_until(lambda: member(run, 3)["round"] == 1)
        donor.close()
    assert torch.equal(tensors["weight"], state["weight"])
    assert metadata == {"round": 1}
