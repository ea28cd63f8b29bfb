"""One worker of an elastic island: its rows of the model, and what it does when the leader of the island says so.

All workers do the same in the same order, the leader too (`atoll.train.crew`); it decides what is to be decided. A
command is a word and plain JSON; an answer is plain JSON and bytes.

    step                         train one inner step                   capture, codes, average     beside the training
    take, land, take_back, ...   as `ReplicaSync` does                  save, save_own, resume      its own files
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from safetensors.torch import save as pack_tensors
from torch import Tensor

from atoll.algo.merge import Ballot
from atoll.comm.torchdist import TorchDistTransport
from atoll.compress.base import shared_part
from atoll.data import TextData
from atoll.data.stream import LeasedStream
from atoll.elastic.crash import crash_point
from atoll.elastic.donate import AT_ONCE
from atoll.elastic.group import connect_counterparts, join_meeting
from atoll.errors import CheckpointError
from atoll.parallel import Piece, refine
from atoll.parallel.sharding import held_shards
from atoll.train.anchor_digest import Leaves, OwnedRows
from atoll.train.committed import CommittedRows, PiecedState, capture_rows, foresee_rows, load_rows, tensor_codes
from atoll.train.config import TrainConfig
from atoll.train.memory import memory_by_state
from atoll.train.piecewise import Group, average_pieces
from atoll.train.replica import Member, Replica, StepReport
from atoll.train.sync import Arrived, ReplicaSync, WeighedTransport
from atoll.train.through_host import ThroughHost
from atoll.train.worker_state import Shards
from atoll.train.workers import ModelPart

Given = Mapping[str, Any]
Answer = tuple[dict[str, Any], bytes]
ASIDE = frozenset(
    {"average", "capture", "hand_over", "codes"}
)  # what is done beside the training, in a thread of its own


@dataclass(frozen=True)
class _Reached:
    """An attempt that was averaged. own: digest of the rows of this worker, as they would be."""

    arrived: Arrived
    own: str


class IslandWorker:
    """index: of this worker among those of the island. address: of its interface towards other islands."""

    def __init__(
        self,
        config: TrainConfig,
        replica: Replica,
        sync: ReplicaSync,
        *,
        data: TextData,
        address: str,
        index: int = 0,
    ) -> None:
        assert isinstance(replica.stream, LeasedStream)
        self.config = config
        self.replica = replica
        self.sync = sync
        self.data = data
        self.address = address
        self.index = index
        self.part = replica.trainee if isinstance(replica.trainee, ModelPart) else None
        self.shards: Shards = self.part.shards if self.part is not None else held_shards(replica.trainable())
        self.owned = [
            OwnedRows(name, shard.start, shard.stop, tuple(shard.full_shape)) for name, shard in self.shards.items()
        ]
        self.stream = replica.stream
        self.progress: list[Tensor] | None = None  # kept over a change of the anchor
        self._held_out = data.held_out[: config.eval_sequences]
        self._before: CommittedRows | None = None
        self._captured: dict[int, dict[str, Tensor]] = {}  # copies of its committed rows, until they are fetched
        self._staged: dict[int, dict[str, Tensor]] = {}  # its rows of states that are on their way here
        self._reached: dict[int, _Reached] = {}
        self._reached_lock = threading.Lock()

    def do(self, command: str, given: Given, payload: bytes = b"") -> Answer:
        """What the leader says. Raises `AtollError`."""
        answer = COMMANDS[command](self, given, payload)
        return answer if answer is not None else ({}, b"")

    # --- inner steps

    def step(self, given: Given, payload: bytes) -> None:
        """A step of a worker that does not lead: the samples are said."""
        self.stream.give_up()
        self.stream.lease((start, stop) for start, stop in given["samples"])
        self.train(int(given["step"]))

    def train(self, step: int) -> StepReport:
        crash_point("worker.step")
        self.replica.compute_gradients(step)
        report = self.replica.update(step)
        crash_point("worker.stepped")
        return report

    def evaluate(self, given: Given, payload: bytes) -> Answer:
        share = self._held_out[given["place"] :: given["of"]]
        loss_sum, tokens = self.replica.evaluate(share, self.sync.anchor())
        return {"loss_sum": loss_sum, "tokens": tokens}, b""

    # --- rounds

    def take(self, given: Given, payload: bytes) -> Answer:
        crash_point("worker.take")
        offer = self.sync.take(0, weight=given["weight"])
        return {"norm": offer.norm, "finite": offer.finite}, b""

    def take_back(self, given: Given, payload: bytes) -> None:
        self.sync.take_back(0)

    def restart(self, given: Given, payload: bytes) -> None:
        """Throw the progress away, and the inner state that made it."""
        self.sync.take_back(0)
        self.sync.restart()
        self._spread()
        self.replica.start_afresh()

    def average(self, given: Given, payload: bytes) -> Answer:
        meeting = given["meeting"]
        return self.average_at(join_meeting(*meeting, timeout_s=given["patience_s"]), given)

    def average_at(self, store: dist.Store, given: Given) -> Answer:
        """This worker's part of an attempt; changes nothing. The bytes are leaves: of the base, then of the result."""
        attempt, place, weights = given["attempt"], given["place"], given["weights"]
        islands = [[{name: (a, b) for name, (a, b) in one.items()} for one in owners] for owners in given["islands"]]
        groups = self._groups(islands, place)
        began = time.perf_counter()
        ends = [self._connect(store, holders, given) for holders in groups]
        meet_s = time.perf_counter() - began
        crash_point("worker.connected")
        if self.index == 0:
            crash_point("island.connected")
        base, after = Leaves(self.owned), Leaves(self.owned)

        def see(before: Tensor, then: Tensor) -> None:
            base.update(before)
            after.update(then)

        if given["alike"]:
            offered = given["offered"]
            arrived = self.sync.average(0, ends[0], weights, offered=offered, step=given["step"], see=see)
        else:
            arrived = self._average_pieces(list(zip(ends, groups.values(), strict=True)), given, see)
        with self._reached_lock:
            self._reached = {attempt: _Reached(arrived, arrived.digest)}
        crash_point("worker.averaged")
        sent = arrived.sent
        told = {
            **{"payload_bytes": sent.payload_bytes, "gram": None if sent.gram is None else sent.gram.tolist()},
            **{"meet_s": meet_s, "waited_s": sent.waited_s, "outer_s": arrived.outer_s},
        }
        leaves = base.told()
        return told | {"base_bytes": len(leaves)}, leaves + after.told()

    def _groups(self, islands: Sequence[Any], place: int) -> dict[tuple[int, ...], list[Piece]]:
        return {holders: pieces for holders, pieces in refine(islands).items() if holders[place] == self.index}

    def _connect(self, store: dist.Store, holders: Sequence[int], given: Given) -> WeighedTransport:
        group = connect_counterparts(
            store,
            f"attempt-{given['attempt']}/{'-'.join(map(str, holders))}",
            given["place"],
            len(holders),
            address=self.address,
            timeout_s=given["patience_s"],
        )
        transport = TorchDistTransport(group, timeout_s=self.config.timeout_s)
        device = next(iter(self.sync.anchor().values())).device
        return ThroughHost(transport, device) if device.type == "cuda" else transport

    def _average_pieces(
        self,
        ends: Sequence[tuple[WeighedTransport, list[Piece]]],
        given: Given,
        see: Callable[[Tensor, Tensor], None],
    ) -> Arrived:
        weights, place = given["weights"], given["place"]
        pieced = average_pieces(
            self.sync,
            self.owned,
            [Group(transport, pieces) for transport, pieces in ends],
            weights,
            ballot=Ballot(given["round"], bytes.fromhex(given["base"]), weights[place]),
            offered=given["offered"] and weights[place] > 0,
            codes=frozenset(given["codes"]),
        )
        return self.sync.foresee(0, pieced.packed, pieced.means, pieced.sent, place=place, step=given["step"], see=see)

    def land(self, given: Given, payload: bytes) -> Answer:
        """Adopt an attempt that is committed. as_foreseen: the anchor is what the averaging said it would be."""
        crash_point("worker.land")
        with self._reached_lock:
            reached = self._reached.pop(given["attempt"])
        self.sync.land(0, reached.arrived, step=given["step"])
        self._spread()
        crash_point("worker.landed")
        return {"as_foreseen": self.sync.digest() == reached.own}, b""

    def measure(self, given: Given, payload: bytes) -> Answer:
        """The leaves of the anchor as it is in memory now."""
        self.sync.measure_digest()
        leaves = Leaves(self.owned)
        for flat in self.sync.flat_anchors():
            leaves.update(flat)
        return {"round": self.sync.round}, leaves.told()

    def codes(self, given: Given, payload: bytes) -> Answer:
        """Digests of what compressors should hold alike on all islands, by the rows they are of."""
        digests = {}
        for code, one in tensor_codes(self.sync, self.owned):
            fingerprint = xxhash.xxh3_128()
            for key, value in sorted(shared_part(code).items()):
                fingerprint.update(key.encode())
                fingerprint.update(value.detach().cpu().contiguous().numpy().data)
            digests[one.span] = fingerprint.hexdigest()
        return {"codes": digests}, b""

    def _spread(self) -> None:
        """Rows that this worker owns were written to: bring those that others own up to date. Collective."""
        if self.part is not None:
            self.part.model.gather_shards_()

    # --- the committed state

    def capture(self, given: Given, payload: bytes) -> Answer:
        """Copy the committed state of its rows, or what landing the attempt `ahead` will leave; says what there is."""
        tensors, about = self.copy_committed(given["ahead"], step=given["step"])
        _put_newest(self._captured, given["transfer"], tensors)
        return about | {"tensors": {name: list(value.shape) for name, value in tensors.items()}}, b""

    def hand_over(self, given: Given, payload: bytes) -> Answer:
        """One tensor of a copy, which is let go of."""
        tensors = self._captured.get(given["transfer"], {})
        if given["name"] not in tensors:
            raise CheckpointError(f"the copy of {given['name']} was given up for newer ones.")
        return {}, pack_tensors({"": tensors.pop(given["name"])})

    def stage(self, transfer: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep what came of a state for `restore`."""
        if transfer not in self._staged:
            _put_newest(self._staged, transfer, {})
        self._staged[transfer] |= tensors

    def copy_committed(self, ahead: int | None, *, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if ahead is None:
            return capture_rows(self.sync, self.owned)
        with self._reached_lock:
            reached = self._reached.get(ahead)
        if reached is None:
            raise CheckpointError(f"attempt {ahead} is not held here any more.")
        return foresee_rows(self.sync, self.owned, reached.arrived, step=step)

    def restore(self, given: Given, payload: bytes) -> Answer:
        """Fill in the committed state; `settle` says whether it stays. keep: the progress is kept; spent: without the
        oldest offer, which a committed round has."""
        self.progress = self.sync.progress(without_oldest=given["spent"]) if given["keep"] else None
        self._before = CommittedRows.of(self.sync)
        state = PiecedState(self._staged.pop(given["transfer"], {}), given)
        load_rows(self.sync, self.owned, state.of(self.owned), counts=state.counts)
        return self.measure(given, b"")

    def settle(self, given: Given, payload: bytes) -> None:
        """After `restore`. rebase: parameters become the anchor, less the progress that is kept."""
        before, self._before = self._before, None
        if not given["ok"]:
            assert before is not None
            before.put_back(self.sync)
            return
        self.sync.take_back(0)
        with self._reached_lock:
            self._reached.clear()
        if given["rebase"]:
            self.sync.rebase(self.progress)
            self._spread()

    def withdraw(self, given: Given, payload: bytes) -> None:
        """Nothing is on offer any more; the progress that no committed round holds is kept for `save_own`."""
        self.progress = self.sync.progress(without_oldest=given["spent"])
        self.sync.take_back(0)

    # --- files

    def save(self, given: Given, payload: bytes) -> None:
        from atoll.train.elastic_checkpoint import save_worker_rows

        crash_point("worker.save")
        save_worker_rows(self, step=given["step"])
        crash_point("worker.saved")

    def save_own(self, given: Given, payload: bytes) -> None:
        from atoll.train.elastic_checkpoint import save_worker_own

        save_worker_own(self, seat=given["seat"], steps=given["steps"], books=given["books"], workers=given["workers"])

    def resume(self, given: Given, payload: bytes) -> Answer:
        """Go on from a checkpoint, and from what this island had of its own."""
        from atoll.train.elastic_checkpoint import load_worker

        about = load_worker(self, Path(given["folder"]), seat=given["seat"])
        self._spread()
        _, leaves = self.measure(given, b"")
        return about | {"counts": [self.sync.round]}, leaves

    def memory(self, given: Given, payload: bytes) -> Answer:
        """Bytes that it holds, by state."""
        member = Member(self.replica, self.sync.transport, self.sync)
        return {"bytes": dict(memory_by_state(member).bytes_by_state)}, b""

    def introduce(self, given: Given, payload: bytes) -> Answer:
        """What it owns."""
        return {"owned": {one.name: [one.start, one.stop, list(one.shape)] for one in self.owned}}, b""


COMMANDS: Mapping[str, Callable[[IslandWorker, Given, bytes], Answer | None]] = {
    "step": IslandWorker.step,
    "evaluate": IslandWorker.evaluate,
    "take": IslandWorker.take,
    "take_back": IslandWorker.take_back,
    "restart": IslandWorker.restart,
    "average": IslandWorker.average,
    "land": IslandWorker.land,
    "measure": IslandWorker.measure,
    "codes": IslandWorker.codes,
    "capture": IslandWorker.capture,
    "hand_over": IslandWorker.hand_over,
    "restore": IslandWorker.restore,
    "settle": IslandWorker.settle,
    "withdraw": IslandWorker.withdraw,
    "save": IslandWorker.save,
    "save_own": IslandWorker.save_own,
    "resume": IslandWorker.resume,
    "memory": IslandWorker.memory,
    "introduce": IslandWorker.introduce,
}


def _put_newest(kept: dict[int, dict[str, Tensor]], number: int, tensors: dict[str, Tensor]) -> None:
    """Keep these, and of the others the newest alone: those that nobody fetched to the end would stay for ever."""
    for old in sorted(kept)[: 1 - AT_ONCE or None]:
        kept.pop(old, None)
    kept[number] = tensors


def owned_of(told: Mapping[str, Any]) -> list[OwnedRows]:
    """The rows that a worker introduced itself with."""
    return [OwnedRows(name, start, stop, tuple(shape)) for name, (start, stop, shape) in told.items()]
