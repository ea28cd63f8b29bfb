"""Memory by state: counted from the tensors that are really held, and foretold from the layout of a replica.

state             bytes a parameter
weights           4     fp32, of the layers (or rows) that a worker computes with
gradients         4
inner optimizer   8     Adam's two moments; SGD has none
anchor            4     and all below: of the rows that a worker owns, each once a replica
outer state       4     momentum; Adam has two
base              4     where progress is owed that no launch has taken
in flight         4     where rounds land after they were launched
compressor        4     residual of error feedback (2 in bf16), and warm starts of low rank
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from atoll.algo.adopt import ADOPT_RULES
from atoll.compress import Feedback, LowRank, build_compressor
from atoll.parallel.sharding import local_rows
from atoll.train.config import TrainConfig
from atoll.train.layout import Layout
from atoll.train.replica import Member

if TYPE_CHECKING:
    from atoll.train.workers import Workers

INNER = ("weights", "gradients", "inner optimizer")
ON_HOST = ("anchor", "outer state", "base", "in flight", "compressor")  # where outer_state=host
MOMENTS = {"adamw": 2, "sgd": 0}
OUTER_TENSORS = {"nesterov": 1, "momentum": 1, "sgd": 0, "adam": 2}
SHOWN_WORKERS = 8
_JSON_BYTES = 1024


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
    params = [local_rows(param) for param in replica.trainable().values()]
    states: dict[str, Iterable[object]] = {
        "weights": params,
        "gradients": [param.grad for param in replica.trainable().values() if param.grad is not None],
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


# --- of a replica of many workers


def predict_memory(layout: Layout, stage: int, data: int = 0) -> dict[str, int]:
    """Bytes by state that the worker at a place of the mesh holds, once a round is in flight. Activations excepted."""
    config = layout.config
    held = _numel(layout.held(stage).values())
    owned = _numel(layout.owned(stage, data).values())
    outer = {
        "anchor": 4 * owned,
        "outer state": 4 * OUTER_TENSORS[config.outer_optimizer] * owned,
        "base": 4 * owned * _keeps_base(config),
        "in flight": round(4 * owned * _rounds_in_flight(config)),
        "compressor": _compressor_bytes(config, layout.owned(stage, data).values(), owned),
    }
    inner = {"weights": 4 * held, "gradients": 4 * held, "inner optimizer": 4 * MOMENTS[config.optimizer] * held}
    return inner | {name: size for name, size in outer.items() if size}


def describe_workers(layout: Layout, member: Member, workers: Workers) -> list[str]:
    """What each worker holds now, beside what was foretold: a line a worker, or the fullest of many. Collective."""
    own = json.dumps(memory_by_state(member).bytes_by_state).encode().ljust(_JSON_BYTES)
    return describe_counted(layout, [json.loads(text) for text in workers.gather(own)])


def describe_counted(layout: Layout, counted: Sequence[Mapping[str, int]]) -> list[str]:
    """As `describe_workers`, of what all workers have counted, by state."""
    num_data = layout.config.data_workers
    lines = [
        _worker_line(worker, held, predict_memory(layout, worker // num_data, worker % num_data), num_data=num_data)
        for worker, held in enumerate(counted)
    ]
    if len(lines) <= SHOWN_WORKERS:
        return lines
    fullest = max(range(len(counted)), key=lambda worker: sum(counted[worker].values()))
    return [f"{lines[fullest]} (the fullest of {len(lines)})"]


def _worker_line(worker: int, held: Mapping[str, int], foretold: Mapping[str, int], *, num_data: int) -> str:
    """
    >>> _worker_line(3, {"weights": 2_000_000}, {"weights": 2_000_000, "in flight": 1_000_000}, num_data=2)
    'memory of worker 3 (stage 1, data 1), MB of MB foretold: weights 2.0/2.0, in flight 0.0/1.0 = 2.0/3.0'
    """
    names = [*foretold, *(name for name in held if name not in foretold)]
    parts = ", ".join(f"{name} {held.get(name, 0) / 1e6:.1f}/{foretold.get(name, 0) / 1e6:.1f}" for name in names)
    total = f"{sum(held.values()) / 1e6:.1f}/{sum(foretold.values()) / 1e6:.1f}"
    place = f"stage {worker // num_data}" + (f", data {worker % num_data}" if num_data > 1 else "")
    return f"memory of worker {worker} ({place}), MB of MB foretold: {parts} = {total}"


def _keeps_base(config: TrainConfig) -> bool:
    """Whether a replica measures its progress from a place of its own: see `OuterSettings.owes_unsent`."""
    rule = ADOPT_RULES[config.resolved_adopt](config.alpha, config.resolved_carry_share)
    return config.resolved_delay > 0 and rule.keeps_unsent


def _rounds_in_flight(config: TrainConfig) -> float:
    """Copies of the model that are in flight at most; of streaming, fragments that are at once."""
    if config.resolved_delay == 0:
        return 0
    every = config.inner_steps / config.fragments
    return min(1.0, math.ceil(config.resolved_delay / every) / config.fragments)


def _compressor_bytes(config: TrainConfig, shapes: Iterable[tuple[int, ...]], numel: int) -> int:
    compressor = build_compressor(config.compressor, config.compressor_options)
    residual = numel * compressor.residual_dtype.itemsize if isinstance(compressor, Feedback) else 0
    inner = compressor.inner if isinstance(compressor, Feedback) else compressor
    if not isinstance(inner, LowRank):
        return residual
    return residual + sum(4 * inner.rank * shape[1] for shape in shapes if inner.factors(shape))


def _numel(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _bytes(tensors: Iterable[Any]) -> int:
    local = [local_rows(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)
