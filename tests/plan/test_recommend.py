"""Which method is recommended, and that its settings train."""

import pytest

from atoll.algo.schedule import Schedule
from atoll.compress import COMPRESSORS
from atoll.plan.estimate import Method, Workload
from atoll.plan.links import uniform
from atoll.plan.payload import Coding
from atoll.plan.presets import PRESETS
from atoll.plan.recommend import (
    CODING_COST,
    CODINGS,
    Recommendation,
    candidate_methods,
    fitting_fragments,
    headline_methods,
    loss_cost,
    recommend,
    settings_of,
)
from atoll.recipes import recipe
from atoll.train.config import build_config

GBIT = 125e6
OPT = PRESETS["dilocox_opt_1_3b"].shape
WORK = Workload(OPT, 1.372, 32_768)


def recommended(bytes_per_s: float, *, inner_steps: tuple[int, ...] = (120,), islands: int = 2) -> Recommendation:
    return recommend(candidate_methods(WORK, inner_steps=inner_steps, rank=256), WORK, uniform(islands, bytes_per_s))


def test_on_a_link_without_bound_data_parallelism_is_taken() -> None:
    found = recommended(1e13)
    assert found.best.method.kind == "allreduce"
    assert found.best.method.coding.name == "identity"


def test_the_slower_the_link_the_more_is_given_up_for_it() -> None:
    costs = [recommended(speed).best.loss_cost for speed in (1e13, 1e10, 1e9, 1e8, 1e7, 1e5)]
    assert costs == sorted(costs)
    assert costs[0] == 0 < costs[-1]


def test_nothing_that_was_not_recommended_makes_more_useful_tokens() -> None:
    found = recommended(GBIT / 10)
    for rival, _ in found.beaten:
        assert rival.useful_tokens_per_s <= found.best.useful_tokens_per_s


def test_two_alternatives_of_other_kinds_are_named_with_a_reason_each() -> None:
    found = recommended(GBIT)
    kinds = [found.best.method.kind, *(rival.method.kind for rival, _ in found.beaten)]
    assert len(found.beaten) == 2 and len(set(kinds)) == 3
    assert all("rate" in why or "as fast" in why for _, why in found.beaten)


def test_where_h_is_free_a_slow_link_gets_a_longer_round() -> None:
    tried = (30, 100, 500)
    slow, fast = (recommended(speed, inner_steps=tried).best.method.inner_steps for speed in (GBIT / 200, GBIT))
    assert fast == 30 < slow


def test_every_compressor_has_an_assumed_cost_and_every_candidate_exists() -> None:
    assert set(CODING_COST) == set(COMPRESSORS)
    assert set(CODINGS) <= set(COMPRESSORS)


def test_costs_rank_as_the_papers_do() -> None:
    plain, int4 = (Method("x", Schedule(100), Coding(name)) for name in ("identity", "int4"))
    streaming = Method("x", Schedule(100, 10, 1), Coding("int4"))
    delayed = Method("x", Schedule(100, delay=100), Coding("int4"))
    longer = Method("x", Schedule(1000))
    costs = [loss_cost(method, 4) for method in (Method("x", None), plain, int4, streaming, delayed)]
    assert costs == sorted(costs) and costs[0] == 0
    assert loss_cost(longer, 4) > loss_cost(plain, 4)
    assert loss_cost(plain, 8) > loss_cost(plain, 2)


@pytest.mark.parametrize(("layers", "inner_steps"), [(80, 125), (24, 100), (24, 104), (2, 500), (12, 7), (3, 6)])
def test_fragments_divide_the_round(layers: int, inner_steps: int) -> None:
    count = fitting_fragments(layers, inner_steps)
    assert inner_steps % count == 0
    assert 1 <= count <= layers


def test_streaming_is_left_out_where_no_number_of_fragments_fits() -> None:
    assert "streaming" not in headline_methods(WORK, inner_steps=101, coding=Coding("int4"))
    assert "streaming" in headline_methods(WORK, inner_steps=100, coding=Coding("int4"))


METHODS = [
    Method("allreduce", None, Coding("fp16")),
    Method("diloco", Schedule(10)),
    Method("diloco", Schedule(10), Coding("topk+stat2")),
    Method("streaming", Schedule(10, 2, 3), Coding("fp4")),
    Method("delayed", Schedule(10, delay=10), Coding("lowrank+int4", 16)),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.describe())
@pytest.mark.parametrize("base", ["quickstart", "full"])
def test_settings_are_accepted_by_the_trainer_and_run_that_method(method: Method, base: str) -> None:
    """From a recipe, and from a file that sets everything, as that of a run of another method does."""
    settings = recipe("quickstart")
    if base == "full":
        other = {"schedule": "streaming", "fragments": 5, "delay": 2, "adopt": "lerp", "compressor": "lowrank"}
        settings = build_config(settings | other).model_dump(exclude_none=True)
    config = build_config(settings_of(method, uniform(4, GBIT), settings))
    assert config.replicas == 4
    assert config.compressor == method.coding.name
    assert (config.method == "data-parallel") == (method.schedule is None)
    if method.schedule is not None:
        assert config.inner_steps == method.inner_steps
        assert config.schedule == method.kind
        assert config.resolved_delay == method.delay
        assert config.fragments == method.num_fragments


def test_settings_carry_outer_rates_that_fit_the_method() -> None:
    network = uniform(4, GBIT)
    delayed = settings_of(METHODS[4], network, {})
    assert (delayed["outer_lr"], delayed["outer_momentum"], delayed["carry_share"]) == (0.6, 0.4, 0.25)
    assert settings_of(METHODS[3], network, {})["outer_lr"] == 0.4
    assert settings_of(METHODS[2], network, {})["outer_momentum"] == 0.0
    assert settings_of(METHODS[1], network, {})["outer_lr"] == 0.6
    assert settings_of(METHODS[1], network, {"outer_lr": 0.9, "outer_momentum": 0.1})["outer_lr"] == 0.9
