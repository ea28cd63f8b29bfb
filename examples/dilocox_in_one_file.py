"""DiLoCoX (arXiv 2506.21263) in one file: torch and nothing else.

M replicas of a tiny language model train in turn, each on text of its own. What they tell each other takes a whole
round to arrive, and is small: factors of low rank, in 4 bits.

    round t, every replica:  H steps of AdamW from start_i to θᵢ, while the mean of round t−1 is on its way
                             δᵢ = start_i − θᵢ sets out
    then round t−1 lands:    θ ← one Nesterov step on its mean;  θᵢ ← θ − δᵢ/M   (a share of what θ does not know yet)

    averaging a matrix:      M = δ + e;  P = mean(Q Mᵀ), orthonormal;  Q' = mean(P M);  mean = Pᵀ Q';  e = M − Pᵀ Q'_own
                             Q is the last round's Q'; all means are of int4 codes; e, what did not fit, is sent later

Run it:  python examples/dilocox_in_one_file.py          (ten seconds on one core)
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


class TinyLM(nn.Module):
    """A causal transformer over bytes: two layers, about 0.1 M parameters."""

    def __init__(self, *, dim: int = 64, num_layers: int = 2, num_heads: int = 4, max_length: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.position = nn.Parameter(torch.randn(max_length, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, num_heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(dim), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length, vocabulary]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.layers(self.embed(tokens) + self.position[: tokens.shape[1]], mask=mask, is_causal=True)
        return hidden @ self.embed.weight.T / hidden.shape[-1] ** 0.5


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean loss of predicting each next byte of `batch` [sequences, length + 1], in nats."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Tensor], steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, next(batches)).backward()
        optimizer.step()


def int4(flat: Tensor) -> Tensor:
    """What arrives of `flat` in 4 bits: of every 128 values the largest magnitude in bf16, and −7..7 for each."""
    coded = []
    for group in flat.split(128):
        largest = group.abs().max().to(torch.bfloat16).float()
        levels = (group * (7 / largest.clamp(min=1e-36))).round().clamp(-7, 7)
        coded.append(levels * (largest * (1 / 7)))
    return torch.cat(coded)


def int4_mean(tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The mean of what replicas send, and what of it each owes.

    Replica i owns the i-th slice of the groups: it averages what all sent of it, and sends that in 4 bits to all. What
    this second rounding loses of the mean is its to send again, M-fold, as it will be one of M.
    """
    flats = [tensor.reshape(-1) for tensor in tensors]
    sent = [int4(flat) for flat in flats]
    owed = [flat - arrived for flat, arrived in zip(flats, sent, strict=True)]
    exact = sum(sent[1:], sent[0].clone()) / len(sent)
    mean = int4(exact)
    groups = -(-mean.numel() // 128)
    for i, mine in enumerate(owed):
        part = slice(groups * i // len(sent) * 128, groups * (i + 1) // len(sent) * 128)
        mine[part] += (exact[part] - mean[part]) * len(sent)
    return mean.view_as(tensors[0]), [mine.view_as(tensors[0]) for mine in owed]


def whole_numbers(values: Tensor, dim: int, length: int) -> tuple[Tensor, Tensor]:
    """Values as whole numbers times powers of two, so short that `length` products of two add up exactly in fp64."""
    bits = (53 - math.ceil(math.log2(length))) // 2
    exponents = torch.frexp(values.double().abs().amax(dim, keepdim=True)).exponent.long()
    power_of_two = [((e + 1023) << 52).view(torch.float64) for e in (bits - exponents, exponents - bits)]
    return (values * power_of_two[0]).round(), power_of_two[1]


def exact_matmul(left: Tensor, right: Tensor) -> Tensor:
    """A product with nothing to round on the way: the same bits on every machine, or anchors would drift apart."""
    rows, row_sizes = whole_numbers(left, 1, left.shape[1])
    columns, column_sizes = whole_numbers(right, 0, left.shape[1])
    return (rows @ columns * row_sizes * column_sizes).float()


def orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis of what rows span (Gram-Schmidt, twice), by operations no machine rounds differently."""
    for _ in range(2):
        whole, _ = whole_numbers(rows, 1, rows.shape[1])
        gram = whole @ whole.T
        table = torch.cat([gram, torch.eye(len(gram), dtype=gram.dtype)], 1)
        for k in range(len(gram)):
            keep = table[k, k] > gram[k, k] * 2.0**-28  # else row k depends on those before it, and becomes zero
            share = torch.where(keep, table[k + 1 :, k] / table[k, k], 0.0)
            table[k + 1 :] -= share[:, None] * table[k]
        pivots = table.diagonal()
        sizes = torch.where(pivots > gram.diagonal() * 2.0**-28, 1 / pivots.clamp(min=1e-300).sqrt(), 0.0)
        rows = exact_matmul(table[:, len(gram) :] * sizes[:, None], whole)
    return rows


class Averager:
    """Averages one parameter round after round. e: what each replica owes. q: the warm start, the same for all."""

    def __init__(self, shape: torch.Size, *, rank: int, num_replicas: int) -> None:
        self.e = [torch.zeros(shape) for _ in range(num_replicas)]
        self.factored = len(shape) == 2 and 2 * rank * sum(shape) < shape.numel()
        if self.factored:
            generator = torch.Generator().manual_seed(1_000_003 * shape[1] + 17)
            self.fresh = torch.randint(-(1 << 15), 1 << 15, (rank, shape[1]), generator=generator).float() / (1 << 15)
            self.q = self.fresh

    def average(self, deltas: Sequence[Tensor]) -> Tensor:
        totals = [delta + owed for delta, owed in zip(deltas, self.e, strict=True)]
        if not self.factored:
            mean, self.e = int4_mean(totals)
            return mean
        sizes = self.q.abs().amax(1, keepdim=True)
        q = torch.where(sizes > 0, self.q / sizes.clamp(min=1e-36), self.fresh)
        p = orthonormal(int4_mean([q @ total.T for total in totals])[0])
        own = [p @ total for total in totals]
        self.q, missed = int4_mean(own)
        for i, total in enumerate(totals):
            self.e[i] = torch.addmm(total, p.T, own[i] - missed[i], alpha=-1)
        return exact_matmul(p.T, self.q)


def dilocox(
    models: Sequence[nn.Module], batches: Sequence[Iterator[Tensor]], *, rounds: int, inner_steps: int, rank: int = 8
) -> Iterator[list[Tensor]]:
    """The anchor (a tensor a parameter) whenever a round has landed: `rounds` times.

    models: one a replica, equal at the start. batches: an endless stream for each.
    """
    optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95)) for model in models]
    params = list(zip(*(model.parameters() for model in models), strict=True))  # those of all replicas side by side
    anchor = [copies[0].detach().clone() for copies in params]
    outer = torch.optim.SGD(anchor, lr=0.6, momentum=0.4, nesterov=True)  # the paper's 0.7, 0.9 overshoot
    averagers = [Averager(theta.shape, rank=rank, num_replicas=len(models)) for theta in anchor]
    nothing = [[torch.zeros_like(theta)] * len(models) for theta in anchor]
    in_flight = None
    for number in range(rounds + 1):
        landing, in_flight, deltas = in_flight, None, nothing
        if number < rounds:
            starts = [[param.detach().clone() for param in copies] for copies in params]
            for model, optimizer, stream in zip(models, optimizers, batches, strict=True):
                train_alone(model, optimizer, stream, inner_steps)
            deltas = [[s - p.detach() for s, p in zip(*pair, strict=True)] for pair in zip(starts, params, strict=True)]
            in_flight = [averager.average(delta) for averager, delta in zip(averagers, deltas, strict=True)]
        if number == 0:  # nothing is on its way yet: this once all wait, and θ knows everything when it has moved
            landing, in_flight, deltas = in_flight, None, nothing
        if landing is not None:
            for theta, mean in zip(anchor, landing, strict=True):
                theta.grad = mean
            outer.step()
            for theta, copies, delta in zip(anchor, params, deltas, strict=True):
                for param, own in zip(copies, delta, strict=True):
                    param.data.copy_(theta - 1 / len(models) * own)
            yield anchor


def sample(text: Tensor, *, seed: int, batch_size: int = 8, length: int = 64) -> Iterator[Tensor]:
    """Endless batches [batch_size, length + 1] from random places of `text`."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length, (batch_size,), generator=generator)
        yield torch.stack([text[start : start + length + 1] for start in starts])


def main(*, num_replicas: int, rounds: int, inner_steps: int) -> None:
    torch.manual_seed(0)
    source = b"\n".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("a*.py")))
    *shards, held_out = torch.frombuffer(bytearray(source), dtype=torch.uint8).long().chunk(num_replicas + 1)
    judge = TinyLM()
    models = [copy.deepcopy(judge) for _ in range(num_replicas)]
    exam = next(sample(held_out, seed=0, batch_size=64))
    streams = [sample(shard, seed=replica) for replica, shard in enumerate(shards)]
    for number, anchor in enumerate(dilocox(models, streams, rounds=rounds, inner_steps=inner_steps)):
        with torch.no_grad():
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(anchor), judge.parameters())
            print(f"round {number + 1} landed: held out {loss_of(judge, exam).item():.3f} nats a byte")


if __name__ == "__main__":
    main(num_replicas=2, rounds=15, inner_steps=20)
