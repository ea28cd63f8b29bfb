"""A digest of an anchor is of the anchor, not of the workers that hold it."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from atoll.train.anchor_digest import Leaves, OwnedRows, combine, row_width

SHAPES = {"wide": (5, 9000), "tall": (3000, 7), "vector": (10_001,), "tiny": (3,), "scalar": ()}
ANCHOR = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in SHAPES.items()}


def cut(num_workers: int, seed: int) -> list[list[OwnedRows]]:
    """Rows of every parameter to workers at random, each in an order of its own."""
    chance = random.Random(seed)
    workers: list[list[OwnedRows]] = [[] for _ in range(num_workers)]
    for name, shape in SHAPES.items():
        rows, width = (shape[0] if shape else 1), row_width(shape)
        bounds = sorted([0, rows, *(chance.randint(0, rows) for _ in range(num_workers - 1))])
        for worker, start, stop in zip(workers, bounds, bounds[1:], strict=False):
            worker.append(OwnedRows(name, start * width, stop * width, shape))
    for worker in workers:
        chance.shuffle(worker)
    return workers


def leaves(owned: list[OwnedRows], anchor: dict[str, Tensor], *, pieces: int) -> bytes:
    told = Leaves(owned)
    flat = torch.cat([anchor[one.name].reshape(-1)[one.start : one.stop] for one in owned])
    for part in flat.tensor_split(pieces):
        told.update(part)
    return told.told()


def digest(workers: list[list[OwnedRows]], anchor: dict[str, Tensor], *, pieces: int = 1) -> str:
    return combine(workers, [leaves(owned, anchor, pieces=pieces) for owned in workers])


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7])
def test_however_rows_lie_the_digest_is_one(num_workers: int) -> None:
    whole = digest(cut(1, 0), ANCHOR)
    assert {digest(cut(num_workers, seed), ANCHOR, pieces=1 + seed * 5) for seed in range(6)} == {whole}


@pytest.mark.parametrize("name", SHAPES)
def test_one_bit_anywhere_is_another_digest(name: str) -> None:
    changed = ANCHOR | {name: ANCHOR[name].clone()}
    changed[name].view(-1)[-1:] = changed[name].view(-1)[-1:] * (1 + 2**-23)
    for workers in (cut(1, 0), cut(3, 1)):
        assert digest(workers, changed) != digest(workers, ANCHOR)


def test_rows_that_were_not_shown_are_missed() -> None:
    told = Leaves([OwnedRows("vector", 0, 8, (8,))])
    told.update(torch.zeros(4))
    with pytest.raises(AssertionError, match="more rows"):
        told.told()
