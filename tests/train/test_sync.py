from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws.driver import (
    COMPRESSORS,
    OPTIMIZERS,
    RULES,
    SCHEDULES,
    Fleet,
    assert_equal,
    assert_same_bits,
    bits,
    plain_averaging,
    pull_move,
    settings_for,
    start_params,
    trained_alone,
)
from torch import Tensor, nn

from atoll.algo.adopt import carry, lerp, replace
from atoll.algo.outer import SGD, Nesterov
from atoll.algo.schedule import Apply, Launch, Schedule
from atoll.comm.local import LocalGroup
from atoll.errors import CheckpointError, ConfigError, DesyncError
from atoll.train.sync import OuterSettings, ReplicaSync

PLAIN = OuterSettings(optimizer=SGD(), lr=lambda step: 1.0)

each_compressor = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def syncs_of(models: list[dict[str, Tensor]], outer: OuterSettings = PLAIN, **more: object) -> list[ReplicaSync]:
    ends = LocalGroup(len(models)).endpoints()
    return [ReplicaSync(params, end, outer, **more) for params, end in zip(models, ends, strict=True)]


def sync_round(
    syncs: list[ReplicaSync], how: list[dict[str, object]] | None = None, *, step: int = 1, follow: bool = False
):
    """Launch and land the only fragment of every replica."""
    for sync, choice in zip(syncs, how or [{}] * len(syncs), strict=True):
        sync.launch(0, follow=follow, **choice)
    return [sync.apply(0, step=step, follow=follow) for sync in syncs]


def ones(value: float, **more: Tensor) -> dict[str, Tensor]:
    return {"x": torch.full((3,), value), **more}


# --- storage, sign, the first rounds


def test_the_anchor_has_storage_of_its_own() -> None:
    params = start_params()
    (sync,) = syncs_of([params])
    for param in params.values():
        param += 1
    assert_equal(sync.anchor(), start_params())


def test_two_replicas_moving_by_minus_one_follow_the_golden_numbers() -> None:
    """With anchor and parameters in one storage it would be −1.33, −2.897, ..."""
    models = [ones(0.0), ones(0.0)]
    syncs = syncs_of(models, OuterSettings())
    for round, value in enumerate([-1.33, -3.227, -5.6343, -8.50087], start=1):
        for params in models:
            params["x"] -= 1
        reports = sync_round(syncs)
        assert syncs[0].anchor()["x"].tolist() == pytest.approx([value] * 3, abs=1e-5)
        assert models[1]["x"].tolist() == syncs[0].anchor()["x"].tolist()
        assert [report.round for report in reports] == [round] * 2 and syncs[0].round == round


def test_the_outer_rate_is_that_of_the_step_at_which_the_round_lands() -> None:
    models = [ones(0.0)]
    (sync,) = syncs_of(models, OuterSettings(optimizer=SGD(), lr=lambda step: {5: 0.5, 9: 2.0}[step]))
    models[0]["x"] += 1
    sync_round([sync], step=5)
    assert models[0]["x"].tolist() == [0.5] * 3
    models[0]["x"] += 1
    sync_round([sync], step=9)
    assert models[0]["x"].tolist() == [2.5] * 3


# --- buckets


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5),
    st.integers(1, 40),
    st.sampled_from(list(COMPRESSORS)),
)
def test_every_element_is_averaged_exactly_once(shapes: list[tuple[int, ...]], capacity: int, name: str) -> None:
    def start() -> dict[str, Tensor]:
        return {f"t{i}": torch.zeros(shape) for i, shape in enumerate(shapes)}

    models = [start() for _ in range(3)]
    outer = OuterSettings(SGD(), lambda step: 1.0, COMPRESSORS[name], bucket_elements=capacity)
    syncs = syncs_of(models, outer)
    for _ in range(2):
        for replica, params in enumerate(models):
            for i, param in enumerate(params.values()):
                param += (replica + 1) * (1 + torch.arange(param.numel()).view(param.shape) % 3 + i)
        reports = sync_round(syncs)
    for params in models:
        for i, param in enumerate(params.values()):
            assert torch.equal(param, 4.0 * (1 + torch.arange(param.numel()).view(param.shape) % 3 + i))
    assert [report.payload_bytes for report in reports] == [sync.sent_bytes(0) for sync in syncs]


@pytest.mark.parametrize(("sizes", "capacity"), [([6, 6], 10), ([12], 10), ([4, 4, 4], 4)])
def test_sizes_whose_last_bucket_is_lost_elsewhere(sizes: list[int], capacity: int) -> None:
    models = [{f"t{i}": torch.full((n,), float(r)) * 0 for i, n in enumerate(sizes)} for r in range(2)]
    syncs = syncs_of(models, OuterSettings(SGD(), lambda step: 1.0, bucket_elements=capacity))
    for params, move in zip(models, (1.0, 3.0), strict=True):
        for param in params.values():
            param += move
    sync_round(syncs)
    assert all(set(param.tolist()) == {2.0} for params in models for param in params.values())


# --- shapes, dtypes, tied and frozen weights


@each_compressor
@each_rule
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_awkward_shapes_reach_the_anchor_and_come_back(compressor: object, rule: object, schedule: Schedule) -> None:
    """Scalars, one element, 3-D, transposed, empty: each moves by its own number, and so does its anchor."""

    def move(replica: int, step: int, params: dict[str, Tensor]) -> None:
        for i, param in enumerate(params.values()):
            param += i + 1

    fleet = Fleet(2, plain_averaging(schedule, compressor=compressor, adopt=rule), schedule, move=move)
    last = schedule.first_step + schedule.inner_steps // schedule.num_fragments
    fleet.run(last).finish()
    for i, (name, value) in enumerate(start_params().items()):
        for replica in range(2):
            assert torch.equal(fleet.anchor(replica)[name], value + (i + 1) * last), name
    assert fleet.members[0].params["turned"].stride() == (1, 3), "parameters stay where they are"


def test_a_fragment_of_empty_tensors_alone_takes_part() -> None:
    models = [{"nothing": torch.empty(0)} for _ in range(2)]
    for outer in (PLAIN, OuterSettings(keep_contribution=True, adopt=carry(1.0)), OuterSettings(prune_fraction=0.5)):
        reports = sync_round(syncs_of(models, outer))
        assert reports[0].contributors == 2 and reports[0].payload_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@each_rule
def test_parameters_of_any_dtype_have_an_fp32_anchor(dtype: torch.dtype, rule: object) -> None:
    models = [{"low": torch.ones(3, dtype=dtype), "fp32": torch.ones(2)} for _ in range(2)]
    syncs = syncs_of(models, OuterSettings(SGD(), lambda step: 1.0, adopt=rule, keep_contribution=True))
    for params, move in zip(models, (0.5, 1.5), strict=True):
        for param in params.values():
            param += move
    sync_round(syncs)
    assert all(tensor.dtype == torch.float32 and set(tensor.tolist()) == {2.0} for tensor in syncs[0].anchor().values())
    assert models[0]["low"].dtype == dtype


def test_what_bf16_parameters_cannot_hold_of_the_anchor_is_not_progress() -> None:
    """Nobody trains: the anchor, which bf16 cannot hold, must not drift towards its rounding."""
    for schedule, rule in (
        (Schedule(1), replace()),
        (Schedule(1, delay=1), carry(0.0)),
        (Schedule(1, delay=1), carry(0.5)),
    ):
        start = {"x": torch.ones(4)}
        fleet = Fleet(
            2,
            plain_averaging(schedule, adopt=rule),
            schedule,
            move=lambda replica, step, params: None,
            start=lambda: {"x": torch.ones(4, dtype=torch.bfloat16)},
        )
        for member in fleet.members:
            member.sync.load_shared_state({"x": start["x"] + 1e-3}, member.sync.shared_state())
        fleet.run(6).finish()
        assert torch.equal(fleet.anchor()["x"], start["x"] + 1e-3)


def test_a_dropped_bf16_replica_measures_from_what_it_really_held() -> None:
    models = [{"x": torch.ones(2, dtype=torch.bfloat16)} for _ in range(2)]
    syncs = syncs_of(models, OuterSettings(SGD(), lambda step: 1.0, own_base=True))
    for sync in syncs:
        sync.load_shared_state({"x": torch.ones(2) + 1e-3}, sync.shared_state())
    sync_round(syncs, [{}, {"present": False, "adopts": False}])
    sync_round(syncs, [{"present": False}, {}])
    assert torch.equal(syncs[0].anchor()["x"], torch.ones(2) + 1e-3), "nobody trained, so nothing may move"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def test_tied_weights_are_sent_once_and_stay_tied() -> None:
    torch.manual_seed(0)
    models = [Tied(), Tied()]
    models[1].load_state_dict(models[0].state_dict())
    trainable = [{n: p for n, p in model.named_parameters() if p.requires_grad} for model in models]
    syncs = syncs_of(trainable)
    start = models[0].head.weight.detach().clone()
    with torch.no_grad():
        models[0].embed.weight += 1
        models[1].embed.weight += 3
    reports = sync_round(syncs)
    assert reports[0].payload_bytes == 15 * 4
    for model in models:
        assert model.head.weight is model.embed.weight
        torch.testing.assert_close(model.head.weight.detach(), start + 2)
        assert model.frozen.tolist() == [1.0, 1.0]


def test_nothing_to_sync_is_an_error_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="requires_grad"):
        syncs_of([{}])


@pytest.mark.parametrize("fragments", [[["x"]], [["x"], ["x", "y"]], [["x", "y"], []], [["x", "y", "z"]]])
def test_fragments_must_hold_every_parameter_once(fragments: list[list[str]]) -> None:
    with pytest.raises(ConfigError, match="exactly once"):
        syncs_of([{"x": torch.ones(1), "y": torch.ones(1)}], fragments=fragments)


# --- who counts


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_no_weight_is_refused(weight: float) -> None:
    (sync,) = syncs_of([ones(0.0)])
    with pytest.raises(ConfigError, match="weight="):
        sync.launch(0, weight=weight)


def test_replicas_that_begin_with_other_weights_are_refused_at_the_first_round() -> None:
    syncs = syncs_of([ones(0.0), ones(1e-7)])
    with pytest.raises(DesyncError, match="digest by replica") as caught:
        sync_round(syncs)
    assert len(str(caught.value).splitlines()) <= 3


def test_weights_are_those_of_the_contributors() -> None:
    models = [ones(0.0), ones(0.0), ones(0.0)]
    syncs = syncs_of(models)
    for params, move in zip(models, (1.0, 5.0, 100.0), strict=True):
        params["x"] += move
    reports = sync_round(syncs, [{"weight": 3.0}, {"weight": 1.0}, {"weight": 0.0}])
    assert syncs[0].anchor()["x"].tolist() == [2.0] * 3
    assert reports[0].weights == [3.0, 1.0, 0.0] and reports[0].contributors == 2
    assert models[2]["x"].tolist() == [2.0] * 3, "who has no vote still takes over the anchor"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@each_compressor
@each_rule
@pytest.mark.parametrize("name", ["diloco", "one-round delay, first blocks", "streaming, delay 1"])
def test_a_replica_that_is_not_finite_is_refused_named_and_leaves_no_trace(
    bad: float, compressor: object, rule: object, name: str
) -> None:
    """The round equals, bit for bit, one that the broken replica sat out; afterwards it trains on from the anchor."""
    schedule = SCHEDULES[name]

    def breaking(replica: int, step: int, params: dict[str, Tensor]) -> None:
        pull_move(replica, step, params)
        if replica == 1 and step == 2:
            params["cube"][0, 1, 0] = bad

    outer = settings_for(schedule, compressor=compressor, adopt=rule)
    broken = Fleet(3, outer, schedule, move=breaking).run(schedule.inner_steps)
    sat_out = Fleet(3, outer, schedule, move=pull_move, how=lambda replica, step: {"present": replica != 1})
    sat_out.run(schedule.inner_steps)
    refusals = [reports[0].refused for reports in broken.reports]
    assert refusals[0] == [1]
    for replica in range(3):
        assert_same_bits(broken.anchor(replica), sat_out.anchor(replica))
    assert_same_bits(broken.members[0].params, sat_out.members[0].params)
    broken.run(8 * schedule.inner_steps)
    assert all(torch.isfinite(param).all() for member in broken.members for param in member.params.values())
    assert broken.reports[-1][0].refused == [] and broken.reports[-1][0].contributors == 3
    assert len({member.sync.digest() for member in broken.members}) == 1


def test_a_lone_replica_that_breaks_starts_again_from_the_anchor() -> None:
    models = [ones(1.0)]
    syncs = syncs_of(models)
    models[0]["x"].fill_(math.nan)
    (report,) = sync_round(syncs)
    assert report.refused == [0] and report.round == 0
    assert models[0]["x"].tolist() == [1.0] * 3 == syncs[0].anchor()["x"].tolist()


def test_large_finite_parameters_in_half_precision_are_not_refused() -> None:
    models = [
        {"x": torch.full((9,), 60000.0, dtype=torch.float16), "y": torch.ones(1, dtype=torch.float64)} for _ in range(2)
    ]
    assert sync_round(syncs_of(models))[0].contributors == 2


# --- dropped outer gradients: both readings of both switches


def dropped_round(outer: OuterSettings) -> tuple[list[dict[str, Tensor]], list[ReplicaSync]]:
    """From 0, replicas move by 1 and 3; the contribution of the second is lost."""
    models = [ones(0.0), ones(0.0)]
    syncs = syncs_of(models, outer)
    models[0]["x"] += 1
    models[1]["x"] += 3
    sync_round(syncs, [{}, {"present": False, "adopts": False}])
    return models, syncs


@pytest.mark.parametrize(("dropped_count", "anchor"), [(False, 1.0), (True, 0.5)])
def test_a_dropped_contribution_may_or_may_not_be_divided_by(dropped_count: bool, anchor: float) -> None:
    models, syncs = dropped_round(OuterSettings(SGD(), lambda step: 1.0, dropped_count=dropped_count))
    assert [sync.anchor()["x"].tolist() for sync in syncs] == [[anchor] * 3] * 2
    assert models[0]["x"].tolist() == [anchor] * 3
    assert models[1]["x"].tolist() == [3.0] * 3, "a replica that misses a round goes on from its own parameters"


@pytest.mark.parametrize(("own_base", "anchor"), [(False, 4.5), (True, 5.0)])
@pytest.mark.parametrize("rule", [replace(), carry(0.5), lerp(0.0)], ids=["replace", "carry", "lerp"])
def test_a_returning_replica_is_measured_from_the_anchor_or_from_where_it_began(
    own_base: bool, anchor: float, rule: object
) -> None:
    """Anchor 1; the first moves by 3 to 4. The second stands at 3 + 2 = 5: 4 beyond the anchor, 5 beyond its start."""
    models, syncs = dropped_round(OuterSettings(SGD(), lambda step: 1.0, own_base=own_base, adopt=rule))
    models[0]["x"] += 3
    models[1]["x"] += 2
    sync_round(syncs)
    assert syncs[0].anchor()["x"].tolist() == [anchor] * 3
    assert models[1]["x"].tolist() == [anchor] * 3
    for params in models:
        params["x"] += 1
    sync_round(syncs)
    assert syncs[0].anchor()["x"].tolist() == [anchor + 1] * 3, "once back, it is measured from the anchor again"


def test_a_replica_dropped_twice_is_measured_from_its_first_start() -> None:
    models, syncs = dropped_round(OuterSettings(SGD(), lambda step: 1.0, own_base=True))
    models[1]["x"] += 3
    sync_round(syncs, [{}, {"present": False, "adopts": False}])
    models[1]["x"] += 3
    sync_round(syncs)
    assert syncs[1].anchor()["x"].tolist() == [1 + (0 + 9) / 2] * 3


def test_a_round_that_everyone_misses_changes_nothing() -> None:
    models = [ones(0.0), ones(0.0)]
    syncs = syncs_of(models, OuterSettings())
    for params in models:
        params["x"] += 1
    reports = sync_round(syncs, [{"present": False, "adopts": False}] * 2)
    assert reports[0].contributors == 0 and syncs[0].round == 0
    assert syncs[0].anchor()["x"].tolist() == [0.0] * 3 and models[0]["x"].tolist() == [1.0] * 3


def test_what_a_late_replica_missed_under_delay_is_brought_to_its_next_round() -> None:
    """Two replicas with carry: everything each has done reaches the mean once, though one missed a round."""
    schedule = Schedule(2, delay=2)
    moves = (2.0, 6.0)

    def move(replica: int, step: int, params: dict[str, Tensor]) -> None:
        params["x"] += moves[replica]

    fleet = Fleet(2, plain_averaging(schedule, adopt=carry(1.0)), schedule, move=move, start=lambda: ones(0.0))
    fleet.how = lambda replica, step: {"present": not (replica == 1 and step == 4)}
    fleet.run(12).finish()
    # rounds of 2 steps: means 8, then 4 alone, then (4 + 24)/2 with what was owed, then 8, 8, 8
    assert fleet.anchor()["x"].tolist() == [8 + 4 + 14 + 8 + 8 + 8] * 3


# --- pruning


@pytest.mark.parametrize("rule", ["magnitude", "sign"])
@pytest.mark.parametrize("keep", [False, True])
def test_what_is_sent_is_the_pruned_pseudo_gradient_row_by_row(rule: str, keep: bool) -> None:
    models = [{"m": torch.zeros(2, 4), "s": torch.zeros(())}]
    outer = OuterSettings(
        SGD(), lambda step: 1.0, prune_rule=rule, prune_fraction=0.5, keep_contribution=keep, bucket_elements=3
    )
    (sync,) = syncs_of(models, outer)
    models[0]["m"] += torch.tensor([[1.0, -2.0, 3.0, 4.0], [40.0, 30.0, -20.0, 10.0]])
    models[0]["s"] += 7
    sync_round([sync])
    pruned = {"magnitude": [[0, 0, 3, 4], [40, 30, 0, 0]], "sign": [[0, 0, 3, 4], [40, 30, 0, 0]]}[rule]
    assert sync.anchor()["m"].tolist() == pruned
    assert sync.anchor()["s"].item() == 7


def test_the_two_readings_of_pruning_differ_where_signs_do() -> None:
    anchors = []
    for rule in ("magnitude", "sign"):
        models = [{"m": torch.zeros(1, 4)}]
        (sync,) = syncs_of(models, OuterSettings(SGD(), lambda step: 1.0, prune_rule=rule, prune_fraction=0.5))
        models[0]["m"] += torch.tensor([[-5.0, 3.0, 2.0, 4.0]])
        sync_round([sync])
        anchors.append(sync.anchor()["m"].tolist())
    assert anchors == [[[-5, 0, 0, 4]], [[0, 3, 0, 4]]]


# --- the end of pretraining: everyone takes over what replica 0 has


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"adopt": lerp(1.0)},
        {"adopt": carry(1.0), "keep_contribution": True},
        {"prune_fraction": 0.9},
        {"compressor": COMPRESSORS["bf16"]},
        {"dropped_count": True},
        {"optimizer": OPTIMIZERS["adam"]},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_at_the_end_of_pretraining_everyone_takes_over_replica_0_whole(changes: dict[str, object]) -> None:
    models = [start_params() for _ in range(3)]
    syncs = syncs_of(models, OuterSettings(**changes))
    generator = torch.Generator().manual_seed(5)
    for param in models[0].values():
        param += torch.randn(param.shape, generator=generator)
    trained = {name: param.clone() for name, param in models[0].items()}
    reports = sync_round(syncs, [{}, {"present": False}, {"present": False}], follow=True)
    for params, sync in zip(models, syncs, strict=True):
        for name, value in trained.items():
            torch.testing.assert_close(sync.anchor()[name], value, rtol=0, atol=1e-6)
            assert bits(params[name]) == bits(sync.anchor()[name])
    assert syncs[0].round == 0 and reports[0].contributors == 1
    state = syncs[0].shared_state()["outer"]
    assert all(not value.any() for value in state.values()), "no outer step was made"
    for params in models:
        params["one"] += 1
    reports = sync_round(syncs)
    assert syncs[0].round == 1 and reports[0].contributors == 3


# --- companions: buffers, inner Adam state


def with_companions(
    values: list[float], outer: OuterSettings = PLAIN
) -> tuple[list[Tensor], list[ReplicaSync], list[dict]]:
    models = [ones(0.0) for _ in values]
    buffers = [torch.tensor([value]) for value in values]
    ends = LocalGroup(len(values)).endpoints()
    syncs = [
        ReplicaSync(params, end, outer, companions=lambda buffer=buffer: [buffer])
        for params, end, buffer in zip(models, ends, buffers, strict=True)
    ]
    return buffers, syncs, models


def test_companions_become_the_plain_mean_of_the_contributors() -> None:
    buffers, syncs, _ = with_companions([1.0, 3.0, 100.0])
    sync_round(syncs, [{"weight": 5.0}, {}, {"present": False}])
    assert [buffer.item() for buffer in buffers] == [2.0, 2.0, 2.0]


def test_a_dropped_replica_keeps_its_own_companions() -> None:
    buffers, syncs, _ = with_companions([1.0, 3.0, 100.0])
    sync_round(syncs, [{}, {}, {"present": False, "adopts": False}])
    assert [buffer.item() for buffer in buffers] == [2.0, 2.0, 100.0]


@pytest.mark.parametrize("where", ["params", "companions"])
def test_companions_that_are_not_finite_reach_nobody(where: str) -> None:
    buffers, syncs, models = with_companions([1.0, 3.0, math.nan if where == "companions" else 100.0])
    if where == "params":
        models[2]["x"].fill_(math.inf)
    sync_round(syncs)
    assert [buffer.item() for buffer in buffers] == [2.0, 2.0, 2.0]


def test_companions_wait_for_the_last_fragment_and_are_left_alone_in_void_rounds_and_at_follow() -> None:
    models = [{"a": torch.zeros(1), "b": torch.zeros(1)} for _ in range(2)]
    buffers = [torch.tensor([1.0]), torch.tensor([3.0])]
    ends = LocalGroup(2).endpoints()
    syncs = [
        ReplicaSync(params, end, PLAIN, fragments=[["a"], ["b"]], companions=lambda buffer=buffer: [buffer])
        for params, end, buffer in zip(models, ends, buffers, strict=True)
    ]
    expected = [
        (0, {}, [1.0, 3.0]),
        (1, {"present": False}, [1.0, 3.0]),
        (1, {"follow": True}, [1.0, 3.0]),
        (1, {}, [2.0, 2.0]),
    ]
    for fragment, how, values in expected:
        for sync in syncs:
            sync.launch(fragment, **how)
        for sync in syncs:
            sync.apply(fragment, step=1, follow=how.get("follow", False))
        assert [buffer.item() for buffer in buffers] == values


def test_companions_under_delay_are_refused() -> None:
    _, syncs, _ = with_companions([1.0], OuterSettings(keep_contribution=True))
    with pytest.raises(ConfigError, match="delay=0") as caught:
        syncs[0].launch(0)
    assert len(str(caught.value).splitlines()) <= 3


# --- bytes and memory


@each_compressor
@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_bytes_declared_are_bytes_counted_in_every_round(
    compressor: object, num_replicas: int, schedule: Schedule
) -> None:
    outer = settings_for(schedule, compressor=compressor)
    fleet = Fleet(num_replicas, outer, schedule, move=pull_move).run(2 * schedule.inner_steps + 2)
    assert fleet.reports
    for reports in fleet.reports:
        declared = [member.sync.sent_bytes(reports[0].fragment) for member in fleet.members]
        assert [report.payload_bytes for report in reports] == declared
        assert (sum(declared) == 0) == (num_replicas == 1)


def held_bytes(sync: ReplicaSync) -> dict[str, int]:
    return {kind: sum(t.numel() * t.element_size() for t in tensors) for kind, tensors in sync.held_tensors().items()}


@pytest.mark.parametrize(
    ("optimizer", "outer_bytes"), [("sgd", {}), ("nesterov", {"outer state": 4}), ("adam", {"outer state": 8})]
)
def test_blocking_rounds_hold_the_anchor_and_the_outer_state(optimizer: str, outer_bytes: dict[str, int]) -> None:
    models = [{"w": torch.zeros(10, 10), "b": torch.zeros(10)} for _ in range(2)]
    syncs = syncs_of(models, OuterSettings(optimizer=OPTIMIZERS[optimizer]))
    expected = {kind: 110 * size for kind, size in {"anchor": 4, **outer_bytes}.items()}
    assert held_bytes(syncs[0]) == expected
    sync_round(syncs)
    assert held_bytes(syncs[0]) == expected


def test_delayed_rounds_hold_what_is_in_flight_and_where_it_was_taken() -> None:
    schedule = Schedule(2, delay=2)
    fleet = Fleet(2, settings_for(schedule, adopt=carry(0.5)), schedule, start=lambda: {"w": torch.zeros(50)})
    fleet.run(2)
    assert held_bytes(fleet.members[0].sync) == {"anchor": 200, "outer state": 200, "base": 200, "in flight": 200}
    fleet.run(2).finish()
    assert held_bytes(fleet.members[0].sync) == {"anchor": 200, "outer state": 200, "base": 200}


def test_every_tensor_held_between_rounds_is_in_the_saved_state() -> None:
    schedule = SCHEDULES["streaming, delay 1"]
    fleet = Fleet(2, settings_for(schedule, adopt=carry(0.5)), schedule).run(4)
    sync = fleet.members[0].sync

    def tensors(value: object) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return [tensor for child in children for tensor in tensors(child)]

    saved = tensors([sync.anchor(), sync.shared_state(), sync.replica_state()])
    held = [tensor for kind in sync.held_tensors().values() for tensor in kind]
    assert sum(t.numel() for t in saved) == sum(t.numel() for t in held) > 0


def test_a_group_forgets_rounds_that_are_over() -> None:
    class Watched(list):
        """An iterable of exchanges that can be watched."""

    group = LocalGroup(2)
    ends = group.endpoints()
    exchanges = Watched()
    alive = weakref.ref(exchanges)
    flights = [end.launch(b".", lambda ballots: [0.0] * len(ballots), exchanges) for end in ends]
    assert [list(flight.ballots()) for flight in flights] == [[b".", b"."]] * 2
    del flights, exchanges
    gc.collect()
    assert alive() is None


# --- saved state


def test_state_of_another_model_is_refused() -> None:
    (sync,) = syncs_of([ones(0.0)])
    with pytest.raises(CheckpointError, match="another model") as caught:
        sync.load_shared_state({"x": torch.zeros(4)}, sync.shared_state())
    assert len(str(caught.value).splitlines()) <= 3
    with pytest.raises(CheckpointError, match=r"'momentum\.x'"):
        syncs_of([ones(0.0)], OuterSettings())[0].load_shared_state({"x": torch.zeros(3)}, {"outer": {}, "counts": [1]})


# --- reports


def test_a_report_tells_norms_and_cosines_of_the_contributions() -> None:
    models = [{"x": torch.zeros(2)} for _ in range(3)]
    syncs = syncs_of(models)
    for params, move in zip(models, ([3.0, 0.0], [0.0, 4.0], [3.0, 4.0]), strict=True):
        params["x"] += torch.tensor(move)
    report = sync_round(syncs)[0]
    assert report.geometry.norms == pytest.approx([3.0, 4.0, 5.0])
    assert report.geometry.cosine_mean == pytest.approx((0 + 0.6 + 0.8) / 3)
    assert report.geometry.delta_norm == pytest.approx(math.hypot(2.0, 8 / 3))


def test_ties_between_launches_and_landings_keep_their_order() -> None:
    """A fragment may have two rounds in flight: the older lands first."""
    models = [ones(0.0)]
    (sync,) = syncs_of(
        models, OuterSettings(SGD(), lambda step: {1: 1.0, 2: 10.0}[step], keep_contribution=True, adopt=carry(1.0))
    )
    models[0]["x"] += 1
    sync.launch(0)
    models[0]["x"] += 5
    sync.launch(0)
    sync.apply(0, step=1)
    assert sync.anchor()["x"].tolist() == [1.0] * 3
    sync.apply(0, step=2)
    assert sync.anchor()["x"].tolist() == [51.0] * 3


def test_fleet_of_one_event_is_a_step() -> None:
    """The driver itself: what it does in a round is launch and apply."""
    fleet = Fleet(1, plain_averaging(Schedule(1)), Schedule(1))
    fleet.move(0, 1, fleet.members[0].params)
    fleet.do((Launch(0), Apply(0)))
    assert_equal(fleet.anchor(), trained_alone(fleet.move, 1))


def test_nesterov_is_the_default_with_the_rates_of_the_paper() -> None:
    assert OuterSettings().optimizer == Nesterov(0.9) and OuterSettings().lr(123) == 0.7
