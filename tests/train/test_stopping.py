"""All replicas stop after the same step, whoever is told to stop, and whenever."""

from __future__ import annotations

import itertools
import random
import signal
import threading
from dataclasses import dataclass, field

import pytest

from atoll.errors import TransportError
from atoll.train.stopping import Interrupted, LocalStopper, Signals, StoreStopper, watch_signals

DEADLINE_S = 20.0  # of a wait that ends at once unless somebody waits for ever


class DictStore:
    """A store in this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)


@dataclass
class Plan:
    """One run of several replicas, drawn from a seed: when they sync, and who is told to stop after which step."""

    seed: int
    num_ranks: int = field(init=False)
    inner_steps: int = field(init=False)
    delay: int = field(init=False)
    max_steps: int = field(init=False)
    told: dict[int, int] = field(init=False)  # rank -> step in which the signal comes

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.num_ranks = draw.choice([2, 3, 4])
        self.inner_steps = draw.choice([1, 2, 3, 5])
        self.delay = draw.choice([0, 0, draw.randint(0, self.inner_steps)])
        self.max_steps = draw.randint(6, 14)
        ranks = draw.sample(range(self.num_ranks), draw.randint(1, self.num_ranks))
        self.told = {rank: draw.randint(1, self.max_steps) for rank in ranks}


class Meeting:
    """The syncs of all replicas: the k-th wait of each belongs together, as in a collective."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._arrived: dict[object, int] = {}
        self._condition = threading.Condition()

    def send(self, what: object) -> None:
        with self._condition:
            self._arrived[what] = self._arrived.get(what, 0) + 1
            self._condition.notify_all()

    def wait(self, what: object) -> None:
        with self._condition:
            if not self._condition.wait_for(lambda: self._arrived.get(what, 0) == self._num_ranks, DEADLINE_S):
                raise TimeoutError(f"{what}: {self._arrived.get(what, 0)} of {self._num_ranks} came")


def train_one(plan: Plan, rank: int, store: DictStore, meeting: Meeting, ends: list[object]) -> None:
    """The order of calls of `Run`: launches, landings, a save together; then the question whether to stop."""
    draw = random.Random(plan.seed * 100 + rank)
    signals = Signals()
    stopper = StoreStopper(
        store, rank=rank, num_ranks=plan.num_ranks, signals=signals, timeout_s=DEADLINE_S, poll_s=0.0001
    )
    calls = itertools.count()

    def sync(step: int) -> None:
        stopper.before_sync(step)
        meeting.send(number := next(calls))
        meeting.wait(number)
        stopper.after_sync(step)

    def land(step: int, launched: int) -> None:
        stopper.before_sync(step, needs=launched)
        meeting.wait(("launch", launched))
        stopper.after_sync(step)

    try:
        for step in range(1, plan.max_steps + 1):
            threading.Event().wait(draw.random() * 0.002)  # inner steps take unequal times
            if plan.told.get(rank) == step:
                signals(signal.SIGTERM, None)
            if step % plan.inner_steps == 0:
                meeting.send(("launch", step))
            if step > plan.delay and (step - plan.delay) % plan.inner_steps == 0:
                land(step, step - plan.delay)
            if step < plan.max_steps and stopper.stop_after(step) == step:
                sync(step)  # the save
                ends[rank] = step
                return
        sync(plan.max_steps)  # the last evaluation
        ends[rank] = plan.max_steps
    except (TimeoutError, TransportError) as error:
        ends[rank] = error


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_all_stop_after_the_same_step_and_nobody_waits_for_ever(first: int) -> None:
    for seed in range(first, first + 50):
        plan = Plan(seed)
        store, meeting, ends = DictStore(), Meeting(plan.num_ranks), [None] * plan.num_ranks
        threads = [
            threading.Thread(target=train_one, args=(plan, rank, store, meeting, ends))
            for rank in range(plan.num_ranks)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * DEADLINE_S)
        assert len(set(ends)) == 1 and isinstance(ends[0], int), f"{plan}: {ends}"
        assert ends[0] >= min(plan.told.values()), f"{plan}: {ends}"


def test_who_trains_on_to_the_next_sync_is_waited_for() -> None:
    """The timeline of the module: A is told after 15, B stands in the sync of 20."""
    store, told = DictStore(), Signals()
    a = StoreStopper(store, rank=0, num_ranks=2, signals=told, timeout_s=1.0)
    b = StoreStopper(store, rank=1, num_ranks=2, signals=Signals(), timeout_s=1.0)
    for stopper in (a, b):
        stopper.before_sync(10)
    for stopper in (a, b):
        stopper.after_sync(10)
    b.before_sync(20)
    told(signal.SIGINT, None)
    assert a.stop_after(15) == 20
    a.before_sync(20)
    b.after_sync(20)
    assert b.stop_after(20) == 20


def test_who_waits_for_proposals_hears_what_was_agreed_without_it() -> None:
    """B waits at 5 for what A launches at 3; C, at 4, launched that already, so that it takes B for one who goes on."""
    store, told = DictStore(), Signals()
    a, b, c = (
        StoreStopper(store, rank=rank, num_ranks=3, signals=signals, timeout_s=DEADLINE_S, poll_s=0.0001)
        for rank, signals in enumerate((told, Signals(), told))
    )
    told(signal.SIGINT, None)
    b.before_sync(5, needs=3)
    answers: list[int | None] = []
    thread = threading.Thread(target=lambda: answers.append(c.stop_after(4)))
    thread.start()
    assert a.stop_after(1) == 5
    b.after_sync(5)
    assert b.stop_after(5) == 5
    thread.join(2 * DEADLINE_S)
    assert answers == [5]


def test_one_who_does_not_answer_is_named() -> None:
    told = Signals()
    told(signal.SIGINT, None)
    stopper = StoreStopper(DictStore(), rank=0, num_ranks=3, signals=told, timeout_s=0.01, poll_s=0.001)
    with pytest.raises(TransportError, match=r"replicas \[1, 2\] did not answer"):
        stopper.stop_after(4)


def test_nobody_stops_without_a_signal() -> None:
    stopper = StoreStopper(DictStore(), rank=0, num_ranks=2, signals=Signals(), timeout_s=1.0)
    assert [stopper.stop_after(step) for step in (1, 2, 3)] == [None] * 3
    assert LocalStopper(Signals()).stop_after(1) is None


def test_the_first_signal_is_remembered_and_the_second_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with watch_signals() as signals:
        signal.raise_signal(signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_came_early_is_not_forgotten_by_an_inner_block() -> None:
    with watch_signals() as early:
        signal.raise_signal(signal.SIGINT)
        with watch_signals() as late:
            assert late is early and late.received == signal.SIGINT


def test_exit_codes_say_who_stopped_the_run() -> None:
    assert Interrupted(signal.SIGINT, "").exit_code == 130
    assert Interrupted(signal.SIGTERM, "").exit_code == 75
