"""Named places where a process may be made to die, so that tests can kill it exactly there.

`crash_point("island.ready")` does nothing unless the variable ATOLL_CRASH is set, to `NAME@FILE`: NAME is what this
process is called, and FILE has a line for each death that is planned, read anew at every point:

    NAME POINT SIGNAL SKIP        the process NAME gets SIGNAL when it passes POINT for the time after SKIP times

>>> planned("island-2 island.step 9 1\\nisland-1 island.go 19 0", "island-1", "island.go", passed=0)
19
>>> planned("island-2 island.step 9 1", "island-2", "island.step", passed=0) is None
True
"""

from __future__ import annotations

import os
from collections import Counter

VARIABLE = "ATOLL_CRASH"

_passed: Counter[tuple[str, str]] = Counter()  # (plan, point) -> how often


def crash_point(point: str) -> None:
    """Send this process the signal that is planned for `point`, if one is."""
    where = os.environ.get(VARIABLE)
    if where is None:
        return
    name, _, path = where.partition("@")
    try:
        with open(path, encoding="ascii") as file:
            plan = file.read()
    except FileNotFoundError:
        return
    signum = planned(plan, name, point, passed=_passed[plan, point])
    _passed[plan, point] += 1
    if signum is not None:
        os.kill(os.getpid(), signum)


def be_worker(index: int) -> None:
    """From now on this process is called as its island is, and `/index`."""
    where = os.environ.get(VARIABLE)
    if where is not None:
        name, _, path = where.partition("@")
        os.environ[VARIABLE] = f"{name}/{index}@{path}"


def planned(plan: str, name: str, point: str, *, passed: int) -> int | None:
    """The signal that `plan` holds for process `name` at `point`, which it has passed so often; None for none."""
    for line in plan.splitlines():
        who, where, signum, skip = line.split()
        if (who, where) == (name, point) and passed == int(skip):
            return int(signum)
    return None
