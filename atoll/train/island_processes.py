"""The processes of an island of many workers, and how they find each other.

    one machine        the process that is to lead forks the others before it starts a thread, a channel to each
    several            torchrun started them: rank 0 leads, and says through torchrun's store where its channel is

Light to import.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atoll.elastic.crash import be_worker
from atoll.errors import AtollError, ConfigError, TransportError
from atoll.train.config import TrainConfig
from atoll.train.worker_channel import SECRET_BYTES, Channel, ChannelClosed, accept, pair, reach

if TYPE_CHECKING:
    import torch.distributed as dist

MEETING_S = 120.0  # for all workers of an island to be there, torch loaded
LOOK_S = 0.5  # between two looks whether the leader is there
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass
class Fellows:
    """The other workers of this process's island. store: where the workers meet; None where there is one worker."""

    channels: Mapping[int, Channel] = field(default_factory=dict)
    store: Any = None


def fork_followers(config: TrainConfig, follow: Callable[[int, Channel], None]) -> dict[int, Channel]:
    """Fork the other workers of this process's island; each runs `follow(index, channel)`. Returns their channels.

    Fork before any thread is started: what a thread holds at that moment would be held in the new process for ever.
    """
    ends = {index: pair() for index in range(1, config.num_workers)}
    sys.stdout.flush()
    for index in ends:
        if os.fork() == 0:
            _be_follower(index, ends, follow)
    for _, theirs in ends.values():
        theirs.close()
    return {index: ours for index, (ours, _) in ends.items()}


def _be_follower(
    index: int, ends: Mapping[int, tuple[Channel, Channel]], follow: Callable[[int, Channel], None]
) -> None:
    """In the new process, which never returns from here."""
    for number, (ours, theirs) in ends.items():
        ours.close()  # or the end of the leader would not be seen
        if number != index:
            theirs.close()
    be_worker(index)
    _end_with(os.getppid())
    channel, code = ends[index][1], 0
    try:
        follow(index, channel)
    except ChannelClosed:
        code = 1
    except BaseException as error:
        code = 1
        _tell(channel, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with(leader: int) -> None:
    """End this process when its parent is gone, also while it loads and nobody listens to the channel yet."""

    def watch() -> None:
        while os.getppid() == leader:
            time.sleep(LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, name="atoll-leader-watch", daemon=True).start()


def _tell(channel: Channel, error: BaseException) -> None:
    with suppress(ChannelClosed):
        channel.send({"broken": str(error) if isinstance(error, AtollError) else traceback.format_exc()})


def meet_here(channels: Mapping[int, Channel]) -> Fellows:
    """The leader's part, on one machine: open the store where the workers meet, and say where it is."""
    if not channels:
        return Fellows()
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for channel in channels.values():
        channel.send({"store": store.port})
    return Fellows(channels, store)


def meet_there(channel: Channel) -> dist.Store:
    """The others' part."""
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    message, _ = channel.receive()
    return dist.TCPStore("127.0.0.1", int(message["store"]), is_master=False)


# --- under torchrun


@dataclass(frozen=True)
class Rank:
    """What torchrun made this process."""

    index: int
    size: int


def torchrun_rank(config: TrainConfig) -> Rank:
    """Raises ConfigError unless torchrun started as many processes as the island has workers."""
    rank = Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if rank.size != config.num_workers:
        raise ConfigError(
            f"torchrun started {rank.size} processes, and an island of data_workers={config.data_workers} x "
            f"pipeline_stages={config.pipeline_stages} has {config.num_workers}.\n"
            f"Use --data-workers and --pipeline-stages such that they are {rank.size}."
        )
    return rank


def meet_by_torchrun(rank: Rank) -> tuple[Fellows, Channel | None]:
    """The channels of the leader, or this worker's channel to it, and the store where all meet."""
    import torch.distributed as dist

    store = next(dist.rendezvous("env://"))[0]
    if rank.size == 1:
        return Fellows(), None
    if rank.index == 0:
        with _listener() as (listener, address, port):
            secret = secrets.token_bytes(SECRET_BYTES)
            store.set("atoll/leader", f"{address} {port} {secret.hex()}")
            return Fellows(accept(listener, secret, count=rank.size - 1, timeout_s=MEETING_S), store), None
    address, port, secret_hex = store.get("atoll/leader").decode().split()
    channel = reach(address, int(port), bytes.fromhex(secret_hex), index=rank.index, timeout_s=MEETING_S)
    return Fellows({}, store), channel


@contextmanager
def _listener() -> Iterator[tuple[socket.socket, str, int]]:
    """A socket on the address by which torchrun's workers reach rank 0, and no other."""
    try:
        address = socket.getaddrinfo(os.environ["MASTER_ADDR"], None, type=socket.SOCK_STREAM)[0][4][0]
        family = socket.AF_INET6 if ":" in str(address) else socket.AF_INET
        with socket.create_server((str(address), 0), family=family) as listener:
            yield listener, str(address), listener.getsockname()[1]
    except OSError as error:
        raise TransportError(f"MASTER_ADDR={os.environ['MASTER_ADDR']} is no address of rank 0: {error}") from error


def deaf_to_interrupts() -> None:
    """A Ctrl-C on the terminal reaches every worker: the leader decides what comes of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
