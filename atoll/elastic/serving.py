"""An HTTPS server that strangers cannot wear out.

A connection has `STRANGER_S` seconds to finish its TLS handshake and as many to prove that it may be here; `admit`
says that it did. Whoever has not is cut off, and of too many at once the oldest goes first: an honest joiner, who needs
a few milliseconds, gets through.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from atoll.elastic.addresses import join_host_port
from atoll.elastic.certs import Identity, server_context
from atoll.errors import ConfigError

# What a member shows when it connects, beside its token, and why something was refused. Header values are ASCII.
MEMBER, MEMBER_KEY, VERSION, WHY = "Atoll-Member Atoll-Key Atoll-Version Atoll-Why".split()

STRANGER_S = 5.0
PROBE_BYTES = 1 << 20  # that measure a link, each way
MAX_STRANGERS = 512
BACKLOG = 1024


class SecureServer:
    """Serves `app` as the owner of `identity`. port: what it listens on, once started."""

    def __init__(self, app: web.Application, identity: Identity) -> None:
        self.port = 0
        self._identity = identity
        # A connection that stays open between two requests holds a place; our clients do not need it to.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2, keepalive_timeout=STRANGER_S)
        self._listener: asyncio.Server | None = None
        self._strangers: dict[Any, asyncio.TimerHandle] = {}  # handlers, the oldest first

    async def start(self, host: str, port: int) -> None:
        """Listen on an address of this machine; port 0 is any free one. Raises ConfigError for one that is taken."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                self._accept,
                host,
                port,
                ssl=server_context(self._identity),
                ssl_handshake_timeout=STRANGER_S,
                backlog=BACKLOG,
            )
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"port {port} of {host} cannot be used: {error.strerror or error}. Use another --port, or 0 for any."
            ) from None
        self.port = self._listener.sockets[0].getsockname()[1]

    def admit(self, request: web.Request) -> None:
        """The connection of `request` is no stranger's: it may stay."""
        timer = self._strangers.pop(request.protocol, None)
        if timer is not None:
            timer.cancel()

    async def stop(self) -> None:
        """Stop listening and cut off all connections. Stopping twice is allowed."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            for timer in self._strangers.values():
                timer.cancel()
            self._strangers.clear()
            self._abort_all()
            await self._runner.cleanup()

    def _abort_all(self) -> None:
        """Whoever is slow to say goodbye must not hold up the end."""
        server = self._runner.server
        for handler in server.connections if server is not None else []:
            if handler.transport is not None:
                handler.transport.abort()

    def _accept(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None, "started before it listens"
        handler = server()
        if len(self._strangers) >= MAX_STRANGERS:
            self._cut_off(next(iter(self._strangers)))
        timer = asyncio.get_running_loop().call_later(STRANGER_S, self._cut_off, handler)
        self._strangers[handler] = timer
        return handler

    def _cut_off(self, handler: Any) -> None:
        """One whose TLS handshake is not done has no transport yet; its own timeout ends it."""
        self._strangers.pop(handler).cancel()
        if handler.transport is not None:
            handler.transport.abort()


def url(host: str, port: int, path: str) -> str:
    """
    >>> url("10.0.0.5", 4321, "/v1/status")
    'https://10.0.0.5:4321/v1/status'
    """
    return f"https://{join_host_port(host, port)}{path}"
