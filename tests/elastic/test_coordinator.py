"""The service around the state machine: who may do what, what it keeps, and what strangers cannot do to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from coordinators import PATIENCE_S, Kept, Running, Talker, hello, rules, running, service, talking

import atoll
from atoll.elastic import serving
from atoll.elastic.certs import client_context
from atoll.elastic.client import pinned_session
from atoll.elastic.coordinator import Coordinator, read_address
from atoll.elastic.driver import RATE, Bucket, describe_wait
from atoll.elastic.link import LinkBack, LinkLost, fetch_settings, fetch_status, operate
from atoll.elastic.log import Log
from atoll.elastic.messages import Beat, Finish, Go, Lease, Reached, Ready, Refused, Want, Welcome
from atoll.elastic.serving import MEMBER, MEMBER_KEY, VERSION
from atoll.elastic.tokens import Token, TokenRefused, parse_token
from atoll.elastic.wire import encode
from atoll.errors import AtollError, ConfigError, StorageError

from .test_link import make_round, member, settle, wait_until


@pytest.fixture
def run(tmp_path: Path):
    with running(tmp_path) as run:
        yield run


def start_fails(folder: Path, error: type[Exception], match: str, **changes) -> None:
    async def attempt() -> None:
        coordinator = Coordinator(service(folder, Kept(), **changes))
        try:
            await coordinator.start()
        finally:
            await coordinator.stop()

    with pytest.raises(error, match=match):
        asyncio.run(attempt())


# --- what it says ---


def test_a_joiner_is_told_the_settings_as_plain_data(run: Running) -> None:
    told = fetch_settings(run.token())
    assert told["settings"] == {"inner_steps": 10}
    assert (told["settings_digest"], told["run"]) == ("settings", run.coordinator.address.run)


def test_status_is_json_without_secrets(run: Running) -> None:
    island = Talker(run.token())
    with talking(island):
        island.hear(LinkBack)
        wait_until(lambda: run.status()["members"])
        status = fetch_status(run.token())
    assert status["members"][0]["name"] == "island-0"
    assert {"round", "liveness", "participation", "breadth", "alarms", "coordinator"} <= status.keys()
    assert island.link._token.secret not in json.dumps(status)


def test_events_of_the_run_have_the_keys_that_readers_know(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        islands = [Talker(run.token(), number) for number in range(2)]
        with talking(*islands):
            settle(islands)
            make_round(islands, 1, "anchor-0", "anchor-1")
            wait_until(lambda: any(event["event"] == "round" for event in run.kept.events))
    kept = run.kept
    joined = [event for event in kept.events if event["event"] == "member" and event["what"] == "joined"]
    assert sorted((event["replica"], event["pid"], event["round"]) for event in joined) == [(0, 100, 0), (1, 101, 0)]
    (event,) = [event for event in kept.events if event["event"] == "round"]
    assert (event["round"], event["step"], event["anchor_digest"], event["committed"]) == (1, 10, "anchor-1", True)
    assert (event["replicas"], event["contributors"], event["weights"]) == (2, 2, {"0": 10.0, "1": 10.0})
    expected = "payload_bytes sync_s exposed_s inner_s delta_norm cosine_mean refused waited_s wire_bytes".split()
    assert set(expected) <= event.keys()
    assert any(line.startswith("round 1 committed") for line in kept.lines)


def test_who_is_waited_for_is_told_only_while_somebody_waits() -> None:
    training = {"state": "training"}
    base = {
        "waiting_for": ["a", "b\n"],
        "settled": True,
        "liveness": [0, 1],
        "averaging": False,
        "finished": None,
        "round": 4,
        "members": [training, training],
    }
    assert describe_wait(base) == ""
    assert describe_wait(base | {"members": [training, {"state": "ready"}]}) == "round 5: waiting for a, b?"
    assert describe_wait(base | {"averaging": True}) == "round 5: averaging, waiting for a, b?"
    assert "waiting" in describe_wait(base | {"settled": False, "waiting_for": ["1 more islands"]})


# --- who may do what ---


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/tokens"), ("POST", "/v1/tokens"), ("POST", "/v1/tokens/revoke"), ("POST", "/v1/stop")],
)
def test_an_island_cannot_use_the_operators_verbs(run: Running, method: str, path: str) -> None:
    with pytest.raises(TokenRefused, match="is for join"):
        operate(run.token(), method, path, body={})
    assert any("refused" in line and path in line for line in run.kept.lines)


def test_an_operator_makes_lists_and_revokes_tokens(run: Running) -> None:
    operator = run.token("operator")
    made = operate(operator, "POST", "/v1/tokens", body={"lifetime_s": 3600, "note": "lab\x1b[2J"})["token"]
    token = parse_token(made)
    assert fetch_settings(token)["run"] == token.run
    listed = {info["id"]: info for info in operate(operator, "GET", "/v1/tokens")["tokens"]}
    assert (listed[token.id]["state"], listed[token.id]["note"]) == ("valid", "lab?[2J")
    assert token.secret not in json.dumps(listed)
    operate(operator, "POST", "/v1/tokens/revoke", body={"id": token.id[:8]})
    with pytest.raises(TokenRefused, match="revoked"):
        fetch_settings(token)


@pytest.mark.parametrize(
    "body",
    [{"role": "root"}, {"role": ["join"]}, {"lifetime_s": -1}, {"lifetime_s": True}, {"lifetime_s": 1e99}, {"note": 3}],
)
def test_a_token_that_cannot_be_made_is_refused(run: Running, body: dict) -> None:
    with pytest.raises(ConfigError):
        operate(run.token("operator"), "POST", "/v1/tokens", body=body)


def test_stopping_ends_the_islands_in_good_order(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        island = Talker(run.token())
        with talking(island):
            island.hear(LinkBack)
            wait_until(lambda: run.status()["members"])
            operate(run.token("operator"), "POST", "/v1/stop", body={})
            assert island.hear(Finish).exit_code == 75
        assert run.finished() == 75


# --- members ---


async def speak(token: Token, *frames: str | bytes, member: str = "0" * 16, key: str = "1" * 64) -> list[str]:
    """Connect as a member would, say these frames, and hear all until the coordinator closes the connection."""
    headers = {"Authorization": token.bearer, MEMBER: member, MEMBER_KEY: key, VERSION: atoll.__version__}
    heard = []
    async with (
        pinned_session(token.fingerprint, headers=headers, timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session,
        session.ws_connect(f"https://{token.addresses[0]}/v1/member") as connection,
    ):
        for frame in frames:
            await (connection.send_str(frame) if isinstance(frame, str) else connection.send_bytes(frame))
        async for frame in connection:
            heard.append(frame.data)
    return heard


def told(run: Running, *frames: str | bytes, **about: str) -> list[str]:
    return asyncio.run(asyncio.wait_for(speak(run.token(), *frames, **about), PATIENCE_S))


@pytest.mark.parametrize(
    "frame",
    [
        "",
        "{}",
        b"\x80\x04]",
        encode(Beat()),
        encode(Welcome("b", 0, 0, "", True, 1, 1.0)),
        "[" * 1000,
        "x" * 70_000,
    ],
    ids=["empty", "no kind", "binary", "no hello", "not a member's", "deep", "long"],
)
def test_a_connection_that_does_not_say_hello_is_closed(run: Running, frame: str | bytes) -> None:
    assert not [text for text in told(run, frame) if "Welcome" in str(text)]
    assert run.status()["members"] == []


def test_a_member_that_sends_what_is_no_message_is_cut_off_and_named(run: Running) -> None:
    told(run, encode(hello()), '{"kind": "Want", "samples": "all"}')
    wait_until(lambda: any(event["event"] == "fault" for event in run.kept.events))
    (fault,) = [event for event in run.kept.events if event["event"] == "fault"]
    assert (fault["what"], "Want.samples" in fault["detail"]) == ("malformed", True)
    wait_until(lambda: not member(run, 0)["connected"])


def test_an_island_cannot_speak_for_another(run: Running) -> None:
    refused = json.loads(told(run, encode(hello(7)))[0])
    assert (refused["kind"], "another" in refused["why"]) == ("Refused", True)


def test_an_island_cannot_take_the_place_of_another(run: Running) -> None:
    token = run.token()
    island = Talker(token)
    with talking(island):
        island.hear(LinkBack)
        wait_until(lambda: run.status()["members"])
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            asyncio.run(speak(token, encode(hello()), member=island.said.member, key="f" * 64))
        assert caught.value.status == 401
        assert member(run, 0)["connected"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"address": "0.0.0.0"}, "cannot reach"),
        ({"address": "8.8.8.8"}, "public"),
        ({"address": "island"}, "not an IP address"),
        ({"port": 70_000}, "no port"),
    ],
)
def test_an_address_that_others_cannot_use_is_refused(run: Running, changes: dict, why: str) -> None:
    refused = json.loads(told(run, encode(hello(**changes)))[0])
    assert refused["kind"] == "Refused"
    assert why in refused["why"]


def test_a_newer_connection_of_a_member_takes_the_place_of_the_older(run: Running) -> None:
    token = run.token()
    older, newer = Talker(token), Talker(token, 1)
    with talking(older, newer):
        older.hear(LinkBack)
        wait_until(lambda: run.status()["members"])
        newer.link.close()
        twin = Talker.__new__(Talker)
        twin.said, twin.link = older.said, type(older.link)(token, lambda: older.said, beat_s=0.05)
        twin.link._member_key = older.link._member_key
        twin.link.start()
        with talking(twin):
            twin.hear(Welcome)
            older.hear(LinkLost)


def test_a_member_that_floods_is_cut_off() -> None:
    bucket = Bucket(0.0)
    assert all(bucket.take(second / RATE) for second in range(2000)), "a fast island is no flood"
    assert not all(bucket.take(2000 / RATE) for _ in range(2000))


def test_what_is_recorded_is_on_disk_before_what_follows_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails at the commit of round 1: nobody is told that it is committed, and the service ends."""
    append = Log.append

    def full(log: Log, entries, **about) -> None:
        if any(entry.kind == "committed" for entry in entries):
            raise StorageError("the disk is full.")
        append(log, entries, **about)

    monkeypatch.setattr(Log, "append", full)
    with running(tmp_path) as run:
        islands = [Talker(run.token(), number) for number in range(2)]
        with talking(*islands):
            for island in islands:
                island.settle()
                island.link.send(Ready(1, "anchor-0", 10.0, 1.0, True, 10))
            for island in islands:
                island.link.send(Reached(1, island.hear(Go).attempt, "anchor-1"))
            with pytest.raises(StorageError, match="full"):
                run.finished()
            assert all(not island.link.events.qsize() for island in islands)


# --- the folder ---


def test_the_folder_says_where_the_coordinator_is_and_keeps_its_secrets(run: Running, tmp_path: Path) -> None:
    address = read_address(tmp_path)
    assert (address["address"], address["port"], address["pid"]) == (
        "127.0.0.1",
        run.coordinator.address.port,
        os.getpid(),
    )
    private = [tmp_path / "coordinator" / name for name in ("operator.token", "log.sqlite", "identity/key.pem")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    operator = parse_token(private[0].read_text())
    assert operator.secret not in (tmp_path / "coordinator.json").read_text()
    assert operate(operator, "GET", "/v1/tokens")["tokens"]


def test_no_token_is_ever_said_or_logged(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        token = run.token()
        island = Talker(token)
        with talking(island):
            island.hear(LinkBack)
            with contextlib.suppress(TokenRefused):
                operate(token, "POST", "/v1/stop", body={})
    told_to_all = json.dumps(run.kept.events) + "\n".join(run.kept.lines)
    assert run.kept.lines
    assert token.secret not in told_to_all
    assert "atoll1." not in told_to_all


def test_a_coordinator_comes_back_at_its_port(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        first = run.coordinator.address
        token = run.token()
    with running(tmp_path) as run:
        assert (run.coordinator.address.port, run.coordinator.address.run) == (first.port, first.run)
        assert fetch_settings(token)["run"] == first.run


def test_a_port_that_was_its_own_and_is_taken_is_told(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        port = run.coordinator.address.port
    with socket.create_server(("127.0.0.1", port)):
        start_fails(tmp_path, ConfigError, rf"port {port}(?s:.*)taken by another program")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        start_fails(tmp_path, ConfigError, rf"port {port} of 127\.0\.0\.1 cannot be used", port=port)


def test_two_coordinators_do_not_serve_one_run(run: Running, tmp_path: Path) -> None:
    start_fails(tmp_path, ConfigError, "another coordinator serves")


def test_a_run_of_other_settings_is_refused(tmp_path: Path) -> None:
    with running(tmp_path):
        pass
    start_fails(tmp_path, ConfigError, "other settings", rules=rules(settings_digest="others"))


def test_a_damaged_log_is_told(tmp_path: Path) -> None:
    with running(tmp_path):
        pass
    (tmp_path / "coordinator" / "log.sqlite").write_bytes(b"garbage" * 1000)
    start_fails(tmp_path, AtollError, "damaged")
    assert read_address(tmp_path)


def test_a_coordinator_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """A process of its own, SIGKILL after a committed round, and another one on the same folder."""
    code = (
        "import sys, atoll; from pathlib import Path\n"
        "from atoll.elastic.coordinator import run_coordinator\n"
        "from atoll.elastic.driver import Service\n"
        "from atoll.elastic.membership import Rules\n"
        "rules = Rules(num_rounds=2, settings_digest='settings', version=atoll.__version__, replicas=2, quorum=1.0)\n"
        "nobody = lambda what: None\n"
        "service = Service({}, rules, Path(sys.argv[1]), '127.0.0.1', 0, lambda r: r, nobody, nobody)\n"
        "run_coordinator(service, started=lambda c: print(c.create_token('join'), flush=True))\n"
    )

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)

    with contextlib.ExitStack() as stack:
        first = stack.enter_context(start())
        stack.callback(first.kill)
        assert first.stdout is not None
        token = parse_token(first.stdout.readline())
        islands = [Talker(token, number) for number in range(2)]
        stack.enter_context(talking(*islands))
        settle(islands)
        make_round(islands, 1, "anchor-0", "anchor-1")
        for island in islands:
            island.said = replace(island.said, round=1, digest="anchor-1")
        first.send_signal(signal.SIGKILL)
        first.wait()
        second = stack.enter_context(start())
        stack.callback(second.kill)
        for island in islands:
            island.hear(LinkLost)
            island.hear(LinkBack)
            assert island.settle().round == 1
        make_round(islands, 2, "anchor-1", "anchor-2")
        for island in islands:
            assert island.hear(Finish).exit_code == 0
            island.link.close()
        assert second.wait(PATIENCE_S) == 0


def test_sigterm_ends_the_service_and_not_the_run(tmp_path: Path) -> None:
    code = (
        "import sys, atoll; from pathlib import Path\n"
        "from atoll.elastic.coordinator import run_coordinator\n"
        "from atoll.elastic.driver import Service\n"
        "from atoll.elastic.membership import Rules\n"
        "rules = Rules(num_rounds=2, settings_digest='settings', version=atoll.__version__, replicas=1)\n"
        "service = Service({}, rules, Path(sys.argv[1]), '127.0.0.1', 0, lambda r: r, lambda event: None, print)\n"
        "sys.exit(run_coordinator(service, started=lambda c: print(c.create_token('join'), flush=True)))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        token = parse_token(process.stdout.readline())
        island = Talker(token)
        with talking(island):
            island.hear(Welcome)
            process.send_signal(signal.SIGTERM)
            island.hear(LinkLost)
        assert "the islands wait" in process.stdout.read()
        assert process.wait(PATIENCE_S) == 75


# --- strangers ---


def test_strangers_do_not_keep_an_island_out(run: Running) -> None:
    """Half-open connections, and handshakes with garbage and with wrong tokens; an island joins among them."""
    token = run.token()
    place = ("127.0.0.1", run.coordinator.address.port)
    with contextlib.ExitStack() as stack:
        for number in range(200):
            stranger = stack.enter_context(socket.create_connection(place))
            if number % 2:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        island = Talker(token)
        with talking(island):
            began = time.monotonic()
            island.hear(LinkBack)
            assert time.monotonic() - began < serving.STRANGER_S, "it had to wait until the strangers were cut off"
            for number in range(20):
                with pytest.raises(aiohttp.WSServerHandshakeError):
                    asyncio.run(speak(replace(token, secret=f"{number:064x}")))
            wait_until(lambda: member(run, 0)["connected"])


def test_a_connection_that_says_nothing_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "STRANGER_S", 0.2)
    with running(tmp_path) as run:
        token = run.token()
        place = ("127.0.0.1", run.coordinator.address.port)
        with socket.create_connection(place) as half_open:
            half_open.settimeout(PATIENCE_S)
            assert half_open.recv(1) == b"", "no TLS handshake"
        with (
            socket.create_connection(place) as plain,
            client_context(token.fingerprint).wrap_socket(plain) as silent,
        ):
            silent.settimeout(PATIENCE_S)
            with contextlib.suppress(ssl.SSLEOFError, ConnectionResetError):
                assert silent.recv(1) == b"", "no request"


def test_of_too_many_strangers_the_oldest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_STRANGERS", 2)
    with running(tmp_path) as run, contextlib.ExitStack() as stack:
        token = run.token()
        place = ("127.0.0.1", run.coordinator.address.port)
        silent = [
            stack.enter_context(
                client_context(token.fingerprint).wrap_socket(stack.enter_context(socket.create_connection(place)))
            )
            for _ in range(3)
        ]
        silent[0].settimeout(PATIENCE_S)
        with contextlib.suppress(ssl.SSLEOFError, ConnectionResetError):
            assert silent[0].recv(1) == b""
        assert fetch_settings(token)


def test_a_request_that_is_too_large_is_refused(run: Running) -> None:
    with pytest.raises(AtollError):
        operate(run.token("operator"), "POST", "/v1/tokens", body={"note": "x" * 200_000})
    assert fetch_settings(run.token())


def test_an_unread_welcome_leaves_the_others_alone(run: Running) -> None:
    """A member that reads nothing: the others are served."""
    token = run.token()
    deaf, island = Talker(token, 0), Talker(token, 1)
    with talking(deaf, island):
        deaf.hear(LinkBack), island.hear(LinkBack)
        wait_until(lambda: len(run.status()["liveness"]) == 2)
        for _ in range(50):
            deaf.link.send(Want(1))
        island.link.send(Want(4))
        assert island.hear(Lease).ranges
        assert not [event for event in list(deaf.link.events.queue) if isinstance(event, Refused)]


def test_every_island_hears_that_the_run_is_over_also_after_a_restart(tmp_path: Path) -> None:
    """Killed between the last commit and its Finish: the first to come back must not be the only one to hear it."""
    with contextlib.ExitStack() as stack:
        with running(tmp_path) as run:
            islands = [Talker(run.token(), number) for number in range(2)]
            stack.enter_context(talking(*islands))
            settle(islands)
            make_round(islands, 1, "anchor-0", "anchor-1")
        for island in islands:
            island.hear(LinkLost)
            island.said = replace(island.said, round=1, digest="anchor-1")
        with running(tmp_path, rules=rules(num_rounds=1)) as run:
            for island in islands:
                assert island.hear(Finish).round == 1
                island.link.close()
                assert run.coordinator._driver.is_waited_on, "another one may come"
