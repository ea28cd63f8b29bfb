"""Memory by state, counted from the tensors that are really held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from atoll.train.replica import Member


@dataclass(frozen=True)
class Memory:
    """Bytes held by one replica, by state, and the parameters they are held for."""

    num_parameters: int
    bytes_by_state: Mapping[str, int]

    @property
    def bytes_a_parameter(self) -> float:
        return sum(self.bytes_by_state.values()) / self.num_parameters


def memory_by_state(member: Member) -> Memory:
    """Count what `member` holds now: inner state (weights, gradients, optimizer) and outer state."""
    replica = member.replica
    params = list(replica.trainable().values())
    states: dict[str, Iterable[object]] = {
        "weights": params,
        "gradients": [param.grad for param in params if param.grad is not None],
        "inner optimizer": [value for state in replica.optimizer.state.values() for value in state.values()],
        **member.sync.held_tensors(),
    }
    return Memory(sum(param.numel() for param in params), {name: _bytes(held) for name, held in states.items()})


def format_memory(memory: Memory) -> str:
    """One line, in bytes a parameter.

    >>> format_memory(Memory(1000, {"weights": 4000, "gradients": 4000}))
    'memory: weights 4.0 + gradients 4.0 = 8.0 bytes a parameter (0.0 MB)'
    """
    parts = " + ".join(f"{name} {held / memory.num_parameters:.1f}" for name, held in memory.bytes_by_state.items())
    total = sum(memory.bytes_by_state.values())
    return f"memory: {parts} = {memory.bytes_a_parameter:.1f} bytes a parameter ({total / 1e6:,.1f} MB)"


def _bytes(tensors: Iterable[object]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))
