"""The stream of batches one replica trains on, with a position that is saved and restored in O(1).

    position k  ->  epoch k // n, sample permute(k % n) of that epoch       n sequences in the shard

The order is computed and not stored, so that going to sample 10^7 costs what going to sample 1 does.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch import Tensor

from atoll.data.permutation import permutation_key, permute
from atoll.data.shards import Shard
from atoll.errors import DataError

State = dict[str, Any]


class TokenStream(Protocol):
    """Batches without end. The state is JSON and of fixed size; the batch after a restore is the one that was next."""

    @property
    def num_examples(self) -> int:
        """Sequences in the replica's shard."""
        ...

    def next_batch(self, batch_size: int) -> Tensor:
        """The next sequences, int64 [batch_size, sequence_length]."""
        ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None:
        """Go to a saved position. Raises `DataError` where the state belongs to other data."""
        ...


class ShardStream:
    """Every sequence of a shard once an epoch, each epoch in another order.

    identity: what must be equal for a position to mean the same samples (digest, sequence_length, seed, shard, replica,
    num_replicas); it is part of the state and checked when one is loaded.
    """

    def __init__(self, shard: Shard, *, identity: State) -> None:
        self._shard = shard
        self._identity = identity
        self._position = 0

    @property
    def num_examples(self) -> int:
        return self._shard.num_examples

    def next_batch(self, batch_size: int) -> Tensor:
        check_batch_size(batch_size, self.num_examples, replica=self._identity["replica"])
        positions = np.arange(self._position, self._position + batch_size)
        self._position += batch_size
        epochs, samples = np.divmod(positions, self.num_examples)
        orders = [self._order(int(epoch), samples[epochs == epoch]) for epoch in np.unique(epochs)]
        return self._shard.packed.read(self._shard.rows[np.concatenate(orders)])

    def state_dict(self) -> State:
        return {"position": self._position, **self._identity}

    def load_state_dict(self, state: State) -> None:
        check_identity(state, self._identity)
        self._position = read_count(state, "position")

    def _order(self, epoch: int, samples: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        key = permutation_key(self._identity["seed"], self._identity["replica"], epoch)
        return permute(samples, self.num_examples, key=key)


def check_batch_size(batch_size: int, num_examples: int, *, replica: int) -> None:
    """Raise `DataError` where a batch would hold a sequence twice, or nothing."""
    if not 1 <= batch_size <= num_examples:
        raise DataError(
            f"batch_size={batch_size} is not between 1 and the {num_examples} sequences in the shard of replica "
            f"{replica}: a batch holds no sequence twice.\nUse batch_size={num_examples} or less, fewer replicas, a "
            "shorter sequence_length, or more text (data.source, data.max_bytes)."
        )


def check_identity(state: State, identity: State) -> None:
    """Raise `DataError`, naming what differs, where `state` was saved on other data."""
    wrong = [
        f"{key} {state.get(key)!r} there, {value!r} here" for key, value in identity.items() if state.get(key) != value
    ]
    if wrong:
        raise DataError(
            f"the saved data position belongs to other data: {'; '.join(wrong)}.\n"
            "Resume with the data settings and the corpus of the saved run, or start a new run."
        )


def read_count(state: State, key: str) -> int:
    """A count from a saved state. Raises `DataError` where it is none."""
    value = state.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise DataError(
            f"the saved data position is not whole: {key}={value!r} is not a count. Use an older checkpoint."
        )
    return value
