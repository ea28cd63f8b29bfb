"""Keys of our own: self-signed certificates, trusted by nothing but their fingerprint.

A server of ours shows a certificate that it signed itself. Whoever is to trust it was told the certificate's SHA-256
beforehand (in a join token, or by the coordinator), and trusts exactly that: no authority, no host name. TLS 1.3 makes
the server prove that it has the key, and the pin is compared within the handshake, before a byte of ours is sent.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from atoll.errors import ConfigError, StorageError

CERTIFICATE, KEY = "certificate.pem", "key.pem"
# A pin has no use for dates: the token that carries it expires. Clocks of other hosts may be behind.
VALID_FROM = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
VALID_UNTIL = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)

SERVER_NAME = "atoll"
WRONG_KEY = "this is another host's key"


@dataclass(frozen=True)
class Identity:
    """A certificate with its key, both as PEM. fingerprint: 64 hex digits, SHA-256 of the certificate."""

    certificate: bytes
    key: bytes

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.certificate.decode())).hexdigest()

    def __repr__(self) -> str:
        return f"Identity({self.fingerprint[:16]}…)"


def make_identity(name: str) -> Identity:
    """A new key on the curve P-256 and its certificate. name: for people who look at it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    # The one thing that trusts by a name is a scraper that is given this certificate as its authority.
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
    certificate = builder.not_valid_before(VALID_FROM).not_valid_after(VALID_UNTIL).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    return Identity(certificate.public_bytes(pem), key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


def load_or_make_identity(folder: Path, *, name: str) -> Identity:
    """The identity kept in `folder`, made there once, its key readable by this user alone.

    Raises ConfigError where one half is missing or damaged: a new key would lock out everybody who holds a token.
    """
    certificate, key = folder / CERTIFICATE, folder / KEY
    if not certificate.exists() and not key.exists():
        identity = make_identity(name)
        write_private(key, identity.key)
        write_private(certificate, identity.certificate)
        return identity
    try:
        identity = Identity(certificate.read_bytes(), key.read_bytes())
        server_context(identity)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"the key in {folder} cannot be used ({error}). Bring back {CERTIFICATE} and {KEY} from a copy;\n"
            "or remove both for a new key, and give out new tokens: those that exist name the old one."
        ) from None
    return identity


def server_context(identity: Identity) -> ssl.SSLContext:
    """For a server with this identity: TLS 1.3 and nothing older."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.TemporaryDirectory(prefix="atoll-") as folder:  # Python reads keys from files only; mode 0700
        for name, content in ((CERTIFICATE, identity.certificate), (KEY, identity.key)):
            write_private(Path(folder, name), content)
        context.load_cert_chain(Path(folder, CERTIFICATE), Path(folder, KEY))
    return context


def client_context(fingerprint: str) -> ssl.SSLContext:
    """For a client that talks to the owner of one certificate only, whatever its name or address.

    A handshake with any other raises ssl.SSLCertVerificationError, "this is another host's key".
    """
    context = _PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.pin = fingerprint
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # no authority: `_PinnedObject` and `_PinnedSocket` verify
    context.sslobject_class = _PinnedObject
    context.sslsocket_class = _PinnedSocket
    return context


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only this user may read, whole or not at all, and on disk when this returns."""
    draft = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written ({error.strerror}). Free some space or choose another folder."
        ) from None


# --- inside ---


class _PinnedContext(ssl.SSLContext):
    pin: str


def _verify(connection: Any) -> None:
    shown = hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()
    if not hmac.compare_digest(shown, connection.context.pin):
        raise ssl.SSLCertVerificationError(WRONG_KEY)


class _PinnedObject(ssl.SSLObject):
    """What asyncio uses."""

    def do_handshake(self) -> None:
        super().do_handshake()
        _verify(self)


class _PinnedSocket(ssl.SSLSocket):
    """What blocking sockets use."""

    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        _verify(self)
