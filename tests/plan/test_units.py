"""Quantities as people write them."""

import pytest

from atoll.errors import ConfigError
from atoll.plan.units import parse_bandwidth, parse_bytes, parse_count, parse_seconds


@pytest.mark.parametrize(
    "text", ["1gbit", "1Gbit", "1 Gbit/s", "1Gbps", "1000mbit", "1e9bps", "125MB/s", "1000000kbit"]
)
def test_one_gigabit_has_many_spellings(text: str) -> None:
    assert parse_bandwidth(text) == pytest.approx(125e6)


@pytest.mark.parametrize("text", ["1", "fast", "1 furlong", "1GB", "", "gbit", "1gbit2"])
def test_a_bandwidth_without_a_known_unit_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="100mbit or 10Gbps"):
        parse_bandwidth(text)


def test_sizes_times_and_counts() -> None:
    assert parse_bytes("40GB") == 40e9
    assert parse_bytes("40GiB") == 40 * 2**30
    assert parse_seconds("1.5") == parse_seconds("1500ms") == 1.5
    assert parse_count("26e9") == parse_count("26B") == 26e9
    assert parse_count("32_768") == 32768


@pytest.mark.parametrize(
    ("parse", "text"), [(parse_bytes, "40"), (parse_bytes, "40 cows"), (parse_seconds, "5m"), (parse_count, "1x")]
)
def test_what_has_no_meaning_is_refused(parse, text: str) -> None:
    with pytest.raises(ConfigError, match="Write it as"):
        parse(text)
