from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from atoll.comm.local import LocalGroup
from atoll.errors import ConfigError, TransportError
from atoll.integrations.connect import ENVIRONMENT
from atoll.integrations.outer_sync import OuterSync


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    yield
    assert not dist.is_initialized()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launched(monkeypatch: pytest.MonkeyPatch, *, rank: int, world_size: int) -> None:
    values = (rank, world_size, "127.0.0.1", free_port())
    for name, value in zip(ENVIRONMENT, values, strict=True):
        monkeypatch.setenv(name, str(value))


def train_a_step(**settings: object) -> OuterSync:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with OuterSync(model, optimizer, 1, **settings) as sync:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return sync


def test_without_a_launcher_there_is_one_replica_and_no_group() -> None:
    sync = train_a_step()
    assert (sync.replica, sync.num_replicas, sync.round) == (0, 1, 1)


def test_a_group_is_made_of_the_launchers_environment_and_taken_down(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, rank=0, world_size=1)
    model = nn.Linear(2, 1)
    sync = OuterSync(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert dist.is_initialized() and dist.get_backend() == "gloo"
    sync.close()
    assert not dist.is_initialized()


def test_a_group_made_here_is_taken_down_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, rank=0, world_size=1)
    model = nn.Linear(2, 1)
    with pytest.raises(KeyError), OuterSync(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        raise KeyError


def test_the_users_own_group_is_used_and_left_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert train_a_step().round == 1
        assert train_a_step(group=dist.group.WORLD).round == 1
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_an_environment_is_a_mistake_and_not_a_lone_replica(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    launched(monkeypatch, rank=0, world_size=2)
    monkeypatch.delenv(missing)
    with pytest.raises(ConfigError, match=f"WORLD_SIZE=2 is set but {missing} is not"):
        train_a_step()


def test_a_link_and_a_group_are_not_both_taken() -> None:
    with pytest.raises(ConfigError, match="transport and group were both given"):
        train_a_step(transport=LocalGroup(1).endpoints()[0], group=object())


def test_a_group_without_torch_distributed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.distributed is not initialised"):
        train_a_step(group=object())


def test_others_that_never_come_are_a_transport_error(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, rank=0, world_size=2)
    with pytest.raises(TransportError, match=r"replica 0 of 2 could not reach the others at 127\.0\.0\.1"):
        train_a_step(timeout_s=1.0)
    assert "RANK" in os.environ
