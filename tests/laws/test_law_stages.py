"""The laws with two stages a replica: every schedule, compressor and adopt rule, in one set of four processes."""

from __future__ import annotations

from pathlib import Path

from laws.stage_runs import check_every_combination
from train.worker_runs import TWO_LAYERS, worker_config

from atoll.train.launch import run_workers


def test_replicas_of_two_stages_obey_the_laws_under_every_combination(tmp_path: Path) -> None:
    """Same anchors, declared bytes sent, each launch applied once, nothing lost, void rounds void: see `stage_runs`."""
    model = {**TWO_LAYERS, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
    config = worker_config(tmp_path, "laws", pipeline_stages=2, batch_size=2, sequence_length=8, model=model)
    run_workers(config, check_every_combination)
