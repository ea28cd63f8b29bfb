"""A whole plan: every figure for one model, one network and one way of working, as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atoll.plan import cost, scaling
from atoll.plan.estimate import Estimate, Method, Workload, estimate
from atoll.plan.links import Network
from atoll.plan.memory import Memory, activation_bytes, plan_memory
from atoll.plan.payload import Coding, check_coding, compression
from atoll.plan.recommend import (
    INNER_STEPS_TRIED,
    Recommendation,
    candidate_methods,
    default_rank,
    headline_methods,
    recommend,
    settings_of,
)
from atoll.plan.shapes import ModelShape
from atoll.plan.units import format_bandwidth, format_bytes, format_seconds


@dataclass(frozen=True)
class Request:
    """What is asked. inner_steps: H of the methods shown. free_inner_steps: the recommendation may choose another.

    devices: of one island; state is spread over all of them. memory_bytes: of one device. micro_tokens: of one forward
    pass on a device, 0 if not known. tokens: to train on, 0 if not given. base: settings of `atoll train` to begin at.
    """

    workload: Workload
    network: Network
    inner_steps: int
    coding: Coding
    free_inner_steps: bool = False
    fragments: int = 0
    delay: int = 0
    devices: int = 1
    memory_bytes: float | None = None
    bf16: bool = False
    micro_tokens: int = 0
    tokens: float = 0.0
    base: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The answer. methods: by name, data parallelism first. memory: of the recommended method."""

    request: Request
    methods: dict[str, Estimate]
    recommendation: Recommendation
    memory: Memory
    diloco_law: scaling.Law
    data_parallel_law: scaling.Law
    warnings: tuple[str, ...]

    @property
    def shape(self) -> ModelShape:
        return self.request.workload.shape

    @property
    def settings(self) -> dict[str, Any]:
        """For `atoll train`: what runs the recommended method."""
        return settings_of(self.recommendation.best.method, self.request.network, dict(self.request.base))


def make_plan(request: Request) -> Plan:
    """Answer everything. Raises ConfigError for what cannot be: a compressor that is not there, a model too large."""
    workload, network = request.workload, request.network
    shown = headline_methods(
        workload,
        inner_steps=request.inner_steps,
        coding=request.coding,
        fragments=request.fragments,
        delay=request.delay,
    )
    methods = {name: estimate(method, workload, network) for name, method in shown.items()}
    recommendation = recommend(_candidates(request), workload, network)
    memory = _memory(request, recommendation)
    return Plan(
        request,
        methods,
        recommendation,
        memory,
        scaling.diloco_law(workload.shape.num_parameters, network.num_islands),
        scaling.data_parallel_law(workload.shape.num_parameters),
        tuple(_warnings(request, methods, memory)),
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values: seconds, bytes, bits a second, shares from 0 to 1."""
    request = plan.request
    return {
        "parameters": plan.shape.num_parameters,
        "model": {"family": plan.shape.family, "layers": plan.shape.num_layers, "hidden_size": plan.shape.hidden_size},
        "islands": request.network.num_islands,
        "link_bits_per_s": request.network.slowest_bytes_per_s * 8,
        "latency_s": request.network.longest_latency_s,
        "step_s": request.workload.step_s,
        "tokens_per_step": request.workload.tokens_per_step,
        "overhead_s": request.workload.overhead_s,
        "methods": {name: _method_json(found, plan) for name, found in plan.methods.items()},
        "recommendation": _recommendation_json(plan),
        "memory": _memory_json(plan.memory),
        "scaling": {
            "valid": scaling.VALID,
            "diloco": _law_json(plan.diloco_law),
            "data_parallel": _law_json(plan.data_parallel_law),
        },
        "warnings": list(plan.warnings),
    }


def _candidates(request: Request) -> list[Method]:
    steps = INNER_STEPS_TRIED if request.free_inner_steps else (request.inner_steps,)
    rank = request.coding.rank or default_rank(request.workload.shape.hidden_size)
    return candidate_methods(request.workload, inner_steps=steps, rank=rank, fragments=request.fragments)


def _memory(request: Request, recommendation: Recommendation) -> Memory:
    method = recommendation.best.method
    shape = request.workload.shape
    activations = activation_bytes(shape, request.micro_tokens, bf16=request.bf16) if request.micro_tokens else 0.0
    return plan_memory(
        shape,
        workers=request.devices,
        capacity=request.memory_bytes,
        bf16=request.bf16,
        in_flight=method.delay > 0,
        residual=method.coding.owes,
        activations=activations / request.devices,
    )


def _warnings(request: Request, methods: Mapping[str, Estimate], memory: Memory) -> list[str]:
    found = check_coding(request.coding, request.workload.shape)
    found += [_cannot_hide(estimate) for estimate in methods.values() if _waits_although_delayed(estimate)]
    if "streaming" not in methods:
        found.append(
            f"inner_steps={request.inner_steps} has no divisor to stream by; a fragment is sent every "
            f"inner_steps/fragments steps. Use inner_steps={_with_divisors(request.inner_steps)}."
        )
    if request.network.num_islands == 1:
        found.append("one island has nobody to agree with: nothing is sent. Use --islands 2 or more.")
    if memory.on_host:
        moved = " and ".join(memory.on_host)
        found.append(
            f"does not fit beside the rest on {format_bytes(memory.capacity or 0)}: {moved} must live on the host, "
            f"{format_bytes(memory.host_bytes)} a device"
        )
    laws = scaling.outside(request.workload.shape.num_parameters, request.network.num_islands, request.inner_steps)
    if laws:
        found.append(f"the scaling laws are extrapolated: {'; '.join(laws)}. They hold for {scaling.VALID}")
    return found


def _waits_although_delayed(estimate: Estimate) -> bool:
    return estimate.method.delay > 0 and estimate.exposed_s > 0.01 * estimate.compute_s + estimate.workload.landing_s


def _cannot_hide(estimate: Estimate) -> str:
    """Names the smallest H or delay that would hide the sync, and the link that would."""
    method, step_s = estimate.method, estimate.workload.step_s
    enough = estimate.bandwidths[0.99]
    link = f", or a link of {format_bandwidth(enough)}" if enough else ""
    if method.kind == "delayed":
        return (
            f"{method.name}: inner_steps={method.inner_steps} take {format_seconds(estimate.compute_s)}, too few to "
            f"hide a sync of {format_seconds(estimate.sync_s)}. Use --inner-steps {estimate.inner_steps_to_hide}{link}."
        )
    longest_s = max(estimate.fragment_s)
    delay = math.ceil(longest_s / step_s)
    way_out = (
        f"--delay {delay}"
        if delay <= method.inner_steps / method.num_fragments
        else (f"--inner-steps {estimate.inner_steps_to_hide}")
    )
    return (
        f"{method.name}: a delay of {method.delay} step{'s' * (method.delay > 1)} cannot hide the "
        f"{format_seconds(longest_s)} of a fragment. "
        f"Use {way_out}{link}."
    )


def _with_divisors(inner_steps: int) -> int:
    """The nearest larger H that ten divides."""
    return math.ceil(inner_steps / 10) * 10


# --- as plain values


def _method_json(found: Estimate, plan: Plan) -> dict[str, Any]:
    method, tokens = found.method, plan.request.tokens
    values = {
        "tokens_per_s": found.tokens_per_s,
        "sync_s": found.sync_s,
        "utilisation": found.utilisation,
        "exposed_s": found.exposed_s,
        "round_s": found.round_s,
        "payload_bytes": found.payload_bytes,
        "compression": _finite(compression(found.payload_bytes, plan.shape, found.network.num_islands)),
        "speedup": found.tokens_per_s / plan.methods["allreduce"].tokens_per_s,
        "schedule": method.kind,
        "compressor": method.coding.name,
        "inner_steps": method.inner_steps,
        "fragments": method.num_fragments,
        "delay": method.delay,
        "inner_steps_to_hide": found.inner_steps_to_hide,
        "delay_to_hide": found.delay_to_hide,
        "bandwidth_bits_per_s": {
            f"{100 * target:g}": None if speed is None else speed * 8 for target, speed in found.bandwidths.items()
        },
    }
    if method.kind == "blocking":
        values["inner_steps_for_95"] = cost.inner_steps_for(0.95, found.sync_s, found.workload.step_s)
    if tokens:
        values["wall_s"] = tokens / found.tokens_per_s
    return values


def _recommendation_json(plan: Plan) -> dict[str, Any]:
    best = plan.recommendation.best
    return {
        "method": best.method.name,
        "description": best.method.describe(),
        "why": plan.recommendation.why,
        "tokens_per_s": best.estimate.tokens_per_s,
        "utilisation": best.estimate.utilisation,
        "assumed_loss_cost": best.loss_cost,
        "beat": [
            {"method": rival.method.name, "description": rival.method.describe(), "why": why}
            for rival, why in plan.recommendation.beaten
        ],
        "settings": plan.settings,
    }


def _memory_json(memory: Memory) -> dict[str, Any]:
    return {
        "workers": memory.workers,
        "bytes_a_parameter": memory.bytes_a_parameter,
        "on_device": memory.on_device,
        "on_host": memory.on_host,
        "activations_estimated": memory.activations,
        "device_bytes": memory.device_bytes,
        "device_capacity": memory.capacity,
    }


def _law_json(law: scaling.Law) -> dict[str, Any]:
    values: dict[str, Any] = {"loss": law.loss, "inner_lr": law.inner_lr, "batch_tokens": law.batch_tokens}
    if law.outer_lr is not None:
        values |= {"outer_lr": law.outer_lr, "better_loss": law.better_loss}
    return values


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
