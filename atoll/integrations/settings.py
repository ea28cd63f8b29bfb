"""The settings of `OuterSync`, checked before anything is sent."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.algo.adopt import ADOPT_RULES
from atoll.algo.outer import OUTER_OPTIMIZERS
from atoll.compress import COMPRESSORS, build_compressor
from atoll.errors import ConfigError, nearest
from atoll.train.sync import OuterSettings

BUFFERS = {"mean": "averaged after every round", "local": "left alone"}
INITIAL = {"check": "must be equal", "broadcast": "are taken from replica 0"}


@dataclass(frozen=True)
class SyncSettings:
    """What all replicas must be given alike. `OuterSync` says what each means."""

    inner_steps: int
    outer_lr: float
    outer_momentum: float
    outer_optimizer: str
    outer_epsilon: float
    compressor: str
    adopt: str
    alpha: float
    buffers: str
    initial: str
    final_sync: bool

    def __post_init__(self) -> None:
        self._check_inner_steps()
        _check("outer_lr", self.outer_lr, self.outer_lr > 0, rule="a positive number", remedy="0.7")
        _check("outer_momentum", self.outer_momentum, 0 <= self.outer_momentum < 1, rule="in [0, 1)", remedy="0.9")
        _check("outer_epsilon", self.outer_epsilon, self.outer_epsilon > 0, rule="a positive number", remedy="0.1")
        _check("alpha", self.alpha, 0 <= self.alpha <= 1, rule="in [0, 1]", remedy="0 for purely the anchor")
        check_one_of("outer_optimizer", self.outer_optimizer, OUTER_OPTIMIZERS)
        check_one_of("compressor", self.compressor, COMPRESSORS)
        check_one_of("adopt", self.adopt, ADOPT_RULES)
        check_one_of("buffers", self.buffers, BUFFERS)
        check_one_of("initial", self.initial, INITIAL)

    def outer(self) -> OuterSettings:
        """As `ReplicaSync` wants them."""
        return OuterSettings(
            optimizer=OUTER_OPTIMIZERS[self.outer_optimizer](self.outer_momentum, self.outer_epsilon),
            lr=lambda step: self.outer_lr,
            compressor=build_compressor(self.compressor),
            adopt=ADOPT_RULES[self.adopt](self.alpha, 1.0),
        )

    def facts(self) -> dict[str, str]:
        """By name, as text."""
        return {name: repr(value) for name, value in dataclasses.asdict(self).items()}

    def _check_inner_steps(self) -> None:
        if isinstance(self.inner_steps, bool) or not isinstance(self.inner_steps, int) or self.inner_steps < 1:
            raise ConfigError(
                f"inner_steps={self.inner_steps!r} is not a positive whole number; a round needs at least one "
                "optimizer step. Use 1 or more; 500 is usual."
            )


def _check(name: str, value: float, holds: bool, *, rule: str, remedy: str) -> None:
    if not (holds and math.isfinite(value)):
        raise ConfigError(f"{name}={value!r} is not {rule}. Use {name}={remedy}.")


def check_one_of(name: str, value: str, known: Mapping[str, Any]) -> None:
    """Raises ConfigError, naming the nearest, for a value that is not among `known`."""
    if value not in known:
        raise ConfigError(f"{name}={value!r} is not known.{nearest(str(value), known)} Known: {', '.join(known)}.")
