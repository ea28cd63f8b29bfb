"""Who counts in a round, and for how much.

Before anything is averaged every replica shows a `Ballot`. From the same ballots every replica draws the same
conclusion, so that nothing has to be agreed twice: a contribution that is not finite is refused, an absent one is not
counted, and the divisor is always those who contributed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.algo.adaptive import Observation, pooled
from atoll.errors import DesyncError

_FORMAT = struct.Struct("<q16sd??")


@dataclass(frozen=True)
class Ballot:
    """What one replica says of its contribution to a round.

    round: the outer step it belongs to, from 1. digest: of the anchor it starts from (16 bytes). weight: how much it
    counts for. finite: the contribution holds no NaN or infinity. present: False for a replica that sits the round out.
    seen: what the round was like for it, where rounds adapt.

    >>> Ballot.unpack(Ballot(3, b"0" * 16, 2.5, True, False).pack()).weight
    2.5
    """

    round: int
    digest: bytes
    weight: float
    finite: bool = True
    present: bool = True
    seen: Observation | None = None

    def pack(self) -> bytes:
        """As 34 bytes, and 32 of what was seen."""
        head = _FORMAT.pack(self.round, self.digest, self.weight, self.finite, self.present)
        return head if self.seen is None else head + self.seen.pack()

    @classmethod
    def unpack(cls, packed: bytes) -> Ballot:
        """From 34 bytes, or 66."""
        seen = packed[_FORMAT.size :]
        number, digest, weight, finite, present = _FORMAT.unpack(packed[: _FORMAT.size])
        return cls(number, digest, weight, finite, present, Observation.unpack(seen) if seen else None)


def weigh(packed: Sequence[bytes]) -> list[float]:
    """The weight of each replica, 0 for absent and refused ones. `DesyncError` if they start from other anchors."""
    ballots = [Ballot.unpack(ballot) for ballot in packed]
    _check_same_start(ballots)
    return [ballot.weight if ballot.present and ballot.finite else 0.0 for ballot in ballots]


def refused(packed: Sequence[bytes]) -> list[int]:
    """Replicas whose contribution was there and not finite."""
    ballots = [Ballot.unpack(ballot) for ballot in packed]
    return [replica for replica, ballot in enumerate(ballots) if ballot.present and not ballot.finite]


def received_share(packed: Sequence[bytes]) -> float:
    """Weight of those who count over the weight of all, absent ones too: what the mean shrinks by when all divide."""
    everyone = sum(Ballot.unpack(ballot).weight for ballot in packed)
    return sum(weigh(packed)) / everyone


def observed(packed: Sequence[bytes]) -> Observation | None:
    """What the round was like for all who count; None where nobody does, or nothing was said."""
    seen = [ballot.seen for ballot in map(Ballot.unpack, packed)]
    weights = weigh(packed)
    told = [observation for observation in seen if observation is not None]
    return pooled(told, weights) if any(weights) and len(told) == len(seen) else None


def _check_same_start(ballots: Sequence[Ballot]) -> None:
    for name in ("round", "digest"):
        values = [getattr(ballot, name) for ballot in ballots]
        if len(set(values)) > 1:
            shown = ", ".join(f"{i}: {v.hex()[:8] if isinstance(v, bytes) else v}" for i, v in enumerate(values))
            raise DesyncError(
                f"replicas start from different anchors ({name} by replica: {shown}); their mean would be wrong.\n"
                "All replicas must begin with the same weights and the same settings; resume all from one checkpoint."
            )


# merge rule -> weight of a replica, from (examples in its shard, tokens it trained on in this round)
WEIGHTS: dict[str, Callable[[int, int], float]] = {
    "uniform": lambda examples, tokens: 1.0,
    "examples": lambda examples, tokens: float(examples),
    "tokens": lambda examples, tokens: float(tokens),
}


@dataclass(frozen=True)
class Geometry:
    """How the contributions of a round lie to each other, from their Gram matrix (M × M, fp64).

    norms: of each contribution. cosines: pairwise, None where a replica did not count. cosine_mean: over the pairs that
    did. delta_norm: of the weighted mean.
    """

    norms: list[float]
    cosines: list[list[float | None]]
    cosine_mean: float | None
    delta_norm: float


def geometry(gram: Tensor, weights: Sequence[float]) -> Geometry:
    """Norms and cosines from inner products.

    >>> import torch
    >>> geometry(torch.tensor([[1.0, 0.0], [0.0, 4.0]]), [1, 1])
    Geometry(norms=[1.0, 2.0], cosines=[[1.0, 0.0], [0.0, 1.0]], cosine_mean=0.0, delta_norm=1.118033988749895)
    """
    inner = gram.tolist()
    counted = [i for i, weight in enumerate(weights) if weight > 0]
    norms = [max(inner[i][i], 0.0) ** 0.5 for i in range(len(weights))]

    def cosine(i: int, j: int) -> float | None:
        if i not in counted or j not in counted or not norms[i] * norms[j] > 0:
            return None
        return inner[i][j] / (norms[i] * norms[j])

    cosines = [[cosine(i, j) for j in range(len(weights))] for i in range(len(weights))]
    pairs = [c for i in counted for j in counted if i < j and (c := cosines[i][j]) is not None]
    total = sum(weights)
    square = sum(weights[i] * weights[j] * inner[i][j] for i in counted for j in counted)
    return Geometry(
        norms=norms,
        cosines=cosines,
        cosine_mean=sum(pairs) / len(pairs) if pairs else None,
        delta_norm=max(square, 0.0) ** 0.5 / total if total else 0.0,
    )
