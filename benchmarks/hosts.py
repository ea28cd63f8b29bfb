"""Several hosts in one machine: network namespaces joined by links of a stated rate and latency.

    with Hosts(["a", "b"], rate_mbit=20) as hosts:
        process = hosts.run("a", ["python", "train.py", hosts.address("b")])

    python benchmarks/hosts.py check        gloo's all_reduce between such hosts, against the time its bytes take

Every host has an interface of its own, shaped in both directions, and its own loopback. A switch in a namespace of its
own joins them; nothing leads out of it, and the machine's own network is not touched. Needs root, `ip` and `tc`.

    host a (namespace)                switch (namespace)                host b (namespace)
    eth0 [tbf: up] ------------ port-a [tbf: down] - br0 - port-b [tbf: down] ------------ [tbf: up] eth0
                    veth pair, or with a latency two TAP devices and a process that delays what goes up

docs/benchmarks.md says what the counters count and why the queues have the lengths they have.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import select
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

FRAME_BYTES = 1514  # an Ethernet frame that is full
HEADER_BYTES = 66  # Ethernet, IPv4, and TCP with timestamps
BURST_S = 0.006  # what an idle link may send at once, in seconds at its rate
QUEUE_S = 0.05  # how long a queue may get before frames are dropped
MIN_QUEUE_BYTES = 128 * FRAME_BYTES
MAX_SEGMENT_BYTES = 65536  # the most that TCP hands to an interface at once
INTERFACE = "eth0"
CONGESTION_CONTROL = "cubic"  # steady on an empty link, where BBR probes and pauses
STDIN = 0

_serial = itertools.count()


class Hosts:
    """Hosts with an address and a shaped link each, from `with` to its end; whatever runs in them ends with them.

    names: up to 10 lower-case letters and digits each. rate_mbit: of every link, or by name; 1 Mbit/s is 10^6 bit/s,
    headers included. latency_ms: one way, between any two hosts. burst_bytes: what an idle link sends at once; by
    default 6 ms at its rate. prefix: of the namespaces' names, which also tell the process that made them.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        rate_mbit: float | Mapping[str, float] = 100.0,
        latency_ms: float = 0.0,
        burst_bytes: int | None = None,
        prefix: str = "atoll",
    ) -> None:
        for name in names:
            if not re.fullmatch(r"[a-z0-9]{1,10}", name):
                raise ValueError(f"host name {name!r}: use 1 to 10 lower-case letters and digits, as in 'island0'")
        if latency_ms < 0:
            raise ValueError(f"latency_ms={latency_ms} is below 0; 0 means that frames are not held at all")
        rates = rate_mbit if isinstance(rate_mbit, Mapping) else dict.fromkeys(names, rate_mbit)
        self.names = list(names)
        self._rates = {name: rates[name] for name in names}
        self._latency_s = latency_ms / 1000
        self._burst_bytes = burst_bytes
        self._prefix = prefix
        self._base = f"{prefix}-{os.getpid()}-{_started(os.getpid())}-{next(_serial)}"
        self._switch = f"{self._base}.switch"
        self._inside = {name: f"{self._base}-{name}" for name in names}  # where a host's processes run
        self._behind: dict[str, str] = {}  # addresses of hosts behind a router
        self._namespaces: list[str] = []
        self._processes: list[subprocess.Popen[Any]] = []
        self._pipes = contextlib.ExitStack()

    def __enter__(self) -> Hosts:
        sweep(self._prefix)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        text: bool = False,
        start_new_session: bool = False,
    ) -> subprocess.Popen[Any]:
        """Start `argv` on `host`. The pid is that of `argv` itself: a signal to it hits the right process."""
        process = subprocess.Popen(
            self.command(host, argv),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            text=text,
            start_new_session=start_new_session,
        )
        self._processes.append(process)
        return process

    def command(self, host: str, argv: Sequence[str]) -> list[str]:
        """The words that run `argv` on `host`: `ip netns exec` becomes the process, it does not stay above it."""
        return ["ip", "netns", "exec", self._inside[host], *argv]

    def address(self, host: str) -> str:
        """The IPv4 address that processes on `host` bind to. Behind `nat` no other host reaches it."""
        return self._behind.get(host, "") or self._address(host)

    def interface(self, host: str) -> str:
        """The interface of `address`, as for GLOO_SOCKET_IFNAME."""
        return INTERFACE

    def set_rate(self, host: str, mbit: float) -> None:
        """Shape both directions of a host's link, also while it carries traffic."""
        if mbit <= 0:
            raise ValueError(f"rate {mbit} Mbit/s of host {host!r} is not above 0; cut({host!r}) stops all traffic")
        burst, limit, segment = shape(mbit, self._burst_bytes)
        for namespace, device in self._ends(host):
            words = f"qdisc replace dev {device} root tbf rate {round(mbit * 1e6)}bit burst {burst} limit {limit}"
            _call("tc", "-n", namespace, *words.split())
            _ip(namespace, f"link set {device} gso_max_size {segment}")

    def cut(self, host: str) -> None:
        """From now on what `host` sends, and what is sent to it, is lost silently; its interface stays up."""
        _ip(self._switch, f"link set port-{host} nomaster")

    def restore(self, host: str) -> None:
        """Undo `cut`."""
        _ip(self._switch, f"link set port-{host} master br0")

    def nat(self, host: str, *, lan: str = "192.168.0") -> None:
        """Put `host` behind a router that masquerades it: it reaches the others, they do not reach it.

        Call it before anything runs on `host`. Raises RuntimeError where neither nft nor iptables is installed.
        """
        rule = _masquerade()
        router, inside = self._ends(host)[0][0], f"{self._base}-{host}.lan"
        self._add_namespace(inside)
        _ip(router, f"link add lan0 type veth peer name {INTERFACE} netns {inside}")
        _ip(router, f"addr add {lan}.1/24 dev lan0")
        _ip(router, "link set lan0 up")
        _ip(inside, f"addr add {lan}.2/24 dev {INTERFACE}")
        _ip(inside, f"link set {INTERFACE} up")
        _ip(inside, f"route add default via {lan}.1")
        _call("ip", "netns", "exec", router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for words in rule:
            _call("ip", "netns", "exec", router, *words.split())
        self._inside[host], self._behind[host] = inside, f"{lan}.2"

    def bytes_sent(self, host: str) -> int:
        """Bytes that left the host's interface since it was made, as its own counter has them."""
        return self._counter(host, "tx", "bytes")

    def bytes_received(self, host: str) -> int:
        """Bytes that arrived at the host's interface since it was made."""
        return self._counter(host, "rx", "bytes")

    def payload_sent(self, host: str) -> int:
        """`bytes_sent` less Ethernet, IP and TCP headers: what programs handed to TCP, and what TCP sent again."""
        return self.bytes_sent(host) - HEADER_BYTES * self._counter(host, "tx", "packets")

    def close(self) -> None:
        """End every process in the hosts and remove them."""
        for namespace in self._namespaces:
            _remove(namespace)
        for process in self._processes:
            process.kill()  # one that left its namespace
            process.wait()
        self._namespaces.clear()
        self._processes.clear()
        self._pipes.close()

    def _build(self) -> None:
        self._add_namespace(self._switch)
        _ip(self._switch, "link add br0 type bridge")
        _ip(self._switch, "link set br0 addrgenmode none up")
        for name in self.names:
            self._add_namespace(self._inside[name])
        if self._latency_s:
            self._start_forwarder()
        for name in self.names:
            self._plug(name)
            self.set_rate(name, self._rates[name])

    def _add_namespace(self, namespace: str) -> None:
        self._namespaces.append(namespace)
        _call("ip", "netns", "add", namespace)
        _ip(namespace, "link set lo up")

    def _plug(self, host: str) -> None:
        namespace, index = self._inside[host], self.names.index(host)
        if self._latency_s:
            _ip(self._switch, f"link set far-{host} netns {namespace} name {INTERFACE}")
        else:
            _ip(self._switch, f"link add port-{host} type veth peer name {INTERFACE} netns {namespace}")
        # No automatic IPv6 address: its announcements would be counted.
        _ip(self._switch, f"link set port-{host} addrgenmode none master br0 up")
        _ip(namespace, f"link set {INTERFACE} addrgenmode none address {_mac(index)} up")
        _ip(namespace, f"addr add {self._address(host)}/24 dev {INTERFACE} noprefixroute")
        _ip(namespace, f"route add 10.77.0.0/24 dev {INTERFACE} congctl {CONGESTION_CONTROL}")
        # Known in advance, so that a cut is silence, as between distant hosts, and not "no route to host".
        for other, name in enumerate(self.names):
            if other != index:
                _ip(namespace, f"neigh add {self._address(name)} lladdr {_mac(other)} dev {INTERFACE}")

    def _start_forwarder(self) -> None:
        words = ["ip", "netns", "exec", self._switch, sys.executable, __file__, "forward", str(self._latency_s)]
        pipe = subprocess.PIPE
        forwarder = subprocess.Popen([*words, *self.names], stdin=pipe, stdout=pipe, start_new_session=True)
        self._processes.append(forwarder)
        assert forwarder.stdin and forwarder.stdout
        self._pipes.push(forwarder.stdin)
        self._pipes.push(forwarder.stdout)
        if forwarder.stdout.readline() != b"ready\n":
            raise RuntimeError("the process that delays frames did not start; latency_ms needs /dev/net/tun")

    def _address(self, host: str) -> str:
        return f"10.77.0.{self.names.index(host) + 1}"

    def _ends(self, host: str) -> list[tuple[str, str]]:
        return [(f"{self._base}-{host}", INTERFACE), (self._switch, f"port-{host}")]

    def _counter(self, host: str, direction: str, unit: str) -> int:
        namespace, device = self._ends(host)[0]
        return json.loads(_ip(namespace, f"-s -j link show dev {device}"))[0]["stats64"][direction][unit]


def shape(mbit: float, burst_bytes: int | None = None) -> tuple[int, int, int]:
    """Burst and queue of a token bucket for a link of `mbit` Mbit/s, and the largest segment that passes it whole.

    A segment above the burst would be cut into frames by the bucket, which costs several times the CPU time.

        >>> shape(100), shape(4)
        ((75000, 700000, 65536), (3028, 196820, 2830))
    """
    rate = mbit * 1e6 / 8
    burst = burst_bytes or max(round(BURST_S * rate), 2 * FRAME_BYTES)
    limit = max(round(QUEUE_S * rate), MIN_QUEUE_BYTES) + burst
    whole = int(burst * (1 - HEADER_BYTES / FRAME_BYTES)) - HEADER_BYTES  # the bucket charges headers to every frame
    return burst, limit, max(FRAME_BYTES, min(whole, MAX_SEGMENT_BYTES))


def missing() -> str | None:
    """Why hosts cannot be made here, or None where they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (package iproute2)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    probe = f"atoll-{os.getpid()}-{_started(os.getpid())}-probe"
    try:
        _call("ip", "netns", "add", probe)
    except RuntimeError as error:
        return str(error)
    _remove(probe)
    return None


def sweep(prefix: str = "atoll") -> list[str]:
    """Remove namespaces of `prefix` whose maker was killed, with what still runs in them; their names."""
    left = []
    for line in _call("ip", "netns", "list").splitlines():
        namespace = line.split()[0]
        made_by = re.match(rf"{re.escape(prefix)}-(\d+)-(\d+)-", namespace)
        if made_by and _started(int(made_by[1])) != made_by[2]:
            _remove(namespace)
            left.append(namespace)
    return left


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks: tells it from a later one with its number. None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _remove(namespace: str) -> None:
    with contextlib.suppress(RuntimeError):  # somebody else swept it, or it was never made
        for _ in range(100):  # a process may start another before its own end
            pids = _call("ip", "netns", "pids", namespace).split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if not pids:
                break
        _call("ip", "netns", "del", namespace)


def _masquerade() -> list[str]:
    if shutil.which("nft"):
        chain = "chain ip atoll after { type nat hook postrouting priority 100 ; }"
        return ["nft add table ip atoll", f"nft add {chain}", f"nft add rule ip atoll after oif {INTERFACE} masquerade"]
    if shutil.which("iptables"):
        return [f"iptables -t nat -A POSTROUTING -o {INTERFACE} -j MASQUERADE"]
    raise RuntimeError("nat() needs nft or iptables and neither is installed; install nftables, or leave nat() out")


def _mac(index: int) -> str:
    return f"02:00:0a:4d:00:{index + 1:02x}"


def _ip(namespace: str, words: str) -> str:
    return _call("ip", "-n", namespace, *words.split())


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def forward(delay_s: float, names: Sequence[str]) -> None:
    """Be the links of the hosts: hold every frame from far-NAME for `delay_s`, then pass it to port-NAME; back at once.

    Ends with its standard input. Frames keep the header that says which checksums and segments are still to be made,
    so that TCP's large segments pass as one.
    """
    up = {_tap(f"far-{name}"): _tap(f"port-{name}") for name in names}
    down = {port: far for far, port in up.items()}
    held: deque[tuple[float, int, bytes]] = deque()
    os.nice(-20)  # a link does not wait until a host's processes leave a core
    print("ready", flush=True)
    while True:
        wait = max(0.0, held[0][0] - time.monotonic()) if held else None
        ready, _, _ = select.select([STDIN, *up, *down], [], [], wait)
        if STDIN in ready:
            return
        for end in ready:
            for frame in _frames(end):
                if end in up:
                    held.append((time.monotonic() + delay_s, up[end], frame))
                else:
                    _deliver(down[end], frame)
        while held and held[0][0] <= time.monotonic():
            _, end, frame = held.popleft()
            _deliver(end, frame)


def _tap(name: str) -> int:
    """A TAP device of that name and the file its frames are read from and written to."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    tap, no_info, with_header = 0x0002, 0x1000, 0x4000
    fcntl.ioctl(end, 0x400454CA, struct.pack("16sH22x", name.encode(), tap | no_info | with_header))  # TUNSETIFF
    checksums, segments = 0x01, 0x02
    fcntl.ioctl(end, 0x400454D0, checksums | segments)  # TUNSETOFFLOAD
    return end


def _frames(end: int) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        for _ in range(64):  # then look at the clock and the others
            yield os.read(end, 2 * MAX_SEGMENT_BYTES)


def _deliver(end: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # the device is down or full: the frame is lost, as on a wire
        os.write(end, frame)


CHECK_BYTES = 40_000_000
CHECK_REPEATS = 3


def check() -> None:
    """Print what gloo's all_reduce of 40 MB takes and sends between hosts, beside the physical figures."""
    print("| hosts | Mbit/s | latency | physical | measured | ratio | at the interface | less headers |")
    print("|---|---|---|---|---|---|---|---|")
    for num_hosts, latency_ms, rates_mbit in ((2, 0, (100, 1000)), (4, 0, (100, 1000)), (4, 25, (100,))):
        names = [f"host{i}" for i in range(num_hosts)]
        with Hosts(names, latency_ms=latency_ms) as hosts:
            workers = [_worker(hosts, rank) for rank in range(num_hosts)]
            for rate_mbit in rates_mbit:
                _check_rate(hosts, workers, rate_mbit, latency_ms)


def _worker(hosts: Hosts, rank: int) -> subprocess.Popen[str]:
    words = [sys.executable, __file__, "worker", hosts.address(hosts.names[0]), str(rank), str(len(hosts.names))]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    pipe = subprocess.PIPE
    return hosts.run(hosts.names[rank], words, stdin=pipe, stdout=pipe, text=True, env=environment)


def _check_rate(hosts: Hosts, workers: list[subprocess.Popen[str]], rate_mbit: float, latency_ms: float) -> None:
    for name in hosts.names:
        hosts.set_rate(name, rate_mbit)
    _all_reduce(workers, FRAME_BYTES)
    before = [(hosts.bytes_sent(name), hosts.payload_sent(name)) for name in hosts.names]
    seconds = statistics.median(_all_reduce(workers, CHECK_BYTES) for _ in range(CHECK_REPEATS))
    after = [(hosts.bytes_sent(name), hosts.payload_sent(name)) for name in hosts.names]
    payload = 2 * (len(workers) - 1) / len(workers) * CHECK_BYTES
    sent, less_headers = (
        max(b[i] - a[i] for a, b in zip(before, after, strict=True)) / payload / CHECK_REPEATS for i in (0, 1)
    )
    physical = payload * 8 / (rate_mbit * 1e6)
    print(
        f"| {len(workers)} | {rate_mbit} | {latency_ms} ms | {physical:.2f} s | {seconds:.2f} s | "
        f"{seconds / physical:.3f} | {sent:.3f} | {less_headers:.3f} |",
        flush=True,
    )


def _all_reduce(workers: list[subprocess.Popen[str]], num_bytes: int) -> float:
    """Seconds of the slowest."""
    for worker in workers:
        assert worker.stdin
        worker.stdin.write(f"{num_bytes}\n")
        worker.stdin.flush()
    return max(float(worker.stdout.readline()) for worker in workers if worker.stdout)


def work(address: str, rank: int, num_hosts: int) -> None:
    """All-reduce as many bytes as each line of standard input says, and answer with the seconds it took."""
    import torch.distributed as dist  # here, because the process that delays frames must not wait for it
    from torch import ones

    store = dist.TCPStore(address, 29500, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_hosts)
    for line in sys.stdin:
        numbers = ones(int(line) // 4)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(numbers)
        print(time.perf_counter() - start, flush=True)
    dist.destroy_process_group()


def main(words: list[str]) -> None:
    match words:
        case ["check"]:
            check()
        case ["forward", delay_s, *names]:
            forward(float(delay_s), names)
        case ["worker", address, rank, num_hosts]:
            work(address, int(rank), int(num_hosts))
        case _:
            sys.exit("usage: python benchmarks/hosts.py check")


if __name__ == "__main__":
    main(sys.argv[1:])
