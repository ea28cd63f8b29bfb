"""Closed forms: how long a sync takes, how much of it is seen, what would hide it.

Symbols as in the papers: N parameters, M islands, H inner steps a round, T seconds of a step, U seconds to all-reduce
the model in full, κ = U/T, ρ how many times less a payload is than that, o further seconds of a sync, S = U/ρ + o.

    data parallel                  step T + U
    blocking (DiLoCo)              round H·T + S
    overlapped (one-round delay)   round max(H·T, S)

Nothing here knows a link matrix or a schedule; `estimate` does, and a test holds both equal where both apply.

>>> U = full_sync_s(1.3157e9, 125e6, num_islands=2)
>>> round(U, 1), round(32768 / (1.372 + U), 1), round(speedup(U / 1.372, compression=8, inner_steps=125), 1)
(42.1, 753.7, 31.7)
"""

from __future__ import annotations

import math

FP32_BYTES = 4


def ring_factor(num_islands: int) -> float:
    """Payloads each island sends to average with M−1 others, in a ring or by owners of slices: 2(M−1)/M.

    >>> ring_factor(1), ring_factor(2), ring_factor(4)
    (0.0, 1.0, 1.5)
    """
    return 2 * (num_islands - 1) / num_islands


def ring_latency_s(num_islands: int, latency_s: float) -> float:
    """Latencies of a ring, one after the other: 2(M−1)."""
    return 2 * (num_islands - 1) * latency_s


def gather_factor(num_islands: int) -> float:
    """Payloads each island sends where codes cannot be summed and everyone needs everyone's: M−1."""
    return float(num_islands - 1)


def gather_wins_below(gather_bits: float, ring_bits: float) -> float:
    """M below which gathering codes of `gather_bits` sends less than a ring of `ring_bits`: 2·ring/gather.

    >>> [gather_wins_below(bits, 8) for bits in (4, 2)]
    [4.0, 8.0]
    """
    return 2 * ring_bits / gather_bits


def full_sync_s(
    num_parameters: float, link_bytes_per_s: float, *, num_islands: int, bytes_a_value: float = FP32_BYTES
) -> float:
    """U: seconds to average every parameter once, in `bytes_a_value` bytes each."""
    return ring_factor(num_islands) * num_parameters * bytes_a_value / link_bytes_per_s


def sync_s(full_s: float, *, compression: float = 1.0, overhead_s: float = 0.0) -> float:
    """S = U/ρ + o."""
    return full_s / compression + overhead_s


def allreduce_step_s(step_s: float, full_s: float) -> float:
    """Seconds of a data-parallel step that overlaps nothing: T + U."""
    return step_s + full_s


def round_s(inner_steps: int, step_s: float, sync_s: float, *, overlapped: bool) -> float:
    """Seconds from one outer step to the next."""
    compute = inner_steps * step_s
    return max(compute, sync_s) if overlapped else compute + sync_s


def utilisation(compute_s: float, exposed_s: float) -> float:
    """Share of the time that is computed: compute / (compute + time waited).

    >>> [round(100 * utilisation(38 * 60, sync), 1) for sync in (103, 382, 469)]
    [95.7, 85.6, 82.9]
    """
    return compute_s / (compute_s + exposed_s)


def speedup(kappa: float, *, compression: float = 1.0, inner_steps: int, overlapped: bool = True) -> float:
    """Rate over that of data parallelism: (1+κ)/max(1, κ/ρH) overlapped, (1+κ)/(1 + κ/ρH) not."""
    share = kappa / (compression * inner_steps)
    return (1 + kappa) / (max(1.0, share) if overlapped else 1 + share)


def smallest_inner_steps(sync_s: float, step_s: float) -> int:
    """H from which a sync fits beside the inner steps: ceil(S/T).

    >>> [smallest_inner_steps(3424 / ratio, 8.79) for ratio in (1, 8, 16)]
    [390, 49, 25]
    """
    return max(1, math.ceil(sync_s / step_s - 1e-9))


def inner_steps_for(target: float, sync_s: float, step_s: float) -> int:
    """H from which a blocking sync leaves a utilisation of `target`: H·T/(H·T + S) ≥ target.

    >>> inner_steps_for(0.95, 428, 8.79)
    926
    """
    return max(1, math.ceil(sync_s * target / (1 - target) / step_s - 1e-9))


def hiding_bytes_per_s(sent_bytes: float, inner_steps: int, step_s: float, *, overhead_s: float = 0.0) -> float:
    """The smallest bandwidth at which a sync is over within H inner steps: the floor for any scheme.

    >>> [round(hiding_bytes_per_s(107e9 * 4 / ratio, 125, 8.79) * 8 / 1e6) for ratio in (1, 8, 16)]
    [3116, 390, 195]
    """
    room_s = inner_steps * step_s - overhead_s
    return sent_bytes / room_s if room_s > 0 else math.inf


def blocking_bytes_per_s(
    target: float, sent_bytes: float, inner_steps: int, step_s: float, *, overhead_s: float = 0.0
) -> float:
    """The smallest bandwidth at which a blocking sync leaves a utilisation of `target`."""
    room_s = inner_steps * step_s * (1 / target - 1) - overhead_s
    return sent_bytes / room_s if room_s > 0 else math.inf


def pipeline_efficiency(num_stages: int, num_microbatches: int) -> float:
    """Share of a pipelined step that is not bubble: m/(m+p−1). It belongs in the step time.

    >>> pipeline_efficiency(8, 32)
    0.8205128205128205
    """
    return num_microbatches / (num_microbatches + num_stages - 1)


def encoding_s(num_parameters: float, bytes_per_s: float) -> float:
    """Seconds to encode and decode N fp32 values at a rate of fp32 bytes a second; 0 where the rate is infinite."""
    return num_parameters * FP32_BYTES / bytes_per_s


# --- stalls of one round where layers are sent while others still compute (Streaming DiLoCo, arXiv 2501.18512)


def layered_stall_s(payload_s: float, step_s: float, num_layers: int) -> float:
    """Data parallel and DiLoCo: max(C/L, C − ⅔T(1−1/L)). payload_s: C, seconds to move the whole payload."""
    hidden = 2 / 3 * step_s * (1 - 1 / num_layers)
    return max(payload_s / num_layers, payload_s - hidden)


def streaming_stall_s(payload_s: float, step_s: float, *, fragments: int, delay: int, inner_steps: int) -> float:
    """Streaming: max(P·max(0, C/P − (τ+½)T), C − H·T)."""
    each = max(0.0, payload_s / fragments - (delay + 0.5) * step_s)
    return max(fragments * each, payload_s - inner_steps * step_s)
