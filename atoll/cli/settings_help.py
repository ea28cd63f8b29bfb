"""`atoll train --help`: examples first, then every setting with its default, then the recipes.

Made from the settings and the recipes themselves, so that it cannot say anything else than they do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from atoll.cli.flags import SETTINGS, Setting
from atoll.recipes import RECIPES
from atoll.train.config import REGISTRIES

EXAMPLES = (
    ("atoll train quickstart", "four replicas on this machine, a minute or two"),
    ("atoll train quickstart --replicas 2 --max-steps 40 --output-dir runs/x", "flags change any setting"),
    ("atoll train quickstart --data.source ~/texts", "your own text files"),
    ("atoll train my.toml --outer-lr 0.5", "a file of settings, such as runs/x/config.toml"),
    ("atoll train runs/x --resume auto", "go on with a run that was stopped"),
    ("torchrun --nproc-per-node 4 -m atoll train small", "workers that torchrun started, on one machine or several"),
)

WIDTH = 120

# Title of a group of settings -> the first setting in it; the others follow in the order of `TrainConfig`.
GROUPS = {
    "The model": "model.family",
    "The data": "data.source",
    "Sequences and first weights": "sequence_length",
    "Inside a replica": "max_steps",
    "The workers of a replica": "pipeline_stages",
    "Between replicas": "method",
    "Experiments of the DiLoCo paper": "pretrain_steps",
    "Islands that come and go": "elastic",
    "The run": "engine",
}


def print_train_help() -> None:
    """To standard output, as wide as the terminal, or wide enough to be searched where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(WIDTH, console.width)
    console.print(train_help())


def train_help() -> Group:
    """The whole page."""
    parts: list[RenderableType] = [
        Text.assemble(("Usage: ", "bold"), "atoll train [RECIPE | FILE.toml | RUN] [--setting value ...]"),
        Text("\nTrain one language model: DiLoCo, or data parallelism to compare it with."),
        _titled("Examples", _examples()),
    ]
    for title, settings in grouped():
        parts.append(_titled(title, _settings(settings)))
    parts.append(_titled("Recipes", _recipes()))
    return Group(*parts)


def grouped() -> Iterator[tuple[str, list[Setting]]]:
    """Every setting once, under the title of its group."""
    firsts = {first: title for title, first in GROUPS.items()}
    title, members = "", list[Setting]()
    for key, setting in SETTINGS.items():
        if key in firsts:
            if members:
                yield title, members
            title, members = firsts[key], []
        members.append(setting)
    yield title, members


def choices(setting: Setting) -> list[str]:
    """The values a setting may have, where they are names.

    >>> choices(SETTINGS["method"]), choices(SETTINGS["seed"])
    (['diloco', 'data-parallel'], [])
    """
    if setting.key in REGISTRIES:
        return list(REGISTRIES[setting.key])
    annotation = setting.field.annotation
    if get_origin(annotation) is list:
        annotation = get_args(annotation)[0]
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []


def default_of(setting: Setting) -> str:
    """
    >>> default_of(SETTINGS["learning_rate"]), default_of(SETTINGS["model.tie_embeddings"])
    ('0.001', 'yes')
    """
    value = setting.field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if value not in ("", [], {}) else ""


def _flag(setting: Setting) -> str:
    if setting.is_bool:
        return f"--[no-]{setting.flag.removeprefix('--')}"
    return f"{setting.flag}.KEY" if setting.is_table else setting.flag


def _description(setting: Setting) -> str:
    parts = [setting.field.description or "", " | ".join(choices(setting)), "repeatable" if setting.is_list else ""]
    return "; ".join(part for part in parts if part)


def _settings(settings: list[Setting]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="cyan", min_width=34)
    table.add_column(no_wrap=True, min_width=9)
    table.add_column(overflow="fold")
    for setting in settings:
        table.add_row(Text("  " + _flag(setting)), Text(default_of(setting)), Text(_description(setting)))
    return table


def _examples() -> Group:
    lines = []
    for command, what in EXAMPLES:
        lines.append(Text.assemble(("  " + command, "bold"), ("\n      " + what, "dim")))
    return Group(*lines)


def _recipes() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column()
    for name, recipe in RECIPES.items():
        first_line = (recipe.__doc__ or "").strip().partition("\n")[0]
        table.add_row(Text("  " + name), Text(first_line))
    return table


def _titled(title: str, body: RenderableType) -> Group:
    return Group(Text(f"\n{title}", style="bold"), body)
