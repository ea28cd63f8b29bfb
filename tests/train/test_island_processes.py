"""The workers of an island find each other, and none outlives the one that leads."""

from __future__ import annotations

import os

import pytest

from atoll.cli.train import refuse_elastic
from atoll.errors import ConfigError
from atoll.train.config import build_config
from atoll.train.island_processes import Rank, fork_followers, torchrun_rank
from atoll.train.worker_channel import Channel, ChannelClosed

CONFIG = build_config({"elastic": True, "replicas": 2, "pipeline_stages": 2, "data_workers": 2, "batch_size": 4})


def test_torchrun_must_start_as_many_as_the_island_has_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert torchrun_rank(CONFIG) == Rank(1, 4)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="torchrun started 3 processes, and an island of data_workers=2 x"):
        torchrun_rank(CONFIG)


def test_torchrun_is_for_one_island() -> None:
    with pytest.raises(ConfigError, match="-m atoll join TOKEN"):
        refuse_elastic(CONFIG)


def test_followers_end_with_their_channel_and_a_failure_is_told() -> None:
    def follow(index: int, channel: Channel) -> None:
        channel.send({"pid": os.getpid()})
        if index == 1:
            raise ConfigError("this worker has no device")
        channel.receive()  # until the leader lets go

    channels = fork_followers(CONFIG, follow)
    pids = [channel.receive()[0]["pid"] for channel in channels.values()]
    assert channels[1].receive()[0] == {"broken": "this worker has no device"}
    with pytest.raises(ChannelClosed):
        channels[1].receive()
    for channel in channels.values():
        channel.close()
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [1, 1, 1]
