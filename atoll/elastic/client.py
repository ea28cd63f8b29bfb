"""An HTTPS client that talks to the owner of one key and leaves nothing behind.

aiohttp says goodbye to a TLS connection politely, and does not wait for the answer: where the loop ends meanwhile, as
it does after a single question, or where the other end was killed, the socket stays open. Here all connections are
gone when the block is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from atoll.elastic.certs import client_context


@asynccontextmanager
async def pinned_session(
    fingerprint: str, *, headers: Mapping[str, str], timeout: aiohttp.ClientTimeout
) -> AsyncIterator[aiohttp.ClientSession]:
    """A session whose every connection is with the owner of the certificate with this fingerprint.

    Answers are taken as they are: nothing is unpacked. Proxies of the environment are not used.
    """
    connector = _Connector(ssl=client_context(fingerprint))
    try:
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            headers={**headers, "Accept-Encoding": "identity"},
            auto_decompress=False,
        ) as session:
            yield session
    finally:
        await connector.cut_off()


class _Connector(aiohttp.TCPConnector):
    """Remembers its connections."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._transports: list[asyncio.Transport] = []

    async def connect(self, req: Any, traces: Any, timeout: Any) -> Any:
        connection = await super().connect(req, traces, timeout)
        if connection.transport is not None and connection.transport not in self._transports:
            self._transports.append(connection.transport)
        return connection

    async def cut_off(self) -> None:
        for transport in self._transports:
            transport.abort()
        await asyncio.sleep(0)  # the loop closes the sockets in its next turn
