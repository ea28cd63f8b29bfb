"""Adding up the parts of an evaluation: each island evaluates its share of the held-out text and says what it found.

>>> from atoll.elastic.messages import Evaluated
>>> evaluations = Evaluations()
>>> evaluations.add(Evaluated(round=2, part=0, parts=2, loss_sum=30.0, tokens=10), committed=2)
[]
>>> evaluations.add(Evaluated(round=2, part=1, parts=2, loss_sum=10.0, tokens=10), committed=2)
[Evaluation(round=2, loss=2.0, tokens=20)]
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.elastic.messages import Evaluated

MOST_PARTS = 10_000
PATIENCE_ROUNDS = 2  # commits after which the parts that are missing are not waited for


@dataclass(frozen=True)
class Evaluation:
    """The anchor of `round` on held-out text. loss: nats a token. tokens: of the parts that came."""

    round: int
    loss: float
    tokens: int


class Evaluations:
    """What has come of evaluations that are not whole yet, by round."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[int, Evaluated]] = {}
        self._told = 0  # the newest round whose evaluation was given out

    def add(self, evaluated: Evaluated, *, committed: int) -> list[Evaluation]:
        """Take in a part; the evaluation that it completes. What makes no sense, or comes too late, is ignored."""
        sane = 0 <= evaluated.part < evaluated.parts <= MOST_PARTS and evaluated.tokens >= 0
        if not sane or not self._told < evaluated.round <= committed:
            return []
        parts = self._parts.setdefault(evaluated.round, {})
        parts[evaluated.part] = evaluated
        return self._finish(evaluated.round) if len(parts) == evaluated.parts else []

    def give_up(self, committed: int | None = None) -> list[Evaluation]:
        """The evaluations that will not become whole: what of them came. committed: the newest round; None: all."""
        old = [number for number in self._parts if committed is None or number <= committed - PATIENCE_ROUNDS]
        return [evaluation for number in sorted(old) for evaluation in self._finish(number)]

    def _finish(self, number: int) -> list[Evaluation]:
        parts = self._parts.pop(number).values()
        if number <= self._told:
            return []
        self._told = number
        tokens = sum(part.tokens for part in parts)
        return [Evaluation(number, sum(part.loss_sum for part in parts) / tokens, tokens)] if tokens else []
