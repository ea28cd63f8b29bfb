"""What happens to islands: by rates, drawn from a seed, or from a file.

    kill    its process is gone at once; with a repair time it comes back as a new member, without state
    stop    it is frozen (SIGSTOP); it goes on after a while where it stood
    go      a stopped one goes on
    leave   it says that it goes
    join    it comes (back), without state, on the link it had; a number not used before is a new island
    slow    its steps take so many times as long from here on (`slow 3x`)

A file has one line an event, `time_s island what`; `#` begins a comment, times may have units:

    600     3  kill
    11min   3  join     # back after a minute
    20min   0  slow 2x
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.errors import ConfigError, nearest
from atoll.plan.units import format_seconds, parse_seconds

KILL, STOP, GO, LEAVE, JOIN, SLOW = "kill", "stop", "go", "leave", "join", "slow"
WHATS = (KILL, STOP, GO, LEAVE, JOIN, SLOW)
TIMES = {"min": 60.0, "h": 3600.0, "d": 86400.0}  # beside those of `parse_seconds`


@dataclass(frozen=True)
class Fault:
    """At `time_s` something happens to an island.

    site: which, or -1: the one that `draw`, from 0 to 1, points at among those that are there. seconds: how long a stop
    lasts, or until one that was killed or left comes back; infinite: for good. factor: of `slow`.
    """

    time_s: float
    what: str
    site: int = -1
    draw: float = 0.0
    seconds: float = float("inf")
    factor: float = 1.0

    def leaves_nobody(self) -> ConfigError:
        """Of a file: it is a mistake to take the last one that holds the committed state."""
        return ConfigError(
            f"at {format_seconds(self.time_s)} island {self.site} is told to {self.what}, and no other holds the "
            "committed state then.\nLet another join and fetch it before, or leave that line out."
        )

    def pick(self, there: list[int]) -> int:
        """The island that is meant, among the sites that are `there`."""
        return self.site if self.site >= 0 else there[min(len(there) - 1, int(self.draw * len(there)))]


@dataclass(frozen=True)
class Rates:
    """How often things happen, a second, over all islands together, and for how long.

    repair_s: until a killed island comes back, exactly or, with `repair_varies`, on average; infinite: never.
    stop_s: how long a stop lasts.
    """

    kill: float = 0.0
    stop: float = 0.0
    join: float = 0.0
    leave: float = 0.0
    repair_s: float = float("inf")
    repair_varies: bool = False
    stop_s: float = 30.0

    @property
    def any(self) -> bool:
        return max(self.kill, self.stop, self.join, self.leave) > 0


def parse_duration(text: str) -> float:
    """Seconds of `90`, `50ms`, `10min`, `2h` or `1d`.

    >>> parse_duration("10min"), parse_duration("1.5h"), parse_duration("60s")
    (600.0, 5400.0, 60.0)
    """
    match = re.fullmatch(r"\s*([\d.e+-]+)\s*(min|h|d)\s*", text)
    if match is None:
        return parse_seconds(text)
    return parse_seconds(match[1]) * TIMES[match[2]]


def parse_rate(text: str) -> float:
    """Times a second of `1/10min`, `3/h` or `0`.

    >>> parse_rate("1/10min") * 600, parse_rate("2/h") * 3600, parse_rate("0")
    (1.0, 2.0, 0.0)
    """
    count, slash, per = text.partition("/")
    per = per.strip()
    try:
        number = float(count)
        seconds = TIMES[per] if per in TIMES else parse_duration(per) if per and per != "s" else 1.0
    except (ValueError, ConfigError):
        raise ConfigError(f"{text!r} is not a rate. Write it as 1/10min or 3/h.") from None
    if (number and not slash) or number < 0 or not seconds > 0:
        raise ConfigError(f"{text!r} is not how often in which time. Write it as 1/10min or 3/h.")
    return number / seconds


def draw_faults(rates: Rates, *, num_sites: int, until_s: float, rng: np.random.Generator) -> list[Fault]:
    """Events up to `until_s`: each kind independently, at a constant rate (a Poisson process). Joins get new sites."""
    found: list[Fault] = []
    for what, rate in ((KILL, rates.kill), (STOP, rates.stop), (JOIN, rates.join), (LEAVE, rates.leave)):
        for time_s in _times(rate, until_s, rng):
            found.append(Fault(time_s, what, draw=float(rng.random()), seconds=_seconds(what, rates, rng)))
    found.sort(key=lambda fault: fault.time_s)
    new = iter(range(num_sites, num_sites + len(found)))
    return [fault if fault.what != JOIN else Fault(fault.time_s, JOIN, site=next(new)) for fault in found]


def read_faults(path: str | Path, *, num_islands: int) -> list[Fault]:
    """The events of a file, by time. New islands are numbered on from `num_islands`, without a gap."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as a list of events: {error}. Give a text file.") from None
    found = [_parse_line(line, f"{path}, line {number}") for number, line in _said(lines)]
    joining = sorted({fault.site for fault in found if fault.what == JOIN and fault.site >= num_islands})
    known = num_islands + len(joining)
    wrong = next((fault for fault in found if fault.site >= known), None)
    if wrong is not None:
        raise ConfigError(
            f"{path} tells island {wrong.site} to {wrong.what}, and islands are 0 to {known - 1}. New ones join with "
            f"the numbers from {num_islands} on."
        )
    return sorted(found, key=lambda fault: fault.time_s)


def _said(lines: list[str]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, start=1):
        text = line.split("#")[0].strip()
        if text:
            yield number, text


def _parse_line(text: str, where: str) -> Fault:
    words = text.split()
    if len(words) < 3 or not words[1].isdigit():
        raise ConfigError(f"{where}: {text!r} is not `time_s island what`. Write it as 600 3 kill.")
    what = words[2]
    if what not in WHATS:
        raise ConfigError(f"{where}: {what!r} is not known.{nearest(what, WHATS)} Known: {', '.join(WHATS)}.")
    time_s = parse_duration(words[0])
    if not 0 <= time_s < float("inf"):
        raise ConfigError(f"{where}: {words[0]} is not a time from 0. Write it as 600 or 10min.")
    if what != SLOW:
        return Fault(time_s, what, site=int(words[1]))
    factor = words[3] if len(words) > 3 else ""
    if not re.fullmatch(r"\d+(\.\d+)?x", factor) or not float(factor[:-1]) > 0:
        raise ConfigError(f"{where}: how many times slower is not said. Write it as 600 3 slow 2x.")
    return Fault(time_s, SLOW, site=int(words[1]), factor=float(factor[:-1]))


def _times(rate: float, until_s: float, rng: np.random.Generator) -> Iterator[float]:
    time_s = 0.0
    while rate > 0:
        time_s += float(rng.exponential(1 / rate))
        if time_s >= until_s:
            return
        yield time_s


def _seconds(what: str, rates: Rates, rng: np.random.Generator) -> float:
    if what == STOP:
        return rates.stop_s
    if what == KILL and rates.repair_varies:
        return float(rng.exponential(rates.repair_s))
    return rates.repair_s if what == KILL else float("inf")
