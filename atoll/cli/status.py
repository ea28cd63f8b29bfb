"""`atoll status`: how a run between machines is doing, once, live in the terminal, as JSON, or as a page."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from atoll.errors import AtollError

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

    from atoll.elastic.tokens import Token

EVERY_S = 1.0
WIDE = 200  # columns of what is no terminal
GONE = ("lost", "left")
GONE_SHOWN = 4  # islands that are lost or left, the last ones


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]}, short_help="How a run between machines is doing."
)
@click.argument("run", default="runs/default")
@click.option("--once", is_flag=True, help="Once, also in a terminal, where it is shown live until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="All that is known, once, as one JSON object.")
@click.option(
    "--page", is_flag=True, help="Show it in a browser on this machine: prints a link, and serves until Ctrl-C."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Of --page; 0: any.")
def status(run: str, once: bool, as_json: bool, page: bool, port: int) -> None:
    """Show the islands of RUN: the folder of a run whose coordinator is on this machine, or a token.

    --page needs a token of the operator or one to watch: atoll token create RUN --role watch.

    \b
    atoll status runs/shared
    atoll status runs/shared --page
    atoll status @token.txt --json
    """
    token = _reader_of(run)
    if page:
        return _serve(token, port)
    if as_json:
        click.echo(json.dumps(_fetch(token())))
    elif once or not _can_be_redrawn():
        _print(view(_fetch(token())))
    else:
        _watch(token)


def _reader_of(run: str) -> Callable[[], Token]:
    """How to come by the token. From a folder it is read each time: each start of the coordinator makes a new one."""
    from atoll.cli.elastic import _operator, _token_of

    first = _token_of(run)
    try:
        is_of_folder = _operator(run).id == first.id
    except AtollError:
        is_of_folder = False
    return (lambda: _operator(run)) if is_of_folder else (lambda: first)


def _fetch(token: Token) -> dict[str, Any]:
    from atoll.elastic.link import fetch_status

    return fetch_status(token)


def _serve(token: Callable[[], Token], port: int) -> None:
    """The page, until Ctrl-C."""
    from atoll.elastic.page_forward import serve_page

    def started(link: str) -> None:
        click.echo(f"{link}\nThe link works once, on this machine. Ctrl-C ends it; the run goes on.")

    with suppress(KeyboardInterrupt):
        asyncio.run(serve_page(token, port=port, started=started))


# --- live ---


def _can_be_redrawn() -> bool:
    from rich.console import Console

    console = Console()
    return console.is_terminal and not console.is_dumb_terminal


def _watch(token: Callable[[], Token]) -> None:
    """Draw it anew each second, until the run is over or Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    known = _fetch(token())
    with suppress(KeyboardInterrupt), Live(view(known), console=Console(highlight=False), auto_refresh=False) as live:
        while not known["finished"]:
            time.sleep(EVERY_S)
            try:
                known, trouble = _fetch(token()), ""
            except AtollError as error:
                trouble = f"as of the last answer; trying again, Ctrl-C ends: {str(error).splitlines()[0]}"
            live.update(view(known, trouble=trouble), refresh=True)


# --- what is shown ---


def view(known: dict[str, Any], *, trouble: str = "") -> Group:
    """A status, as it is shown in a terminal."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(line) for line in headlines(known)]
    parts.append(_table(known))
    parts += [Text(f"alarm: {alarm['what']}: {alarm['detail']}", style="bold") for alarm in known["alarms"]]
    parts += [Text(line) for line in _closing(known)]
    if trouble:
        parts.append(Text(trouble, style="bold"))
    return Group(*parts)


def headlines(known: dict[str, Any]) -> list[str]:
    """The run in three lines."""
    live, breadth = len(known["liveness"]), known["breadth"]
    lines = [
        f"round {known['round']}/{known['num_rounds']} | {live} islands here | {breadth:.0%} of them in the last mean"
    ]
    told = known.get("summary")
    if told is None:  # of a coordinator of an earlier version
        return lines
    return [*lines, " | ".join(_progress(told)), " | ".join(_traffic(told))]


def _progress(told: dict[str, Any]) -> list[str]:
    from atoll.train.console import format_duration

    loss = [] if told["loss"] is None else [f"loss {told['loss']:.3f}"]
    held_out = [] if told["eval_loss"] is None else [f"held-out {told['eval_loss']:.3f} at step {told['eval_step']}"]
    eta = [] if told["eta_s"] is None else [f"eta {format_duration(told['eta_s'])}"]
    return [f"step {told['step']}/{told['max_steps']}", *loss, *held_out, *eta]


def _traffic(told: dict[str, Any]) -> list[str]:
    from atoll.train.console import format_bytes, format_duration, format_saving

    if not told["rounds"]:
        return ["no round is committed yet"]
    saving = format_saving(told["sent_bytes"], told["data_parallel_bytes"])
    goodput, share = told["goodput_tokens_per_s"], told["utilisation"]
    return [
        *([] if goodput is None else [f"goodput {goodput:,.0f} tok/s"]),
        *([] if share is None else [f"utilisation {100 * share:.1f} %"]),
        *([] if told["sync_s"] is None else [f"last sync {format_duration(told['sync_s'])}"]),
        *([] if told["waited_s"] is None else [f"waited {format_duration(told['waited_s'])}"]),
        f"sent {format_bytes(told['sent_bytes'])}" + (f" ({saving})" if saving else ""),
        f"refused {told['refused']}",
        f"tried again {told['voids']}",
    ]


def _table(known: dict[str, Any]) -> Table:
    from rich.table import Table
    from rich.text import Text

    whole = sum(known["participation"].values())
    table = Table(box=None, pad_edge=False)
    for name in "seat island state round step tok/s weight loss link".split():
        table.add_column(name, justify="left" if name in ("island", "state") else "right", no_wrap=name != "island")
    table.add_column("heard of", justify="right", no_wrap=True)
    for member in _shown(known["members"]):
        if known["finished"] and member["state"] not in GONE:
            member = member | {"state": "done", "connected": True}
        weight = known["participation"].get(str(member["seat"]))
        share = "" if weight is None or not whole else f"{weight / whole:.0%}"
        table.add_row(*map(Text, _cells(member, share)))
    return table


def _shown(members: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Those who are there, and the last of those who went."""
    here = [member for member in members if member["state"] not in GONE]
    gone = [member for member in members if member not in here]
    return [*here, *sorted(gone, key=lambda member: member["seen_s_ago"])[:GONE_SHOWN]]


def _cells(member: dict[str, Any], share: str) -> list[str]:
    from atoll.elastic.wire import printable

    gone = member["state"] in GONE
    loss, rate = member.get("loss"), member.get("link_bytes_per_s")
    return [
        str(member["seat"]),
        printable(str(member["name"]), limit=40),
        str(member["state"]) if member["connected"] or gone else f"{member['state']}, away",
        str(member["round"]),
        str(member["step"]),
        f"{member['tokens_per_s']:,.0f}",
        "" if gone else share,
        "" if loss is None or gone else f"{loss:.3f}",
        "" if rate is None or gone else _bits(rate),
        f"{member['seen_s_ago']:.1f} s ago",
    ]


def _bits(bytes_per_s: float) -> str:
    """
    >>> _bits(25_000_000), _bits(1_250)
    ('200 Mbit/s', '10 kbit/s')
    """
    from atoll.train.console import format_bytes

    return format_bytes(8 * bytes_per_s).removesuffix("B") + "bit/s"


def _closing(known: dict[str, Any]) -> list[str]:
    from atoll.elastic.driver import describe_wait

    finished = known["finished"]
    if finished:
        return [f"over, with exit code {finished['exit_code']} {finished['why']}".rstrip()]
    return [f"waiting for: {', '.join(known['waiting_for'])}"] if describe_wait(known) else []


def _print(what: RenderableType) -> None:
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDE
    Console(highlight=False, soft_wrap=True, width=width).print(what)
