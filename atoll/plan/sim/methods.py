"""What trains, by the trainer's own words: a kind of schedule and a compressor."""

from __future__ import annotations

from atoll.algo.schedule import Schedule
from atoll.errors import ConfigError, nearest
from atoll.plan.estimate import Method
from atoll.plan.payload import Coding
from atoll.plan.recommend import fitting_fragments

BLOCKING, DELAYED, STREAMING, DATA_PARALLEL = "blocking", "delayed", "streaming", "data-parallel"
KINDS = (BLOCKING, DELAYED, STREAMING, DATA_PARALLEL)


def method_of(
    kind: str,
    coding: Coding,
    *,
    inner_steps: int,
    num_layers: int = 1,
    fragments: int = 0,
    delay: int = 0,
    blocking_first: bool = True,
) -> Method:
    """The method that `kind` names, with the schedule that the trainer would make.

    fragments, delay: of streaming; 0: about three of the `num_layers` each, and one step. blocking_first: whether the
    first round lands at once.

    >>> method_of("streaming", Coding("int4"), inner_steps=100, num_layers=12, delay=2).describe()
    'streaming (4 fragments, delay 2), H 100, int4'
    """
    if kind not in KINDS:
        raise ConfigError(f"--schedule {kind!r} is not known.{nearest(kind, KINDS)} Known: {', '.join(KINDS)}.")
    if kind == DATA_PARALLEL:
        return Method(kind, None, coding)
    if kind == BLOCKING:
        return Method(kind, Schedule(inner_steps), coding)
    if kind == DELAYED:
        return Method(kind, Schedule(inner_steps, delay=inner_steps, blocking_first=blocking_first), coding)
    count = fragments or fitting_fragments(num_layers, inner_steps)
    if count < 2:
        raise ConfigError(
            f"--inner-steps {inner_steps} has no divisor to stream by: a fragment is sent every inner_steps/fragments "
            f"steps.\nUse --inner-steps {-(-inner_steps // 10) * 10}, or --schedule delayed."
        )
    return Method(kind, Schedule(inner_steps, count, delay or 1, blocking_first=blocking_first), coding)
