"""How fast compressors are on one core, how much they send, and how long a round would take on a slow link.

    python benchmarks/compress.py [--rows 1024] [--columns 2048] [--repeats 9] [--parameters 1e9] [--mbit 100]

The first table times codes there and back (fp32 bytes in, a second, one thread), beside a plain copy of the same
tensor. The second times one replica's whole `average` with its default error feedback: adding what is owed, encoding,
the work of a slice's owner, decoding. The third predicts a round of --parameters in such matrices, sent at --mbit and
coded at the speed just measured, by number of replicas. Prints one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from atoll.comm.local import drive_together
from atoll.compress import COMPRESSORS, Compressor, Feedback, Quantized, bits_per_parameter, build_compressor
from atoll.exchange import Codec
from atoll.train.allocator import keep_freed_memory

REPLICAS = (2, 4, 8, 16, 64)


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    keep_freed_memory()
    matrix = torch.randn(arguments.rows, arguments.columns, generator=torch.Generator().manual_seed(0)) * 1e-3
    copy_s = _seconds(lambda: torch.empty_like(matrix).copy_(matrix), arguments.repeats)
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread, {matrix.numel():,} fp32"
    )
    print(f"plain copy {matrix.nbytes / copy_s / 1e9:.1f} GB/s\n")
    codes = _codes(matrix, copy_s, arguments.repeats)
    averages = _averages(matrix, arguments.repeats)
    predicted = _predicted(matrix, averages, arguments)
    print(json.dumps({"codes": codes, "average_gb_s": averages, "round_s": predicted}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=9, help="the median counts")
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--mbit", type=float, default=100.0, help="of a replica's link, Mbit/s")
    return parser.parse_args()


def _seconds(work: Callable[[], object], repeats: int) -> float:
    """Median over `repeats`, after one that does not count."""
    work()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def _codes(matrix: Tensor, copy_s: float, repeats: int) -> dict[str, float]:
    """GB/s there and back by name."""
    flat, speeds = matrix.view(-1), {}
    print(f"{'code':<8}{'encode':>8}{'decode':>8}{'both':>8}  GB/s{'':>4}copies{'':>4}relative error")
    for name, codec in _codecs().items():
        payload = codec.encode(flat)
        encode_s = _seconds(lambda codec=codec: codec.encode(flat), repeats)
        decode_s = _seconds(lambda codec=codec, payload=payload: codec.decode(payload, flat.numel()), repeats)
        error = (codec.decode(payload, flat.numel()) - flat).norm() / flat.norm()
        speed = [matrix.nbytes / s / 1e9 for s in (encode_s, decode_s, encode_s + decode_s)]
        copies = (encode_s + decode_s) / copy_s
        print(f"{name:<8}{speed[0]:8.2f}{speed[1]:8.2f}{speed[2]:8.2f}{copies:14.1f}{error:14.4f}")
        speeds[name] = round(speed[2], 3)
    return speeds


def _codecs() -> dict[str, Codec]:
    found = {name: _bare(build_compressor(name)) for name in COMPRESSORS}
    return {name: compressor.codec for name, compressor in found.items() if isinstance(compressor, Quantized)}


def _bare(compressor: Compressor) -> Compressor:
    return compressor.inner if isinstance(compressor, Feedback) else compressor


def _averages(matrix: Tensor, repeats: int) -> dict[str, float]:
    """GB/s of a whole average, by compressor."""
    speeds = {}
    print(f"\n{'compressor':<14}{'average, GB/s':>14}{'bits a parameter':>18}{'feedback':>10}")
    for name in COMPRESSORS:
        compressor = build_compressor(name)
        state = compressor.init(matrix.shape)

        def work(compressor: Compressor = compressor, state: dict[str, Tensor] = state) -> None:
            drive_together([compressor.average(matrix, state)], [1.0])

        speeds[name] = round(matrix.nbytes / _seconds(work, repeats) / 1e9, 3)
        bits = bits_per_parameter(compressor, matrix.shape)
        feedback = "on" if isinstance(compressor, Feedback) else ""
        print(f"{name:<14}{speeds[name]:14.2f}{bits:18.3f}{feedback:>10}")
    return speeds


def _predicted(matrix: Tensor, speeds: dict[str, float], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a round, by compressor and number of replicas."""
    times = {}
    print(f"\nseconds for {arguments.parameters:.3g} parameters at {arguments.mbit:g} Mbit/s")
    print(f"{'compressor':<14}" + "".join(f"{f'M={m}':>10}" for m in REPLICAS))
    for name in COMPRESSORS:
        compressor = build_compressor(name)
        copies = arguments.parameters / matrix.numel()
        sent = [compressor.sent_bytes(matrix.shape, num_replicas=m, replica=0) * copies for m in REPLICAS]
        coding_s = 4 * arguments.parameters / (speeds[name] * 1e9)
        times[name] = [round(size / (arguments.mbit / 8 * 1e6) + coding_s, 2) for size in sent]
        print(f"{name:<14}" + "".join(f"{seconds:10.1f}" for seconds in times[name]))
    return times


if __name__ == "__main__":
    main()
