"""The training loop: DiLoCo (arXiv 2311.08105, Algorithm 1) as it stands in the paper.

    for every step, every replica:   θᵢ ← AdamW(θᵢ, batch of its own shard)          no communication
    when the schedule says launch:   Δᵢ = θ − θᵢ sets out to be averaged
    when it says apply:              θ ← Outer(θ, mean Δ);  θᵢ ← adopt(θ)

The same loop drives M replicas in one process and one replica a process; a `Run` knows which.
"""

from __future__ import annotations

from atoll.algo.schedule import Launch
from atoll.train.run import Run


def train(run: Run) -> None:
    """Train until the last step, or until all replicas agree to stop."""
    for step in run.steps():
        active = run.active_replicas(step)
        for replica in active:
            replica.compute_gradients(step)
        if run.data_parallel:
            run.average_gradients(step)
        for replica in active:
            run.log_step(replica.update(step))
        for event in run.events(step):
            if isinstance(event, Launch):
                run.launch(event.fragment, step)
            else:
                run.apply(event.fragment, step)
        run.adapt_if_due(step)
        run.evaluate_if_due(step)
        run.save_if_due(step)
    run.finish()
