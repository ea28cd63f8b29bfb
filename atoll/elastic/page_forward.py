"""`atoll status RUN --page`: the page of a run on this machine, for browsers that do not know the coordinator's key.

    browser ── http://127.0.0.1 ──▶ this process ── TLS, the coordinator's key pinned, the token ──▶ coordinator

Who may look here is who was shown the link: the secret in it works once, and is exchanged for a cookie. The token stays
in this process.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable
from typing import Any

from aiohttp import web

from atoll.elastic.link import ask
from atoll.elastic.page import add_page
from atoll.elastic.tokens import Token, TokenRefused
from atoll.errors import ConfigError, TransportError

HOST = "127.0.0.1"


class ForwardedPage:
    """A page that shows what the coordinator says to `token()`, which is asked anew once its token is refused.

    names: that a browser on this machine may call this server by; any other is a page of somebody else at work.
    """

    secure = False

    def __init__(self, token: Callable[[], Token]) -> None:
        self.cookie = ""
        self.code = secrets.token_urlsafe(24)
        self.names: frozenset[str] = frozenset()
        self._read_token = token
        self._token = token()
        self._session = secrets.token_urlsafe(32)

    def listens_at(self, port: int) -> None:
        """Where it is served. Browsers hand cookies of one port to all others, by their names."""
        self.names = frozenset({f"{HOST}:{port}", f"localhost:{port}"})
        self.cookie = f"atoll-{port}"

    def log_in(self, given: str) -> str:
        if not self.code or not hmac.compare_digest(given.encode(), self.code.encode()):
            raise TokenRefused("this link is not the one that was printed, or it was used before. Start again.")
        self.code = ""
        return self._session

    def check(self, request: web.Request) -> None:
        shown = request.cookies.get(self.cookie, "")
        if request.host not in self.names or not hmac.compare_digest(shown.encode(), self._session.encode()):
            raise TokenRefused("open the link that atoll status --page printed.")

    async def state(self) -> dict[str, Any]:
        return (await self._ask("/page/state", ""))[1] or {}

    async def history(self, known: str) -> tuple[str, dict[str, Any] | None]:
        return await self._ask("/page/history", known)

    async def _ask(self, path: str, known: str) -> tuple[str, dict[str, Any] | None]:
        try:
            return await ask(self._token, path, known=known)
        except TokenRefused:
            self._token = self._read_token()  # the operator's is a new one after the coordinator was started again
        try:
            return await ask(self._token, path, known=known)
        except TokenRefused as error:
            raise TransportError(str(error)) from None  # of this process, and no fault of the browser's


async def serve_page(token: Callable[[], Token], *, port: int, started: Callable[[str], None]) -> None:
    """Serve the page of the run that `token()` leads to, for ever. started: gets the link. Raises ConfigError."""
    page = ForwardedPage(token)
    app = web.Application(client_max_size=4096)
    add_page(app, page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await page.state()  # a run that cannot be reached is told before there is a link
        site = web.TCPSite(runner, HOST, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"port {port} cannot be used: {error.strerror}. Use another --port, or 0.") from None
        listens = runner.addresses[0][1]
        page.listens_at(listens)
        started(f"http://{HOST}:{listens}/#{page.code}")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
