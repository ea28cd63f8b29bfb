"""Runs of the papers that the planner knows by name, besides the recipes of `atoll train`.

Shapes and numbers, not settings: what is inferred says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.plan.shapes import ModelShape


@dataclass(frozen=True)
class Preset:
    """A planned run. source: where its numbers are from, and which are inferred.

    sequence_length, sequences: of one step over all islands. compressor, rank, fragments: of the known method.
    """

    shape: ModelShape
    source: str
    islands: int = 2
    inner_steps: int = 100
    sequence_length: int = 2048
    sequences: int = 16
    compressor: str = "int4"
    rank: int = 0
    fragments: int = 0
    bf16: bool = False

    @property
    def tokens_per_step(self) -> int:
        """Over all islands."""
        return self.sequence_length * self.sequences


PRESETS: dict[str, Preset] = {
    "dilocox_107b": Preset(
        ModelShape(
            *("qwen2", 8192, 80, 64, 46976, 152_064),
            positions=2048,
            tie_embeddings=False,
            num_kv_heads=8,
            assumed="Qwen1.5-110B with its feed-forward cut from 49,152 to 46,976 so that the total is 107 B",
        ),
        "DiLoCoX (arXiv 2506.21263): 107 B, H 125, rank 2048 and int4; shape and 32,768 tokens a step are ours",
        inner_steps=125,
        compressor="lowrank+int4",
        rank=2048,
        bf16=True,
    ),
    "dilocox_opt_1_3b": Preset(
        ModelShape("opt", 2048, 24, 32, 8192, 50_272, positions=2048),
        "DiLoCoX (arXiv 2506.21263): OPT-1.3B, H 125, int4 alone; 32,768 tokens a step is ours",
        inner_steps=125,
    ),
    "streaming_1b": Preset(
        ModelShape("llama", 2048, 24, 32, 5472, 32_000),
        "Streaming DiLoCo (arXiv 2501.18512): 24 layers, H 100, three layers a fragment, E3M0; H 104 here, a multiple "
        "of the 8 fragments; shape and tokens a step are ours",
        inner_steps=104,
        sequences=1024,
        compressor="fp4",
        fragments=8,
    ),
    "sparseloco_1b": Preset(
        ModelShape("llama", 2048, 22, 32, 5632, 32_000, tie_embeddings=False, num_kv_heads=4),
        "SparseLoCo (arXiv 2508.15706): H 30, 64 of 4,096 values in 2 bits; shape (TinyLlama's) and tokens are ours",
        islands=8,
        inner_steps=30,
        sequences=1024,
        compressor="topk+stat2",
    ),
}
