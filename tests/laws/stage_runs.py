"""Two replicas of two stages under every schedule, compressor and adopt rule: one set of processes makes all runs."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from laws.driver import OPTIMIZERS, RULES, bits
from torch import Tensor

from atoll.algo.adopt import carry
from atoll.algo.fragments import strided_fragments
from atoll.algo.outer import SGD
from atoll.algo.schedule import Launch, Schedule
from atoll.comm.base import Transport
from atoll.comm.local import LocalGroup
from atoll.comm.torchdist import TorchDistTransport
from atoll.compress import COMPRESSORS, CompressorOptions, build_compressor
from atoll.compress.feedback import RESIDUAL
from atoll.integrations.connect import exchange
from atoll.parallel import build_mesh, build_parallel
from atoll.parallel.sharding import Shard
from atoll.train.config import TrainConfig
from atoll.train.engine import _counterparts
from atoll.train.layout import make_layout, model_config, parallel_settings
from atoll.train.sync import OuterSettings, RoundReport
from atoll.train.workers import ManyWorkers, ModelPart, ShardSync

STAGE_SCHEDULES = {
    "blocking": Schedule(2),
    "delayed": Schedule(2, delay=2),
    "streaming": Schedule(2, num_fragments=2, delay=1),
}
STEPS = 5
OPTIONS = CompressorOptions(rank=2, topk=8, chunk=256, feedback=True)
ROUNDED = {"bf16", "fp16"}  # their mean is rounded once more, and nobody owes that
VOCABULARY = 64


class Stage:
    """This worker: its part of the model, and the ways to its replica and to its counterparts."""

    def __init__(self, config: TrainConfig, store: Any, rank: int) -> None:
        self.replica, worker = divmod(rank, config.num_workers)
        limit = timedelta(seconds=60)
        inside = dist.PrefixStore(f"replica-{self.replica}", store)
        dist.init_process_group("gloo", store=inside, rank=worker, world_size=config.num_workers, timeout=limit)
        mesh = build_mesh(1, config.pipeline_stages, device=torch.device("cpu"))
        self.workers = ManyWorkers(mesh)
        self.group = _counterparts(config, store, rank)
        self.transport = TorchDistTransport(self.group, timeout_s=60)
        layout = make_layout(config, vocab_size=VOCABULARY)
        self.names = layout.names
        built = model_config(config, vocab_size=VOCABULARY)
        self.part = ModelPart(build_parallel(built, mesh, parallel_settings(config, bfloat16=False), seed=1))
        self.begun = {name: param.detach().clone() for name, param in self.part.params.items()}

    @property
    def shards(self) -> dict[str, Shard]:
        return self.part.shards

    @torch.no_grad()
    def restart(self) -> None:
        for name, param in self.part.params.items():
            param.copy_(self.begun[name])

    def train(self, step: int) -> dict[str, Tensor]:
        """An inner step of SGD; how it moved the rows of this worker."""
        before = {name: shard.tensor.detach().clone() for name, shard in self.shards.items()}
        generator = torch.Generator().manual_seed(100 * step + self.replica)
        tokens = torch.randint(VOCABULARY, (2, 8), generator=generator)
        for param in self.part.params.values():
            param.grad = None
        self.part.compute_gradients([tokens], parts=1)
        with torch.no_grad():
            for param in self.part.params.values():
                param -= 0.1 * param.grad
        return {name: shard.tensor.detach() - before[name] for name, shard in self.shards.items()}

    def sync(self, settings: OuterSettings, schedule: Schedule, transport: Transport | None = None) -> ShardSync:
        fragments = strided_fragments(self.names, schedule.num_fragments)
        return ShardSync(self.part, transport or self.transport, settings, fragments=fragments, workers=self.workers)

    def total(self, value: Tensor) -> Tensor:
        """Sum over the counterparts."""
        summed = value.clone()
        self.group.allreduce([summed]).wait()
        return summed


def check_every_combination(config: TrainConfig, store: Any, rank: int, *, num_processes: int) -> None:
    """Target of `run_workers`."""
    torch.set_num_threads(1)
    stage = Stage(config, store, rank)
    for (kind, schedule), name, rule in itertools.product(STAGE_SCHEDULES.items(), COMPRESSORS, RULES):
        check_rounds(stage, schedule, name, rule, case=f"{kind}, {name}, {rule}")
    for (kind, schedule), name in itertools.product(STAGE_SCHEDULES.items(), COMPRESSORS):
        if name not in ROUNDED:
            check_nothing_is_lost(stage, schedule, name, case=f"{kind}, {name}")
    for kind, schedule in STAGE_SCHEDULES.items():
        check_one_replica(stage, schedule, case=kind)
    for name in COMPRESSORS:
        check_void_round(stage, name)
    exchange(stage.transport, b".")
    dist.barrier()
    stage.transport.close()
    dist.destroy_process_group()


def settings(schedule: Schedule, name: str, **changes: Any) -> OuterSettings:
    values = {
        "optimizer": OPTIMIZERS["nesterov"],
        "lr": lambda step: 0.7,
        "compressor": build_compressor(name, OPTIONS),
        "keep_contribution": schedule.delay > 0,
        "bucket_elements": 2000,
    }
    return OuterSettings(**(values | changes))


def check_rounds(stage: Stage, schedule: Schedule, name: str, rule: str, *, case: str) -> None:
    """Laws 3 and 7, and that declared bytes are those that were counted."""
    stage.restart()
    sync = stage.sync(settings(schedule, name, adopt=RULES[rule]), schedule)
    counts = [0] * schedule.num_fragments
    for step in range(1, STEPS + 1):
        stage.train(step)
        events = schedule.events(step) + (schedule.finish(step) if step == STEPS else ())
        for event in events:
            if isinstance(event, Launch):
                sync.launch(event.fragment)
                continue
            report = sync.apply(event.fragment, step=step)
            counts[event.fragment] += 1
            assert report.round == counts[event.fragment], f"{case}: a round was applied twice, or out of order"
            check_report(stage, sync, report, case)
    assert min(counts) >= 2, f"{case}: too few rounds {counts}"


def check_report(stage: Stage, sync: ShardSync, report: RoundReport, case: str) -> None:
    digests = exchange(stage.transport, bytes.fromhex(report.digest))
    assert len(set(digests)) == 1, f"{case}: replicas differ"
    own = exchange(stage.transport, bytes.fromhex(sync.rows.digest()))
    assert len(set(own)) == 1, f"{case}: counterparts differ"
    declared = declared_bytes(sync, report.fragment, stage.replica)
    told = sum(int.from_bytes(payload, "big") for payload in stage.workers.gather(declared.to_bytes(8, "big")))
    assert told == report.payload_bytes, f"{case}: {told} bytes were declared, {report.payload_bytes} sent"


def declared_bytes(sync: ShardSync, fragment: int, replica: int) -> int:
    """What this worker says it sends in a round of `fragment`."""
    if fragment not in sync._place:
        return 0
    held, compressor = sync.rows._fragments[sync._place[fragment]], sync.rows.settings.compressor
    shapes = [held._bucket_shape(bucket, sync.rows.settings) for bucket in held.buckets]
    return sum(compressor.sent_bytes(shape, num_replicas=2, replica=replica) for shape in shapes)


def check_nothing_is_lost(stage: Stage, schedule: Schedule, name: str, *, case: str) -> None:
    """Law 4, of each stage: with a unit outer step what moved the anchor and what is owed is all that was done."""
    stage.restart()
    sync = stage.sync(settings(schedule, name, optimizer=SGD(), lr=lambda step: 1.0, adopt=carry(1.0)), schedule)
    done = {key: torch.zeros_like(shard.tensor) for key, shard in stage.shards.items()}
    begun = {key: value.clone() for key, value in sync.anchor().items()}
    for step in range(1, STEPS + 1):
        for key, moved in stage.train(step).items():
            done[key] += moved
        for event in schedule.events(step) + (schedule.finish(step) if step == STEPS else ()):
            if isinstance(event, Launch):
                sync.launch(event.fragment)
            else:
                sync.apply(event.fragment, step=step)
    names = [key for fragment in sync.fragments for key in fragment]
    anchor = sync.anchor()
    moved = torch.cat([(begun[key] - anchor[key]).reshape(-1) for key in names])
    codes = [code for item in sync.rows.replica_state()["fragments"] for code in item["codes"]]
    owed = stage.total(torch.cat([code[RESIDUAL].reshape(-1) for code in codes]))
    contributed = -stage.total(torch.cat([done[key].reshape(-1) for key in names]))
    worst = float((2 * moved + owed - contributed).abs().max())
    assert worst < 1e-5, f"{case}: {worst} was lost"
    assert moved.any(), f"{case}: nothing moved"


def check_one_replica(stage: Stage, schedule: Schedule, *, case: str) -> None:
    """Law 1: one replica, unit outer step, full carry is training without rounds."""
    stage.restart()
    for step in range(1, STEPS + 1):
        stage.train(step)
    alone = {name: param.detach().clone() for name, param in stage.part.params.items()}
    stage.restart()
    unit = settings(schedule, "identity", optimizer=SGD(), lr=lambda step: 1.0, adopt=carry(1.0))
    sync = stage.sync(unit, schedule, LocalGroup(1).endpoints()[0])
    for step in range(1, STEPS + 1):
        stage.train(step)
        for event in schedule.events(step):
            if isinstance(event, Launch):
                sync.launch(event.fragment)
            else:
                sync.apply(event.fragment, step=step)
    for name, param in stage.part.params.items():
        torch.testing.assert_close(param.detach(), alone[name], atol=1e-6, rtol=0, msg=lambda text: f"{case}: {text}")


def check_void_round(stage: Stage, name: str) -> None:
    """Law 9: a round in which nobody counts changes nothing that is agreed on, on any stage."""
    stage.restart()
    schedule = STAGE_SCHEDULES["blocking"]
    sync = stage.sync(settings(schedule, name), schedule)
    stage.train(1)
    sync.launch(0)
    sync.apply(0, step=1)
    before = {key: bits(value) for key, value in sync.anchor().items()}
    stage.train(2)
    sync.launch(0, present=False)
    report = sync.apply(0, step=2)
    assert report.contributors == 0 and sync.round == 1, f"{name}: a void round was counted"
    assert before == {key: bits(value) for key, value in sync.anchor().items()}, (
        f"{name}: a void round moved the anchor"
    )
