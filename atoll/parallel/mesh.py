"""How the workers of one replica are laid out: the axes `data` and `stage`.

                     stage 0     stage 1     stage 2
    data 0          worker 0    worker 2    worker 4
    data 1          worker 1    worker 3    worker 5

Workers of one *column* hold the same layers and average gradients at every step, so they have neighbouring ranks (one
machine, where there is a choice); workers of one *row* hand activations on, which is little.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from atoll.errors import ConfigError

DATA, STAGE = "data", "stage"


@dataclass(frozen=True)
class ReplicaMesh:
    """The workers of one replica, and where this process stands among them.

    device_mesh: has the two axes `data` and `stage`; a slice of a larger mesh will do. device: holds this worker's
    tensors.
    """

    device_mesh: DeviceMesh
    device: torch.device

    @property
    def num_data(self) -> int:
        return self.device_mesh[DATA].size()

    @property
    def num_stages(self) -> int:
        """Workers a pipeline spans; each may hold several stages of the model."""
        return self.device_mesh[STAGE].size()

    @property
    def data(self) -> int:
        """This worker's place on the axis `data`."""
        return self.device_mesh.get_local_rank(DATA)

    @property
    def stage(self) -> int:
        """This worker's place on the axis `stage`."""
        return self.device_mesh.get_local_rank(STAGE)

    @property
    def data_axis(self) -> DeviceMesh:
        return self.device_mesh[DATA]

    @property
    def data_group(self) -> dist.ProcessGroup:
        return self.device_mesh.get_group(DATA)

    @property
    def stage_group(self) -> dist.ProcessGroup:
        return self.device_mesh.get_group(STAGE)

    @property
    def worker(self) -> int:
        """This worker's number in the replica."""
        return worker_at(self.data, self.stage, num_data=self.num_data)

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all workers of the replica, in fp64 and in a fixed order.

        Every worker gets the same bits, so that a decision taken from them is the same everywhere.
        """
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        for group in (self.data_group, self.stage_group):
            total = _sum_in_order(total, group)
        return [float(value) for value in total]

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set on any worker of the replica: the one way to skip or to stop."""
        return self.sum(float(flag))[0] > 0


def worker_at(data: int, stage: int, *, num_data: int) -> int:
    """Number of the worker at a place of the mesh.

    >>> [worker_at(data, stage, num_data=2) for stage in range(3) for data in range(2)]
    [0, 1, 2, 3, 4, 5]
    """
    return stage * num_data + data


def build_mesh(num_data: int, num_stages: int, *, device: torch.device) -> ReplicaMesh:
    """The mesh of a replica whose workers are the default process group. Collective: all of them call it.

    Raises ConfigError when the axes do not multiply to the number of workers.
    """
    workers = dist.get_world_size()
    if num_data * num_stages != workers:
        fitting = f"data={workers // num_stages}" if workers % num_stages == 0 else f"pipeline_stages={workers}, data=1"
        raise ConfigError(
            f"data={num_data} x pipeline_stages={num_stages} is {num_data * num_stages} workers, and the replica has "
            f"{workers}. Use {fitting}, or start {num_data * num_stages} workers."
        )
    ranks = torch.arange(workers).reshape(num_stages, num_data).T.contiguous()  # [data, stage]
    return ReplicaMesh(DeviceMesh(device.type, ranks, mesh_dim_names=(DATA, STAGE)), device)


def _sum_in_order(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value, group=group)
    return torch.stack(parts).sum(0) if len(parts) < 3 else sum(parts[1:], start=parts[0])
