"""The page of a run: its files, who may see it, and what it shows.

    browser ── GET / ──▶ page_files/index.html, app.js, ... : the same for everybody, and nothing of the run in it
            ── POST /page/login {"token": ...} ──▶ a cookie that no script can read
            ── GET /page/state, each second ──▶ what `atoll status --json` says
            ── GET /page/history, by its ETag ──▶ curves, rounds, events

A page is served by the coordinator (`OwnPage`) and, on the machine of whoever looks, by `atoll status RUN --page`
(`page_forward`). It only shows: nothing can be changed by way of it. Nothing is loaded from elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from atoll.elastic.serving import WHY
from atoll.elastic.tokens import OPERATOR, PREFIX, WATCH, TokenInfo, TokenRefused, TokenStore, parse_token
from atoll.elastic.wire import WireError, load_json
from atoll.errors import AtollError, ConfigError

FOLDER = Path(__file__).parent / "page_files"
# address -> file, content type
FILES = {
    "/": ("index.html", "text/html"),
    "/page/app.js": ("app.js", "text/javascript"),
    "/page/charts.js": ("charts.js", "text/javascript"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
    "/page/vendor/preact.min.js": ("vendor/preact.min.js", "text/javascript"),
    "/page/vendor/hooks.umd.js": ("vendor/hooks.umd.js", "text/javascript"),
    "/page/vendor/htm.umd.js": ("vendor/htm.umd.js", "text/javascript"),
    "/page/vendor/uPlot.iife.min.js": ("vendor/uPlot.iife.min.js", "text/javascript"),
    "/page/vendor/uPlot.min.css": ("vendor/uPlot.min.css", "text/css"),
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
MAX_LOGIN_BYTES = 4096
SESSION_S = 12 * 3600.0
WATCHED_S = 3.0
SEES = (OPERATOR, WATCH)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Shown(Protocol):
    """What a page shows, and to whom. cookie: its name. secure: the page is reached by TLS alone."""

    cookie: str
    secure: bool

    def log_in(self, given: str) -> str:
        """The cookie for whoever gives this. Raises TokenRefused or ConfigError."""

    def check(self, request: web.Request) -> None:
        """Raises TokenRefused unless the request may see the run."""

    async def state(self) -> dict[str, Any]:
        """The run as it is now, plain JSON."""

    async def history(self, known: str) -> tuple[str, dict[str, Any] | None]:
        """The run so far, and the name of that version; None for it where it has the name `known`."""


def add_page(app: web.Application, shown: Shown) -> None:
    """Serve the page by `app`."""
    for address, (name, kind) in FILES.items():
        app.router.add_get(address, _file_handler(name, kind))
    app.router.add_post("/page/login", _refusing(_login_handler(shown)))
    app.router.add_post("/page/logout", _logout_handler(shown))
    app.router.add_get("/page/state", _refusing(_state_handler(shown)))
    app.router.add_get("/page/history", _refusing(_history_handler(shown)))


class OwnPage:
    """The page as the coordinator serves it: to operators, and to those with a token to watch.

    A session is a signed cookie, so that it survives the coordinator. It ends after 12 hours, and with its token; that
    of the operator's file is made anew at each start, which ends no session. key: known to the coordinator alone.
    """

    secure = True

    def __init__(
        self,
        tokens: TokenStore,
        *,
        key: bytes,
        run: str,
        clock: Callable[[], float],
        renewed: str,
        status: Callable[[], dict[str, Any]],
        history: Callable[[], tuple[str, dict[str, Any]]],
        admit: Callable[[web.Request], None],
    ) -> None:
        self.cookie = f"__Host-atoll-{run[:8]}"
        self._tokens = tokens
        self._key = key
        self._clock = clock
        self._renewed = renewed
        self._status = status
        self._history = history
        self._admit = admit
        self._shown_at = 0.0

    def is_watched(self) -> bool:
        """Whether somebody looked within the last seconds."""
        return self._clock() < self._shown_at + WATCHED_S

    def log_in(self, given: str) -> str:
        info = self._tokens.check(bearer_of(given))
        _refuse_other_roles(info)
        said = f"{info.id}.{min(int(self._clock() + SESSION_S), int(info.expires))}"
        return f"{said}.{self._sign(said)}"

    def check(self, request: web.Request) -> None:
        if "Authorization" in request.headers:
            _refuse_other_roles(self._tokens.check(bearer_of(request.headers["Authorization"])))
        else:
            self._check_cookie(request.cookies.get(self.cookie, ""))
        self._shown_at = self._clock()
        self._admit(request)

    async def state(self) -> dict[str, Any]:
        return self._status()

    async def history(self, known: str) -> tuple[str, dict[str, Any] | None]:
        return self._history()

    def _check_cookie(self, cookie: str) -> None:
        said, _, signature = cookie.rpartition(".")
        if not said or not hmac.compare_digest(signature.encode(), self._sign(said).encode()):
            raise TokenRefused("log in with a token.")
        token, _, until = said.partition(".")
        info = self._tokens.find(token)
        alive = info is not None and (info.state == "valid" or (info.role, info.note) == (OPERATOR, self._renewed))
        if not alive or self._clock() >= int(until):
            raise TokenRefused("this session is over. Log in again.")

    def _sign(self, said: str) -> str:
        return hmac.digest(self._key, said.encode(), "sha256").hex()


def bearer_of(given: str) -> str:
    """What `TokenStore.check` takes, of a token's line, alone or in an Authorization header, or of `Token.bearer`.

    >>> bearer_of("Bearer 12.34"), bearer_of(" 12.34 ")
    ('Bearer 12.34', 'Bearer 12.34')
    """
    text = given.strip().removeprefix("Bearer ").strip()
    return parse_token(text).bearer if text.startswith(PREFIX) else f"Bearer {text}"


def _refuse_other_roles(info: TokenInfo) -> None:
    if info.role not in SEES:
        raise TokenRefused(f"the token {info.id} is for {info.role}; this needs one for {' or '.join(SEES)}.")


# --- the answers ---


def _file_handler(name: str, kind: str) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        content, etag = _file(name)
        headers = HEADERS | {"Cache-Control": "no-cache", "ETag": etag}
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=headers)

    return answer


@cache
def _file(name: str) -> tuple[bytes, str]:
    content = (FOLDER / name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'


def _login_handler(shown: Shown) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        body = load_json(await request.read(), max_bytes=MAX_LOGIN_BYTES, max_depth=2)
        given = body.get("token") if isinstance(body, dict) else None
        if not isinstance(given, str):
            raise WireError("the request has no token.")
        response = web.Response(status=204, headers=HEADERS)
        response.set_cookie(
            shown.cookie,
            shown.log_in(given),
            max_age=int(SESSION_S),
            path="/",
            secure=shown.secure,
            httponly=True,
            samesite="Strict",
        )
        return response

    return answer


def _logout_handler(shown: Shown) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        response = web.Response(status=204, headers=HEADERS)
        response.del_cookie(shown.cookie, path="/", secure=shown.secure, httponly=True, samesite="Strict")
        return response

    return answer


def _state_handler(shown: Shown) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        shown.check(request)
        return _json(await shown.state())

    return answer


def _history_handler(shown: Shown) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        shown.check(request)
        known = request.headers.get("If-None-Match", "").strip('"')
        version, history = await shown.history(known)
        if history is None or version == known:
            return web.Response(status=304, headers=HEADERS | {"ETag": f'"{version}"'})
        return _json(history, ETag=f'"{version}"')

    return answer


def _json(content: dict[str, Any], **headers: str) -> web.Response:
    text = json.dumps(content, separators=(",", ":"))
    return web.Response(
        text=text, content_type="application/json", headers=HEADERS | {"Cache-Control": "no-store"} | headers
    )


def _refusing(handler: Handler) -> Handler:
    """Errors of ours as a status and one line of text."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except TokenRefused as error:
            return _refusal(401, error)
        except (ConfigError, WireError) as error:
            return _refusal(400, error)
        except AtollError as error:
            return _refusal(503, error)

    return answer


def _refusal(status: int, error: AtollError) -> web.Response:
    why = str(error).replace("\n", " ").encode("ascii", "backslashreplace").decode()
    return web.Response(status=status, text=why, headers=HEADERS | {WHY: why})
