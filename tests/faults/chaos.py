"""The long form of the promises on reliability: thousands of faults at random, and what came of them.

    make chaos                                       writes benchmarks/results/reliability.json
    PYTHONPATH=tests python -m faults.chaos --kills 100 --stops 5 --output /tmp/reliability.json

A fleet of real processes is made to suffer until it has had every fault so often; every promise is checked throughout.
A fleet that breaks one is shown, counted as a failure and replaced. No failure in n trials bounds the rate at 3/n
(95 %).
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from faults.fleet import Fleet
from faults.points import COORDINATOR, COORDINATOR_AT_A_JOIN, DONOR, ISLAND, JOINER, LEADER

REPLICAS = 4
FAULTS_A_FLEET = 60  # then all is checked, and another fleet begins
RESULTS = Path("benchmarks/results/reliability.json")

Trial = Callable[[Fleet, random.Random], str]


@dataclass
class Tally:
    """What came of one kind of fault. waits_s: from the fault to the next commit of those who are left."""

    trials: int = 0
    failures: int = 0
    waits_s: list[float] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def plain(self) -> dict[str, Any]:
        """As JSON. rate_bound: of failures, at 95 %, where none was seen."""
        cuts = quantiles(self.waits_s, n=100) if len(self.waits_s) > 1 else []
        return {
            "trials": self.trials,
            "failures": self.failures,
            "rate_bound": 3 / self.trials if self.trials and not self.failures else None,
            "next_commit_s": {"p50": round(cuts[49], 3), "p99": round(cuts[98], 3)} if cuts else None,
            "kinds": dict(sorted(self.kinds.items())),
        }


# --- faults; each returns what exactly it did


def kill_island(run: Fleet, chance: random.Random) -> str:
    """At a crash point, or at any moment."""
    seat = chance.randrange(REPLICAS)
    point = chance.choice([*ISLAND, *LEADER, "any moment"])
    point = "any moment" if point in LEADER and seat != min(run.islands) else point
    _end_at(run, seat, f"island.{point}", chance)
    _wait_commit(run)
    run.add(seat)
    run.wait_counted(seat)
    return point


def kill_joiner(run: Fleet, chance: random.Random) -> str:
    """A newcomer, at any point of its coming."""
    point = chance.choice(JOINER)
    run.plan(run.next_name(f"island-{REPLICAS}"), f"island.{point}")
    run.wait_end(run.add(REPLICAS))
    run.clear_plan()
    _wait_commit(run)
    return point


def kill_donor(run: Fleet, chance: random.Random) -> str:
    """In the middle of a transfer; the newcomer takes the state from another."""
    point = chance.choice(DONOR)
    for seat in range(REPLICAS):
        run.plan(run.islands[seat].name, f"donor.{point}")
    run.add(REPLICAS)
    run.wait(lambda: _dead(run), "the death of a donor")
    run.clear_plan()
    _wait_commit(run)
    seat = _dead(run)[0]
    run.add(seat)
    run.wait_counted(seat, REPLICAS)
    run.kill(REPLICAS)
    return point


def kill_coordinator(run: Fleet, chance: random.Random) -> str:
    """At a crash point, or at any moment; it comes back with its log."""
    point = chance.choice([*COORDINATOR, *COORDINATOR_AT_A_JOIN, "any moment"])
    assert run.coordinator is not None
    joins = point in COORDINATOR_AT_A_JOIN
    if point == "any moment":
        time.sleep(chance.random() * 0.5)
        run.kill_coordinator()
    else:
        run.plan(run.coordinator.name, f"coordinator.{point}", skip=0 if joins else chance.randrange(4))
        if joins:
            run.kill(0)
            run.add(0)
        run.wait_end(run.coordinator)
        run.clear_plan()
    run.start_coordinator()
    _wait_commit(run)
    run.wait_counted(*range(REPLICAS))
    return point


def kill_many(run: Fleet, chance: random.Random) -> str:
    """All but one at once."""
    survivor = chance.randrange(REPLICAS)
    time.sleep(chance.random() * 0.3)
    others = [seat for seat in range(REPLICAS) if seat != survivor]
    run.kill(*others)
    _wait_commit(run)
    for seat in others:
        run.add(seat)
    run.wait_counted(*range(REPLICAS))
    return f"{len(others)} of {REPLICAS}"


def stop_island(run: Fleet, chance: random.Random) -> str:
    """Frozen at a crash point; thawed when the others have gone on, or replaced."""
    seat = chance.randrange(REPLICAS)
    point = chance.choice(ISLAND)
    run.plan(run.islands[seat].name, f"island.{point}", signal.SIGSTOP, skip=chance.randrange(3))
    run.wait(run.islands[seat].is_frozen, "the freeze")
    run.clear_plan()
    _wait_commit(run)
    run.wait_rounds(1)
    run.send(seat, signal.SIGCONT)
    run.wait_counted(*range(REPLICAS))
    return point


def flip_bit(run: Fleet, chance: random.Random) -> str:
    """Of the anchor of one island, in memory."""
    seat = chance.randrange(REPLICAS)
    point = chance.choice("step stepped before_take ready averaged before_land landed".split())
    known = len(run.of("fault", what="desync"))
    run.deed(run.islands[seat].name, f"island.{point}", "flip")
    run.wait(lambda: len(run.of("fault", what="desync")) > known, "the flip to be noticed")
    run.wait_counted(*range(REPLICAS))
    return point


def bad_contribution(run: Fleet, chance: random.Random) -> str:
    """Of one island, which is replaced before it is benched."""
    seat, deed = chance.randrange(REPLICAS), chance.choice(["nan", "explode"])
    known = len(run.of("fault", what="refused"))
    run.deed(run.islands[seat].name, "island.before_take", deed)
    run.wait(lambda: len(run.of("fault", what="refused")) > known, "the refusal")
    run.wait_counted(*range(REPLICAS))
    run.kill(seat)
    run.add(seat)
    run.wait_counted(seat)
    return deed


def _end_at(run: Fleet, seat: int, point: str, chance: random.Random) -> None:
    if point.endswith("any moment"):
        time.sleep(chance.random() * 0.5)
        run.kill(seat)
        return
    run.plan(run.islands[seat].name, point, skip=chance.randrange(3))
    run.wait_end(run.islands[seat])
    run.clear_plan()


def _dead(run: Fleet) -> list[int]:
    return [seat for seat in range(REPLICAS) if not run.islands[seat].is_alive]


def _wait_commit(run: Fleet) -> None:
    """The next commit of those who are left; of the two that follow, for one may have held the victim's work."""
    began = time.perf_counter()
    run.wait_rounds(1)
    run.waits_s.append(time.perf_counter() - began)
    run.wait_rounds(1)


# --- trials

KINDS: dict[str, Trial] = {
    "kill island": kill_island,
    "kill joiner": kill_joiner,
    "kill donor": kill_donor,
    "kill coordinator": kill_coordinator,
    "kill many": kill_many,
    "stop island": stop_island,
    "flip bit": flip_bit,
    "bad contribution": bad_contribution,
}


def suffer(wanted: dict[str, int], chance: random.Random, settings: dict[str, Any]) -> dict[str, Tally]:
    """Try every kind of fault as often as is wanted, in random order."""
    tallies = {kind: Tally() for kind in wanted}
    order = [kind for kind, times in wanted.items() for _ in range(times)]
    chance.shuffle(order)
    while order:
        batch, order = order[:FAULTS_A_FLEET], order[FAULTS_A_FLEET:]
        order = _suffer_in_one_fleet(batch, tallies, chance, settings) + order
        _show(tallies)
    return tallies


def _suffer_in_one_fleet(
    kinds: list[str], tallies: dict[str, Tally], chance: random.Random, settings: dict[str, Any]
) -> list[str]:
    """Returns the faults that are left when a promise was broken."""
    with tempfile.TemporaryDirectory() as folder, Fleet(Path(folder), replicas=REPLICAS, **settings) as run:
        kind = "kill island"
        try:
            run.start()
            run.wait_round(5)
            for number, kind in enumerate(kinds):
                if not _try(run, kind, tallies[kind], chance):
                    return kinds[number + 1 :]
            run.check(desync="flip bit" in kinds)
        except AssertionError as failure:
            tallies[kind].failures += 1
            print(f"FAILED in the end: {failure}", flush=True)
    return []


def _try(run: Fleet, kind: str, tally: Tally, chance: random.Random) -> bool:
    tally.trials += 1
    run.waits_s.clear()
    try:
        tally.kinds[KINDS[kind](run, chance)] += 1
    except AssertionError as failure:
        tally.failures += 1
        print(f"FAILED: {kind}: {failure}", flush=True)
        return False
    tally.waits_s += run.waits_s
    return True


def _show(tallies: dict[str, Tally]) -> None:
    told = [f"{kind} {tally.trials} ({tally.failures} failed)" for kind, tally in tallies.items() if tally.trials]
    print(f"{time.strftime('%H:%M:%S')} {', '.join(told)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=2000, help="of islands, joiners, donors and the coordinator")
    parser.add_argument("--stops", type=int, default=200)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--bad", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--delayed", action="store_true", help="rounds that land later, coded by lowrank+int4")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    shares = {"kill island": 0.5, "kill joiner": 0.15, "kill donor": 0.1, "kill coordinator": 0.2, "kill many": 0.05}
    wanted = {kind: round(share * options.kills) for kind, share in shares.items()}
    wanted |= {"stop island": options.stops, "flip bit": options.flips, "bad contribution": options.bad}
    settings: dict[str, Any] = {"save_steps": 16, "eval_steps": 16}
    if options.delayed:
        settings |= {"schedule": "delayed", "compressor": "lowrank+int4", "rank": 4}
    began = time.perf_counter()
    tallies = suffer(wanted, random.Random(options.seed), settings)
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "command": f"python -m faults.chaos {' '.join(sys.argv[1:])}".rstrip(),
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "faults": {kind: tally.plain() for kind, tally in tallies.items()},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {options.output}")
    return int(any(tally.failures for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
