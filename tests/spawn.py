"""A process a replica, for tests: real gloo groups over loopback, ended whatever happens."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

KILLED = "killed"  # the result of a replica that ended without a word


def run_replicas(function: Callable[..., Any], num_replicas: int, *args: Any, timeout_s: float = 30.0) -> list[Any]:
    """What `function(replica, *args)` returns in a process a replica, joined by the default gloo group.

    function: importable at the top level of a module. A replica that a signal ended counts as `KILLED`. Raises
    AssertionError with the traceback of the first that raised, or when `timeout_s` is over; no process is left behind.

        assert run_replicas(some_module.rank_of, 3) == [0, 1, 2]
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    replicas = []
    for replica in range(num_replicas):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_work, args=(function, replica, num_replicas, store.port, theirs, args), daemon=True
        )
        process.start()
        theirs.close()
        replicas.append((process, ours))
    try:
        return _collect(replicas, time.monotonic() + timeout_s)
    finally:
        for process, ours in replicas:
            process.kill()
            process.join()
            ours.close()


def _collect(replicas: list[tuple[ForkServerProcess, Connection]], deadline: float) -> list[Any]:
    results: list[Any] = [KILLED] * len(replicas)
    waiting = {ours: replica for replica, (_, ours) in enumerate(replicas)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        assert ready, f"replicas {sorted(waiting.values())} were not done in time"
        for ours in ready:
            assert isinstance(ours, Connection)
            replica = waiting.pop(ours)
            try:
                done, result = pickle.loads(ours.recv_bytes())
            except EOFError:
                continue
            assert done, f"replica {replica} failed:\n{result}"
            results[replica] = result
    return results


def _work(
    function: Callable[..., Any], replica: int, num_replicas: int, port: int, pipe: Connection, args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        limit = timedelta(seconds=20)
        dist.init_process_group("gloo", store=store, rank=replica, world_size=num_replicas, timeout=limit)
        outcome = (True, function(replica, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(outcome))  # by value: the tensors' shared memory would end with this process
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.recv_bytes()  # nobody leaves while another may still need it
    os._exit(0)  # a group that lost a member may never let an orderly exit finish
