"""Runs between machines: `atoll coordinator`, `join`, `status`, `token` and `stop`.

Light to import: `atoll --help` loads neither torch nor the network.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.status import status
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from atoll.elastic.tokens import Token

HELP = {"help_option_names": ["-h", "--help"]}
JOIN_FILE = "join.token"


@click.command(
    context_settings={"ignore_unknown_options": True, **HELP}, short_help="Serve a run that islands join and leave."
)
@click.option("--host", default="auto", show_default=True, help="Address to listen on; auto: towards other machines.")
@click.option("--allow-public-network", is_flag=True, help="Listen where the whole internet can reach it. A risk.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def coordinator(args: tuple[str, ...], host: str, allow_public_network: bool) -> int:
    """Coordinate a run: who is in, which round, what is committed. It trains nothing itself and needs no GPU.

    ARGS are a recipe or a file of settings, and flags, as for `atoll train`. Where it is stopped or killed, the islands
    wait; the same command goes on. --port 0 is any free port, and the same again at the next start.

    \b
    atoll coordinator quickstart --replicas 4 --output-dir runs/shared
    atoll coordinator run.toml --host 10.0.0.5 --port 29400
    """
    from atoll.cli.flags import settings_from
    from atoll.train.config import build_config

    config = build_config(settings_from(args) | {"elastic": True})
    _claim_folder(config)
    from atoll.elastic.coordinator import INTERRUPTED
    from atoll.train.elastic_service import serve_run

    folder = Path(config.output_dir)
    code = serve_run(
        config,
        host=host,
        port=config.port,
        allow_public=allow_public_network,
        started=lambda token: _hand_out(token, folder),
    )
    if code != INTERRUPTED:  # then the run goes on with the next start
        _report(folder, args, replicas=config.replicas)
    return code


@click.command(
    context_settings={"ignore_unknown_options": True, **HELP}, short_help="Train here, and let other machines join."
)
@click.option("--host", "address", default="auto", show_default=True, help="Address that other machines reach.")
@click.option("--allow-public-network", is_flag=True, help="Listen where the whole internet can reach it. A risk.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def host(args: tuple[str, ...], address: str, allow_public_network: bool) -> None:
    """Start a run on this machine, and print the line that brings others into it. It waits for nobody.

    ARGS are a recipe or a file of settings, and flags, as for `atoll train`; --min-replicas 2 waits for another one.
    Ctrl-C saves and leaves; --resume auto goes on, and the tokens that were handed out stay good.

    \b
    atoll host quickstart --output-dir runs/shared
    atoll host run.toml --host 10.0.0.5 --port 29400
    """
    from atoll.cli.host import host as serve_and_train

    serve_and_train(args, address=address, allow_public=allow_public_network)


@click.command(context_settings=HELP, short_help="Bring this machine into a run.")
@click.argument("token", required=False)
@click.option("--output-dir", default="", help="Where this island keeps things. [default: runs/joined-RUN]")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=0), default=0, show_default=True, help="CPU threads; 0: all cores.")
@click.option("--pipeline-stages", type=click.IntRange(min=1), help="Workers that the layers are cut over, here.")
@click.option("--data-workers", type=click.IntRange(min=1), help="Workers that share the island's batch, here.")
@click.option(
    "--sharding", type=click.Choice(["replicate", "shard"]), help="Of each stage over its data workers, here."
)
@click.option(
    "--microbatches", type=click.IntRange(min=0), help="Parts that follow each other through the stages, here."
)
def join(
    token: str | None,
    output_dir: str,
    device: str,
    threads: int,
    pipeline_stages: int | None,
    data_workers: int | None,
    sharding: str | None,
    microbatches: int | None,
) -> None:
    """Train in the run that TOKEN leads to, until it is over. Its settings and its state come from there.

    TOKEN is the line that `atoll token create` prints, @FILE with it, or - for standard input; without one, the
    variable ATOLL_TOKEN is read. Ctrl-C leaves in good order; the others go on.

    The island may lie on several workers, as the run says or as the flags do: this command starts them on this machine,
    and torchrun on several, where every rank runs it and rank 0 leads.

    \b
    atoll join atoll1.AG4AAA...
    atoll join @token.txt --pipeline-stages 4
    torchrun --nnodes 2 --nproc-per-node 8 ... -m atoll join @token.txt --data-workers 4 --pipeline-stages 4
    atoll join @token.txt
    ssh host atoll token create runs/shared | atoll join -
    """
    from atoll.elastic.tokens import parse_token

    line = token_line(token)
    parse_token(line)
    from atoll.cli.joining import check_before_joining

    check_before_joining(line, output_dir=output_dir, device=device)
    from atoll.train.elastic import join as train_in

    given = {
        "pipeline_stages": pipeline_stages,
        "data_workers": data_workers,
        "sharding": sharding,
        "microbatches": microbatches,
    }
    workers = {key: value for key, value in given.items() if value is not None}
    train_in(line, output_dir=output_dir, device=device, threads=threads, workers=workers)


@click.group(context_settings=HELP, short_help="Who may join a run: create, list, revoke.")
def token() -> None:
    """Tokens let islands into a run. RUN is the folder of a run whose coordinator is running on this machine.

    \b
    atoll token create runs/shared --hours 2 --note "the lab"
    atoll token list runs/shared
    atoll token revoke runs/shared 3f9a
    """


@token.command("create", short_help="A new token, on standard output.")
@click.argument("run")
@click.option("--hours", default=24.0, show_default=True, help="How long it lets in; members it let in may stay.")
@click.option("--note", default="", help="Whom it is for; shown by atoll token list.")
@click.option("--role", type=click.Choice(["join", "operator", "watch"]), default="join", show_default=True)
def create_token(run: str, hours: float, note: str, role: str) -> None:
    """Print a new token for RUN and nothing else. Whoever has it can join: hand it over as you would a password.

    A token to watch can read status, page and metrics, and do nothing else.

    \b
    atoll token create runs/shared > token.txt
    """
    from atoll.elastic.link import operate

    body = {"role": role, "lifetime_s": hours * 3600, "note": note}
    click.echo(operate(_operator(run), "POST", "/v1/tokens", body=body)["token"])
    click.echo("on the other machine: atoll join TOKEN", err=True)


@token.command("list", short_help="All tokens of a run, without their secrets.")
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="As one JSON list.")
def list_tokens(run: str, as_json: bool) -> None:
    """Show all tokens there ever were for RUN: whether they let in, until when, and how many islands they let in."""
    from atoll.elastic.link import operate

    tokens = operate(_operator(run), "GET", "/v1/tokens")["tokens"]
    if as_json:
        click.echo(json.dumps(tokens))
    else:
        _print(_token_table(tokens))


@token.command("revoke", short_help="Let a token let nobody in any more.")
@click.argument("run")
@click.argument("id")
def revoke_token(run: str, id: str) -> None:
    """Revoke the token of RUN whose id begins with ID. The islands it let in are out at once."""
    from atoll.elastic.link import operate

    done = operate(_operator(run), "POST", "/v1/tokens/revoke", body={"id": id})
    click.echo(f"token {done['id']} revoked; islands it had let in, now out: {len(done['members'])}")


@click.command(context_settings=HELP, short_help="End a run between machines in good order.")
@click.argument("run")
def stop(run: str) -> None:
    """Tell all islands of RUN, and its coordinator, to save and end. It can be gone on with later.

    \b
    atoll stop runs/shared
    """
    from atoll.elastic.link import operate

    operate(_operator(run), "POST", "/v1/stop", body={})
    click.echo("told to stop; the islands save and leave.")


COMMANDS = (host, coordinator, join, status, token, stop)


# --- tokens ---


def token_line(given: str | None) -> str:
    """The token that was given, in whatever way. One on the command line is taken off it: others can read it there."""
    from atoll.elastic.tokens import ENVIRONMENT, command_without_token, parse_token, read_token

    hidden = command_without_token(sys.argv)
    if hidden is not None and given == hidden[1]:
        parse_token(given)
        words, line = command_without_token(sys.orig_argv) or hidden
        os.execve(sys.executable, words, os.environ | {ENVIRONMENT: line})
    return read_token(given, stdin=sys.stdin, environment=os.environ)


def _token_of(run: str) -> Token:
    """The token that RUN is, or the operator's token of the run in that folder."""
    from atoll.elastic.tokens import ENVIRONMENT, PREFIX, parse_token

    inherited = run == "runs/default" and ENVIRONMENT in os.environ
    if inherited or run == "-" or run.startswith((PREFIX, "@")):
        return parse_token(token_line(None if inherited else run))
    return _operator(run)


def _operator(run: str) -> Token:
    from atoll.elastic.coordinator import FOLDER, OPERATOR_TOKEN, read_address
    from atoll.elastic.tokens import parse_token

    read_address(Path(run))  # says so where this is no run of ours
    path = Path(run) / FOLDER / OPERATOR_TOKEN
    try:
        return parse_token(path.read_text(encoding="ascii"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}). Be the user who started the coordinator."
        ) from None


def _claim_folder(config: Any) -> None:
    """Take the run's folder: new, or of a run with these settings."""
    from atoll.train.checkpoint import prepare_run_dir, refuse_other_config
    from atoll.train.config import essential, read_config_file, write_config_file
    from atoll.train.console import print_line
    from atoll.train.folder import CONFIG, holds_run

    folder = Path(config.output_dir)
    prepare_run_dir(folder, warn=print_line)
    if holds_run(folder):
        refuse_other_config(essential(read_config_file(folder / CONFIG)), essential(config))
    write_config_file(config, folder / CONFIG)


def _report(folder: Path, args: tuple[str, ...], *, replicas: int) -> None:
    from atoll.train.console import print_line
    from atoll.train.report import report_run

    command = shlex.join(["atoll", "coordinator", *args])
    path = report_run(folder, command=f"{command}\natoll join TOKEN  # on {replicas} machines or more")
    print_line(f"report: {path}")


def _hand_out(line: str, folder: Path) -> None:
    """Say how to join. The token itself goes to a terminal only: other output may be kept as a log."""
    from atoll.elastic.certs import write_private
    from atoll.elastic.coordinator import FOLDER
    from atoll.elastic.tokens import parse_token
    from atoll.train.console import print_line

    path = folder / FOLDER / JOIN_FILE
    write_private(path, line.encode())
    where = "on this machine" if parse_token(line).is_loopback else "on each other machine"
    if sys.stdout.isatty():
        print_line(f"{where}: atoll join {line}")
    else:
        print_line(f"{where}: atoll join TOKEN, which is in {path}")


# --- tables ---


def _token_table(tokens: list[dict[str, Any]]) -> Table:
    from datetime import datetime

    from rich.table import Table
    from rich.text import Text

    table = Table("id", "role", "state", "until", "islands", "note", box=None, pad_edge=False)
    for info in tokens:
        until = datetime.fromtimestamp(info["expires"]).strftime("%Y-%m-%d %H:%M")
        cells = (info["id"], info["role"], info["state"], until, str(info["members"]), info["note"])
        table.add_row(*map(Text, cells))
    return table


def _print(what: Any) -> None:
    """Plain text and tables, never read as markup."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(what) if isinstance(what, str) else what)
