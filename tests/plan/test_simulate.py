"""Simulated runs against closed forms, against each other, and under faults."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from atoll.algo.schedule import Schedule
from atoll.errors import ConfigError
from atoll.plan.estimate import Estimate, Method, Workload, estimate
from atoll.plan.links import Network, uniform
from atoll.plan.payload import Coding
from atoll.plan.shapes import ModelShape, shape_of_count
from atoll.plan.sim import plot
from atoll.plan.sim.faults import Fault, Rates
from atoll.plan.sim.outcome import Outcome
from atoll.plan.sim.scenario import QUORUM, Patience, Scenario, Speeds
from atoll.plan.sim.world import World
from atoll.plan.simulate import Simulation, as_json, simulate
from atoll.train.config import TrainConfig

MBIT = 125e3
SHAPE = ModelShape("llama", 64, 4, 2, 128, 1000)
H = 20
BLOCKING, DELAYED, STREAMING = Schedule(H), Schedule(H, delay=H, blocking_first=True), Schedule(H, 4, 3)
SCHEDULES = {"blocking": BLOCKING, "delayed": DELAYED, "streaming": STREAMING}
INT4 = Coding("int4")

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
every_model = pytest.mark.parametrize("model", ["messages", "rounds"])


def scenario(
    schedule: Schedule | None = BLOCKING,
    *,
    islands: int = 4,
    mbit: float = 10.0,
    latency_s: float = 0.0,
    coding: Coding = INT4,
    network: Network | None = None,
    step_s: float = 0.1,
    overhead_s: float = 0.0,
    landing_s: float = 0.0,
    shape: ModelShape = SHAPE,
    **others,
) -> Scenario:
    workload = Workload(shape, step_s, 512 * islands, overhead_s, landing_s)
    network = network or uniform(islands, mbit * MBIT, latency_s=latency_s)
    length = {} if "duration_s" in others or "num_rounds" in others else {"num_rounds": 12}
    return Scenario(Method("x", schedule, coding), workload, network, **length, **others)


def closed_form(asked: Scenario) -> Estimate:
    return estimate(asked.method, asked.workload, asked.network)


def times(outcome: Outcome, what: str) -> list[float]:
    return [happening.time_s for happening in outcome.happened if happening.what == what]


def gap_at(outcome: Outcome, time_s: float) -> float:
    """Between the commits before and after `time_s`."""
    commits = [0.0, *(commit.time_s for commit in outcome.commits)]
    after = next(place for place, commit in enumerate(commits) if commit > time_s)
    return commits[after] - commits[after - 1]


# --- against the closed form, where that is exact


@every_model
@every_schedule
@pytest.mark.parametrize("islands", [2, 4, 8])
@pytest.mark.parametrize("mbit", [0.1, 1.0, 100.0])
def test_a_round_takes_what_the_closed_form_says(schedule: Schedule, islands: int, mbit: float, model: str) -> None:
    asked = scenario(schedule, islands=islands, mbit=mbit, overhead_s=0.3, landing_s=0.1)
    found = simulate(asked, model=model)
    assert found.outcome.steady_round_s == pytest.approx(closed_form(asked).round_s, rel=1e-6)
    assert found.outcome.rounds == 12


@every_model
@every_schedule
def test_islands_send_the_bytes_that_the_compressor_declares(schedule: Schedule, model: str) -> None:
    asked = scenario(schedule, islands=3)
    outcome = simulate(asked, model=model).outcome
    assert outcome.payload_bytes == [12 * closed_form(asked).payload_bytes] * 3
    assert sum(outcome.link_bytes) == pytest.approx(sum(outcome.payload_bytes), rel=1e-6)


@pytest.mark.parametrize("coding", [Coding("identity"), Coding("lowrank+int4", 8), Coding("topk+stat2")], ids=str)
@pytest.mark.parametrize("islands", [2, 5])
def test_every_kind_of_code_takes_its_own_phases(coding: Coding, islands: int) -> None:
    asked = scenario(islands=islands, coding=coding, mbit=1.0)
    assert simulate(asked).outcome.steady_round_s == pytest.approx(closed_form(asked).round_s, rel=1e-6)


@every_model
def test_a_latency_is_paid_by_the_averaging_and_by_four_messages_with_the_coordinator(model: str) -> None:
    """Ready, Go, Reached, Commit; the closed form knows of those between islands alone."""
    asked = scenario(islands=4, latency_s=0.05)
    found = simulate(asked, model=model)
    assert found.outcome.steady_round_s == pytest.approx(closed_form(asked).round_s + 4 * 0.05, rel=1e-6)


@every_model
def test_many_small_exchanges_take_their_latencies(model: str) -> None:
    asked = scenario(islands=2, coding=Coding("lowrank", 4), latency_s=0.2, mbit=1e4)
    expected = closed_form(asked).round_s + 4 * 0.2
    assert simulate(asked, model=model).outcome.steady_round_s == pytest.approx(expected, rel=1e-6)


@every_model
def test_each_message_may_cost_something(model: str) -> None:
    plain, costly = scenario(islands=4, mbit=1e5), scenario(islands=4, mbit=1e5, message_s=0.01)
    exchanges = sum(payload.exchanges for payload in costly.costs.payloads(4))
    longer = simulate(costly, model=model).outcome.round_s - simulate(plain, model=model).outcome.round_s
    assert longer == pytest.approx(exchanges * 3 * 2 * 0.01, rel=0.01)


@pytest.mark.parametrize("schedule", [BLOCKING, STREAMING], ids=["blocking", "streaming"])
def test_a_matrix_of_links_is_as_slow_as_its_slowest_pair(schedule: Schedule) -> None:
    pairs = np.full((4, 4), 10 * MBIT)
    pairs[1, 2] = 0.5 * MBIT
    network = Network((20 * MBIT,) * 4, tuple(map(tuple, pairs.tolist())), ((0.0,) * 4,) * 4)
    asked = scenario(schedule, network=network)
    for model in ("messages", "rounds"):
        assert simulate(asked, model=model).outcome.steady_round_s == pytest.approx(
            closed_form(asked).round_s, rel=1e-6
        )


def test_a_slow_uplink_holds_up_everybody() -> None:
    network = Network((20 * MBIT, 1 * MBIT, 20 * MBIT), ((math.inf,) * 3,) * 3, ((0.0,) * 3,) * 3)
    asked = scenario(islands=3, network=network)
    assert simulate(asked).outcome.steady_round_s == pytest.approx(closed_form(asked).round_s, rel=1e-6)


@every_model
def test_an_island_that_receives_slowly_bounds_a_round_as_one_that_sends_slowly(model: str) -> None:
    sends = simulate(scenario(mbit=1.0), model=model).outcome
    receives = simulate(scenario(mbit=8.0, down_bytes_per_s=(1.0 * MBIT,)), model=model).outcome
    assert receives.round_s == pytest.approx(sends.round_s, rel=1e-6)


def test_data_parallelism_is_a_blocking_round_of_one_step() -> None:
    asked = scenario(None, coding=Coding("identity"))
    assert simulate(asked).outcome.round_s == pytest.approx(closed_form(asked).round_s, rel=1e-6)


def test_one_island_computes_all_the_time() -> None:
    outcome = simulate(scenario(islands=1)).outcome
    assert (outcome.utilisation, outcome.payload_bytes) == (1.0, [0.0])


@every_model
@pytest.mark.parametrize("schedule", [BLOCKING, Schedule(H, delay=H), STREAMING], ids=SCHEDULES.keys())
def test_a_delay_hides_what_the_closed_form_says_it_hides(schedule: Schedule, model: str) -> None:
    asked = scenario(schedule, mbit=1.0, num_rounds=60)
    outcome = simulate(asked, model=model).outcome
    assert outcome.utilisation == pytest.approx(closed_form(asked).utilisation, abs=0.01)
    exposed_s = closed_form(asked).exposed_s
    assert outcome.exposed_s == pytest.approx(exposed_s, abs=0.02 * closed_form(asked).round_s)


# --- one seed is one history


@every_model
def test_the_same_seed_is_the_same_history(model: str) -> None:
    rates = Rates(kill=1 / 40, stop=1 / 40, repair_s=10, stop_s=8)
    asked = scenario(duration_s=300.0, rates=rates, speeds=Speeds(jitter=0.2), seed=3)
    first, again, other = (simulate(each, model=model) for each in (asked, asked, replace(asked, seed=4)))
    assert as_json(first) == as_json(again)
    assert first.outcome.commits != other.outcome.commits


# --- whole rounds against messages


@every_schedule
def test_both_models_agree_on_jitter_and_stragglers(schedule: Schedule) -> None:
    asked = scenario(schedule, islands=12, speeds=Speeds(0.3, slower=((0, 8.0), (1, 3.0))), num_rounds=150)
    messages, rounds = (simulate(asked, model=model).outcome for model in ("messages", "rounds"))
    assert rounds.tokens_per_s == pytest.approx(messages.tokens_per_s, rel=0.02)
    assert rounds.utilisation == pytest.approx(messages.utilisation, abs=0.02)


@every_schedule
@pytest.mark.parametrize(
    "rates",
    [
        Rates(kill=1 / 60, repair_s=20),
        Rates(stop=1 / 60, stop_s=2),
        Rates(stop=1 / 60, stop_s=15),
        Rates(leave=1 / 300),
    ],
    ids=["kill", "short stop", "long stop", "leave"],
)
def test_both_models_agree_under_churn(schedule: Schedule, rates: Rates) -> None:
    asked = scenario(schedule, islands=6, duration_s=600.0, rates=rates)
    messages, rounds = (simulate(asked, model=model) for model in ("messages", "rounds"))
    assert rounds.goodput == pytest.approx(messages.goodput, abs=0.03)
    for what in ("kill", "stop", "leave", "join"):
        assert rounds.outcome.counts()[what] == messages.outcome.counts()[what]


def test_many_islands_are_simulated_in_rounds_and_few_in_messages() -> None:
    assert simulate(scenario(islands=8, num_rounds=2)).outcome.model == "messages"
    assert simulate(scenario(islands=500, num_rounds=2)).outcome.model == "rounds"
    assert simulate(scenario(islands=100, num_rounds=2500)).outcome.model == "rounds"


def test_ten_thousand_islands_of_a_hundred_billion_parameters() -> None:
    shape = shape_of_count(100e9, 96)
    rates = Rates(kill=1 / 600, repair_s=600)
    asked = scenario(DELAYED, islands=10_000, shape=shape, step_s=4.9, mbit=1e5, duration_s=6 * 3600, rates=rates)
    found = simulate(replace(asked, speeds=Speeds(jitter=0.1)))
    assert found.outcome.rounds > 50
    assert found.outcome.counts()["kill"] > 20
    assert 0.9 < found.goodput <= 1.0


# --- the protocol's figures


def test_defaults_are_those_of_the_trainer() -> None:
    config = TrainConfig()
    assert (QUORUM, Patience().deadline_s) == (config.quorum, config.deadline_s)
    assert Patience().adapt == config.adapt_inner_steps


@every_schedule
def test_every_token_is_committed_or_owed_where_nobody_goes(schedule: Schedule) -> None:
    outcome = simulate(scenario(schedule, speeds=Speeds(jitter=0.3), num_rounds=30)).outcome
    assert outcome.tokens_trained == pytest.approx(outcome.tokens_committed + outcome.tokens_owed)
    assert outcome.tokens_lost == pytest.approx(0.0, abs=1e-3)


def test_a_kill_while_others_compute_costs_only_what_the_dead_had_done() -> None:
    kill = Fault(11.0, "kill", site=2)
    outcome = simulate(scenario(script=(kill,), duration_s=60.0)).outcome
    assert times(outcome, "void") == []
    lost = outcome.tokens_lost / (512 * H)
    assert 0 < lost < 1  # of the one round that it was in
    assert [commit.contributors for commit in outcome.commits][-1] == 3


def test_a_kill_in_mid_averaging_makes_it_void_and_it_is_tried_again_at_once() -> None:
    """Found 0.1 s later; nobody else's work is lost, and the round is committed with those who remain."""
    asked = scenario(mbit=0.05, duration_s=200.0)
    round_s = closed_form(asked).round_s
    at = H * 0.1 + 0.5 * (round_s - H * 0.1)
    outcome = simulate(replace(asked, script=(Fault(at, "kill", site=2),))).outcome
    assert times(outcome, "void") == pytest.approx([at + 0.1])
    survivors = estimate(asked.method, asked.workload, uniform(3, 0.05 * MBIT))
    assert outcome.commits[0].time_s == pytest.approx(at + 0.1 + survivors.sync_s, abs=0.01)
    assert outcome.commits[0].contributors == 3
    assert outcome.tokens_lost == pytest.approx(512 * H)


@every_model
def test_an_island_that_is_frozen_is_out_after_its_silence_and_the_rest_go_on(model: str) -> None:
    """A freeze is not noticed by peers: 5 s of silence, then a second or three averagings for the survivors."""
    asked = scenario(mbit=10.0, duration_s=100.0)
    sync_s = closed_form(asked).sync_s
    at = H * 0.1 + 0.5 * sync_s
    outcome = simulate(replace(asked, script=(Fault(at, "stop", site=1, seconds=60.0),)), model=model).outcome
    assert gap_at(outcome, at) == pytest.approx(at + 5.0 + 1.0 + sync_s, abs=0.3)
    assert outcome.commits[0].contributors == 3
    assert outcome.commits[-1].contributors == 4  # it came back and fetched what it missed


@every_model
def test_a_short_freeze_in_mid_averaging_only_delays_it(model: str) -> None:
    asked = scenario(mbit=1.0, duration_s=60.0)
    at = H * 0.1 + 0.5 * closed_form(asked).sync_s
    outcome = simulate(replace(asked, script=(Fault(at, "stop", site=1, seconds=2.0),)), model=model).outcome
    assert times(outcome, "void") == []
    assert outcome.commits[0].time_s == pytest.approx(closed_form(asked).round_s + 2.0, abs=0.01)


@every_model
def test_a_joiner_contributes_once_it_has_fetched_the_state_and_trained_a_round(model: str) -> None:
    """8 bytes a parameter over the slower of the two links, from a donor that goes on."""
    asked = scenario(mbit=100.0, duration_s=60.0, script=(Fault(5.0, "join", site=4),))
    outcome = simulate(asked, model=model).outcome
    fetched_s = 5.0 + asked.state_bytes / (100.0 * MBIT)
    first = next(commit.time_s for commit in outcome.commits if commit.contributors == 5)
    assert fetched_s + H * 0.1 < first < fetched_s + H * 0.1 + 2 * closed_form(asked).round_s
    assert outcome.state_bytes == pytest.approx(asked.state_bytes, rel=0.01)


def test_a_state_on_its_way_slows_the_averaging_that_shares_its_link() -> None:
    calm = scenario(mbit=1.0, num_rounds=8)
    joined = simulate(replace(calm, script=(Fault(0.5, "join", site=4),)), model="messages").outcome
    assert max(np.diff([commit.time_s for commit in joined.commits])) > 1.05 * simulate(calm).outcome.round_s


@every_model
@pytest.mark.parametrize("slower", [((0, 10.0),), tuple((site, 3.0) for site in range(3))], ids=["1 at 10x", "3 at 3x"])
def test_slow_islands_do_not_set_the_pace_and_still_count(slower: tuple, model: str) -> None:
    asked = scenario(islands=8, speeds=Speeds(slower=slower), num_rounds=60)
    outcome = simulate(asked, model=model).outcome
    assert outcome.steady_round_s <= 1.2 * closed_form(asked).round_s
    late = [commit.contributors for commit in outcome.commits[30:]]
    assert max(late) == 8  # with fewer steps a round they are in time


def test_without_fewer_steps_a_straggler_is_in_every_few_rounds() -> None:
    asked = scenario(islands=4, speeds=Speeds(slower=((3, 2.5),)), patience=Patience(adapt=False), num_rounds=60)
    contributors = {commit.contributors for commit in simulate(asked).outcome.commits}
    assert contributors == {3, 4}


def test_an_island_that_becomes_slow_computes_less() -> None:
    slow = Fault(20.0, "slow", site=1, factor=2.0)
    asked = scenario(duration_s=120.0)
    outcome = simulate(replace(asked, script=(slow,))).outcome
    assert outcome.tokens_trained < 0.95 * simulate(asked).outcome.tokens_trained


def test_a_closed_quorum_waits_for_everybody() -> None:
    asked = scenario(
        islands=4,
        speeds=Speeds(slower=((3, 3.0),)),
        patience=Patience(quorum=1.0, deadline_s=1e6, adapt=False),
    )
    assert simulate(asked).outcome.round_s == pytest.approx(closed_form(asked).round_s + 2 * H * 0.1, rel=1e-3)


@every_model
def test_the_last_island_that_holds_the_state_is_spared_by_chance_and_refused_in_a_file(model: str) -> None:
    asked = scenario(islands=2, duration_s=100.0)
    script = (Fault(10.0, "kill", site=0), Fault(20.0, "kill", site=1))
    with pytest.raises(ConfigError, match="no other holds the committed state"):
        simulate(replace(asked, script=script), model=model)
    outcome = simulate(replace(asked, rates=Rates(kill=1 / 40, repair_s=30.0)), model=model).outcome
    assert outcome.rounds > 10


# --- what is worth a warning, and what is refused


def test_a_delay_that_hides_too_little_is_warned_of_with_one_that_would() -> None:
    asked = scenario(DELAYED, mbit=0.1)
    (warning,) = simulate(asked).warnings
    enough = closed_form(asked).inner_steps_to_hide
    assert f"Use --inner-steps {enough}" in warning
    assert simulate(scenario(Schedule(enough, delay=enough), mbit=0.1)).warnings == ()


def test_a_state_too_large_for_the_link_is_warned_of() -> None:
    asked = scenario(mbit=0.05, islands=3, duration_s=400.0, patience=Patience(deadline_s=5.0))
    found = simulate(replace(asked, script=(Fault(10.0, "join", site=3),)))
    assert any("it comes too late each time" in warning for warning in found.warnings)


def test_faults_in_every_averaging_are_warned_of() -> None:
    asked = scenario(mbit=0.02, islands=8, duration_s=600.0, rates=Rates(stop=1 / 20, stop_s=1.0))
    assert any("most come to nothing" in warning for warning in simulate(asked).warnings)


def test_a_time_too_short_for_a_round_is_warned_of() -> None:
    assert any("no round was committed" in warning for warning in simulate(scenario(duration_s=1.0)).warnings)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rates": Rates(kill=1 / 10, repair_s=60.0)}, "nobody would hold the state"),
        ({"rates": Rates(kill=1 / 60)}, "come back"),
        ({"rates": Rates(leave=1 / 60)}, "nobody would be left"),
        ({"rates": Rates(kill=1 / 600, repair_s=1.0), "islands": 1}, "--islands 2"),
        ({"mbit": 0.0}, "nothing would ever arrive"),
        ({"duration_s": -1.0}, "--hours 1"),
    ],
)
def test_what_cannot_be_simulated_is_said_plainly(changes: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        simulate(scenario(**{"duration_s": 3600.0, **changes}))
    assert len(str(error.value).splitlines()) <= 3


def test_rates_need_a_time() -> None:
    with pytest.raises(ConfigError, match="--hours"):
        simulate(scenario(rates=Rates(kill=1 / 600, repair_s=60.0)))


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'messages'"):
        simulate(scenario(), model="message")


# --- as data and as a picture


@pytest.fixture(scope="module")
def struck() -> Simulation:
    script = (Fault(20.0, "kill", site=2), Fault(26.0, "join", site=2), Fault(30.0, "stop", site=1, seconds=3.0))
    return simulate(scenario(duration_s=80.0, mbit=1.0, overhead_s=0.1, landing_s=0.1, script=script))


def test_the_time_line_has_no_gap_and_no_overlap(struck: Simulation) -> None:
    for site in range(4):
        spans = [span for span in struck.outcome.spans if (span.site, span.lane) == (site, "train")]
        assert spans[0].start_s == 0.0
        for before, after in pairwise(spans):
            assert after.start_s == pytest.approx(before.end_s, abs=1e-6) or site == 2  # which was nobody for a moment
        assert spans[-1].end_s == pytest.approx(80.0)


def test_seconds_add_up_to_the_time_of_all_islands(struck: Simulation) -> None:
    kinds = ("compute", "wait", "land", "fetch", "frozen", "down")
    assert sum(struck.outcome.seconds.get(kind, 0.0) for kind in kinds) == pytest.approx(4 * 80.0, rel=1e-3)


def test_the_json_names_what_was_found(struck: Simulation) -> None:
    found = as_json(struck)
    assert found["counts"] == {
        "kill": 1,
        "stop": 1,
        "leave": 0,
        "join": 1,
        "void": found["counts"]["void"],
        "spared": 0,
    }
    assert found["rounds"] == len(struck.outcome.commits)
    assert found["goodput"] == pytest.approx(found["tokens_per_s"] / found["fault_free"]["tokens_per_s"])
    assert {span[2] for span in found["timeline"]["spans"]} >= {"compute", "wait", "encode", "send", "land", "down"}
    assert found["timeline"]["from_s"] < 20.0 < found["timeline"]["until_s"]


def test_the_picture_shows_every_island_and_what_happened(struck: Simulation, tmp_path) -> None:
    figure = plot.draw_simulation(struck, struck.window)
    lines = figure.axes[0]
    assert [label.get_text() for label in lines.get_yticklabels()] == [f"island {site}" for site in range(4)]
    named = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"compute", "wait", "send", "encode", "outer step", "away", "killed", "joined"} <= named
    plot.plot_simulation(struck, tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"


def test_a_picture_of_many_islands_has_rows_for_those_to_whom_something_happens(tmp_path) -> None:
    script = (Fault(20.0, "kill", site=60), Fault(40.0, "join", site=60))
    found = simulate(scenario(islands=300, num_rounds=30, script=script))
    rows = plot.shown_sites(found, found.window)
    assert 60 in rows
    assert 10 < len(rows) <= plot.ROWS


def test_a_world_is_watched(recwarn) -> None:
    seen: list[float] = []
    World(scenario(num_rounds=400), []).run(seen.append)
    assert seen == sorted(seen)
    assert len(seen) > 1
