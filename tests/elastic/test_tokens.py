"""Tokens: what is wrong with one is told, and nobody comes in whom they were not made for."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.elastic.tokens import (
    ENVIRONMENT,
    JOIN,
    OPERATOR,
    PREFIX,
    Token,
    TokenRefused,
    TokenStore,
    command_without_token,
    new_member_key,
    parse_token,
    read_token,
)
from atoll.errors import ConfigError

TOKEN = Token(
    addresses=("10.0.0.5:29400", "[fd00::5]:29400"),
    fingerprint="ab" * 32,
    id="12" * 8,
    run="34" * 8,
    expires=1_800_000_000.0,
    role=JOIN,
    secret="cd" * 32,
)
LINE = TOKEN.encode()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock):
    store = TokenStore(tmp_path / "members.sqlite", clock=clock)
    yield store
    store.close()


def create(store: TokenStore, role: str = JOIN, **about) -> Token:
    return store.create(role, addresses=TOKEN.addresses, fingerprint=TOKEN.fingerprint, run=TOKEN.run, **about)


# --- the line ---


def test_a_token_says_all_it_was_made_of() -> None:
    assert parse_token(f"  {LINE}\n") == TOKEN


def test_a_token_fits_into_a_url_and_hides_its_secret() -> None:
    assert all(letter.isalnum() or letter in "-_." for letter in LINE)
    assert TOKEN.secret not in repr(TOKEN)


def test_every_way_to_cut_a_token_short_is_called_that() -> None:
    for length in range(len(PREFIX), len(LINE)):
        with pytest.raises(ConfigError, match="cut short"):
            parse_token(LINE[:length])


def test_every_altered_letter_is_noticed() -> None:
    for place in range(len(PREFIX), len(LINE) - 1):
        other = "A" if LINE[place] != "A" else "B"
        with pytest.raises(ConfigError, match=r"altered|cut short"):
            parse_token(LINE[:place] + other + LINE[place + 1 :])


def test_what_is_wrong_is_told_without_the_token() -> None:
    for wrong in ("", "hello", LINE.upper(), LINE[:-9], LINE + "!", LINE + LINE, PREFIX + "é", PREFIX + "A" * 5000):
        with pytest.raises(ConfigError) as caught:
            parse_token(wrong)
        assert len(str(caught.value).splitlines()) <= 3
        assert LINE[20:40] not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300))
def test_any_text_is_a_token_or_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_token(PREFIX + text)


def test_a_loopback_token_is_known_as_one() -> None:
    assert not TOKEN.is_loopback
    line = Token(("127.0.0.1:5", "localhost:5"), "ab" * 32, "12" * 8, "34" * 8, 0.0, JOIN, "cd" * 32).encode()
    assert parse_token(line).is_loopback


# --- where it is read from ---


def test_a_token_comes_by_argument_file_stdin_or_environment(tmp_path: Path) -> None:
    file = tmp_path / "token.txt"
    file.write_text(LINE + "\n")
    for given_as, stdin, environment in (
        (LINE, "", {}),
        (f"@{file}", "", {}),
        ("-", LINE + "\nmore", {}),
        (None, "", {ENVIRONMENT: LINE}),
    ):
        assert read_token(given_as, stdin=io.StringIO(stdin), environment=environment) == LINE
        assert ENVIRONMENT not in environment, "a process started later must not inherit it"


@pytest.mark.parametrize("given_as", [None, "", "@/nonexistent/token"])
def test_no_token_is_told_with_the_ways_to_give_one(given_as: str | None) -> None:
    with pytest.raises(ConfigError, match=r"token"):
        read_token(given_as, stdin=io.StringIO(""), environment={})


def test_a_command_line_can_be_had_without_its_token() -> None:
    assert command_without_token(["python", "-m", "atoll", "join", LINE]) == (["python", "-m", "atoll", "join"], LINE)
    assert command_without_token(["atoll", "join", "-"]) is None


# --- who may come in ---


def test_only_the_secret_lets_in(store: TokenStore) -> None:
    token = create(store)
    assert store.check(token.bearer).id == token.id
    for wrong in ("", "Bearer ", f"Bearer {token.id}.", f"Bearer {token.id}.{'0' * 64}", f"Bearer .{token.secret}"):
        with pytest.raises(TokenRefused, match="does not know"):
            store.check(wrong)
    with pytest.raises(TokenRefused, match="does not know"):
        store.check("Bearer \udcff.\udcff")


def test_the_secret_is_nowhere_on_disk(store: TokenStore, tmp_path: Path) -> None:
    token = create(store)
    store.admit(token.bearer, member="m", key="k" * 64)
    on_disk = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert token.id.encode() in on_disk
    assert token.secret.encode() not in on_disk
    assert b"k" * 64 not in on_disk


def test_an_expired_token_admits_nobody_new(store: TokenStore, clock: Clock) -> None:
    token, key = create(store, lifetime_s=60), new_member_key()
    store.admit(token.bearer, member="early", key=key)
    clock.now += 61
    with pytest.raises(TokenRefused, match="expired"):
        store.admit(token.bearer, member="late", key=key)
    store.admit(token.bearer, member="early", key=key)


def test_a_revoked_token_admits_nobody_at_all(store: TokenStore) -> None:
    token, key = create(store), new_member_key()
    store.admit(token.bearer, member="early", key=key)
    assert store.revoke(token.id[:6]) == (token.id, ["early"])
    for member in ("early", "late"):
        with pytest.raises(TokenRefused, match="revoked"):
            store.admit(token.bearer, member=member, key=key)


def test_nobody_comes_back_in_the_name_of_another(store: TokenStore) -> None:
    token = create(store)
    store.admit(token.bearer, member="a", key="1" * 64)
    with pytest.raises(TokenRefused, match="somebody else"):
        store.admit(token.bearer, member="a", key="2" * 64)
    with pytest.raises(TokenRefused, match="does not know"):
        store.admit(f"Bearer {token.id}.{'0' * 64}", member="a", key="1" * 64)


def test_an_operator_token_is_no_way_in(store: TokenStore) -> None:
    with pytest.raises(TokenRefused, match="operator"):
        store.admit(create(store, OPERATOR).bearer, member="a", key="1" * 64)


def test_tokens_are_listed_with_what_became_of_them(store: TokenStore, clock: Clock) -> None:
    valid, expired, revoked = create(store), create(store, lifetime_s=1), create(store, note="lab")
    store.admit(revoked.bearer, member="a", key="1" * 64)
    store.revoke(revoked.id)
    clock.now += 2
    assert [(info.id, info.state, info.members, info.note) for info in store.list()] == [
        (valid.id, "valid", 0, ""),
        (expired.id, "expired", 0, ""),
        (revoked.id, "revoked", 1, "lab"),
    ]


def test_a_beginning_that_means_no_token_or_many_revokes_none(store: TokenStore) -> None:
    create(store), create(store)
    for beginning in ("", "zz", "%"):
        with pytest.raises(ConfigError, match="begins"):
            store.revoke(beginning)
    assert {info.state for info in store.list()} == {"valid"}


def test_tokens_and_members_survive_a_restart(store: TokenStore, tmp_path: Path, clock: Clock) -> None:
    token, key = create(store), new_member_key()
    store.admit(token.bearer, member="a", key=key)
    again = TokenStore(tmp_path / "members.sqlite", clock=clock)
    again.admit(token.bearer, member="a", key=key)
    with pytest.raises(TokenRefused):
        again.admit(token.bearer, member="a", key=new_member_key())
    again.close()
