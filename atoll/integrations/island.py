"""A process that is an island of its own, for libraries that would join all of torchrun's processes to one world.

Accelerate, and with it the `Trainer` of transformers, reads the variables that torchrun sets and wraps the model in
DistributedDataParallel: gradients would be averaged at every step, over the slow link. Where it finds a process group,
all islands but the first believe that another process saves for them. `own_island` takes the variables out of the
environment, and `Island.link` leads to the other islands by a group that torch.distributed does not list.

    torchrun      RANK=1 WORLD_SIZE=2 MASTER_ADDR=...
    own_island                                         remembers them
    Accelerator                                        sees a world of one
    Island.link   meets the others at torchrun's store
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist

from atoll.comm.base import Transport
from atoll.comm.local import LocalGroup
from atoll.comm.torchdist import TorchDistTransport
from atoll.errors import ConfigError, TransportError
from atoll.integrations.connect import ENVIRONMENT, exchange
from atoll.train.through_host import ThroughHost

VISIBLE = "CUDA_VISIBLE_DEVICES"
VARIABLES = (
    *ENVIRONMENT,
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
)


class Island:
    """Which of the processes that torchrun started this one is; one alone where it was not torchrun.

    replica: from 0.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.replica = int(variables.get("RANK", "0"))
        self.num_replicas = int(variables.get("WORLD_SIZE", "1"))
        self._variables = dict(variables)
        self._store: dist.Store | None = None
        self._numbers = count()  # of links: what a group left in the store must not be found by the next

    def __repr__(self) -> str:
        return f"Island(replica={self.replica}, num_replicas={self.num_replicas})"

    @contextmanager
    def link(self, device: torch.device, *, timeout_s: float = 600.0) -> Iterator[Transport]:
        """The link to the other islands for as long as the block lasts, for `OuterSync(..., transport=link)`.

        It is gloo's, whatever `device` the model is on: what is sent is copied to the host. All islands enter and leave
        as often, in the same order. Left by an exception it waits for nobody. Raises TransportError.
        """
        if self.num_replicas == 1:
            yield LocalGroup(1).endpoints()[0]
            return
        transport: Transport = TorchDistTransport(self._meet(timeout_s), timeout_s=timeout_s)
        yield transport if device.type == "cpu" else ThroughHost(transport, device)
        exchange(transport, b".")  # nobody leaves while another may still need the store
        transport.close()

    def _meet(self, timeout_s: float) -> dist.ProcessGroup:
        timeout = timedelta(seconds=timeout_s)
        try:
            if self._store is None:
                with self._among_others():
                    self._store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
            store = dist.PrefixStore(f"atoll-{next(self._numbers)}", self._store)
            return dist.ProcessGroupGloo(store, self.replica, self.num_replicas, timeout)
        except (RuntimeError, ValueError) as error:
            place = ":".join(self._variables[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise TransportError(
                f"island {self.replica} of {self.num_replicas} could not reach the others at {place}: "
                f"{str(error).splitlines()[0][:200]}"
            ) from error

    @contextmanager
    def _among_others(self) -> Iterator[None]:
        """Within the block the environment is as torchrun made it."""
        os.environ.update(self._variables)
        try:
            yield
        finally:
            for name in self._variables:
                os.environ.pop(name, None)


def own_island(environment: MutableMapping[str, str] | None = None) -> Island:
    """Take this process out of torchrun's world. Call it before an Accelerator or TrainingArguments is made.

    Where the machine has several GPUs this process keeps one of them, by its place on the machine. A second call finds
    one process alone: keep what the first returned. environment: default os.environ.

    Raises ConfigError where CUDA is in use already and sees several GPUs, and where half of the variables are missing.

    >>> world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "HOME": "/root"}
    >>> own_island(world)
    Island(replica=1, num_replicas=2)
    >>> world
    {'HOME': '/root'}
    """
    environment = os.environ if environment is None else environment
    _refuse_half(environment)
    variables = {name: environment[name] for name in VARIABLES if name in environment}
    if int(variables.get("WORLD_SIZE", "1")) > 1:
        _keep_one_gpu(environment, int(variables.get("LOCAL_RANK", "0")))
    for name in variables:
        del environment[name]
    return Island(variables)


def _refuse_half(environment: Mapping[str, str]) -> None:
    missing = [name for name in ENVIRONMENT if name not in environment]
    if missing and environment.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} is set but {', '.join(missing)} is not, so the others cannot be "
            "found. Start with torchrun, or set all of them, or unset WORLD_SIZE to train alone."
        )


def _keep_one_gpu(environment: MutableMapping[str, str], local_rank: int) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return
    if torch.cuda.is_initialized():
        raise ConfigError(
            f"CUDA is in use already and sees {count} GPUs, so this process cannot keep to one of them. "
            "Call own_island() before anything is put on a GPU."
        )
    names = environment.get(VISIBLE, "").split(",") if environment.get(VISIBLE) else [str(n) for n in range(count)]
    environment[VISIBLE] = names[local_rank % len(names)]
