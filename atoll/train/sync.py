"""The outer loop of one replica: its anchors, its outer state, and the rounds it has in flight.

`launch` takes the progress of a fragment and hands it to the transport; `apply` lets the oldest such round land: bucket
by bucket the mean arrives, the outer optimizer moves the anchor, and the parameters adopt it. What happens when is not
decided here: a `Schedule` says so.

    anchor ──────────────┐                                    ┌─> anchor
    parameters ── launch ┴─> pseudo-gradient ··· mean ··· apply ┴─> parameters

The pseudo-gradient is base minus parameters (old minus new). The base is the anchor as the parameters' dtype holds it;
a replica that keeps progress which no launch has taken yet has a base of its own.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_field
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from atoll.algo import adaptive, merge
from atoll.algo.adaptive import Observation
from atoll.algo.adopt import AdoptRule, Landing, carry, replace
from atoll.algo.fragments import Bucket, Layout, Piece, buckets, tensor_buckets
from atoll.algo.merge import Ballot, Geometry
from atoll.algo.outer import SGD, Nesterov, OuterOptimizer
from atoll.algo.prune import PRUNE_RULES
from atoll.comm.base import Flight, Tally, Transport
from atoll.compress import IDENTITY, Compressor, Feedback, at_rank, rank_of
from atoll.compress.base import settle
from atoll.compress.feedback import RESIDUAL
from atoll.compress.lowrank import largest_rank
from atoll.errors import CheckpointError, ConfigError
from atoll.exchange import Exchange, State, Traffic

BUCKET_ELEMENTS = 1 << 21  # 8 MB of fp32: of 1 to 32 MB the best or close to it (benchmarks/sync.py)


@dataclass(frozen=True)
class OuterSettings:
    """How replicas agree. lr: outer rate as a function of the inner step.

    keep_contribution: rounds land later than they are launched, what was sent is kept till then (4 bytes a parameter).
    dropped_count: the mean divides by dropped replicas too. own_base: a dropped replica's next pseudo-gradient is
    measured from where it started, not from the new anchor (rules that owe unsent progress always do so).
    on_host: anchors, outer state and rounds in flight lie in host memory, pinned where the parameters are on a GPU.
    probe_rank: pseudo-gradients are probed for their effective rank, up to this one, and ballots tell it; 0: they are
    not. energy: see `atoll.algo.adaptive`.
    """

    optimizer: OuterOptimizer = field(default_factory=Nesterov)
    lr: Callable[[int], float] = lambda step: 0.7
    compressor: Compressor = IDENTITY
    adopt: AdoptRule = field(default_factory=replace)
    keep_contribution: bool = False
    prune_rule: str = "magnitude"
    prune_fraction: float = 0.0
    dropped_count: bool = False
    own_base: bool = False
    on_host: bool = False
    probe_rank: int = 0
    energy: float = 0.95
    bucket_elements: int = BUCKET_ELEMENTS

    @property
    def owes_unsent(self) -> bool:
        """Whether a replica keeps a base of its own: progress that no launch has taken is owed to the next one."""
        return self.keep_contribution and self.adopt.keeps_unsent


@dataclass(frozen=True)
class RoundReport:
    """What one landed round was. round: outer steps of this fragment so far. weights: 0 for who did not count.

    geometry: None where what travels does not tell how the contributions lie to each other. seen: what the round was
    like for all, where rounds adapt. rank: of the low-rank factors it travelled as, or 0. sync_s: seconds from when all
    had launched until the mean was there, as this replica saw it.
    """

    fragment: int
    round: int
    weights: list[float]
    refused: list[int]
    payload_bytes: int
    geometry: Geometry | None
    digest: str
    seen: Observation | None = None
    rank: int = 0
    sync_s: float = 0.0

    @property
    def contributors(self) -> int:
        return sum(weight > 0 for weight in self.weights)


@dataclass(frozen=True)
class Offer:
    """What a replica would bring to a round. norm: of its pseudo-gradient."""

    round: int
    weight: float
    norm: float
    finite: bool


@dataclass(frozen=True)
class Arrived:
    """A round that was averaged and is not adopted yet: a `Flight` that has nothing left to wait for.

    place: of this replica among those who averaged. digest: of the anchor it leads to. base: of the anchor it starts
    from, both as they are in memory. outer_s: seconds that the outer step and the digests took.
    """

    packed: Sequence[bytes]
    means: Sequence[tuple[Tensor, State]]
    sent: Traffic
    place: int
    base: str
    digest: str
    outer_s: float = 0.0

    def ballots(self) -> Sequence[bytes]:
        return self.packed

    def results(self) -> Iterator[tuple[Tensor, State]]:
        return iter(self.means)

    def traffic(self) -> Traffic:
        return self.sent


class WeighedTransport(Protocol):
    """One replica's end of the network in a round whose weights all have been told."""

    @property
    def replica(self) -> int: ...

    def launch(
        self,
        ballot: bytes,
        tally: Tally,
        exchanges: Iterable[Exchange],
        *,
        background: bool = False,
        weights: Sequence[float] | None = None,
    ) -> Flight: ...


@dataclass
class _Times:
    """When all had launched and when the mean was there, by the clock. owed, wanted: energy of what was left out, and
    of all there was to send.
    """

    launched: float | None = None
    arrived: float = 0.0
    owed: float = 0.0
    wanted: float = 0.0

    @property
    def sync_s(self) -> float:
        return 0.0 if self.launched is None else max(0.0, self.arrived - self.launched)

    @property
    def residual_share(self) -> float:
        return self.owed / self.wanted if self.wanted > 0 else 0.0


@dataclass
class _InFlight:
    """A round that was launched and has not landed.

    rank: of the compressor it travels by.
    contribution: the flat pseudo-gradient, where it is kept. held: the parameters still hold that progress, so that the
    next launch must not take it again. flight: None until others are ready to average it (elastic rounds).
    """

    flight: Flight | None
    ballot: Ballot
    contribution: Tensor | None
    adopts: bool
    held: bool = True
    listens: bool = False  # brings nothing: its progress is carried onto the new anchor and stays owed
    took_off: threading.Event = field(default_factory=threading.Event)
    rank: int = 0
    times: _Times = field(default_factory=_Times)


class _Fragment:
    """One fragment of one replica: parameters (views of the model's), anchor, outer state, base, flights."""

    def __init__(self, named: Mapping[str, Tensor], settings: OuterSettings) -> None:
        self._tensors = list(named.values())
        whole = frozenset(i for i, param in enumerate(self.params) if not param.is_contiguous())
        self.layout = Layout(tuple(named), tuple(tuple(param.shape) for param in self.params), whole)
        if settings.compressor.elementwise:
            self.buckets = buckets(self.layout, settings.bucket_elements)
        else:
            self.buckets = tensor_buckets(self.layout)
        on_gpu = self.params[0].is_cuda
        device = torch.device("cpu") if settings.on_host else self.params[0].device
        self.anchor = torch.empty(
            self.layout.numel, dtype=torch.float32, device=device, pin_memory=settings.on_host and on_gpu
        )
        for param, view in zip(self.params, self.views(self.anchor), strict=True):
            view.copy_(param)
        self.outer_state = settings.optimizer.init(self.anchor)
        self.codes: list[State] = [settings.compressor.init(self._bucket_shape(b, settings)) for b in self.buckets]
        self.codes_ahead = list(self.codes)  # as they will be once everything in flight has landed
        self.base: Tensor | None = None
        self.count = 0
        self.flights: deque[_InFlight] = deque()
        self.digest = _digest([self.anchor])

    @property
    def params(self) -> list[Tensor]:
        """The parameters as they are now, without their graph."""
        return [param.detach() for param in self._tensors]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Tensors of the fragment's shapes in a flat buffer."""
        return [
            flat[offset : offset + numel].view(shape)
            for offset, numel, shape in zip(self.layout.offsets, self.layout.numels, self.layout.shapes, strict=True)
        ]

    def piece(self, piece: Piece) -> Tensor:
        """The piece of a parameter: 1-D where the parameter may be cut, else the parameter itself."""
        param = self._tensors[piece.tensor].detach()
        return param if piece.tensor in self.layout.whole else param.view(-1)[piece.start : piece.stop]

    def in_bucket(self, bucket: Bucket, flat: Tensor, piece: Piece) -> Tensor:
        """Where `piece` lies in `flat`, a buffer that holds this bucket alone."""
        part = flat[piece.offset - bucket.start : piece.offset - bucket.start + piece.stop - piece.start]
        return part.view(self.layout.shapes[piece.tensor]) if piece.tensor in self.layout.whole else part

    def held_anchor(self) -> Tensor:
        """The anchor as the parameters' dtypes hold it, a flat copy."""
        held = self.anchor.clone()
        for param, view in zip(self.params, self.views(held), strict=True):
            view.copy_(view.to(param.dtype))
        return held

    def flat_params(self) -> Tensor:
        """All parameters, flat fp32, a copy."""
        flat = torch.empty_like(self.anchor)
        for bucket in self.buckets:
            flat[bucket.start : bucket.stop] = self.gather_params(bucket)
        return flat

    def gather_params(self, bucket: Bucket) -> Tensor:
        """The parameters of a bucket, flat fp32, a copy."""
        flat = torch.empty(bucket.stop - bucket.start, dtype=torch.float32, device=self.anchor.device)
        for piece in bucket.pieces:
            self.in_bucket(bucket, flat, piece).copy_(self.piece(piece))
        return flat

    def restart(self) -> None:
        """What this replica holds is broken: its parameters become the anchor, and nothing is owed."""
        for bucket in self.buckets:
            self.scatter_params(bucket, self.anchor[bucket.start : bucket.stop])
        self.base = None

    def scatter_params(self, bucket: Bucket, flat: Tensor) -> None:
        """Write flat fp32 values into the parameters of a bucket, rounded to their dtype."""
        for piece in bucket.pieces:
            self.piece(piece).copy_(self.in_bucket(bucket, flat, piece))

    def pseudo_gradient(self, bucket: Bucket) -> Tensor:
        """Base minus parameters, flat fp32, of one bucket."""
        delta = torch.empty(bucket.stop - bucket.start, dtype=torch.float32, device=self.anchor.device)
        start = self.anchor if self.base is None else self.base
        start = start[bucket.start : bucket.stop]
        for piece in bucket.pieces:
            param = self.piece(piece).to(delta.device)
            before = self.in_bucket(bucket, start, piece)
            if self.base is None and param.dtype != torch.float32:
                before = before.to(param.dtype).to(torch.float32)
            torch.sub(before, param, out=self.in_bucket(bucket, delta, piece))
        return delta

    def norm(self, contribution: Tensor | None) -> float:
        """Of the pseudo-gradient; not finite where that is not."""
        squares = 0.0
        for bucket in self.buckets:
            span = slice(bucket.start, bucket.stop)
            delta = self.pseudo_gradient(bucket) if contribution is None else contribution[span]
            squares += float(torch.dot(delta, delta))
        return squares**0.5

    def preview(
        self,
        means: Sequence[tuple[Tensor, State]],
        optimizer: OuterOptimizer,
        *,
        lr: float,
        see: Callable[[Tensor, Tensor], None],
    ) -> tuple[bytes, bytes]:
        """Digests of the anchor as it is, and as a landing of `means` would leave it; nothing is changed.

        see: is shown both, bucket by bucket.
        """
        base, after = xxhash.xxh3_128(), xxhash.xxh3_128()
        for bucket, (mean, _) in zip(self.buckets, means, strict=True):
            span = slice(bucket.start, bucket.stop)
            base.update(_bytes(self.anchor[span]))
            anchor = self.anchor[span].clone()
            state = {name: value[span].clone() for name, value in self.outer_state.items()}
            optimizer.step_(anchor, mean.reshape(-1).clone(), state, lr=lr, count=self.count + 1)
            after.update(_bytes(anchor))
            see(self.anchor[span], anchor)
        return base.digest(), after.digest()

    def _bucket_shape(self, bucket: Bucket, settings: OuterSettings) -> tuple[int, ...]:
        if settings.compressor.elementwise:
            return (bucket.stop - bucket.start,)
        return self.layout.shapes[bucket.pieces[0].tensor]


class ReplicaSync:
    """Keeps one replica in agreement with the others.

    params: trainable parameters by name, each once (tied weights have one name); they are changed in place.
    fragments: names by fragment; every parameter in exactly one. Default: one fragment.
    companions: floating-point tensors averaged, uniformly over the contributors, whenever the last fragment lands
    (buffers, inner Adam state). They have no anchor, so they need rounds that land at the step of their launch.
    agree: whether all workers of this replica say yes, where it has several: a replica counts whole or not at all.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        transport: Transport,
        settings: OuterSettings,
        *,
        fragments: Sequence[Sequence[str]] | None = None,
        companions: Callable[[], list[Tensor]] = list,
        agree: Callable[[bool], bool] = bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not params:
            raise ConfigError("there is no trainable parameter to sync. Set requires_grad on some before syncing.")
        named = [list(params)] if fragments is None else [list(names) for names in fragments]
        if sorted(name for names in named for name in names) != sorted(params) or not all(named):
            raise ConfigError("fragments must name every trainable parameter exactly once and none may be empty.")
        self.transport = transport
        self.settings = settings
        self._fragments = [_Fragment({name: params[name] for name in names}, settings) for names in named]
        self._agree = agree
        self._clock = clock
        self._last = Observation(0.0, 0.0, 0.0, 0.0)  # times and residual of the round that landed last
        self._companions = companions
        self._companion_flight: Flight | None = None

    @property
    def num_fragments(self) -> int:
        return len(self._fragments)

    @property
    def round(self) -> int:
        """Outer steps that every fragment has made."""
        return min(fragment.count for fragment in self._fragments)

    @property
    def numel(self) -> int:
        """Parameters that sync."""
        return sum(fragment.layout.numel for fragment in self._fragments)

    def held_tensors(self) -> dict[str, list[Tensor]]:
        """Every tensor kept between rounds, by what it is for."""
        held: dict[str, list[Tensor]] = {"anchor": [], "outer state": [], "base": [], "in flight": [], "compressor": []}
        for fragment in self._fragments:
            held["anchor"].append(fragment.anchor)
            held["outer state"] += fragment.outer_state.values()
            held["base"] += [fragment.base] if fragment.base is not None else []
            held["in flight"] += [f.contribution for f in fragment.flights if f.contribution is not None]
            held["compressor"] += [tensor for code in fragment.codes for tensor in code.values()]
        return {kind: tensors for kind, tensors in held.items() if tensors}

    def digest(self) -> str:
        """xxh3-128 of the anchor, 32 hex digits; equal on all replicas."""
        if len(self._fragments) == 1:
            return self._fragments[0].digest.hex()
        return xxhash.xxh3_128_hexdigest(b"".join(fragment.digest for fragment in self._fragments))

    def anchor(self) -> dict[str, Tensor]:
        """The agreed parameters by name: fp32 views, not to be written to."""
        return {
            name: view
            for fragment in self._fragments
            for name, view in zip(fragment.layout.names, fragment.views(fragment.anchor), strict=True)
        }

    def launch(
        self,
        index: int,
        *,
        weight: float = 1.0,
        present: bool = True,
        adopts: bool = True,
        follow: bool = False,
        step_s: float = 0.0,
    ) -> None:
        """Take the progress of fragment `index` and start averaging it.

        weight: how much this replica counts. present: False does not count in this round. adopts: False keeps its own
        parameters when the round lands. follow: hand in all progress, neither pruned nor compressed; see `apply`.
        step_s: seconds that an inner step took, which is told where rounds adapt.
        """
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(
                f"weight={weight} is not a finite number from 0; it says how much a replica counts. Use 1.0."
            )
        fragment = self._fragments[index]
        ballot = Ballot(
            round=fragment.count + len(fragment.flights) + 1,
            digest=fragment.digest,
            weight=weight,
            finite=self._agree(all_finite(fragment.params)),
            present=present,
        )
        contribution = self._take_contribution(fragment, prune=not follow) if self._must_materialise() else None
        if self.settings.probe_rank and not follow:
            ballot = replace_field(ballot, seen=self._observe(fragment, ballot, contribution, step_s))
        compressor = IDENTITY if follow else self.settings.compressor
        self._send(fragment, ballot, contribution, adopts=adopts, compressor=compressor)
        if not follow and index == len(self._fragments) - 1:
            self._launch_companions(ballot)

    def apply(self, index: int, *, step: int, follow: bool = False) -> RoundReport:
        """Let the oldest round of fragment `index` land after inner step `step`. Waits for it.

        follow: the anchor moves by just the mean and no outer step is counted: everyone takes over what the
        contributors have, as at the end of pretraining.
        """
        flown = self._fragments[index].flights.popleft()
        return self._arrive(index, flown, step=step, place=self.transport.replica, follow=follow)

    def _arrive(self, index: int, flown: _InFlight, *, step: int, place: int, follow: bool = False) -> RoundReport:
        fragment = self._fragments[index]
        assert flown.flight is not None, "the round was never sent"
        ballots = flown.flight.ballots()
        if flown.times.launched is None:
            flown.times.launched = self._clock()
        weights = merge.weigh(ballots)
        if weights[place] == 0:
            self._owe_again(fragment, flown)
        if any(weights):
            optimizer, rule = (SGD(), replace()) if follow else (self.settings.optimizer, self.settings.adopt)
            share = merge.received_share(ballots) if self.settings.dropped_count and not follow else 1.0
            lr = 1.0 if follow else self.settings.lr(step)
            rule = carry(1.0) if flown.listens else rule
            self._land(fragment, flown, weights, optimizer=optimizer, rule=rule, lr=lr, share=share)
            fragment.count += not follow
        if not flown.ballot.finite:
            fragment.restart()
        traffic = flown.flight.traffic()
        if any(weights):
            self._remember(flown)
        if index == len(self._fragments) - 1:
            self._apply_companions(adopts=flown.adopts)
        return RoundReport(
            fragment=index,
            round=fragment.count,
            weights=weights,
            refused=merge.refused(ballots),
            payload_bytes=traffic.payload_bytes,
            geometry=None if traffic.gram is None else merge.geometry(traffic.gram, weights),
            digest=fragment.digest.hex(),
            seen=merge.observed(ballots),
            rank=flown.rank,
            sync_s=flown.times.sync_s,
        )

    # --- rounds that adapt

    def set_rank(self, rank: int) -> None:
        """The rank that rounds launched from now on travel by; those in flight keep theirs."""
        self.settings = replace_field(self.settings, compressor=at_rank(self.settings.compressor, rank))

    def _observe(self, fragment: _Fragment, ballot: Ballot, contribution: Tensor | None, step_s: float) -> Observation:
        """What this round is like so far, and how long the last one that landed took and left owed."""
        rank = self.settings.probe_rank
        if not ballot.finite:
            return replace_field(self._last, effective_rank=float(rank), step_s=step_s)
        found = []
        for bucket in fragment.buckets:
            shape = fragment._bucket_shape(bucket, self.settings)
            if largest_rank(shape) >= rank:
                span = slice(bucket.start, bucket.stop)
                delta = fragment.pseudo_gradient(bucket) if contribution is None else contribution[span]
                found.append(adaptive.probe([delta.view(shape)], rank=rank, energy=self.settings.energy))
        probed = adaptive.merge_probes(found, rank=rank)
        return replace_field(self._last, effective_rank=probed.effective_rank, step_s=step_s)

    def _remember(self, flown: _InFlight) -> None:
        self._last = replace_field(self._last, sync_s=flown.times.sync_s, residual_share=flown.times.residual_share)

    # --- elastic rounds: averaging may fail and be tried again, and lands only when all agree on where it leads

    def take(self, index: int, *, weight: float) -> Offer:
        """Take the progress of fragment `index` as `launch` does, without sending it: see `average`."""
        fragment = self._fragments[index]
        contribution = self._take_contribution(fragment, prune=True) if self._must_materialise() else None
        norm = fragment.norm(contribution)
        ballot = Ballot(
            round=fragment.count + len(fragment.flights) + 1,
            digest=fragment.digest,
            weight=weight,
            finite=math.isfinite(norm),
        )
        fragment.flights.append(_InFlight(None, ballot, contribution, adopts=True))
        return Offer(ballot.round, weight, norm, ballot.finite)

    def average(
        self,
        index: int,
        transport: WeighedTransport,
        weights: Sequence[float],
        *,
        offered: bool,
        step: int,
        see: Callable[[Tensor, Tensor], None] = lambda base, after: None,
    ) -> Arrived:
        """Average the oldest offer of fragment `index`, or listen, with the weights all have been told.

        Nothing of this replica changes, whatever happens: a failed attempt is simply tried again, and the result counts
        once `land` is called with it. Where contributions are kept it may run in another thread while this one trains.
        see: is shown the anchor as it is and as it would be, bucket by bucket.
        """
        fragment = self._fragments[index]
        place = transport.replica
        oldest = fragment.flights[0] if offered else None
        mine = weights[place] > 0
        assert not mine or oldest is not None, "a weight was given to a replica that offered nothing"
        ballot = Ballot(fragment.count + 1, fragment.digest, weights[place])
        exchanges = self._retriable(fragment, oldest if mine else None, counted=mine)
        flight = transport.launch(ballot.pack(), merge.weigh, exchanges, weights=weights)
        means = list(flight.results())
        return self.foresee(index, flight.ballots(), means, flight.traffic(), place=place, step=step, see=see)

    def foresee(
        self,
        index: int,
        packed: Sequence[bytes],
        means: Sequence[tuple[Tensor, State]],
        sent: Traffic,
        *,
        place: int,
        step: int,
        see: Callable[[Tensor, Tensor], None],
    ) -> Arrived:
        """A round of fragment `index` whose means, a bucket each, are there: where it leads. Nothing is changed."""
        fragment = self._fragments[index]
        began = time.perf_counter()
        base, digest = fragment.preview(means, self.settings.optimizer, lr=self.settings.lr(step), see=see)
        led_to, outer_s = self._digest_with(index, digest), time.perf_counter() - began
        return Arrived(packed, means, sent, place, base.hex(), led_to, outer_s)

    def oldest_offer(self, index: int) -> Tensor:
        """The flat pseudo-gradient that `take` took first and no round has: a copy."""
        fragment = self._fragments[index]
        contribution = fragment.flights[0].contribution
        if contribution is not None:
            return contribution.clone()
        return torch.cat([fragment.pseudo_gradient(bucket) for bucket in fragment.buckets])

    def bucket_codes(self, index: int) -> list[tuple[slice, tuple[int, ...], State]]:
        """Of each bucket of fragment `index`: its place in the flat buffer, its shape for a compressor, the state."""
        fragment = self._fragments[index]
        return [
            (slice(bucket.start, bucket.stop), fragment._bucket_shape(bucket, self.settings), code)
            for bucket, code in zip(fragment.buckets, fragment.codes, strict=True)
        ]

    def flat_anchors(self) -> list[Tensor]:
        """The anchor of each fragment as it lies in memory: fp32, not to be written to."""
        return [fragment.anchor for fragment in self._fragments]

    def set_codes(self, index: int, codes: Sequence[State]) -> None:
        """Take over the states of compressors, a bucket each."""
        fragment = self._fragments[index]
        fragment.codes = list(codes)
        fragment.codes_ahead = list(codes)

    def land(self, index: int, arrived: Arrived, *, step: int) -> RoundReport:
        """Adopt a round that was averaged and is now committed.

        A replica that did not count keeps its progress: it is carried onto the new anchor and owed to the next round.
        """
        fragment = self._fragments[index]
        counted = merge.weigh(arrived.ballots())[arrived.place] > 0
        if counted:
            flown = fragment.flights.popleft()
            flown.flight = arrived
        else:
            self._take_back(fragment)
            flown = _InFlight(arrived, Ballot.unpack(arrived.packed[arrived.place]), None, adopts=True, listens=True)
            if fragment.base is None:
                fragment.base = fragment.held_anchor()
        report = self._arrive(index, flown, step=step, place=arrived.place)
        fragment.codes_ahead = list(fragment.codes)
        return report

    def restart(self) -> None:
        """Throw the progress of this replica away: its parameters become the anchor."""
        for fragment in self._fragments:
            fragment.restart()

    def take_back(self, index: int) -> None:
        """What was offered is not sent: it is owed to the next round."""
        self._take_back(self._fragments[index])

    def progress(self, *, without_oldest: bool = False) -> list[Tensor]:
        """Flat pseudo-gradient of every fragment: what no committed round holds of this replica's work.

        without_oldest: the oldest offer is in a committed round after all.
        """
        return [self._progress(fragment, without_oldest) for fragment in self._fragments]

    def _progress(self, fragment: _Fragment, without_oldest: bool) -> Tensor:
        start = fragment.anchor if fragment.base is None else fragment.base
        progress = start - fragment.flat_params()
        for number, flown in enumerate(fragment.flights):
            spent = without_oldest and number == 0
            if flown.contribution is None:  # the parameters hold it, and nothing else
                progress = torch.zeros_like(progress) if spent else progress
            elif self.settings.owes_unsent:  # the base moved up to what was taken
                progress += 0 if spent else flown.contribution
            elif spent:
                progress -= flown.contribution
        return progress

    def rebase(self, progress: Sequence[Tensor] | None) -> None:
        """After `load_shared_state`: parameters become the anchor, less the progress that is kept from before."""
        for number, fragment in enumerate(self._fragments):
            fragment.base = None
            fragment.flights.clear()
            fragment.codes_ahead = list(fragment.codes)
            for bucket in fragment.buckets:
                anchor = fragment.anchor[bucket.start : bucket.stop]
                kept = anchor if progress is None else anchor - progress[number][bucket.start : bucket.stop]
                fragment.scatter_params(bucket, kept)

    def _take_back(self, fragment: _Fragment) -> None:
        while fragment.flights:
            self._owe_again(fragment, fragment.flights.pop())

    def _retriable(self, fragment: _Fragment, flown: _InFlight | None, *, counted: bool) -> Iterator[Exchange]:
        """As `_exchanges`, of who listens zeros; nothing moves on."""
        for number, bucket in enumerate(fragment.buckets):
            span = slice(bucket.start, bucket.stop)
            if flown is None:
                delta = torch.zeros(bucket.stop - bucket.start, device=fragment.anchor.device)
            else:
                delta = fragment.pseudo_gradient(bucket) if flown.contribution is None else flown.contribution[span]
            shape = fragment._bucket_shape(bucket, self.settings)
            before = fragment.codes[number]
            yield _settled(self.settings.compressor.average(delta.view(shape), before), before, counted)

    def _digest_with(self, index: int, digest: bytes) -> str:
        """What `digest` will be once fragment `index` has that one."""
        if len(self._fragments) == 1:
            return digest.hex()
        parts = [digest if number == index else f.digest for number, f in enumerate(self._fragments)]
        return xxhash.xxh3_128_hexdigest(b"".join(parts))

    def sent_bytes(self, index: int) -> int:
        """Exact bytes this replica declares to send in one round of fragment `index`, companions excepted."""
        fragment = self._fragments[index]
        size = {"num_replicas": self.transport.num_replicas, "replica": self.transport.replica}
        return sum(
            self.settings.compressor.sent_bytes(fragment._bucket_shape(bucket, self.settings), **size)
            for bucket in fragment.buckets
        )

    # --- a round takes off and lands

    def _must_materialise(self) -> bool:
        return self.settings.keep_contribution or self.settings.prune_fraction > 0

    def _take_contribution(self, fragment: _Fragment, *, prune: bool) -> Tensor:
        """The whole pseudo-gradient, flat; where unsent progress is owed, the base moves up to the parameters."""
        contribution = torch.empty_like(fragment.anchor)
        for bucket in fragment.buckets:
            contribution[bucket.start : bucket.stop] = fragment.pseudo_gradient(bucket)
        if self.settings.owes_unsent:
            fragment.base = fragment.flat_params()
        elif fragment.base is None:
            for flown in fragment.flights:
                if flown.held and flown.contribution is not None:
                    contribution -= flown.contribution
        if self.settings.prune_fraction and prune:
            rule = PRUNE_RULES[self.settings.prune_rule]
            for view in fragment.views(contribution):
                view.copy_(rule(view, self.settings.prune_fraction))
        return contribution

    def _owe_again(self, fragment: _Fragment, flown: _InFlight) -> None:
        """This replica did not count, or nobody did: what its launch took goes to the next one."""
        if self.settings.owes_unsent and fragment.base is not None and flown.contribution is not None:
            fragment.base += flown.contribution

    def _send(
        self,
        fragment: _Fragment,
        ballot: Ballot,
        contribution: Tensor | None,
        *,
        adopts: bool,
        compressor: Compressor,
    ) -> None:
        kept = contribution if self.settings.keep_contribution else None
        flown = _InFlight(None, ballot, kept, adopts, rank=rank_of(compressor))
        exchanges = self._exchanges(fragment, flown, contribution, compressor)
        background = self.settings.keep_contribution
        flown.flight = self.transport.launch(ballot.pack(), merge.weigh, exchanges, background=background)
        flown.took_off.set()
        fragment.flights.append(flown)

    def _exchanges(
        self, fragment: _Fragment, flown: _InFlight, contribution: Tensor | None, compressor: Compressor
    ) -> Iterator[Exchange]:
        """One averaging a bucket, made when the transport asks for it, so that arithmetic and sending overlap."""
        if self.settings.keep_contribution:  # pulled by whoever carries the round on
            flown.took_off.wait()
            assert flown.flight is not None
            flown.flight.ballots()
            flown.times.launched = self._clock()
        for number, bucket in enumerate(fragment.buckets):
            span = slice(bucket.start, bucket.stop)
            delta = fragment.pseudo_gradient(bucket) if contribution is None else contribution[span]
            shape = fragment._bucket_shape(bucket, self.settings)
            yield self._average(fragment, flown, number, delta.view(shape), compressor)

    def _average(
        self, fragment: _Fragment, flown: _InFlight, number: int, delta: Tensor, compressor: Compressor
    ) -> Exchange:
        """Average one bucket; the compressor's state moves on at once, for a round in flight behind this one."""
        before = fragment.codes_ahead[number]
        mean, code = yield from compressor.average(delta, before)
        flown.took_off.wait()  # in the background the mean may be there before `launch` has returned
        assert flown.flight is not None
        counted = merge.weigh(flown.flight.ballots())[self.transport.replica] > 0
        settled = settle(before, code, counted=counted)
        fragment.codes_ahead[number] = settled
        flown.times.arrived = self._clock()
        if self.settings.probe_rank and RESIDUAL in code and isinstance(compressor, Feedback):
            wanted = torch.add(delta, before[RESIDUAL].to(delta), alpha=compressor.beta)
            flown.times.wanted += adaptive.energy_of([wanted])
            flown.times.owed += adaptive.energy_of([code[RESIDUAL]])
        return mean, settled

    def _land(
        self,
        fragment: _Fragment,
        flown: _InFlight,
        weights: Sequence[float],
        *,
        optimizer: OuterOptimizer,
        rule: AdoptRule,
        lr: float,
        share: float,
    ) -> None:
        contributors = sum(weight > 0 for weight in weights)
        owes = rule.keeps_unsent and (self.settings.owes_unsent or flown.listens)
        if not flown.adopts and self.settings.own_base and fragment.base is None:
            fragment.base = fragment.held_anchor()
        assert flown.flight is not None
        fingerprint = xxhash.xxh3_128()
        for number, (mean, code) in enumerate(flown.flight.results()):
            bucket = fragment.buckets[number]
            anchor = fragment.anchor[bucket.start : bucket.stop]
            delta = mean.view(-1)
            state = {name: value[bucket.start : bucket.stop] for name, value in fragment.outer_state.items()}
            delta = delta if share == 1 else delta.mul_(share)
            optimizer.step_(anchor, delta, state, lr=lr, count=fragment.count + 1)
            fragment.codes[number] = code
            fingerprint.update(_bytes(anchor))
            if flown.adopts:
                self._adopt(fragment, bucket, rule, contributors, lr, owes)
        if flown.adopts and not owes:
            fragment.base = None
            for other in fragment.flights:
                other.held = False
        fragment.digest = fingerprint.digest()

    def _adopt(
        self, fragment: _Fragment, bucket: Bucket, rule: AdoptRule, contributors: int, lr: float, owes: bool
    ) -> None:
        """owes: progress that no launch has taken is kept, and owed to the next one."""
        span = slice(bucket.start, bucket.stop)
        anchor = fragment.anchor[span]
        owed = owes and fragment.base is not None
        if not rule.needs_progress or (rule.keeps_unsent and not owed):
            fragment.scatter_params(bucket, anchor)
            return
        params = fragment.gather_params(bucket)
        unsent = params - (anchor if fragment.base is None else fragment.base[span])
        flying = torch.zeros_like(anchor)
        for other in fragment.flights:
            if other.contribution is not None:
                flying -= other.contribution[span]
        gain = self.settings.optimizer.gain(lr)
        fragment.scatter_params(bucket, rule.adopt(Landing(anchor, params, unsent, flying, contributors, gain)))
        if rule.keeps_unsent and fragment.base is not None:
            torch.sub(fragment.gather_params(bucket), unsent, out=fragment.base[span])

    # --- companions

    def _launch_companions(self, ballot: Ballot) -> None:
        companions = self._companions()
        if not companions:
            return
        if self.settings.keep_contribution:
            raise ConfigError(
                "companions (buffers, inner optimizer state) cannot be averaged in rounds that land after launch.\n"
                "Use delay=0, or leave the averaging of buffers and inner state out."
            )
        healthy = replace_field(ballot, finite=ballot.finite and all_finite(companions))
        averages = (_average_plain(tensor) for tensor in companions)
        self._companion_flight = self.transport.launch(healthy.pack(), _weigh_alike, averages)

    def _apply_companions(self, *, adopts: bool) -> None:
        if self._companion_flight is None:
            return
        if any(_weigh_alike(self._companion_flight.ballots())):
            for tensor, (mean, _) in zip(self._companions(), self._companion_flight.results(), strict=True):
                if adopts:
                    tensor.copy_(mean)
        self._companion_flight.traffic()  # waits for the last messages
        self._companion_flight = None

    # --- state

    def shared_state(self) -> dict[str, object]:
        """What all replicas hold alike, besides the anchor: outer state by parameter name, and outer step counts."""
        return {
            "outer": {
                f"{key}.{name}": view
                for fragment in self._fragments
                for key, value in fragment.outer_state.items()
                for name, view in zip(fragment.layout.names, fragment.views(value), strict=True)
            },
            "counts": [fragment.count for fragment in self._fragments],
        }

    def load_shared_state(self, anchor: Mapping[str, Tensor], state: Mapping[str, object]) -> None:
        """Take over an agreed anchor (by name, full shapes) and the outer state that belongs to it."""
        outer = state["outer"]
        counts = state["counts"]
        assert isinstance(outer, Mapping) and isinstance(counts, Sequence)
        for fragment, count in zip(self._fragments, counts, strict=True):
            _fill(fragment.layout, fragment.views(fragment.anchor), anchor, "")
            for key, value in fragment.outer_state.items():
                _fill(fragment.layout, fragment.views(value), outer, f"{key}.")
            fragment.count = count
            fragment.digest = _digest([fragment.anchor])

    def shared_codes(self) -> dict[str, Tensor]:
        """What compressors hold alike on all replicas, by fragment, bucket and key."""
        return {
            f"{number}.{place}.{key}": value
            for number, fragment in enumerate(self._fragments)
            for place, code in enumerate(fragment.codes)
            for key, value in code.items()
            if not key.startswith("own.")
        }

    def load_shared_codes(self, codes: Mapping[str, Tensor]) -> None:
        """Take over what `shared_codes` gave on another replica."""
        for name, value in codes.items():
            number, place, key = name.split(".", 2)
            fragment = self._fragments[int(number)]
            fragment.codes[int(place)] = fragment.codes[int(place)] | {key: value}
        for fragment in self._fragments:
            fragment.codes_ahead = list(fragment.codes)

    def measure_digest(self) -> str:
        """As `digest`, of the anchor as it is in memory now: finds what changed without anybody's doing."""
        for fragment in self._fragments:
            fragment.digest = _digest([fragment.anchor])
        return self.digest()

    def replica_state(self) -> dict[str, object]:
        """What is this replica's own: bases, compressor state, rounds in flight. Their owner saves the parameters."""
        return {
            "fragments": [
                {
                    "base": fragment.base,
                    "codes": fragment.codes,
                    "flights": [
                        {
                            "ballot": flown.ballot.pack().hex(),
                            "contribution": flown.contribution,
                            "adopts": flown.adopts,
                            "held": flown.held,
                        }
                        | ({"rank": flown.rank} if self.settings.probe_rank else {})
                        for flown in fragment.flights
                    ],
                }
                for fragment in self._fragments
            ]
        } | ({"last": self._last.pack().hex()} if self.settings.probe_rank else {})

    def load_replica_state(self, state: Mapping[str, object]) -> None:
        """Take over this replica's own state and launch again what was in flight, with the same contributions."""
        saved = state["fragments"]
        assert isinstance(saved, Sequence)
        if "last" in state:
            self._last = Observation.unpack(bytes.fromhex(str(state["last"])))
        for fragment, item in zip(self._fragments, saved, strict=True):
            fragment.base = item["base"]
            fragment.codes = item["codes"]
            fragment.codes_ahead = list(fragment.codes)
            fragment.flights.clear()
            for flown in item["flights"]:
                ballot = Ballot.unpack(bytes.fromhex(flown["ballot"]))
                compressor = self.settings.compressor
                compressor = at_rank(compressor, flown.get("rank") or rank_of(compressor))
                self._send(fragment, ballot, flown["contribution"], adopts=flown["adopts"], compressor=compressor)
                fragment.flights[-1].held = flown["held"]


def _settled(exchange: Exchange, before: State, counted: bool) -> Exchange:
    mean, code = yield from exchange
    return mean, settle(before, code, counted=counted)


def _fill(layout: Layout, views: Sequence[Tensor], source: Mapping[str, Tensor], prefix: str) -> None:
    for name, view in zip(layout.names, views, strict=True):
        if prefix + name not in source or source[prefix + name].shape != view.shape:
            raise CheckpointError(
                f"the saved state has no {prefix + name!r} of shape {tuple(view.shape)}; it belongs to another model. "
                "Resume with the model it was saved from."
            )
        view.copy_(source[prefix + name])


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor holds a NaN or an infinity; the extremes tell (a NaN is both), in one pass at memory speed."""
    extremes = [value for tensor in tensors if tensor.numel() for value in torch.aminmax(tensor)]
    return not extremes or bool(torch.stack([value.to(torch.float64) for value in extremes]).isfinite().all())


def _bytes(tensor: Tensor) -> memoryview | bytes:
    array = tensor.detach().cpu().numpy()
    return array.data.cast("B") if array.size else b""


def _digest(tensors: Iterable[Tensor]) -> bytes:
    fingerprint = xxhash.xxh3_128()
    for tensor in tensors:
        fingerprint.update(_bytes(tensor))
    return fingerprint.digest()


def _weigh_alike(packed: Sequence[bytes]) -> list[float]:
    return [float(weight > 0) for weight in merge.weigh(packed)]


def _average_plain(tensor: Tensor) -> Exchange:
    return IDENTITY.average(tensor.detach().to(torch.float32), {})
