"""One line that lets a machine in: where the coordinator is, whose key it must show, and a secret.

    atoll1.<base64url of: length, role, expiry, token id, run id, fingerprint, secret, addresses, checksum>

The joiner talks to nobody but the owner of the pinned key, and shows the secret to nobody else. The coordinator keeps a
hash of the secret: who reads its files learns no token. The length and the checksum tell a token that was cut short in
copying from one that was altered, and both from one that the coordinator does not know.

A token lets *in*: once admitted, a member shows a key of its own, and may come back after the token has expired. Nobody
else can come back in its name. A token that is revoked admits nobody, and the members it let in are out.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from atoll.elastic.addresses import host_and_port, reach
from atoll.elastic.log import open_database, transaction
from atoll.errors import AtollError, ConfigError

PREFIX = "atoll1."
JOIN, OPERATOR, WATCH = "join", "operator", "watch"
ROLES = (JOIN, OPERATOR, WATCH)  # in the order of their numbers in a token
LIFETIME_S = 24 * 3600.0
ENVIRONMENT = "ATOLL_TOKEN"

_HEAD = struct.Struct(">HBQ8s8s32s32s")  # length of all, role, expiry, id, run, fingerprint, secret
_CHECKSUM_BYTES = 4
_MAX_BYTES = 1024

TABLES = """
CREATE TABLE IF NOT EXISTS tokens
    (id TEXT PRIMARY KEY, secret_hash TEXT NOT NULL, role TEXT NOT NULL, made REAL NOT NULL, expires REAL NOT NULL,
    revoked REAL, note TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS members
    (member TEXT PRIMARY KEY, key_hash TEXT NOT NULL, token TEXT NOT NULL);
"""


class TokenRefused(AtollError):
    """A token, or a member's key, that does not let in. The message says why, and what to do."""

    exit_code = 3


@dataclass(frozen=True)
class Token:
    """What a token says.

    addresses: "host:port" of the coordinator, the first that answers is taken. fingerprint: SHA-256 of its certificate,
    64 hex digits. id, run: 16 hex digits. secret: 64 hex digits, never shown by repr. expires: seconds since 1970.
    """

    addresses: tuple[str, ...]
    fingerprint: str
    id: str
    run: str
    expires: float
    role: str
    secret: str = field(repr=False)

    def encode(self) -> str:
        """The one line. URL-safe: letters, digits, `-`, `_` and one dot."""
        places = ",".join(self.addresses).encode()
        size = _HEAD.size + len(places) + _CHECKSUM_BYTES
        ids = (bytes.fromhex(text) for text in (self.id, self.run, self.fingerprint, self.secret))
        body = _HEAD.pack(size, ROLES.index(self.role), int(self.expires), *ids) + places
        return PREFIX + base64.urlsafe_b64encode(body + _checksum(body)).rstrip(b"=").decode()

    @property
    def bearer(self) -> str:
        """What is shown to the coordinator, over TLS, in the Authorization header."""
        return f"Bearer {self.id}.{self.secret}"

    @property
    def is_loopback(self) -> bool:
        """Whether it can be used on the coordinator's own machine only."""
        return all(_is_loopback(host_and_port(place)[0]) for place in self.addresses)


def parse_token(text: str) -> Token:
    """The token that a line says. Raises ConfigError, naming what is wrong but never the token."""
    text = text.strip()
    if not text.startswith(PREFIX):
        raise ConfigError(f"this is not a token: a token begins with {PREFIX!r}. {_ASK}")
    raw = _unpack(text.removeprefix(PREFIX))
    if len(raw) < 2 or len(raw) < int.from_bytes(raw[:2], "big"):
        raise ConfigError(f"the token is cut short. Copy the whole line. {_ASK}")
    if len(raw) < _HEAD.size + _CHECKSUM_BYTES or _checksum(raw[:-_CHECKSUM_BYTES]) != raw[-_CHECKSUM_BYTES:]:
        raise ConfigError(f"the token was altered on its way: its checksum is wrong. Copy it again. {_ASK}")
    try:
        return _read(raw[:-_CHECKSUM_BYTES])
    except (ValueError, IndexError, struct.error):
        raise ConfigError(f"the token says nothing that this version of Atoll understands. {_ASK}") from None


def read_token(given: str | None, *, stdin: TextIO, environment: MutableMapping[str, str]) -> str:
    """The line that `given` leads to: itself, `@FILE`, `-` for standard input, nothing for the environment.

    It is removed from the environment, so that no process started later inherits it. Raises ConfigError.
    """
    inherited = environment.pop(ENVIRONMENT, "").strip()
    if given is None or not given.strip():
        if not inherited:
            raise ConfigError(f"no token was given. Use: atoll join TOKEN, @FILE, - or {ENVIRONMENT}. {_ASK}")
        return inherited
    if given == "-":
        return stdin.readline().strip()
    return _first_line(Path(given[1:])) if given.startswith("@") else given.strip()


def command_without_token(words: Sequence[str]) -> tuple[list[str], str] | None:
    """A command line without the token in it, and the token; None where it holds none.

    Other users of a machine can read command lines, and cannot read environments.

    >>> command_without_token(["atoll", "join", "atoll1.AAAA"])
    (['atoll', 'join'], 'atoll1.AAAA')
    """
    found = [word for word in words if word.startswith(PREFIX)]
    return ([word for word in words if word not in found], found[0]) if found else None


@dataclass(frozen=True)
class TokenInfo:
    """What the coordinator shows of a token. state: "valid", "expired" or "revoked". members: that it let in."""

    id: str
    role: str
    made: float
    expires: float
    state: str
    note: str
    members: int


class TokenStore:
    """Who may come in, in a database of its own: it outlives the loss of the log, and is small enough to copy away.

    clock: seconds since 1970.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float]) -> None:
        self.path = path
        self._clock = clock
        self._database = open_database(path, TABLES)

    def create(
        self,
        role: str,
        *,
        addresses: Sequence[str],
        fingerprint: str,
        run: str,
        lifetime_s: float = LIFETIME_S,
        note: str = "",
    ) -> Token:
        """A new token; this is the only time that its secret is known here."""
        now = self._clock()
        token = Token(
            addresses=tuple(addresses),
            fingerprint=fingerprint,
            id=secrets.token_hex(8),
            run=run,
            expires=float(int(now + lifetime_s)),
            role=role,
            secret=secrets.token_hex(32),
        )
        row = (token.id, _hash(token.secret), role, now, token.expires, note)
        with transaction(self._database, self.path) as database:
            database.execute("INSERT INTO tokens VALUES (?, ?, ?, ?, ?, NULL, ?)", row)
        return token

    def check(self, authorization: str) -> TokenInfo:
        """The token whose `Token.bearer` is shown, if it is valid. Raises TokenRefused."""
        info = self._owner(authorization)
        if info.state == "revoked":
            raise TokenRefused(f"the token {info.id} was revoked. {_ASK}")
        if info.state == "expired":
            raise TokenRefused(f"the token {info.id} has expired. {_ASK}")
        return info

    def admit(self, authorization: str, *, member: str, key: str) -> None:
        """Let `member` in by a valid token, or back in by the key it showed the first time. Raises TokenRefused.

        authorization: `Token.bearer` of a token that may have expired since the first time.
        """
        owner = self._owner(authorization)
        if owner.role != JOIN:
            raise TokenRefused(f"the token {owner.id} is for {owner.role}: it lets no island in. {_ASK}")
        known = self._database.execute("SELECT key_hash, token FROM members WHERE member = ?", (member,)).fetchone()
        if known is None:
            self._enter(self.check(authorization).id, member=member, key=key)
        elif not hmac.compare_digest(known[0], _hash(key)):
            raise TokenRefused(f"member {member} is somebody else. Every island makes up an id of its own.")
        elif self._info(known[1]).state == "revoked":
            raise TokenRefused(f"the token {known[1]} that let member {member} in was revoked. {_ASK}")

    def _enter(self, token: str, *, member: str, key: str) -> None:
        with transaction(self._database, self.path) as database:
            database.execute("INSERT INTO members VALUES (?, ?, ?)", (member, _hash(key), token))

    def revoke(self, beginning: str) -> tuple[str, list[str]]:
        """Revoke the token whose id begins so: its id, and the members it had let in. Raises ConfigError."""
        rows = self._database.execute("SELECT id FROM tokens WHERE substr(id, 1, ?) = ?", (len(beginning), beginning))
        found = [row[0] for row in rows]
        if not beginning or len(found) != 1:
            many = "no token" if not found else f"{len(found)} tokens"
            raise ConfigError(f"{many} with an id that begins {beginning!r}. See atoll token list.")
        with transaction(self._database, self.path) as database:
            database.execute(
                "UPDATE tokens SET revoked = ? WHERE id = ? AND revoked IS NULL", (self._clock(), found[0])
            )
        members = self._database.execute("SELECT member FROM members WHERE token = ?", (found[0],)).fetchall()
        return found[0], [row[0] for row in members]

    def find(self, token: str) -> TokenInfo | None:
        """What is known of the token with this id; None where there is none."""
        row = self._database.execute("SELECT id FROM tokens WHERE id = ?", (token,)).fetchone()
        return self._info(row[0]) if row else None

    def list(self) -> list[TokenInfo]:
        """All tokens there ever were, the newest last."""
        ids = self._database.execute("SELECT id FROM tokens ORDER BY made, rowid").fetchall()
        return [self._info(row[0]) for row in ids]

    def close(self) -> None:
        """Let go of the file. Closing twice is allowed."""
        self._database.close()

    def _owner(self, authorization: str) -> TokenInfo:
        """The token that `authorization` proves to have, valid or not; an unknown id looks like a wrong secret."""
        shown, _, secret = authorization.removeprefix("Bearer ").partition(".")
        shown = shown if shown.isascii() else ""
        row = self._database.execute("SELECT secret_hash FROM tokens WHERE id = ?", (shown,)).fetchone()
        if not hmac.compare_digest(row[0] if row else _hash(""), _hash(secret)) or row is None:
            raise TokenRefused(f"the coordinator does not know this token. {_ASK}")
        return self._info(shown)

    def _info(self, token: str) -> TokenInfo:
        query = (
            "SELECT id, role, made, expires, revoked, note, (SELECT COUNT(*) FROM members WHERE token = id) "
            "FROM tokens WHERE id = ?"
        )
        row: tuple[str, str, float, float, float | None, str, int]
        row = self._database.execute(query, (token,)).fetchone()
        identity, role, made, expires, revoked, note, members = row
        state = "revoked" if revoked is not None else "expired" if self._clock() >= expires else "valid"
        return TokenInfo(identity, role, made, expires, state, note, members)


def new_member_key() -> str:
    """The key by which a member proves, when it comes back, that it is the same."""
    return secrets.token_hex(32)


# --- inside ---

_ASK = "Ask for a new one: atoll token create RUN, on the coordinator's machine."


def _hash(secret: str) -> str:
    """Secrets have 256 bits of chance: a fast hash is as good as a slow one."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]


def _unpack(text: str) -> bytes:
    """The bytes of base64url text; of text that was cut in the middle of a byte, those before it."""
    whole = text[: len(text) - 1] if len(text) % 4 == 1 else text
    if len(whole) > 2 * _MAX_BYTES:
        raise ConfigError(f"the token is longer than any token: {len(whole)} characters. {_ASK}")
    try:
        return base64.b64decode(whole + "=" * (-len(whole) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(f"the token holds characters that no token has. Copy it again. {_ASK}") from None


def _read(body: bytes) -> Token:
    _, role, expires, identity, run, fingerprint, secret = _HEAD.unpack_from(body)
    addresses = tuple(body[_HEAD.size :].decode("ascii").split(","))
    for place in addresses:
        host_and_port(place)
    return Token(
        addresses=addresses,
        fingerprint=fingerprint.hex(),
        id=identity.hex(),
        run=run.hex(),
        expires=float(expires),
        role=ROLES[role],
        secret=secret.hex(),
    )


def _first_line(path: Path) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline(4 * _MAX_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"the token file {str(path)!r} cannot be read: {why}. Name a file that holds a token."
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return reach(host) == "loopback"
    except ConfigError:
        return host == "localhost"
