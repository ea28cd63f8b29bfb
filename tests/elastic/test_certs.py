"""Keys: a client talks to the owner of one certificate, over TLS 1.3, or not at all."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from atoll.elastic.certs import (
    KEY,
    Identity,
    client_context,
    load_or_make_identity,
    make_identity,
    server_context,
    write_private,
)
from atoll.errors import ConfigError, StorageError


@contextmanager
def answering(identity: Identity) -> Iterator[tuple[str, int]]:
    """A server that shakes hands once."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        plain, _ = listener.accept()
        with plain, suppress(OSError), server_context(identity).wrap_socket(plain, server_side=True) as secure:
            secure.sendall(b"hi")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        thread.join()
        listener.close()


def test_a_client_talks_to_the_key_it_was_told() -> None:
    identity = make_identity("host")
    context = client_context(identity.fingerprint)
    with (
        answering(identity) as place,
        socket.create_connection(place) as plain,
        context.wrap_socket(plain) as secure,
    ):
        assert secure.recv(2) == b"hi"
        assert secure.version() == "TLSv1.3"


def test_a_client_talks_to_no_other_key() -> None:
    context = client_context(make_identity("host").fingerprint)
    with (
        answering(make_identity("host")) as place,
        socket.create_connection(place) as plain,
        pytest.raises(ssl.SSLCertVerificationError, match="another host's key"),
    ):
        context.wrap_socket(plain)


@pytest.mark.parametrize("side", ["client", "server"])
def test_older_tls_is_not_spoken(side: str) -> None:
    identity = make_identity("host")
    context = client_context(identity.fingerprint) if side == "client" else server_context(identity)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3


def test_an_identity_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    identity = load_or_make_identity(tmp_path, name="host")
    assert load_or_make_identity(tmp_path, name="host") == identity
    assert stat.S_IMODE((tmp_path / KEY).stat().st_mode) == 0o600


def test_a_key_that_is_damaged_or_gone_is_not_replaced_in_silence(tmp_path: Path) -> None:
    load_or_make_identity(tmp_path, name="host")
    (tmp_path / KEY).write_bytes(b"garbage")
    with pytest.raises(ConfigError, match="cannot be used"):
        load_or_make_identity(tmp_path, name="host")
    (tmp_path / KEY).unlink()
    with pytest.raises(ConfigError, match="cannot be used"):
        load_or_make_identity(tmp_path, name="host")


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    load_or_make_identity(tmp_path, name="host")
    (tmp_path / KEY).write_bytes(make_identity("other").key)
    with pytest.raises(ConfigError, match="cannot be used"):
        load_or_make_identity(tmp_path, name="host")


def test_a_private_file_cannot_be_written_everywhere(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        write_private(tmp_path / "file" / "below", b"")


def test_an_identity_does_not_show_its_key() -> None:
    identity = make_identity("host")
    assert identity.key.decode()[40:80] not in repr(identity)
