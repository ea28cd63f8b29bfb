"""Building one island of an elastic run, and what it writes: lines, metrics, evaluations, checkpoints.

Every island logs its own inner steps. What is written once for the run is written by the island that leads: of those in
the last round the one with the lowest seat. Rounds, members and faults are the coordinator's to log.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

import torch

import atoll
from atoll.algo.schedule import Schedule
from atoll.data import TextData, load_data
from atoll.data.stream import LeasedStream, ShardStream
from atoll.elastic import messages as m
from atoll.elastic.addresses import host_and_port, local_address_towards
from atoll.elastic.donate import fetch_state
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
from atoll.train.folder import METRICS
from atoll.train.island import Island, Stopped
from atoll.train.metrics import EvalEvent, MetricsWriter, StepEvent, perplexity
from atoll.train.replica import Replica, StepReport
from atoll.train.stopping import Interrupted, Signals, watch_signals
from atoll.train.sync import ReplicaSync

SAVING_SHARE = 0.02  # of the time, where save_steps does not say when


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
        folder = self._checkpoint() if self.founder else None
        about: dict[str, Any] = {}
        steps = 0
        if folder is not None:
            about = load_committed(folder, config, replica=replica, sync=sync)
            steps = load_own(Path(config.output_dir), seat=self.seat, replica=replica, sync=sync)
        return RunningIsland(
            self,
            data=data,
            replica=replica,
            sync=sync,
            schedule=schedule,
            steps=steps,
            last_eval_step=int(about.get("last_eval_step", 0)),
            position=int(about.get("position", 0)),
        )

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

    def _checkpoint(self) -> Path | None:
        return find_checkpoint(self.config.output_dir, self.config.resume, warn=self.line)

    def line(self, text: str) -> None:
        if self.console is not None:
            self.console.line(text)


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
        steps: int,
        last_eval_step: int,
        position: int,
    ) -> None:
        config = self.config = made.config
        self._made = made
        self._data = data
        self._replica = replica
        self._sync = sync
        self._held_out = data.held_out[: config.eval_sequences]
        self._last_eval_step = last_eval_step
        self._saved_step = -1
        self._save_from = 0.0
        self._metrics = MetricsWriter(Path(config.output_dir) / METRICS)
        host, port = host_and_port(made.token.addresses[0])
        self.address = local_address_towards(host, port)
        self._link = Link(made.token, self._hello, beat=lambda: self.island.beat())
        self.island = Island(
            config,
            member=secrets.token_hex(8),
            address=self.address,
            replica=replica,
            sync=sync,
            schedule=schedule,
            link=self._link,
            watcher=self,
            fetch=self._fetch,
            should_stop=lambda: made.signals.received is not None,
            seat=made.seat,
            has_state=made.founder,
            steps=steps,
            position=position,
        )
        self._donor_port = self._link.serve_state(self.island.snapshot, host=self.address)

    def run(self) -> None:
        """Train until the run is over, or until this process is told to leave."""
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

    def committed(self, commit: m.Commit, *, step: int, leads: bool) -> None:
        if not leads:
            return
        every = self.config.eval_steps
        if every and step // every > self._last_eval_step // every and step < self.config.max_steps:
            self._evaluate(step)
        if self._save_is_due(step):
            self._save(step)

    def line(self, text: str) -> None:
        self._made.line(text)

    # --- inside

    def _hello(self) -> m.Hello:
        return self.island.hello(
            name=socket.gethostname(),
            version=atoll.__version__,
            settings_digest=settings_digest(self.config),
            address=self.address,
            port=self._donor_port,
            pid=os.getpid(),
            num_workers=1,
            founder=self._made.founder,
        )

    def _fetch(self, donor: m.Donor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        limit = 64 * self._sync.numel + (1 << 20)  # anchor, outer state and warm starts, with room
        began = time.perf_counter()
        tensors, about = fetch_state(donor, max_bytes=limit)
        size = sum(tensor.nbytes for tensor in tensors.values())
        self.line(f"state of round {about['round']}: {size / 1e6:.1f} MB in {time.perf_counter() - began:.1f} s")
        return tensors, about

    def _save_is_due(self, step: int) -> bool:
        every = self.config.save_steps
        if every:
            return step // every > max(self._saved_step, 0) // every
        return time.monotonic() >= self._save_from

    def _save(self, step: int) -> None:
        if step == self._saved_step:
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
        self._saved_step = step
        self._save_from = time.monotonic() + (time.monotonic() - began) / SAVING_SHARE

    def _evaluate(self, step: int) -> None:
        self._last_eval_step = step
        total, count = self._replica.evaluate(self._held_out, self._sync.anchor())
        loss = total / count
        event = EvalEvent(step=step, round=self.island.round, loss=loss, perplexity=perplexity(loss), tokens=count)
        self._metrics.write(event)
        if self._made.console is not None:
            self._made.console.evaluated(event)

    def _step(self) -> int:
        return min(self.island.round * self.config.inner_steps, self.config.max_steps)

    def _conclude(self) -> None:
        """The run is over: the island that leads evaluates and saves."""
        finish = self.island.finish
        assert finish is not None
        if self.island.leads:
            if self._last_eval_step < self._step():
                self._evaluate(self._step())
            self._save(self._step())
        if finish.exit_code:
            error = AtollError(finish.why or "the run ended before its time")
            error.exit_code = finish.exit_code
            raise error

    def _leave(self) -> None:
        """Told to go: say so to the others, keep what there is."""
        self._link.send(m.Leave("told to stop"))
        run_dir = Path(self.config.output_dir)
        if self.island.has_state and self.island.seat >= 0:
            save_own(run_dir, seat=self.island.seat, replica=self._replica, sync=self._sync, steps=self.island.steps)
            if self.island.leads:
                self._save(self._step())
        raise Interrupted(
            self._made.signals.received or 0,
            f"replica {self.island.seat} left after round {self.island.round}; what it has is in {run_dir}.",
        )

    def _tokens_a_step(self) -> int:
        config = self.config
        return config.batch_size * config.gradient_accumulation_steps * config.sequence_length


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
    run_island(config, token, founder=True)  # the first to come begins the run from its seed; later ones are told so
