"""A replica of many workers: what each of them trains, syncs and may decide.

    replica 0          replica 1                 replica = data_workers x pipeline_stages workers
    worker 0  ───────  worker 0                  ─── counterparts: the same rows of the same layers; they average
      ┊                  ┊                        ┊  the workers of a replica: activations and gradients, every step
    worker 1  ───────  worker 1

To the other replicas each worker is a replica of its own that holds only the rows it owns, so that every parameter
travels once and never between stages. To its own replica it is one voice of several: whatever could be decided
differently by two of them (a contribution that is not finite, a signal to stop) is agreed first.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from atoll.algo import merge
from atoll.algo.merge import Ballot, Geometry
from atoll.comm.base import Flight, Transport
from atoll.parallel import ParallelModel, ReplicaMesh
from atoll.train.stopping import Signals, Stopper
from atoll.train.sync import OuterSettings, ReplicaSync, RoundReport

_NOTHING = xxhash.xxh3_128(b"").digest()  # the digest of an anchor without elements


class Workers(Protocol):
    """The workers of this process's replica. index: of this one among them; the first speaks for all."""

    @property
    def index(self) -> int: ...

    def gather(self, payload: bytes) -> list[bytes]:
        """What every worker gives, in their order; all give equally many bytes. Collective."""
        ...


class OneWorker:
    """A replica that is one process, or one of several in this process."""

    index = 0

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload]


class ManyWorkers:
    """The workers of a mesh, which are the default process group."""

    def __init__(self, mesh: ReplicaMesh) -> None:
        self.index = mesh.worker
        self._device = mesh.device

    def gather(self, payload: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self._device)
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, own)
        return [bytes(row.tolist()) for row in rows]


def all_say(workers: Workers, flag: bool) -> bool:
    """Whether every worker of the replica says yes. Collective."""
    return b"\0" not in workers.gather(bytes([flag]))


# --- what is trained


class ModelPart:
    """This worker's part of a model, as a `Trainee`. shards: the rows it owns, empty ones left out."""

    def __init__(self, model: ParallelModel) -> None:
        self.model = model
        self.params = model.params
        self.shards = {name: shard for name, shard in model.shards().items() if shard.stop > shard.start}

    def compute_gradients(self, batches: Iterable[Tensor], *, parts: int) -> Tensor:
        """All batches of the step at once: microbatches take the place of `parts`."""
        mesh = self.model.mesh
        tokens = torch.cat(list(batches)).chunk(mesh.num_data)[mesh.data]
        return torch.tensor(self.model.compute_gradients(tokens), dtype=torch.float64)

    def clip_gradients_(self, max_norm: float) -> float:
        return self.model.clip_gradients_(max_norm)

    def evaluate(self, sequences: Tensor, *, batch_size: int) -> tuple[float, int]:
        return self.model.evaluate(sequences, batch_size=batch_size)

    @torch.no_grad()
    def load_(self, weights: Mapping[str, Tensor]) -> None:
        for name, shard in self.shards.items():
            shard.tensor.copy_(weights[name])
        self.model.gather_shards_()


# --- what is synced


class ShardSync:
    """The outer loop of the rows that one worker owns, in step with the other workers of its replica.

    fragments: names by fragment, of the whole model. A worker that owns nothing of a fragment takes part in its ballots
    all the same, for the counts of rounds go on everywhere alike.
    """

    def __init__(
        self,
        part: ModelPart,
        transport: Transport,
        settings: OuterSettings,
        *,
        fragments: Sequence[Sequence[str]],
        workers: Workers,
    ) -> None:
        self.part = part
        self.transport = transport
        self.fragments = [[name for name in names if name in part.shards] for names in fragments]
        self._workers = workers
        held = [index for index, names in enumerate(self.fragments) if names]
        self._place = {index: place for place, index in enumerate(held)}
        self._sync = ReplicaSync(
            {name: shard.tensor for name, shard in part.shards.items()},
            transport,
            settings,
            fragments=[self.fragments[index] for index in held],
            agree=lambda flag: all_say(workers, flag),
        )
        self.counts = [0] * len(fragments)
        self._votes: dict[int, deque[tuple[Ballot, Flight]]] = {index: deque() for index in range(len(fragments))}

    @property
    def rows(self) -> ReplicaSync:
        """The sync of the rows this worker owns, with the fragments it owns anything of."""
        return self._sync

    @property
    def round(self) -> int:
        """Outer steps that every fragment has made."""
        return min(self.counts)

    def held_tensors(self) -> dict[str, list[Tensor]]:
        """Every tensor this worker keeps between rounds, by what it is for."""
        return self._sync.held_tensors()

    def digest(self) -> str:
        """xxh3-128 over the digests of the workers in their order; equal on all replicas. Collective."""
        return combined_digest(self._workers.gather(bytes.fromhex(self._sync.digest())))

    def anchor(self) -> dict[str, Tensor]:
        """The agreed parameters, by name, of the rows this worker owns."""
        return self._sync.anchor()

    def launch(
        self, index: int, *, weight: float = 1.0, present: bool = True, adopts: bool = True, follow: bool = False
    ) -> None:
        """As `ReplicaSync.launch`, once all workers know whether what all of them hold is finite."""
        if index in self._place:
            self._sync.launch(self._place[index], weight=weight, present=present, adopts=adopts, follow=follow)
            return
        finite = all_say(self._workers, True)
        number = self.counts[index] + len(self._votes[index]) + 1
        self.vote(index, Ballot(number, _NOTHING, weight, finite, present))

    def vote(self, index: int, ballot: Ballot) -> None:
        """Show `ballot` for a fragment of which this worker owns nothing."""
        self._votes[index].append((ballot, self.transport.launch(ballot.pack(), merge.weigh, ())))

    def votes(self, index: int) -> list[Ballot]:
        """Those shown for fragment `index` whose round has not landed."""
        return [ballot for ballot, _ in self._votes[index]]

    def apply(self, index: int, *, step: int, follow: bool = False) -> RoundReport:
        """As `ReplicaSync.apply`; afterwards every worker holds all it computes with. Collective."""
        if index in self._place:
            own = self._sync.apply(self._place[index], step=step, follow=follow)
        else:
            own = self._hear(index)
        self.counts[index] += any(own.weights) and not follow
        self.part.model.gather_shards_()
        return self._of_replica(replace(own, fragment=index, round=self.counts[index]))

    def _hear(self, index: int) -> RoundReport:
        _, flight = self._votes[index].popleft()
        ballots = flight.ballots()
        weights = merge.weigh(ballots)
        gram = torch.zeros(len(weights), len(weights), dtype=torch.float64)
        return RoundReport(index, 0, weights, merge.refused(ballots), 0, merge.geometry(gram, weights), _NOTHING.hex())

    def _of_replica(self, own: RoundReport) -> RoundReport:
        """What the round was for the replica: bytes, inner products and digests of all its workers together."""
        told = [_unpack(payload, len(own.weights)) for payload in self._workers.gather(_pack(own))]
        grams = [gram for _, _, gram in told if gram is not None]
        return replace(
            own,
            payload_bytes=sum(sent for _, sent, _ in told),
            geometry=merge.geometry(sum(grams[1:], start=grams[0]), own.weights) if len(grams) == len(told) else None,
            digest=combined_digest([digest for digest, _, _ in told]),
        )


def combined_digest(digests: Sequence[bytes]) -> str:
    """Of a replica, from those of its workers in their order: 32 hex digits.

    >>> combined_digest([b"0" * 16, b"1" * 16])
    '28e03a081a5158d424182e335bc0c398'
    """
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


_HEAD = struct.Struct("<16sq?")


def _pack(report: RoundReport) -> bytes:
    geometry = report.geometry
    gram = _gram(geometry) if geometry is not None else [0.0] * len(report.weights) ** 2
    head = _HEAD.pack(bytes.fromhex(report.digest), report.payload_bytes, geometry is not None)
    return head + struct.pack(f"<{len(gram)}d", *gram)


def _unpack(payload: bytes, num_replicas: int) -> tuple[bytes, int, Tensor | None]:
    digest, sent_bytes, measured = _HEAD.unpack_from(payload)
    gram = torch.tensor(struct.unpack_from(f"<{num_replicas**2}d", payload, _HEAD.size), dtype=torch.float64)
    return digest, sent_bytes, gram.view(num_replicas, num_replicas) if measured else None


def _gram(geometry: Geometry) -> list[float]:
    """The inner products that norms and cosines came from; 0 between those of which one did not count."""
    norms, cosines = geometry.norms, geometry.cosines
    return [
        left * left if i == j else left * right * (cosines[i][j] or 0.0)
        for i, left in enumerate(norms)
        for j, right in enumerate(norms)
    ]


# --- when to stop


_SAID = struct.Struct("<?q")
_NEVER = -1


class WorkerStopper:
    """One worker's part in stopping together: the first worker of each replica talks to the other replicas.

    The workers of a replica must stop after one step, or those who went on would wait for ever for the others:

        worker 0 is told to stop after step 15, proposes 15 and waits
        worker 1 was told an instant later, when it had looked already: it is in step 16, waiting for worker 0

    So after every step each says whether it was told, and hears of all.

    signals: what this process was told. speaker: of the first worker, how it agrees with the other replicas, and the
    signals that it looks at: another worker may have been told first.
    """

    def __init__(self, workers: Workers, signals: Signals, *, speaker: tuple[Stopper, Signals] | None) -> None:
        assert (speaker is not None) == (workers.index == 0), "the first worker speaks for the replica"
        self._workers = workers
        self._signals = signals
        self._speaker = speaker

    def before_sync(self, step: int, *, needs: int | None = None) -> None:
        if self._speaker is not None:
            self._speaker[0].before_sync(step, needs=needs)

    def after_sync(self, step: int) -> None:
        if self._speaker is not None:
            self._speaker[0].after_sync(step)

    def stop_after(self, step: int) -> int | None:
        answers = self._ask(step)
        if any(told for told, _ in answers):
            if self._speaker is not None:
                self._speaker[1].stop()
            answers = self._ask(step)  # the first worker comes back with what the replicas agreed on
        stop = answers[0][1]
        return None if stop == _NEVER else stop

    def _ask(self, step: int) -> list[tuple[bool, int]]:
        agreed = None if self._speaker is None else self._speaker[0].stop_after(step)
        told = self._signals.received is not None
        answers = self._workers.gather(_SAID.pack(told, _NEVER if agreed is None else agreed))
        return [_SAID.unpack(answer) for answer in answers]
