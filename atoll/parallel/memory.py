"""Bytes a worker holds for its part of the model: foretold from a plan, and counted.

    state          bytes a parameter
    parameters     4     fp32
    gradients      4     fp32, from the first backward on
    optimizer      8     Adam's two moments (4 for SGD with momentum, 0 without)

Sharded over the axis `data` all of these are divided by its size. For the time of a step come on top what the layers
keep for the backward (`activation_bytes` of a microbatch, times those `in_flight`), and the stage's whole parameters
while they are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from atoll.parallel.cut import Stage
from atoll.parallel.plan import StagePlan
from atoll.parallel.sharding import local_rows

BYTES_A_PARAMETER: dict[str, int] = {"parameters": 4, "gradients": 4, "optimizer": 8}


def predict_bytes(
    plan: StagePlan, worker: int, *, num_shards: int = 1, bytes_a_parameter: Mapping[str, int] = BYTES_A_PARAMETER
) -> dict[str, int]:
    """Bytes that a worker of the axis `stage` holds, by state.

    num_shards: workers of the axis `data` that share a stage's rows; 1 where they hold copies.
    bytes_a_parameter: of each state; outer state can be added to the table here.

    >>> plan = StagePlan("1f1b", 2, (range(0, 1), range(1, 2)), (100, 60))
    >>> predict_bytes(plan, 1, num_shards=2)
    {'parameters': 120, 'gradients': 120, 'optimizer': 240}
    """
    rows = -(-plan.parameters_of_worker(worker) // num_shards)
    return {state: size * rows for state, size in bytes_a_parameter.items()}


def count_bytes(params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes that this worker really holds, by the same states; the optimizer's step counters are left out."""
    grads = [param.grad for param in params.values() if param.grad is not None]
    moments = [
        value
        for param in params.values()
        for value in optimizer.state.get(param, {}).values()
        if isinstance(value, Tensor) and value.dim()
    ]
    return {"parameters": _bytes(params.values()), "gradients": _bytes(grads), "optimizer": _bytes(moments)}


def in_flight(schedule: str, worker: int, *, num_workers: int, microbatches: int) -> int:
    """Forwards of a stage whose backward is still to come, at most at once, on worker `worker` of the axis `stage`.

    A worker of an `interleaved` or `zero-bubble` schedule holds two stages of half the size.

    >>> [in_flight("1f1b", worker, num_workers=4, microbatches=8) for worker in range(4)]
    [4, 3, 2, 1]
    """
    later = num_workers - 1 - worker
    if schedule == "gpipe":
        return microbatches
    if schedule == "1f1b":
        return min(microbatches, later + 1)
    if schedule == "interleaved":
        return min(2 * microbatches, num_workers + 2 * later + 1)
    assert schedule == "zero-bubble", f"say here what {schedule} keeps"
    return min(2 * num_workers, microbatches + worker + 1)


def activation_bytes(stage: Stage, inputs: Tensor, tokens: Tensor) -> int:
    """Bytes that one microbatch leaves in a stage until its backward: what autograd saves, parameters excepted.

    inputs: token ids or hidden states, as the stage takes them. tokens: ids, for the loss of the last stage. Counted by
    a forward; random numbers and gradients are left as they were.
    """
    known = {param.untyped_storage().data_ptr() for param in stage.parameters()}
    saved: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    devices = [inputs.device] if inputs.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        outputs = stage(inputs)
        kept = stage.loss(outputs, tokens) if stage.is_last else outputs  # lives while the count is taken
    return sum(saved.values()) + (0 if stage.is_last else kept.nbytes)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_rows(tensor).nbytes for tensor in tensors)
