"""`atoll recipes`: what there is to start from, what each needs, and where it leaves its paper.

`atoll recipes --markdown` is docs/recipes.md: the page is made of the recipes themselves, so that it cannot say
anything else.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from atoll.plan.units import format_bytes, format_count

DEVICES = (40e9, 80e9, 141e9)  # bytes of memory that devices come with
HEAD = """# Recipes

`atoll train NAME` starts one, flags change any setting of it, and `--dry-run` says what it would hold and send. This
page is written by `atoll recipes --markdown`: the words are those of the recipes in `atoll/recipes/`, the numbers of
their dry runs. State is exact, activations are an estimate; "device" is the fullest one.

"""


@dataclass(frozen=True)
class Summary:
    """One recipe and its dry run. device_bytes: of the fullest. memory_bytes: of the smallest device that it fits."""

    name: str
    parameters: int
    replicas: int
    workers: int
    max_steps: int
    inner_steps: int
    compressor: str
    device_bytes: int
    memory_bytes: float | None
    sent_bytes: int
    lines: list[str]


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]}, short_help="What there is to train, and what it needs."
)
@click.option("--markdown", is_flag=True, help="The page docs/recipes.md: each with its paper, needs and deviations.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON list.")
def recipes(markdown: bool, as_json: bool) -> None:
    """List the recipes of `atoll train` with the numbers of their dry runs.

    \b
    atoll recipes
    atoll train dilocox_107b --dry-run
    """
    if markdown:
        sys.stdout.write(page())
    elif as_json:
        print(json.dumps([_plain(summary) for summary in summaries()]))
    else:
        _print_table(list(summaries()))


def summaries() -> Iterator[Summary]:
    """All recipes in their order."""
    from atoll.recipes import RECIPES

    return (summarise(name) for name in RECIPES)


def summarise(name: str) -> Summary:
    """The recipe called `name`, dry-run on the smallest device of `DEVICES` that it fits, or the largest there is."""
    from atoll.cli.dry_run import Options, conclusions, make_dry_run
    from atoll.recipes import recipe
    from atoll.train.config import build_config

    config = build_config(recipe(name))
    runs = (make_dry_run(config, Options(memory_bytes=size)) for size in DEVICES)
    found = next((run for run in runs if not run.ways_out), None)
    answer = found or make_dry_run(config, Options(memory_bytes=DEVICES[-1]))
    return Summary(
        name=name,
        parameters=answer.layout.num_parameters,
        replicas=config.replicas,
        workers=config.num_workers,
        max_steps=config.max_steps,
        inner_steps=config.inner_steps,
        compressor=config.compressor,
        device_bytes=max(stage.device_bytes for stage in answer.stages),
        memory_bytes=answer.options.memory_bytes if found else None,
        sent_bytes=answer.sent_bytes,
        lines=conclusions(answer),
    )


def page() -> str:
    """docs/recipes.md."""
    found = {summary.name: summary for summary in summaries()}
    parts = [HEAD, *_table(list(found.values()))]
    module = None
    for name, summary in found.items():
        if _module(name) is not module:
            module = _module(name)
            parts.append(f"\n## {_title(module)}\n\n{_body(module)}\n")
        parts.append(_section(summary))
    return "".join(parts)


def _table(found: list[Summary]) -> Iterator[str]:
    yield "| recipe | parameters | islands x workers | steps, H | sent as | device | a replica sends a round |\n"
    yield "|---|---|---|---|---|---|---|\n"
    for summary in found:
        cells = _cells(summary)
        yield f"| [`{summary.name}`](#{summary.name}) | {' | '.join(cells[1:])} |\n"


def _cells(summary: Summary) -> list[str]:
    return [
        summary.name,
        format_count(summary.parameters),
        f"{summary.replicas} x {summary.workers}",
        f"{summary.max_steps:,}, {summary.inner_steps}",
        summary.compressor,
        format_bytes(summary.device_bytes),
        format_bytes(summary.sent_bytes),
    ]


def _section(summary: Summary) -> str:
    from atoll.recipes import RECIPES

    text = inspect.getdoc(RECIPES[summary.name]) or ""
    memory = summary.memory_bytes or DEVICES[-1]
    flag = "" if memory == DEVICES[0] else f" --memory {memory / 1e9:.0f}GB"
    shown = "\n".join([f"$ atoll train {summary.name} --dry-run{flag}", "...", *summary.lines])
    return f"\n### {summary.name}\n\n{text}\n\n```\n{shown}\n```\n"


def _module(name: str) -> Any:
    from atoll.recipes import RECIPES

    return inspect.getmodule(RECIPES[name])


def _title(module: Any) -> str:
    return (inspect.getdoc(module) or "").partition("\n")[0].rstrip(".:")


def _body(module: Any) -> str:
    return (inspect.getdoc(module) or "").partition("\n")[2].strip("\n")


def _plain(summary: Summary) -> dict[str, Any]:
    return {key: value for key, value in vars(summary).items() if key != "lines"}


def _print_table(found: list[Summary]) -> None:
    from rich.console import Console
    from rich.table import Table

    titles = ("recipe", "parameters", "islands x workers", "steps, H", "sent as", "device", "sends a round")
    table = Table(*titles, box=None, pad_edge=False, header_style="bold")
    for summary in found:
        table.add_row(*_cells(summary))
    console = Console(highlight=False)
    console.width = console.width if console.is_terminal else max(console.width, 120)
    console.print(table)
    console.print("start one: atoll train NAME | what it holds and sends: atoll train NAME --dry-run")
