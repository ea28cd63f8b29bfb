"""A plain PyTorch loop that became DiLoCo by two lines, marked below.

    python examples/outer_sync.py                                           one replica alone
    torchrun --standalone --nproc-per-node 2 examples/outer_sync.py         two replicas on this machine

What changed: the loop stands in `with atoll.OuterSync(...)`, and each process reads its own part of the text. Between
two rounds the processes do not talk to each other.
"""

import os
from pathlib import Path

import torch
from torch import nn

import atoll  # <- the first line

REPLICA, NUM_REPLICAS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
CONTEXT, STEPS, INNER_STEPS = 16, 205, 50


def python_text() -> torch.Tensor:
    """This replica's share of some of Python's standard library, as bytes."""
    files = sorted(Path(os.__file__).parent.glob("a*.py"))
    data = bytearray(b"\n".join(path.read_bytes() for path in files))
    return torch.frombuffer(data, dtype=torch.uint8).long().chunk(NUM_REPLICAS)[REPLICA]


def next_batch(text: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """32 pieces of text [32, CONTEXT] and the byte that follows each [32]."""
    starts = torch.randint(len(text) - CONTEXT, (32,), generator=generator)
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return windows[:, :-1], windows[:, -1]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same first weights on every replica; OuterSync checks it
    model = nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text, generator = python_text(), torch.Generator().manual_seed(REPLICA)

    with atoll.OuterSync(model, optimizer, inner_steps=INNER_STEPS, outer_momentum=0.6) as sync:  # <- the second line
        for step in range(1, STEPS + 1):
            inputs, targets = next_batch(text, generator)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % INNER_STEPS == 0 and REPLICA == 0:
                print(f"step {step}/{STEPS} | loss {loss.item():.3f} | round {sync.round} | anchor {sync.digest()[:6]}")

    # on the way out the last 5 steps were synced too: all replicas hold the same model now
    print(f"replica {REPLICA} of {NUM_REPLICAS}: {sync.round} rounds, anchor {sync.digest()}", flush=True)


if __name__ == "__main__":
    main()
