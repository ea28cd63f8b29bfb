"""`atoll host`: a coordinator and one island here, and the line that brings other machines in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import atoll
from atoll.cli.flags import settings_from
from atoll.elastic.addresses import choose_place
from atoll.elastic.certs import write_private
from atoll.elastic.coordinator import FOLDER
from atoll.elastic.tokens import parse_token
from atoll.train.config import build_config
from atoll.train.console import print_line
from atoll.train.elastic_launch import Reach, run_elastic

JOIN_FILE = "join.token"
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # Linux: what gloo and the donor service listen on


def host(args: Sequence[str], *, address: str, allow_public: bool) -> None:
    """Train here until the run is over; other machines come and go meanwhile."""
    config = build_config(settings_from(args) | {"elastic": True})
    choose_place(address, allow_public=allow_public)  # before anything is started
    folder = Path(config.output_dir)

    def started(token: str) -> None:
        for line in invitation(token, folder, to_terminal=sys.stdout.isatty()):
            print_line(line)
        if config.min_replicas == 1:
            print_line("warning: one island alone is no DiLoCo run; it trains until others come")

    run_elastic(config, islands=1, reach=Reach(address, allow_public, config.min_replicas, started))


def invitation(line: str, folder: Path, *, to_terminal: bool) -> list[str]:
    """What the owner of the run must know. The token goes to a file, and to nothing else but a terminal."""
    token = parse_token(line)
    path = folder / FOLDER / JOIN_FILE
    write_private(path, line.encode())
    where = "another shell of this machine" if token.is_loopback else "each other machine"
    shown = line if to_terminal else f"TOKEN, with the token in {path}"
    return [
        f"on {where}: pip install atoll=={atoll.__version__} && atoll join {shown}",
        f"open, TCP: {', '.join(token.addresses)} for all; between islands {port_range()} (averaging: not encrypted)",
        f"how it goes: atoll status {folder} | more tokens: atoll token create {folder}",
    ]


def port_range(table: Path = PORT_RANGE) -> str:
    """The ports that the system gives to whoever asks for any."""
    try:
        first, last = table.read_text(encoding="ascii").split()
    except OSError:
        return "49152-65535"
    return f"{first}-{last}"
