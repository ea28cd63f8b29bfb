"""Tokens a second of `atoll train` with one replica against a bare PyTorch loop on the same model and batches.

    python benchmarks/inner_loop.py [--steps 150] [--repeats 5]

Both sides run in this process in turn, one thread; the ratio of medians is what counts. Target: at least 0.97.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

from atoll.comm.local import LocalGroup
from atoll.data import TextData, load_data
from atoll.models import build_model
from atoll.recipes import recipe
from atoll.train.build import build_run
from atoll.train.config import TrainConfig, build_config
from atoll.train.loop import train
from atoll.train.stopping import LocalStopper, watch_signals

WARM_UP = 10  # steps that are not counted


def bare_loop(config: TrainConfig, data: TextData) -> float:
    """Tokens a second of the plainest loop: forward, backward, clip, AdamW."""
    model = build_model(config.model, vocab_size=data.vocab_size, sequence_length=config.sequence_length, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)
    stream = data.stream(0)
    for step in range(config.max_steps):
        if step == WARM_UP:
            began = time.perf_counter()
        batch = stream.next_batch(config.batch_size)
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()
    return tokens(config) / (time.perf_counter() - began)


def atoll_loop(config: TrainConfig, data: TextData) -> float:
    """Tokens a second of the real trainer, metrics, rounds and all, without the evaluation and save at its end."""
    with tempfile.TemporaryDirectory() as folder, watch_signals() as signals:
        run = build_run(
            config.model_copy(update={"output_dir": str(Path(folder) / "run")}),
            LocalGroup(1).endpoints(),
            stopper=LocalStopper(signals),
            signals=signals,
            num_processes=2,
            quiet=True,
            data=data,
        )
        stamps: list[float] = []
        log_step = run.log_step
        run.log_step = lambda report: (log_step(report), stamps.append(time.perf_counter()))[0]  # type: ignore[method-assign]
        train(run)
        run.close()
    return tokens(config) / (stamps[-1] - stamps[WARM_UP - 1])


def tokens(config: TrainConfig) -> int:
    return (config.max_steps - WARM_UP) * config.batch_size * config.sequence_length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = recipe("quickstart") | {
        "replicas": 1, "max_steps": arguments.steps, "inner_steps": 50, "engine": "local", "threads": 1,
        "warmup_steps": 10, "eval_steps": 0, "save_steps": 0,
    }  # fmt: skip
    config = build_config(settings)
    data = load_data(config.data, sequence_length=config.sequence_length, num_replicas=1, seed=0)
    rates: dict[str, list[float]] = {"bare": [], "atoll": []}
    for repeat in range(arguments.repeats):
        rates["bare"].append(bare_loop(config, data))
        rates["atoll"].append(atoll_loop(config, data))
        print(f"{repeat + 1}: bare {rates['bare'][-1]:,.0f} tok/s, atoll {rates['atoll'][-1]:,.0f} tok/s", flush=True)
    medians = {side: statistics.median(values) for side, values in rates.items()}
    pairs = [a / b for a, b in zip(rates["atoll"], rates["bare"], strict=True)]
    print(
        json.dumps(
            {
                "benchmark": "inner_loop",
                **medians,
                "ratio": medians["atoll"] / medians["bare"],
                "median_of_pairs": statistics.median(pairs),
            }
        )
    )


if __name__ == "__main__":
    main()
