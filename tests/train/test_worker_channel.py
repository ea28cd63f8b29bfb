"""Workers of an island hear each other, and of each other's end at once."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator

import pytest

from atoll.errors import TransportError
from atoll.train.worker_channel import SECRET_BYTES, Channel, ChannelClosed, accept, pair, reach


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = pair()
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_and_bytes_arrive_as_they_were_sent(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    ours.send({"do": "take", "weight": 2.5}, b"rows")
    ours.send({"do": "stop"})
    assert [theirs.receive(), theirs.receive()] == [({"do": "take", "weight": 2.5}, b"rows"), ({"do": "stop"}, b"")]


def test_the_end_of_a_process_is_heard_by_the_other(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    theirs.close()
    with pytest.raises(ChannelClosed):
        ours.receive()
    with pytest.raises(ChannelClosed):
        ours.send({"do": "step"})


def test_only_who_knows_the_secret_is_let_in_and_each_by_its_number() -> None:
    secret = secrets.token_bytes(SECRET_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        stranger = reach("127.0.0.1", port, bytes(SECRET_BYTES), index=1, timeout_s=5)
        own = [reach("127.0.0.1", port, secret, index=index, timeout_s=5) for index in (2, 1)]
        channels = accept(listener, secret, count=2, timeout_s=5)
        for index, channel in zip((2, 1), own, strict=True):
            channel.send({"index": index})
            assert channels[index].receive()[0] == {"index": index}
        with pytest.raises(ChannelClosed):
            stranger.receive()
        for channel in (stranger, *own, *channels.values()):
            channel.close()


def test_workers_that_never_come_are_counted() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(TransportError, match="2 workers of this island never came"),
    ):
        accept(listener, bytes(SECRET_BYTES), count=2, timeout_s=0.05)


def test_threads_may_send_at_the_same_time(ends: tuple[Channel, Channel]) -> None:
    ours, theirs = ends
    threads = [threading.Thread(target=ours.send, args=({"n": n}, bytes([n]) * 300_000)) for n in range(8)]
    for thread in threads:
        thread.start()
    received = [theirs.receive() for _ in threads]
    for thread in threads:
        thread.join()
    assert sorted(message["n"] for message, _ in received) == list(range(8))
    assert all(payload == bytes([message["n"]]) * 300_000 for message, payload in received)
