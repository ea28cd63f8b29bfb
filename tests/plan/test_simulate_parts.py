"""What a simulation is made of: time, scripts, links, events."""

from __future__ import annotations

import math

import numpy as np
import pytest

from atoll.algo.schedule import Apply, Launch, Schedule
from atoll.errors import ConfigError
from atoll.plan.links import Network, uniform
from atoll.plan.sim import script as items
from atoll.plan.sim.clock import Clock
from atoll.plan.sim.fabric import Fabric, fair_rates
from atoll.plan.sim.faults import Fault, Rates, draw_faults, parse_duration, parse_rate, read_faults
from atoll.plan.sim.links import Links, links_of
from atoll.plan.sim.script import Script

SCHEDULES = [
    Schedule(4),
    Schedule(4, delay=4),
    Schedule(4, delay=4, blocking_first=True),
    Schedule(12, 3, 1),
    Schedule(12, 3, 7, blocking_first=True),
    Schedule(12, 4, 12),
    Schedule(1),
]


class Ends:
    """Notes when flows end."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.at: dict[tuple[int, int], float] = {}

    def arrived(self, sources: np.ndarray, targets: np.ndarray) -> None:
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self.at[source, target] = self.clock.now


def links(up: list[float], down: list[float] | None = None, pair: list[list[float]] | None = None) -> Links:
    receive = np.array(down) if down else np.full(len(up), math.inf)
    return Links(np.array(up, dtype=float), receive, None if pair is None else np.array(pair), np.zeros((1, 1)))


def send(fabric: Fabric, owner: Ends, flows: list[tuple[int, int]], num_bytes: float) -> None:
    fabric.send(owner, np.array([i for i, _ in flows]), np.array([j for _, j in flows]), num_bytes)


# --- time


def test_what_is_asked_for_first_happens_first() -> None:
    clock, seen = Clock(), []
    for name in "abc":
        clock.after(1.0, lambda name=name: seen.append(name))
    clock.run(until_s=2.0)
    assert seen == ["a", "b", "c"]


def test_time_stops_where_it_is_told_to() -> None:
    clock, seen = Clock(), []
    clock.after(1.0, lambda: seen.append(clock.now))
    clock.after(math.inf, lambda: seen.append(clock.now))
    clock.after(5.0, lambda: seen.append(clock.now))
    clock.run(until_s=3.0)
    assert (seen, clock.now) == ([1.0], 3.0)


# --- scripts


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_script_is_the_schedule_walked_step_by_step(schedule: Schedule) -> None:
    """Far beyond the rounds that are walked when it is made."""
    script, place, step = Script(schedule), 0, 0
    rounds = {fragment: [] for fragment in range(schedule.num_fragments)}
    launched = 0
    while step < 9 * schedule.inner_steps:
        item = script[place]
        assert isinstance(item, items.Compute)
        assert item.before == step % schedule.inner_steps
        for quiet in range(step + 1, step + item.steps):
            assert not schedule.events(quiet)
        step, place = step + item.steps, place + 1
        for event in schedule.events(step):
            if isinstance(event, Launch):
                launched += 1
                rounds[event.fragment].append(launched)
                assert script[place] == items.Launch(launched, event.fragment)
                assert script.launch_of(launched) == place
            else:
                assert isinstance(event, Apply)
                assert script[place] == items.Land(rounds[event.fragment].pop(0))
            place += 1


# --- links


def test_an_uplink_is_shared_and_what_one_cannot_use_the_others_get() -> None:
    rates = fair_rates(np.array([0, 0, 1]), np.array([1, 2, 2]), links([90, 90, 90], down=[math.inf, 30, 100]))
    assert rates.tolist() == [30, 50, 50]  # 0→1 is bound by what 1 receives; 0→2 and 1→2 share what 2 receives


def test_rates_are_max_min_fair_on_random_networks() -> None:
    """No flow could get more without taking from one that has no more than itself."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        count = int(rng.integers(2, 6))
        found = Links(
            rng.uniform(1, 9, count), rng.uniform(1, 9, count), rng.uniform(1, 9, (count, count)), np.zeros(1)
        )
        sources = rng.integers(0, count, 8)
        targets = (sources + rng.integers(1, count, 8)) % count
        rates = fair_rates(sources, targets, found)
        resources = [(found.up, sources), (found.down, targets), (found.pair.ravel(), sources * count + targets)]
        for flow in range(8):
            bottleneck = False
            for room, through in resources:
                mine = through == through[flow]
                assert rates[mine].sum() <= room[through[flow]] * (1 + 1e-9)
                full = rates[mine].sum() >= room[through[flow]] * (1 - 1e-9)
                bottleneck |= full and rates[flow] >= rates[mine].max() * (1 - 1e-9)
            assert bottleneck


def test_flows_share_a_link_while_both_are_under_way() -> None:
    clock = Clock()
    fabric, ends = Fabric(clock, links([100, 100, 100])), Ends(clock)
    send(fabric, ends, [(0, 1)], 100.0)
    clock.after(0.5, lambda: send(fabric, ends, [(0, 2)], 25.0))
    clock.run(until_s=10.0)
    # alone for 0.5 s: 50 bytes; together at 50 a second: 25 each by 1.0; alone again: the last 25 by 1.25
    assert ends.at == pytest.approx({(0, 2): 1.0, (0, 1): 1.25})
    assert fabric.sent_bytes.tolist() == pytest.approx([125, 0, 0])


def test_a_blocked_site_stands_still_and_goes_on() -> None:
    clock = Clock()
    fabric, ends = Fabric(clock, links([100, 100, 100])), Ends(clock)
    send(fabric, ends, [(0, 1), (2, 0)], 100.0)
    clock.after(0.25, lambda: fabric.block(1, True))
    clock.after(3.25, lambda: fabric.block(1, False))
    clock.run(until_s=10.0)
    assert ends.at == pytest.approx({(2, 0): 1.0, (0, 1): 4.0})


def test_dropped_flows_never_arrive_and_give_their_share_back() -> None:
    clock = Clock()
    fabric, kept, dropped = Fabric(clock, links([100, 100, 100])), Ends(clock), Ends(clock)
    send(fabric, kept, [(0, 1)], 100.0)
    send(fabric, dropped, [(0, 2)], 100.0)
    clock.after(1.0, lambda: fabric.drop(dropped))
    clock.run(until_s=10.0)
    assert kept.at == pytest.approx({(0, 1): 1.5})
    assert not dropped.at


def test_a_link_without_bound_takes_no_time() -> None:
    clock = Clock()
    fabric, ends = Fabric(clock, links([math.inf, 100])), Ends(clock)
    clock.after(2.0, lambda: send(fabric, ends, [(0, 1)], 1e9))
    clock.run(until_s=10.0)
    assert ends.at == {(0, 1): 2.0}
    assert fabric.sent_bytes.tolist() == [1e9, 0]


def test_links_know_what_islands_receive_and_sites_of_joiners() -> None:
    found = links_of(uniform(3, 100.0, latency_s=0.1), down_bytes_per_s=(40.0,), more_sites=2)
    assert (found.num_sites, found.down.tolist()) == (5, [40.0] * 5)
    assert found.exchange_s(np.arange(3), 80.0) == 2.0
    assert found.transfer_s(0, 4, 80.0) == pytest.approx(2.1)
    assert found.latency_s(3, 3) == 0.0


def test_a_matrix_bounds_pairs_and_has_no_room_for_new_islands() -> None:
    slow = ((math.inf, 10.0), (50.0, math.inf))
    network = Network((100.0, 100.0), slow, ((0.0, 0.1), (0.2, 0.0)))
    found = links_of(network)
    assert found.exchange_s(np.arange(2), 20.0) == network.exchange_s(20.0) == 2.0
    assert (found.latency_s(1, 0), found.longest_latency_s(np.arange(2))) == (0.2, 0.2)
    with pytest.raises(ConfigError, match="says nothing about the links of 1 more"):
        links_of(network, more_sites=1)


def test_every_island_may_receive_another_amount() -> None:
    found = links_of(uniform(3, 100.0), down_bytes_per_s=(100.0, 20.0, 50.0), more_sites=1)
    assert found.down.tolist() == [100, 20, 50, 50]
    assert found.exchange_s(np.arange(3), 80.0) == 4.0
    with pytest.raises(ConfigError, match="2 values for 3 islands"):
        links_of(uniform(3, 100.0), down_bytes_per_s=(1.0, 2.0))


def test_a_link_that_receives_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="lets nothing arrive"):
        links_of(uniform(2, 1.0), down_bytes_per_s=(0.0,))


# --- events


def test_rates_and_durations_are_read() -> None:
    assert parse_rate("1/10min") == pytest.approx(1 / 600)
    assert parse_rate("2/h") == pytest.approx(2 / 3600)
    assert parse_rate("0.5/s") == 0.5
    assert parse_duration("1.5h") == 5400
    assert parse_duration("250ms") == 0.25


@pytest.mark.parametrize("text", ["often", "1", "-1/h", "1/0s", "1/week"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="1/10min"):
        parse_rate(text)


def test_drawn_faults_have_the_rate_that_was_asked_for_and_repeat_by_seed() -> None:
    rates = Rates(kill=1 / 60, stop=1 / 120, join=1 / 600, repair_s=30, stop_s=7)
    drawn = [draw_faults(rates, num_sites=4, until_s=1e5, rng=np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    counts = {what: sum(fault.what == what for fault in drawn[0]) for what in ("kill", "stop", "join")}
    assert counts["kill"] == pytest.approx(1e5 / 60, rel=0.1)  # 2.4 % is one standard deviation
    assert counts["stop"] == pytest.approx(1e5 / 120, rel=0.15)
    joins = [fault.site for fault in drawn[0] if fault.what == "join"]
    assert joins == list(range(4, 4 + len(joins)))
    assert {fault.seconds for fault in drawn[0] if fault.what == "stop"} == {7}
    assert [fault.time_s for fault in drawn[0]] == sorted(fault.time_s for fault in drawn[0])


def test_a_mean_repair_time_varies_about_its_mean() -> None:
    rates = Rates(kill=1.0, repair_s=40.0, repair_varies=True)
    drawn = draw_faults(rates, num_sites=4, until_s=4000, rng=np.random.default_rng(0))
    seconds = np.array([fault.seconds for fault in drawn])
    assert seconds.mean() == pytest.approx(40, rel=0.1)
    assert seconds.std() == pytest.approx(40, rel=0.15)


def test_a_file_of_events_is_read(tmp_path) -> None:
    path = tmp_path / "events.txt"
    path.write_text("# what happened\n\n10min 3 kill   # a power cut\n90 0 slow 2.5x\n700 3 join\n800 4 join\n")
    assert read_faults(path, num_islands=4) == [
        Fault(90.0, "slow", site=0, factor=2.5),
        Fault(600.0, "kill", site=3),
        Fault(700.0, "join", site=3),
        Fault(800.0, "join", site=4),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("600 3", "is not `time_s island what`"),
        ("600 three kill", "is not `time_s island what`"),
        ("600 3 kil", "Did you mean 'kill'"),
        ("-5 3 kill", "not a time from 0"),
        ("600 3 slow", "slow 2x"),
        ("600 7 kill", "islands are 0 to 3"),
        ("600 6 join", "islands are 0 to 4"),
    ],
)
def test_a_line_that_means_nothing_is_named(tmp_path, line: str, said: str) -> None:
    path = tmp_path / "events.txt"
    path.write_text(f"# first\n{line}\n")
    with pytest.raises(ConfigError, match=said) as error:
        read_faults(path, num_islands=4)
    assert str(path) in str(error.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="cannot be read as a list of events"):
        read_faults("nowhere.txt", num_islands=2)
