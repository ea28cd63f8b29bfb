"""report.md of one run, or of several runs side by side, with its plots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from atoll.errors import StorageError
from atoll.train.console import format_bytes, format_duration, format_saving
from atoll.train.metrics import perplexity
from atoll.train.plots import plot_adapted, plot_loss_by_bytes, plot_loss_by_steps, plot_loss_by_time
from atoll.train.summary import (
    RunSummary,
    _senders,
    bytes_finding,
    faults_finding,
    loss_finding,
    series_of,
    summarise,
    time_finding,
)


def write_report(
    runs: Mapping[str, RunSummary],
    output_dir: str | Path,
    *,
    command: str = "",
    sample: str = "",
    prompt: str = "",
    sample_of: str = "",
    title: str = "",
) -> Path:
    """Write OUTPUT/report.md and OUTPUT/plots/*.png; returns the path of report.md.

    runs: by the name a reader knows them by ("DiLoCo, 4 replicas"), in the order they are shown.
    command: makes the same report again. sample: text generated after `prompt` by the run named `sample_of`.
    Raises `StorageError` where the disk refuses.
    """
    assert runs, "a report needs at least one run"
    output_dir = Path(output_dir)
    sections = [
        f"# {title or ' / '.join(runs)}",
        *(f"**{finding}.**" for finding in (loss_finding(runs), bytes_finding(runs)) if finding),
        _results_table(runs),
        _READING,
    ]
    try:
        sections += _write_plots(runs, output_dir / "plots")
        sections += [*_islands(runs), *_faults(runs), _settings_table(runs), _digests(runs)]
        sections += [*_sample_section(sample, prompt, sample_of), *_command_section(command)]
        path = output_dir / "report.md"
        path.write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{output_dir}: the report cannot be written ({error.strerror}).") from None
    return path


def report_run(run_dir: Path, *, command: str) -> Path:
    """Write the report of one run into its own folder. command: makes the run again. Raises as `write_report`."""
    return write_report({run_dir.name: summarise(run_dir)}, run_dir, command=command)


_READING = (
    "Loss is of the anchor on held-out text, in nats a token; perplexity is its exponential. Bytes are those sent for "
    "parameters or gradients. Time is training and syncing, without start-up, evaluation and saving (which an elastic "
    "run counts as waiting); computing is the share of it in which replica 0, in an elastic run the mean island, did "
    "not wait for others. One run of each: a difference smaller than that between two seeds says nothing."
)


def _write_plots(runs: Mapping[str, RunSummary], folder: Path) -> list[str]:
    """Draw what there is something to draw of; returns the lines that show the pictures."""
    series = series_of(runs)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    if series.points:
        plot_loss_by_steps(runs).savefig(folder / "loss_by_steps.png")
        pictures.append(f"![{series.kind} against inner steps](plots/loss_by_steps.png)")
    if time_finding(runs):
        plot_loss_by_time(runs).savefig(folder / "loss_by_time.png")
        pictures.append(f"![{series.kind} against time](plots/loss_by_time.png)")
    if _senders(runs, series) is not None:
        plot_loss_by_bytes(runs).savefig(folder / "loss_by_bytes.png")
        pictures.append(f"![{series.kind} against megabytes sent by one replica](plots/loss_by_bytes.png)")
    for number, (name, run) in enumerate(runs.items(), start=1):
        if run.adapted:
            plot_adapted(name, run).savefig(folder / f"adaptive-{number}.png")
            pictures.append(f"![Rank, inner steps, sync and exposed time of {name}](plots/adaptive-{number}.png)")
    return pictures


def _results_table(runs: Mapping[str, RunSummary]) -> str:
    head = [
        "",
        "steps",
        "rounds",
        "held-out loss",
        "perplexity",
        "sent by one replica",
        "sent by all",
        "tokens",
        "time",
        "computing",
    ]
    return _table(head, [[name, *_results(run)] for name, run in runs.items()])


def _results(run: RunSummary) -> list[str]:
    loss = run.evals[-1].loss if run.evals else None
    return [
        f"{run.steps:,}",
        f"{run.rounds:,}",
        "not evaluated" if loss is None else f"{loss:.3f}",
        "" if loss is None else f"{perplexity(loss):,.2f}",
        format_bytes(run.sent_bytes),
        _sent_by_all(run),
        f"{run.tokens:,}",
        format_duration(run.wall_s),
        "" if run.utilisation is None else f"{100 * run.utilisation:.1f} %",
    ]


def _sent_by_all(run: RunSummary) -> str:
    saving = format_saving(run.sent_bytes_all, run.data_parallel_bytes)
    return format_bytes(run.sent_bytes_all) + (f" ({saving})" if saving else "")


def _settings_table(runs: Mapping[str, RunSummary]) -> str:
    """Settings that differ between the runs first; then, in a fold, those that all share."""
    keys = [
        key for key in dict.fromkeys(key for run in runs.values() for key in run.settings) if key not in OF_THE_PLACE
    ]
    shared = [key for key in keys if len({_text(run.settings.get(key, "")) for run in runs.values()}) == 1]
    rows = [
        [f"`{key}`", *(_text(run.settings.get(key, "")) for run in runs.values())] for key in keys if key not in shared
    ]
    first = next(iter(runs.values()))
    same = _table(["setting", "value"], [[f"`{key}`", _text(first.settings[key])] for key in shared])
    differing = ["", _table(["", *runs], rows), ""] if rows else [""]
    fold = ["<details><summary>Settings that are the same in all runs</summary>", "", same, "", "</details>"]
    return "\n".join(["## Settings", *differing, *(["", same] if len(runs) == 1 else fold)])


MOST_DIGESTS = MOST_FAULTS = 100  # that are listed

# Settings of the place where a run ran, which say nothing about its result.
OF_THE_PLACE = frozenset({"output_dir", "resume", "port"})


def _digests(runs: Mapping[str, RunSummary]) -> str:
    rows = [[name, f"`{run.digest}`" if run.digest else "no round", str(run.num_refused)] for name, run in runs.items()]
    last = _table(["", "digest of the last anchor", "contributions refused"], rows)
    folds = [_digests_of_rounds(name, run) for name, run in runs.items() if len(run.digests) > 1]
    return "\n\n".join(["## Anchors", last, *folds])


def _digests_of_rounds(name: str, run: RunSummary) -> str:
    shown = list(run.digests.items())[-MOST_DIGESTS:]
    table = _table(["round", "digest"], [[str(number), f"`{digest}`"] for number, digest in shown])
    which = "all rounds" if len(shown) == len(run.digests) else f"the last {len(shown)} rounds"
    return f"<details><summary>Of {which}: {name}</summary>\n\n{table}\n\n</details>"


def _islands(runs: Mapping[str, RunSummary]) -> list[str]:
    """Who made an elastic run."""
    rows = [
        [name, str(seat), island.name, f"{island.rounds:,}", f"{island.tokens:,.0f}", format_bytes(island.sent_bytes)]
        for name, run in runs.items()
        for seat, island in run.islands.items()
    ]
    head = ["", "seat", "last held by", "in rounds", "tokens", "sent"]
    return ["## Islands\n\n" + _table(head, rows)] if rows else []


def _faults(runs: Mapping[str, RunSummary]) -> list[str]:
    lines = [f"- {name}, {line}" for name, run in runs.items() for line in run.fault_lines]
    left_out = [f"- and {len(lines) - MOST_FAULTS} more, in metrics.jsonl"] if len(lines) > MOST_FAULTS else []
    findings = [f"{name}: {faults_finding(run)}." for name, run in runs.items() if run.members]
    told = [*findings, *(["\n".join([*lines[:MOST_FAULTS], *left_out])] if lines else [])]
    return ["\n\n".join(["## Faults survived", *told])] if told else []


def _sample_section(sample: str, prompt: str, sample_of: str) -> list[str]:
    if not sample:
        return []
    intro = "Text written" + (f" by {sample_of}" if sample_of else "") + (f" after `{prompt}`" if prompt else "")
    return [f"## A sample\n\n{intro}:\n\n{_fenced(sample)}"]


def _command_section(command: str) -> list[str]:
    return [f"## The command that makes this again\n\n{_fenced(command)}"] if command else []


def _fenced(text: str) -> str:
    """A block that nothing inside can close: its fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    printable = "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
    return f"{fence}text\n{printable}\n{fence}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _text(value: object) -> str:
    return ", ".join(str(item) for item in value) if isinstance(value, list) else str(value)
