"""The page on the machine of whoever looks, by `atoll status RUN --page`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from coordinators import PATIENCE_S, running

from atoll.elastic.page_forward import serve_page
from atoll.elastic.tokens import Token, TokenRefused, parse_token
from atoll.errors import TransportError


def served(token: Callable[[], Token], use: Callable[[aiohttp.ClientSession, str, str], Awaitable[Any]]) -> Any:
    """Serve the page of a run, and `use` it: a client, its address, and the secret of the link."""

    async def main() -> Any:
        link: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.ensure_future(serve_page(token, port=0, started=link.set_result))
        try:
            await asyncio.wait([serving, link], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            place, _, code = link.result().partition("/#")
            async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
                return await use(session, place, code)
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    return asyncio.run(main())


def operator_of(folder: Path) -> Token:
    return parse_token((folder / "coordinator" / "operator.token").read_text())


async def log_in(session: aiohttp.ClientSession, place: str, code: str) -> int:
    async with session.post(f"{place}/page/login", json={"token": code}) as answer:
        return answer.status


async def look(session: aiohttp.ClientSession, place: str, path: str = "/page/state", **headers: str) -> Any:
    async with session.get(place + path, headers=headers) as answer:
        text = await answer.text()
        return json.loads(text) if answer.status == 200 else answer.status


def test_the_link_opens_the_page_once(tmp_path: Path) -> None:
    async def use(session: aiohttp.ClientSession, place: str, code: str) -> None:
        assert place.startswith("http://127.0.0.1:")
        assert await look(session, place) == 401
        assert await log_in(session, place, "guess") == 401
        async with session.post(f"{place}/page/login", json={"token": code}) as answer:
            flags = answer.headers["Set-Cookie"]
            assert answer.status == 204
            assert "HttpOnly" in flags
            assert "SameSite=Strict" in flags
        assert (await look(session, place))["num_rounds"] == 3
        assert (await look(session, place, "/page/history"))["rounds"] == []
        assert await log_in(session, place, code) == 401, "a second time"

    with running(tmp_path):
        served(lambda: operator_of(tmp_path), use)


def test_a_page_of_another_name_is_shown_nothing(tmp_path: Path) -> None:
    """A site whose name is made to lead here has the browser's cookies for its own name, and must get no further."""

    async def use(session: aiohttp.ClientSession, place: str, code: str) -> None:
        await log_in(session, place, code)
        assert await look(session, place, Host="evil.example") == 401
        assert (await look(session, place))["round"] == 0

    with running(tmp_path):
        served(lambda: operator_of(tmp_path), use)


def test_the_page_goes_on_when_the_coordinator_comes_back(tmp_path: Path) -> None:
    """Meanwhile it says so; the operator's token is a new one afterwards."""
    with running(tmp_path) as first:
        before = operator_of(tmp_path)
        port = first.coordinator.address.port

    async def use(session: aiohttp.ClientSession, place: str, code: str) -> None:
        await log_in(session, place, code)
        assert (await look(session, place))["coordinator"]["port"] == port
        await asyncio.to_thread(first.__exit__, None, None, None)
        assert await look(session, place) == 503
        with running(tmp_path):
            assert operator_of(tmp_path) != before
            assert (await look(session, place))["coordinator"]["port"] == port

    first = running(tmp_path)
    first.__enter__()
    served(lambda: operator_of(tmp_path), use)


def test_a_token_that_may_not_look_is_told_before_there_is_a_link(tmp_path: Path) -> None:
    async def use(*given: Any) -> None:
        raise AssertionError("there is a link")

    with running(tmp_path) as run, pytest.raises((TokenRefused, TransportError), match="is for join"):
        served(lambda: run.token("join"), use)
