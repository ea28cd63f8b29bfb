"""Is the simulator right, and how fast is it?

    python benchmarks/simulator.py            all tables, a few minutes on one core
    python benchmarks/simulator.py agreement  one of: agreement, models, churn, scale

agreement   rounds against the planner's closed form, where that is exact: no jitter, no faults, no latency
models      whole rounds against messages, with jitter, stragglers and churn
churn       goodput of 8 islands for 30 minutes with a fault every 30 and every 10 seconds
scale       real seconds for many islands and large models
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from atoll.algo.schedule import Schedule
from atoll.plan.estimate import Method, Workload, estimate
from atoll.plan.links import uniform
from atoll.plan.payload import Coding
from atoll.plan.presets import PRESETS
from atoll.plan.shapes import ModelShape, shape_of_count
from atoll.plan.sim.faults import Rates
from atoll.plan.sim.scenario import Scenario, Speeds
from atoll.plan.simulate import Simulation, simulate
from atoll.plan.units import format_bandwidth, format_count, format_seconds

MBIT = 125e3
SMALL = ModelShape("llama", 192, 5, 4, 512, 256)
OPT = PRESETS["dilocox_opt_1_3b"].shape
H = 125
SCHEDULES = {
    "blocking": Schedule(H),
    "delayed": Schedule(H, delay=H),
    "streaming": Schedule(H, 5, 5),
}


def scenario(
    schedule: Schedule, *, shape: ModelShape, islands: int, mbit: float, step_s: float, coding: str = "int4", **others
) -> Scenario:
    length = {} if "duration_s" in others else {"num_rounds": 20}
    workload = Workload(shape, step_s, 512 * islands)
    method = Method("method", schedule, Coding(coding))
    return Scenario(method, workload, uniform(islands, mbit * MBIT), **length, **others)


def agreement(console: Console) -> None:
    """The steady round of each schedule, in both models, against the closed form."""
    table = _table(
        "A steady round: closed form and simulation (1.3 B parameters, int4, H 125, 1.372 s a step)",
        *("schedule", "islands", "link", "closed form", "messages", "differs", "rounds", "differs"),
    )
    worst = 0.0
    for name, schedule in SCHEDULES.items():
        for islands in (2, 4, 8):
            for mbit in (10, 100, 1000):
                asked = scenario(schedule, shape=OPT, islands=islands, mbit=mbit, step_s=1.372)
                expected = estimate(asked.method, asked.workload, asked.network).round_s
                found = [simulate(asked, model=model).outcome.steady_round_s for model in ("messages", "rounds")]
                off = [abs(seconds / expected - 1) for seconds in found]
                worst = max(worst, *off)
                cells = [f"{found[0]:,.3f} s", f"{off[0]:.1e}", f"{found[1]:,.3f} s", f"{off[1]:.1e}"]
                table.add_row(name, str(islands), format_bandwidth(mbit * MBIT), f"{expected:,.3f} s", *cells)
    console.print(table)
    console.print(f"largest difference: {worst:.1e}\n")


def models(console: Console) -> None:
    """Whole rounds against messages."""
    table = _table(
        "Whole rounds against messages: 16 islands, 2.3 M parameters, 100 Mbit/s, 20 ms a step, half an hour",
        *("schedule", "what", "goodput: messages", "rounds", "tokens/s: messages", "rounds", "differs"),
    )
    cases = {
        "jitter 30 %": {"speeds": Speeds(0.3)},
        "1 at 10x, 1 at 3x": {"speeds": Speeds(0.1, slower=((0, 10.0), (1, 3.0)))},
        "kill each min, back after 30 s": {"rates": Rates(kill=1 / 60, repair_s=30)},
        "stop each min, for 20 s": {"rates": Rates(stop=1 / 60, stop_s=20)},
        "both": {"rates": Rates(kill=1 / 60, stop=1 / 60, repair_s=30, stop_s=20)},
    }
    for name, schedule in SCHEDULES.items():
        for what, others in cases.items():
            asked = scenario(schedule, shape=SMALL, islands=16, mbit=100, step_s=0.02, duration_s=1800.0, **others)
            messages, rounds = (simulate(asked, model=model) for model in ("messages", "rounds"))
            rates = [found.outcome.tokens_per_s for found in (messages, rounds)]
            table.add_row(
                *(name, what, f"{100 * messages.goodput:.1f} %", f"{100 * rounds.goodput:.1f} %"),
                *(f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"{100 * (rates[1] / rates[0] - 1):+.2f} %"),
            )
    console.print(table)
    console.print()


def churn(console: Console) -> None:
    """Kills and stops in turn, as the chaos runs have them."""
    table = _table(
        "Goodput under churn: 8 islands, 2.3 M parameters, 100 Mbit/s, 20 ms a step, 30 minutes, 3 seeds",
        *("schedule", "a fault every", "goodput", "without faults computes", "with them", "void", "tokens lost"),
    )
    for name, schedule in SCHEDULES.items():
        for every_s in (30, 10):
            rates = Rates(kill=0.5 / every_s, stop=0.5 / every_s, repair_s=5.0, stop_s=5.0)
            asked = scenario(schedule, shape=SMALL, islands=8, mbit=100, step_s=0.02, duration_s=1800.0, rates=rates)
            found = [simulate(replace(asked, seed=seed)) for seed in range(3)]
            table.add_row(name, f"{every_s} s", *_churn_cells(found))
    console.print(table)
    console.print()


def _churn_cells(found: list[Simulation]) -> list[str]:
    goodputs = [100 * each.goodput for each in found]
    lost = [100 * each.outcome.tokens_lost / each.outcome.tokens_trained for each in found]
    return [
        f"{min(goodputs):.1f} to {max(goodputs):.1f} %",
        f"{100 * found[0].fault_free.utilisation:.1f} %",
        f"{100 * found[0].outcome.utilisation:.1f} %",
        f"{sum(each.outcome.counts()['void'] for each in found)}",
        f"{max(lost):.2f} %",
    ]


def scale(console: Console) -> None:
    """What large simulations take here."""
    table = _table(
        "Real time (jitter 10 %, a kill every 10 minutes, back after 10 minutes; fault-free run included)",
        *("model", "islands", "schedule", "simulated", "rounds", "in", "seconds here"),
    )
    cases: list[tuple[ModelShape, int, str, float, float, float]] = [
        (SMALL, 4, "delayed", 0.02, 1, 100),
        (SMALL, 64, "blocking", 0.02, 1, 100),
        (OPT, 1000, "streaming", 1.372, 24, 1000),
        (shape_of_count(100e9, 108), 1000, "delayed", 4.9, 168, 1e5),
        (shape_of_count(100e9, 108), 10_000, "delayed", 4.9, 168, 1e5),
        (shape_of_count(100e9, 108), 10_000, "streaming", 4.9, 168, 1e5),
    ]
    for shape, islands, name, step_s, hours, mbit in cases:
        rates = Rates(kill=1 / 600, repair_s=600)
        asked = scenario(
            SCHEDULES[name],
            shape=shape,
            islands=islands,
            mbit=mbit,
            step_s=step_s,
            duration_s=hours * 3600.0,
            rates=rates,
            speeds=Speeds(0.1),
        )
        began = time.process_time()
        found = simulate(asked)
        table.add_row(
            *(format_count(shape.num_parameters), f"{islands:,}", name, format_seconds(hours * 3600)),
            *(f"{found.outcome.rounds:,.0f}", found.outcome.model, f"{time.process_time() - began:.1f}"),
        )
    console.print(table)
    console.print()


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("schedule", "what", "in") else "right")
    return table


TABLES: dict[str, Callable[[Console], None]] = {
    "agreement": agreement,
    "models": models,
    "churn": churn,
    "scale": scale,
}


def main(names: list[str]) -> None:
    console = Console(width=150, highlight=False)
    for name in names or list(TABLES):
        TABLES[name](console)


if __name__ == "__main__":
    main(sys.argv[1:])
