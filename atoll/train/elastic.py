"""Building one island of an elastic run, and what it writes: lines, metrics, checkpoints.

Every island logs its own inner steps. Checkpoints in the middle of a run are written by the island that leads: of those
in the last round the one with the lowest seat; when islands leave, and at the end, by the first that comes to it in
each run folder. Rounds, members, faults and evaluations are the coordinator's to log; of an evaluation each island
computes a part.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import atoll
from atoll.data import TextData, load_data
from atoll.data.stream import LeasedStream, ShardStream
from atoll.elastic import messages as m
from atoll.elastic.addresses import host_and_port, local_address_towards
from atoll.elastic.crash import crash_point
from atoll.elastic.donate import fetch_state
from atoll.elastic.link import Link, fetch_settings
from atoll.elastic.tokens import Token, parse_token
from atoll.errors import AtollError, CheckpointError, ConfigError, TransportError
from atoll.models import build_model, load_model
from atoll.parallel import build_mesh
from atoll.train.allocator import keep_freed_memory
from atoll.train.build import build_part, make_schedule, outer_settings, pick_device, set_threads
from atoll.train.checkpoint import find_checkpoint, prepare_run_dir
from atoll.train.config import TrainConfig, build_config, settings_digest
from atoll.train.console import Console, print_line
from atoll.train.crew import Crew, follow
from atoll.train.elastic_checkpoint import forget_own, save_committed
from atoll.train.elastic_saved import forget_saved, saved_step, saving
from atoll.train.folder import METRICS
from atoll.train.island import Arriving, Island, Landing, Stopped
from atoll.train.island_processes import (
    Fellows,
    deaf_to_interrupts,
    fork_followers,
    meet_by_torchrun,
    meet_here,
    meet_there,
    torchrun_rank,
)
from atoll.train.island_worker import IslandWorker
from atoll.train.launch import under_torchrun
from atoll.train.layout import make_layout
from atoll.train.memory import describe_counted
from atoll.train.metrics import MetricsWriter, StepEvent
from atoll.train.replica import Replica, StepReport
from atoll.train.stopping import Interrupted, Signals, watch_signals
from atoll.train.sync import ReplicaSync
from atoll.train.worker_channel import Channel
from atoll.train.workers import ModelPart

SAVING_SHARE = 0.02  # of the time, where save_steps does not say when
LEAVING_S = 6.0  # for another island of this folder that saves, when this one is told to go


def run_island(
    config: TrainConfig,
    token: Token,
    *,
    seat: int = -1,
    founder: bool,
    num_processes: int = 1,
    quiet: bool = False,
    fellows: Fellows | None = None,
    lost: Callable[[str], None] = lambda why: None,
) -> None:
    """Be an island of the run that `token` leads to, until it is over.

    founder: may begin the run from its seed, or from the checkpoint that `config.resume` names. fellows: the other
    workers of the island, which this process leads. lost: is told when one of them is gone, and ends this process.
    """
    fellows = fellows or Fellows()
    with watch_signals() as signals:
        console = None if quiet else Console(max_steps=config.max_steps, on_closed=signals.stop)
        worker = build_worker(config, token, fellows.store, seat=seat, num_processes=num_processes)
        crew = Crew(worker, fellows.channels, lost=lost)
        try:
            _Leader(config, token, crew, seat=seat, founder=founder, signals=signals, console=console).run()
        finally:
            crew.close()
            if console is not None:
                console.close()


def follow_leader(config: TrainConfig, token: Token, index: int, channel: Channel, store: Any) -> None:
    """Be worker `index` of an island that another process leads, until it says stop.

    In processes that the leader forked each has an even share of its cores.
    """
    deaf_to_interrupts()
    with watch_signals() as signals:
        deaf_to_interrupts()
        worker = build_worker(config, token, store, index=index, num_processes=config.num_processes)
        follow(worker, channel, signals=signals)


def build_worker(
    config: TrainConfig, token: Token, store: Any, *, index: int = 0, seat: int = -1, num_processes: int
) -> IslandWorker:
    """Worker `index` of an island. Collective: all its workers meet at `store`, None where there is only this one."""
    keep_freed_memory()
    set_threads(config, num_processes)
    data = load_data(config.data, sequence_length=config.sequence_length, num_replicas=1, seed=config.seed)
    order = data.stream(0)
    assert isinstance(order, ShardStream), "settings refuse data that cannot be read at any position"
    device = pick_device(config, max(seat, 0) * config.num_workers + index)
    model = _whole_model(config, data) if store is None else _part(config, data, store, index, device)
    replica = Replica(max(seat, 0), model=model, stream=LeasedStream(order), config=config, device=device, worker=index)
    params: Mapping[str, Tensor] = replica.trainable()
    if isinstance(replica.trainee, ModelPart):
        params = {name: shard.tensor for name, shard in replica.trainee.shards.items()}
    sync = ReplicaSync(params, _NoTransport(), outer_settings(config, make_schedule(config)))
    address = local_address_towards(*host_and_port(token.addresses[0]))
    return IslandWorker(config, replica, sync, data=data, address=address, index=index)


def _whole_model(config: TrainConfig, data: TextData) -> nn.Module:
    if config.init_from:
        return load_model(config.init_from)
    vocab_size = config.model.vocab_size or data.vocab_size
    return build_model(config.model, vocab_size=vocab_size, sequence_length=config.sequence_length, seed=config.seed)


def _part(config: TrainConfig, data: TextData, store: Any, index: int, device: torch.device) -> ModelPart:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    inside = dist.PrefixStore("workers", store)
    timeout = timedelta(seconds=config.timeout_s)
    dist.init_process_group(backend, store=inside, rank=index, world_size=config.num_workers, timeout=timeout)
    mesh = build_mesh(config.data_workers, config.pipeline_stages, device=device)
    layout = make_layout(config, vocab_size=data.vocab_size)
    return build_part(layout, mesh, vocab_size=data.vocab_size)


@dataclass(frozen=True)
class Resumed:
    """Where an island begins. steps, books: of progress it had of its own. saved_step: of the checkpoint, -1: none.

    digest: of the anchor.
    """

    steps: int = 0
    books: str = ""
    position: int = 0
    last_eval_step: int = 0
    saved_step: int = -1
    digest: str = ""


class _Leader:
    """An island with its link, and what it writes."""

    def __init__(
        self,
        config: TrainConfig,
        token: Token,
        crew: Crew,
        *,
        seat: int,
        founder: bool,
        signals: Signals,
        console: Console | None,
    ) -> None:
        self.config = config
        self._crew = crew
        self._signals = signals
        self._console = console
        resumed = self._resume(seat) if founder else Resumed(digest=crew.digest())
        self._last_eval_step = resumed.last_eval_step
        self._first_saved_step = resumed.saved_step
        self._save_from = 0.0
        self._joined, self._trained = seat < 0, False
        self._tells_memory = crew.num_workers > 1 and console is not None
        self._run_dir = Path(config.output_dir)
        self._metrics = MetricsWriter(self._run_dir / METRICS)
        self._link = Link(token, lambda: self.island.hello(), beat=lambda: self.island.beat())
        donor_port = self._link.serve_state(lambda: self.island.snapshot(), host=crew.worker.address)
        self.island = Island(
            config,
            introduction=_introduction(config, crew, seat=seat, founder=founder, port=donor_port),
            crew=crew,
            digest=resumed.digest,
            schedule=make_schedule(config),
            link=self._link,
            watcher=self,
            fetch=self._fetch,
            should_stop=lambda: signals.received is not None or crew.told_to_stop,
            has_state=founder,
            steps=resumed.steps,
            position=resumed.position,
            books=resumed.books,
        )

    def _resume(self, seat: int) -> Resumed:
        folder = find_checkpoint(self.config.output_dir, self.config.resume, warn=self.line)
        if folder is None:
            return Resumed(digest=self._crew.digest())
        about, digest = self._crew.resume(folder, seat=seat)
        if digest != about["anchor_digest"]:
            raise CheckpointError(
                f"{folder.name} says digest {about['anchor_digest'][:8]} and holds {digest[:8]}. Use another one."
            )
        if about["lost"]:
            self.line(about["lost"])
        own, position = (int(about["steps"]), str(about["books"])), int(about["position"])
        return Resumed(*own, position, int(about["last_eval_step"]), int(about["step"]), digest)

    def run(self) -> None:
        """Train until the run is over, or until this process is told to leave."""
        crash_point("island.before_hello")
        self._link.start()
        try:
            self._train()
        finally:
            self._link.close()
            self._metrics.close()

    def _train(self) -> None:
        try:
            self.island.run()
        except Stopped:
            self._leave()
        self._conclude()

    # --- what the island tells

    def stepped(self, report: StepReport, *, step: int) -> None:
        event = StepEvent(
            step=step,
            replica=self.island.seat,
            loss=report.loss,
            grad_norm=report.grad_norm,
            lr=report.lr,
            tokens=report.tokens,
            tokens_per_s=self._tokens_a_step() / report.seconds,
        )
        self._metrics.write(event)
        console = self._console
        if self._joined and not self._trained:
            self.line(f"joined after round {self.island.round} as replica {self.island.seat}")
        self._trained = True
        if console is not None and self._speaks:
            console.round = self.island.round
            due = step % self.config.logging_steps == 0 or step in (1, self.config.max_steps)
            console.step(event) if due else console.advance(step)

    @property
    def _speaks(self) -> bool:
        """Whether its terminal is about this island: the first of those that share one, or one that joined."""
        return self._joined or self.island.leads

    def committed(self, landing: Landing) -> None:
        if self._tells_memory and self._speaks:
            self._tell_memory()
        if self._joined:
            commit = landing.commit
            counted = sum(weight > 0 for weight in commit.weights.values())
            self.line(f"round {commit.round} committed | {counted} replicas | anchor {commit.digest[:6]}")
        if self._evaluation_is_due(landing.step):
            self._evaluate(landing)
        if landing.leads and self._save_is_due(landing.step):
            self._save(patience_s=0.0)

    def _tell_memory(self) -> None:
        """Once, when the first round has allocated everything: what each of many workers holds."""
        self._tells_memory = False
        layout = make_layout(self.config, vocab_size=self._crew.worker.data.vocab_size)
        for line in describe_counted(layout, self._crew.memory()):
            self.line(line)

    def line(self, text: str) -> None:
        if self._console is not None:
            self._console.line(text)

    # --- evaluations: every island that made the round takes a part of the held-out text

    def _evaluation_is_due(self, step: int) -> bool:
        """At the first round at or after each multiple of eval_steps, and at the end; the same for all islands."""
        every = self.config.eval_steps
        before = step - 1 - (step - 1) % self.config.inner_steps
        return step == self.config.max_steps or (every > 0 and step // every > before // every)

    def _evaluate(self, landing: Landing) -> None:
        crash_point("island.evaluate")
        self._last_eval_step = landing.step
        loss_sum, tokens = self._crew.evaluate(landing.place, landing.of)
        self._link.send(m.Evaluated(landing.commit.round, landing.place, landing.of, loss_sum, tokens))

    # --- checkpoints

    def _save_is_due(self, step: int) -> bool:
        every = self.config.save_steps
        if every:
            return step // every > max(saved_step(self._run_dir), self._first_saved_step, 0) // every
        return time.monotonic() >= self._save_from

    def _save(self, *, patience_s: float) -> None:
        """Save the committed state, unless that was done; another island may be at it for `patience_s`."""
        step = self._step()
        with saving(self._run_dir, step, patience_s=patience_s) as needed:
            if not needed or step == self._first_saved_step:
                return
            began = time.monotonic()
            save_committed(
                self._crew,
                digest=self.island.digest,
                step=step,
                last_eval_step=self._last_eval_step,
                position=self.island.position,
            )
            self._save_from = time.monotonic() + (time.monotonic() - began) / SAVING_SHARE

    # --- inside

    def _fetch(self, donor: m.Donor) -> Arriving:
        limit = 64 * self._crew.numel + (1 << 20)  # anchor, outer state and warm starts, with room
        began = time.perf_counter()
        transfer, size = self._crew.begin_transfer(), 0

        def keep(name: str, tensor: Tensor) -> None:
            nonlocal size
            size += tensor.nbytes
            self._crew.stage(transfer, name, tensor)

        _, about = fetch_state(donor, max_bytes=limit, keep=keep)
        self.line(f"state of round {about['round']}: {size / 1e6:.1f} MB in {time.perf_counter() - began:.1f} s")
        return Arriving(transfer, about)

    def _step(self) -> int:
        return min(self.island.round * self.config.inner_steps, self.config.max_steps)

    def _conclude(self) -> None:
        """The run is over: the last state is evaluated, unless that was done when it landed, and saved."""
        finish = self.island.finish
        assert finish is not None
        step = self._step()
        if finish.exit_code == 0 and step == self.config.max_steps > self._last_eval_step and self.island.seat == 0:
            self._evaluate(Landing(m.Commit(self.island.round, 0, ""), step, 0, 1, True))
        if self.island.has_state and self.island.round > 0:
            self._save(patience_s=600.0)
        if finish.exit_code:
            error = AtollError(finish.why or "the run ended before its time")
            error.exit_code = finish.exit_code
            raise error

    def _leave(self) -> None:
        """Told to go: say so to the others, keep what there is."""
        self._link.send(m.Leave("told to stop"))
        island = self.island
        if island.has_state and island.seat >= 0:
            island.withdraw()
            forget_own(self._run_dir, seat=island.seat)
            self._crew.save_own(seat=island.seat, steps=island.steps, books=island.books)
            self._save(patience_s=LEAVING_S)
        raise Interrupted(
            self._signals.received or signal.SIGTERM,
            f"replica {island.seat} left after round {island.round}; what it has is in {self._run_dir}.",
        )

    def _tokens_a_step(self) -> int:
        config = self.config
        return config.batch_size * config.gradient_accumulation_steps * config.sequence_length


def _introduction(config: TrainConfig, crew: Crew, *, seat: int, founder: bool, port: int) -> m.Hello:
    """What an island says of itself, whatever state it holds."""
    return m.Hello(
        member=secrets.token_hex(8),
        name=socket.gethostname(),
        version=atoll.__version__,
        settings_digest=settings_digest(config),
        address=crew.worker.address,
        port=port,
        pid=os.getpid(),
        num_workers=crew.num_workers,
        round=-1,
        digest="",
        founder=founder,
        seat=seat,
    )


class _NoTransport:
    """An island has no lasting connection to others: every attempt brings its own."""

    num_replicas = 1
    replica = 0

    def launch(self, *given: Any, background: bool = False) -> Any:
        raise AssertionError("an island averages in attempts")

    def close(self) -> None:
        pass


def join(
    line: str,
    *,
    output_dir: str = "",
    device: str = "auto",
    threads: int = 0,
    workers: Mapping[str, Any] | None = None,
) -> None:
    """Join the run that the token `line` leads to, from any machine that reaches its coordinator, until it is over.

    Everything but where things are kept here comes from the coordinator, as data that is checked like a file's.
    workers: the settings by which this island is laid out over several workers, where they are not the run's. Those
    that torchrun did not start are started here.
    """
    token = parse_token(line)
    told = fetch_settings(token)
    settings = dict(told["settings"])
    settings |= {"output_dir": output_dir or f"runs/joined-{told['run'][:8]}", "resume": "never", "port": 0}
    settings |= {"device": device, "threads": threads, "report_to": []}
    config = build_config(settings | dict(workers or {}))
    if settings_digest(config) != told["settings_digest"]:
        raise ConfigError(
            "the coordinator's settings are not those it says it has. Is it of the same version of atoll?"
        )
    if config.num_workers > 1:
        make_layout(config)
    if under_torchrun():
        _join_by_torchrun(config, token, run=told["run"])
        return
    channels = fork_followers(config, lambda index, channel: _follow_here(config, token, index, channel))
    _join_as_leader(config, token, meet_here(channels), run=told["run"])


def _join_by_torchrun(config: TrainConfig, token: Token, *, run: str) -> None:
    rank = torchrun_rank(config)
    fellows, channel = meet_by_torchrun(rank)
    if channel is None:
        _join_as_leader(config, token, fellows, run=run)
    else:
        follow_leader(config, token, rank.index, channel, fellows.store)


def _follow_here(config: TrainConfig, token: Token, index: int, channel: Channel) -> None:
    follow_leader(config, token, index, channel, meet_there(channel))


def _join_as_leader(config: TrainConfig, token: Token, fellows: Fellows, *, run: str) -> None:
    workers = f", {config.num_workers} workers" if config.num_workers > 1 else ""
    print_line(
        f"joining run {run[:8]}: {config.model.family}, {config.max_steps} steps, H={config.inner_steps}{workers}"
    )
    prepare_run_dir(config.output_dir, warn=print_line)
    forget_saved(Path(config.output_dir))
    # the first to come begins the run from its seed; later ones are told so
    run_island(config, token, founder=True, num_processes=config.num_workers, fellows=fellows, lost=_end_without_worker)


def _end_without_worker(why: str) -> None:
    """An island without one of its workers is dead, whatever its other threads wait for; its leader ends the others."""
    print_line(f"error: {why}; this island ends. Join again: the others go on.")
    sys.stdout.flush()
    os._exit(TransportError("").exit_code)
