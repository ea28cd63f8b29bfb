"""Runs whose syncs hide behind the inner steps and send few bits: DiLoCoX, Streaming DiLoCo, SparseLoCo.

    recipe              paper                              replicas   H    sent                       lands
    dilocox_opt_1_3b    DiLoCoX, arXiv 2506.21263          2          125  int4, feedback             5 steps later
    dilocox_107b        DiLoCoX                            2          125  rank 2048, int4, feedback  23 steps later
    streaming_1b        Streaming DiLoCo, arXiv 2501.18512 2          104  fp4                        1 step later
    sparseloco_1b       SparseLoCo, arXiv 2508.15706       8          30   top 64 of 4,096 in 2 bits  at once
    dilocox_tiny        ours                               2          10   rank 32, int4, feedback    a round later

The papers say little about batches, inner rates and shapes; what is ours is named in each recipe. All tokenizers are
BPE learnt from the first `data.max_bytes` of the corpus, so that nothing needs an account: perplexities are not
comparable with the papers'. The large ones need the `datasets` extra, the network, and GPUs.

The papers' rounds land a whole round late. The two large DiLoCoX recipes land as few steps late as hide the sync on
1 Gbit/s at the papers' step times, a fifth to spare: the shorter the delay, the lower the loss (docs/results.md).
`--delay 125` is a whole round, which elastic runs need.

Under a delay of one round the outer settings of DiLoCo, 0.7 / 0.9, overshoot (docs/algorithms.md). The DiLoCoX recipes
have 0.6 / 0.4, and let a replica keep 1/M of the progress that the new anchor lacks; both are ours.
"""

from __future__ import annotations

from typing import Any

from atoll.recipes.diloco import C4

WIKITEXT = {"source": "hf:Salesforce/wikitext:wikitext-103-raw-v1", "max_bytes": 200_000_000}
DELAYED = {"schedule": "delayed", "adopt": "carry", "outer_lr": 0.6, "outer_momentum": 0.4}


def dilocox_opt_1_3b() -> dict[str, Any]:
    """OPT-1.3B (1.3 B parameters) over two islands: int4 with error feedback, 125 steps a round, landing 5 steps late.

    From DiLoCoX (arXiv 2506.21263): the model, WikiText-103, 4,000 steps, 125 inner steps, int4 alone. Ours: 32,768
    tokens a step over both islands in sequences of 2,048, inner rate 2e-4 (OPT's own) with 125 steps of warm-up, outer
    settings, carry, that the first round blocks, and two pipeline stages of 12 layers with 8 parts of one sequence.

    Needs two GPUs of 40 GB a replica (estimated): 47 GB of parameters, gradients, inner and outer state, residual, base
    and the round in flight, 36 bytes a parameter, and activations. On one GPU of 80 GB: `--pipeline-stages 1`.
    """
    model = {
        "family": "opt",
        "hidden_size": 2048,
        "num_layers": 24,
        "num_heads": 32,
        "intermediate_size": 8192,
        "vocab_size": 50_272,
    }
    own = {"compressor": "int4", "delay": 5, "pipeline_stages": 2}
    return _paper("dilocox_opt_1_3b", model, learning_rate=2e-4) | own


def dilocox_107b() -> dict[str, Any]:
    """107 B parameters over two islands: rank 2,048 and int4 with error feedback, rounds of 125 steps, 23 late.

    From DiLoCoX (arXiv 2506.21263): the size, a changed Qwen1.5 as the model, WikiText-103, 4,000 steps, 125 inner
    steps, rank 2,048 and int4, a pipeline over each island. Ours: the shape (Qwen1.5-110B with a feed-forward width of
    46,976 for 49,152, so that the total is 107 B), inner rate 1e-4, outer settings, carry, a residual in bf16.
    Attention matrices are too small to gain by rank 2,048 and go as int4 alone. The paper's adaptive rank is not used.

    Ours as well: the batch. A pipeline of 80 stages works only while it is fed: 160 sequences a replica and step, 80
    for each of two data workers, one after the other, are 655,360 tokens over both islands; half of a step is still
    bubble. The 32,768 tokens and 8.79 s a step that `atoll plan dilocox_107b` counts with are the planner's figures,
    from which the paper's throughput follows; they are not this recipe's, whose step nobody has timed.

    Needs islands of 160 devices of 40 GB (estimated): 80 stages of a layer, each on two data workers that hold half
    of its rows; the outer state, 23 GB on the fullest, lies on the host. The paper had 160 devices in all: 80 an island
    are `--data-workers 1`, need 44 GB each, and send 20.5 GB a round for 33.2: halves of a matrix have factors of
    their own.
    """
    model = {
        "family": "qwen2",
        "hidden_size": 8192,
        "num_layers": 80,
        "num_heads": 64,
        "intermediate_size": 46_976,
        "vocab_size": 152_064,
        "tie_embeddings": False,
        "overrides": {"num_key_value_heads": 8},
    }
    codes = {"compressor": "lowrank+int4", "rank": 2048, "residual_dtype": "bfloat16", "delay": 23}
    workers = {"pipeline_stages": 80, "data_workers": 2, "sharding": "shard"}
    memory = {"activation_checkpointing": True, "outer_state": "host"}
    fed = {"batch_size": 2, "gradient_accumulation_steps": 80}
    return _paper("dilocox_107b", model, learning_rate=1e-4) | codes | workers | memory | fed


def _paper(name: str, model: dict[str, Any], *, learning_rate: float) -> dict[str, Any]:
    """What the runs of DiLoCoX have in common; a step of a replica takes 8 sequences of 2,048 unless told otherwise."""
    return {
        "model": model,
        "data": {**WIKITEXT, "tokenizer": "bpe", "bpe_vocab_size": 50_272},
        "sequence_length": 2048,
        "max_steps": 4000,
        "batch_size": 1,
        "gradient_accumulation_steps": 8,
        "learning_rate": learning_rate,
        "warmup_steps": 125,
        "replicas": 2,
        "inner_steps": 125,
        **DELAYED,
        "error_feedback": True,
        "eval_steps": 250,
        "save_steps": 500,
        "output_dir": f"runs/{name}",
    }


def streaming_1b() -> dict[str, Any]:
    """1.3 B parameters over two islands: a fragment of three layers every 13 steps, landing a step later, in fp4.

    From Streaming DiLoCo (arXiv 2501.18512): 24 layers in strided fragments of three, overlap of one step, E3M0 without
    feedback, outer rate 0.4, two replicas. 104 steps a round for its 100, a multiple of the 8 fragments. Ours: width
    and heads (a Llama with tied embeddings), 512 sequences of 2,048 a replica and step, 11,960 steps (25 B tokens),
    inner rate 4e-4, outer momentum 0.9, and alpha 0.5: half of what the step under way did is kept.

    Needs a GPU of 80 GB a replica (estimated): 32 GB of state, 24 bytes a parameter and 4 of the fragment in flight,
    and the activations of 8 sequences.
    """
    return {
        "model": {"hidden_size": 2048, "num_layers": 24, "num_heads": 32, "intermediate_size": 5472},
        "data": {**C4, "tokenizer": "bpe", "bpe_vocab_size": 32_000},
        "sequence_length": 2048,
        "max_steps": 115 * 104,
        "batch_size": 8,
        "gradient_accumulation_steps": 64,
        "learning_rate": 4e-4,
        "warmup_steps": 1000,
        "replicas": 2,
        "inner_steps": 104,
        "schedule": "streaming",
        "fragments": 8,
        "delay": 1,
        "adopt": "lerp",
        "alpha": 0.5,
        "outer_lr": 0.4,
        "outer_momentum": 0.9,
        "compressor": "fp4",
        "eval_steps": 520,
        "save_steps": 520,
        "output_dir": "runs/streaming_1b",
    }


def sparseloco_1b() -> dict[str, Any]:
    """1.1 B parameters over eight islands: 64 of every 4,096 values in 2 bits, with error feedback, 30 steps a round.

    From SparseLoCo (arXiv 2508.15706): 30 inner steps, top-k with statistical 2-bit values and error feedback (0.219
    bits a parameter), a plain outer step of 1.0 without momentum. Ours: the shape (TinyLlama's), 128 sequences of 2,048
    a replica and step, 10,500 steps (22 B tokens), inner rate 4e-4. What is owed is kept whole, where the paper keeps
    0.95 of it each round, and contributions are not rescaled to their median norm.

    Needs a GPU of 80 GB a replica (estimated): 31 GB of state, 28 bytes a parameter, and the activations of 8
    sequences.
    """
    return {
        "model": {
            "hidden_size": 2048,
            "num_layers": 22,
            "num_heads": 32,
            "intermediate_size": 5632,
            "tie_embeddings": False,
            "overrides": {"num_key_value_heads": 4},
        },
        "data": {**C4, "tokenizer": "bpe", "bpe_vocab_size": 32_000},
        "sequence_length": 2048,
        "max_steps": 350 * 30,
        "batch_size": 8,
        "gradient_accumulation_steps": 16,
        "learning_rate": 4e-4,
        "warmup_steps": 1000,
        "replicas": 8,
        "inner_steps": 30,
        "outer_optimizer": "sgd",
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "compressor": "topk+stat2",
        "error_feedback": True,
        "eval_steps": 600,
        "save_steps": 600,
        "output_dir": "runs/sparseloco_1b",
    }


def dilocox_tiny() -> dict[str, Any]:
    """0.9 M parameters over bytes, two replicas as processes, 60 delayed rounds of 10 steps in rank 32 and int4.

    All of DiLoCoX at the size of `quickstart`: one-round delay, low rank, int4, error feedback, carry. Two or three
    minutes on two CPU cores; needs nothing but the installed package. Ours; no paper trained at this size. The more
    replicas, the less each of them carries: `--replicas 4`.
    """
    return {
        "model": {"hidden_size": 192, "num_layers": 2, "num_heads": 4, "intermediate_size": 512},
        "sequence_length": 64,
        "max_steps": 600,
        "batch_size": 8,
        "learning_rate": 1e-3,
        "warmup_steps": 50,
        "replicas": 2,
        "inner_steps": 10,
        **DELAYED,
        "compressor": "lowrank+int4",
        "rank": 32,
        "error_feedback": True,
        "eval_steps": 50,
        "save_steps": 200,
        "output_dir": "runs/dilocox_tiny",
    }
