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
from torch import Tensor, nn

from atoll.algo.adopt import carry
from atoll.algo.outer import Nesterov
from atoll.algo.schedule import Launch, Schedule
from atoll.comm.local import LocalGroup
from atoll.compress import CompressorOptions, build_compressor
from atoll.train.sync import OuterSettings, ReplicaSync

EXAMPLE = Path(__file__).parents[2] / "examples" / "dilocox_in_one_file.py"
ROUNDS, INNER_STEPS, RANK = 8, 3, 3


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dilocox_in_one_file", EXAMPLE)
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


def models_of(example: ModuleType, num_replicas: int) -> list[nn.Module]:
    torch.manual_seed(0)
    first = example.TinyLM(dim=12, num_layers=1, num_heads=2, max_length=9)
    return [copy.deepcopy(first) for _ in range(num_replicas)]


def streams_of(example: ModuleType, num_replicas: int) -> list[Iterator[Tensor]]:
    text = torch.arange(5000).square() % 251
    return [example.sample(text, seed=replica, batch_size=2, length=9) for replica in range(num_replicas)]


def anchors_of_the_example(example: ModuleType, num_replicas: int) -> list[list[Tensor]]:
    models, streams = models_of(example, num_replicas), streams_of(example, num_replicas)
    rounds = example.dilocox(models, streams, rounds=ROUNDS, inner_steps=INNER_STEPS, rank=RANK)
    return [[theta.clone() for theta in anchor] for anchor in rounds]


def anchors_of_the_package(example: ModuleType, num_replicas: int) -> list[list[Tensor]]:
    models, streams = models_of(example, num_replicas), streams_of(example, num_replicas)
    schedule = Schedule(INNER_STEPS, delay=INNER_STEPS, blocking_first=True)
    settings = OuterSettings(
        Nesterov(0.4),
        lr=lambda step: 0.6,
        compressor=build_compressor("lowrank+int4", CompressorOptions(rank=RANK)),
        adopt=carry(1 / num_replicas),
        keep_contribution=True,
    )
    ends = LocalGroup(num_replicas).endpoints()
    syncs = [ReplicaSync(dict(m.named_parameters()), end, settings) for m, end in zip(models, ends, strict=True)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95)) for model in models]
    anchors = []
    for number in range(1, ROUNDS + 1):
        for model, optimizer, stream in zip(models, optimizers, streams, strict=True):
            example.train_alone(model, optimizer, stream, INNER_STEPS)
        step = number * INNER_STEPS
        for event in (*schedule.events(step), *(schedule.finish(step) if number == ROUNDS else ())):
            for sync in syncs:
                sync.launch(0) if isinstance(event, Launch) else sync.apply(0, step=step)
            if not isinstance(event, Launch):
                anchors.append([theta.clone() for theta in syncs[0].anchor().values()])
    assert len({sync.digest() for sync in syncs}) == 1
    return anchors


def test_it_imports_torch_and_nothing_else_that_must_be_installed_and_is_short() -> None:
    source = EXAMPLE.read_text(encoding="utf-8")
    tree = list(ast.walk(ast.parse(source)))
    names = {node.module for node in tree if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names}
    assert {name.split(".")[0] for name in names if name} - set(sys.stdlib_module_names) == {"torch"}
    assert len(source.splitlines()) < 200


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_the_package_gives_its_anchors_bit_for_bit(example: ModuleType, num_replicas: int) -> None:
    """Eight landings: the first blocks, one round is flushed at the end."""
    expected = anchors_of_the_example(example, num_replicas)
    found = anchors_of_the_package(example, num_replicas)
    assert len(expected) == len(found) == ROUNDS
    for number, (wanted, anchor) in enumerate(zip(expected, found, strict=True)):
        for place, (theta, own) in enumerate(zip(wanted, anchor, strict=True)):
            assert torch.equal(theta, own), f"landing {number + 1}, tensor {place} of shape {tuple(theta.shape)}"


def test_matrices_are_factored_and_the_rest_is_not(example: ModuleType) -> None:
    shapes = [param.shape for param in models_of(example, 1)[0].parameters()]
    averagers = [example.Averager(shape, rank=RANK, num_replicas=2) for shape in shapes]
    factored = [shape for shape, averager in zip(shapes, averagers, strict=True) if averager.factored]
    assert len(factored) >= 3 and len(factored) < len(shapes)


def test_it_prints_losses_that_fall(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(num_replicas=2, rounds=4, inner_steps=4)
    losses = [float(found) for found in re.findall(r"held out (\d+\.\d+)", capsys.readouterr().out)]
    assert len(losses) == 4 and losses[3] < losses[2] < losses[0]
