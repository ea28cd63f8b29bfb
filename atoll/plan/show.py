"""A plan in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from atoll.plan import scaling
from atoll.plan.estimate import TARGETS, Estimate
from atoll.plan.memory import Memory
from atoll.plan.plan import Plan
from atoll.plan.streaming_table import METHODS, MODELS, Cell
from atoll.plan.streaming_table import TARGETS as TABLE_TARGETS
from atoll.plan.units import format_bandwidth, format_bytes, format_count, format_rate, format_seconds


def print_plan(plan: Plan, console: Console) -> None:
    """Everything, from the question to the recommendation."""
    console.print(Text(headline(plan), style="bold"))
    console.print()
    console.print(methods_table(plan))
    console.print()
    console.print(bandwidth_table(list(plan.methods.values())))
    console.print()
    for line in (memory_line(plan.memory), *law_lines(plan)):
        console.print(Text(line))
    console.print()
    console.print(recommendation(plan))
    for warning in plan.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))


def headline(plan: Plan) -> str:
    """What was asked, in one line."""
    request, shape = plan.request, plan.shape
    parts = [
        f"{format_count(shape.num_parameters)} parameters ({shape.family}, {shape.num_layers} layers)",
        request.network.describe(),
        f"{format_seconds(request.workload.step_s)} a step of {request.workload.tokens_per_step:,.0f} tokens",
        f"H {request.inner_steps}",
    ]
    return " | ".join(parts)


def methods_table(plan: Plan) -> Table:
    """A row a method."""
    table = _table("method", "sends", "bytes a round", "sync", "waits a round", "computes", "tokens/s", "speed-up")
    tokens = plan.request.tokens
    if tokens:
        table.add_column(f"{format_count(tokens)} tokens", justify="right")
    slowest = plan.methods["allreduce"].tokens_per_s
    for name, found in plan.methods.items():
        cells = [
            name,
            found.method.coding.describe(),
            format_bytes(found.payload_bytes),
            format_seconds(found.sync_s),
            format_seconds(found.exposed_s),
            f"{100 * found.utilisation:.1f} %",
            format_rate(found.tokens_per_s),
            f"{found.tokens_per_s / slowest:,.1f}x",
        ]
        table.add_row(*cells, *([format_seconds(tokens / found.tokens_per_s)] if tokens else []))
    return table


def bandwidth_table(estimates: Sequence[Estimate]) -> Table:
    """The smallest bandwidth for each share of time computed, and the H from which a sync fits beside the steps."""
    headers = [f"≥ {100 * target:g} %" for target in TARGETS]
    table = _table("link needed to compute", *headers, "H that covers a sync here")
    for found in estimates:
        speeds = [found.bandwidths[target] for target in TARGETS]
        cells = [_speed_text(speed) for speed in speeds]
        table.add_row(found.method.name, *cells, f"{found.inner_steps_to_hide:,}")
    return table


def _speed_text(speed: float | None) -> str:
    if speed is None:
        return "no link"
    return format_bandwidth(speed) if speed else "any"


def memory_line(memory: Memory) -> str:
    """Bytes a device by state."""
    devices = f"device (of {memory.workers} an island)" if memory.workers > 1 else "device"
    states = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.on_device.items())
    activations = f", activations about {format_bytes(memory.activations)} (estimated)" if memory.activations else ""
    host = "; ".join(f"{name} {format_bytes(size)} on the host" for name, size in memory.on_host.items())
    return (
        f"memory a {devices}: {format_bytes(memory.device_bytes)} = {states}{activations}"
        f"{'; ' + host if host else ''} ({memory.bytes_a_parameter:.0f} bytes a parameter of state)"
    )


def law_lines(plan: Plan) -> list[str]:
    """Loss and settings by the scaling laws."""
    law, parallel = plan.diloco_law, plan.data_parallel_law
    tokens = scaling.TOKENS_A_PARAMETER * law.num_parameters
    return [
        f"scaling law, {format_count(tokens)} tokens: loss {law.loss:.3f} with DiLoCo (a better fit: "
        f"{law.better_loss:.3f}), {parallel.loss:.3f} data parallel",
        f"  best rates: inner {law.inner_lr:.2g}, outer {law.outer_lr:g}; batch {format_count(law.batch_tokens)} "
        f"tokens a step (data parallel: {parallel.inner_lr:.2g}, {format_count(parallel.batch_tokens)})",
    ]


def recommendation(plan: Plan) -> RenderableType:
    """What to take, why, and what it beat."""
    best = plan.recommendation.best
    first = Text.assemble(("recommended: ", "bold green"), (best.method.describe(), "bold"))
    why = Text(f"  {format_rate(best.estimate.tokens_per_s)} tokens/s; {plan.recommendation.why}")
    beaten = [Text(f"  rather than {rival.method.describe()}: {why}") for rival, why in plan.recommendation.beaten]
    return Group(first, why, *beaten)


def streaming_tables(cells: Sequence[Cell]) -> list[RenderableType]:
    """The paper's table beside the simulation and the closed form; what differs is marked."""
    tables: list[RenderableType] = []
    for model in MODELS:
        table = Table(title=f"{model.name}: Gbit/s, paper | simulation | closed form", title_justify="left", box=None)
        table.add_column("method")
        for target in TABLE_TARGETS:
            table.add_column(f"{100 * target:g} %", justify="right")
        for method in METHODS:
            row = [cell for cell in cells if (cell.method, cell.model) == (method.name, model.name)]
            table.add_row(method.name, *(_cell_text(cell) for cell in row))
        tables.append(table)
    exact = sum(cell.off_by == 0 for cell in cells)
    worst = max(abs(cell.off_by) for cell in cells)
    tables.append(
        Text(f"{exact} of {len(cells)} cells equal; the others (*) by {worst} step of the paper's grid at most")
    )
    return tables


def _cell_text(cell: Cell) -> Text:
    mark = "*" if cell.off_by else " "
    style = "yellow" if cell.off_by else ""
    return Text(f"{cell.paper:.1f} | {cell.simulated:.1f} | {cell.closed_form:.1f}{mark}", style=style)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
