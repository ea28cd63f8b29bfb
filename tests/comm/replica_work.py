"""What the replicas of tests/comm do. The same functions drive a process a replica and all replicas of one process."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from atoll.algo.fragments import Layout, buckets
from atoll.comm.base import Flight, Transport
from atoll.comm.local import LocalGroup
from atoll.comm.torchdist import TorchDistTransport
from atoll.compress import COMPRESSORS, CompressorOptions, build_compressor
from atoll.errors import TransportError
from atoll.exchange import Exchange, Gather, Mean

SHAPES = [(), (0,), (1,), (3,), (7, 5, 3), (1000,), (1_000_003,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGE = 1 << 22


def contribution(replica: int, number: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The tensor that `replica` brings to exchange `number`."""
    generator = torch.Generator().manual_seed(1000 * replica + number)
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def ballot(weight: float) -> bytes:
    return struct.pack("d", weight)


def tally(ballots: Sequence[bytes]) -> list[float]:
    return [struct.unpack("d", packed)[0] for packed in ballots]


def plain(tensor: Tensor) -> Exchange:
    mean = yield Mean(tensor)
    return mean, {}


def digest(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return f"{tuple(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(flat.numpy().tobytes())}"


def locally(num_replicas: int, launch: Any, *args: Any) -> list[Any]:
    """What `launch(transport, *args)` says on every replica of a `LocalGroup`, once all have launched."""
    steps = [launch(endpoint, *args) for endpoint in LocalGroup(num_replicas).endpoints()]
    for step in steps:
        next(step)
    return [next(step) for step in steps]


def over_gloo(replica: int, launch: Any, *args: Any) -> Any:
    """What `launch(transport, *args)` says on this replica of the default group."""
    step = launch(TorchDistTransport(timeout_s=15), *args)
    next(step)
    return next(step)


# --- launches: generators that yield after launching, then yield what they saw


def means_of_all_shapes(transport: Transport, weights: Sequence[float]) -> Iterator[Any]:
    tensors = [
        contribution(transport.replica, number, shape, dtype)
        for number, (shape, dtype) in enumerate((shape, dtype) for shape in SHAPES for dtype in DTYPES)
    ]
    tensors.append(contribution(transport.replica, 99, (30, 20)).t())
    flight = transport.launch(ballot(weights[transport.replica]), tally, map(plain, tensors))
    yield
    yield [digest(mean) for mean, _ in flight.results()], flight.traffic()


def means_of_buckets(transport: Transport, layout: Layout, capacity: int) -> Iterator[Any]:
    cut = buckets(layout, capacity)
    whole = contribution(transport.replica, 0, (layout.numel,))
    flight = transport.launch(ballot(1), tally, [plain(whole[bucket.start : bucket.stop]) for bucket in cut])
    yield
    yield torch.cat([mean for mean, _ in flight.results()])


def two_means_and_a_gather(transport: Transport) -> Iterator[Any]:
    def exchange(number: int) -> Exchange:
        first = yield Mean(contribution(transport.replica, number, (40, 3)))
        second = yield Mean(contribution(transport.replica, number, (50, 3)) + first.sum())
        gathered = yield Gather(torch.full((5,), transport.replica, dtype=torch.uint8))
        assert [payload.tolist() for payload in gathered.payloads] == [[r] * 5 for r in range(transport.num_replicas)]
        assert list(gathered.weights) == [1.0 + replica for replica in range(transport.num_replicas)]
        return second, {"first": first}

    flight = transport.launch(ballot(1.0 + transport.replica), tally, [exchange(number) for number in range(4)])
    yield
    yield [(digest(mean), digest(state["first"])) for mean, state in flight.results()], flight.traffic().payload_bytes


def one_gather(transport: Transport, num_bytes: int) -> Iterator[Any]:
    def exchange() -> Exchange:
        gathered = yield Gather(contribution(transport.replica, 0, (num_bytes,)).to(torch.uint8))
        return torch.cat(gathered.payloads), {}

    flight = transport.launch(ballot(1), tally, [exchange()])
    yield
    yield [digest(tensor) for tensor, _ in flight.results()], flight.traffic().payload_bytes


def every_code(transport: Transport, shapes: Sequence[Sequence[int]]) -> Iterator[Any]:
    flights = []
    for name in sorted(COMPRESSORS):
        compressor = build_compressor(name)
        exchanges = [
            compressor.average(contribution(transport.replica, number, shape), compressor.init(shape))
            for number, shape in enumerate(shapes)
        ]
        declared = sum(
            compressor.sent_bytes(shape, num_replicas=transport.num_replicas, replica=transport.replica)
            for shape in shapes
        )
        flights.append((name, declared, transport.launch(ballot(1), tally, exchanges)))
    yield
    yield {name: (_digests(flight), declared, flight.traffic().payload_bytes) for name, declared, flight in flights}


def _digests(flight: Flight) -> list[str]:
    return [digest(mean) for mean, _ in flight.results()]


def means_beside_a_nan(transport: Transport) -> Iterator[Any]:
    tensor = contribution(transport.replica, 0, (1000,))
    weight = 1.0
    if transport.replica == 1:
        tensor, weight = torch.full_like(tensor, float("nan")), 0.0
    flight = transport.launch(ballot(weight), tally, [plain(tensor)])
    yield
    yield [mean for mean, _ in flight.results()]


def a_void_round_between_two_others(transport: Transport) -> Iterator[Any]:
    flights = []
    for weight in (1.0, 0.0, 1.0):
        tensors = (contribution(transport.replica, number, (1000,)) for number in range(10))
        flights.append(transport.launch(ballot(weight), tally, map(plain, tensors)))
    yield
    answers: list[Any] = [_digests(flights[0]), flights[1].traffic().payload_bytes, _digests(flights[2])]
    yield [*answers, _digests(flights[1])]


def rounds_that_overlap(transport: Transport) -> Iterator[Any]:
    flights = []
    for launch in range(3):
        tensors = [contribution(transport.replica, 10 * launch + number, (500 + launch,)) for number in range(7)]
        flights.append(transport.launch(ballot(1), tally, map(plain, tensors)))
    yield
    yield [_digests(flight) for flight in flights]


def traffic_before_results(transport: Transport) -> Iterator[Any]:
    tensors = [contribution(transport.replica, number, (500,)) for number in range(7)]
    flight = transport.launch(ballot(1), tally, map(plain, tensors))
    yield
    yield flight.traffic().payload_bytes, _digests(flight)


def constants(transport: Transport) -> Iterator[Any]:
    def exchange(number: int) -> Exchange:
        return torch.tensor(number), {}
        yield

    flight = transport.launch(ballot(1), tally, map(exchange, range(9)))
    yield
    yield [int(tensor) for tensor, _ in flight.results()]


def nothing_at_all(transport: Transport) -> Iterator[Any]:
    flight = transport.launch(ballot(2), tally, [])
    yield
    yield list(flight.ballots()) == [ballot(2)] * transport.num_replicas, list(flight.results()), flight.traffic()


# --- faults


def lazily_made(replica: int, order: list[str]) -> Iterable[Exchange]:
    for number in range(6):
        order.append(f"made {number}")
        yield plain(contribution(replica, number, (100,)))


def order_of_events(replica: int) -> list[str]:
    order: list[str] = []
    flight = TorchDistTransport(timeout_s=15, lag=2).launch(ballot(1), tally, lazily_made(replica, order))
    order.append("launched")
    for number, _ in enumerate(flight.results()):
        order.append(f"got {number}")
    return order


def lose_a_peer(replica: int, timeout_s: float) -> str:
    """The last replica ends itself in the middle of a round; what the others are told."""
    transport = TorchDistTransport(timeout_s=timeout_s)
    tensors = (contribution(replica, number, (LARGE,)) for number in range(6))
    try:
        flight = transport.launch(ballot(1), tally, map(plain, tensors))  # told at once, or later
        for _ in flight.results():
            if replica == transport.num_replicas - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        flight.traffic()
    except TransportError as error:
        return str(error)
    return "nothing went wrong"


def wait_for_an_absent_peer(replica: int, port: int, timeout_s: float) -> str:
    """Replica 1 is there and never launches; what replica 0 is told."""
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    if replica == 1:
        store.wait(["told"])
        return "absent"
    flight = TorchDistTransport(timeout_s=timeout_s).launch(ballot(1), tally, [])
    try:
        flight.ballots()
        return "nothing went wrong"
    except TransportError as error:
        return str(error)
    finally:
        store.set("told", "")


def codes_with_feedback(transport: Transport, names: Sequence[str], weights: Sequence[float]) -> Iterator[Any]:
    """Digests of means and of all that is kept, of replicas that owe something already."""
    exchanges = []
    for name in names:
        compressor = build_compressor(name, CompressorOptions(rank=4, reduction="requantise", feedback=True))
        for number, shape in enumerate([(40, 300), (257,), (2, 3, 4)]):
            owed = {"own.residual": contribution(transport.replica, 100 + number, shape)}
            state = compressor.init(shape) | owed
            exchanges.append(compressor.average(contribution(transport.replica, number, shape), state))
    flight = transport.launch(ballot(weights[transport.replica]), tally, exchanges)
    yield
    yield [
        (digest(mean), {key: digest(value) for key, value in sorted(state.items())}) for mean, state in flight.results()
    ]


def background_rounds(replica: int, num_rounds: int) -> list[tuple[int, float]]:
    """Rounds driven by the transport's own thread, whose ballots and results the launcher asks for at once."""
    with_transport = TorchDistTransport(timeout_s=20.0)
    seen = []
    for number in range(num_rounds):
        tensors = [torch.full((1000,), float(replica + number + part)) for part in range(4)]
        flight = with_transport.launch(ballot(1.0), tally, (plain(tensor) for tensor in tensors), background=True)
        ballots = flight.ballots()
        seen.append((len(ballots), sum(float(mean[0]) for mean, _ in flight.results())))
        flight.traffic()
    with_transport.close()
    return seen
