"""The island's end of the control plane.

`Link` keeps one connection to the coordinator from a thread of its own, whatever the training thread is doing: it sends
heartbeats, answers, and comes back after every loss, for ever, each time with a fresh `Hello`. The training thread puts
messages in with `send` and takes events out of a queue. It learns of a loss (`LinkLost`) and of a return (`LinkBack`):

    training thread        link thread                coordinator
    send(Ready) ────────▶  Ready ─────────────────▶
                           Beat, Beat, ...  ──────▶
    events ◀──────────────  Go  ◀─────────────────── Go
                           ✗ connection lost
    events ◀────────────── LinkLost
    send(Reached) ──▶ ✗     (0.1, 0.2, ... 2 s, again and again)
    events ◀────────────── LinkBack;  Hello ──────▶
    events ◀────────────── Welcome ◀──────────────── Welcome
    send(Ready) ────────▶  what still holds is said again

What is sent while the link is down is dropped, and what was on its way may be: after a `Welcome` the island says anew
what still holds. `fetch_settings`, `fetch_status` and `operate` ask the coordinator one thing and wait for the answer.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import aiohttp

import atoll
from atoll.elastic.addresses import host_and_port
from atoll.elastic.certs import WRONG_KEY
from atoll.elastic.client import pinned_session
from atoll.elastic.messages import Beat, Finish, FromCoordinator, FromMember, Hello, Refused, Serve, Welcome
from atoll.elastic.serving import MEMBER, MEMBER_KEY, PROBE_BYTES, VERSION, WHY, url
from atoll.elastic.tokens import Token, TokenRefused, new_member_key
from atoll.elastic.wire import FROM_COORDINATOR, MAX_BYTES, WireError, decode, encode, load_json, printable
from atoll.errors import AtollError, ConfigError, TransportError

if TYPE_CHECKING:  # it loads torch, which those who only ask a question need not wait for
    from atoll.elastic.donate import State, StateServer

BACKOFF_S = (0.1, 2.0)  # the first wait before another try, and the longest
CONNECT_S = 4.0  # for TCP and TLS, an address
SILENCE_S = 8.0  # after which the coordinator is asked for a sign of life, which it has half of that to give
MAX_ANSWER_BYTES = 4 * 1024 * 1024
MAX_ANSWER_DEPTH = 32
MEASURE_S = 60.0  # for a megabyte each way: below 0.3 Mbit/s there is nothing to be had


@dataclass(frozen=True)
class LinkLost:
    """The coordinator cannot be reached; the link goes on trying."""

    why: str


@dataclass(frozen=True)
class LinkBack:
    """There is a connection, the `number`-th; `Hello` was sent, and `Welcome` or `Refused` will follow."""

    number: int = 1


@dataclass(frozen=True)
class LinkFailed:
    """A bug in the link or in a callable given to it: the link is dead. trace: for the report."""

    trace: str


Event = FromCoordinator | LinkLost | LinkBack | LinkFailed


class Link:
    """A connection to the coordinator that heals itself.

    hello: what to say at each connection; beat: what to say every `beat_s` (until `Welcome` names another period). Both
    are called in the link's thread. events: what the coordinator said, in order, and what became of the link. After
    `Refused` there is no more to come. Constructing it starts the thread, and `start` the first connection.
    """

    def __init__(
        self, token: Token, hello: Callable[[], Hello], *, beat: Callable[[], Beat] = Beat, beat_s: float = 1.0
    ) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self._token = token
        self._hello = hello
        self._beat = beat
        self._beat_s = beat_s
        self._member_key = new_member_key()
        self._donor: StateServer | None = None
        self._outgoing: asyncio.Queue[str | None] | None = None  # None in it: close
        self._over = False  # refused, or finished: do not come back
        self._lost_by = ""
        self._connections = 0  # so many there were
        self._places = [host_and_port(place) for place in token.addresses]
        self._loop = asyncio.new_event_loop()
        self._started, self._closing = asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="atoll-link", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether what is sent now has a connection to go to."""
        return self._outgoing is not None

    def start(self) -> None:
        """Connect, and stay connected from now on."""
        self._soon(self._started.set)

    def send(self, message: FromMember, *, connection: int | None = None) -> None:
        """Say this to the coordinator; dropped while the link is down. From any thread; returns at once.

        connection: on this one or never. What follows from an earlier connection may be wrong on a new one:

            training thread               link thread             coordinator
                                          LinkLost, LinkBack, Hello ──▶ gives samples that Hello did not name to others
            send(Ready with them) ──────▶ ✗ of the earlier connection
            reads Welcome, drops them
        """
        self._soon(self._put, encode(message), connection)

    def serve_state(self, snapshot: Callable[[], State], *, host: str, port: int = 0) -> int:
        """Become a possible donor: serve what `snapshot` returns to those the coordinator sends. Returns the port.

        To be called before `start`, for the first `Hello` names the port. See `donate.StateServer`. Raises ConfigError.
        """
        from atoll.elastic.donate import StateServer

        server = StateServer(snapshot)
        asyncio.run_coroutine_threadsafe(server.start(host, port), self._loop).result()
        self._donor = server
        return server.port

    def close(self, *, timeout_s: float = 2.0) -> None:
        """Send what is waiting, close the connection and end the thread. Closing twice is allowed."""
        self._soon(self._begin_to_close)
        self._thread.join(timeout_s)

    def _soon(self, call: Callable[..., None], *given: object) -> None:
        """Have the link's thread do this; nothing where it has ended, and its loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *given)

    # --- in the link's thread ---

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._run())
        except Exception:  # a thread that dies in silence would look like a coordinator that says nothing
            self.events.put(LinkFailed(traceback.format_exc()))
        finally:
            self._loop.close()

    def _put(self, text: str | None, connection: int | None = None) -> None:
        if self._outgoing is not None and connection in (None, self._connections):
            self._outgoing.put_nowait(text)

    def _begin_to_close(self) -> None:
        self._closing.set()
        self._started.set()
        self._put(None)

    async def _run(self) -> None:
        await self._started.wait()
        try:
            await self._keep_connected()
        finally:
            if self._donor is not None:
                await self._donor.stop()

    async def _keep_connected(self) -> None:
        wait_s = BACKOFF_S[0]
        while not self._closing.is_set() and not self._over:
            try:
                async with self._connection() as connection:
                    wait_s = BACKOFF_S[0]
                    await self._converse(connection)
                why = "the coordinator closed the connection"
            except (TokenRefused, ConfigError) as error:
                self.events.put(Refused(str(error), error.exit_code))
                return
            except (TransportError, WireError) as error:
                why = str(error)
            if self._closing.is_set() or self._over:
                return
            self._tell_lost(why)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), wait_s)
            wait_s = min(2 * wait_s, BACKOFF_S[1])

    def _tell_lost(self, why: str) -> None:
        """Once for a loss, and again when another cause keeps the link from coming back."""
        if why != self._lost_by:
            self.events.put(LinkLost(why))
        self._lost_by = why

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        headers = {MEMBER: self._hello().member, MEMBER_KEY: self._member_key, VERSION: atoll.__version__}
        async with _session(self._token, headers=headers) as session:
            connection = await self._connect(session)
            try:
                yield connection
            finally:
                with suppress(TimeoutError):
                    await asyncio.wait_for(connection.close(), 0.5)

    async def _connect(self, session: aiohttp.ClientSession) -> aiohttp.ClientWebSocketResponse:
        """By the first address that answers; it is tried first the next time."""
        errors = []
        for place in list(self._places):
            try:
                async with asyncio.timeout(CONNECT_S + 1.0):
                    connection = await session.ws_connect(
                        url(*place, "/v1/member"), heartbeat=SILENCE_S, max_msg_size=MAX_BYTES, compress=0
                    )
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                errors.append(_explain(error, place))
            else:
                self._places.sort(key=lambda known: known != place)
                return connection
        raise _foremost(errors)

    async def _converse(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        """Say hello, then carry messages both ways until the connection ends."""
        outgoing: asyncio.Queue[str | None] = asyncio.Queue()
        outgoing.put_nowait(encode(self._introduction()))
        self._outgoing, self._lost_by = outgoing, ""
        self._connections += 1
        self.events.put(LinkBack(self._connections))
        if self._closing.is_set():
            outgoing.put_nowait(None)
        works = (self._read(connection), self._write(connection, outgoing), self._beats(outgoing))
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._outgoing = None
            for task in tasks:
                task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    def _introduction(self) -> Hello:
        hello = self._hello()
        return hello if self._donor is None else replace(hello, fingerprint=self._donor.fingerprint)

    async def _write(self, connection: aiohttp.ClientWebSocketResponse, outgoing: asyncio.Queue[str | None]) -> None:
        while (text := await outgoing.get()) is not None:
            try:
                await connection.send_str(text)
            except ConnectionError:
                return  # the reader notices it too, and says so
        await connection.close()

    async def _beats(self, outgoing: asyncio.Queue[str | None]) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            outgoing.put_nowait(encode(self._beat()))

    async def _read(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        async for frame in connection:
            if frame.type != aiohttp.WSMsgType.TEXT:
                raise WireError("the coordinator sent what is not text.")
            self._take(decode(frame.data, FROM_COORDINATOR))

    def _take(self, message: FromCoordinator) -> None:
        if isinstance(message, Welcome) and message.beat_s > 0:
            self._beat_s = message.beat_s
        if isinstance(message, Serve) and self._donor is not None:
            self._donor.announce(message)
        self._over = self._over or isinstance(message, (Refused, Finish))
        self.events.put(message)


# --- one question ---


def fetch_settings(token: Token) -> dict[str, Any]:
    """What the coordinator says of the run: "run", "version", "settings_digest", "settings" (plain JSON, not checked).

    Raises TransportError where it cannot be reached, TokenRefused where it does not let in. What it says is data from
    another machine: paths and names in it must be chosen anew here.
    """
    return operate(token, "GET", "/v1/settings")


def fetch_status(token: Token) -> dict[str, Any]:
    """The run as the coordinator sees it now, plain JSON. Raises as `fetch_settings`."""
    return operate(token, "GET", "/v1/status")


def operate(token: Token, method: str, path: str, *, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask the coordinator one thing, with the rights of `token`. Raises as `fetch_settings`."""
    answer = asyncio.run(_ask(token, method, path, body))[1]
    assert answer is not None, "nothing was known"
    return answer


@dataclass(frozen=True)
class LinkRate:
    """latency_s: of a question and its answer. up, down: bytes a second to and from the coordinator."""

    latency_s: float
    up: float
    down: float


def measure_link(token: Token) -> LinkRate:
    """Measure the way to the coordinator with a megabyte each way. Raises as `fetch_settings`."""
    return asyncio.run(_measure(token))


async def _measure(token: Token) -> LinkRate:
    errors = []
    async with _session(token, headers={VERSION: atoll.__version__}) as session:
        for place in map(host_and_port, token.addresses):
            try:
                async with asyncio.timeout(MEASURE_S):
                    await _exchange(session, place, b"")  # connects, and is not counted
                    latency_s = await _exchange(session, place, b"")
                    up_s = await _exchange(session, place, bytes(PROBE_BYTES))
                    down_s = await _exchange(session, place, None)
                return LinkRate(latency_s, *(PROBE_BYTES / max(s - latency_s, 1e-6) for s in (up_s, down_s)))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                errors.append(_explain(error, place))
    raise _foremost(errors)


async def _exchange(session: aiohttp.ClientSession, place: tuple[str, int], body: bytes | None) -> float:
    """Seconds to send `body` and hear that it arrived; of None, to fetch as much as measures a link."""
    began, method = time.perf_counter(), "GET" if body is None else "POST"
    async with session.request(method, url(*place, "/v1/link"), data=body, allow_redirects=False) as response:
        response.raise_for_status()
        await response.read()
    return time.perf_counter() - began


async def ask(token: Token, path: str, *, known: str = "") -> tuple[str, dict[str, Any] | None]:
    """What the coordinator shows at `path`, and the name of that version; None for what is `known` by it already."""
    return await _ask(token, "GET", path, None, known=known)


async def _ask(
    token: Token, method: str, path: str, body: dict[str, Any] | None, *, known: str = ""
) -> tuple[str, dict[str, Any] | None]:
    errors = []
    headers = {VERSION: atoll.__version__} | ({"If-None-Match": f'"{known}"'} if known else {})
    async with _session(token, headers=headers) as session:
        for place in map(host_and_port, token.addresses):
            try:
                async with (
                    asyncio.timeout(CONNECT_S + 10.0),
                    session.request(method, url(*place, path), json=body, allow_redirects=False) as response,
                ):
                    version = response.headers.get("ETag", "").strip('"')
                    return version, None if response.status == 304 else await _answer(response)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                errors.append(_explain(error, place))
    raise _foremost(errors)


async def _answer(response: aiohttp.ClientResponse) -> dict[str, Any]:
    if response.status != 200:
        response.raise_for_status()
        raise TransportError(f"the coordinator answered {response.status}, which it never should.")
    raw = bytearray()
    async for chunk in response.content.iter_any():
        raw += chunk
        if len(raw) > MAX_ANSWER_BYTES:
            break
    answer = load_json(bytes(raw), max_bytes=MAX_ANSWER_BYTES, max_depth=MAX_ANSWER_DEPTH)
    if not isinstance(answer, dict):
        raise WireError("the coordinator's answer is not a JSON object.")
    return answer


# --- inside ---


def _session(token: Token, *, headers: dict[str, str]) -> AbstractAsyncContextManager[aiohttp.ClientSession]:
    """A client that talks to the owner of the token's key and to nobody else."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    return pinned_session(token.fingerprint, headers=headers | {"Authorization": token.bearer}, timeout=timeout)


def _explain(error: Exception, place: tuple[str, int]) -> AtollError:
    """What went wrong at one address, in our words. The coordinator's own refusals are final, all else may pass."""
    where = url(*place, "").removeprefix("https://")
    hint = _loopback_hint(place[0])
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return TransportError(f"{where}: {WRONG_KEY}, not the one that the token names. Nothing was sent to it.{hint}")
    if isinstance(error, aiohttp.ClientResponseError):
        told = error.headers.get(WHY) if error.headers is not None else None
        why = printable(told or f"it answered {error.status}.", limit=400)
        known = {400: ConfigError, 401: TokenRefused, 403: TokenRefused}.get(error.status)
        return known(why) if known else TransportError(f"the coordinator at {where}: {why}")
    if isinstance(error, TimeoutError):
        return TransportError(f"{where} does not answer. Is this address right, and the port open?{hint}")
    cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return TransportError(f"no coordinator answers at {where} ({printable(cause, limit=100)}).{hint or _DOWN}")


def _loopback_hint(host: str) -> str:
    if not (host.startswith("127.") or host in ("::1", "localhost")):
        return ""
    return (
        f"\n{host} is this machine itself: this token is good on the coordinator's own machine alone. To let other\n"
        "machines in, start it with --host ADDRESS and make a new token: atoll token create RUN."
    )


_DOWN = "\nIs it running (there: atoll status RUN), and may this machine reach that port?"


def _foremost(errors: list[AtollError]) -> AtollError:
    """Of what several addresses came to, the one that tells most: a refusal, then the first."""
    return next((error for error in errors if isinstance(error, (TokenRefused, ConfigError))), errors[0])
