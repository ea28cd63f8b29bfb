"""One short look at a machine with GPUs: does Atoll train there, and are its codes the same numbers?

    make gpu-check                  or python benchmarks/gpu_check.py [--allow-none] [--device cuda]

    step       two inner steps and a round of `atoll train`'s own loop, one GPU, bf16: finite losses, peak memory
    codes      every compressor's codes on the GPU against the CPU's: decoding one payload must give the same bits on
               both. Encoding may put a value that lies in the middle between two levels on the other one; at most
               0.1 % of bytes may differ, and what they stand for by no more than the code's own error
    speed      GB/s of fp32 there and back, once compiled
    group      with more than one GPU: an all-reduce over NCCL, the group of an island's workers

A table, then one JSON line. Exit code 0 where all holds, 1 where something does not, 3 where there is no GPU (0 with
--allow-none). --device cpu runs the same script without one, to try the script.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.comm.local import LocalGroup, drive_together
from atoll.compress import COMPRESSORS, Compressor, Feedback, Quantized, build_compressor
from atoll.exchange import Codec
from atoll.train.build import build_run
from atoll.train.config import build_config
from atoll.train.loop import train
from atoll.train.metrics import read_metrics
from atoll.train.stopping import LocalStopper, Signals

NO_GPU = 3
BYTES_MAY_DIFFER = 1e-3
MEANS_MAY_DIFFER = 1e-3  # of a whole average, relative


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    what: str
    ok: bool
    detail: str
    gb_s: float | None = None


def numbers(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3


def check_codec(name: str, codec: Codec, flat: Tensor, device: torch.device, *, repeats: int) -> list[Finding]:
    """Codes made on `device` beside those made on the CPU."""
    on_device = flat.to(device)
    reference, payload = codec.encode(flat), codec.encode(on_device)
    decoded, expected = codec.decode(reference.to(device), flat.numel()).cpu(), codec.decode(reference, flat.numel())
    differ = (payload.cpu() != reference).double().mean().item()
    error = float((codec.decode(payload, flat.numel()).cpu() - flat).norm() / (expected - flat).norm().clamp(min=1e-30))
    seconds = median_seconds(lambda: codec.decode(codec.encode(on_device), flat.numel()), device, repeats)
    same = torch.equal(decoded.view(torch.int32), expected.view(torch.int32))
    return [
        Finding(f"{name}: decoding", same, "the same bits" if same else "other bits"),
        Finding(
            f"{name}: encoding",
            differ <= BYTES_MAY_DIFFER and error < 1.01,
            f"{differ:.2g} of bytes differ, error {error:.4f} of the CPU's",
            round(flat.nbytes / seconds / 1e9, 2),
        ),
    ]


def check_average(name: str, device: torch.device, matrix: Tensor, *, repeats: int) -> Finding:
    """One replica's whole average, with what it owes, beside the CPU's."""
    compressor = build_compressor(name)
    expected = average(compressor, matrix)
    on_device = matrix.to(device)
    found = average(compressor, on_device).cpu()
    far = float((found - expected).norm() / expected.norm())
    seconds = median_seconds(lambda: average(compressor, on_device), device, repeats)
    exact = name in ("identity", "bf16", "fp16")
    detail = "the same bits" if exact and far == 0 else f"{far:.2g} apart"
    ok = far == 0 if exact else far <= MEANS_MAY_DIFFER
    return Finding(f"{name}: average", ok, detail, round(matrix.nbytes / seconds / 1e9, 2))


def average(compressor: Compressor, tensor: Tensor) -> Tensor:
    state = {key: value.to(tensor.device) for key, value in compressor.init(tensor.shape).items()}
    return drive_together([compressor.average(tensor, state)], [1.0])[0][0]


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """After two that do not count: the first compiles, the second fills caches."""
    times = []
    for number in range(repeats + 2):
        wait(device)
        began = time.perf_counter()
        work()
        wait(device)
        if number > 1:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_codes(device: torch.device, numel: int, *, repeats: int) -> list[Finding]:
    flat, matrix = numbers(numel), numbers(numel // 1024 * 1024).view(-1, 1024)
    found = []
    for name in COMPRESSORS:
        compressor = build_compressor(name)
        inner = compressor.inner if isinstance(compressor, Feedback) else compressor
        if isinstance(inner, Quantized):
            found += check_codec(name, inner.codec, flat, device, repeats=repeats)
        found.append(check_average(name, device, matrix, repeats=repeats))
    return found


def check_step(device: torch.device, hidden: int, layers: int) -> Finding:
    """Two steps and a round through the trainer's own loop."""
    with tempfile.TemporaryDirectory() as made:
        config = build_config(train_settings(made, device, hidden, layers))
        signals = Signals()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        run = build_run(
            config,
            LocalGroup(1).endpoints(),
            stopper=LocalStopper(signals),
            signals=signals,
            num_processes=1,
            quiet=True,
        )
        try:
            train(run)
        finally:
            run.close()
        lines = read_metrics(Path(config.output_dir) / "metrics.jsonl")
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    rounds = sum(line["event"] == "round" for line in lines)
    peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else math.nan
    ok = len(losses) == 4 and rounds == 2 and all(math.isfinite(loss) for loss in losses)
    return Finding("training, bf16", ok, f"losses {losses[0]:.3f} to {losses[-1]:.3f}, peak {peak:.0f} MiB")


def train_settings(folder: str, device: torch.device, hidden: int, layers: int) -> dict[str, Any]:
    return {
        "model": {
            "hidden_size": hidden,
            "num_layers": layers,
            "num_heads": hidden // 64,
            "intermediate_size": 4 * hidden,
        },
        "data": {"max_bytes": 300_000},
        "output_dir": f"{folder}/run",
        "engine": "local",
        "replicas": 1,
        "inner_steps": 2,
        "max_steps": 4,
        "sequence_length": 128,
        "batch_size": 4,
        "eval_sequences": 4,
        "device": device.type,
        "dtype": "bfloat16",
        "compressor": "int8",
    }


def check_group() -> Finding | None:
    """An all-reduce over NCCL between all GPUs, or None where there is one."""
    count = torch.cuda.device_count()
    if count < 2:
        return None
    with tempfile.TemporaryDirectory() as made:
        torch.multiprocessing.spawn(_reduce, args=(count, f"{made}/store"), nprocs=count)
    return Finding("group of an island, NCCL", True, f"all-reduce over {count} GPUs")


def _reduce(rank: int, count: int, path: str) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(path, count)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=count, timeout=timedelta(seconds=60))
    value = torch.full((1024,), float(rank), device="cuda")
    dist.all_reduce(value)
    assert value.eq(count * (count - 1) / 2).all(), f"rank {rank} got {value[0]}"
    dist.destroy_process_group()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--allow-none", action="store_true", help="exit with 0 where there is no GPU")
    parser.add_argument("--numel", type=int, default=1 << 26, help="values that are coded")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here")
        return 0 if options.allow_none else NO_GPU
    device = torch.device(options.device)
    found = [check_step(device, options.hidden, options.layers)]
    found += check_codes(device, options.numel, repeats=options.repeats)
    group = check_group() if device.type == "cuda" else None
    found += [group] if group else []
    return report(device, found)


def report(device: torch.device, found: list[Finding]) -> int:
    """Print the table and the line; the exit code."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    for line in found:
        speed = "" if line.gb_s is None else f"{line.gb_s:8.2f} GB/s"
        print(f"{'ok' if line.ok else 'FAILED':8}{line.what:28}{speed:15}{line.detail}")
    print(json.dumps({"device": name, "torch": torch.__version__, "findings": [asdict(line) for line in found]}))
    return 0 if all(line.ok for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
