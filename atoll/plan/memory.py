"""Bytes a worker holds, by state: does the model fit, and what must move to the host?

Every worker of an island holds its share of the model (stages of a pipeline times shards of a state), inner and outer
state alike: the dual optimizer of DiLoCoX (arXiv 2506.21263).

    bytes a parameter     fp32 training   bf16 mixed      may live on the host
    weights               4               2
    gradients             4               2
    master weights        –               4
    inner m, v            4 + 4           4 + 4
    anchor                4               4               yes
    outer momentum        4               4               yes
    in flight (delay)     4               4               yes
    residual (feedback)   4               4               yes
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.plan.shapes import ModelShape
from atoll.plan.units import format_bytes

INNER_FP32 = {"weights": 4, "gradients": 4, "inner m": 4, "inner v": 4}
INNER_BF16 = {"weights": 2, "gradients": 2, "master": 4, "inner m": 4, "inner v": 4}
# In the order in which they leave for the host: first what is touched least often.
OUTER = {"residual": 4, "in flight": 4, "outer momentum": 4, "anchor": 4}

ACTIVATION_BYTES = 34  # a token, layer and unit of width in 16 bits, attention not kept (arXiv 2205.05198, eq. 2)


@dataclass(frozen=True)
class Memory:
    """Bytes one worker holds. on_device, on_host: by state. activations: estimated, 0 if the tokens are not known.

    capacity: bytes of a device, or None if not given.
    """

    num_parameters: int
    workers: int
    on_device: dict[str, float]
    on_host: dict[str, float]
    activations: float = 0.0
    capacity: float | None = None

    @property
    def device_bytes(self) -> float:
        return sum(self.on_device.values()) + self.activations

    @property
    def host_bytes(self) -> float:
        return sum(self.on_host.values())

    @property
    def bytes_a_parameter(self) -> float:
        """Of state, over device and host, activations excepted."""
        held = sum(self.on_device.values()) + self.host_bytes
        return held * self.workers / self.num_parameters


def state_bytes(*, bf16: bool, in_flight: bool, residual: bool) -> dict[str, int]:
    """Bytes a parameter of each state.

    >>> sum(state_bytes(bf16=True, in_flight=True, residual=True).values())
    32
    >>> sum(state_bytes(bf16=False, in_flight=False, residual=False).values())
    24
    """
    absent = {"in flight": not in_flight, "residual": not residual}
    outer = {name: size for name, size in OUTER.items() if not absent.get(name)}
    return {**(INNER_BF16 if bf16 else INNER_FP32), **dict(reversed(outer.items()))}


def activation_bytes(shape: ModelShape, tokens: int, *, bf16: bool, stages: int = 1) -> float:
    """An estimate of what a forward pass of `tokens` keeps on one worker: 34 bytes a token, layer and unit of width in
    16 bits, twice that in fp32, with attention computed in pieces; and the logits with their gradient in fp32.
    """
    width = ACTIVATION_BYTES if bf16 else 2 * ACTIVATION_BYTES
    layers = -(-shape.num_layers // stages)
    return float(tokens * (width * shape.hidden_size * layers + 8 * shape.vocab_size))


def plan_memory(
    shape: ModelShape,
    *,
    workers: int = 1,
    capacity: float | None = None,
    bf16: bool = False,
    in_flight: bool = False,
    residual: bool = False,
    activations: float = 0.0,
) -> Memory:
    """What one of `workers` workers of an island holds, with as little on the host as lets the rest fit.

    Raises ConfigError where inner state and activations alone are more than `capacity`.
    """
    if workers < 1:
        raise ConfigError(f"devices={workers} is not positive; an island trains on one or more. Use 1.")
    each = state_bytes(bf16=bf16, in_flight=in_flight, residual=residual)
    held = {name: size * shape.num_parameters / workers for name, size in each.items()}
    on_host: dict[str, float] = {}
    for name in OUTER:
        if capacity is None or sum(held.values()) + activations <= capacity:
            break
        if name in held:
            on_host[name] = held.pop(name)
    if capacity is not None and sum(held.values()) + activations > capacity:
        raise _does_not_fit(shape, held, activations, workers=workers, capacity=capacity)
    return Memory(shape.num_parameters, workers, held, on_host, activations, capacity)


def _does_not_fit(
    shape: ModelShape, held: dict[str, float], activations: float, *, workers: int, capacity: float
) -> ConfigError:
    inner = sum(held.values()) * workers
    room = capacity - activations
    needed = sum(held.values()) + activations
    way_out = f"Use --devices {int(-(-inner // room))}" if room > 0 else "Take fewer tokens a forward pass"
    return ConfigError(
        f"inner state and activations need {format_bytes(needed)} a device, and --memory is {format_bytes(capacity)} "
        f"on {workers} device{'s' * (workers > 1)} an island, outer state already on the host.\n"
        f"{way_out} an island or more, or --memory {format_bytes(needed).replace(' ', '')}."
    )
