"""The table of Streaming DiLoCo (arXiv 2501.18512) computed again: bandwidth for a compute utilisation.

A step is a chain of layers: forward, then backward from the last to the first, gradient of the layer's input before
that of its weights. Each of the three takes T/3L; the first layer's input needs no gradient. A layer that syncs in step
t is handed to the link, which sends one after the other, when its weights' gradient is there, and must have landed
before its forward of step t+1+τ.

    forward  0 1 2 3 | backward 3 3 2 2 1 1 0 | forward 0 ...
    link                          3───2───1───0────┤ layer 0 must be there

The paper's numbers lie on a grid of 50 bandwidths from 0.1 to 1,000 Gbit/s, and seem to be the last grid point *below*
the target. The planner gives users the first bandwidth that reaches it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.plan.clock import FifoLink
from atoll.plan.cost import layered_stall_s, streaming_stall_s, utilisation

Floats = NDArray[np.float64]

GRID_GBIT_PER_S: Floats = np.logspace(-1, 3, 50)
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
INNER_STEPS, LAYERS_A_FRAGMENT = 100, 3
WARM_UP_ROUNDS, WARM_UP_STEPS = 2, 60


@dataclass(frozen=True)
class Model:
    """A column of the table. step_s: T."""

    name: str
    num_parameters: float
    num_layers: int
    step_s: float


@dataclass(frozen=True)
class Method:
    """A row. fragments: whether layers sync in P = L/3 strided fragments or all at once. delay: τ."""

    name: str
    bits: int
    inner_steps: int = INNER_STEPS
    fragments: bool = False
    delay: int = 0

    def num_fragments(self, model: Model) -> int:
        return model.num_layers // LAYERS_A_FRAGMENT if self.fragments else 1


MODELS = (Model("1B", 1e9, 24, 0.1), Model("10B", 1e10, 48, 0.8), Model("100B", 1e11, 108, 4.9))
METHODS = (
    Method("data parallel", 16, inner_steps=1),
    Method("diloco", 16),
    Method("streaming", 16, fragments=True),
    Method("+ overlap", 16, fragments=True, delay=1),
    Method("+ overlap + fp4", 4, fragments=True, delay=1),
)

# Gbit/s for each of TARGETS, by method and model, as the paper prints them.
PAPER: Mapping[tuple[str, str], tuple[float, ...]] = {
    ("data parallel", "1B"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("data parallel", "10B"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("data parallel", "100B"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("diloco", "1B"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("diloco", "10B"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("diloco", "100B"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("streaming", "1B"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("streaming", "10B"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("streaming", "100B"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("+ overlap", "1B"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("+ overlap", "10B"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("+ overlap", "100B"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("+ overlap + fp4", "1B"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("+ overlap + fp4", "10B"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("+ overlap + fp4", "100B"): (0.5, 0.9, 1.1, 1.1, 1.4),
}


@dataclass(frozen=True)
class Cell:
    """One number of the table, Gbit/s. simulated, closed_form: in the paper's convention. reaching: see the module.

    off_by: grid steps between the simulation and the paper's number.
    """

    method: str
    model: str
    target: float
    paper: float
    simulated: float
    closed_form: float
    reaching: float
    off_by: int


def table() -> list[Cell]:
    """All 75 cells, row by row."""
    return [cell for method in METHODS for model in MODELS for cell in _cells(method, model)]


def simulated_utilisation(method: Method, model: Model, gbit_per_s: Floats) -> Floats:
    """Compute utilisation in the steady state on each of the links, by the simulation of the module."""
    operation_s = model.step_s / (3 * model.num_layers)
    layer_s = method.bits * model.num_parameters / model.num_layers / (gbit_per_s * 1e9)
    warm_up = WARM_UP_ROUNDS * method.inner_steps if method.inner_steps > 1 else WARM_UP_STEPS
    now, link = np.zeros_like(gbit_per_s), FifoLink(np.zeros_like(gbit_per_s))
    due: dict[int, dict[int, Floats]] = {}  # step -> layer -> when it is there
    start = now
    for step in range(1, warm_up + method.inner_steps + 1):
        now = _forward(now, due.pop(step, {}), model.num_layers, operation_s)
        sent = _layers_sent(method, model, (step - 1) % method.inner_steps + 1)
        now, link, arrivals = _backward(now, link, sent, model.num_layers, operation_s, layer_s)
        due[step + 1 + method.delay] = arrivals
        start = now if step == warm_up else start
    ideal_s = method.inner_steps * operation_s * (3 * model.num_layers - 1)
    return np.asarray(ideal_s / (now - start))


def closed_form_utilisation(method: Method, model: Model, gbit_per_s: Floats) -> Floats:
    """The same by the closed forms of `cost`."""
    compute_s = method.inner_steps * model.step_s
    payloads = [method.bits * model.num_parameters / (speed * 1e9) for speed in gbit_per_s]
    return np.array([utilisation(compute_s, _stall_s(method, model, payload_s)) for payload_s in payloads])


def last_below(values: Floats, target: float) -> int:
    """Index of the last grid point before `values` first reach `target`.

    >>> last_below(np.array([0.2, 0.6, 0.9]), 0.8)
    1
    """
    return int(np.argmax(values >= target)) - 1


def as_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The cells as plain objects, for JSON."""
    return [vars(cell) for cell in cells]


def _cells(method: Method, model: Model) -> list[Cell]:
    simulated = simulated_utilisation(method, model, GRID_GBIT_PER_S)
    closed_form = closed_form_utilisation(method, model, GRID_GBIT_PER_S)
    cells = []
    for target, paper in zip(TARGETS, PAPER[method.name, model.name], strict=True):
        below = last_below(simulated, target)
        printed = int(np.abs(GRID_GBIT_PER_S - paper).argmin())
        cell = Cell(
            *(method.name, model.name, target, paper),
            simulated=float(GRID_GBIT_PER_S[below]),
            closed_form=float(GRID_GBIT_PER_S[last_below(closed_form, target)]),
            reaching=float(GRID_GBIT_PER_S[below + 1]),
            off_by=below - printed,
        )
        cells.append(cell)
    return cells


def _layers_sent(method: Method, model: Model, step: int) -> range:
    """Layers that sync in step 1..H of a round: fragment p, every P-th layer from p, after (p+1)·floor(H/(P+1))."""
    fragments = method.num_fragments(model)
    if fragments == 1:
        return range(model.num_layers) if step == method.inner_steps else range(0)
    number, rest = divmod(step, method.inner_steps // (fragments + 1))
    due = not rest and 1 <= number <= fragments
    return range(number - 1, model.num_layers, fragments) if due else range(0)


def _forward(now: Floats, arrivals: Mapping[int, Floats], num_layers: int, operation_s: float) -> Floats:
    """When all layers have run forward, each once it has landed."""
    done = 0
    for layer in sorted(arrivals):
        now = np.maximum(now + (layer - done) * operation_s, arrivals[layer])
        done = layer
    return now + (num_layers - done) * operation_s


def _backward(
    now: Floats, link: FifoLink, sent: range, num_layers: int, operation_s: float, layer_s: Floats
) -> tuple[Floats, FifoLink, dict[int, Floats]]:
    """When all layers have run backward, the link with what it was handed, and when each layer will be there."""
    arrivals = {}
    for layer in reversed(sent):
        operations = 2 * (num_layers - layer) - (layer == 0)
        link = link.send(now + operations * operation_s, layer_s)
        arrivals[layer] = link.free_s
    return now + (2 * num_layers - 1) * operation_s, link, arrivals


def _stall_s(method: Method, model: Model, payload_s: float) -> float:
    if not method.fragments:
        return layered_stall_s(payload_s, model.step_s, model.num_layers)
    fragments = method.num_fragments(model)
    return streaming_stall_s(
        payload_s, model.step_s, fragments=fragments, delay=method.delay, inner_steps=method.inner_steps
    )
