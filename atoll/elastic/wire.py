"""Messages as bytes: one JSON object each, whose `kind` is the name of its class in `elastic.messages`.

Whatever a stranger sends comes out as one of our dataclasses or as a `WireError`, and before it is parsed its length
and its nesting are bounded. Nothing received is ever executed: there is no pickle and no name is looked up but `kind`,
in a fixed table.

>>> from atoll.elastic.messages import Want
>>> encode(Want(samples=64))
'{"kind":"Want","samples":64}'
>>> decode('{"kind":"Want","samples":64}', FROM_MEMBER)
Want(samples=64)
>>> decode('{"kind":"Want","samples":"many"}', FROM_MEMBER)
Traceback (most recent call last):
...
atoll.elastic.wire.WireError: Want.samples: Input should be a valid integer
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, NoReturn, get_args

from pydantic import TypeAdapter, ValidationError

from atoll.elastic import messages
from atoll.errors import AtollError

MAX_BYTES = 64 * 1024  # of one message
MAX_DEPTH = 8  # lists and objects within each other; the deepest message there is needs 4
LARGEST_INT = 2**63 - 1

Message = messages.FromMember | messages.FromCoordinator
Kinds = Mapping[str, type]

FROM_MEMBER: Kinds = {kind.__name__: kind for kind in get_args(messages.FromMember)}
FROM_COORDINATOR: Kinds = {kind.__name__: kind for kind in get_args(messages.FromCoordinator)}

# What was computed from a contribution, and is NaN or infinite exactly where that was broken.
MAY_BE_NON_FINITE = frozenset({"norm", "norms", "delta_norm", "cosine_mean", "loss", "loss_sum"})

_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class WireError(AtollError, ValueError):
    """What came over the network is not a message. The connection it came on is closed."""

    exit_code = 3


def encode(message: Message) -> str:
    """One line of JSON. Raises WireError if it is longer than any receiver would take."""
    text = json.dumps({"kind": type(message).__name__, **_plain(message)}, separators=(",", ":"))
    if len(text) > MAX_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(text)} bytes is longer than the {MAX_BYTES} allowed.")
    return text


def decode(raw: str | bytes, kinds: Kinds) -> Any:
    """The message in `raw`, one of `kinds`. Raises WireError for everything else."""
    content = load_json(raw, max_bytes=MAX_BYTES, max_depth=MAX_DEPTH)
    if not isinstance(content, dict) or not isinstance(content.get("kind"), str):
        raise WireError("not a JSON object with a kind.")
    kind = kinds.get(content.pop("kind"))
    if kind is None:
        raise WireError(f"not one of the kinds expected here: {', '.join(kinds)}.")
    unknown = set(content) - _names(kind)
    if unknown:
        raise WireError(f"{kind.__name__} has no {printable(min(unknown))!r}.")
    try:
        message = _adapter(kind).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        _refuse(kind, error)
    _check_numbers(message)
    return message


def load_json(raw: str | bytes, *, max_bytes: int, max_depth: int) -> Any:
    """`raw` as plain JSON values, refused unparsed where it is too long or too deep. Raises WireError."""
    try:
        data = raw.encode() if isinstance(raw, str) else raw
    except UnicodeEncodeError:
        raise WireError("not UTF-8.") from None
    if len(data) > max_bytes:
        raise WireError(f"{len(data)} bytes are longer than the {max_bytes} allowed.")
    if depth_of(data) > max_depth:
        raise WireError(f"nested more than {max_depth} deep.")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # UnicodeDecodeError and numbers of too many digits are ValueErrors too
        raise WireError("not JSON.") from None


def depth_of(data: bytes) -> int:
    """How deep lists and objects stand within each other in JSON text, valid or not.

    >>> depth_of(b'{"a": [[1], "[[[["]}')
    3
    """
    if data.count(b"[") + data.count(b"{") <= 1:
        return data.count(b"[") + data.count(b"{")
    depth = deepest = 0
    for byte in re.findall(rb"[\[\]{}]", _TEXT.sub(b"", data)):
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def printable(text: str, *, limit: int = 80) -> str:
    """A stranger's text, fit for a terminal or a log: no control characters, no second line, not long.

    >>> printable("island\\x1b[2J\\nerror: fake")
    'island?[2J?error: fake'
    """
    clean = _CONTROL.sub("?", text.encode(errors="replace").decode())
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def settings_digest(settings: Mapping[str, Any]) -> str:
    """32 hex digits that are equal exactly where the settings are, whatever the order of their keys.

    >>> settings_digest({"a": 1, "b": {"c": 2}}) == settings_digest({"b": {"c": 2}, "a": 1})
    True
    """
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# --- inside ---


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def _names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _refuse(kind: type, error: ValidationError) -> NoReturn:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(printable(str(part)) for part in (kind.__name__, *first["loc"]))
    raise WireError(f"{place}: {first['msg']}") from None


def _check_numbers(message: Any) -> None:
    for name, number in _numbers(message):
        if isinstance(number, int) and abs(number) > LARGEST_INT:
            raise WireError(f"{type(message).__name__}.{name}: does not fit 64 bits")
        if isinstance(number, float) and name not in MAY_BE_NON_FINITE and not math.isfinite(number):
            raise WireError(f"{type(message).__name__}.{name}={number} is not a number")


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int | float]]:
    """Every number within a message, with the name of the field that it is in."""
    if is_dataclass(value):
        for field in fields(value):
            yield from _numbers(getattr(value, field.name), field.name)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _numbers(item, name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(key, name)
            yield from _numbers(item, name)
    elif isinstance(value, (int, float)):
        yield name, value
