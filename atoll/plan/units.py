"""Quantities as people write them: `1gbit`, `50ms`, `40GB`, `1.3e9`, and how they are written back."""

from __future__ import annotations

import re

from atoll.errors import ConfigError

PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
COUNTS = {**PREFIXES, "b": 1e9}
SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}


def parse_bandwidth(text: str) -> float:
    """Bytes a second of `100mbit`, `1gbit`, `10Gbps`, `1Gbit/s` (bits) or `125MB/s` (bytes).

    >>> parse_bandwidth("1gbit"), parse_bandwidth("10Gbps"), parse_bandwidth("125MB/s")
    (125000000.0, 1250000000.0, 125000000.0)
    """
    number, unit = _split(text, "bandwidth", "100mbit or 10Gbps")
    if in_bytes := re.fullmatch(r"([kmgtKMGT]?)B(?:/s|ps)", unit):
        return number * PREFIXES[in_bytes[1].lower()]
    if in_bits := re.fullmatch(r"([kmgtKMGT]?)(?:[bB]its?|b)(?:/s|ps)?", unit):
        return number * PREFIXES[in_bits[1].lower()] / 8
    raise ConfigError(f"{text!r} is not a bandwidth: its unit {unit!r} is not known. Write it as 100mbit or 10Gbps.")


def parse_bytes(text: str) -> float:
    """Bytes of `40GB`, `80GiB` or `512MB`.

    >>> parse_bytes("40GB"), parse_bytes("1GiB")
    (40000000000.0, 1073741824.0)
    """
    number, unit = _split(text, "size", "40GB or 80GiB")
    prefix = unit.lower().removesuffix("b")
    scale = (PREFIXES | BINARY).get(prefix)
    if scale is None or not unit:
        raise ConfigError(f"{text!r} is not a size: its unit {unit!r} is not known. Write it as 40GB or 80GiB.")
    return number * scale


def parse_seconds(text: str) -> float:
    """Seconds of `50ms`, `8.79s` or `8.79`.

    >>> parse_seconds("50ms"), parse_seconds("8.79")
    (0.05, 8.79)
    """
    number, unit = _split(text, "time", "50ms or 1.5s")
    if unit not in SECONDS:
        raise ConfigError(f"{text!r} is not a time: its unit {unit!r} is not known. Write it as 50ms or 1.5s.")
    return number * SECONDS[unit]


def parse_count(text: str) -> float:
    """A number of things: `1.3e9`, `1.3B`, `350M`, `32768`.

    >>> parse_count("1.3e9"), parse_count("1.3B"), parse_count("350M")
    (1300000000.0, 1300000000.0, 350000000.0)
    """
    number, unit = _split(text, "number", "1.3e9, 1.3B or 350M")
    if unit.lower() not in COUNTS:
        raise ConfigError(f"{text!r} is not a number: {unit!r} is not known. Write it as 1.3e9, 1.3B or 350M.")
    return number * COUNTS[unit.lower()]


def format_bandwidth(bytes_per_s: float) -> str:
    """
    >>> format_bandwidth(125e6), format_bandwidth(48.7e6), format_bandwidth(float("inf"))
    ('1 Gbit/s', '390 Mbit/s', 'unlimited')
    """
    return "unlimited" if bytes_per_s == float("inf") else f"{_scaled(bytes_per_s * 8)}bit/s"


def format_bytes(count: float) -> str:
    """
    >>> format_bytes(0), format_bytes(4.28e11), format_bytes(1500)
    ('0 B', '428 GB', '1.5 kB')
    """
    return f"{_scaled(count)}B"


def format_count(count: float) -> str:
    """
    >>> format_count(1.316e9), format_count(32768), format_count(0.94e6)
    ('1.32 B', '32.8 k', '940 k')
    """
    return _scaled(count).replace("G", "B").strip()


def format_rate(per_s: float) -> str:
    """
    >>> format_rate(9.5517), format_rate(3728.4)
    ('9.55', '3,728')
    """
    return _three_digits(per_s)


def format_seconds(seconds: float) -> str:
    """
    >>> [format_seconds(s) for s in (0, 0.0123, 8.79, 428, 7200, 432000)]
    ['0 s', '12.3 ms', '8.79 s', '7.13 min', '2 h', '5 d']
    """
    if seconds == float("inf"):
        return "never"
    for scale, unit, until in ((1e-3, "ms", 1), (1, "s", 180), (60, "min", 7200), (3600, "h", 172800)):
        if seconds and seconds < until:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds / 86400)} d" if seconds else "0 s"


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*([+-]?[\d_]*\.?\d+(?:e[+-]?\d+)?)\s*([a-zA-Zµ/]*)\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is not a {what}. Write it as {example}.")
    return float(match[1]), match[2]


def _scaled(value: float) -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale * 0.9995:
            return f"{_three_digits(value / scale)} {prefix}"
    return f"{_three_digits(value)} "


def _three_digits(value: float) -> str:
    """
    >>> _three_digits(1.0), _three_digits(3424.2), _three_digits(0.0123)
    ('1', '3,424', '0.0123')
    """
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
