"""What test_torchrun.py starts with torchrun: replicas of other seeds and of uneven data. Prints one line of JSON."""

from __future__ import annotations

import json
import os

import torch
import torch.distributed as dist
from torch import nn

from atoll.comm.base import Transport
from atoll.integrations.outer_sync import OuterSync

STEPS = (7, 11)  # of each replica


def run(transport: Transport | None, *, replica: int) -> dict[str, object]:
    """The same run over any transport; None: what the launcher offers."""
    generator = torch.Generator().manual_seed(replica)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    for param in model.parameters():
        nn.init.normal_(param, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with OuterSync(
        model, optimizer, 3, initial="broadcast", transport=transport, weight=lambda: 1.0 + replica, timeout_s=60
    ) as sync:
        start = sync.digest()
        for _ in range(STEPS[replica]):
            optimizer.zero_grad()
            model(torch.randn(4, 5, generator=generator)).square().mean().backward()
            optimizer.step()
    return {
        "replica": sync.replica,
        "start": start,
        "round": sync.round,
        "digest": sync.digest(),
        "running_mean": model[1].running_mean.tolist(),
    }


def main() -> None:
    torch.set_num_threads(1)
    outcome = run(None, replica=int(os.environ["RANK"]))
    line = json.dumps({**outcome, "group": dist.is_initialized()})
    os.write(1, f"{line}\n".encode())  # at once: processes share the pipe


if __name__ == "__main__":
    main()
