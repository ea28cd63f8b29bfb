"""The round protocol under seeded faults, and proof that the simulation would notice if it were wrong."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from atoll.elastic.leases import Leases, Range, merged
from atoll.elastic.membership import Membership, Record

SIMULATION = Path(__file__).with_name("simulation.py")


def load(path: Path) -> ModuleType:
    """By its path: `elastic` is the name of more than one folder."""
    spec = importlib.util.spec_from_file_location("protocol_simulation", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


simulation = load(SIMULATION)
simulate, Broken, FAULTS = simulation.simulate, simulation.Broken, simulation.FAULTS

SEEDS = 400
BATCH = 50
MOST = 1000  # seeds within which a planted mistake must be found


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_every_promise_holds_in_every_history(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            simulate(seed)
        except Exception as error:
            error.add_note(f"replay: python tests/elastic/simulation.py --seed {seed} --verbose")
            raise


def test_the_histories_hold_what_they_are_meant_to_try() -> None:
    seen: dict[str, int] = {}
    for seed in range(120):
        for name, number in simulate(seed).items():
            seen[name] = seen.get(name, 0) + number
    assert all(seen.get(kind) for kind in FAULTS), "every kind of fault strikes"
    happened = ["voids", "lone", "fault: desync", "fault: refused", "fault: lone commit"]
    assert all(seen.get(name) for name in happened), seen
    assert seen["rounds"] > 600


def test_one_seed_is_one_history(capsys: pytest.CaptureFixture[str]) -> None:
    def history() -> str:
        simulate(11, verbose=True)
        return capsys.readouterr().out

    first = history()
    assert "committed" in first
    assert history() == first


def test_it_runs_on_its_own_and_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['simulation', '--seeds', '3']\n"
        "import simulation\n"
        "assert simulation.main() == 0\n"
        "assert 'torch' not in sys.modules and 'asyncio' not in sys.modules"
    )
    folder = SIMULATION.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={"PYTHONPATH": str(folder.parents[1])},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "3 seeds" in done.stdout and "0 failures" in done.stdout


# --- what if the coordinator were wrong? Each of these mistakes is found.

Patch = Callable[[pytest.MonkeyPatch], None]


def counts_a_listener(patch: pytest.MonkeyPatch) -> None:
    commit = Membership._commit

    def wrong(self: Membership, attempt: Any) -> None:
        ready = next(iter(attempt.contributions.values()))
        for member in attempt.members:
            attempt.contributions.setdefault(member, ready.__class__(**{**vars(ready), "used": ()}))
        commit(self, attempt)

    patch.setattr(Membership, "_commit", wrong)


def sends_before_it_records(patch: pytest.MonkeyPatch) -> None:
    drain = Membership._drain

    def wrong(self: Membership) -> list[Any]:
        effects = drain(self)
        late = any(isinstance(effect, Record) and effect.kind == "committed" for effect in effects)
        return [effect for effect in effects if not (late and isinstance(effect, Record) and effect.kind == "state")]

    patch.setattr(Membership, "_drain", wrong)


def commits_what_deviates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_deviate", lambda self, attempt, digests, deviant: self._commit(attempt))


def believes_every_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_accused", lambda self, attempt: [])


def lets_anyone_be_a_donor(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Membership, member: Any) -> None:
        current, self._is_current = self._is_current, lambda other: other is not member  # type: ignore[method-assign]
        name_donor(self, member)
        self._is_current = current  # type: ignore[method-assign]

    name_donor = Membership._name_donor
    patch.setattr(Membership, "_name_donor", wrong)


def never_evicts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_evict", lambda self: None)


def believes_every_claim(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Leases, member: str, ranges: Iterable[Range]) -> tuple[Range, ...]:
        self._leased[member] = merged(ranges)
        return tuple(self._leased[member])

    patch.setattr(Leases, "reclaim", wrong)


def forgets_its_void(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "_void", lambda self, why: None)


def does_not_wait_for_survivors(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Membership) -> None:
        if self._attempt and self._attempt.reached:
            self._conclude(self._attempt)

    patch.setattr(Membership, "_watch_attempt", wrong)


def takes_the_oldest_state_for_the_truth(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Membership, holders: list[Any]) -> None:
        settle(self, [min(self._live(), key=lambda member: (member.round < 0, member.round))])

    settle = Membership._settle
    patch.setattr(Membership, "_settle", wrong)


MISTAKES: list[Patch] = [
    counts_a_listener,
    sends_before_it_records,
    commits_what_deviates,
    believes_every_norm,
    lets_anyone_be_a_donor,
    never_evicts,
    believes_every_claim,
    forgets_its_void,
    does_not_wait_for_survivors,
    takes_the_oldest_state_for_the_truth,
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_coordinator_that_is_wrong_is_found(mistake: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    with pytest.raises(Broken):
        for seed in range(MOST):
            simulate(seed)
