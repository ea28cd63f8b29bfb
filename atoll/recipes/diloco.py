"""The runs of DiLoCo (arXiv 2311.08105): 60M, 150M and 400M parameters on C4, eight replicas, 500 steps a round.

From the paper: layers, width, heads and their size, vocabulary of 32,000, sequences of 1,024, 512 of them a step and
replica, inner rate 4e-4 with 1,000 steps of warm-up, weight decay 0.1, 24,000 steps of one replica alone and then 128
rounds, outer Nesterov 0.7 / 0.9 (the defaults, as are 500 inner steps, cosine and AdamW betas 0.9 / 0.95).

Where we differ, or the paper is silent:

- Blocks are Llama's. The feed-forward part is gated with 8/3 of the width, which has as many parameters as a plain one
  of 4 times the width; with tied embeddings that gives the sizes the models are named after.
- The tokenizer is a BPE of 32,000 learnt from the first `data.max_bytes` of C4 (the rest is only streamed), because the
  paper's is not public. Perplexities are therefore not comparable with the paper's, and held-out text comes from the
  same head. A tokenizer of your own: `--data.tokenizer FOLDER`.
- Documents are shared out i.i.d.; the paper's main tables are non-i.i.d., clusters weighted by their examples. That
  needs the whole corpus as token shards: `--data.source FOLDER --data.shard cluster --merge examples`.

They need one GPU a replica, the `datasets` extra and the network. `--batch-size` may be lowered to fit the memory if
`--gradient-accumulation-steps` is raised in step: their product is the 512 of the paper.
"""

from __future__ import annotations

from typing import Any

C4 = {"source": "hf:allenai/c4:en", "max_bytes": 200_000_000}
PRETRAIN_STEPS, ROUNDS, INNER_STEPS = 24_000, 128, 500


def diloco_60m() -> dict[str, Any]:
    """59 M parameters: 3 layers of width 896 with 16 heads of 64. Source and deviations: see above."""
    model = {"hidden_size": 896, "num_layers": 3, "num_heads": 16, "intermediate_size": 2400}
    return _paper("diloco_60m", model | {"overrides": {"head_dim": 64}}, batch_size=32)


def diloco_150m() -> dict[str, Any]:
    """150 M parameters: 12 layers of width 896 with 16 heads of 64. Source and deviations: see above."""
    model = {"hidden_size": 896, "num_layers": 12, "num_heads": 16, "intermediate_size": 2400}
    return _paper("diloco_150m", model | {"overrides": {"head_dim": 64}}, batch_size=16)


def diloco_400m() -> dict[str, Any]:
    """389 M parameters: 12 layers of width 1536 with 12 heads of 128. Source and deviations: see above."""
    model = {"hidden_size": 1536, "num_layers": 12, "num_heads": 12, "intermediate_size": 4096}
    return _paper("diloco_400m", model, batch_size=16)


def _paper(name: str, model: dict[str, Any], *, batch_size: int) -> dict[str, Any]:
    """What the three have in common; `batch_size` sequences fit a forward pass, 512 make a step."""
    return {
        "model": model,
        "data": {**C4, "tokenizer": "bpe", "bpe_vocab_size": 32_000},
        "sequence_length": 1024,
        "pretrain_steps": PRETRAIN_STEPS,
        "max_steps": PRETRAIN_STEPS + ROUNDS * INNER_STEPS,
        "batch_size": batch_size,
        "gradient_accumulation_steps": 512 // batch_size,
        "learning_rate": 4e-4,
        "warmup_steps": 1000,
        "replicas": 8,
        "inner_steps": INNER_STEPS,
        "eval_steps": 1000,
        "save_steps": 1000,
        "output_dir": f"runs/{name}",
    }
