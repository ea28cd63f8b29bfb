"""Where the time and the bytes of a round went, from what islands say anyway. Nothing is decided by it.

island   ── train ──▶ Ready ─ wait ─ Go ─ meet, encode, send, outer step ─▶ Reached ─ agree ─▶ commit
                      │◀──────────────────────── offered_s ─────────────────────────────────▶│
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from atoll.elastic.messages import Beat, FromMember, Reached, Ready

MOST_MEMBERS = 1024  # that are remembered
LARGEST_LOSS, LONGEST_S = 1e9, 1e9
SHORTEST_S = 1e-6  # of sending, that a rate is told from; an island may claim anything


@dataclass
class _Seen:
    """What one member said last. offered_at: its first Ready for that round. counted_at: of its last one that counted.

    loss: of its last inner steps. rate: bytes a second at which it last sent.
    """

    ready: Ready | None = None
    offered_at: float = 0.0
    counted_at: float | None = None
    reached: Reached | None = None
    reached_at: float = 0.0
    loss: float | None = None
    rate: float | None = None

    @property
    def idle_s(self) -> float | None:
        """Between the offer before and this one, the time in which it did not train; None for the first."""
        if self.ready is None or self.counted_at is None:
            return None
        return max(0.0, self.offered_at - self.counted_at - self.ready.inner_s)


class Watch:
    """Follows the members of a run. Times are seconds on the coordinator's monotonic clock."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def heard(self, member: str, message: FromMember, now: float) -> None:
        """A member said this."""
        if not isinstance(message, (Beat, Ready, Reached)):
            return
        seen = self._of(member)
        if isinstance(message, Beat):
            seen.loss = finite(message.loss)
        elif isinstance(message, Ready):
            if seen.ready is None or seen.ready.round != message.round:
                seen.offered_at = now
            seen.ready = replace(message, inner_s=_seconds(message.inner_s), loss=finite(message.loss))
        else:
            seen.reached, seen.reached_at = _believable(message), now
            seen.rate = _rate(seen.reached)

    def about(self, member: str) -> dict[str, Any]:
        """For the member's line in a status: its last loss and the rate of its link."""
        seen = self._seen.get(member, _Seen())
        return {"loss": seen.loss, "link_bytes_per_s": seen.rate}

    def round(self, payload: Mapping[str, Any], now: float) -> dict[str, Any]:
        """What a committed round adds to its event; `payload` is of its record.

        inner_s, exposed_s, idle_s, loss: means over the contributors. exposed_s: from the moment a contribution was
        offered to the commit; where islands train on meanwhile, they wait less than that. idle_s: from one offer to the
        next, what was not training. data_parallel_bytes: that the same steps would have sent by data parallelism.
        islands: by seat, see `_track`.
        """
        number = payload["round"]
        taking = {str(seat): self._seen[member] for seat, member in payload["members"].items() if member in self._seen}
        counted = [seen for seat, seen in taking.items() if _is_in(payload, seat) and _offers(seen, number)]
        tracks = {seat: _track(seen, payload, now) for seat, seen in taking.items()}
        told: dict[str, Any] = {
            "exposed_s": _mean(now - seen.offered_at for seen in counted) or 0.0,
            "inner_s": _mean(seen.ready.inner_s for seen in counted if seen.ready) or 0.0,
            "idle_s": _mean(seen.idle_s for seen in counted),
            "loss": _mean(seen.ready.loss for seen in counted if seen.ready),
            "data_parallel_bytes": sum(_plain_bytes(seen, payload) for seen in counted),
            "islands": tracks,
        }
        for seen in counted:
            seen.counted_at = seen.offered_at
        return told

    def _of(self, member: str) -> _Seen:
        if member not in self._seen and len(self._seen) >= MOST_MEMBERS:
            del self._seen[next(iter(self._seen))]
        return self._seen.setdefault(member, _Seen())


def finite(value: float | None) -> float | None:
    """A loss where it is a number that a loss can be: sums of what is left do not overflow.

    >>> finite(2.5), finite(float("nan")), finite(1e300), finite(None)
    (2.5, None, None, None)
    """
    return value if value is not None and abs(value) < LARGEST_LOSS else None


def _believable(reached: Reached) -> Reached:
    return replace(
        reached,
        wire_s=_seconds(reached.wire_s),
        meet_s=_seconds(reached.meet_s),
        send_s=_seconds(reached.send_s),
        outer_s=_seconds(reached.outer_s),
    )


def _seconds(told: float) -> float:
    """A time as an island tells it, which may be any number."""
    return min(max(0.0, told), LONGEST_S)


def _track(seen: _Seen, payload: Mapping[str, Any], now: float) -> dict[str, Any]:
    """One island's share of a round, in seconds and bytes. Times of day are told as seconds before the commit."""
    track: dict[str, Any] = {}
    ready, reached = seen.ready, seen.reached
    if ready is not None and _offers(seen, payload["round"]):
        track |= {"offered_s": now - seen.offered_at, "train_s": ready.inner_s, "steps": ready.steps}
        track |= {"idle_s": seen.idle_s, "loss": ready.loss}
    if reached is not None and reached.attempt == payload["attempt"]:
        track |= {"reached_s": now - seen.reached_at, "wire_s": reached.wire_s, "sent_bytes": reached.payload_bytes}
        track |= {"meet_s": reached.meet_s, "send_s": reached.send_s, "outer_s": reached.outer_s}
    return {key: round(value, 6) if isinstance(value, float) else value for key, value in track.items()}


def _is_in(payload: Mapping[str, Any], seat: str) -> bool:
    return seat in {str(one) for one in payload["weights"]}


def _offers(seen: _Seen, number: int) -> bool:
    return seen.ready is not None and seen.ready.round == number


def _plain_bytes(seen: _Seen, payload: Mapping[str, Any]) -> int:
    if seen.ready is None or seen.reached is None or seen.reached.attempt != payload["attempt"]:
        return 0
    return seen.ready.steps * seen.reached.step_bytes


def _rate(reached: Reached) -> float | None:
    """Bytes a second while the contribution was encoded and sent: what the link does at least."""
    seconds = reached.wire_s - reached.meet_s - reached.outer_s
    return reached.payload_bytes / seconds if seconds > SHORTEST_S and reached.payload_bytes > 0 else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
