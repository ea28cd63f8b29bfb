"""Is the planner right? Its closed forms and simulations against figures that others have published.

    python benchmarks/plan_evidence.py

Every row prints what we compute, what was published or follows by hand, and the difference; a star where that is more
than half a per cent. Nothing is fitted but the two step times, which are those of DiLoCoX's own rates: "sets T".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from atoll.plan import cost, scaling
from atoll.plan.show import streaming_tables
from atoll.plan.streaming_table import table as streaming_table

GBIT_BYTES_PER_S = 125e6
TOKENS, INNER_STEPS = 32_768, 125
MODELS = {"OPT-1.3B": (1.3157e9, 1.372), "107B": (107e9, 8.79)}  # parameters, seconds a step (both inferred)


@dataclass(frozen=True)
class Row:
    """One figure. published: what a paper states, or what follows by hand from its set-up. source: which of the two."""

    what: str
    computed: float
    published: float
    source: str

    @property
    def difference(self) -> float:
        """Relative."""
        return self.computed / self.published - 1


def dilocox_rows() -> list[Row]:
    """DiLoCoX (arXiv 2506.21263): two islands, 1 Gbit/s, 32,768 tokens a step, H 125."""
    expected = {"OPT-1.3B": (42.1, 30.7, 753.6, 31.7), "107B": (3424, 389.5, 9.55, 390)}
    rows = []
    for name, (num_parameters, step_s) in MODELS.items():
        full_s = cost.full_sync_s(num_parameters, GBIT_BYTES_PER_S, num_islands=2)
        kappa = full_s / step_s
        values = (
            full_s,
            kappa,
            TOKENS / cost.allreduce_step_s(step_s, full_s),
            cost.speedup(kappa, compression=8, inner_steps=INNER_STEPS),
        )
        names = ("U, seconds", "κ", "AllReduce, tokens/s", "speed-up, int4 and delay")
        rows += [
            Row(f"{name}: {what}", value, by_hand, "by hand")
            for what, value, by_hand in zip(names, values, expected[name], strict=True)
        ]
    return rows + _hiding_rows()


def _hiding_rows() -> list[Row]:
    """What hides the sync of the 107B model: H for each compression, bandwidth at H 125."""
    num_parameters, step_s = MODELS["107B"]
    full_s = cost.full_sync_s(num_parameters, GBIT_BYTES_PER_S, num_islands=2)
    without = INNER_STEPS * TOKENS / cost.round_s(INNER_STEPS, step_s, full_s, overlapped=True)
    rows = [Row("107B: without compression, tokens/s", without, 1196, "by hand")]
    for name, compression, steps, mbit in (("fp32", 1, 390, 3116), ("int4", 8, 49, 389), ("int4 + 2x", 16, 25, 195)):
        hides = cost.smallest_inner_steps(cost.sync_s(full_s, compression=compression), step_s)
        speed = cost.hiding_bytes_per_s(num_parameters * 4 / compression, INNER_STEPS, step_s)
        rows.append(Row(f"107B: H that hides {name}", hides, steps, "by hand"))
        rows.append(Row(f"107B: Mbit/s that hide {name} at H 125", speed * 8 / 1e6, mbit, "by hand"))
    return rows


def reported_rows() -> list[Row]:
    """What DiLoCoX itself reports; "unchecked" marks figures we know at second hand."""
    small_n, small_s = MODELS["OPT-1.3B"]
    large_n, large_s = MODELS["107B"]
    small, large = (cost.full_sync_s(n, GBIT_BYTES_PER_S, num_islands=2) for n in (small_n, large_n))
    blocking = INNER_STEPS * TOKENS / cost.round_s(INNER_STEPS, large_s, large / 16, overlapped=False)
    without = INNER_STEPS * TOKENS / cost.round_s(INNER_STEPS, large_s, large, overlapped=True)
    return [
        Row(
            "107B: speed-up over AllReduce", cost.speedup(large / large_s, inner_steps=125, compression=16), 357, "read"
        ),
        Row("107B: tokens/s", TOKENS / large_s, 3728, "unchecked; sets T"),
        Row("107B: AllReduce tokens/s", TOKENS / (large_s + large), 10.4, "unchecked"),
        Row("107B: without overlap, tokens/s (int4 + 2x)", blocking, 2197, "unchecked"),
        Row("107B: without compression, tokens/s", without, 1168, "unchecked"),
        Row("OPT-1.3B: tokens/s", TOKENS / small_s, 23880, "unchecked; sets T"),
        Row("OPT-1.3B: AllReduce tokens/s", TOKENS / (small_s + small), 745, "unchecked"),
    ]


def utilisation_rows() -> list[Row]:
    """INTELLECT-1 (arXiv 2412.01152) from its own times; OpenDiLoCo (arXiv 2407.07852) from its link rates."""
    rows = [
        Row(f"INTELLECT-1, {where}: computes, %", 100 * cost.utilisation(38 * 60, sync_s), percent, "read")
        for where, sync_s, percent in (("USA", 103, 95.7), ("+ Europe", 382, 85.6), ("global", 469, 83.0))
    ]
    round_s = 67.5 * 60
    sent_bits = 1.1e9 * 16 * cost.ring_factor(4)
    for mbit in (127, 935):
        share = 100 * cost.utilisation(round_s, sent_bits / (mbit * 1e6))
        rows.append(Row(f"OpenDiLoCo, {mbit} Mbit/s, fp16 ring of 4: computes, %", share, 95, "claim: 90 to 95"))
    slowest = "OpenDiLoCo, Mbit/s that its 300 s of sync come to; slowest link"
    rows.append(Row(slowest, sent_bits / 300 / 1e6, 127, "unchecked"))
    rows.append(
        Row("OpenDiLoCo, with those 300 s: computes, %", 100 * cost.utilisation(round_s, 300), 95, "claim: 90 to 95")
    )
    return rows


def gather_rows() -> list[Row]:
    """Islands below which gathering codes sends less than an int8 ring."""
    names = (("fp4", 4, 4), ("2-bit", 2, 8), ("64 of 4,096 in 2 bits", 0.21875, 73))
    return [
        Row(f"gather of {name} beats an int8 ring below M =", cost.gather_wins_below(bits, 8), islands, "by hand")
        for name, bits, islands in names
    ]


def print_rows(title: str, rows: Iterable[Row], console: Console) -> None:
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for name in ("figure", "computed", "published", "difference", "source"):
        table.add_column(name, justify="left" if name in ("figure", "source") else "right")
    for row in rows:
        mark = "" if abs(row.difference) <= 0.005 else " *"
        table.add_row(
            row.what,
            f"{row.computed:,.4g}",
            f"{row.published:,.4g}",
            f"{100 * row.difference:+.2f} %{mark}",
            row.source,
        )
    console.print(table)
    console.print()


def print_scaling(sizes: Sequence[float], console: Console) -> None:
    """The fits at the sizes of their paper (arXiv 2503.09799); beyond 10 B they are extrapolations."""
    table = Table(title=f"scaling laws ({scaling.VALID})", title_justify="left", box=None, pad_edge=False)
    headers = ("parameters", "loss, data parallel", "M = 1", "2", "4", "8", "better fit, M = 2")
    for name in (*headers, "inner rate, M = 2", "batch, M = 2", "outer rate, M = 2"):
        table.add_column(name, justify="right")
    for size in sizes:
        law = scaling.diloco_law(size, 2)
        losses = [scaling.data_parallel_loss(size), *(scaling.diloco_loss(size, islands) for islands in (1, 2, 4, 8))]
        cells = [f"{loss:.3f}" for loss in (*losses, scaling.better_loss(size, 2))]
        table.add_row(
            f"{size / 1e9:g} B", *cells, f"{law.inner_lr:.2e}", f"{law.batch_tokens / 1e3:,.0f} k", f"{law.outer_lr:g}"
        )
    console.print(table)
    console.print()


def main() -> None:
    console = Console(width=150, highlight=False)
    print_rows("DiLoCoX, closed forms (tolerance 0.5 %)", dilocox_rows(), console)
    print_rows(
        "DiLoCoX, as reported, against the same closed forms (* differs by more than 0.5 %)", reported_rows(), console
    )
    print_rows("Compute utilisation", utilisation_rows(), console)
    print_rows("Gather or ring", gather_rows(), console)
    print_scaling([35e6, 180e6, 550e6, 1.3e9, 2.4e9, 4e9, 10e9], console)
    for part in streaming_tables(streaming_table()):
        console.print(part)
        console.print()


if __name__ == "__main__":
    main()
