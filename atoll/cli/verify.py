"""`atoll verify`: is what was saved still what is there?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from atoll.errors import CheckpointError, ConfigError


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]}, short_help="Check the SHA-256 of every saved file."
)
@click.argument("run")
@click.option("--json", "as_json", is_flag=True, help="As one JSON list.")
def verify(run: str, as_json: bool) -> None:
    """Read every byte of the checkpoints of RUN, or of one checkpoint, and compare with its manifest.

    One line each: ok, or the first damaged file and what is wrong with it. The exit code is 0 when all are whole, 2
    otherwise.

    \b
    atoll verify runs/quickstart
    atoll verify runs/quickstart/checkpoints/step-000500
    """
    reports = [_report(folder) for folder in _checkpoints(Path(run))]
    if as_json:
        print(json.dumps(reports))
    else:
        for report in reports:
            print(_line(report))
    damaged = [report for report in reports if report["problem"]]
    if damaged:
        raise CheckpointError(
            f"{len(damaged)} of {len(reports)} checkpoints damaged: {damaged[0]['checkpoint']}: "
            f"{damaged[0]['problem']}.\n{_way_out(reports)}"
        )


def _checkpoints(path: Path) -> list[Path]:
    """The checkpoints of a run, the oldest step first, or the one checkpoint that is named."""
    from atoll.train.checkpoint import MANIFEST, list_checkpoints

    if not path.is_dir():
        raise ConfigError(f"there is no folder {str(path)!r}. Give a run folder (runs/NAME) or a checkpoint.")
    if (path / MANIFEST).exists():
        return [path]
    found = list_checkpoints(path / "checkpoints")
    if not found:
        raise CheckpointError(
            f"{path} holds neither a manifest ({MANIFEST}) nor checkpoints. Give a run folder or a checkpoint."
        )
    return found


def _report(folder: Path) -> dict[str, Any]:
    from atoll.train.checkpoint import read_manifest, verify_checkpoint

    problems = verify_checkpoint(folder)
    if problems:
        return {"checkpoint": str(folder), "problem": problems[0], "files": 0, "bytes": 0}
    files = read_manifest(folder)["files"]
    size = sum(entry["bytes"] for entry in files.values())
    return {"checkpoint": str(folder), "problem": None, "files": len(files), "bytes": size}


def _line(report: dict[str, Any]) -> str:
    from atoll.train.console import format_bytes

    name = Path(report["checkpoint"]).name
    if report["problem"]:
        return f"{name} damaged: {report['problem']}"
    return f"{name} ok | {report['files']} files, {format_bytes(report['bytes'])}, SHA-256 as saved"


def _way_out(reports: list[dict[str, Any]]) -> str:
    whole = [report["checkpoint"] for report in reports if not report["problem"]]
    return f"Whole is {whole[-1]}." if whole else "Put a copy in its place."
