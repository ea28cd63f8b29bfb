"""The private channel between the leader of an island and each of its other workers: a socket, JSON, and raw bytes.

    4 bytes: length of the JSON     8 bytes: length of what follows it     JSON object     bytes

Both ends are processes of one island, which trust each other as the workers of one training job do; nothing is
unpickled all the same. The end of a process ends its channel, and is known to the other end at once.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

from atoll.errors import TransportError

_HEAD = struct.Struct("<IQ")
MAX_JSON_BYTES = 1 << 28
SECRET_BYTES = 32

Message = dict[str, Any]


class ChannelClosed(TransportError):
    """The other end is gone."""


class Channel:
    """One end. Several threads may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, message: Message, payload: bytes | bytearray = b"") -> None:
        text = json.dumps(message).encode()
        with self._sending:
            try:
                self._connection.sendall(_HEAD.pack(len(text), len(payload)) + text)
                if payload:
                    self._connection.sendall(payload)
            except OSError as error:
                raise ChannelClosed(f"a worker of this island cannot be reached: {error.strerror}") from error

    def receive(self) -> tuple[Message, bytearray]:
        """The next message and the bytes that came with it. Raises ChannelClosed at the end."""
        text_bytes, payload_bytes = _HEAD.unpack(self._exactly(_HEAD.size))
        if text_bytes > MAX_JSON_BYTES:
            raise ChannelClosed(f"a worker of this island claims a message of {text_bytes} bytes.")
        message = json.loads(self._exactly(text_bytes))
        return message, self._exactly(payload_bytes)

    def close(self) -> None:
        """Let go of this end; where another process holds it as well, nothing ends."""
        self._connection.close()

    def end(self) -> None:
        """End the channel for all who hold it, and wake whoever waits for a message here."""
        with suppress(OSError):  # the other end was first
            self._connection.shutdown(socket.SHUT_RDWR)

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view, done = memoryview(data), 0
        while done < count:
            try:
                got = self._connection.recv_into(view[done:])
            except OSError as error:
                raise ChannelClosed(f"a worker of this island is gone: {error.strerror}") from error
            if not got:
                raise ChannelClosed("a worker of this island is gone")
            done += got
        return data


def pair() -> tuple[Channel, Channel]:
    """Both ends of a channel within this machine, for a process that is about to be forked."""
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs)


def accept(listener: socket.socket, secret: bytes, *, count: int, timeout_s: float) -> dict[int, Channel]:
    """Channels to `count` workers that know the secret, by the number each of them says it has."""
    channels: dict[int, Channel] = {}
    listener.settimeout(timeout_s)
    while len(channels) < count:
        try:
            connection, _ = listener.accept()
            connection.settimeout(timeout_s)
            index = _admit(connection, secret)
        except OSError as error:
            raise TransportError(f"{count - len(channels)} workers of this island never came: {error}") from error
        if index is None:
            connection.close()
            continue
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channels[index] = Channel(connection)
    return channels


def _admit(connection: socket.socket, secret: bytes) -> int | None:
    shown = connection.recv(SECRET_BYTES + 4, socket.MSG_WAITALL)
    known = hmac.compare_digest(shown[:SECRET_BYTES], secret)
    return int.from_bytes(shown[SECRET_BYTES:], "little") if known else None


def reach(address: str, port: int, secret: bytes, *, index: int, timeout_s: float) -> Channel:
    """The other end, of worker `index`. Raises TransportError."""
    try:
        connection = socket.create_connection((address, port), timeout=timeout_s)
        connection.sendall(secret + index.to_bytes(4, "little"))
    except OSError as error:
        raise TransportError(f"the first worker of this island is not reached at {address}:{port}: {error}") from error
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Channel(connection)
