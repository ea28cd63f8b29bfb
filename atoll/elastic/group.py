"""Process groups of one attempt: gloo, bound to one address, met at a store that lives as long as the attempt.

A gloo group is dead after its first error, so every attempt builds its own: a few milliseconds on one machine, a few
round trips between several. The first participant holds the store; nothing of value is ever kept in it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from atoll.elastic.messages import Participant
from atoll.errors import TransportError


@dataclass
class Meeting:
    """The store of one attempt, held by its first participant. address, port: where the others find it."""

    store: dist.Store
    address: str
    port: int


def host_meeting(address: str, *, timeout_s: float) -> Meeting:
    """Open a store that listens on `address` alone, on a free port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    try:
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
    except (RuntimeError, dist.DistError) as error:
        raise TransportError(f"no store could be opened on {address}:{port}: {_first_line(error)}") from error
    return Meeting(store, address, port)


def join_meeting(address: str, port: int, *, timeout_s: float) -> dist.Store:
    """Connect to the store that the first participant holds."""
    try:
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, dist.DistError) as error:
        raise TransportError(f"the store at {address}:{port} was not reached: {_first_line(error)}") from error


def connect(
    store: dist.Store, participants: Sequence[Participant], *, member: str, attempt: int, address: str, timeout_s: float
) -> dist.ProcessGroup:
    """The group of an attempt, in the order of its participants; waits for all of them, `timeout_s` at most."""
    place = [participant.member for participant in participants].index(member)
    name, size = f"attempt-{attempt}", len(participants)
    return connect_counterparts(store, name, place, size, address=address, timeout_s=timeout_s)


def connect_counterparts(
    store: dist.Store, name: str, place: int, size: int, *, address: str, timeout_s: float
) -> dist.ProcessGroup:
    """The group called `name` of one process of each of `size` islands, in their order; waits for all of them."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._threads = 1
    try:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), place, size, options)
    except (RuntimeError, dist.DistError) as error:
        raise TransportError(f"those of {name} did not meet: {_first_line(error)}") from error


def hand_round(store: dist.Store, name: str, place: int, own: bytes, *, size: int, timeout_s: float) -> list[bytes]:
    """What each of `size` participants says under `name`, in their order; waits for all of them."""
    keys = [f"{name}/{number}" for number in range(size)]
    try:
        store.set(keys[place], own)
        store.wait(keys, timedelta(seconds=timeout_s))
        return [store.get(key) for key in keys]
    except (RuntimeError, dist.DistError) as error:
        raise TransportError(f"not all participants said their {name}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]
