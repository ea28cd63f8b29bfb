"""Islands of different shapes average what they hold in common: exactly, and all alike."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from atoll.algo.merge import Ballot
from atoll.comm.local import LocalGroup
from atoll.comm.torchdist import TorchDistTransport
from atoll.compress import CompressorOptions, build_compressor
from atoll.elastic.group import connect_counterparts
from atoll.parallel import refine
from atoll.train.anchor_digest import Leaves, OwnedRows, combine, row_width
from atoll.train.committed import PiecedState, capture_rows, load_rows, tensor_codes
from atoll.train.piecewise import Group, average_pieces
from atoll.train.sync import Arrived, OuterSettings, ReplicaSync

SHAPES = {"embed": (48, 16), "layer": (32, 24), "norm": (24,)}
START = {name: torch.randn(shape, generator=torch.Generator().manual_seed(3)) for name, shape in SHAPES.items()}
Cuts = Sequence[Mapping[str, tuple[int, int]]]  # of an island: for each worker its rows of each parameter
ONE: Cuts = [{name: (0, shape[0]) for name, shape in SHAPES.items()}]
STAGES: Cuts = [{"embed": (0, 48)}, {"layer": (0, 32), "norm": (0, 24)}]
ROWS: Cuts = [
    {"embed": (0, 30), "layer": (0, 16), "norm": (0, 5)},
    {"embed": (30, 48), "layer": (16, 32), "norm": (5, 24)},
]
WEIGHTS = (3.0, 1.0)


class Worker:
    """One worker of an island: its rows of START, moved by progress that depends on the island alone."""

    def __init__(self, rows: Mapping[str, tuple[int, int]], settings: OuterSettings, *, island: int) -> None:
        self.owned = [
            OwnedRows(name, start * row_width(SHAPES[name]), stop * row_width(SHAPES[name]), SHAPES[name])
            for name, (start, stop) in rows.items()
        ]
        self.params = {one.name: _rows(START[one.name], one) for one in self.owned}
        self.sync = ReplicaSync(self.params, LocalGroup(1).endpoints()[0], settings)
        self.island = island

    def move(self) -> None:
        for one in self.owned:
            self.params[one.name].add_(_rows(progress(one.name, self.island), one))

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        return {one.name: (one.start, one.stop) for one in self.owned}

    def leaves(self) -> bytes:
        leaves = Leaves(self.owned)
        for flat in self.sync.flat_anchors():
            leaves.update(flat)
        return leaves.told()


def _rows(whole: Tensor, one: OwnedRows) -> Tensor:
    return whole.reshape(-1)[one.start : one.stop].clone().view(one.local_shape)


def progress(name: str, island: int) -> Tensor:
    return 0.1 * torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(17 * island + len(name)))


def islands_of(shapes: Sequence[Cuts], **settings: Any) -> list[list[Worker]]:
    return [
        [Worker(rows, OuterSettings(bucket_elements=100, **settings), island=island) for rows in cuts]
        for island, cuts in enumerate(shapes)
    ]


def in_threads(workers: Sequence[Worker], work: Callable[[Worker], object]) -> None:
    """As the processes that they stand for: they wait for each other."""
    failures: list[BaseException] = []

    def run(worker: Worker) -> None:
        try:
            work(worker)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def make_round(islands: Sequence[Sequence[Worker]], number: int, *, listens: int = -1) -> list[list[Worker]]:
    """One round of all islands; `listens` brings nothing."""
    store = dist.HashStore()
    weights = [0.0 if place == listens else weight for place, weight in enumerate(WEIGHTS)]
    owners = [[worker.ranges for worker in workers] for workers in islands]
    spans: list[dict[str, Any]] = [
        {one.span: code for worker in workers for code, one in tensor_codes(worker.sync, worker.owned)}
        for workers in islands
    ]
    common = frozenset(set(spans[0]).intersection(*spans[1:]))

    def work(worker: Worker) -> None:
        place, index = worker.island, islands[worker.island].index(worker)
        groups = {holders: pieces for holders, pieces in refine(owners).items() if holders[place] == index}
        ends = [_connect(store, f"{number}/{holders}", place) for holders in groups]
        offered = weights[place] > 0
        if offered:
            worker.move()
            worker.sync.take(0, weight=weights[place])
        pieced = average_pieces(
            worker.sync,
            worker.owned,
            [Group(end, pieces) for end, pieces in zip(ends, groups.values(), strict=True)],
            weights,
            ballot=Ballot(number, bytes(16), weights[place]),
            offered=offered,
            codes=common,
        )
        arrived: Arrived = worker.sync.foresee(
            0, pieced.packed, pieced.means, pieced.sent, place=place, step=1, see=lambda base, after: None
        )
        worker.sync.land(0, arrived, step=1)
        assert worker.sync.digest() == arrived.digest

    in_threads([worker for workers in islands for worker in workers], work)
    return [list(workers) for workers in islands]


def _connect(store: dist.Store, name: str, place: int) -> TorchDistTransport:
    group = connect_counterparts(store, name, place, len(WEIGHTS), address="127.0.0.1", timeout_s=20)
    return TorchDistTransport(group, timeout_s=20)


def digest_of(workers: Sequence[Worker]) -> str:
    return combine([worker.owned for worker in workers], [worker.leaves() for worker in workers])


def anchor_of(workers: Sequence[Worker]) -> dict[str, Tensor]:
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for worker in workers:
        for one in worker.owned:
            parts.setdefault(one.name, []).append((one.start, worker.sync.anchor()[one.name].reshape(-1)))
    return {
        name: torch.cat([part for _, part in sorted(held, key=lambda pair: pair[0])]) for name, held in parts.items()
    }


PAIRS = {"one and stages": (ONE, STAGES), "one and rows": (ONE, ROWS), "stages and rows": (STAGES, ROWS)}


@pytest.mark.parametrize("pair", PAIRS)
def test_the_anchor_moves_by_the_exact_mean(pair: str) -> None:
    lr = 0.5
    islands = make_round(islands_of(PAIRS[pair], lr=lambda step: lr), 1)
    expected = {}
    for name in SHAPES:
        mean = -(WEIGHTS[0] * progress(name, 0) + WEIGHTS[1] * progress(name, 1)) / sum(WEIGHTS)
        expected[name] = (START[name] - lr * (mean + 0.9 * mean)).reshape(-1)  # Nesterov's first step
    for workers in islands:
        for name, value in anchor_of(workers).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    assert digest_of(islands[0]) == digest_of(islands[1])


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("compressor", ["fp16", "int8", "int4", "topk", "lowrank+int4"])
def test_islands_of_any_shape_come_to_the_same_anchor(pair: str, compressor: str) -> None:
    options = CompressorOptions(rank=4, feedback=True)
    islands = islands_of(PAIRS[pair], compressor=build_compressor(compressor, options))
    for number, listens in enumerate((-1, 1, -1), start=1):
        make_round(islands, number, listens=listens)
        assert digest_of(islands[0]) == digest_of(islands[1])


@pytest.mark.parametrize("pair", PAIRS)
def test_a_state_is_read_back_by_workers_of_another_shape(pair: str) -> None:
    options = CompressorOptions(rank=4, feedback=True)
    settings = {"compressor": build_compressor("lowrank+int4", options)}
    givers, takers = islands_of(PAIRS[pair], **settings)
    for worker in givers:
        worker.sync.flat_anchors()[0].add_(1.5)
        worker.sync.measure_digest()
    captured = [capture_rows(worker.sync, worker.owned) for worker in givers]
    tensors = {name: value for part, _ in captured for name, value in part.items()}
    shapes = {name: shape for _, about in captured for name, shape in about["shapes"].items()}
    state = PiecedState(tensors, {"shapes": shapes, "counts": [7]})
    for worker in takers:
        load_rows(worker.sync, worker.owned, state.of(worker.owned), counts=state.counts)
        worker.sync.rebase(None)
        assert worker.sync.round == 7
    assert digest_of(takers) == digest_of(givers)
