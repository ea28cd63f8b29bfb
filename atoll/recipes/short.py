"""Runs for the machine at hand: no download, no account, the Python sources found on it as the corpus.

They are far shorter than the paper's, and carry outer settings for their length. What acts over many rounds is
outer_lr / (1 - outer_momentum): 7 in the paper, reached after tens of rounds, and too hot for a run of that many.
Here it is 1.0, close to plain averaging, which was best in tuning (docs/results.md). To compare recipes, tune the outer
settings of each.
"""

from __future__ import annotations

from typing import Any

SHORT_RUN = {"outer_lr": 0.9, "outer_momentum": 0.1}


def quickstart() -> dict[str, Any]:
    """0.9 M parameters over bytes, four replicas as processes, 50 rounds of 10 steps: about a minute on two CPU cores.

    Needs nothing but the installed package. Ours; no paper trained at this size.
    """
    return {
        "model": {"hidden_size": 192, "num_layers": 2, "num_heads": 4, "intermediate_size": 512},
        "sequence_length": 64,
        "max_steps": 500,
        "batch_size": 4,
        "learning_rate": 1e-3,
        "warmup_steps": 50,
        "replicas": 4,
        "inner_steps": 10,
        "compressor": "fp16",
        **SHORT_RUN,
        "eval_steps": 50,
        "save_steps": 100,
        "output_dir": "runs/quickstart",
    }


def small() -> dict[str, Any]:
    """12 M parameters over 4,096 tokens learnt from the corpus, four replicas, 100 rounds of 50 steps.

    Needs about 1 GB of memory a replica (estimated). It reads 82 M tokens, about ten times the default 24 MB of text:
    work for a GPU, or for two CPU cores and about a day (estimated). Ours; no paper trained at this size.
    """
    return {
        "model": {"hidden_size": 384, "num_layers": 6, "num_heads": 6, "intermediate_size": 1024},
        "data": {"tokenizer": "bpe", "bpe_vocab_size": 4096},
        "sequence_length": 256,
        "max_steps": 5000,
        "batch_size": 16,
        "learning_rate": 1e-3,
        "warmup_steps": 200,
        "replicas": 4,
        "inner_steps": 50,
        **SHORT_RUN,
        "eval_steps": 250,
        "save_steps": 500,
        "output_dir": "runs/small",
    }
