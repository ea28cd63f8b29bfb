"""A run: the replicas of this process, when they sync, and what is logged, evaluated and saved.

`train.loop` says what happens in which order; here is how. A process holds all replicas (`local`) or one
(`torchdist`); the process of replica 0 leads: it writes what is written once.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from atoll.algo.adaptive import Decision
from atoll.algo.merge import WEIGHTS, Ballot, weigh
from atoll.algo.participation import active_replicas, is_dropped
from atoll.algo.schedule import Apply, Event, Launch, Schedule
from atoll.data import TextData
from atoll.errors import DataError
from atoll.exchange import mean_sent_bytes
from atoll.train.adapting import Adapting
from atoll.train.config import TrainConfig
from atoll.train.console import Console
from atoll.train.data_parallel import GradientSync
from atoll.train.layout import Layout
from atoll.train.memory import describe_workers, format_memory, memory_by_state
from atoll.train.metrics import (
    EvalEvent,
    FaultEvent,
    MetricsWriter,
    RoundEvent,
    StepEvent,
    Tracker,
    perplexity,
    scalars_of,
)
from atoll.train.metrics import Event as MetricsEvent
from atoll.train.replica import Member, Replica, StepReport
from atoll.train.stopping import Interrupted, Signals, Stopper
from atoll.train.sync import ReplicaSync, RoundReport
from atoll.train.workers import ShardSync, Workers

HEADROOM = 1.1  # a round takes this many times as long as its sync, or that is not hidden behind it


@dataclass
class Output:
    """Where a run is written to."""

    metrics: MetricsWriter | None
    console: Console | None
    trackers: list[Tracker]

    def write(self, event: MetricsEvent, *, track: bool = True) -> None:
        if self.metrics is not None:
            self.metrics.write(event)
        if track:
            for tracker in self.trackers:
                tracker.log(scalars_of(event), event.step)

    def line(self, text: str) -> None:
        if self.console is not None:
            self.console.line(text)


class Run:
    """What the loop drives. first_step: the step before the first to train (0, or the step resumed from).

    workers: those of the replica of this process, of which it is one; layout: what each has, where there are several.
    """

    def __init__(
        self,
        config: TrainConfig,
        members: Sequence[Member],
        *,
        schedule: Schedule,
        data: TextData,
        output: Output,
        stopper: Stopper,
        signals: Signals,
        workers: Workers,
        layout: Layout | None = None,
    ) -> None:
        self.config = config
        self.members = list(members)
        self.schedule = schedule
        self.data = data
        self.output = output
        self.workers = workers
        self.layout = layout
        self.step = 0
        self.last_eval_step = 0
        self.saved_step = -1
        self._held_out = data.held_out[: config.eval_sequences]
        self._stopper = stopper
        self._signals = signals
        self._num_rounds = math.ceil((config.max_steps - config.pretrain_steps) / config.inner_steps)
        self._landed = False
        self._launched_at = 0.0
        self._launch_steps: list[deque[int]] = []
        self._exposed_s = 0.0
        self._inner_s = 0.0
        self._steps_at_round = 0
        self._told_exposed = False
        self.adapting = Adapting.begin(config) if config.adaptive else None
        self._told_memory = False
        self._syncs = [member.sync for member in self.members if isinstance(member.sync, ReplicaSync | ShardSync)]
        self._gradient_syncs = [member.sync for member in self.members if isinstance(member.sync, GradientSync)]

    @property
    def leads(self) -> bool:
        """Whether this process writes what is written once."""
        return self.members[0].index == 0 and self.workers.index == 0

    @property
    def data_parallel(self) -> bool:
        return self.config.method == "data-parallel"

    @property
    def run_dir(self) -> Path:
        return Path(self.config.output_dir)

    # --- steps

    def steps(self) -> Iterator[int]:
        """Steps to train, until the last or until all agree to stop; then what there is is saved."""
        self._steps_at_round = self.step
        flying = [self.schedule.num_in_flight(fragment, self.step) for fragment in range(self.schedule.num_fragments)]
        self._launch_steps = [deque([self.step] * count) for count in flying]
        for step in range(self.step + 1, self.config.max_steps + 1):
            self.step = step
            self._landed = False
            yield step
            if step < self.config.max_steps and self._stopper.stop_after(step) == step:
                self._leave(step)

    def active_replicas(self, step: int) -> list[Replica]:
        """Replicas of this process that train in `step`; one that begins anew does so without inner optimizer state."""
        active = [member.replica for member in self.members if member.index < self._num_active(step)]
        for replica in active:
            if self._begins_round(step) and replica.index >= self._num_active(step - 1):
                replica.start_afresh()
        return active

    def log_step(self, report: StepReport) -> None:
        rate = self._tokens_a_step() / max(report.seconds, 1e-9)  # a coarse clock may not have moved
        event = StepEvent(
            step=report.step,
            replica=report.replica,
            loss=report.loss,
            grad_norm=report.grad_norm,
            lr=report.lr,
            tokens=report.tokens,
            tokens_per_s=rate,
        )
        due = report.step % self.config.logging_steps == 0 or report.step in (1, self.config.max_steps)
        self.output.write(event, track=due and report.replica == 0)
        if report.skipped:
            self._fault("gradient is not finite; step left out", report.replica)
        if report.replica == 0:
            self._inner_s += report.seconds
            self._tell_memory()
            if self.output.console is not None:
                self.output.console.step(event) if due else self.output.console.advance(event.step)

    # --- syncs

    def events(self, step: int) -> tuple[Event, ...]:
        """What the schedule has for `step`; nothing for data parallelism, which syncs before every step."""
        if self.data_parallel:
            return ()
        if 0 < step == self.config.pretrain_steps:
            fragments = range(self.schedule.num_fragments)
            return (*(Launch(p) for p in fragments), *(Apply(p) for p in fragments))
        if step == self.config.max_steps:
            return (*self.schedule.events(step), *self.schedule.finish(step))
        return self.schedule.events(step)

    def adapt_if_due(self, step: int) -> None:
        """Where a round ends, the next one gets the rank and the length that all replicas decide alike."""
        ends = self.schedule.boundary_after(step - 1) == step
        if self.adapting is None or not ends or not self.config.pretrain_steps < step < self.config.max_steps:
            return
        self.schedule = self.adapting.next_round(self.schedule, step)
        self.set_rank()

    def set_rank(self) -> None:
        """Rounds launched from now on travel by the rank that is decided."""
        assert self.adapting is not None
        for sync in self._syncs:
            assert isinstance(sync, ReplicaSync)
            sync.set_rank(self.adapting.course.decision.rank)

    def launch(self, fragment: int, step: int) -> None:
        """Every replica of this process hands in its progress."""
        began = time.perf_counter()
        if self.adapting is not None and step != self.config.pretrain_steps:
            self.adapting.launch()
        for member, sync in zip(self.members, self._syncs, strict=True):
            self._launch_one(member.replica, sync, fragment, step)
        self._launch_steps[fragment].append(step)
        self._launched_at = began
        self._exposed_s += time.perf_counter() - began

    def apply(self, fragment: int, step: int) -> None:
        """The oldest launched round lands on every replica of this process."""
        began = time.perf_counter()
        follow = step == self.config.pretrain_steps
        self._stopper.before_sync(step, needs=self._launch_steps[fragment].popleft())
        with self._waiting(f"the other {self.config.replicas - 1} replicas to reach step {step}"):
            reports = [sync.apply(fragment, step=step, follow=follow) for sync in self._syncs]
        self._stopper.after_sync(step)
        for member in self.members:
            if follow or member.index in reports[0].refused:
                member.replica.start_afresh()  # inner state that led to no numbers would do so again
        self._exposed_s += time.perf_counter() - began
        self._log_round(reports[0], step)

    def average_gradients(self, step: int) -> None:
        """Gradients of all replicas become their mean; those of one alone are that already."""
        if self.config.replicas == 1:
            self._landed = True
            return
        began = time.perf_counter()
        self._stopper.before_sync(step)
        for sync in self._gradient_syncs:
            sync.launch(weight=1.0)
        self._launched_at = began
        reports = [sync.apply() for sync in self._gradient_syncs]
        self._stopper.after_sync(step)
        self._exposed_s += time.perf_counter() - began
        self._log_round(reports[0], step)

    # --- evaluation

    def evaluate_if_due(self, step: int) -> None:
        """Evaluate the anchor after the first outer step at or after each multiple of eval_steps, and at the end."""
        every = self.config.eval_steps
        passed = bool(every) and step // every > self.last_eval_step // every
        if self._landed and passed and step < self.config.max_steps:
            self.evaluate(step)

    def evaluate(self, step: int) -> EvalEvent:
        """Held-out loss of the anchor; each replica takes its share of the sequences."""
        self.last_eval_step = step
        sums = []
        for member in self.members:
            share = self._held_out[member.index :: self.config.replicas]
            sums.append(struct.pack("<dq", *member.replica.evaluate(share, member.sync.anchor())))
        parts = [struct.unpack("<dq", part) for part in self.exchange(sums)]
        count = sum(part[1] for part in parts)
        loss = sum(part[0] for part in parts) / count
        event = EvalEvent(
            step=step, round=self.members[0].sync.round, loss=loss, perplexity=perplexity(loss), tokens=count
        )
        if self.leads:
            self.output.write(event)
            if self.output.console is not None:
                self.output.console.evaluated(event)
        return event

    # --- saving

    def save_if_due(self, step: int) -> None:
        if self.config.save_steps and step % self.config.save_steps == 0 and step < self.config.max_steps:
            self.save(step)

    def save(self, step: int) -> None:
        """A checkpoint from which the run goes on exactly."""
        from atoll.train.resume import save_run

        if self.saved_step != step:
            save_run(self, step)
            self.saved_step = step

    def finish(self) -> None:
        """After the last step: evaluate and save, unless that was done before this run was resumed."""
        if self.last_eval_step < self.step:
            self.evaluate(self.step)
        self.save(self.step)

    def exchange(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Hand a few bytes of every replica of this process round; returns those of all replicas. Also a barrier."""
        self._stopper.before_sync(self.step)
        flights = [
            member.transport.launch(payload, _no_weights, ())
            for member, payload in zip(self.members, payloads, strict=True)
        ]
        ballots = [list(flight.ballots()) for flight in flights]
        self._stopper.after_sync(self.step)
        return ballots[0]

    def barrier(self) -> None:
        """Wait for every worker of every replica: first for those of this one, then for counterparts, then again."""
        self.workers.gather(b".")
        self.exchange([b"."] * len(self.members))
        self.workers.gather(b".")

    def close(self) -> None:
        """Close what is written to."""
        for tracker in self.output.trackers:
            tracker.close()
        if self.output.console is not None:
            self.output.console.close()
        if self.output.metrics is not None:
            self.output.metrics.close()

    def check_same_start(self) -> None:
        """Raise DesyncError unless all replicas begin from one anchor, DataError unless they have the same data."""
        digests = [bytes.fromhex(member.sync.digest()) for member in self.members]
        weigh([Ballot(self.step, digest, 1.0).pack() for digest in self.exchange(digests)])
        corpora = [text.decode() for text in self.exchange([self.data.digest.encode()] * len(self.members))]
        if len(set(corpora)) > 1:
            raise DataError(
                f"replicas found different data (digests {', '.join(text[:8] for text in corpora)}).\n"
                'Give all machines the same data.source; the "python" corpus needs the same package versions.'
            )

    # --- inside

    def _leave(self, step: int) -> None:
        self.save(step)
        name = f"step-{step:06d}"
        raise Interrupted(
            self._signals.received or 0,
            f"stopped after step {step}/{self.config.max_steps}; saved {name}. Go on with --resume auto.",
        )

    def _launch_one(self, replica: Replica, sync: ReplicaSync | ShardSync, fragment: int, step: int) -> None:
        config = self.config
        if step == config.pretrain_steps:
            sync.launch(fragment, present=replica.index == 0, follow=True)
            replica.tokens_at_sync = replica.tokens
            replica.take_pace()
            return
        active = replica.index < self._num_active(step)
        dropped = active and is_dropped(
            replica.index,
            round=self._round_of(step),
            replicas=config.replicas,
            probability=config.drop_probability,
            seed=config.seed,
        )
        weight = WEIGHTS[config.merge](replica.stream.num_examples, replica.tokens - replica.tokens_at_sync)
        weight, present, adopts = weight if active else 0.0, active and not dropped, not dropped
        if isinstance(sync, ReplicaSync):
            pace = replica.take_pace()
            sync.launch(fragment, weight=weight, present=present, adopts=adopts, step_s=pace)
        else:
            sync.launch(fragment, weight=weight, present=present, adopts=adopts)
        if fragment == self.schedule.num_fragments - 1:
            replica.tokens_at_sync = replica.tokens

    def _log_round(self, report: RoundReport, step: int) -> None:
        self._landed = True
        follow = step == self.config.pretrain_steps
        decision = None if self.adapting is None or follow else self.adapting.land(report.seen)
        if self.leads:
            for replica in report.refused:
                self._fault("contribution is not finite; refused", replica)
            event = self._round_event(report, step, decision)
            self._warn_of_exposure(report)
            self.output.write(event)
            self._show_round(event, step)
        self._inner_s = self._exposed_s = 0.0
        self._steps_at_round = step

    def _round_event(self, report: RoundReport, step: int, decision: Decision | None) -> RoundEvent:
        return RoundEvent(
            round=report.round,
            step=step,
            replicas=self.config.replicas,
            contributors=report.contributors,
            payload_bytes=report.payload_bytes,
            sync_s=time.perf_counter() - self._launched_at,
            exposed_s=self._exposed_s,
            inner_s=self._inner_s,
            anchor_digest=report.digest,
            delta_norm=report.geometry.delta_norm if report.geometry else None,
            cosine_mean=report.geometry.cosine_mean if report.geometry else None,
            cosines=report.geometry.cosines if report.geometry else None,
            norms=report.geometry.norms if report.geometry else (),
            refused=report.refused,
            compressor=self.config.compressor,
            rank=None if decision is None else decision.rank,
            inner_steps=None if decision is None else decision.inner_steps,
            observed=None if decision is None or report.seen is None else asdict(report.seen),
        )

    def _warn_of_exposure(self, report: RoundReport) -> None:
        """Once, where a round of delay is too short to hide a sync: the smallest that would do."""
        steps = self.step - self._steps_at_round
        if self._told_exposed or self.schedule.delay == 0 or self._inner_s <= 0 or steps == 0:
            return
        step_s = self._inner_s / steps
        least = math.ceil(HEADROOM * report.sync_s / step_s)
        if least > self.schedule.delay:
            self._told_exposed = True
            what = "delay" if self.schedule.num_fragments > 1 else "inner_steps"
            self.output.line(
                f"warning: {what}={self.schedule.delay} steps of {step_s:.3g} s do not hide a sync of "
                f"{report.sync_s:.3g} s. Use {what}={least} or more, or a compressor that sends less."
            )

    def _show_round(self, event: RoundEvent, step: int) -> None:
        if self.output.console is None:
            return
        self.output.console.round = event.round
        if not self.data_parallel:
            steps = step - self._steps_at_round
            self.output.console.committed(event, data_parallel_bytes=steps * self._data_parallel_bytes())

    def _data_parallel_bytes(self) -> int:
        """Bytes a replica sends in one step of data parallelism in fp32."""
        if self.layout is None:
            numel = sum(param.numel() for param in self.members[0].replica.trainable().values())
        else:
            numel = self.layout.num_parameters
        return mean_sent_bytes(numel, 4, num_replicas=self.config.replicas, replica=0)

    def _fault(self, what: str, replica: int) -> None:
        self.output.write(FaultEvent(what=what, replica=replica, step=self.step), track=False)
        self.output.line(f"replica {replica}: {what} (step {self.step})")

    def _tell_memory(self) -> None:
        """Once, when the first step has allocated everything: bytes a parameter of each state, counted."""
        if self._told_memory:
            return
        self._told_memory = True
        if self.layout is not None:
            for line in describe_workers(self.layout, self.members[0], self.workers):
                self.output.line(line)
        elif self.output.console is not None:
            self.output.line(format_memory(memory_by_state(self.members[0])))

    def _num_active(self, step: int) -> int:
        if step <= self.config.pretrain_steps:
            return 1
        return active_replicas(
            self.config.replica_schedule,
            replicas=self.config.replicas,
            round=self._round_of(step),
            num_rounds=self._num_rounds,
        )

    def _round_of(self, step: int) -> int:
        """The round that `step` belongs to, from 1."""
        return self.schedule.round_of(step)

    def _begins_round(self, step: int) -> bool:
        return step > 1 and self.schedule.boundary_after(step - 2) == step - 1

    def _tokens_a_step(self) -> int:
        return self.config.batch_size * self.config.gradient_accumulation_steps * self.config.sequence_length

    def _waiting(self, what: str) -> AbstractContextManager[None]:
        if self.output.console is None or len(self.members) > 1:
            return nullcontext()
        return self.output.console.waiting(what)


def _no_weights(ballots: Sequence[bytes]) -> list[float]:
    return [0.0] * len(ballots)
