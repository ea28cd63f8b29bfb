"""Links between islands: one number or a matrix."""

import json

import pytest

from atoll.errors import ConfigError
from atoll.plan.links import Network, read_network, uniform

GBIT = 125e6


def written(tmp_path, content: str, name: str = "links.csv") -> str:
    path = tmp_path / name
    path.write_text(content)
    return str(path)


THREE = "-,1gbit,100mbit\n1gbit,-,1gbit\n100mbit,1gbit,-\n"


def test_an_uplink_carries_all_that_an_island_sends() -> None:
    assert uniform(4, GBIT).exchange_s(3 * GBIT) == 3.0


def test_with_a_matrix_the_slowest_pair_sets_the_time(tmp_path) -> None:
    """Each of three islands sends half of its bytes to each other one."""
    network = read_network(written(tmp_path, THREE), 3)
    assert network.exchange_s(2 * GBIT) == pytest.approx(10.0)
    assert network.slowest_bytes_per_s == pytest.approx(GBIT / 10)


def test_the_diagonal_bounds_what_an_island_sends_in_all(tmp_path) -> None:
    narrow = read_network(written(tmp_path, THREE.replace("-,1gbit,100mbit", "10mbit,1gbit,100mbit")), 3)
    assert narrow.exchange_s(2 * GBIT) == pytest.approx(200.0)


def test_the_best_ring_avoids_the_slow_link(tmp_path) -> None:
    rows = [["1gbit"] * 4 for _ in range(4)]
    for i, j in ((0, 1), (1, 0), (2, 3), (3, 2)):
        rows[i][j] = "10mbit"
    for i in range(4):
        rows[i][i] = "-"
    network = read_network(written(tmp_path, json.dumps(rows), "links.json"), 4)
    assert network.ring_s(GBIT, network.best_ring) == pytest.approx(1.5)
    assert network.ring_s(GBIT, range(4)) == pytest.approx(150.0)


def test_a_matrix_may_hold_latencies(tmp_path) -> None:
    content = {"links": [["-", "1gbit"], ["1gbit", "-"]], "latency": [["0", "20ms"], ["50ms", "0"]]}
    assert read_network(written(tmp_path, json.dumps(content), "a.json"), 2).longest_latency_s == pytest.approx(0.05)
    content["latency"] = "5ms"
    assert read_network(written(tmp_path, json.dumps(content), "a.json"), 2).longest_latency_s == pytest.approx(0.005)


def test_ten_thousand_islands_are_answered_without_a_matrix_in_memory() -> None:
    network = uniform(10_000, GBIT, latency_s=0.05)
    assert network.exchange_s(GBIT) == pytest.approx(1.0)
    assert network.longest_latency_s == 0.05
    assert len(network.best_ring) == 10_000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("-,1gbit\n1gbit,-\n", "--islands 2"),
        ("-,1gbit,1gbit\n1gbit,-,1gbit\n1gbit,1gbit\n", "3 rows"),
        (THREE.replace("100mbit", "-"), "island 0 cannot reach island 2"),
        (THREE.replace("100mbit", "0mbit"), "nothing would ever arrive"),
        (THREE.replace("100mbit", "quick"), "not a bandwidth"),
    ],
)
def test_a_matrix_that_cannot_be_used_says_where_and_what(tmp_path, content: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_network(written(tmp_path, content), 3)


@pytest.mark.parametrize("content", ["{", '{"links": 3}', '"text"'])
def test_json_that_is_no_matrix_is_refused(tmp_path, content: str) -> None:
    with pytest.raises(ConfigError, match="matrix"):
        read_network(written(tmp_path, content, "links.json"), 2)


def test_a_link_of_zero_and_a_latency_below_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing would ever arrive"):
        read_network("0gbit", 2)
    with pytest.raises(ConfigError, match="latency"):
        uniform(2, GBIT, latency_s=-1)
    with pytest.raises(ConfigError, match="islands=0"):
        uniform(0, GBIT)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_network("nowhere.csv", 2)


def test_a_network_is_a_value() -> None:
    assert uniform(3, GBIT) == uniform(3, GBIT)
    assert isinstance(hash(uniform(3, GBIT)), int)
    assert uniform(3, GBIT) != Network((GBIT,) * 3, uniform(3, GBIT).links, uniform(3, GBIT, latency_s=0.1).latency_s)
