"""A simulation in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from atoll.plan.sim.outcome import rate_over_time
from atoll.plan.sim.tracks import COMPUTE, DOWN, FETCH, FROZEN, LAND, PRESENT, WAIT
from atoll.plan.simulate import Simulation
from atoll.plan.units import format_bytes, format_count, format_rate, format_seconds

NAMES = {
    COMPUTE: "compute",
    WAIT: "wait for a round",
    LAND: "outer step",
    FETCH: "fetch the state",
    FROZEN: "frozen",
    DOWN: "away",
}
BARS = " ▁▂▃▄▅▆▇█"
BINS = 72


def print_simulation(found: Simulation, console: Console) -> None:
    """Everything, from what was simulated to the warnings."""
    console.print(Text(headline(found), style="bold"))
    console.print()
    console.print(results_table(found))
    console.print()
    console.print(seconds_table(found))
    console.print()
    for line in (happened_line(found), rate_line(found)):
        if line:
            console.print(Text(line))
    if found.outcome.ended:
        console.print(Text(f"the run ended: {found.outcome.ended}", style="yellow"))
    for warning in found.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))


def headline(found: Simulation) -> str:
    """What was simulated, in one line."""
    scenario = found.scenario
    parts = [
        f"{format_count(scenario.workload.shape.num_parameters)} parameters",
        scenario.network.describe(),
        scenario.method.describe(),
        f"{format_seconds(scenario.workload.step_s)} a step",
        f"{format_seconds(found.outcome.simulated_s)} simulated in {found.outcome.model}",
        f"seed {scenario.seed}",
    ]
    return " | ".join(parts)


def results_table(found: Simulation) -> Table:
    """With the faults, without them, and by the closed form."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("")
    for name in ("rounds", "a round", "waits a round", "computes", "tokens/s", "goodput"):
        table.add_column(name, justify="right")
    for name, outcome in (("as asked", found.outcome), ("without faults", found.fault_free)):
        if name == "without faults" and outcome is found.outcome:
            continue
        share = outcome.tokens_per_s / found.fault_free.tokens_per_s if found.fault_free.tokens_per_s else 0.0
        table.add_row(
            name,
            f"{outcome.rounds:,.5g}",
            format_seconds(outcome.round_s),
            format_seconds(outcome.exposed_s),
            f"{100 * outcome.utilisation:.1f} %",
            format_rate(outcome.tokens_per_s),
            f"{100 * share:.1f} %",
        )
    closed = found.estimate
    table.add_row(
        *("closed form", "", format_seconds(closed.round_s), format_seconds(closed.exposed_s)),
        *(f"{100 * closed.utilisation:.1f} %", format_rate(closed.tokens_per_s), ""),
    )
    return table


def seconds_table(found: Simulation) -> Table:
    """What islands did with their time, and what they sent."""
    outcome = found.outcome
    total = sum(outcome.seconds.get(kind, 0.0) for kind in (*PRESENT, DOWN)) or 1.0
    table = Table(box=None, header_style="bold", pad_edge=False)
    shown = [kind for kind in NAMES if outcome.seconds.get(kind, 0.0) > 0]
    for kind in shown:
        table.add_column(NAMES[kind], justify="right")
    for name in ("payload an island", "a round", "states sent", "tokens lost"):
        table.add_column(name, justify="right")
    lost = outcome.tokens_lost / outcome.tokens_trained if outcome.tokens_trained else 0.0
    table.add_row(
        *(f"{100 * outcome.seconds[kind] / total:.2f} %" for kind in shown),
        format_bytes(outcome.bytes_per_island),
        format_bytes(outcome.bytes_per_island / outcome.rounds if outcome.rounds else 0.0),
        format_bytes(outcome.state_bytes),
        f"{100 * lost:.2f} %",
    )
    return table


def happened_line(found: Simulation) -> str:
    """How often what happened."""
    counts = found.outcome.counts()
    words = {"kill": "killed", "stop": "stopped", "leave": "left", "join": "joined", "slow": "slowed"}
    parts = [f"{counts[what]} {word}" for what, word in words.items() if counts[what]]
    parts += [f"{counts['void']} averagings void"] if counts["void"] else []
    parts += [f"{counts['spared']} faults left out: nobody else held the state"] if counts["spared"] else []
    return f"islands: {', '.join(parts)}" if parts else ""


def rate_line(found: Simulation) -> str:
    """Committed tokens a second over time, as a row of bars; full is the rate without faults."""
    outcome = found.outcome
    bins = min(BINS, len(outcome.commits) // 2)
    if bins < 8 or not found.fault_free.tokens_per_s:
        return ""
    shares = [
        rate / found.fault_free.tokens_per_s for rate in rate_over_time(outcome.commits, outcome.simulated_s, bins)
    ]
    bars = "".join(BARS[min(len(BARS) - 1, round(share * (len(BARS) - 1)))] for share in shares)
    return f"committed tokens over time, full = without faults: {bars}"
