"""The runs of OpenDiLoCo (arXiv 2407.07852): Llama models from scratch, pseudo-gradients in fp16.

From the paper and its published configurations: the models (untied embeddings over 32,000 tokens), sequences of 1,024,
88,000 steps with 1,000 of warm-up and a cosine to 0, inner AdamW 4e-4 with betas 0.9 / 0.95 and clipping at 1, 500
steps a round, outer Nesterov 0.7 / 0.9. It also ran the 150M model with `--inner-steps 50` and the 1.1B with 125.

Where we differ:

- The tokenizer is a BPE of 32,000 learnt from the first `data.max_bytes` of C4 (the rest is only streamed), so that
  nothing needs an account. Perplexities are therefore not comparable with the paper's. A tokenizer of your own:
  `--data.tokenizer FOLDER`.
- A replica of the paper was up to eight GPUs; here it is one, which accumulates gradients to the same batch.

They need one GPU a replica, the `datasets` extra and the network.
"""

from __future__ import annotations

from typing import Any

from atoll.recipes.diloco import C4


def opendiloco_150m() -> dict[str, Any]:
    """149 M parameters and 66 M of embeddings (the name leaves them out), eight replicas of batch 512.

    Source and deviations: see above.
    """
    model = {"hidden_size": 1024, "num_layers": 12, "num_heads": 16, "intermediate_size": 2688}
    return _paper("opendiloco_150m", model, {}, replicas=8, batch_size=16, accumulation=32)


def opendiloco_1b() -> dict[str, Any]:
    """1.1 B parameters, the shape of TinyLlama (32 heads share 4 keys and values), four replicas of batch 2,048.

    Needs about 80 GB of GPU memory a replica (estimated): 26 GB of parameters, gradients, inner and outer state, and
    the activations of 16 sequences.
    Source and further deviations: see above.
    """
    model = {"hidden_size": 2048, "num_layers": 22, "num_heads": 32, "intermediate_size": 5632}
    return _paper("opendiloco_1b", model, {"num_key_value_heads": 4}, replicas=4, batch_size=16, accumulation=128)


def _paper(
    name: str,
    model: dict[str, Any],
    overrides: dict[str, Any],
    *,
    replicas: int,
    batch_size: int,
    accumulation: int,
) -> dict[str, Any]:
    """What the two have in common; a step of a replica takes batch_size · accumulation sequences."""
    return {
        "model": {**model, "tie_embeddings": False, "overrides": {"rms_norm_eps": 1e-5, **overrides}},
        "data": {**C4, "tokenizer": "bpe", "bpe_vocab_size": 32_000},
        "sequence_length": 1024,
        "max_steps": 88_000,
        "batch_size": batch_size,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": 4e-4,
        "warmup_steps": 1000,
        "replicas": replicas,
        "compressor": "fp16",
        "eval_steps": 1000,
        "save_steps": 1000,
        "output_dir": f"runs/{name}",
    }
