"""Synchronous data parallelism through the same seam: gradients are averaged before every step.

The baseline that DiLoCo is measured against. With M replicas one step takes an M-fold batch; all replicas hold the same
parameters bit for bit, and those are the anchor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import xxhash
from torch import Tensor

from atoll.algo import merge
from atoll.algo.fragments import Bucket, Layout, Piece, buckets
from atoll.algo.merge import Ballot
from atoll.comm.base import Flight, Transport
from atoll.compress import Compressor
from atoll.errors import ConfigError
from atoll.exchange import Exchange
from atoll.train.sync import BUCKET_ELEMENTS, RoundReport, all_finite


class GradientSync:
    """Averages the gradients of one replica with those of the others."""

    def __init__(self, params: Mapping[str, Tensor], transport: Transport, compressor: Compressor) -> None:
        if not compressor.elementwise or compressor.init((1,)):
            raise ConfigError(
                "gradients are averaged by a compressor that treats elements alike and keeps nothing between steps. "
                "Use identity, bf16 or fp16."
            )
        self.transport = transport
        self.round = 0
        self._params = dict(params)
        self._tensors = list(params.values())
        self._compressor = compressor
        whole = frozenset(i for i, param in enumerate(self._tensors) if not param.is_contiguous())
        self._layout = Layout(tuple(params), tuple(tuple(p.shape) for p in self._tensors), whole)
        self._buckets = buckets(self._layout, BUCKET_ELEMENTS)
        self._flight: Flight | None = None
        self._digest = ""

    def digest(self) -> str:
        """xxh3-128 of the parameters, 32 hex digits; equal on all replicas."""
        fingerprint = xxhash.xxh3_128()
        for tensor in self._tensors:
            fingerprint.update(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy().data)
        return fingerprint.hexdigest()

    def anchor(self) -> dict[str, Tensor]:
        """The parameters: they are agreed after every step."""
        return {name: param.detach() for name, param in self._params.items()}

    def held_tensors(self) -> dict[str, list[Tensor]]:
        """What is kept between steps besides the replica's own: nothing."""
        return {}

    def launch(self, weight: float) -> None:
        """Start averaging the gradients this replica holds."""
        grads = [param.grad for param in self._tensors if param.grad is not None]
        self._digest = self.digest()  # of the weights these gradients belong to: the ballots compare it
        ballot = Ballot(self.round + 1, bytes.fromhex(self._digest), weight, finite=all_finite(grads))
        self._flight = self.transport.launch(ballot.pack(), merge.weigh, self._exchanges())

    def apply(self) -> RoundReport:
        """Put the mean of finite gradients in place of this replica's own; if there are none, each keeps its own."""
        assert self._flight is not None, "gradients are launched before they land"
        ballots = self._flight.ballots()
        weights = merge.weigh(ballots)
        if any(weights):
            for bucket, (mean, _) in zip(self._buckets, self._flight.results(), strict=True):
                for piece in bucket.pieces:
                    self._grad(piece).copy_(self._part(bucket, mean, piece))
        traffic = self._flight.traffic()
        self.round += 1
        geometry = None if traffic.gram is None else merge.geometry(traffic.gram, weights)
        refused = merge.refused(ballots)
        return RoundReport(0, self.round, weights, refused, traffic.payload_bytes, geometry, self._digest)

    def shared_state(self) -> dict[str, object]:
        return {"outer": {}, "counts": [self.round]}

    def load_shared_state(self, anchor: Mapping[str, Tensor], state: Mapping[str, object]) -> None:
        counts = state["counts"]
        assert isinstance(counts, list)
        self.round = counts[0]

    def replica_state(self) -> dict[str, object]:
        return {}

    def load_replica_state(self, state: Mapping[str, object]) -> None:
        pass

    def _exchanges(self) -> Iterator[Exchange]:
        for bucket in self._buckets:
            flat = torch.empty(bucket.stop - bucket.start, dtype=torch.float32, device=self._tensors[0].device)
            for piece in bucket.pieces:
                self._part(bucket, flat, piece).copy_(self._grad(piece))
            yield self._compressor.average(flat, {})

    def _grad(self, piece: Piece) -> Tensor:
        param = self._tensors[piece.tensor]
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        whole = piece.tensor in self._layout.whole
        return param.grad if whole else param.grad.view(-1)[piece.start : piece.stop]

    def _part(self, bucket: Bucket, flat: Tensor, piece: Piece) -> Tensor:
        part = flat[piece.offset - bucket.start : piece.offset - bucket.start + piece.stop - piece.start]
        return part.view(self._layout.shapes[piece.tensor]) if piece.tensor in self._layout.whole else part
