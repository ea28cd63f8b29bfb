"""`atoll` with inner steps of a set length, as an accelerator would make them while the processor is free.

    python benchmarks/paced.py 45 train quickstart --replicas 2       steps of 45 ms

A step computes as always and then sleeps for what is left. So a few cores are enough for several islands, and what a
sync computes does not compete with the inner steps of another island, as it would not with a GPU's.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

UPDATE_SHARE = 0.13  # of a step, after the gradients


def pace(step_s: float) -> None:
    """From now on an inner step of this process takes `step_s` seconds, or as long as it computes if that is more."""
    from atoll.train.replica import Replica, StepReport

    compute, update = Replica.compute_gradients, Replica.update
    began: dict[int, float] = {}  # replica -> when its step did

    def paced_compute(replica: Replica, step: int) -> None:
        began[id(replica)] = time.perf_counter()
        compute(replica, step)
        _sleep_until(began[id(replica)] + (1 - UPDATE_SHARE) * step_s)

    def paced_update(replica: Replica, step: int) -> StepReport:
        report = update(replica, step)
        _sleep_until(began[id(replica)] + step_s)
        return replace(report, seconds=time.perf_counter() - began[id(replica)])

    Replica.compute_gradients = paced_compute  # type: ignore[method-assign]
    Replica.update = paced_update  # type: ignore[method-assign]


def _sleep_until(due: float) -> None:
    time.sleep(max(0.0, due - time.perf_counter()))


if __name__ == "__main__":
    from atoll.cli.main import main

    pace(float(sys.argv[1]) / 1000)
    sys.exit(main(sys.argv[2:]))
