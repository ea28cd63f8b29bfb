"""What a compressor offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from atoll.exchange import Exchange, State


class Compressor(Protocol):
    """A way of averaging tensors over replicas with few bytes.

    elementwise: every element is treated alike and alone, so that a tensor may be cut into slices anywhere.
    """

    @property
    def elementwise(self) -> bool: ...

    def init(self, shape: Sequence[int]) -> State:
        """State kept between rounds for a tensor of `shape` (empty for most).

        A replica whose contribution did not count in a round keeps the state it had: what it owes is still owed.
        """
        ...

    def average(self, tensor: Tensor, state: State) -> Exchange:
        """Yield what must be averaged or gathered; return the mean (fp32, shape of `tensor`) and the next state."""
        ...

    def sent_bytes(self, shape: Sequence[int], *, num_replicas: int, replica: int) -> int:
        """Exact bytes `replica` sends to average one tensor of `shape`."""
        ...
