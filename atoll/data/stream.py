"""The stream of batches one replica trains on, with a position that is saved and restored in O(1).

    position k  ->  epoch k // n, sample permute(k % n) of that epoch       n sequences in the shard

The order is computed and not stored, so that going to sample 10^7 costs what going to sample 1 does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
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
        self._position += batch_size
        return self.read(np.arange(self._position - batch_size, self._position))

    def read(self, positions: NDArray[np.int64]) -> Tensor:
        """The sequences at `positions` of the endless order, wherever the stream itself is."""
        epochs, samples = np.divmod(positions, self.num_examples)
        orders = [self._order(int(epoch), samples[epochs == epoch]) for epoch in np.unique(epochs)]
        return self._shard.packed.read(self._shard.rows[np.concatenate(orders)])

    def state_dict(self) -> State:
        return {"position": self._position, **self._identity}

    def load_state_dict(self, state: State) -> None:
        check_identity(state, self._identity)
        self._position = read_count(state, "position")

    def _order(self, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        key = permutation_key(self._identity["seed"], self._identity["replica"], epoch)
        return permute(samples, self.num_examples, key=key)


class LeasedStream:
    """A stream that reads only what was leased to it: ranges of positions in one order that all replicas share.

    Taken in the order they were leased. `used` are the ranges read since `settle` was last called, for whoever keeps
    account of them.
    """

    def __init__(self, order: ShardStream) -> None:
        self._order = order
        self._leased: list[tuple[int, int]] = []
        self._used: list[tuple[int, int]] = []

    @property
    def num_examples(self) -> int:
        return self._order.num_examples

    @property
    def remaining(self) -> int:
        """Samples leased and not read."""
        return sum(stop - start for start, stop in self._leased)

    @property
    def used(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._used)

    @property
    def leased(self) -> tuple[tuple[int, int], ...]:
        """Everything that is this stream's and not settled: read or not."""
        return (*self._used, *self._leased)

    def lease(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Add ranges [start, stop) to what may be read."""
        self._leased.extend(ranges)

    def upcoming(self, samples: int) -> list[tuple[int, int]]:
        """The ranges that the next `samples` samples will be read from."""
        ranges, missing = [], samples
        for start, stop in self._leased:
            if missing:
                ranges.append((start, min(stop, start + missing)))
                missing -= ranges[-1][1] - start
        return ranges

    def settle(self) -> tuple[tuple[int, int], ...]:
        """What was read goes into somebody's account: returned, and no longer among `used`."""
        used, self._used = self.used, []
        return used

    def owe(self, used: Iterable[tuple[int, int]]) -> None:
        """What `settle` returned comes back: it was read, and is in nobody's account."""
        self._used = [*used, *self._used]

    def give_up(self) -> None:
        """Forget every range: they have been leased to somebody else."""
        self._leased.clear()
        self._used.clear()

    def next_batch(self, batch_size: int) -> Tensor:
        check_batch_size(batch_size, self.num_examples, replica=0)
        assert self.remaining >= batch_size, "a replica asks for its lease before it reads"
        return self._order.read(np.concatenate([np.arange(*self._take(1)) for _ in range(batch_size)]))

    def _take(self, samples: int) -> tuple[int, int]:
        start, stop = self._leased[0]
        taken = (start, min(stop, start + samples))
        if taken[1] == stop:
            self._leased.pop(0)
        else:
            self._leased[0] = (taken[1], stop)
        self._note(taken)
        return taken

    def _note(self, taken: tuple[int, int]) -> None:
        if self._used and self._used[-1][1] == taken[0]:
            self._used[-1] = (self._used[-1][0], taken[1])
        else:
            self._used.append(taken)

    def state_dict(self) -> State:
        return {"leased": [list(r) for r in self._leased], "used": [list(r) for r in self._used]}

    def load_state_dict(self, state: State) -> None:
        self._leased = [(int(start), int(stop)) for start, stop in state["leased"]]
        self._used = [(int(start), int(stop)) for start, stop in state["used"]]


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
