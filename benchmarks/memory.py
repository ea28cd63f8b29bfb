"""Bytes a parameter: each state as held, and the peak of a sync beside it.

    python benchmarks/memory.py [--hidden 768]

Two replicas as processes on this machine train one step of a model of some 75 M parameters, then sync. The states are
counted from their tensors; the peak is the growth of the process's resident memory during the round, from the kernel.
Target: 24 bytes held (inner 16, outer 8), and at most one fp32 buffer (4 bytes) more during a sync.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from atoll.comm.torchdist import TorchDistTransport
from atoll.models import build_model
from atoll.train.config import ModelConfig, TrainConfig, build_config
from atoll.train.memory import memory_by_state
from atoll.train.replica import Member, Replica
from atoll.train.sync import OuterSettings, ReplicaSync

SEQUENCE_LENGTH = 16
REPLICAS = 2


class RandomTokens:
    """A stream of random token ids; `num_examples` is not used here."""

    num_examples = 1

    def next_batch(self, batch_size: int) -> torch.Tensor:
        return torch.randint(0, 259, (batch_size, SEQUENCE_LENGTH))


def resident_bytes(name: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def build_member(config: TrainConfig) -> Member:
    model = build_model(config.model, vocab_size=259, sequence_length=SEQUENCE_LENGTH, seed=0)
    replica = Replica(0, model=model, stream=RandomTokens(), config=config, device=torch.device("cpu"))  # type: ignore[arg-type]
    transport = TorchDistTransport(timeout_s=120)
    return Member(replica, transport, ReplicaSync(replica.trainable(), transport, OuterSettings()))


def measure(rank: int, store_path: str, hidden: int, pipe: Connection) -> None:
    """One replica: a step, a sync, and what they held."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store_path, REPLICAS), rank=rank, world_size=REPLICAS)
    shape = ModelConfig(hidden_size=hidden, num_layers=8, num_heads=hidden // 64, intermediate_size=hidden * 4)
    config = build_config({"model": shape.model_dump(), "sequence_length": SEQUENCE_LENGTH, "batch_size": 1})
    member = build_member(config)
    assert isinstance(member.sync, ReplicaSync)
    for step in (1, 2):
        member.replica.compute_gradients(step)
        member.replica.update(step)
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        member.sync.launch(0)
        member.sync.apply(0, step=step)
    memory = memory_by_state(member)
    peak = resident_bytes("VmHWM") - before
    held = {state: size / memory.num_parameters for state, size in memory.bytes_by_state.items()}
    pipe.send({"parameters": memory.num_parameters, "held": held, "sync_peak": peak / memory.num_parameters})
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    hidden = parser.parse_args().hidden
    context = multiprocessing.get_context("spawn")
    store_path = f"/tmp/atoll-memory-{os.getpid()}"
    ours, theirs = context.Pipe(duplex=False)
    workers = [context.Process(target=measure, args=(rank, store_path, hidden, theirs)) for rank in range(REPLICAS)]
    for worker in workers:
        worker.start()
    results = [ours.recv() for _ in workers]
    for worker in workers:
        worker.join()
    Path(store_path).unlink(missing_ok=True)
    worst = max(results, key=lambda result: result["sync_peak"])
    total = sum(worst["held"].values())
    print(f"{worst['parameters'] / 1e6:.1f} M parameters, bytes a parameter:")
    for state, size in worst["held"].items():
        print(f"  {state:16} {size:5.2f}")
    print(f"  {'total held':16} {total:5.2f}   (target 24)")
    print(f"  {'peak of a sync':16} {worst['sync_peak']:+5.2f}   (target +4)")
    print(json.dumps({"benchmark": "memory", "total_held": total, **worst}))
    return 0 if total <= 24.01 and worst["sync_peak"] <= 4.0 else 1


if __name__ == "__main__":
    sys.exit(main())
