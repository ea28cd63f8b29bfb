"""The workers of an island act as one: what one of them says counts for all, and without one of them there is none."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from train.tiny import tiny_config

from atoll.comm.local import LocalGroup
from atoll.data import load_data
from atoll.data.stream import LeasedStream
from atoll.errors import CheckpointError
from atoll.models import build_model
from atoll.train import crew as crew_module
from atoll.train.build import make_schedule, outer_settings, pick_device
from atoll.train.config import TrainConfig
from atoll.train.crew import Crew, follow
from atoll.train.island_worker import Answer, IslandWorker
from atoll.train.replica import Replica
from atoll.train.stopping import Signals
from atoll.train.sync import ReplicaSync
from atoll.train.worker_channel import Channel, pair


def island_worker(config: TrainConfig) -> IslandWorker:
    data = load_data(config.data, sequence_length=config.sequence_length, num_replicas=1, seed=config.seed)
    model = build_model(
        config.model, vocab_size=data.vocab_size, sequence_length=config.sequence_length, seed=config.seed
    )
    device = pick_device(config, 0)
    replica = Replica(0, model=model, stream=LeasedStream(data.stream(0)), config=config, device=device)
    settings = outer_settings(config, make_schedule(config))
    sync = ReplicaSync(replica.trainable(), LocalGroup(1).endpoints()[0], settings)
    return IslandWorker(config, replica, sync, data=data, address="127.0.0.1")


class Other:
    """Stands for a worker of other rows: it answers what it is told to."""

    def __init__(self, answers: dict[str, Callable[[], Answer]]) -> None:
        self._answers = answers
        self.asked: list[str] = []

    def do(self, command: str, given: Any, payload: bytes) -> Answer:
        self.asked.append(command)
        return self._answers.get(command, lambda: ({"owned": {}}, b""))()


@pytest.fixture
def make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Crew, Other, Channel, queue.Queue[str]]]]:
    """A crew of a real worker and one other; its end of the channel, and what the crew lost."""
    with ExitStack() as stack:

        def crew(**answers: Callable[[], Answer]) -> tuple[Crew, Other, Channel, queue.Queue[str]]:
            ours, theirs = pair()
            other, lost = Other(answers), queue.Queue[str]()
            thread = threading.Thread(
                target=follow, args=(other, theirs), kwargs={"signals": signals, "end": ended}, daemon=True
            )
            thread.start()
            made = Crew(island_worker(tiny_config(tmp_path)), {1: ours}, lost=lost.put)
            stack.callback(theirs.close)
            stack.callback(ours.close)
            stack.callback(thread.join, 1.0)  # one whose process would have ended waits for ever
            stack.callback(ours.end)
            stack.callback(made.close)
            return made, other, theirs, lost

        def ended(code: int) -> None:
            """Of the process, which is this one."""

        monkeypatch.setattr(crew_module, "STOPPING_S", 0.0)
        signals = Signals()
        yield crew


def test_one_worker_that_is_not_finite_speaks_for_the_island(make: Callable[..., Any]) -> None:
    crew, _, _, _ = make(take=lambda: ({"norm": float("nan"), "finite": False}, b""))
    offer = crew.take(weight=8.0)
    assert (offer.finite, offer.weight, offer.round) == (False, 8.0, 1)
    assert offer.norm != offer.norm


def test_the_norm_of_an_island_is_that_of_all_its_rows(make: Callable[..., Any]) -> None:
    crew, _, _, _ = make(take=lambda: ({"norm": 3.0, "finite": True}, b""))
    assert crew.take(weight=1.0).norm == 3.0  # the other has made no progress


def test_a_refusal_of_one_worker_is_raised_when_all_have_answered(make: Callable[..., Any]) -> None:
    def refuse() -> Answer:
        raise CheckpointError("these rows are of another model")

    crew, other, _, _ = make(take_back=refuse)
    with pytest.raises(CheckpointError, match="worker 1: these rows are of another model"):
        crew.take_back()
    assert crew.evaluate(0, 1)[1] > 0
    assert other.asked == ["introduce", "take_back", "evaluate"]


def test_the_loss_of_one_worker_is_told(make: Callable[..., Any]) -> None:
    _, _, theirs, lost = make()
    theirs.end()
    assert lost.get(timeout=5) == "worker 1 of this island is gone"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the bug
def test_a_bug_in_one_worker_is_told_with_its_name(make: Callable[..., Any]) -> None:
    def fail() -> Answer:
        raise RuntimeError("no such row")

    crew, _, _, lost = make(save=fail)
    threading.Thread(target=crew.save, kwargs={"step": 3}, daemon=True).start()
    assert "worker 1 of this island failed:\nRuntimeError: no such row" in lost.get(timeout=5)
