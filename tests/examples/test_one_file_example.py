from __future__ import annotations

import ast
import copy
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from integrations.threaded import run_together
from torch import Tensor, nn

from atoll.algo.outer import Nesterov
from atoll.comm.base import Transport
from atoll.comm.local import LocalGroup
from atoll.integrations.outer_sync import OuterSync
from atoll.train.sync import OuterSettings, ReplicaSync

EXAMPLE = Path(__file__).parents[2] / "examples" / "diloco_in_one_file.py"
NUM_REPLICAS, ROUNDS, INNER_STEPS = 3, 4, 3


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("diloco_in_one_file", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(before)


@pytest.fixture
def models(example: ModuleType) -> list[nn.Module]:
    torch.manual_seed(0)
    first = example.TinyLM(dim=12, num_layers=1, num_heads=2, max_length=9)
    return [copy.deepcopy(first) for _ in range(NUM_REPLICAS)]


@pytest.fixture
def expected(example: ModuleType, models: list[nn.Module]) -> list[list[Tensor]]:
    """The anchors of the example after each round."""
    copies = [copy.deepcopy(model) for model in models]
    streams = [batches(example, replica) for replica in range(NUM_REPLICAS)]
    rounds = example.diloco(copies, streams, rounds=ROUNDS, inner_steps=INNER_STEPS)
    return [[theta.clone() for theta in anchor] for anchor, _ in rounds]


def batches(example: ModuleType, replica: int) -> Iterator[Tensor]:
    return example.sample(example.python_text(), seed=replica, batch_size=2, length=9)


def test_it_imports_torch_and_nothing_else_that_must_be_installed_and_is_short() -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    tree = ast.walk(ast.parse(source))
    names = {node.module for node in tree if isinstance(node, ast.ImportFrom)} | {
        alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names
    }
    foreign = {name.split(".")[0] for name in names if name} - set(sys.stdlib_module_names)
    assert foreign == {"torch"}
    assert len(source.splitlines()) < 150


def test_replica_sync_over_the_local_group_gives_its_anchors_bit_for_bit(
    example: ModuleType, models: list[nn.Module], expected: list[list[Tensor]]
) -> None:
    settings = OuterSettings(Nesterov(0.9), lr=lambda step: 0.7)
    endpoints = LocalGroup(NUM_REPLICAS).endpoints()
    syncs = [ReplicaSync(dict(m.named_parameters()), end, settings) for m, end in zip(models, endpoints, strict=True)]
    optimizers = [example.inner_optimizer(model) for model in models]
    streams = [batches(example, replica) for replica in range(NUM_REPLICAS)]
    for anchor in expected:
        for model, optimizer, stream in zip(models, optimizers, streams, strict=True):
            example.train_alone(model, optimizer, stream, inner_steps=INNER_STEPS)
        for sync in syncs:
            sync.launch(0)
        for sync in syncs:
            sync.apply(0, step=0)
            for theta, own in zip(anchor, sync.anchor().values(), strict=True):
                assert torch.equal(theta, own)


def test_outer_sync_gives_its_anchors_bit_for_bit(
    example: ModuleType, models: list[nn.Module], expected: list[list[Tensor]]
) -> None:
    def work(transport: Transport) -> list[list[Tensor]]:
        model, stream = models[transport.replica], batches(example, transport.replica)
        optimizer = example.inner_optimizer(model)
        anchors = []
        with OuterSync(model, optimizer, INNER_STEPS, transport=transport) as sync:
            for _ in range(ROUNDS):
                example.train_alone(model, optimizer, stream, inner_steps=INNER_STEPS)
                anchors.append([theta.clone() for theta in sync.anchor().values()])
        return anchors

    for anchors in run_together(work, NUM_REPLICAS):
        for anchor, wanted in zip(anchors, expected, strict=True):
            assert all(torch.equal(theta, own) for theta, own in zip(wanted, anchor, strict=True))


def test_it_prints_losses_that_fall(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(num_replicas=2, rounds=3, inner_steps=4)
    losses = [float(found) for found in re.findall(r"held out (\d+\.\d+)", capsys.readouterr().out)]
    assert len(losses) == 3 and losses[2] < losses[1] < losses[0]
