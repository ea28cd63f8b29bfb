"""State transfer: what arrives is what was sent, or nothing is used."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import socket
import ssl
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from torch import Tensor

from atoll.elastic import donate
from atoll.elastic.certs import make_identity, server_context
from atoll.elastic.donate import (
    NotEnoughMemory,
    StateServer,
    TransferError,
    fetch_state,
    free_memory_bytes,
    read_header,
)
from atoll.elastic.messages import Donor, Serve
from atoll.errors import AtollError, ConfigError

LIMIT = 1 << 24
METADATA = {"round": 3, "digest": "9f3c", "counts": [1, 2]}
TENSORS = {
    "weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "view": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "none": torch.empty(0, 5),
    "flags": torch.tensor([True, False, True]),
    "codes": torch.tensor([1, 255], dtype=torch.uint8),
    "wide": torch.tensor([1e300], dtype=torch.float64),
}


@contextmanager
def in_a_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def serving(
    snapshot: Callable[[], donate.State] = lambda: (TENSORS, METADATA), *, now: list[float] | None = None
) -> Iterator[Donor]:
    """A donor that announced the ticket "ticket"; what a joiner is told of it."""
    clock = now or [0.0]
    with in_a_loop() as loop:
        server = StateServer(snapshot, clock=lambda: clock[0])
        asyncio.run_coroutine_threadsafe(server.start("127.0.0.1"), loop).result(10)
        server.announce(Serve("ticket", "joiner"))  # the loop has nothing to do yet
        try:
            yield Donor("donor", "127.0.0.1", server.port, "ticket", server.fingerprint, 3)
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)


def test_the_state_arrives_as_it_was_sent() -> None:
    with serving() as donor:
        tensors, metadata = fetch_state(donor, max_bytes=LIMIT)
    assert metadata == METADATA
    assert tensors.keys() == TENSORS.keys()
    for name, sent in TENSORS.items():
        assert (tensors[name].dtype, tensors[name].shape) == (sent.dtype, sent.shape)
        assert torch.equal(tensors[name], sent), name


def test_what_travels_is_a_safetensors_file_and_its_sha256() -> None:
    head, ordered = donate._head(TENSORS, METADATA)
    body = b"".join((head, *map(donate._bytes_of, ordered)))
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in load(body).items())
    with serving() as donor, socket.create_connection((donor.address, donor.port)) as plain:
        secure = ssl._create_unverified_context().wrap_socket(plain)
        secure.sendall(b"GET /v1/state HTTP/1.0\r\nAuthorization: Bearer ticket\r\n\r\n")
        answer = b"".join(iter(lambda: secure.recv(65536), b""))
        secure.close()
    assert answer.partition(b"\r\n\r\n")[2] == body + hashlib.sha256(body).digest()


def test_what_others_hold_is_fetched_when_its_turn_comes_and_arrives_the_same() -> None:
    asked: list[str] = []

    def promised(name: str, tensor: torch.Tensor) -> donate.Promised:
        def load() -> torch.Tensor:
            asked.append(name)
            return tensor

        return donate.Promised(tensor.dtype, tuple(tensor.shape), load)

    kept: dict[str, torch.Tensor] = {}
    half = {name: promised(name, value) for name, value in list(TENSORS.items())[::2]}
    with serving(lambda: (TENSORS | half, METADATA)) as donor:
        rest, metadata = fetch_state(donor, max_bytes=LIMIT, keep=kept.__setitem__)
    assert (rest, metadata) == ({}, METADATA)
    assert all(torch.equal(kept[name], sent) for name, sent in TENSORS.items())
    assert sorted(asked) == sorted(half)


def test_a_promise_that_is_not_kept_breaks_the_transfer_off() -> None:
    def lose() -> torch.Tensor:
        raise ConnectionError("its worker is gone")

    lost = donate.Promised(torch.float32, (3, 4), lose)
    with (
        serving(lambda: (TENSORS | {"weight": lost}, METADATA)) as donor,
        pytest.raises(TransferError, match="broke off"),
    ):
        fetch_state(donor, max_bytes=LIMIT)


def test_a_ticket_is_good_for_one_fetch() -> None:
    with serving() as donor:
        fetch_state(donor, max_bytes=LIMIT)
        with pytest.raises(TransferError, match="used before"):
            fetch_state(donor, max_bytes=LIMIT)


def test_a_ticket_that_nobody_announced_is_refused_and_costs_no_snapshot() -> None:
    taken: list[int] = []

    def snapshot() -> donate.State:
        taken.append(1)
        return TENSORS, METADATA

    with serving(snapshot) as donor, pytest.raises(TransferError, match="not known"):
        fetch_state(replace(donor, ticket="guess"), max_bytes=LIMIT)
    assert not taken


def test_a_ticket_expires() -> None:
    now = [0.0]
    with serving(now=now) as donor:
        now[0] = donate.TICKET_LIFETIME_S + 1
        with pytest.raises(TransferError, match="expired"):
            fetch_state(donor, max_bytes=LIMIT)


def test_another_key_is_noticed_before_the_ticket_is_shown() -> None:
    with serving() as donor:
        with pytest.raises(TransferError, match="another host's key"):
            fetch_state(replace(donor, fingerprint=make_identity("x").fingerprint), max_bytes=LIMIT)
        fetch_state(donor, max_bytes=LIMIT)  # the ticket was not spent


def test_a_donor_that_cannot_give_says_why() -> None:
    def snapshot() -> donate.State:
        raise AtollError("this island is about to leave.")

    with serving(snapshot) as donor, pytest.raises(TransferError, match="about to leave"):
        fetch_state(donor, max_bytes=LIMIT)


def test_a_donor_that_is_silent_is_given_up() -> None:
    boundary = threading.Event()

    def snapshot() -> donate.State:
        boundary.wait(10)
        return TENSORS, METADATA

    with serving(snapshot) as donor:
        with pytest.raises(TransferError, match="silent"):
            fetch_state(donor, max_bytes=LIMIT, idle_s=0.2)
        boundary.set()


def test_a_donor_that_is_not_there_is_told() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        donor = Donor("donor", "127.0.0.1", unused.getsockname()[1], "ticket", "ab" * 32, 3)
        with pytest.raises(TransferError, match="broke off"):
            fetch_state(donor, max_bytes=LIMIT)


def test_too_little_memory_is_told_before_the_transfer() -> None:
    with serving() as donor, pytest.raises(NotEnoughMemory, match="Free some"):
        fetch_state(donor, max_bytes=LIMIT, free_bytes=lambda: 100)


def test_more_than_the_run_can_weigh_is_refused() -> None:
    with serving() as donor, pytest.raises(TransferError, match="at most 100"):
        fetch_state(donor, max_bytes=100)


# --- a donor that lies, breaks or dies ---


def whole_answer(tensors: dict[str, Tensor] = TENSORS) -> bytes:
    head, ordered = donate._head(tensors, METADATA)
    body = b"".join((head, *map(donate._bytes_of, ordered)))
    return body + hashlib.sha256(body).digest()


@contextmanager
def answering(body: bytes, *, length: int | None = None, extra: str = "") -> Iterator[Donor]:
    """A donor that answers with these bytes, whatever is asked, and then closes the connection as a kill would."""
    identity = make_identity("liar")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        plain, _ = listener.accept()
        with plain:
            secure = server_context(identity).wrap_socket(plain, server_side=True)
            secure.recv(65536)
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body) if length is None else length}\r\n{extra}\r\n"
            with suppress(OSError):  # the joiner may have seen enough
                secure.sendall(head.encode() + body)
            secure.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        port = listener.getsockname()[1]
        yield Donor("donor", "127.0.0.1", port, "ticket", identity.fingerprint, 3)
    finally:
        thread.join()
        listener.close()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_donor_that_dies_in_mid_transfer_is_told(share: float) -> None:
    whole = whole_answer(TENSORS | {"large": torch.zeros(300_000)})
    cut = whole[: int(share * len(whole))]
    with answering(cut, length=len(whole)) as donor, pytest.raises(TransferError, match="broke off"):
        fetch_state(donor, max_bytes=LIMIT)


def test_every_flipped_bit_is_noticed() -> None:
    whole = whole_answer()
    places = [0, 3, 12, 40, len(whole) // 2, len(whole) - 40, len(whole) - 1]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        with answering(bytes(damaged)) as donor, pytest.raises(TransferError):
            fetch_state(donor, max_bytes=LIMIT)


def test_a_compressed_answer_is_not_unpacked() -> None:
    body = whole_answer()
    with answering(body, extra="Content-Encoding: gzip\r\n") as donor:
        tensors, _ = fetch_state(donor, max_bytes=LIMIT)
    assert torch.equal(tensors["weight"], TENSORS["weight"])


def bomb(**changes: object) -> bytes:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    return json.dumps({"__metadata__": {"atoll": "{}"}, "x": entry}).encode()


BOMBS = {
    "2^63 elements": bomb(shape=[2**62, 2]),
    "negative shape": bomb(shape=[-2, -1]),
    "zero times huge": bomb(shape=[0] + [2**62] * 31, data_offsets=[0, 8]),
    "a hundred thousand dims": bomb(shape=[1] * 100_000),
    "offsets beyond": bomb(shape=[2**40], data_offsets=[0, 2**42]),
    "offsets backwards": bomb(data_offsets=[8, 0]),
    "a gap": bomb(data_offsets=[8, 16]),
    "no dtype of ours": bomb(dtype="OBJECT"),
    "dtype is a list": bomb(dtype=["F32"]),
    "shape of floats": bomb(shape=[2.0]),
    "shape of bools": bomb(shape=[True, 2]),
    "unknown key": bomb(code="import os"),
    "no metadata": b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    "deep": b'{"x": ' + b"[" * 50_000,
    "not an object": b"[]",
    "not JSON": b"\xff" * 100,
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_header_that_lies_is_refused_before_anything_is_allocated(name: str) -> None:
    gc.collect()
    tracemalloc.start()
    held = len(BOMBS[name])
    with pytest.raises(TransferError):
        read_header(BOMBS[name], data_bytes=8, max_bytes=LIMIT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000 + 20 * held


@pytest.mark.parametrize("claimed", [2**31, 2**63, 2**64 - 1])
def test_a_header_of_any_length_is_refused_unread(claimed: int) -> None:
    body = claimed.to_bytes(8, "little") + b"x" * 100
    with answering(body, length=2**62) as donor, pytest.raises(TransferError, match=f"header of {claimed}"):
        fetch_state(donor, max_bytes=LIMIT)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=120) | st.text(max_size=120).map(str.encode), st.integers(0, 64))
def test_any_header_is_read_or_refused(header: bytes, size: int) -> None:
    with pytest.raises(TransferError):
        read_header(header, data_bytes=size, max_bytes=LIMIT)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            asyncio.run(StateServer(lambda: (TENSORS, METADATA)).start("127.0.0.1", port))


def test_free_memory_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    assert free_memory_bytes(proc=tmp_path, cgroup=tmp_path) == 50 * 1024
    for name, content in (("memory.max", "40000"), ("memory.current", "30000"), ("memory.stat", "inactive_file 5000")):
        (tmp_path / name).write_text(content + "\n")
    assert free_memory_bytes(proc=tmp_path, cgroup=tmp_path) == 15_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes(proc=tmp_path, cgroup=tmp_path) == 50 * 1024
    assert free_memory_bytes(proc=tmp_path / "nothing", cgroup=tmp_path / "nothing") is None
