"""The page of a run as the coordinator serves it: who sees what, and what a browser is told to do."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from coordinators import PATIENCE_S, Kept, Running, Talker, running, talking

from atoll.elastic.client import pinned_session
from atoll.elastic.link import operate
from atoll.elastic.page import FILES, FOLDER, SESSION_S
from atoll.elastic.tokens import TokenRefused

from .test_link import make_round, settle, wait_until


@dataclass
class Answer:
    status: int
    headers: Any
    text: str

    @property
    def cookie(self) -> str:
        """As a browser gives it back."""
        return self.headers["Set-Cookie"].split(";")[0]


def ask(run: Running, method: str, path: str, *, body: Any = None, **headers: str) -> Answer:
    """One request of somebody who has no token."""
    address = run.coordinator.address

    async def request() -> Answer:
        async with (
            pinned_session(address.fingerprint, headers=headers, timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session,
            session.request(method, f"https://127.0.0.1:{address.port}{path}", json=body) as response,
        ):
            return Answer(response.status, response.headers, await response.text())

    return asyncio.run(request())


def log_in(run: Running, role: str = "watch") -> str:
    """The cookie of a session."""
    answer = ask(run, "POST", "/page/login", body={"token": run.token_line(role)})
    assert answer.status == 204, answer.text
    return answer.cookie


@pytest.fixture
def run(tmp_path: Path):
    with running(tmp_path) as run:
        yield run


# --- who sees what ---


@pytest.mark.parametrize("path", ["/page/state", "/page/history", "/metrics", "/v1/status"])
def test_without_a_token_nothing_of_the_run_is_shown(run: Running, path: str) -> None:
    answer = ask(run, "GET", path)
    assert answer.status == 401
    assert run.coordinator.address.run not in answer.text
    assert ask(run, "GET", path, Cookie="__Host-atoll=1.9999999999.00").status == 401


def test_files_of_the_page_are_the_same_for_everybody(run: Running) -> None:
    for path, (name, kind) in FILES.items():
        answer = ask(run, "GET", path)
        assert (answer.status, answer.headers["Content-Type"]) == (200, f"{kind}; charset=utf-8"), path
        assert answer.text == (FOLDER / name).read_text()


@pytest.mark.parametrize(
    "path", ["/page/../page.py", "/page/%2e%2e/page.py", "/page/vendor/", "/page/app.js/x", "//etc/passwd"]
)
def test_nothing_but_the_files_of_the_page_is_served(run: Running, path: str) -> None:
    assert ask(run, "GET", path).status == 404


@pytest.mark.parametrize("role", ["operator", "watch"])
def test_a_token_is_exchanged_for_a_cookie_that_scripts_cannot_read(run: Running, role: str) -> None:
    answer = ask(run, "POST", "/page/login", body={"token": run.token_line(role)})
    flags = {flag.strip() for flag in answer.headers["Set-Cookie"].split(";")[1:]}
    assert {"HttpOnly", "Secure", "SameSite=Strict", "Path=/"} <= flags
    assert answer.cookie.startswith("__Host-")
    state = json.loads(ask(run, "GET", "/page/state", Cookie=answer.cookie).text)
    assert state["coordinator"]["run"] == run.coordinator.address.run


def test_a_join_token_opens_no_page(run: Running) -> None:
    answer = ask(run, "POST", "/page/login", body={"token": run.token_line("join")})
    assert (answer.status, "is for join" in answer.text) == (401, True)
    assert "Set-Cookie" not in answer.headers


@pytest.mark.parametrize(
    "body", [None, [], {}, {"token": 3}, {"token": ""}, {"token": "atoll1.AAAA"}, {"token": "x" * 9000}]
)
def test_a_login_that_makes_no_sense_is_refused(run: Running, body: Any) -> None:
    assert ask(run, "POST", "/page/login", body=body).status in (400, 401)


def test_who_watches_can_do_nothing_else(run: Running) -> None:
    watcher = run.token("watch")
    assert operate(watcher, "GET", "/v1/status")["round"] == 0
    for method, path in [("POST", "/v1/tokens"), ("GET", "/v1/tokens"), ("POST", "/v1/stop"), ("GET", "/v1/settings")]:
        with pytest.raises(TokenRefused, match="is for watch"):
            operate(watcher, method, path, body={})
    island = Talker(watcher)
    with talking(island):
        wait_until(lambda: island.link.events.qsize())
    assert "is for watch" in island.link.events.get().why


def test_a_session_changes_nothing(run: Running) -> None:
    cookie = log_in(run, "operator")
    for path in ("/v1/stop", "/v1/tokens", "/v1/tokens/revoke"):
        assert ask(run, "POST", path, body={}, Cookie=cookie).status == 401


def test_what_happened_before_a_restart_is_still_shown(tmp_path: Path) -> None:
    kept = Kept()
    with running(tmp_path, kept) as run:
        islands = [Talker(run.token(), number) for number in range(2)]
        with talking(*islands):
            settle(islands)
            make_round(islands, 1, "anchor-0", "anchor-1")
            wait_until(lambda: run.status()["round"] == 1)
    with running(tmp_path, kept, past=lambda: list(kept.events)) as run:
        past = json.loads(ask(run, "GET", "/page/history", Cookie=log_in(run)).text)
        assert [round["round"] for round in past["rounds"]] == [1]
        assert run.status()["summary"]["tokens"] == 20


# --- sessions ---


def test_a_session_that_was_altered_is_refused(run: Running) -> None:
    cookie = log_in(run)
    token, until, signature = cookie.split("=")[1].split(".")
    name = cookie.split("=")[0]
    for said in (
        f"{token}.{int(until) + 1}.{signature}",
        f"{token}.{until}.{signature[:-1]}",
        f"{until}.{signature}",
        ".",
    ):
        assert ask(run, "GET", "/page/state", Cookie=f"{name}={said}").status == 401


def test_a_session_ends_after_its_time_and_with_its_token(run: Running) -> None:
    token = run.token("watch")
    cookie = ask(run, "POST", "/page/login", body={"token": token.encode()}).cookie
    other = log_in(run, "operator")
    operate(run.token("operator"), "POST", "/v1/tokens/revoke", body={"id": token.id})
    assert ask(run, "GET", "/page/state", Cookie=cookie).status == 401
    assert ask(run, "GET", "/page/state", Cookie=other).status == 200
    run.kept.now += SESSION_S
    assert ask(run, "GET", "/page/state", Cookie=other).status == 401


def test_sessions_survive_the_coordinator(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        line = (tmp_path / "coordinator" / "operator.token").read_text()
        cookie = ask(run, "POST", "/page/login", body={"token": line}).cookie
    with running(tmp_path) as run:
        assert ask(run, "GET", "/page/state", Cookie=cookie).status == 200
        assert ask(run, "POST", "/page/login", body={"token": line}).status == 401, "that token is an old one"


def test_a_session_of_one_run_is_none_of_another(tmp_path: Path) -> None:
    with running(tmp_path / "one") as one, running(tmp_path / "two") as two:
        value = log_in(one).split("=")[1]
        name = log_in(two).split("=")[0]
        assert ask(two, "GET", "/page/state", Cookie=f"{name}={value}").status == 401


def test_logging_out_takes_the_cookie_away(run: Running) -> None:
    gone = ask(run, "POST", "/page/logout").headers["Set-Cookie"]
    assert "Max-Age=0" in gone


# --- what a browser is told ---


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/page/state", "/page/history"])
def test_browsers_are_told_to_run_nothing_from_elsewhere(run: Running, path: str) -> None:
    headers = ask(run, "GET", path, Cookie=log_in(run)).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    assert path == "/" or path.endswith(".js") or headers["Cache-Control"] == "no-store"


def test_the_page_holds_no_script_or_style_of_its_own_and_no_address_elsewhere() -> None:
    index = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=", index)
    for name in ("index.html", "app.js", "charts.js", "style.css"):
        assert not re.search(r"https?://(?!www\.w3\.org)", (FOLDER / name).read_text()), name


def test_history_is_sent_once_and_then_only_when_there_is_more(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        cookie = log_in(run)
        first = ask(run, "GET", "/page/history", Cookie=cookie)
        known = first.headers["ETag"]
        again = ask(run, "GET", "/page/history", Cookie=cookie, **{"If-None-Match": known})
        assert (first.status, again.status, again.text) == (200, 304, "")
        islands = [Talker(run.token(), number) for number in range(2)]
        with talking(*islands):
            settle(islands)
            make_round(islands, 1, "anchor-0", "anchor-1")
            wait_until(lambda: run.status()["round"] == 1)
            more = ask(run, "GET", "/page/history", Cookie=cookie, **{"If-None-Match": known})
    assert more.status == 200
    past = json.loads(more.text)
    assert [round["round"] for round in past["rounds"]] == [1]
    assert {event["what"] for event in past["events"]} == {"joined"}


def test_tokens_and_cookies_are_in_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    with caplog.at_level(logging.DEBUG), running(tmp_path, kept) as run:
        token = run.token("watch")
        cookie = ask(run, "POST", "/page/login", body={"token": token.encode()}).cookie
        ask(run, "POST", "/page/login", body={"token": token.encode()[:-3]})
        for path in ("/page/state", "/v1/stop", "/metrics"):
            ask(run, "GET", path, Cookie=cookie)
            ask(run, "POST", path, Authorization=token.bearer)
    told = "\n".join([*kept.lines, *map(json.dumps, kept.events), caplog.text])
    for secret in (token.secret, token.encode(), cookie.split("=")[1]):
        assert secret not in told


def test_libraries_of_the_page_are_the_files_that_the_docs_name_and_have_their_licences() -> None:
    vendor = FOLDER / "vendor"
    told = (FOLDER.parents[2] / "docs" / "dependencies.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| .+? \| `([0-9a-f]{64})` \|", told, re.MULTILINE))
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in vendor.glob("*.[jc]s*")}
    assert rows == files
    assert {path.name for path in vendor.glob("LICENSE.*")} == {"LICENSE.preact", "LICENSE.htm", "LICENSE.uPlot"}
