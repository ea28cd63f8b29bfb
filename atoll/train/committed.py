"""The committed state of a run as named tensors: what a joiner receives, and what an elastic checkpoint holds.

anchor.NAME                    the agreed parameters, fp32
outer.KEY.NAME                 state of the outer optimizer
codes.FRAGMENT.BUCKET.KEY      what compressors hold alike on all replicas (warm starts)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from atoll.errors import CheckpointError
from atoll.train.sync import Arrived, ReplicaSync

Tensors = dict[str, Tensor]


def capture(sync: ReplicaSync) -> tuple[Tensors, dict[str, Any]]:
    """A copy of the committed state and what belongs to it: counts of outer steps, the digest of the anchor."""
    shared = sync.shared_state()
    outer, counts = shared["outer"], shared["counts"]
    assert isinstance(outer, Mapping)
    tensors = {f"anchor.{name}": value.clone() for name, value in sync.anchor().items()}
    tensors |= {f"outer.{name}": value.clone() for name, value in outer.items()}
    tensors |= {f"codes.{name}": value.clone() for name, value in sync.shared_codes().items()}
    return tensors, {"counts": counts, "digest": sync.digest(), "round": sync.round}


def capture_ahead(sync: ReplicaSync, arrived: Arrived, *, step: int) -> tuple[Tensors, dict[str, Any]]:
    """As `capture`, of the state that landing `arrived` at inner step `step` will leave; `sync` itself does not move.

    For rounds that are committed and land later: until then nobody holds their state, and a joiner needs it.
    """
    ahead = ReplicaSync({name: value.clone() for name, value in sync.anchor().items()}, sync.transport, sync.settings)
    _fill(ahead, *capture(sync))
    ahead.take(0, weight=1.0)
    means = [(mean.clone(), code) for mean, code in arrived.means]  # an outer optimizer may write into them
    ahead.land(0, replace(arrived, means=means), step=step)
    return capture(ahead)


def restore(sync: ReplicaSync, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Take over a captured state; raises `CheckpointError` where it is not whole or belongs to another model.

    The parameters are left as they are: see `ReplicaSync.rebase`. What cannot be taken over leaves no trace.
    """
    with _undoing(sync):
        _fill(sync, tensors, about)
        if sync.digest() != about["digest"]:
            raise CheckpointError(
                f"the state of round {about['round']} came with digest {str(about['digest'])[:8]} and has "
                f"{sync.digest()[:8]}: it was altered before it was sent. Fetch it from another island."
            )


@contextmanager
def _undoing(sync: ReplicaSync) -> Iterator[None]:
    """Where the block fails, `sync` gets back the state that it had before."""
    before = capture(sync)
    try:
        yield
    except (CheckpointError, LookupError, ValueError):
        _fill(sync, *before)
        raise


def _fill(sync: ReplicaSync, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    sync.load_shared_state(_part(tensors, "anchor."), {"outer": _part(tensors, "outer."), "counts": about["counts"]})
    sync.load_shared_codes(_part(tensors, "codes."))


def _part(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
