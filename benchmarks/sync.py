"""How long a round takes, against a bare gloo all_reduce of the same bytes.

    python benchmarks/sync.py [--parameters 100e6] [--replicas 2] [--repeats 5]

Replicas are processes on this machine, one torch thread each, joined over loopback. Each repetition times, one after
the other: one all_reduce of all parameters as one fp32 tensor; the round as the plain sequence of whole-tensor
operations; and one whole round of `ReplicaSync`: health check, ballots, pseudo-gradient, mean, inner products, Nesterov
step, adoption, digest. The slowest replica is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import xxhash
from torch import Tensor

from atoll.comm.torchdist import LAG, TorchDistTransport
from atoll.train.allocator import keep_freed_memory
from atoll.train.sync import BUCKET_ELEMENTS, OuterSettings, ReplicaSync

SIDE = 2048  # parameters are matrices of SIDE x SIDE, and one vector with the rest


def main() -> None:
    arguments = _arguments()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    mp.start_processes(_replica, (store.port, arguments), nprocs=arguments.replicas, start_method="forkserver")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=100_000_000)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-elements", type=int, default=BUCKET_ELEMENTS)
    parser.add_argument("--lag", type=int, default=LAG, help="beats between the phases of an exchange")
    return parser.parse_args()


def _replica(rank: int, port: int, arguments: argparse.Namespace) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(minutes=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.replicas, timeout=limit)
    params = _params(arguments.parameters)
    transport = TorchDistTransport(timeout_s=limit.total_seconds(), lag=arguments.lag)
    sync = ReplicaSync(params, transport, OuterSettings(bucket_elements=arguments.bucket_elements))
    flat = torch.randn(arguments.parameters)
    plain = PlainRound(params)
    bare, naive, whole = [], [], []
    for repeat in range(arguments.repeats + 1):
        bare.append(_slowest_s(lambda: dist.all_reduce(flat)))
        flat.div_(arguments.replicas)
        _train(params, rank)
        naive.append(_slowest_s(plain.run))
        _train(params, rank)
        whole.append(_slowest_s(lambda: _round(sync)))
        if rank == 0 and repeat:
            print(
                f"repetition {repeat} | all_reduce {bare[-1]:.3f} s | plain round {naive[-1]:.3f} s | "
                f"round {whole[-1]:.3f} s",
                flush=True,
            )
    if rank == 0:
        _summarise(bare[1:], naive[1:], whole[1:], arguments)  # the first of each touches fresh memory
    dist.barrier()
    transport.close()
    dist.destroy_process_group()


def _params(numel: int) -> dict[str, Tensor]:
    matrices, rest = divmod(numel, SIDE * SIDE)
    params = {f"matrix.{i}": torch.randn(SIDE, SIDE) for i in range(matrices)}
    return params | ({"vector": torch.randn(rest)} if rest else {})


def _train(params: dict[str, Tensor], rank: int) -> None:
    """Stands for the inner steps: replicas move apart."""
    for param in params.values():
        param.mul_(1 + 1e-3 * (rank + 1))


def _round(sync: ReplicaSync) -> None:
    sync.launch(0)
    sync.apply(0, step=1)


def _slowest_s(work: Callable[[], object]) -> float:
    """Seconds from a common start until the last replica is done."""
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


class PlainRound:
    """The same round without buckets: one operation after the other, each over a whole tensor."""

    def __init__(self, params: dict[str, Tensor]) -> None:
        self._params = list(params.values())
        self._anchors = [param.clone() for param in self._params]
        self._velocities = [torch.zeros_like(param) for param in self._params]

    def run(self) -> None:
        deltas = [anchor - param for anchor, param in zip(self._anchors, self._params, strict=True)]
        for delta in deltas:
            dist.all_reduce(delta)
            delta /= dist.get_world_size()
        fingerprint = xxhash.xxh3_128()
        for param, anchor, velocity, delta in zip(self._params, self._anchors, self._velocities, deltas, strict=True):
            velocity.mul_(0.9).add_(delta)
            anchor.sub_((delta + 0.9 * velocity) * 0.7)
            param.copy_(anchor)
            fingerprint.update(anchor.numpy().data.cast("B"))


def _summarise(bare: list[float], naive: list[float], whole: list[float], arguments: argparse.Namespace) -> None:
    all_reduce_s, plain_s, round_s = (statistics.median(times) for times in (bare, naive, whole))
    ratio = round_s / all_reduce_s
    print(
        f"median of {len(whole)} | all_reduce {all_reduce_s:.3f} s | plain round {plain_s:.3f} s "
        f"({plain_s / all_reduce_s:.2f}x) | round {round_s:.3f} s ({ratio:.2f}x; target 1.6x)"
    )
    result = {
        "benchmark": "sync",
        "parameters": arguments.parameters,
        "replicas": arguments.replicas,
        "bucket_elements": arguments.bucket_elements,
        "lag": arguments.lag,
        "all_reduce_s": [round(seconds, 4) for seconds in bare],
        "plain_round_s": [round(seconds, 4) for seconds in naive],
        "round_s": [round(seconds, 4) for seconds in whole],
        "ratio_of_medians": round(ratio, 3),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
