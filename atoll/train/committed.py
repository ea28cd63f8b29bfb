"""The committed state of a run as named tensors: what a joiner receives, and what an elastic checkpoint holds.

anchor.NAME                    the agreed parameters, fp32
outer.KEY.NAME                 state of the outer optimizer
codes.FRAGMENT.BUCKET.KEY      what compressors hold alike on all replicas (warm starts)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from atoll.errors import CheckpointError
from atoll.train.sync import ReplicaSync

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


def restore(sync: ReplicaSync, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Take over a captured state; raises `CheckpointError` where it is not whole or belongs to another model.

    The parameters are left as they are: see `ReplicaSync.rebase`.
    """
    sync.load_shared_state(_part(tensors, "anchor."), {"outer": _part(tensors, "outer."), "counts": about["counts"]})
    sync.load_shared_codes(_part(tensors, "codes."))
    if sync.digest() != about["digest"]:
        raise CheckpointError(
            f"the state of round {about['round']} came with digest {str(about['digest'])[:8]} and has "
            f"{sync.digest()[:8]}: it was altered on the way. Fetch it again."
        )


def _part(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
