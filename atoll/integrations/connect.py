"""How a process that was started by somebody else finds the other replicas.

torch.distributed is up             its default group, or the one that was named
torchrun's environment is there     a group made of it, and taken down again at the end
neither                             one replica alone: the outer loop still runs (Lookahead, SNOO)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from atoll.comm.base import Transport
from atoll.comm.local import LocalGroup
from atoll.comm.torchdist import TorchDistTransport
from atoll.errors import ConfigError, TransportError

ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


@contextmanager
def connection(
    *, transport: Transport | None, group: dist.ProcessGroup | None, timeout_s: float, device: torch.device
) -> Iterator[Transport]:
    """This replica's end of the link to the others, for as long as the block lasts.

    transport, group: at most one; both are left as they are afterwards. device: of the model; it decides the backend of
    a group that is made here (NCCL for CUDA, gloo otherwise).
    """
    if transport is not None and group is not None:
        raise ConfigError(
            "transport and group were both given; a replica has one link to the others. Give one of them."
        )
    if transport is not None:
        yield transport
    elif dist.is_available() and dist.is_initialized():
        _refuse_outsider(group)
        yield TorchDistTransport(group, timeout_s=timeout_s)
    elif group is not None:
        raise ConfigError(
            "a group was given, but torch.distributed is not initialised in this process. "
            "Call torch.distributed.init_process_group first, or leave group out."
        )
    elif _launched_with_others():
        with _group_of_environment(timeout_s, device):
            made = TorchDistTransport(timeout_s=timeout_s)
            yield made
            exchange(made, b".")  # nobody leaves while another may still need the store
    else:
        yield LocalGroup(1).endpoints()[0]


def exchange(transport: Transport, payload: bytes) -> list[bytes]:
    """Hand a few bytes round, as many on every replica; returns those of all in replica order. Also a barrier."""
    return list(transport.launch(payload, _nobody_counts, ()).ballots())


def _nobody_counts(payloads: Sequence[bytes]) -> list[float]:
    return [0.0] * len(payloads)


def _refuse_outsider(group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_rank(group) < 0:
        raise ConfigError(
            f"process {dist.get_rank()} is not in the group it was given; only members can sync. "
            "Give each process the group it belongs to."
        )


def _launched_with_others() -> bool:
    """Whether torchrun's variables are there. Some of them without the rest is a mistake, not a lone replica."""
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    num_processes = os.environ.get("WORLD_SIZE", "1")
    if missing and num_processes != "1":
        raise ConfigError(
            f"WORLD_SIZE={num_processes} is set but {', '.join(missing)} is not, so the others cannot be found. "
            "Start with torchrun, or set all four, or unset WORLD_SIZE to train alone."
        )
    return not missing


@contextmanager
def _group_of_environment(timeout_s: float, device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL uses the current device, which is 0 on every process unless it is set
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        raise TransportError(
            f"replica {os.environ['RANK']} of {os.environ['WORLD_SIZE']} could not reach the others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: {str(error).splitlines()[0][:200]}"
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()
