"""Memory of each worker of a pipeline of 1, 2 and 4 stages, against what is foretold.

    python benchmarks/pipeline_memory.py [--hidden 768] [--layers 16]

One model (a Llama of some 110 M parameters) is trained for two steps, at each number of stages by as many processes on
this machine. *State* is foretold from the plan: 16 bytes a parameter, which must be what the worker's tensors have, to
the byte. *Foretold* adds the activations: those of one microbatch, counted from what autograd saves, times the
microbatches that 1F1B has in flight there. *Peak* is the growth of the process's resident memory from before the model
is made to the highest point of the second step, from the kernel; freed tensors are given back to it at once here.
Target: the state to the byte, and the peak within 10 % of the bytes foretold, on every worker.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, PreTrainedConfig

from atoll.parallel.memory import activation_bytes, count_bytes, in_flight, predict_bytes
from atoll.parallel.mesh import ReplicaMesh, build_mesh
from atoll.parallel.pipeline import ParallelModel, ParallelSettings, build_parallel

SEQUENCE_LENGTH = 32
MICROBATCHES = 4
STAGES = (1, 2, 4)
MIB = 1 << 20


def model_config(hidden: int, layers: int) -> PreTrainedConfig:
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        vocab_size=512,
        max_position_embeddings=SEQUENCE_LENGTH,
        tie_word_embeddings=False,
        use_cache=False,
    )


def resident_bytes(name: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measure(rank: int, num_stages: int, store_path: str, config: PreTrainedConfig, pipe: Connection) -> None:
    """One worker: two steps, and what they held."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store_path, num_stages), rank=rank, world_size=num_stages)
    mesh = build_mesh(1, num_stages, device=torch.device("cpu"))
    train(model_config(64, num_stages), mesh)  # what the first steps of a process load is no memory of a model
    gc.collect()
    before = resident_bytes("VmRSS")
    model, optimizer = train(config, mesh)
    peak = resident_bytes("VmHWM") - before
    predicted = predict_bytes(model.plan, mesh.stage)
    held = count_bytes(model.params, optimizer)
    activations = activations_of(model)
    pipe.send({"stage": mesh.stage, "state": predicted, "activations": activations, "held": held, "peak": peak})
    dist.destroy_process_group()


def activations_of(model: ParallelModel) -> int:
    """Bytes of all microbatches that wait for their backward at once."""
    (stage,) = model.stages
    tokens = torch.randint(0, 512, (1, SEQUENCE_LENGTH))
    hidden = torch.randn(1, SEQUENCE_LENGTH, model.config.hidden_size, requires_grad=True)
    one = activation_bytes(stage, tokens if stage.is_first else hidden, tokens)
    return one * in_flight("1f1b", stage.index, num_workers=stage.num_stages, microbatches=MICROBATCHES)


def train(config: PreTrainedConfig, mesh: ReplicaMesh) -> tuple[ParallelModel, torch.optim.Optimizer]:
    """Two steps; the peak starts anew before each."""
    model = build_parallel(config, mesh, ParallelSettings("1f1b", MICROBATCHES), seed=0)
    optimizer = torch.optim.AdamW(model.params.values(), fused=True)
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")
        optimizer.zero_grad(set_to_none=False)
        model.compute_gradients(torch.randint(0, 512, (MICROBATCHES, SEQUENCE_LENGTH)))
        model.clip_gradients_(1.0)
        optimizer.step()
    return model, optimizer


def give_freed_memory_back() -> None:
    """For the processes started after this: what the C library kept would count as if it were in use."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(128 << 10)


def run(num_stages: int, config: PreTrainedConfig) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe(duplex=False)
        workers = [
            context.Process(target=measure, args=(rank, num_stages, f"{folder}/store", config, theirs))
            for rank in range(num_stages)
        ]
        for worker in workers:
            worker.start()
        results = [ours.recv() for _ in workers]
        for worker in workers:
            worker.join()
    return sorted(results, key=lambda result: result["stage"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=16)
    asked = parser.parse_args()
    give_freed_memory_back()
    rows, good = [], True
    print("stages  worker       state activations    foretold        peak   peak/foretold   state of one stage")
    for num_stages in STAGES:
        for result in run(num_stages, model_config(asked.hidden, asked.layers)):
            state, held = sum(result["state"].values()), sum(result["held"].values())
            foretold, peak = state + result["activations"], result["peak"]
            rows.append({"stages": num_stages, "worker": result["stage"], "state": state, "held": held})
            rows[-1] |= {"activations": result["activations"], "peak": peak}
            good &= held == state and abs(peak / foretold - 1) <= 0.10
            sizes = "".join(f"{size / MIB:8.1f} MiB" for size in (state, result["activations"], foretold, peak))
            print(
                f"{num_stages:6}  {result['stage']:6}{sizes} {peak / foretold:15.3f} {state / rows[0]['state']:20.3f}"
            )
    print(json.dumps({"benchmark": "pipeline_memory", "hidden": asked.hidden, "layers": asked.layers, "rows": rows}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
