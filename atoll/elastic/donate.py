"""The committed state from one island to another, as safetensors over TLS.

    joiner ── GET /v1/state, with the ticket that the coordinator gave it ──▶ donor
           ◀── 8 bytes, JSON header, tensors (a safetensors file), 32 bytes SHA-256 of all of it ──

The donor streams out of tensors that were captured at one of its step boundaries; the joiner checks every length that
is claimed before it allocates anything, and the SHA-256 before it believes anything. Nothing is unpickled. Both ends
know each other: the joiner by its ticket, the donor by the fingerprint that the coordinator passed on.

What is transferred is proved once more by the digest of the anchor, which the coordinator knows: see `messages.Have`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp import web
from torch import Tensor

from atoll.elastic.addresses import join_host_port
from atoll.elastic.certs import make_identity
from atoll.elastic.client import pinned_session
from atoll.elastic.crash import crash_point
from atoll.elastic.messages import Donor, Serve
from atoll.elastic.serving import SecureServer, url
from atoll.elastic.wire import WireError, load_json, printable
from atoll.errors import AtollError, ConfigError, TransportError


@dataclass(frozen=True)
class Promised:
    """A tensor that another process holds until its turn comes.

    load: fetches it; may block, and is called once at most. Raises ConnectionError where it cannot.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def element_size(self) -> int:
        return self.dtype.itemsize


Held = Tensor | Promised
State = tuple[Mapping[str, Held], dict[str, Any]]

CHUNK_BYTES = 256 * 1024  # at a time: the loop that sends them also sends the heartbeats
MAX_HEADER_BYTES = 8 * 1024 * 1024  # about 80,000 tensors
MAX_HEADER_DEPTH = 4
MAX_DIMS = 32
TICKET_LIFETIME_S = 600.0
HASH_BYTES = 32
AT_ONCE = 2  # transfers a donor does at a time: each holds a copy of the state

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"  # safetensors' own word; its values must be strings


class TransferError(TransportError):
    """The state did not come, or not as it was sent. Nothing was changed: ask for another donor."""


class NotEnoughMemory(ConfigError):
    """The state does not fit into the memory that is free here."""


# --- the donor ---


class StateServer:
    """The donor's end, one for each island: serves whoever shows a ticket that the coordinator announced.

    snapshot: called in a thread of its own, may block until the island's next step boundary; returns tensors that will
    not change any more, and metadata of plain JSON values. Raises AtollError where it has no committed state to give.
    A ticket is good for one fetch, and for `TICKET_LIFETIME_S`.
    """

    def __init__(self, snapshot: Callable[[], State], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._snapshot = snapshot
        self._clock = clock
        self._tickets: dict[bytes, float] = {}  # hash of the ticket -> until when
        self._identity = make_identity("atoll island")
        self._running = asyncio.Semaphore(AT_ONCE)
        app = web.Application(client_max_size=1024)
        app.router.add_get("/v1/state", self._serve)
        self._server = SecureServer(app, self._identity)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate shown, 64 hex digits."""
        return self._identity.fingerprint

    @property
    def port(self) -> int:
        """What it listens on, once started."""
        return self._server.port

    async def start(self, host: str, port: int = 0) -> None:
        """Listen on an address of this machine. Raises ConfigError for a port that is taken."""
        await self._server.start(host, port)

    async def stop(self) -> None:
        """Stop listening; transfers that are under way are cut off."""
        await self._server.stop()

    def announce(self, serve: Serve) -> None:
        """From now on the ticket in `serve` is good."""
        now = self._clock()
        self._tickets = {ticket: until for ticket, until in self._tickets.items() if until > now}
        self._tickets[_hash(serve.ticket)] = now + TICKET_LIFETIME_S

    def _take(self, authorization: str) -> bool:
        """Whether the ticket shown is good; afterwards it is not. Hashes are looked up: nothing leaks by time."""
        until = self._tickets.pop(_hash(authorization.removeprefix("Bearer ")), None)
        return until is not None and until > self._clock()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if not self._take(request.headers.get("Authorization", "")):
            return web.Response(status=401, text="this ticket is not known, was used before, or has expired.")
        self._server.admit(request)
        crash_point("donor.asked")
        async with self._running:
            try:
                tensors, metadata = await _in_thread(self._snapshot)
                return await _stream(request, tensors, metadata)
            except AtollError as error:
                return web.Response(status=503, text=str(error))
            except ConnectionError:
                return web.Response(status=503, text="you have left.")  # the joiner: nobody reads this


async def _stream(request: web.Request, tensors: Mapping[str, Held], metadata: Mapping[str, Any]) -> web.StreamResponse:
    head, ordered = _head(tensors, metadata)
    size = len(head) + sum(tensor.nbytes for tensor in ordered) + HASH_BYTES
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream", "Content-Length": str(size)})
    await response.prepare(request)
    digest = hashlib.sha256()
    for held in (head, *ordered):
        for chunk in _chunks(await _view_of(held, request)):
            digest.update(chunk)
            await response.write(chunk)
            crash_point("donor.sending")
    await response.write(digest.digest())
    await response.write_eof()
    crash_point("donor.sent")
    return response


async def _view_of(held: bytes | Held, request: web.Request) -> memoryview:
    """Its bytes; those of a promise are fetched in a thread, for this loop sends the heartbeats as well.

    Where it is not kept the connection is cut: the head is sent, and no answer could say it any more.
    """
    if isinstance(held, bytes):
        return memoryview(held)
    if not isinstance(held, Promised):
        return _bytes_of(held)
    try:
        tensor = await asyncio.to_thread(held.load)
        if (tensor.dtype, tuple(tensor.shape)) != (held.dtype, held.shape):
            raise ConnectionError("what was promised is not what came")
    except ConnectionError:
        if request.transport is not None:
            request.transport.abort()
        raise
    return _bytes_of(tensor)


def _head(tensors: Mapping[str, Held], metadata: Mapping[str, Any]) -> tuple[bytes, list[Held]]:
    """Length and header of a safetensors file, and its tensors in order: wide types first, so that all are aligned."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {METADATA: {"atoll": json.dumps(metadata)}}
    start = 0
    for name in names:
        stop = start + tensors[name].nbytes
        dtype, shape = NAMES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [tensors[name] for name in names]


def _chunks(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy where it lies contiguous in host memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


async def _in_thread(function: Callable[[], State]) -> State:
    """`function()` in a thread that nobody waits for at the end: an island that leaves reaches no other boundary."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[State] = loop.create_future()

    def settle(answer: State | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        elif answer is not None:
            future.set_result(answer)

    def work() -> None:
        answer, error = None, None
        try:
            answer = function()
        except Exception as caught:  # handed to whoever awaits the future
            error = caught
        with suppress(RuntimeError):  # the loop is closed: the island has left
            loop.call_soon_threadsafe(settle, answer, error)

    threading.Thread(target=work, name="atoll-snapshot", daemon=True).start()
    return await future


# --- the joiner ---


def fetch_state(
    donor: Donor,
    *,
    max_bytes: int,
    idle_s: float = 60.0,
    free_bytes: Callable[[], int | None] | None = None,
    keep: Callable[[str, Tensor], None] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state that `donor` holds: tensors on the host, and metadata. Blocks until it is here.

    keep: is given the tensors as they come, which are then not returned; they are whole if this returns.

    max_bytes: what the tensors of this run can weigh at most. idle_s: the longest the donor may be silent (it
    answers at its next step boundary). free_bytes: memory that may be taken, None where that is not known.
    Raises TransferError or NotEnoughMemory, before anything large is allocated where lengths or memory are the cause.
    """
    tensors: dict[str, Tensor] = {}
    metadata = asyncio.run(
        _fetch(
            donor,
            max_bytes=max_bytes,
            idle_s=idle_s,
            free_bytes=free_bytes or free_memory_bytes,
            keep=keep or tensors.__setitem__,
        )
    )
    return tensors, metadata


async def _fetch(
    donor: Donor,
    *,
    max_bytes: int,
    idle_s: float,
    free_bytes: Callable[[], int | None],
    keep: Callable[[str, Tensor], None],
) -> dict[str, Any]:
    where = join_host_port(donor.address, donor.port)
    try:
        async with _asking(donor, idle_s=idle_s) as response:
            if response.status != 200:
                words = printable((await response.content.read(300)).decode(errors="replace"), limit=200)
                raise TransferError(f"the donor {where} refused: {words}")
            return await _receive(_Reader(response), max_bytes=max_bytes, free_bytes=free_bytes, keep=keep)
    except TimeoutError:
        raise TransferError(f"the donor {where} was silent for {idle_s:.0f} s.") from None
    except (aiohttp.ClientError, asyncio.IncompleteReadError, ConnectionError) as error:
        raise TransferError(f"the transfer from {where} broke off: {_cause(error)}") from None


@asynccontextmanager
async def _asking(donor: Donor, *, idle_s: float) -> AsyncIterator[aiohttp.ClientResponse]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=idle_s)
    where = url(donor.address, donor.port, "/v1/state")
    async with (
        pinned_session(
            donor.fingerprint, headers={"Authorization": f"Bearer {donor.ticket}"}, timeout=timeout
        ) as session,
        session.get(where, allow_redirects=False) as response,
    ):
        yield response


class _Reader:
    """The body of a response, counted and hashed on its way."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        if response.content_length is None:
            raise TransferError("the donor does not say how much it sends.")
        self.left = response.content_length
        self._content = response.content
        self._digest = hashlib.sha256()

    async def exactly(self, count: int) -> bytes:
        data = await self._content.readexactly(count)
        self.left -= count
        self._digest.update(data)
        return data

    async def into(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            data = await self._content.read(min(CHUNK_BYTES, len(view) - done))
            if not data:
                raise asyncio.IncompleteReadError(b"", len(view) - done)
            self._digest.update(data)
            view[done : done + len(data)] = data
            done += len(data)
        self.left -= done

    async def check_hash(self) -> None:
        expected = self._digest.digest()
        if await self.exactly(HASH_BYTES) != expected:
            raise TransferError("the state was altered on its way: its SHA-256 is wrong. Nothing of it was used.")


async def _receive(
    reader: _Reader, *, max_bytes: int, free_bytes: Callable[[], int | None], keep: Callable[[str, Tensor], None]
) -> dict[str, Any]:
    header_bytes = int.from_bytes(await reader.exactly(8), "little")
    if header_bytes > min(MAX_HEADER_BYTES, reader.left):
        raise TransferError(f"the donor claims a header of {header_bytes} bytes; at most {MAX_HEADER_BYTES} are read.")
    header = await reader.exactly(header_bytes)
    parts, metadata = read_header(header, data_bytes=reader.left - HASH_BYTES, max_bytes=max_bytes)
    _check_memory(reader.left, free_bytes())
    for part in parts:
        flat = torch.empty(part.stop - part.start, dtype=torch.uint8)
        await reader.into(flat.numpy().data)
        keep(part.name, flat.view(part.dtype).reshape(part.shape))
    await reader.check_hash()
    return metadata


@dataclass(frozen=True)
class Part:
    """Where a tensor lies among the data: bytes [start, stop)."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(header: bytes, *, data_bytes: int, max_bytes: int) -> tuple[list[Part], dict[str, Any]]:
    """The tensors that a safetensors header describes, in the order of their bytes, and the metadata.

    They fill the `data_bytes` that follow without a gap or an overlap, and are at most `max_bytes`; TransferError else.
    """
    if data_bytes > max_bytes:
        raise TransferError(f"the donor would send {data_bytes} bytes; the state of this run has at most {max_bytes}.")
    try:
        content = load_json(header, max_bytes=MAX_HEADER_BYTES, max_depth=MAX_HEADER_DEPTH)
        if not isinstance(content, dict):
            raise WireError("not an object.")
        metadata = _metadata(content.pop(METADATA, {}))
        parts = sorted((_part(name, entry) for name, entry in content.items()), key=lambda part: part.start)
    except WireError as error:
        raise TransferError(f"the header of the state cannot be read: {error}") from None
    ends = [0, *(part.stop for part in parts)]
    if [part.start for part in parts] != ends[:-1] or ends[-1] != data_bytes:
        raise TransferError("the header of the state does not fit what follows it.")
    return parts, metadata


def _metadata(entry: Any) -> dict[str, Any]:
    text = entry.get("atoll") if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise WireError("it has no metadata of ours.")
    metadata = load_json(text, max_bytes=MAX_HEADER_BYTES, max_depth=64)
    if not isinstance(metadata, dict):
        raise WireError("its metadata is not an object.")
    return metadata


def _part(name: str, entry: Any) -> Part:
    shown = printable(name)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise WireError(f"{shown!r} is not a tensor.")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    shape, offsets = entry["shape"], entry["data_offsets"]
    if dtype is None or not _are_sizes(shape) or not _are_sizes(offsets) or len(shape) > MAX_DIMS or len(offsets) != 2:
        raise WireError(f"{shown!r} has a dtype, shape or place that no tensor has.")
    if offsets[1] - offsets[0] != prod(shape) * dtype.itemsize:
        raise WireError(f"{shown!r} has {offsets[1] - offsets[0]} bytes, which is not what its shape needs.")
    return Part(name, dtype, tuple(shape), offsets[0], offsets[1])


def _are_sizes(values: Any) -> bool:
    """A list of integers that could count bytes; small enough that their product is quickly known."""
    return (
        isinstance(values, list)
        and len(values) <= MAX_DIMS
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )


def _check_memory(needed: int, free: int | None) -> None:
    if free is not None and needed > free:
        raise NotEnoughMemory(
            f"the state of this run has {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB of memory are free here. "
            "Free some, or join from a larger machine."
        )


# --- inside ---


def free_memory_bytes(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that this process may still take: of the machine, and of its container. None where it cannot be told."""
    free = [value for value in (_machine_free(proc / "meminfo"), _container_free(cgroup)) if value is not None]
    return min(free) if free else None


def _machine_free(meminfo: Path) -> int | None:
    if not meminfo.exists():
        return None
    rows = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines() if ":" in line)
    return int(rows["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in rows else None


def _container_free(cgroup: Path) -> int | None:
    """The limit of the control group less what is used, not counting cached files that the kernel would give up."""
    limit, used, stat = cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat"
    if not (limit.exists() and used.exists() and stat.exists()):
        return None
    ceiling = limit.read_text(encoding="ascii").strip()
    if ceiling == "max":
        return None
    counts = dict(line.split() for line in stat.read_text(encoding="ascii").splitlines())
    return max(0, int(ceiling) - int(used.read_text(encoding="ascii")) + int(counts.get("inactive_file", 0)))


def _hash(ticket: str) -> bytes:
    return hashlib.sha256(ticket.encode(errors="replace")).digest()


def _cause(error: Exception) -> str:
    """One line of what the libraries say; a wrong key first, which they wrap."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return str(error.certificate_error.args[0])
    return printable(str(error) or type(error).__name__, limit=160)
