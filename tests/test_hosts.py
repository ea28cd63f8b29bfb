"""Hosts as network namespaces: what their links let through, and that nothing of them stays."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator

import hosts as bench
import pytest
from hosts import Hosts, missing, shape, sweep

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"hosts cannot be made here: {missing()}")

PIPE = subprocess.PIPE

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("up", flush=True)
connection, peer = server.accept()
while data := connection.recv(1 << 16):
    connection.sendall(data)
"""

SINK = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("up", flush=True)
connection, peer = server.accept()
start, count = time.perf_counter(), 0
while data := connection.recv(1 << 16):
    count += len(data)
print(count, time.perf_counter() - start, peer[0])
"""

SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""

ROUND_TRIPS = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
times = []
for _ in range(30):
    start = time.perf_counter()
    connection.sendall(b"?")
    connection.recv(1)
    times.append(time.perf_counter() - start)
print(min(times))
"""

LOOPBACK = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
    pass
"""

ASK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000))
for line in sys.stdin:
    question, patience_s = line.split()
    connection.settimeout(float(patience_s))
    try:
        connection.sendall(question.encode())
        print(connection.recv(1).decode(), flush=True)
    except TimeoutError:
        print("silence", flush=True)
"""


def python(program: str, *words: object) -> list[str]:
    return [sys.executable, "-c", program, *map(str, words)]


def serve(hosts: Hosts, host: str, program: str) -> subprocess.Popen[str]:
    process = hosts.run(host, python(program, hosts.address(host)), stdout=PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "up\n"
    return process


def transfer(hosts: Hosts, source: str, sink: str, num_bytes: int) -> tuple[float, str]:
    """Seconds of a transfer and the address that the sink saw."""
    receiver = serve(hosts, sink, SINK)
    assert hosts.run(source, python(SOURCE, hosts.address(sink), num_bytes)).wait() == 0
    count, seconds, peer = receiver.communicate()[0].split()
    assert int(count) == num_bytes
    return float(seconds), peer


def namespaces() -> list[str]:
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listing.stdout.splitlines()]


@pytest.fixture
def pair() -> Iterator[Hosts]:
    with Hosts(["a", "b"]) as hosts:
        yield hosts


def output_of(hosts: Hosts, host: str, *argv: str) -> str:
    return hosts.run(host, argv, stdout=PIPE, text=True).communicate()[0]


def test_hosts_reach_each_other_and_nothing_else(pair: Hosts) -> None:
    assert transfer(pair, "a", "b", 1000)[1] == pair.address("a")
    assert output_of(pair, "a", "ip", "route").split()[0] == "10.77.0.0/24"
    assert "default" not in output_of(pair, "a", "ip", "route")


def test_loopback_is_up_on_every_host(pair: Hosts) -> None:
    assert pair.run("b", python(LOOPBACK)).wait() == 0


def test_the_machine_itself_gains_no_interface() -> None:
    before = sorted(os.listdir("/sys/class/net"))
    with Hosts(["a", "b"]):
        assert sorted(os.listdir("/sys/class/net")) == before


def test_a_signal_to_the_pid_hits_the_program(pair: Hosts) -> None:
    process = pair.run("a", python("import os; print(os.getpid(), flush=True); input()"), stdin=PIPE, stdout=PIPE)
    assert process.stdin
    assert process.stdout
    assert int(process.stdout.readline()) == process.pid
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize(("source", "sink"), [("slow", "fast"), ("fast", "slow")])
def test_a_link_lets_no_more_through_than_its_rate_in_either_direction(source: str, sink: str) -> None:
    num_bytes = 1_000_000
    with Hosts(["slow", "fast"], rate_mbit={"slow": 20, "fast": 1000}) as hosts:
        seconds, _ = transfer(hosts, source, sink, num_bytes)
    assert seconds >= (num_bytes - 2 * shape(20)[0]) * 8 / 20e6


def test_a_rate_may_change_while_hosts_run(pair: Hosts) -> None:
    num_bytes = 500_000
    pair.set_rate("b", 10)
    seconds, _ = transfer(pair, "a", "b", num_bytes)
    assert seconds >= (num_bytes - 2 * shape(10)[0]) * 8 / 10e6


def test_counters_count_what_was_sent(pair: Hosts) -> None:
    num_bytes = 2_000_000
    transfer(pair, "a", "b", num_bytes)
    assert num_bytes < pair.bytes_sent("a") < 1.04 * num_bytes
    assert pair.payload_sent("a") == pytest.approx(num_bytes, rel=1e-3)
    assert pair.bytes_received("b") == pytest.approx(pair.bytes_sent("a"), rel=1e-3)
    assert pair.bytes_received("a") < 0.04 * num_bytes


def test_a_cut_link_is_silent_and_a_restored_one_delivers_what_was_sent_meanwhile(pair: Hosts) -> None:
    echo = serve(pair, "b", ECHO)
    asker = pair.run("a", python(ASK, pair.address("b")), stdin=PIPE, stdout=PIPE, text=True)

    def answer(question: str, *, patience_s: float) -> str:
        assert asker.stdin
        assert asker.stdout
        asker.stdin.write(f"{question} {patience_s}\n")
        asker.stdin.flush()
        return asker.stdout.readline().strip()

    assert answer("1", patience_s=20) == "1"
    pair.cut("b")
    assert answer("2", patience_s=0.3) == "silence"
    pair.restore("b")
    assert answer("3", patience_s=20) == "2"
    asker.communicate()
    echo.communicate()


def test_latency_holds_a_frame_once_on_its_way() -> None:
    with Hosts(["a", "b"], latency_ms=25) as hosts:
        echo = serve(hosts, "b", ECHO)
        round_trip_s = float(output_of(hosts, "a", *python(ROUND_TRIPS, hosts.address("b"))))
        echo.communicate()
    assert 0.050 <= round_trip_s < 0.052


def test_large_segments_survive_the_delay() -> None:
    with Hosts(["a", "b"], rate_mbit=1000, latency_ms=1) as hosts:
        transfer(hosts, "a", "b", 3_000_000)
        assert hosts.bytes_sent("a") < 1.02 * 3_000_000


@pytest.mark.skipif(not (shutil.which("nft") or shutil.which("iptables")), reason="neither nft nor iptables is here")
def test_a_host_behind_nat_shows_the_address_of_its_router(pair: Hosts) -> None:
    public = pair.address("b")
    pair.nat("b")
    assert transfer(pair, "b", "a", 1000)[1] == public
    assert pair.address("b") != public


def test_nat_without_its_tools_says_what_to_install(pair: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.shutil, "which", lambda tool: None)
    with pytest.raises(RuntimeError, match="install nftables"):
        pair.nat("b")


def test_nothing_stays_after_an_exception() -> None:
    before = namespaces()
    with pytest.raises(KeyError), Hosts(["a", "b"], latency_ms=1) as hosts:
        sleeper = hosts.run("a", ["sleep", "600"])
        during = namespaces()
        raise KeyError
    assert len(during) > len(before)
    assert not set(during) - set(before) & set(namespaces())
    assert sleeper.returncode == -signal.SIGKILL


KILLED_MAKER = """
import os, signal, subprocess
from hosts import Hosts
hosts = Hosts(["a"], prefix="swept", latency_ms=1).__enter__()
print(hosts.run("a", ["sleep", "600"], stdout=subprocess.DEVNULL).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_maker_left_is_swept_and_a_live_one_is_let_be() -> None:
    with Hosts(["a"], prefix="swept") as mine:
        environment = os.environ | {"PYTHONPATH": os.path.dirname(bench.__file__)}
        maker = subprocess.run(python(KILLED_MAKER), stdout=PIPE, text=True, env=environment)
        sleeper = os.pidfd_open(int(maker.stdout))
        swept = sweep("swept")
        assert len(swept) == 2
        assert not set(swept) & set(namespaces())
        assert select.select([sleeper], [], [], 20)[0], "the process on the swept host still runs"
        os.close(sleeper)
        assert mine.run("a", ["true"]).wait() == 0


def test_a_bucket_passes_the_largest_segment_of_its_link_whole() -> None:
    for mbit in (1, 4, 20, 100, 1000, 10_000):
        burst, limit, segment = shape(mbit)
        frames = -(-segment // 1448)
        assert segment + frames * bench.HEADER_BYTES <= burst or frames == 2 == burst // bench.FRAME_BYTES
        assert limit > 2 * burst or limit > bench.MIN_QUEUE_BYTES


@pytest.mark.parametrize("name", ["", "A", "a-b", "elevenchars", "a/b"])
def test_names_that_no_interface_could_have_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="lower-case letters"):
        Hosts([name])


def test_a_rate_of_zero_names_the_way_to_stop_traffic(pair: Hosts) -> None:
    with pytest.raises(ValueError, match=r"cut\('a'\)"):
        pair.set_rate("a", 0)
