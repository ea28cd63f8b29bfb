"""Building one island of an elastic run, and what it writes: lines, metrics, checkpoints.

Every island logs its own inner steps. Checkpoints in the middle of a run are written by the island that leads: of those
in the last round the one with the lowest seat; when islands leave, and at the end, by the first that comes to it in
each run folder. Rounds, members, faults and evaluations are the coordinator's to log; of an evaluation each island
computes a part.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import atoll
from atoll.algo.schedule import Schedule
from atoll.data import TextData, load_data
from atoll.data.stream import LeasedStream, ShardStream
from atoll.elastic import messages as m
from atoll.elastic.addresses import host_and_port, local_address_towards
from atoll.elastic.crash import crash_point
from atoll.elastic.donate import State, fetch_state
from atoll.elastic.link import Link, fetch_settings
from atoll.elastic.tokens import Token, parse_token
from atoll.errors import AtollError, ConfigError
from atoll.models import build_model, load_model
from atoll.train.allocator import keep_freed_memory
from atoll.train.build import make_schedule, outer_settings, pick_device, set_threads
from atoll.train.checkpoint import find_checkpoint, prepare_run_dir
from atoll.train.config import TrainConfig, build_config, settings_digest
from atoll.train.console import Console, print_line
from atoll.train.elastic_checkpoint import load_committed, load_own, save_committed, save_own
from atoll.train.elastic_saved import forget_saved, saved_step, saving
from atoll.train.folder import METRICS
from atoll.train.island import Island, Landing, Stopped
from atoll.train.metrics import MetricsWriter, StepEvent
from atoll.train.replica import Replica, StepReport
from atoll.train.stopping import Interrupted, Signals, watch_signals
from atoll.train.sync import ReplicaSync

SAVING_SHARE = 0.02  # of the time, where save_steps does not say when
LEAVING_S = 6.0  # for another island of this folder that saves, when this one is told to go


def run_island(
    config: TrainConfig, token: Token, *, seat: int = -1, founder: bool, num_processes: int = 1, quiet: bool = False
) -> None:
    """Be an island of the run that `token` leads to, until it is over.

    founder: may begin the run from its seed, or from the checkpoint that `config.resume` names.
    """
    keep_freed_memory()
    set_threads(config, num_processes)
    with watch_signals() as signals:
        island = _Builder(config, token, seat=seat, founder=founder, signals=signals, quiet=quiet).build()
        try:
            island.run()
        finally:
            island.close()


class _Builder:
    """Puts an island together."""

    def __init__(
        self, config: TrainConfig, token: Token, *, seat: int, founder: bool, signals: Signals, quiet: bool
    ) -> None:
        self.config = config
        self.token = token
        self.seat = seat
        self.founder = founder
        self.signals = signals
        self.console = None if quiet else Console(max_steps=config.max_steps, on_closed=signals.stop)

    def build(self) -> RunningIsland:
        config = self.config
        data = load_data(config.data, sequence_length=config.sequence_length, num_replicas=1, seed=config.seed)
        device = pick_device(config, max(self.seat, 0))
        replica = self._replica(data, device)
        schedule = make_schedule(config)
        sync = ReplicaSync(replica.trainable(), _NoTransport(), outer_settings(config, schedule))
        resumed = self._resume(replica, sync) if self.founder else Resumed()
        return RunningIsland(self, data=data, replica=replica, sync=sync, schedule=schedule, resumed=resumed)

    def _replica(self, data: TextData, device: torch.device) -> Replica:
        config = self.config
        order = data.stream(0)
        assert isinstance(order, ShardStream), "settings refuse data that cannot be read at any position"
        if config.init_from:
            model = load_model(config.init_from)
        else:
            vocab_size = config.model.vocab_size or data.vocab_size
            model = build_model(
                config.model, vocab_size=vocab_size, sequence_length=config.sequence_length, seed=config.seed
            )
        seat = max(self.seat, 0)
        return Replica(seat, model=model, stream=LeasedStream(order), config=config, device=device)

    def _resume(self, replica: Replica, sync: ReplicaSync) -> Resumed:
        folder = find_checkpoint(self.config.output_dir, self.config.resume, warn=self.line)
        if folder is None:
            return Resumed()
        about = load_committed(folder, self.config, replica=replica, sync=sync)
        run_dir = Path(self.config.output_dir)
        steps, books = load_own(run_dir, seat=self.seat, replica=replica, sync=sync, warn=self.line)
        return Resumed(steps, books, int(about["position"]), int(about["last_eval_step"]), int(about["step"]))

    def line(self, text: str) -> None:
        if self.console is not None:
            self.console.line(text)


@dataclass(frozen=True)
class Resumed:
    """Where an island begins. steps, books: of progress it had of its own. saved_step: of the checkpoint, -1: none."""

    steps: int = 0
    books: str = ""
    position: int = 0
    last_eval_step: int = 0
    saved_step: int = -1


class RunningIsland:
    """An island with its link, and what it writes."""

    def __init__(
        self,
        made: _Builder,
        *,
        data: TextData,
        replica: Replica,
        sync: ReplicaSync,
        schedule: Schedule,
        resumed: Resumed,
    ) -> None:
        config = self.config = made.config
        self._made = made
        self._data = data
        self._replica = replica
        self._sync = sync
        self._held_out = data.held_out[: config.eval_sequences]
        self._last_eval_step = resumed.last_eval_step
        self._first_saved_step = resumed.saved_step
        self._save_from = 0.0
        self._run_dir = Path(config.output_dir)
        self._metrics = MetricsWriter(self._run_dir / METRICS)
        host, port = host_and_port(made.token.addresses[0])
        address = local_address_towards(host, port)
        self._link = Link(made.token, lambda: self.island.hello(), beat=lambda: self.island.beat())
        donor_port = self._link.serve_state(lambda: self.island.snapshot(), host=address)
        self.island = Island(
            config,
            introduction=_introduction(config, made, address=address, port=donor_port),
            replica=replica,
            sync=sync,
            schedule=schedule,
            link=self._link,
            watcher=self,
            fetch=self._fetch,
            should_stop=lambda: made.signals.received is not None,
            has_state=made.founder,
            steps=resumed.steps,
            position=resumed.position,
            books=resumed.books,
        )

    def run(self) -> None:
        """Train until the run is over, or until this process is told to leave."""
        crash_point("island.before_hello")
        self._link.start()
        try:
            self.island.run()
        except Stopped:
            self._leave()
        self._conclude()

    def close(self) -> None:
        self._link.close()
        self._metrics.close()
        if self._made.console is not None:
            self._made.console.close()

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
        console = self._made.console
        if console is not None and self.island.leads:
            console.round = self.island.round
            due = step % self.config.logging_steps == 0 or step in (1, self.config.max_steps)
            console.step(event) if due else console.advance(step)

    def committed(self, landing: Landing) -> None:
        if self._evaluation_is_due(landing.step):
            self._evaluate(landing)
        if landing.leads and self._save_is_due(landing.step):
            self._save(patience_s=0.0)

    def line(self, text: str) -> None:
        self._made.line(text)

    # --- evaluations: every island that made the round takes a part of the held-out text

    def _evaluation_is_due(self, step: int) -> bool:
        """At the first round at or after each multiple of eval_steps, and at the end; the same for all islands."""
        every = self.config.eval_steps
        before = step - 1 - (step - 1) % self.config.inner_steps
        return step == self.config.max_steps or (every > 0 and step // every > before // every)

    def _evaluate(self, landing: Landing) -> None:
        crash_point("island.evaluate")
        self._last_eval_step = landing.step
        share = self._held_out[landing.place :: landing.of]
        loss_sum, tokens = self._replica.evaluate(share, self._sync.anchor())
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
                self.config,
                replica=self._replica,
                sync=self._sync,
                tokenizer=self._data.tokenizer,
                step=step,
                last_eval_step=self._last_eval_step,
                position=self.island.position,
            )
            self._save_from = time.monotonic() + (time.monotonic() - began) / SAVING_SHARE

    # --- inside

    def _fetch(self, donor: m.Donor) -> State:
        limit = 64 * self._sync.numel + (1 << 20)  # anchor, outer state and warm starts, with room
        began = time.perf_counter()
        tensors, about = fetch_state(donor, max_bytes=limit)
        size = sum(tensor.nbytes for tensor in tensors.values())
        self.line(f"state of round {about['round']}: {size / 1e6:.1f} MB in {time.perf_counter() - began:.1f} s")
        return tensors, about

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
            progress = island.withdraw()
            save_own(
                self._run_dir,
                seat=island.seat,
                replica=self._replica,
                sync=self._sync,
                steps=island.steps,
                progress=progress,
                books=island.books,
            )
            self._save(patience_s=LEAVING_S)
        raise Interrupted(
            self._made.signals.received or 0,
            f"replica {island.seat} left after round {island.round}; what it has is in {self._run_dir}.",
        )

    def _tokens_a_step(self) -> int:
        config = self.config
        return config.batch_size * config.gradient_accumulation_steps * config.sequence_length


def _introduction(config: TrainConfig, made: _Builder, *, address: str, port: int) -> m.Hello:
    """What an island says of itself, whatever state it holds."""
    return m.Hello(
        member=secrets.token_hex(8),
        name=socket.gethostname(),
        version=atoll.__version__,
        settings_digest=settings_digest(config),
        address=address,
        port=port,
        pid=os.getpid(),
        num_workers=1,
        round=-1,
        digest="",
        founder=made.founder,
        seat=made.seat,
    )


class _NoTransport:
    """An island has no lasting connection to others: every attempt brings its own."""

    num_replicas = 1
    replica = 0

    def launch(self, *given: Any, background: bool = False) -> Any:
        raise AssertionError("an island averages in attempts")

    def close(self) -> None:
        pass


def join(line: str, *, output_dir: str = "", device: str = "auto", threads: int = 0) -> None:
    """Join the run that the token `line` leads to, from any machine that reaches its coordinator, until it is over.

    Everything but where things are kept here comes from the coordinator, as data that is checked like a file's.
    """
    token = parse_token(line)
    told = fetch_settings(token)
    settings = dict(told["settings"])
    settings |= {"output_dir": output_dir or f"runs/joined-{told['run'][:8]}", "resume": "never", "port": 0}
    settings |= {"device": device, "threads": threads, "report_to": []}
    config = build_config(settings)
    if settings_digest(config) != told["settings_digest"]:
        raise ConfigError(
            "the coordinator's settings are not those it says it has. Is it of the same version of atoll?"
        )
    print_line(
        f"joining run {told['run'][:8]}: {config.model.family}, {config.max_steps} steps, H={config.inner_steps}"
    )
    prepare_run_dir(config.output_dir, warn=print_line)
    forget_saved(Path(config.output_dir))
    run_island(config, token, founder=True)  # the first to come begins the run from its seed; later ones are told so
