"""Whatever comes over the network is one of our messages or a WireError."""

from __future__ import annotations

import json
import math
import string
import time
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.elastic import messages as m
from atoll.elastic.wire import (
    FROM_COORDINATOR,
    FROM_MEMBER,
    MAX_BYTES,
    WireError,
    decode,
    encode,
    load_json,
    printable,
    settings_digest,
)

ALL = FROM_MEMBER | FROM_COORDINATOR
HELLO = m.Hello("0" * 16, "lab", "1.0", "digest", "10.0.0.1", 7000, 12, 2, 3, "anchor", leased=((0, 5), (9, 12)))
EXAMPLES = [
    HELLO,
    m.Ready(4, "anchor", 128.0, 0.5, True, 10, used=((0, 5),)),
    m.Reached(4, 9, "next", norms=(0.5, 0.25), cosine_mean=None),
    m.Failed(4, 9, "a peer is gone", unreachable=("0" * 16,)),
    m.Beat(3, 1e4),
    m.Leave(),
    m.Welcome("b1", 0, 3, "anchor", True, 10, 0.5),
    m.Go(4, 9, (m.Participant("0" * 16, 0, 128.0, "10.0.0.1"), m.Participant("1" * 16, 1, 0.0, "10.0.0.2"))),
    m.Commit(4, 9, "next", weights={0: 128.0, 1: 64.0}, refused=(2,)),
    m.Lease(((0, 64), (128, 192))),
    m.Finish(10),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: object) -> None:
    assert decode(encode(message), ALL) == message


def test_a_broken_contribution_can_say_so() -> None:
    broken = m.Ready(4, "anchor", 128.0, math.nan, False, 10)
    assert math.isnan(decode(encode(broken), FROM_MEMBER).norm)


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"kind": 3}',
        '{"kind": "Boom"}',
        '{"kind": "Welcome"}',  # not a member's to say
        '{"kind": "Want"}',
        '{"kind": "Want", "samples": "5"}',
        '{"kind": "Want", "samples": 5.5}',
        '{"kind": "Want", "samples": true}',
        '{"kind": "Want", "samples": 5, "more": 1}',
        '{"kind": "Want", "samples": 9223372036854775808}',
        '{"kind": "Want", "samples": ' + "9" * 5000 + "}",
        '{"kind": "Beat", "tokens_per_s": NaN}',
        '{"kind": "Beat", "tokens_per_s": 1e999}',
        '{"kind": "Leave", "why": "\ud800"}',
        b"\xff\xfe{}",
        b'{"kind": "Leave", "why": "\xff"}',
        '{"kind": "Hello", "__class__": "os.system"}',
    ],
)
def test_what_is_no_message_is_refused(raw: str | bytes) -> None:
    with pytest.raises(WireError):
        decode(raw, FROM_MEMBER)


def test_a_long_message_is_refused_unparsed() -> None:
    with pytest.raises(WireError, match="longer"):
        decode('{"kind": "Leave", "why": "' + "x" * MAX_BYTES + '"}', FROM_MEMBER)


def test_a_deep_message_is_refused_unparsed() -> None:
    with pytest.raises(WireError, match="deep"):
        decode('{"kind": "Hello", "leased": ' + "[" * 30_000 + "]" * 30_000 + "}", FROM_MEMBER)


def test_nesting_is_measured_outside_of_text() -> None:
    assert decode('{"kind": "Leave", "why": "' + "[{" * 100 + '"}', FROM_MEMBER).why == "[{" * 100
    assert load_json('{"a": "\\"[[[["}', max_bytes=99, max_depth=1) == {"a": '"[[[['}


def test_bombs_of_parts_of_text_are_measured_quickly() -> None:
    began = time.process_time()
    for bomb in (b'"\\' * 30_000, b'"' * 60_000, b"\\" * 60_000, b"[{" * 30_000):
        with pytest.raises(WireError):
            decode(bomb, FROM_MEMBER)
    assert time.process_time() - began < 5  # quadratic work would take minutes


def test_nothing_is_sent_that_would_not_be_read() -> None:
    with pytest.raises(WireError, match="longer"):
        encode(m.Leave("x" * MAX_BYTES))


NAMES = sorted({field.name for kind in ALL.values() for field in fields(kind)})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["", "0" * 16]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(ALL)), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8))
def test_any_object_is_a_message_or_refused(kind: str, content: dict) -> None:
    try:
        message = decode(json.dumps({**content, "kind": kind}), ALL)
    except WireError:
        return
    assert type(message) is ALL[kind]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(EXAMPLES), st.integers(0, 400), st.binary(max_size=4))
def test_any_damage_leaves_a_message_or_is_refused(message: object, place: int, put: bytes) -> None:
    raw = encode(message).encode()
    try:
        decode(raw[:place] + put + raw[place + 1 :], ALL)
    except WireError as error:
        assert str(error)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_bytes_are_a_message_or_refused(raw: bytes | str) -> None:
    with pytest.raises(WireError):
        decode(raw, ALL)


def test_printable_text_stays_in_its_line() -> None:
    assert printable("a\nb\x1b[31m\u202ec\ud800") == "a?b?[31m?c?"
    assert printable(string.ascii_letters, limit=5) == "abcd…"


def test_settings_that_differ_have_other_digests() -> None:
    assert settings_digest({"a": 1}) != settings_digest({"a": 1.5}) != settings_digest({"b": 1.5})
