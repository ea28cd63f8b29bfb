import json
from collections.abc import Callable

import pytest
import torch

from atoll.data import TextData, load_data
from atoll.errors import DataError
from atoll.train.config import DataConfig

LENGTH = 32


@pytest.fixture
def data(settings: Callable[..., DataConfig]) -> TextData:
    return load_data(settings(), sequence_length=LENGTH, num_replicas=3, seed=1)


def rows(batch: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in batch.tolist()]


def test_batches_are_long_tensors_of_sequences(data: TextData) -> None:
    batch = data.stream(0).next_batch(5)
    assert batch.shape == (5, LENGTH)
    assert batch.dtype == torch.int64
    assert int(batch.max()) < data.vocab_size


def test_every_sample_comes_once_an_epoch_whatever_the_batch(data: TextData) -> None:
    stream = data.stream(0)
    seen = [row for _ in range(3) for row in rows(stream.next_batch(stream.num_examples // 2))]
    once = data.stream(0)
    everything = rows(once.next_batch(once.num_examples))
    assert seen[: stream.num_examples // 2 * 2] == everything[: stream.num_examples // 2 * 2]
    assert sorted(rows(once.next_batch(once.num_examples))) == sorted(everything)


def test_epochs_come_in_different_orders(data: TextData) -> None:
    stream = data.stream(0)
    first, second = (rows(stream.next_batch(stream.num_examples)) for _ in range(2))
    assert first != second


def test_replicas_read_different_sequences_and_together_all(
    data: TextData, settings: Callable[..., DataConfig]
) -> None:
    parts = [rows(data.stream(r).next_batch(data.num_examples(r))) for r in range(3)]
    alone = load_data(settings(), sequence_length=LENGTH, num_replicas=1, seed=1)
    assert sorted(row for part in parts for row in part) == sorted(
        rows(alone.stream(0).next_batch(alone.num_examples(0)))
    )


@pytest.mark.parametrize("num_batches", [0, 1, 9, 60])
def test_next_batch_after_resume_is_the_next_batch_without_it(data: TextData, num_batches: int) -> None:
    stream = data.stream(2)
    for _ in range(num_batches):
        stream.next_batch(7)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = data.stream(2)
    resumed.load_state_dict(state)
    for _ in range(20):
        assert torch.equal(stream.next_batch(7), resumed.next_batch(7))


def test_sample_ten_million_is_reached_without_reading_those_before(data: TextData) -> None:
    stream = data.stream(1)
    stream.load_state_dict({**stream.state_dict(), "position": 10**7})
    count = stream.num_examples
    stepped = data.stream(1)
    stepped.load_state_dict({**stepped.state_dict(), "position": 10**7 - 10**7 % count})  # the epoch's beginning
    if 10**7 % count:
        stepped.next_batch(10**7 % count)
    assert torch.equal(stream.next_batch(count), stepped.next_batch(count))


def test_state_does_not_grow(data: TextData) -> None:
    stream = data.stream(0)
    before = len(json.dumps(stream.state_dict()))
    for _ in range(50):
        stream.next_batch(8)
    assert len(json.dumps(stream.state_dict())) <= before + 3


@pytest.mark.parametrize(
    ("changes", "arguments", "named"),
    [
        ({"max_bytes": 20_000}, {}, "digest"),
        ({"shard": "domain"}, {}, "shard"),
        ({"held_out_percent": 20}, {}, "held_out_percent"),
        ({}, {"sequence_length": 16}, "sequence_length"),
        ({}, {"seed": 2}, "seed"),
        ({}, {"num_replicas": 2}, "num_replicas"),
    ],
)
def test_a_position_in_other_data_is_refused_by_name(
    data: TextData, settings: Callable[..., DataConfig], changes: dict, arguments: dict, named: str
) -> None:
    arguments = {"sequence_length": LENGTH, "num_replicas": 3, "seed": 1, **arguments}
    other = load_data(settings(**changes), **arguments)
    with pytest.raises(DataError, match=f"belongs to other data: .*{named}") as caught:
        other.stream(0).load_state_dict(data.stream(0).state_dict())
    assert len(str(caught.value).splitlines()) <= 3


def test_a_position_of_another_replica_is_refused(data: TextData) -> None:
    with pytest.raises(DataError, match="replica 1 there, 0 here"):
        data.stream(0).load_state_dict(data.stream(1).state_dict())


@pytest.mark.parametrize("position", [-1, 1.5, "7", None, True])
def test_a_position_that_is_no_count_is_refused(data: TextData, position: object) -> None:
    stream = data.stream(0)
    with pytest.raises(DataError, match="is not a count"):
        stream.load_state_dict({**stream.state_dict(), "position": position})


@pytest.mark.parametrize("batch_size", [0, -1, 10**6])
def test_a_batch_larger_than_the_data_is_refused(data: TextData, batch_size: int) -> None:
    with pytest.raises(DataError, match=f"batch_size={batch_size} is not between 1 and the") as caught:
        data.stream(0).next_batch(batch_size)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_replica_that_is_not_there_is_refused(data: TextData) -> None:
    with pytest.raises(DataError, match="replica=3 has no shard"):
        data.stream(3)
