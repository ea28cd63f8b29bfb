"""The service that islands meet at: who is here, which round, what is committed. Bulk data never passes through it.

    strangers ──TLS──▶ token, member's key ──▶ connection ──▶ one inbox ──▶ Membership (pure) ──▶ effects
                                               connection ◀── Send ◀── on disk ◀── Record ◀───────────┘

`Membership` decides; this file is its clock, its memory and its voice. One task feeds it one thing at a time, writes
what it records to the log, and only then says what follows from it: a coordinator that is killed anywhere in between
has promised nothing that it does not find again. Connections have queues of their own, so that a member that is slow to
read holds up nobody.

In the run's folder:

    coordinator.json            where it is, for `atoll status`; no secrets
    coordinator/
      identity/                 its key and who may come in: copy it away, and the coordinator can be restored elsewhere
      log.sqlite                what is committed; islands make up for its loss
      operator.token            lets whoever can read it look, make tokens and stop the run
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import json
import os
import re
import resource
import secrets
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from filelock import FileLock, Timeout

from atoll.elastic.addresses import Place, choose_place, dials, interfaces, join_host_port, plain, reach
from atoll.elastic.certs import load_or_make_identity, write_private
from atoll.elastic.driver import CLOSE_S, RATE, STOPPED, Bucket, Came, Connection, Driver, Said, Service, Stop, Went
from atoll.elastic.log import LOG, Log
from atoll.elastic.membership import Membership, Rules
from atoll.elastic.messages import Hello, Refused
from atoll.elastic.page import OwnPage, add_page, bearer_of
from atoll.elastic.prometheus import EXPOSITION, exposition
from atoll.elastic.serving import MEMBER, MEMBER_KEY, PROBE_BYTES, VERSION, WHY, SecureServer
from atoll.elastic.tokens import JOIN, LIFETIME_S, OPERATOR, ROLES, WATCH, TokenInfo, TokenRefused, TokenStore
from atoll.elastic.wire import FROM_MEMBER, MAX_BYTES, WireError, decode, encode, load_json, printable
from atoll.errors import AtollError, ConfigError

ADDRESS_FILE, FOLDER, IDENTITY, MEMBERS, OPERATOR_TOKEN = (
    "coordinator.json coordinator identity members.sqlite operator.token".split()
)

HELLO_S = 5.0  # for the first message of a connection
LINGER_S = 10.0  # at the end, for members that are away to come back and read that it is the end
EVALUATE_S = 600.0  # at the end, for members that are here to evaluate the last anchor
LAST_LOOK_S = 0.3  # at the end, for a page that is open to show how it ended
OPERATOR_LIFETIME_S = 10 * 365 * 86400.0
MAX_LIFETIME_S = 366 * 86400.0
MAX_NOTE = 80

INTERRUPTED = 130


@dataclass(frozen=True)
class Address:
    """Where a coordinator listens. run: 16 hex digits. addresses: "host:port" for others. fingerprint: of its key."""

    address: str
    port: int
    run: str
    fingerprint: str
    addresses: tuple[str, ...]
    pid: int


def run_coordinator(service: Service, *, started: Callable[[Coordinator], None] | None = None) -> int:
    """Be the coordinator of a run until the run is over; returns the exit code that it ended with.

    SIGINT and SIGTERM end the service and not the run: the islands wait for it to be started again. started: called
    once it listens; it can make tokens then. Raises ConfigError, StorageError or LogError.
    """

    async def work() -> int:
        loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(serve(service, started=started))
        received: list[int] = []

        def stop(signum: int) -> None:
            received.append(signum)
            serving.cancel()

        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop, signum)
        try:
            return await serving
        except asyncio.CancelledError:
            if not received:
                raise
            service.say("the coordinator stops; the islands wait for it. The same command starts it again.")
            return INTERRUPTED if received[0] == signal.SIGINT else STOPPED

    return asyncio.run(work())


async def serve(service: Service, *, started: Callable[[Coordinator], None] | None = None) -> int:
    """`run_coordinator` in a running loop, without its signals: cancel it to end it."""
    coordinator = Coordinator(service)
    await coordinator.start()
    try:
        if started is not None:
            started(coordinator)
        return await coordinator.finished()
    finally:
        await coordinator.stop()


# --- the service ---


class _Forbidden(AtollError):
    """Somebody who may be here asked for what only others may."""

    exit_code = 3


class Coordinator:
    """One coordinator: `start`, then `finished`, then `stop`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._folder = service.folder / FOLDER
        self._open = AsyncExitStack()
        self._places: dict[Connection, str] = {}  # where connected members say that they can be reached
        self._started_at = 0.0

    async def start(self) -> Address:
        """Open the folder and listen. Raises ConfigError, StorageError or LogError, and then holds nothing."""
        async with AsyncExitStack() as stack:
            place = choose_place(self._service.host, allow_public=self._service.allow_public)
            self._open_folder(stack)
            server = await self._listen(stack, place)
            self._server = server
            self.address = self._publish(place, server.port)
            for work in (self._driver.run, self._driver.announce):
                stack.push_async_callback(_end_task, asyncio.ensure_future(work()))
            self._open = stack.pop_all()
        self._started_at = self._driver.now()
        return self.address

    async def finished(self) -> int:
        """Wait for the end of the run; its exit code. Raises what stopped the service."""
        code = await asyncio.shield(self._driver.ended)
        ended = self._driver.now()
        try:
            while self._driver.is_waited_on and self._driver.now() < ended + self._patience_s(code):
                await asyncio.sleep(0.02)
        finally:
            self._driver.give_up_evaluations()
        if self._page.is_watched():
            await asyncio.sleep(LAST_LOOK_S)
        return code

    def _patience_s(self, code: int) -> float:
        return EVALUATE_S if code == 0 and self._driver.connections else LINGER_S

    async def stop(self) -> None:
        """Stop serving and let go of everything. Stopping twice is allowed."""
        await self._open.aclose()

    # --- the start ---

    def _open_folder(self, stack: AsyncExitStack) -> None:
        service, rules = self._service, self._service.rules
        stack.callback(_lock(self._folder).release)
        self._identity = load_or_make_identity(self._folder / IDENTITY, name="atoll coordinator")
        self._run = self._identity.fingerprint[:16]
        self._tokens = TokenStore(self._folder / IDENTITY / MEMBERS, clock=service.clock)
        stack.callback(self._tokens.close)
        log = Log(self._folder / LOG, clock=service.clock)
        stack.callback(log.close)
        _claim(log, rules.settings_digest, folder=service.folder)
        secret = hashlib.sha256(b"tickets" + self._identity.key).digest()
        self._driver = Driver(_restore(rules, log, secret), log, service)
        self._page = self._make_page()

    async def _listen(self, stack: AsyncExitStack, place: Place) -> SecureServer:
        _allow_many_connections()
        server = SecureServer(self._application(), self._identity)
        earlier = _earlier_port(self._service.folder) if self._service.port == 0 else 0
        try:
            await server.start(place.address, self._service.port or earlier)
        except ConfigError:
            if not earlier:
                raise
            raise ConfigError(
                f"port {earlier} of {place.address}, where islands look for this run, is taken by another program.\n"
                "End that one; or take another by --port, and give out new tokens."
            ) from None
        stack.push_async_callback(server.stop)
        return server

    def _publish(self, place: Place, port: int) -> Address:
        """Write down where this coordinator is, and a token for its operator."""
        addresses = tuple(join_host_port(address, port) for address in self._reachable(place))
        address = Address(place.address, port, self._run, self._identity.fingerprint, addresses, os.getpid())
        for info in self._tokens.list():
            if info.role == OPERATOR and info.state == "valid" and info.note == OPERATOR_TOKEN:
                self._tokens.revoke(info.id)
        token = self._tokens.create(
            OPERATOR,
            addresses=addresses,
            fingerprint=address.fingerprint,
            run=self._run,
            lifetime_s=OPERATOR_LIFETIME_S,
            note=OPERATOR_TOKEN,
        )
        write_private(self._folder / OPERATOR_TOKEN, token.encode().encode())
        write_private(self._service.folder / ADDRESS_FILE, json.dumps(asdict(address)).encode())
        on = f" on {place.interface}" if place.interface else ""
        self._service.say(f"coordinator at {join_host_port(place.address, port)}{on} ({place.why})")
        return address

    def _reachable(self, place: Place) -> list[str]:
        """The addresses that tokens name: where it listens; of all addresses those that others can reach."""
        if reach(place.address) != "any":
            return [place.address]
        version = ipaddress.ip_address(place.address).version
        wanted = ("private", "public") if self._service.allow_public else ("private",)
        own = [address for address in interfaces() if ipaddress.ip_address(address).version <= version]
        found = sorted(
            (address for address in own if reach(address) in wanted), key=lambda one: wanted.index(reach(one))
        )
        return found or ["127.0.0.1"]

    def create_token(self, role: str, *, lifetime_s: float = LIFETIME_S, note: str = "") -> str:
        """A new token, as the one line that is handed to people."""
        token = self._tokens.create(
            role,
            addresses=self.address.addresses,
            fingerprint=self.address.fingerprint,
            run=self._run,
            lifetime_s=lifetime_s,
            note=note,
        )
        return token.encode()

    # --- requests ---

    def _application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BYTES, middlewares=[_explain_refusals])
        app.router.add_get("/v1/member", self._member)
        app.router.add_get("/v1/settings", self._get_settings)
        app.router.add_get("/v1/status", self._get_status)
        app.router.add_get("/v1/tokens", self._get_tokens)
        app.router.add_post("/v1/tokens", self._post_token)
        app.router.add_post("/v1/tokens/revoke", self._post_revoke)
        app.router.add_post("/v1/stop", self._post_stop)
        app.router.add_get("/metrics", self._get_metrics)
        add_page(app, self._page)
        app.router.add_get("/v1/link", self._get_bulk)
        app.router.add_post("/v1/link", self._post_bulk)
        return app

    def _authorise(self, request: web.Request, *roles: str) -> TokenInfo:
        info = self._tokens.check(bearer_of(request.headers.get("Authorization", "")))
        if info.role not in roles:
            self._service.say(f"refused: {request.path} asked for with the {info.role} token {info.id}")
            raise _Forbidden(f"the token {info.id} is for {info.role}; this needs one for {' or '.join(roles)}.")
        self._server.admit(request)
        return info

    async def _get_settings(self, request: web.Request) -> web.Response:
        self._authorise(request, JOIN, OPERATOR)
        self._check_version(request)
        rules = self._service.rules
        return web.json_response(
            {
                "run": self._run,
                "version": rules.version,
                "settings_digest": rules.settings_digest,
                "settings": self._service.settings,
            }
        )

    async def _get_status(self, request: web.Request) -> web.Response:
        self._authorise(request, JOIN, OPERATOR, WATCH)
        return web.json_response(self.status())

    def status(self) -> dict[str, Any]:
        """The run as it is now, plain JSON, no secrets."""
        address = asdict(self.address) | {"uptime_s": round(self._driver.now() - self._started_at, 3)}
        about = {"name": self._service.folder.resolve().name, "version": self._service.rules.version}
        return {"coordinator": address, **about, **self._driver.status()}

    async def _get_metrics(self, request: web.Request) -> web.Response:
        self._authorise(request, OPERATOR, WATCH)
        return web.Response(body=exposition(self.status()), headers={"Content-Type": EXPOSITION})

    def _make_page(self) -> OwnPage:
        return OwnPage(
            self._tokens,
            key=hashlib.sha256(b"sessions" + self._identity.key).digest(),
            run=self._run,
            clock=self._service.clock,
            renewed=OPERATOR_TOKEN,
            status=self.status,
            history=self._driver.history,
            admit=lambda request: self._server.admit(request),
        )

    async def _get_tokens(self, request: web.Request) -> web.Response:
        self._authorise(request, OPERATOR)
        return web.json_response({"tokens": [asdict(info) for info in self._tokens.list()]})

    async def _post_token(self, request: web.Request) -> web.Response:
        self._authorise(request, OPERATOR)
        body = await _body(request)
        role, lifetime_s, note = body.get("role", JOIN), body.get("lifetime_s", LIFETIME_S), body.get("note", "")
        if role not in ROLES:
            raise ConfigError(f"role={printable(str(role))!r} is not known. Known: {', '.join(ROLES)}.")
        if type(lifetime_s) not in (int, float) or not 0 < lifetime_s <= MAX_LIFETIME_S:
            raise ConfigError(
                f"lifetime_s={printable(str(lifetime_s))} is not between 0 and {MAX_LIFETIME_S:.0f} (a year)."
            )
        if not isinstance(note, str):
            raise ConfigError("note is not text. Give a word or two on whom the token is for.")
        return web.json_response(
            {"token": self.create_token(role, lifetime_s=lifetime_s, note=printable(note, limit=MAX_NOTE))}
        )

    async def _post_revoke(self, request: web.Request) -> web.Response:
        self._authorise(request, OPERATOR)
        beginning = (await _body(request)).get("id")
        if not isinstance(beginning, str):
            raise ConfigError("id is missing. Give the beginning of a token's id, as atoll token list shows it.")
        token, members = self._tokens.revoke(beginning)
        self._driver.evict(members, f"the token {token} that let this island in was revoked by the operator.")
        self._service.say(f"token {token} revoked; it had let {len(members)} islands in")
        return web.json_response({"id": token, "members": members})

    async def _post_stop(self, request: web.Request) -> web.Response:
        self._authorise(request, OPERATOR)
        self._service.say("told to stop the run")
        await self._driver.inbox.put(Stop("the operator stopped the run"))
        return web.json_response({})

    # --- the link, measured by who is about to join ---

    async def _get_bulk(self, request: web.Request) -> web.Response:
        self._authorise(request, JOIN, OPERATOR)
        return web.Response(body=bytes(PROBE_BYTES))

    async def _post_bulk(self, request: web.Request) -> web.Response:
        self._authorise(request, JOIN, OPERATOR)
        count = 0
        async for chunk in request.content.iter_any():
            count += len(chunk)
            if count > PROBE_BYTES:
                raise ConfigError(f"more than the {PROBE_BYTES} bytes that measure a link. Use atoll join.")
        return web.json_response({"received": count})

    # --- members ---

    def _check_version(self, request: web.Request) -> None:
        theirs, ours = request.headers.get(VERSION, "unknown"), self._service.rules.version
        if theirs.split(".")[:2] != ours.split(".")[:2]:
            raise _Forbidden(
                f"this run is of atoll {ours}, this island has {printable(theirs, limit=20)}. pip install atoll=={ours}"
            )

    async def _member(self, request: web.Request) -> web.WebSocketResponse:
        """The connection of one member, from its handshake to its end."""
        self._check_version_and_admit(request)
        socket = web.WebSocketResponse(max_msg_size=MAX_BYTES, compress=False, timeout=CLOSE_S)
        await socket.prepare(request)
        self._server.admit(request)
        connection = _connection(request, socket)
        writer = asyncio.ensure_future(connection.write())
        try:
            hello = await self._hello(connection)
            if hello is not None:
                await self._listen_to(connection, hello)
        except WireError as error:
            self._report_malformed(connection, error)
        finally:
            await _finish_writing(connection, writer, lost=request.transport is None)
        return socket

    def _check_version_and_admit(self, request: web.Request) -> None:
        member, key = request.headers.get(MEMBER, ""), request.headers.get(MEMBER_KEY, "")
        authorization = request.headers.get("Authorization", "")
        if not _is_hex(member, 16) or not _is_hex(key, 64):
            self._tokens.check(authorization)  # strangers learn nothing about the form of what they should say
            raise ConfigError("the island does not say who it is. Use atoll join.")
        self._tokens.admit(authorization, member=member, key=key)
        self._check_version(request)

    async def _hello(self, connection: Connection) -> Hello | None:
        """The first message of a connection; None where there is none to go on with."""
        try:
            frame = await asyncio.wait_for(connection.socket.receive(), HELLO_S)
        except TimeoutError:
            return None
        if frame.type != aiohttp.WSMsgType.TEXT:
            return None
        hello = decode(frame.data, {"Hello": Hello})
        wrong = self._what_is_wrong(hello, connection)
        if not wrong:
            self._places[connection] = hello.address
            return replace(hello, dialable=not _is_translated(hello.address, connection.peer))
        self._service.say(f"refused: {printable(hello.name)} at {connection.peer}: {wrong}")
        connection.put(encode(Refused(wrong, 3)))
        return None

    def _what_is_wrong(self, hello: Hello, connection: Connection) -> str:
        """Why what an island says of itself cannot be; "" where it can."""
        if hello.member != connection.member:
            return "an island cannot speak for another one."
        try:
            theirs = reach(hello.address)
        except ConfigError as error:
            return str(error)
        if theirs == "any" or (theirs == "loopback" and reach(connection.peer) != "loopback"):
            return f"other machines cannot reach {hello.address}: join with an address that they can reach."
        if theirs == "public" and not self._service.allow_public:
            return f"{hello.address} is a public address, and averaging is not encrypted: use a private network or VPN."
        if not 0 <= hello.port < 65536:
            return f"port={hello.port} is no port."
        return self._why_apart(hello.address, connection)

    def _why_apart(self, address: str, connection: Connection) -> str:
        """Why no averaging could bring this island and a connected one together; "" where it can.

        gloo opens one connection a pair, from the island whose address is the greater number.
        """
        for other, there in self._places.items():
            if other.member == connection.member or plain(other.peer) == plain(connection.peer):
                continue
            dialled, peer = (there, other.peer) if dials(address, there) else (address, connection.peer)
            if _is_translated(dialled, peer):
                return (
                    f"averaging needs a connection to {dialled}, which a router (NAT) hides behind {peer}.\n"
                    "Put the machines into one private network, as WireGuard makes (docs/between_machines.md)."
                )
        return ""

    async def _listen_to(self, connection: Connection, hello: Hello) -> None:
        inbox = self._driver.inbox
        await inbox.put(Came(connection, hello))
        bucket = Bucket(self._driver.now())
        try:
            async for frame in connection.socket:
                if frame.type != aiohttp.WSMsgType.TEXT:
                    raise WireError("a frame that is not text.")
                if not bucket.take(self._driver.now()):
                    raise WireError(f"more than {RATE:.0f} messages a second.")
                await inbox.put(Said(connection, decode(frame.data, _AFTER_HELLO)))
        finally:
            self._places.pop(connection, None)
            await inbox.put(Went(connection))

    def _report_malformed(self, connection: Connection, error: WireError) -> None:
        detail = f"member {connection.member} at {connection.peer} sent {error}"
        self._driver.note({"event": "fault", "what": "malformed", "replica": None, "detail": detail})
        self._service.say(f"cut off: {detail}")


_AFTER_HELLO = {name: kind for name, kind in FROM_MEMBER.items() if kind is not Hello}


# --- inside ---


def _is_translated(address: str, peer: str) -> bool:
    """Whether a router shows another address of an island than its own: others cannot dial the one it has."""
    return reach(peer) != "loopback" and plain(peer) != plain(address)


def _connection(request: web.Request, socket: web.WebSocketResponse) -> Connection:
    transport = request.transport
    peername = transport.get_extra_info("peername") if transport is not None else None
    return Connection(
        member=request.headers[MEMBER],
        peer=str(peername[0]) if peername else "127.0.0.1",
        socket=socket,
        abort=transport.abort if transport is not None else lambda: None,
    )


async def _finish_writing(connection: Connection, writer: asyncio.Task[None], *, lost: bool) -> None:
    """Let what is still to be said go out, unless nobody is there to hear it."""
    if lost:
        writer.cancel()
    connection.put(None)
    await asyncio.wait([writer], timeout=CLOSE_S)
    writer.cancel()


def _is_hex(text: str, length: int) -> bool:
    return re.fullmatch(rf"[0-9a-f]{{{length}}}", text) is not None


@web.middleware
async def _explain_refusals(request: web.Request, handler: Any) -> web.StreamResponse:
    """Errors of ours as a status, and a header with the reason, which websocket clients can read too."""
    try:
        return await handler(request)
    except TokenRefused as error:
        return _refusal(401, error)
    except _Forbidden as error:
        return _refusal(403, error)
    except (ConfigError, WireError) as error:
        return _refusal(400, error)


def _refusal(status: int, error: AtollError) -> web.Response:
    why = str(error).replace("\n", " ").encode("ascii", "backslashreplace").decode()
    return web.Response(status=status, headers={WHY: why}, text=why)


async def _body(request: web.Request) -> dict[str, Any]:
    body = load_json(await request.read(), max_bytes=MAX_BYTES, max_depth=3)
    if not isinstance(body, dict):
        raise WireError("the request is not a JSON object.")
    return body


async def _end_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _lock(folder: Path) -> FileLock:
    """Held while a coordinator serves the run; the kernel lets go of it when its process dies, however it does."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = FileLock(folder / "lock", thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"another coordinator serves {folder.parent} already. See atoll status {folder.parent}"
        ) from None
    return lock


def _claim(log: Log, settings_digest: str, *, folder: Path) -> None:
    known = log.get("settings_digest")
    if known is None:
        log.put("settings_digest", settings_digest)
    elif known != settings_digest:
        raise ConfigError(
            f"{folder} holds the coordinator of a run with other settings. Use another --output-dir for this one, or\n"
            "start that one with its own settings."
        )


def _restore(rules: Rules, log: Log, secret: bytes) -> Membership:
    """As the log left it; without a log, the state machine asks the islands."""
    boot, state = secrets.token_hex(4), log.get("snapshot")
    if state is None:
        return Membership(rules, boot=boot, secret=secret)
    return Membership.restore(rules, boot=boot, state=state, secret=secret)


def _earlier_port(folder: Path) -> int:
    """Where the coordinator of this run listened the last time; 0 where that is not known."""
    try:
        port = read_address(folder)["port"]
    except ConfigError:
        return 0
    return port if type(port) is int and 0 < port < 65536 else 0


def read_address(folder: Path) -> dict[str, Any]:
    """What coordinator.json in the folder of a run says (the fields of `Address`). Raises ConfigError."""
    path = folder / ADDRESS_FILE
    try:
        address = load_json(path.read_bytes(), max_bytes=MAX_BYTES, max_depth=3)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): there is no coordinator in {folder}.") from None
    except WireError as error:
        raise ConfigError(f"{path} is damaged: {error} Start the coordinator again.") from None
    if not isinstance(address, dict) or not {"address", "port", "pid"} <= set(address):
        raise ConfigError(f"{path} is damaged: it does not say where. Start the coordinator again.")
    return address


def _allow_many_connections() -> None:
    """As many open files as the system lets this process have: strangers must not use them up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else 65536
    if soft < wanted:
        with suppress(ValueError, OSError):  # some systems say one limit and keep another
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
