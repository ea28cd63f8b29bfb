"""From documents to the sequences of each replica: hold out, pack, share out.

documents   |stdlib a|stdlib b|torch a|torch b|...        each ended by the end-of-text id
held out              ^^^^^^^^                            chosen by a hash of the text: never trained on
packed      |stdlib a|torch a|torch b|...                 one virtual run of tokens; nothing is copied
sequences   [0      ][1      ][2      ][3      ]          windows of sequence_length, no padding, the tail left out
shards      replica 0: 0, 3; replica 1: 1, 2              every sequence in exactly one shard
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.data.clusters import cluster_documents
from atoll.data.permutation import permutation_key, permute
from atoll.data.tokens import TokenStore
from atoll.errors import DataError

HELD_OUT_TOKENS = 2**22  # at most this many held-out tokens are packed for evaluation


class PackedDocuments:
    """Documents laid end to end as one virtual run of tokens, cut into sequences; read on demand from the store."""

    def __init__(self, store: TokenStore, documents: NDArray[np.int64], *, sequence_length: int) -> None:
        self._store = store
        self.sequence_length = sequence_length
        self.documents = documents
        self._ends = np.cumsum(store.lengths[documents])
        # adding this to a position in the run gives its position in the store, for each document
        self._shifts = store.begins[documents] - (self._ends - store.lengths[documents])

    @property
    def num_sequences(self) -> int:
        return int(self._ends[-1]) // self.sequence_length if len(self._ends) else 0

    def read(self, rows: NDArray[np.int64]) -> Tensor:
        """The sequences `rows` [num_rows] as int64 [num_rows, sequence_length]."""
        positions = rows[:, None] * self.sequence_length + np.arange(self.sequence_length)
        documents = np.searchsorted(self._ends, positions, side="right")
        return torch.from_numpy(self._store.take(positions + self._shifts[documents]))


@dataclass(frozen=True)
class Shard:
    """What one replica trains on: the sequences `rows` of `packed`."""

    packed: PackedDocuments
    rows: NDArray[np.int64]

    @property
    def num_examples(self) -> int:
        return len(self.rows)


def is_held_out(hashes: NDArray[np.uint64], percent: float) -> NDArray[np.bool_]:
    """Which documents are held out: those whose hash lies in the lowest `percent` of all 64-bit numbers.

    >>> is_held_out(np.array([0, 2**63], np.uint64), 10).tolist()
    [True, False]
    """
    return hashes < np.uint64(int(percent / 100 * 2**64))


def split_held_out(
    store: TokenStore, *, percent: float, sequence_length: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers of the documents to train on, in order, and of those held out, in order of their hash.

    A corpus so small that the hash holds out less than one sequence gives up more documents, in order of their hash,
    until there is one. Equal texts have equal hashes and stay on the same side.
    """
    order = np.argsort(store.hashes, kind="stable")
    hashes = store.hashes[order]
    enough = int(np.searchsorted(np.cumsum(store.lengths[order]), sequence_length)) + 1
    count = max(int(is_held_out(hashes, percent).sum()), min(enough, len(order)))
    count = int(np.searchsorted(hashes, hashes[count - 1], side="right"))
    return np.sort(order[count:]), order[:count]


def pack_held_out(store: TokenStore, documents: NDArray[np.int64], *, sequence_length: int) -> Tensor:
    """Held-out sequences as int64 [num_sequences, sequence_length]; at most about 4 million tokens of them."""
    packed = PackedDocuments(store, documents, sequence_length=sequence_length)
    limit = max(1, HELD_OUT_TOKENS // sequence_length)
    return packed.read(np.arange(min(packed.num_sequences, limit)))


def share_iid(packed: PackedDocuments, *, num_replicas: int, seed: int) -> list[Shard]:
    """Deal the sequences out at random: every replica gets the same number, but for one."""
    num_sequences = packed.num_sequences
    order = permute(np.arange(num_sequences), num_sequences, key=permutation_key(seed, "deal"))
    return [Shard(packed, np.sort(order[replica::num_replicas])) for replica in range(num_replicas)]


def share_by_domain(
    store: TokenStore, documents: NDArray[np.int64], *, num_replicas: int, sequence_length: int
) -> list[Shard]:
    """Give whole domains to the replicas, the largest first, each to the replica that holds the fewest tokens."""
    domain_ids = store.domain_ids[documents]
    sizes = np.bincount(domain_ids, weights=store.lengths[documents], minlength=len(store.domains)).astype(np.int64)
    present = [domain for domain, size in enumerate(sizes) if size]
    if num_replicas > len(present):
        names = ", ".join(store.domains[domain] for domain in present[:8])
        raise DataError(
            f"replicas={num_replicas} is more than the {len(present)} domains of the corpus ({names}); with "
            f"data.shard='domain' each replica has domains of its own.\n"
            f"Use at most {len(present)} replicas, or data.shard='cluster' or 'iid'."
        )
    owners = balance([int(sizes[domain]) for domain in present], num_replicas)
    owner_of = np.zeros(len(store.domains), np.int64)
    owner_of[present] = owners
    return _share_by_label(
        store, documents, labels=owner_of[domain_ids], num_replicas=num_replicas, sequence_length=sequence_length
    )


def share_by_cluster(
    store: TokenStore,
    documents: NDArray[np.int64],
    *,
    texts: Sequence[str],
    num_replicas: int,
    sequence_length: int,
    seed: int,
) -> list[Shard]:
    """Give each replica one of `num_replicas` k-means clusters of the documents; `texts` are their beginnings."""
    labels = cluster_documents(texts, num_clusters=num_replicas, seed=seed)
    return _share_by_label(store, documents, labels=labels, num_replicas=num_replicas, sequence_length=sequence_length)


def balance(sizes: Sequence[int], num_bins: int) -> list[int]:
    """The bin of each item, chosen largest first into the emptiest bin.

    >>> balance([5, 9, 4, 1], 2)
    [1, 0, 1, 0]
    """
    loads = [0] * num_bins
    bins = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        bins[item] = min(range(num_bins), key=lambda b: (loads[b], b))
        loads[bins[item]] += sizes[item]
    return bins


def _share_by_label(
    store: TokenStore,
    documents: NDArray[np.int64],
    *,
    labels: NDArray[np.int64],
    num_replicas: int,
    sequence_length: int,
) -> list[Shard]:
    """A shard a replica, of the documents whose label [num_documents] is its number."""
    packed = [
        PackedDocuments(store, documents[labels == replica], sequence_length=sequence_length)
        for replica in range(num_replicas)
    ]
    return [Shard(part, np.arange(part.num_sequences)) for part in packed]


def check_shards(shards: Sequence[Shard], *, sequence_length: int) -> None:
    """Raise `DataError` where a replica would have nothing to train on."""
    sizes = [shard.num_examples for shard in shards]
    if min(sizes) == 0:
        raise DataError(
            f"replicas={len(shards)} is more than the shards that can be filled: the training text makes {sum(sizes)} "
            f"sequences of sequence_length={sequence_length}, and replica {sizes.index(0)} would get none.\n"
            "Use fewer replicas, a shorter sequence_length, or more text (data.source, data.max_bytes)."
        )
