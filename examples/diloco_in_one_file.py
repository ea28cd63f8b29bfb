"""DiLoCo (arXiv 2311.08105) in one file: torch and nothing else.

M replicas of a tiny language model train in turn, each on text of its own, and agree on new weights every H steps:

    every replica:     θᵢ ← θ, then H steps of AdamW on its own data       (no communication)
    all together:      Δ = mean of (θ − θᵢ);  θ ← one step of SGD with Nesterov momentum, taking Δ for the gradient

Run it:  python examples/diloco_in_one_file.py          (about a minute on one core)
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

VOCAB_SIZE = 256  # text is read as bytes


class TinyLM(nn.Module):
    """A causal transformer over bytes: two layers, about 0.1 M parameters."""

    def __init__(self, *, dim: int = 64, num_layers: int = 2, num_heads: int = 4, max_length: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, dim)
        self.position = nn.Parameter(torch.randn(max_length, dim) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, num_heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length, vocabulary]
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.embed(tokens) + self.position[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.norm(hidden) @ self.embed.weight.T / hidden.shape[-1] ** 0.5


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean loss of predicting each next byte of `batch` [sequences, length + 1], in nats."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def inner_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)


def train_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Tensor], *, inner_steps: int
) -> float:
    """`inner_steps` steps of one replica; the mean loss."""
    total = 0.0
    for _ in range(inner_steps):
        loss = loss_of(model, next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / inner_steps


def diloco(
    models: Sequence[nn.Module],
    batches: Sequence[Iterator[Tensor]],
    *,
    rounds: int,
    inner_steps: int,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
) -> Iterator[tuple[list[Tensor], float]]:
    """After each round: the anchor (a tensor a parameter) and the mean loss of the replicas in it.

    models: one a replica, equal at the start. batches: an endless stream for each.
    """
    optimizers = [inner_optimizer(model) for model in models]  # never reset, never sent
    anchor = [param.detach().clone() for param in models[0].parameters()]  # storage of its own
    outer = torch.optim.SGD(anchor, lr=outer_lr, momentum=outer_momentum, nesterov=True)
    for _ in range(rounds):
        losses = [
            train_alone(model, optimizer, stream, inner_steps=inner_steps)
            for model, optimizer, stream in zip(models, optimizers, batches, strict=True)
        ]
        for theta, *copies in zip(anchor, *(model.parameters() for model in models), strict=True):
            theta.grad = sum(theta - copied.detach() for copied in copies) / len(models)  # old minus new
        outer.step()
        for model in models:
            adopt(model, anchor)
        yield anchor, sum(losses) / len(losses)


@torch.no_grad()
def adopt(model: nn.Module, anchor: Sequence[Tensor]) -> None:
    for param, theta in zip(model.parameters(), anchor, strict=True):
        param.copy_(theta)


def python_text() -> Tensor:
    """Some of Python's standard library, and this file, as bytes."""
    files = [*sorted(Path(os.__file__).parent.glob("a*.py")), Path(__file__)]
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def sample(text: Tensor, *, seed: int, batch_size: int = 8, length: int = 64) -> Iterator[Tensor]:
    """Endless batches [batch_size, length + 1] from random places of `text`."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - length, (batch_size,), generator=generator)
        yield torch.stack([text[start : start + length + 1] for start in starts])


def main(*, num_replicas: int, rounds: int, inner_steps: int) -> None:
    torch.manual_seed(0)
    *shards, held_out = python_text().chunk(num_replicas + 1)
    first = TinyLM()
    models = [copy.deepcopy(first) for _ in range(num_replicas)]
    batches = [sample(shard, seed=replica) for replica, shard in enumerate(shards)]
    exam = next(sample(held_out, seed=0, batch_size=64))
    alone, alone_batches = copy.deepcopy(first), sample(shards[0], seed=0)
    alone_optimizer = inner_optimizer(alone)
    print(f"{num_replicas} replicas, {inner_steps} steps a round; held-out loss in nats a byte")
    # 0.9 is the paper's momentum, for hundreds of rounds; a run this short wants less
    for number, (_, loss) in enumerate(
        diloco(models, batches, rounds=rounds, inner_steps=inner_steps, outer_momentum=0.6)
    ):
        train_alone(alone, alone_optimizer, alone_batches, inner_steps=inner_steps)
        with torch.no_grad():
            together, single = loss_of(models[0], exam).item(), loss_of(alone, exam).item()
        print(f"round {number + 1}: training {loss:.3f} | held out {together:.3f} | one replica alone {single:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="DiLoCo on a tiny language model")
    parser.add_argument("--num-replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--inner-steps", type=int, default=20)
    main(**vars(parser.parse_args()))
