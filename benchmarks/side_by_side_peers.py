"""One island of benchmarks/side_by_side.py that runs another library, or Atoll's `OuterSync` in the very same loop.

Every inner step takes `step_s`, and moves one element of the first parameter, its island's own, by 0.001: what the
outer loop made of that element tells whose work counted. One JSON line a round on standard output.
"""

from __future__ import annotations

import argparse
import json
import logging
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

MOVE = 1e-3
PIECES = 10


def say(**facts: Any) -> None:
    print(json.dumps({"at": time.time(), **facts}), flush=True)


def payload(numel: int) -> nn.ParameterList:
    """Parameters of `numel` elements in all, zeros, in equal pieces."""
    return nn.ParameterList(nn.Parameter(torch.zeros(numel // PIECES)) for _ in range(PIECES))


class Loop:
    """Inner steps of plain SGD at a pace."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model = payload(options.numel)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        for param in self.model:
            param.grad = torch.zeros_like(param)
        self.island, self.step_s, self.steps = options.island, options.step_s, 0

    def step(self) -> float:
        """Seconds that `optimizer.step` took, with whatever hangs on it."""
        time.sleep(self.step_s)
        for param in self.model:
            param.grad = torch.zeros_like(param)
        self.model[0].grad[self.island] = MOVE
        self.steps += 1
        began = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - began

    def marks(self) -> list[float]:
        """How far the element of each of the first eight islands has come, in steps."""
        return [round(-float(value) / MOVE, 3) for value in self.model[0].detach()[:8]]


def rounds(loop: Loop, options: argparse.Namespace, committed: Callable[[], int]) -> None:
    """Train until ended; tell of every round, and whether it was committed."""
    say(what="ready")
    while True:
        before = committed()
        for _ in range(options.inner_steps):
            seconds = loop.step()
        ok = committed() > before
        say(what="round", number=committed(), ok=ok, sync_s=seconds, steps=loop.steps, marks=loop.marks())


def torchft(options: argparse.Namespace) -> None:
    from datetime import timedelta

    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    socket.gethostname = lambda: options.address  # what its checkpoint server tells the others; here no name resolves
    store = dist.TCPStore(options.address, 0, is_master=True, wait_for_workers=False)
    loop = Loop(options)
    outer = torch.optim.SGD(loop.model.parameters(), lr=1.0)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        min_replica_size=options.least,
        use_async_quorum=False,
        load_state_dict=lambda state: loop.model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": loop.model.state_dict()},
        replica_id=f"island{options.island}",
        store_addr=options.address,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{options.first}:29510",
        hostname=options.address,
    )
    with DiLoCo(manager, [loop.model], loop.optimizer, outer, sync_every=options.inner_steps):
        rounds(loop, options, manager.current_step)


def atoll(options: argparse.Namespace) -> None:
    from atoll import OuterSync

    loop = Loop(options)
    with OuterSync(
        loop.model, loop.optimizer, options.inner_steps, outer_optimizer="sgd", outer_lr=1.0, compressor=options.code
    ) as sync:
        rounds(loop, options, lambda: sync.round)


def hivemind(options: argparse.Namespace) -> None:
    import hivemind as hm
    from hivemind.averaging.control import AveragingStage

    codes = {"identity": hm.compression.NoCompression(), "fp16": hm.compression.Float16Compression()}
    dht = hm.DHT(
        host_maddrs=[f"/ip4/{options.address}/tcp/31337"],
        initial_peers=[options.first] if options.island else [],
        use_relay=False,
        use_auto_relay=False,
        start=True,
    )
    averager = hm.averaging.DecentralizedAverager(
        [param.detach() for param in payload(options.numel)],
        dht,
        prefix="payload",
        target_group_size=options.least,
        compression=codes[options.code],
        start=True,
    )
    say(what="ready", maddr=str(next(iter(dht.get_visible_maddrs()))))
    for number, _ in enumerate(sys.stdin, start=1):
        began = time.perf_counter()
        step = averager.step(wait=False, timeout=60)
        while not step.done() and step.stage != AveragingStage.RUNNING_ALLREDUCE:
            time.sleep(0.005)
        found = time.perf_counter()
        step.result()
        now = time.perf_counter()
        say(what="round", number=number, ok=True, sync_s=now - began, exchange_s=now - found)
    averager.shutdown()
    dht.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=["torchft", "atoll", "hivemind"])
    parser.add_argument("--island", type=int, required=True)
    parser.add_argument("--address", required=True, help="of this island")
    parser.add_argument("--first", default="", help="address of the first island; for hivemind its multiaddress")
    parser.add_argument("--least", type=int, default=2, help="islands without which there is no round")
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--code", default="identity")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torchft").setLevel(logging.WARNING)
    {"torchft": torchft, "atoll": atoll, "hivemind": hivemind}[options.system](options)


if __name__ == "__main__":
    main()
