"""Methods on networks, against the closed forms."""

import numpy as np
import pytest

from atoll.algo.schedule import Schedule
from atoll.plan import cost
from atoll.plan.estimate import TARGETS, Method, Workload, estimate, smallest_bandwidth, utilisation_curve
from atoll.plan.links import uniform
from atoll.plan.payload import Coding
from atoll.plan.presets import PRESETS

GBIT = 125e6
OPT, LARGE = PRESETS["dilocox_opt_1_3b"].shape, PRESETS["dilocox_107b"].shape
H = 125

METHODS = [
    Method("allreduce", None),
    Method("diloco", Schedule(H)),
    Method("diloco", Schedule(H), Coding("int4")),
    Method("streaming", Schedule(H, 5, 2), Coding("fp4")),
    Method("delayed", Schedule(H, delay=H)),
    Method("dilocox", Schedule(H, delay=H), Coding("lowrank+int4", 256)),
]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.describe())


def work(shape=OPT, step_s: float = 1.372, **others) -> Workload:
    return Workload(shape, step_s, 32_768, **others)


def test_the_paper_s_rates_at_107b() -> None:
    workload, network = work(LARGE, 8.79), uniform(2, GBIT)
    rates = {
        "data parallel": estimate(Method("x", None), workload, network),
        "no compression": estimate(Method("x", Schedule(H, delay=H)), workload, network),
        "full": estimate(Method("x", Schedule(H, delay=H), Coding("int4")), workload, network),
    }
    assert rates["data parallel"].tokens_per_s == pytest.approx(9.55, rel=0.005)
    assert rates["no compression"].tokens_per_s == pytest.approx(1196, rel=0.005)
    speedup = rates["full"].tokens_per_s / rates["data parallel"].tokens_per_s
    assert speedup == pytest.approx(390, rel=0.005)


def test_the_paper_s_rates_at_1_3b() -> None:
    workload, network = work(), uniform(2, GBIT)
    parallel = estimate(Method("x", None), workload, network)
    full = estimate(Method("x", Schedule(H, delay=H), Coding("int4")), workload, network)
    assert parallel.tokens_per_s == pytest.approx(753.6, rel=0.005)
    assert parallel.sync_s == pytest.approx(42.1, rel=0.005)
    assert full.tokens_per_s / parallel.tokens_per_s == pytest.approx(31.7, rel=0.005)


@pytest.mark.parametrize("islands", [2, 4, 8])
@pytest.mark.parametrize("overhead_s", [0.0, 3.0])
def test_blocking_and_delayed_rounds_are_the_closed_forms(islands: int, overhead_s: float) -> None:
    network, workload = uniform(islands, GBIT), work(overhead_s=overhead_s)
    full = cost.full_sync_s(OPT.num_parameters, GBIT, num_islands=islands)
    sync_s = cost.sync_s(full, overhead_s=overhead_s)
    for schedule, overlapped in ((Schedule(20), False), (Schedule(20, delay=20), True)):
        found = estimate(Method("x", schedule), workload, network)
        assert found.sync_s == pytest.approx(sync_s, rel=1e-6)
        assert found.round_s == pytest.approx(cost.round_s(20, 1.372, sync_s, overlapped=overlapped), rel=0.01)


@every_method
@pytest.mark.parametrize("target", TARGETS)
def test_the_smallest_bandwidth_reaches_its_target_and_less_does_not(method: Method, target: float) -> None:
    workload, network = work(), uniform(2, GBIT)
    speed = smallest_bandwidth(method, workload, network, target)
    assert speed is not None
    assert estimate(method, workload, uniform(2, speed * 1.0002)).utilisation >= target
    assert estimate(method, workload, uniform(2, speed * 0.999)).utilisation < target


@every_method
def test_the_curve_passes_through_the_estimate(method: Method) -> None:
    workload, network = work(overhead_s=0.5, landing_s=0.1), uniform(4, GBIT, latency_s=0.05)
    (share,) = utilisation_curve(method, workload, network, np.array([GBIT]))
    assert share == pytest.approx(estimate(method, workload, network).utilisation, rel=1e-6)


@every_method
def test_more_bandwidth_never_waits_longer_and_the_rest_is_compute(method: Method) -> None:
    shares = utilisation_curve(method, work(), uniform(2, GBIT), np.geomspace(1e4, 1e13, 100))
    assert (np.diff(shares) >= -1e-12).all()
    assert shares[-1] > 0.999


def test_a_bandwidth_for_a_blocking_target_is_the_closed_form() -> None:
    workload = work(overhead_s=2.0)
    sent = OPT.num_parameters * 4
    for target in TARGETS[:-1]:
        found = smallest_bandwidth(METHODS[1], workload, uniform(2, GBIT), target)
        expected = cost.blocking_bytes_per_s(target, sent, H, 1.372, overhead_s=2.0)
        assert found == pytest.approx(expected, rel=1e-3)
    assert smallest_bandwidth(METHODS[1], work(overhead_s=1e3), uniform(2, GBIT), 0.9) is None


def test_latency_is_seen_once_a_round_where_bytes_take_longer_and_bounds_many_small_messages() -> None:
    workload = work()
    near, far = (estimate(METHODS[1], workload, uniform(4, GBIT, latency_s=s)) for s in (0.0, 0.05))
    assert far.sync_s - near.sync_s == pytest.approx(3 * 0.05)
    coded = Method("x", Schedule(H), Coding("int4"))
    fast, slow = (estimate(coded, workload, uniform(4, 100 * GBIT, latency_s=s)) for s in (0.0, 0.05))
    buckets = -(-OPT.num_parameters // (1 << 21))
    assert slow.sync_s == pytest.approx(buckets * 0.05 / 2 + 3 * 0.05)
    assert fast.sync_s < 0.2
    spread = estimate(coded, work(workers=8), uniform(4, 100 * GBIT, latency_s=0.05))
    assert spread.sync_s == pytest.approx(buckets / 8 * 0.05 / 2 + 3 * 0.05)


def test_one_island_sends_nothing_and_waits_for_nobody() -> None:
    for method in METHODS:
        found = estimate(method, work(), uniform(1, GBIT))
        assert (found.payload_bytes, found.exposed_s, found.utilisation) == (0, 0.0, 1.0)
        assert found.bandwidths[0.99] == 0.0


def test_streaming_may_not_be_faster_than_its_link() -> None:
    found = estimate(METHODS[3], work(LARGE, 8.79), uniform(2, GBIT / 100))
    assert found.round_s >= found.sync_s
