"""A random order of n samples that costs no memory and no start: sample k of the order is computed from k.

A Feistel network is a permutation of the numbers of 2b bits whatever its round function is; walking on until a number
below n comes out makes it a permutation of [0, n). So a stream's whole state is one counter.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

NUM_ROUNDS = 6
MIN_HALF_BITS = 4  # fewer bits have too few permutations to be random
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def permutation_key(*parts: int | str) -> int:
    """A 64-bit key from seed, replica, epoch, ... : other parts, another order.

    >>> permutation_key(1, 2) != permutation_key(12)
    True
    """
    return xxhash.xxh3_64_intdigest("\0".join(map(str, parts)).encode())


def permute(indices: NDArray[np.int64], size: int, *, key: int) -> NDArray[np.int64]:
    """Where each of `indices` (any shape, in [0, size)) goes in the order that `key` names.

    >>> sorted(permute(np.arange(5), 5, key=7).tolist())
    [0, 1, 2, 3, 4]
    """
    half_bits = max(MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    round_keys = [np.uint64(xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"), seed=r)) for r in range(NUM_ROUNDS)]
    values = _feistel(np.asarray(indices).astype(np.uint64), half_bits, round_keys)
    outside = values >= size
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, round_keys)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, round_keys: list[np.uint64]) -> NDArray[np.uint64]:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << bits) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over the word; multiplication wraps at 2**64, which is meant."""
    values = (values ^ (values >> np.uint64(32))) * MULTIPLIER
    values = (values ^ (values >> np.uint64(29))) * MULTIPLIER
    return values ^ (values >> np.uint64(32))
