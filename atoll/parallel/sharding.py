"""Which worker of a replica holds, and which owns, which rows of a parameter.

Between replicas each parameter travels once: of the workers that hold it, each sends the rows it *owns*. Rows are whole
(a shard of a matrix is a matrix), consecutive, and every row of every parameter has exactly one owner.

    shard       every worker of the axis `data` holds only its rows (FSDP2), and owns those
    replicate   every worker holds all rows, owns an even share, and fetches the others' after an outer step
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from atoll.exchange import slice_bounds
from atoll.parallel.mesh import ReplicaMesh

Sharding = Literal["replicate", "shard"]
BUCKET_BYTES = 32 << 20  # gradients and rows move in buckets: a few large messages, and little memory beside them


@dataclass(frozen=True)
class Shard:
    """The rows of one parameter that a worker owns.

    tensor: those rows, in the storage of the parameter itself: what is written here, the model computes with.
    start, stop: their range in the whole parameter, flattened row-major. full_shape: of the whole parameter.
    """

    tensor: Tensor
    start: int
    stop: int
    full_shape: torch.Size

    @property
    def flat_range(self) -> tuple[int, int]:
        return self.start, self.stop

    def part(self, start: int, stop: int) -> Tensor:
        """The elements [start, stop) of the whole parameter, which lie in this shard, as a flat view.

        >>> Shard(torch.tensor([[4, 5], [6, 7]]), 4, 8, torch.Size([5, 2])).part(5, 7)
        tensor([5, 6])
        """
        assert self.start <= start <= stop <= self.stop, f"[{start}, {stop}) is not in [{self.start}, {self.stop})"
        return self.tensor.view(-1)[start - self.start : stop - self.start]


def shard_module_(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: ReplicaMesh,
    *,
    mixed_precision: torch.dtype | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Give each worker of the axis `data` only its rows of `module`'s parameters (FSDP2).

    blocks: the layers of `module`; whole ones are gathered one at a time while they compute. mixed_precision: dtype of
    the gathered parameters and of the arithmetic; the rows, their gradients and their sums stay fp32.
    reshard_after_forward: gather a second time for the backward, which costs traffic and saves memory.

    Names are as before; parameters are `DTensor`s from here on, so make the optimizer afterwards.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=mixed_precision, reduce_dtype=torch.float32 if mixed_precision is not None else None
    )
    for part in (*blocks, module):
        fully_shard(part, mesh=mesh.data_axis, mp_policy=policy, reshard_after_forward=reshard_after_forward)


def checkpoint_activations_(blocks: Iterable[nn.Module]) -> None:
    """Keep only the inputs of `blocks` for the backward, which computes the rest once more. Names stay as they are."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def drop_gathered_(module: nn.Module) -> None:
    """Drop whole parameters that FSDP kept from the last forward: those rows were or will be written to."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


@torch.no_grad()
def average_gradients_(params: Iterable[nn.Parameter], mesh: ReplicaMesh) -> None:
    """Replace the gradients of replicated parameters by their mean over the axis `data`; FSDP averages its own."""
    if mesh.num_data == 1:
        return
    grads = [param.grad for param in params if param.grad is not None and not isinstance(param, DTensor)]
    for bucket in _buckets(grads):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        dist.all_reduce(flat, group=mesh.data_group)
        flat.div_(mesh.num_data)
        _spread(flat, bucket)


def local_shards(tensors: Mapping[str, Tensor], mesh: ReplicaMesh) -> dict[str, Shard]:
    """The rows of each tensor that this worker owns among those of the axis `data`; of some it may own none.

    tensors: parameters by their names in the whole model, tied ones once, or state of their shapes.
    """
    return {
        name: _sharded_rows(tensor) if isinstance(tensor, DTensor) else _even_rows(tensor, mesh.data, mesh.num_data)
        for name, tensor in tensors.items()
    }


def held_shards(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """The rows of each tensor that this worker holds, whether or not it owns them."""
    return {
        name: _sharded_rows(tensor) if isinstance(tensor, DTensor) else _even_rows(tensor, 0, 1)
        for name, tensor in tensors.items()
    }


@torch.no_grad()
def gather_shards_(tensors: Mapping[str, Tensor], mesh: ReplicaMesh) -> None:
    """Make replicated tensors whole again after each worker changed the rows it owns. Collective on the axis `data`.

    Sharded ones need nothing: the next forward gathers them.
    """
    whole = [tensor for tensor in tensors.values() if not isinstance(tensor, DTensor)]
    if mesh.num_data == 1:
        return
    for owner in range(mesh.num_data):
        rows = [_even_rows(tensor, owner, mesh.num_data).tensor for tensor in whole]
        source = dist.get_global_rank(mesh.data_group, owner)
        for bucket in _buckets([part for part in rows if part.numel()]):
            flat = torch.cat([part.reshape(-1) for part in bucket])
            dist.broadcast(flat, src=source, group=mesh.data_group)
            if owner != mesh.data:
                _spread(flat, bucket)


def local_rows(tensor: Tensor) -> Tensor:
    """What this worker holds of a parameter, a gradient or an optimizer's state, sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _even_rows(tensor: Tensor, worker: int, num_workers: int) -> Shard:
    assert tensor.is_contiguous(), "rows of a parameter that is not contiguous are no range of it"
    values = tensor.detach() if tensor.dim() else tensor.detach().view(1)
    bounds = slice_bounds(values.shape[0], num_workers)
    width = values[:1].numel()
    rows = values[bounds[worker] : bounds[worker + 1]]
    return Shard(rows, bounds[worker] * width, bounds[worker + 1] * width, tensor.shape)


def _sharded_rows(tensor: DTensor) -> Shard:
    local = tensor.to_local().detach()
    axis = tensor.device_mesh
    first = min(tensor.shape[0], axis.get_local_rank() * -(-tensor.shape[0] // axis.size()))  # as `torch.chunk` cuts
    start = first * (tensor.numel() // tensor.shape[0])
    return Shard(local, start, start + local.numel(), tensor.shape)


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, in lists of some `BUCKET_BYTES`."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(part.nbytes for part in bucket) + tensor.nbytes > BUCKET_BYTES
        if bucket and (full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _spread(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
