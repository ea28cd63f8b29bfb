"""All workers of an elastic island as one, in the process that leads it; and the loop of those that do not.

    training thread of the leader     followers
    step 41 ───────────────────────▶  train step 41            nobody answers: the workers meet in the step itself
    take ──────────────────────────▶  take           ◀─ norm, finite ─┐   all answers are there before anything is
    land ──────────────────────────▶  land           ◀─ as foreseen ──┘   said to the coordinator
    average (thread of an attempt) ─▶ average, in a thread beside the training

An island of one worker is a crew without followers: the same calls, and no messages. Whatever could come out
differently on two workers (what is finite, which digest, when to stop) is put together here, and then said to all.
"""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load as unpack_tensors
from safetensors.torch import save as pack_tensors
from torch import Tensor

from atoll.elastic.donate import Held, Promised, State
from atoll.elastic.group import hand_round
from atoll.errors import AtollError, CheckpointError, ConfigError, DataError, StorageError, TransportError
from atoll.exchange import Traffic
from atoll.train.anchor_digest import combine
from atoll.train.committed import cut_to
from atoll.train.island_worker import ASIDE, Answer, Given, IslandWorker, owned_of
from atoll.train.replica import StepReport
from atoll.train.stopping import Signals
from atoll.train.sync import Offer
from atoll.train.worker_channel import Channel, ChannelClosed, Message

BEAT_S = 0.5  # between two signs of life of a worker
FROZEN_BEATS = 12  # looks without a sign of life, half a second apart, after which a worker counts as dead

GONE_S = 2.0  # for the end of another worker to be heard of
HAND_OVER_S = 60.0  # for a worker to hand over one tensor
STOPPING_S = 5.0  # for a worker to end that was told to; it may be in a collective that the leader left

_ERRORS = {kind.__name__: kind for kind in (TransportError, CheckpointError, ConfigError, DataError, StorageError)}


@dataclass(frozen=True)
class Reached:
    """An attempt that the island averaged. digest, base: of the anchor it leads to, and of the one it starts from.

    meet_s, outer_s: seconds until all were connected, and that the outer step took; of the slowest worker.
    """

    attempt: int
    digest: str
    base: str
    sent: Traffic
    meet_s: float = 0.0
    outer_s: float = 0.0


class Follower:
    """The leader's end of one other worker."""

    def __init__(self, index: int, channel: Channel) -> None:
        self.index = index
        self.channel = channel
        self.looks = 0  # since its last sign of life
        self._number = 0
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[tuple[Message, bytes]]] = {}

    def tell(self, command: str, given: Given, payload: bytes = b"") -> Future[tuple[Message, bytes]]:
        """Have it do something; the future has its answer."""
        answer: Future[tuple[Message, bytes]] = Future()
        with self._lock:
            self._number += 1
            self._waiting[self._number] = answer
            self.channel.send({"do": command, "given": given, "number": self._number}, payload)
        return answer

    def say(self, command: str, given: Given, payload: bytes = b"") -> None:
        """Have it do something that needs no answer."""
        with self._lock:
            self.channel.send({"do": command, "given": given, "number": 0}, payload)

    def heard(self, message: Message, payload: bytes) -> None:
        with self._lock:
            answer = self._waiting.pop(message["number"])
        answer.set_result((message, payload))


class Crew:
    """The workers of an island. worker: the one of this process, which leads.

    lost: is told why, when another worker is gone or has failed: an island without one of its workers is dead.
    """

    def __init__(
        self, worker: IslandWorker, followers: Mapping[int, Channel], *, lost: Callable[[str], None] = lambda why: None
    ) -> None:
        self.worker = worker
        self.told_to_stop = False  # any of the others was
        self._followers = [Follower(index, channel) for index, channel in sorted(followers.items())]
        self._lost = lost
        self._closing = False
        self._gone = threading.Event()
        self._transfers = 0
        self._numbering = threading.Lock()
        for follower in self._followers:
            self._thread(self._listen, follower)
        if self._followers:
            self._thread(self._look)
        self._owned = [owned_of(answer["owned"]) for answer, _ in self._ask("introduce", {})]

    def _thread(self, target: Callable[..., None], *given: Any) -> None:
        threading.Thread(target=target, args=given, name=f"atoll-crew-{target.__name__}", daemon=True).start()

    @property
    def num_workers(self) -> int:
        return 1 + len(self._followers)

    @property
    def numel(self) -> int:
        """Parameters that sync, of all workers."""
        return sum(one.numel for owned in self._owned for one in owned)

    @property
    def round(self) -> int:
        return self.worker.sync.round

    # --- inner steps

    def step(self, step: int) -> StepReport:
        """One inner step of the island."""
        with self._in_company():
            if self._followers:
                config = self.worker.config
                samples = self.worker.stream.upcoming(config.batch_size * config.gradient_accumulation_steps)
                for follower in self._followers:
                    follower.say("step", {"step": step, "samples": samples})
            return self.worker.train(step)

    def restart(self) -> None:
        """Throw the progress of this island away: its parameters become the anchor, and the inner state begins anew."""
        self._ask("restart", {})

    def evaluate(self, place: int, of: int) -> tuple[float, int]:
        """Summed loss in nats, and predicted tokens, of the anchor on this island's share of the held-out text."""
        answer, _ = self._ask("evaluate", {"place": place, "of": of})[0]
        return float(answer["loss_sum"]), int(answer["tokens"])

    # --- rounds

    def take(self, *, weight: float) -> Offer:
        """Take the progress for a round; see `ReplicaSync.take`. One worker that is not finite speaks for all."""
        answers = [answer for answer, _ in self._ask("take", {"weight": weight})]
        norms = [float(answer["norm"]) for answer in answers]
        norm = norms[0] if len(norms) == 1 else math.sqrt(sum(norm * norm for norm in norms))
        return Offer(self.round + 1, weight, norm, all(answer["finite"] for answer in answers))

    def take_back(self) -> None:
        """What was offered is not sent: it is owed to the next round."""
        self._ask("take_back", {})

    def average(
        self,
        store: dist.Store,
        meeting: tuple[str, int],
        *,
        attempt: int,
        round: int,
        place: int,
        weights: Sequence[float],
        offered: bool,
        step: int,
        base: str,
        patience_s: float,
    ) -> Reached:
        """Average with the islands that meet at `store`, each worker its own rows; changes nothing.

        base: digest of the anchor that it starts from.
        """
        told = self._roster(store, attempt, place=place, num_islands=len(weights), patience_s=patience_s)
        given = {
            "attempt": attempt,
            "round": round,
            "place": place,
            "weights": list(weights),
            "offered": offered,
            "step": step,
            "base": base,
            "islands": [island["owned"] for island in told],
            "alike": all(island == told[0] for island in told),
            "codes": sorted(_common([island["codes"] for island in told])),
            "patience_s": patience_s,
            "meeting": list(meeting),
        }
        waiting = [follower.tell("average", given) for follower in self._followers]
        answers = self._collect(waiting, lambda: self.worker.average_at(store, given))
        grams = [answer["gram"] for answer, _ in answers]
        gram = None if None in grams else torch.tensor(grams, dtype=torch.float64).sum(0)
        meet_s, waited_s, outer_s = (
            max(float(answer[key]) for answer, _ in answers) for key in ("meet_s", "waited_s", "outer_s")
        )
        sent = Traffic(sum(answer["payload_bytes"] for answer, _ in answers), gram, waited_s)
        bases = [leaves[: answer["base_bytes"]] for answer, leaves in answers]
        afters = [leaves[answer["base_bytes"] :] for answer, leaves in answers]
        return Reached(attempt, combine(self._owned, afters), combine(self._owned, bases), sent, meet_s, outer_s)

    def _roster(
        self, store: dist.Store, attempt: int, *, place: int, num_islands: int, patience_s: float
    ) -> list[dict[str, Any]]:
        """Who owns what, and digests of what compressors should hold alike, of every island of the attempt."""
        codes = {name: digest for answer, _ in self._ask("codes", {}) for name, digest in answer["codes"].items()}
        owned = [{one.name: [one.start, one.stop] for one in owned} for owned in self._owned]
        own = json.dumps({"owned": owned, "codes": codes}).encode()
        name = f"attempt-{attempt}/workers"
        rows = hand_round(store, name, place, own, size=num_islands, timeout_s=patience_s)
        try:
            return [json.loads(row) for row in rows]
        except ValueError as error:
            raise TransportError(f"an island said what its workers own in no JSON: {error}") from None

    def land(self, reached: Reached, *, step: int) -> str:
        """Adopt an attempt that is committed; returns the digest of the anchor as it is now."""
        answers = self._ask("land", {"attempt": reached.attempt, "step": step})
        return reached.digest if all(answer["as_foreseen"] for answer, _ in answers) else self.digest()

    def digest(self) -> str:
        """Of the anchor as it is in the memory of all workers now, 32 hex digits."""
        return combine(self._owned, [leaves for _, leaves in self._ask("measure", {})])

    # --- the committed state

    def capture(self, ahead: Reached | None, *, step: int) -> State:
        """The committed state, by the rows of each worker, or what landing `ahead` will leave.

        Every worker copies its own rows now; those of the others come to this process one by one, when they are sent.
        """
        with self._numbering:
            self._transfers += 1
            transfer = self._transfers
        given = {"ahead": None if ahead is None else ahead.attempt, "step": step, "transfer": transfer}
        waiting = [follower.tell("capture", given) for follower in self._followers]
        own, about = self.worker.copy_committed(given["ahead"], step=step)
        tensors: dict[str, Held] = dict(own)
        for follower, answer in zip(self._followers, waiting, strict=True):
            message, _ = answer.result()
            _raise_failure(message, follower.index)
            about["shapes"] |= message["answer"]["shapes"]
            for name, shape in message["answer"]["tensors"].items():
                load = partial(_fetch_from, follower, transfer, name)
                tensors[name] = Promised(torch.float32, tuple(shape), load)
        return tensors, about

    def begin_transfer(self) -> int:
        """The number of a state that is about to come in pieces, for `stage` and `restore`."""
        with self._numbering:
            self._transfers += 1
            return self._transfers

    def stage(self, transfer: int, name: str, tensor: Tensor) -> None:
        """Hand every worker its rows of a piece that has come. From any thread."""
        own, *others = [cut_to(name, tensor, owned) for owned in self._owned]
        self.worker.stage(transfer, own)
        for follower, part in zip(self._followers, others, strict=True):
            if part:
                follower.say("stage", {"transfer": transfer}, pack_tensors(part))

    def restore(self, about: Mapping[str, Any], *, transfer: int, keep: bool, spent: bool, rebase: bool) -> str:
        """Take over a state that was staged, of an island of any shape; returns its digest.

        keep: what no committed round holds of this island's progress stays owed; spent: the oldest offer is in one.
        rebase: parameters become the anchor, less that progress; else they stay.
        Raises `CheckpointError` where it is not whole, altered, or of another model; then nothing has changed.
        """
        shapes, counts = about.get("shapes"), about.get("counts")
        given = {"keep": keep, "spent": spent, "transfer": transfer, "counts": counts, "shapes": shapes}
        failure: AtollError | None = None
        try:
            digest = combine(self._owned, [leaves for _, leaves in self._ask("restore", given)])
            if digest != about["digest"]:
                failure = CheckpointError(
                    f"the state of round {about['round']} came with digest {str(about['digest'])[:8]} and has "
                    f"{digest[:8]}: it was altered before it was sent. Fetch it from another island."
                )
        except CheckpointError as error:
            failure = error
        self._ask("settle", {"ok": failure is None, "rebase": rebase})
        if failure is not None:
            raise failure
        return digest

    def withdraw(self, *, spent: bool) -> None:
        """Nothing is on offer any more; every worker keeps the progress that no committed round holds."""
        self._ask("withdraw", {"spent": spent})

    # --- files

    def save(self, *, step: int) -> None:
        """Every worker writes its rows of the committed state beside the others'."""
        self._ask("save", {"step": step})

    def save_own(self, *, seat: int, steps: int, books: str) -> None:
        """Every worker keeps what it has of its own."""
        self._ask("save_own", {"seat": seat, "steps": steps, "books": books, "workers": self.num_workers})

    def resume(self, folder: Path, *, seat: int) -> tuple[dict[str, Any], str]:
        """Every worker goes on from a checkpoint. Returns what is said of it, and the digest of the anchor."""
        answers = self._ask("resume", {"folder": str(folder), "seat": seat})
        return answers[0][0], combine(self._owned, [leaves for _, leaves in answers])

    def memory(self) -> list[dict[str, int]]:
        """Bytes that each worker holds, by state."""
        return [answer["bytes"] for answer, _ in self._ask("memory", {})]

    def close(self) -> None:
        """The island has done its work: the others end."""
        self._closing = True
        for follower in self._followers:
            with suppress(ChannelClosed):
                follower.say("stop", {})

    # --- inside

    @contextmanager
    def _in_company(self) -> Iterator[None]:
        """What fails here because another worker died is that worker's death: its channel will say so in a moment.

        worker 1 dies        leader: a gradient does not come, RuntimeError
                             listening thread: the channel has ended; it ends this process, and says why
        """
        try:
            yield
        except (RuntimeError, ChannelClosed) as error:
            if self._followers and self._gone.wait(GONE_S):
                raise TransportError("a worker of this island is gone") from error
            raise

    def _ask(self, command: str, given: Given) -> list[Answer]:
        """Have every worker do something; their answers in the order of the workers. Raises what any of them raised."""
        with self._in_company():
            waiting = [follower.tell(command, given) for follower in self._followers]
            return self._collect(waiting, lambda: self.worker.do(command, given))

    def _collect(self, waiting: Sequence[Future[tuple[Message, bytes]]], own: Callable[[], Answer]) -> list[Answer]:
        """What this worker answers, and then the others. Nobody is left behind: all have answered when this is over."""
        failure: AtollError | None = None
        answers: list[Answer] = []
        try:
            answers.append(own())
        except AtollError as error:
            failure = error
        for follower, answer in zip(self._followers, waiting, strict=True):
            message, payload = answer.result()
            try:
                _raise_failure(message, follower.index)
            except AtollError as error:
                failure = failure or error
            else:
                answers.append((message["answer"], payload))
        if failure is not None:
            raise failure
        return answers

    def _listen(self, follower: Follower) -> None:
        """In a thread of its own."""
        while True:
            try:
                message, payload = follower.channel.receive()
            except ChannelClosed:
                if not self._closing:
                    self._gone.set()
                    self._lost(f"worker {follower.index} of this island is gone")
                return
            follower.looks = 0
            self.told_to_stop |= bool(message.get("told"))
            if "broken" in message:
                self._lost(f"worker {follower.index} of this island failed:\n{message['broken']}")
            elif "number" in message:
                follower.heard(message, bytes(payload))

    def _look(self) -> None:
        """In a thread of its own. Looks are counted, not seconds: while this process is frozen nobody is late."""
        while not self._closing:
            time.sleep(BEAT_S)
            for follower in self._followers:
                follower.looks += 1
                if follower.looks == FROZEN_BEATS and not self._closing:
                    self._lost(f"worker {follower.index} of this island says nothing any more")


def _common(codes: Sequence[Mapping[str, str]]) -> set[str]:
    """Names under which all hold the same."""
    return {name for name, digest in codes[0].items() if all(other.get(name) == digest for other in codes)}


def _fetch_from(follower: Follower, transfer: int, name: str) -> Tensor:
    """One tensor of a copy that another worker made. Raises ConnectionError."""
    try:
        message, payload = follower.tell("hand_over", {"transfer": transfer, "name": name}).result(HAND_OVER_S)
        _raise_failure(message, follower.index)
    except (TimeoutError, AtollError) as error:
        raise ConnectionError(f"worker {follower.index} did not hand over {name}: {error}") from error
    return unpack_tensors(payload)[""]


def _raise_failure(message: Message, index: int) -> None:
    if "failed" in message:
        kind, why = message["failed"]
        raise _ERRORS.get(kind, AtollError)(f"worker {index}: {why}")


# --- the others


def follow(
    worker: IslandWorker, channel: Channel, *, signals: Signals, end: Callable[[int], object] = os._exit
) -> None:
    """Do what the leader says, until it says stop. Where it is gone, so is this process: `end` ends it."""
    commands: queue.Queue[tuple[Message, bytes]] = queue.Queue()
    threading.Thread(target=_hear, args=(worker, channel, commands, end), name="atoll-crew-hear", daemon=True).start()
    threading.Thread(target=_beat, args=(channel, signals), name="atoll-crew-beat", daemon=True).start()
    while True:
        message, payload = commands.get()
        if message["do"] == "stop":
            return
        _obey(worker, channel, message, payload)


def _hear(
    worker: IslandWorker,
    channel: Channel,
    commands: queue.Queue[tuple[Message, bytes]],
    end: Callable[[int], object],
) -> None:
    """In a thread of its own, which the end of the leader ends with the process, whatever that is doing."""
    while True:
        try:
            message, payload = channel.receive()
        except ChannelClosed:
            end(1)
            return
        if message["do"] == "stop":
            commands.put((message, b""))
            time.sleep(STOPPING_S)
            end(1)
            return
        if message["do"] == "stage":
            worker.stage(message["given"]["transfer"], unpack_tensors(bytes(payload)))
        elif message["do"] in ASIDE:
            given = (worker, channel, message, bytes(payload))
            threading.Thread(target=_obey, args=given, name=f"atoll-crew-{message['do']}", daemon=True).start()
        else:
            commands.put((message, bytes(payload)))


def _obey(worker: IslandWorker, channel: Channel, message: Message, payload: bytes) -> None:
    number = message["number"]
    try:
        answer, leaves = worker.do(message["do"], message["given"], payload)
    except AtollError as error:
        failed = [type(error).__name__, str(error).splitlines()[0]]
        channel.send({"number": number, "failed": failed} if number else {"broken": str(error)})
    except Exception as error:  # whatever it is, the leader must hear of it: it waits for the answer
        if message["do"] not in ASIDE:
            channel.send({"broken": f"{type(error).__name__}: {error}"})
            raise
        channel.send({"number": number, "failed": ["AtollError", f"{type(error).__name__}: {error}"]})
    else:
        if number:
            channel.send({"number": number, "answer": answer}, leaves)


def _beat(channel: Channel, signals: Signals) -> None:
    """In a thread of its own: signs of life, and whether this process was told to end."""
    with suppress(ChannelClosed):
        while True:
            channel.send({"told": signals.received == signal.SIGTERM})
            time.sleep(BEAT_S)
