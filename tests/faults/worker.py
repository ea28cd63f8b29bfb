"""What runs in the processes of a `Fleet`: the product's own coordinator and islands, told their name, and made faulty.

Besides the deaths of `atoll.elastic.crash` an island can be told to do something wrong at a crash point. Its deeds
stand in a file beside the plan of deaths, `NAME POINT DEED` a line, and each is done once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import atoll.train.island
from atoll.elastic import crash
from atoll.train.elastic_launch import _coordinate, _work
from atoll.train.island import Island
from atoll.train.replica import WholeModel
from atoll.train.sync import ReplicaSync
from atoll.train.workers import ModelPart

PLAN, DEEDS = "plan", "deeds"


def coordinator(settings: dict[str, Any], name: str, folder: str, pipe: Connection) -> None:
    """The coordinator's process."""
    _be(name, Path(folder))
    _coordinate(settings, "127.0.0.1", False, 0, pipe)


def island(
    settings: dict[str, Any], token: str, seat: int, name: str, folder: str, step_s: float, pipe: Connection
) -> None:
    """An island's process. step_s: the least that an inner step takes, as of an accelerator; sleeping costs no CPU."""
    _be(name, Path(folder))
    _do_deeds(name, Path(folder) / DEEDS)
    _die_in_mid_landing()
    if step_s:
        _pace(WholeModel, step_s)
        _pace(ModelPart, step_s)
    _work(settings, token, seat, settings["replicas"], pipe)


def _be(name: str, folder: Path) -> None:
    """Know one's name, and write what is said into a file of one's own."""
    os.environ[crash.VARIABLE] = f"{name}@{folder / PLAN}"
    log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)


def _die_in_mid_landing() -> None:
    """A crash point between the anchor and the parameters of a bucket."""
    adopt = ReplicaSync._adopt

    def adopt_or_die(self: ReplicaSync, *given: Any) -> None:
        crash.crash_point("island.mid_land")
        adopt(self, *given)

    ReplicaSync._adopt = adopt_or_die


def _pace(kind: type[WholeModel | ModelPart], step_s: float) -> None:
    compute = kind.compute_gradients

    def paced(self: WholeModel | ModelPart, *given: Any, **named: Any) -> torch.Tensor:
        began = time.perf_counter()
        loss = compute(self, *given, **named)
        time.sleep(max(0.0, began + step_s - time.perf_counter()))
        return loss

    kind.compute_gradients = paced


# --- deeds


def _do_deeds(name: str, path: Path) -> None:
    """Look for deeds at every crash point of an island."""
    islands: list[Island] = []
    make, die = Island.__init__, crash.crash_point

    def remember(self: Island, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        islands.append(self)

    def do_or_die(point: str) -> None:
        for deed in _planned(path, name, point):
            DO[deed](islands[0])
        die(point)

    Island.__init__ = remember
    atoll.train.island.crash_point = do_or_die


def _planned(path: Path, name: str, point: str) -> list[str]:
    """The deeds of this process at this point; they are struck off the file."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    mine = [line for line in lines if line.split()[:2] == [name, point]]
    if mine:
        path.write_text("".join(f"{line}\n" for line in lines if line not in mine))
    return [line.split()[2] for line in mine]


@torch.no_grad()
def _flip_a_bit(island: Island) -> None:
    """In the anchor, in memory."""
    first = next(iter(island.crew.worker.sync.anchor().values()))
    first.view(torch.int32).view(-1)[0] ^= 1 << 12


@torch.no_grad()
def _break(island: Island) -> None:
    next(iter(island.replica.trainable().values())).view(-1)[0] = float("nan")


@torch.no_grad()
def _explode(island: Island) -> None:
    """A pseudo-gradient a million times what it was."""
    anchor = island.crew.worker.sync.anchor()
    for name, param in island.replica.trainable().items():
        param.copy_(anchor[name] + 1e6 * (param - anchor[name]))


DO: Mapping[str, Callable[[Island], None]] = {"flip": _flip_a_bit, "nan": _break, "explode": _explode}
