"""The laws that every schedule, rule, optimizer and compressor answers to."""

from __future__ import annotations

import pytest
import torch
import xxhash
from laws.driver import (
    COMPRESSORS,
    OPTIMIZERS,
    RULES,
    SCHEDULES,
    Feedback,
    Fleet,
    assert_equal,
    assert_same_bits,
    bits,
    plain_averaging,
    pull_move,
    settings_for,
    sign_move,
    start_params,
    trained_alone,
)

from atoll.algo.adopt import carry, eager, lerp, replace
from atoll.algo.outer import Momentum, Nesterov
from atoll.algo.schedule import Schedule
from atoll.comm.local import LocalGroup
from atoll.train.data_parallel import GradientSync

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
each_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)


# --- law 1: one replica, unit outer step, full carry, any schedule and delay = plain training


@each_schedule
def test_one_replica_with_full_carry_trains_as_if_alone(schedule: Schedule) -> None:
    fleet = Fleet(1, plain_averaging(schedule, adopt=carry(1.0)), schedule)
    for step in range(1, 20):
        fleet.run(1)
        assert_equal(fleet.members[0].params, trained_alone(sign_move, step))


@each_schedule
@pytest.mark.parametrize("steps", range(1, 14))
def test_when_that_run_ends_the_anchor_is_where_plain_training_ends(schedule: Schedule, steps: int) -> None:
    fleet = Fleet(1, plain_averaging(schedule, adopt=carry(1.0)), schedule).run(steps).finish()
    if steps > schedule.first_step:
        assert_equal(fleet.anchor(), trained_alone(sign_move, steps))
    assert_equal(fleet.members[0].params, trained_alone(sign_move, steps))


@each_schedule
def test_one_eager_replica_trains_as_if_alone(schedule: Schedule) -> None:
    """Its own part of the mean is all of it, so there is nothing to wait for."""
    fleet = Fleet(1, plain_averaging(schedule, adopt=eager()), schedule).run(19)
    assert_equal(fleet.members[0].params, trained_alone(sign_move, 19))


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES.values() if not s.delay], ids=str)
@each_rule
def test_one_replica_without_delay_trains_as_if_alone_under_every_rule(schedule: Schedule, rule: object) -> None:
    fleet = Fleet(1, plain_averaging(schedule, adopt=rule), schedule).run(13)
    assert_equal(fleet.members[0].params, trained_alone(sign_move, 13))


# --- law 2: H=1, inner SGD, unit outer step = synchronous SGD on the mean gradient


def test_rounds_of_one_step_are_synchronous_data_parallelism() -> None:
    """Replica i's loss is a parabola of its own; the mean gradient is that of an M-fold batch."""
    schedule = Schedule(1)
    targets = torch.tensor([0.0, 2.0, 4.0, 8.0])
    rate = 0.25

    def inner_sgd(replica: int, step: int, params: dict[str, torch.Tensor]) -> None:
        params["x"] -= rate * (params["x"] - targets[replica])

    start = lambda: {"x": torch.tensor([1.0, -3.0])}  # noqa: E731
    fleet = Fleet(4, plain_averaging(schedule), schedule, move=inner_sgd, start=start)
    ends = LocalGroup(4).endpoints()
    copies = [{"x": torch.nn.Parameter(start()["x"])} for _ in ends]
    syncs = [GradientSync(params, end, COMPRESSORS["identity"]) for params, end in zip(copies, ends, strict=True)]
    big_batch = start()["x"]
    for _ in range(6):
        fleet.run(1)
        for params, target in zip(copies, targets, strict=True):
            params["x"].grad = params["x"].detach() - target
        for sync in syncs:
            sync.launch(1.0)
        for sync, params in zip(syncs, copies, strict=True):
            sync.apply()
            torch.optim.SGD(params.values(), lr=rate).step()
        big_batch = big_batch - rate * (big_batch[:, None] - targets).mean(1)
        torch.testing.assert_close(fleet.anchor()["x"], big_batch, rtol=0, atol=1e-6)
        torch.testing.assert_close(copies[3]["x"].data, big_batch, rtol=0, atol=1e-6)
    assert len({sync.digest() for sync in syncs}) == 1
    assert not torch.allclose(big_batch, start()["x"], atol=1.0), "nothing was learnt"


# --- law 3: after each round all anchors are bit-identical, for every compressor


@each_compressor
@each_schedule
@each_rule
def test_replicas_hold_the_same_anchor_bit_for_bit(compressor: object, schedule: Schedule, rule: object) -> None:
    fleet = Fleet(3, settings_for(schedule, compressor=compressor, adopt=rule), schedule, move=pull_move)
    for _ in range(13):
        fleet.run(1)
        for replica in (1, 2):
            assert_same_bits(fleet.anchor(replica), fleet.anchor(0))
        assert len({member.sync.digest() for member in fleet.members}) == 1
    assert any(bits(a) != bits(b) for a, b in zip(fleet.anchor().values(), start_params().values(), strict=True))
    norms = fleet.reports[0][0].geometry.norms
    assert len(set(norms)) > 1, "replicas trained alike: the law held for nothing"


@pytest.mark.parametrize("bucket_elements", [1, 4, 100])
def test_the_digest_is_that_of_the_anchor_as_it_is_now(bucket_elements: int) -> None:
    schedule = Schedule(2)
    fleet = Fleet(2, settings_for(schedule, bucket_elements=bucket_elements), schedule)
    seen = set()
    for _ in range(3):
        fleet.run(2)
        digest = xxhash.xxh3_128_hexdigest(b"".join(bits(tensor) for tensor in fleet.anchor().values()))
        assert [member.sync.digest() for member in fleet.members] == [digest] * 2
        assert fleet.reports[-1][0].digest == digest
        seen.add(digest)
    assert len(seen) == 3


# --- law 4: error feedback loses nothing


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES.values() if not s.delay], ids=str)
def test_what_was_sent_and_what_is_owed_add_up_to_what_was_done(schedule: Schedule) -> None:
    """SGD at rate 1: the anchor moves by what was sent; no replica has progress left once its last round landed."""
    fleet = Fleet(2, plain_averaging(schedule, compressor=Feedback()), schedule)
    done = {name: torch.zeros_like(value) for name, value in start_params().items()}

    def counted(replica: int, step: int, params: dict[str, torch.Tensor]) -> None:
        before = {name: param.clone() for name, param in params.items()}
        sign_move(replica, step, params)
        for name, param in params.items():
            done[name] += param - before[name]

    fleet.move = counted
    fleet.run(9).finish()
    owed = {name: torch.zeros_like(value) for name, value in done.items()}
    for member in fleet.members:
        names = [name for fragment in fleet.names for name in fragment if start_params()[name].numel()]
        codes = [code for item in member.sync.replica_state()["fragments"] for code in item["codes"]]
        for name, code in zip(names, codes, strict=True):
            owed[name] += code["own.residual"]
    assert any(value.any() for value in owed.values()), "nothing was rounded"
    for name, start in start_params().items():
        sent = 2 * (start - fleet.anchor()[name])
        assert torch.equal(sent + owed[name], -done[name]), name


# --- law 5: identity = the exact mean


@each_compressor
def test_a_mean_of_short_numbers_is_exact(compressor: object) -> None:
    """Small multiples of 1/4 lie in every format."""
    moves = [torch.tensor([1.0, -2.0, 0.25]), torch.tensor([3.0, 2.0, 0.75]), torch.tensor([-1.0, 6.0, 0.5])]

    def move(replica: int, step: int, params: dict[str, torch.Tensor]) -> None:
        params["x"] += moves[replica]

    schedule = Schedule(1)
    settings = plain_averaging(schedule, compressor=compressor)
    fleet = Fleet(3, settings, schedule, move=move, start=lambda: {"x": torch.zeros(3)}).run(1)
    assert fleet.anchor()["x"].tolist() == [1.0, 2.0, 0.5]


# --- law 6: streaming(1, τ=0, α=0) = DiLoCo


@each_optimizer
def test_streaming_with_one_fragment_no_delay_and_alpha_0_is_diloco(optimizer: object) -> None:
    diloco, streaming = Schedule(4), Schedule(4, num_fragments=1, delay=0)
    left = Fleet(2, settings_for(diloco, optimizer=optimizer, adopt=replace()), diloco, move=pull_move).run(14)
    right = Fleet(2, settings_for(streaming, optimizer=optimizer, adopt=lerp(0.0)), streaming, move=pull_move).run(14)
    for a, b in zip(left.members, right.members, strict=True):
        assert_equal(a.params, b.params)
        assert_equal(a.sync.anchor(), b.sync.anchor())
    assert left.members[0].sync.round == 3


@each_optimizer
def test_fragments_that_sync_together_are_the_whole_model(optimizer: object) -> None:
    """Per-fragment state and buckets of any size change nothing."""
    whole = Fleet(2, settings_for(Schedule(3), optimizer=optimizer, bucket_elements=100), Schedule(3), move=pull_move)
    parts = Fleet(
        2,
        settings_for(Schedule(3), optimizer=optimizer, bucket_elements=2),
        Schedule(3),
        move=pull_move,
        fragments=[["cube", "one"], ["turned", "empty", "scalar", "vector"]],
    )
    for _ in range(3):
        whole.run(3)
        for replica, member in enumerate(parts.members):
            for step in range(parts.step + 1, parts.step + 4):
                pull_move(replica, step, member.params)
        parts.step += 3
        for fragment in range(2):
            for member in parts.members:
                member.sync.launch(fragment)
        for fragment in range(2):
            for member in parts.members:
                member.sync.apply(fragment, step=parts.step)
        for name, tensor in whole.anchor().items():
            assert bits(tensor) == bits(parts.anchor()[name]), name


def test_an_unsynced_fragment_does_not_move_by_a_bit() -> None:
    schedule = Schedule(4, num_fragments=2)
    fleet = Fleet(2, settings_for(schedule, optimizer=Nesterov()), schedule, move=pull_move).run(5)
    state = fleet.save()["members"][0]
    fleet.run(1)  # fragment 0 syncs for the second time; fragment 1 has once
    after = fleet.save()["members"][0]
    moved = {name for name in state["anchor"] if bits(state["anchor"][name]) != bits(after["anchor"][name])}
    assert moved == {"scalar", "cube"}
    outer = {
        name
        for name in state["shared"]["outer"]
        if bits(state["shared"]["outer"][name]) != bits(after["shared"]["outer"][name])
    }
    assert outer == {"momentum.scalar", "momentum.cube"}
    assert after["shared"]["counts"] == [2, 1]


# --- law 8: interrupt anywhere, resume = uninterrupted, bit for bit


def assert_resumes_exactly(make: object, steps: int = 11) -> None:
    whole = make().run(steps).finish()
    for stop in range(steps):
        resumed = make().load(make().run(stop).save()).run(steps - stop).finish()
        for there, here in zip(whole.members, resumed.members, strict=True):
            assert_same_bits(there.params, here.params)
            assert_same_bits(there.sync.anchor(), here.sync.anchor())
            assert_same_bits(there.sync.shared_state()["outer"], here.sync.shared_state()["outer"])
            assert there.sync.shared_state()["counts"] == here.sync.shared_state()["counts"]
            assert there.sync.digest() == here.sync.digest()


@each_schedule
@each_rule
def test_a_run_resumed_after_any_step_is_the_uninterrupted_run(schedule: Schedule, rule: object) -> None:
    settings = settings_for(schedule, adopt=rule)
    assert_resumes_exactly(lambda: Fleet(2, settings, schedule, move=pull_move))


@each_optimizer
@each_compressor
def test_resuming_is_exact_for_every_optimizer_and_compressor(optimizer: object, compressor: object) -> None:
    schedule = SCHEDULES["streaming, delay 1"]
    settings = settings_for(schedule, optimizer=optimizer, compressor=compressor, adopt=carry(0.5))
    assert_resumes_exactly(lambda: Fleet(2, settings, schedule, move=pull_move))


@pytest.mark.parametrize("name", ["diloco", "one-round delay, first blocks", "streaming, delay 1"])
@pytest.mark.parametrize("own_base", [False, True])
@each_rule
def test_resuming_is_exact_with_dropped_and_pruned_contributions(name: str, own_base: bool, rule: object) -> None:
    def how(replica: int, step: int) -> dict[str, object]:
        dropped = replica == (step // 3) % 3
        return {"weight": 1.0 + replica, "present": not dropped, "adopts": not dropped}

    schedule = SCHEDULES[name]
    settings = settings_for(schedule, adopt=rule, own_base=own_base, dropped_count=True, prune_fraction=0.4)
    assert_resumes_exactly(lambda: Fleet(3, settings, schedule, move=pull_move, how=how))


def test_a_restored_replica_has_the_digest_of_its_anchor_at_once() -> None:
    schedule = Schedule(3)
    saved = Fleet(2, settings_for(schedule), schedule).run(4)
    fresh = Fleet(2, settings_for(schedule), schedule)
    assert fresh.members[0].sync.digest() != saved.members[0].sync.digest()
    assert fresh.load(saved.save()).members[0].sync.digest() == saved.members[0].sync.digest()


# --- law 9: the divisor is the contributors, a void round changes nothing


@each_schedule
@each_rule
def test_a_void_round_moves_neither_anchor_nor_outer_state(schedule: Schedule, rule: object) -> None:
    settings = settings_for(schedule, adopt=rule, optimizer=Momentum(0.5))
    fleet = Fleet(2, settings, schedule, move=pull_move).run(7)
    before = fleet.save()["members"][0]
    in_flight = sum(len(f["flights"]) for f in before["own"]["fragments"])
    fleet.how = lambda replica, step: {"present": False}
    fleet.reports.clear()
    fleet.run(14)
    voided = [reports[0] for reports in fleet.reports[in_flight:]]
    assert voided and all(report.contributors == 0 for report in voided)
    after = fleet.save()["members"][0]
    if not in_flight:
        assert_same_bits(before["anchor"], after["anchor"])
        assert_same_bits(before["shared"]["outer"], after["shared"]["outer"])
        assert before["shared"]["counts"] == after["shared"]["counts"]
    fleet.run(7)
    assert_same_bits(after["anchor"], fleet.anchor())


@each_schedule
@pytest.mark.parametrize("rule", [carry(1.0), eager()], ids=["carry", "eager"])
def test_what_a_void_round_took_is_brought_to_the_next(schedule: Schedule, rule: object) -> None:
    fleet = Fleet(1, plain_averaging(schedule, adopt=rule), schedule)
    fleet.how = lambda replica, step: {"present": not 5 <= step <= 9}
    fleet.run(19).finish()
    assert_equal(fleet.anchor(), trained_alone(sign_move, 19))


def test_progress_survives_a_void_round_of_diloco() -> None:
    schedule = Schedule(3)
    fleet = Fleet(1, plain_averaging(schedule), schedule)
    fleet.how = lambda replica, step: {"present": step != 3}
    fleet.run(3)
    assert_equal(fleet.anchor(), start_params())
    fleet.run(3)
    assert_equal(fleet.anchor(), trained_alone(sign_move, 6))


@each_schedule
def test_three_of_four_contributors_give_the_mean_of_three(schedule: Schedule) -> None:
    """The fourth moves by 100; a divisor of four, or its vote, would show."""

    def move(replica: int, step: int, params: dict[str, torch.Tensor]) -> None:
        for param in params.values():
            param += (3.0, 6.0, 9.0, 100.0)[replica]

    settings = plain_averaging(schedule, adopt=carry(1.0))
    fleet = Fleet(4, settings, schedule, move=move, how=lambda replica, step: {"present": replica != 3})
    fleet.run(12).finish()
    assert_equal(fleet.anchor(), {name: value + 6.0 * 12 for name, value in start_params().items()})
    assert {tuple(reports[0].weights) for reports in fleet.reports} == {(1.0, 1.0, 1.0, 0.0)}
