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


def settle(before: State, after: State, *, counted: bool) -> State:
    """What to keep of a compressor's state after a round, given the states before and after it.

    The shared part, equal on all replicas, moves on with every committed round; what a replica owes (keys that begin
    with "own.") only if its contribution counted.
    """
    if counted:
        return after
    own = {key: value for key, value in before.items() if key.startswith("own.")}
    return {key: value for key, value in after.items() if not key.startswith("own.")} | own
