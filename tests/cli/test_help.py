"""What `atoll` says about itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import atoll as package
from atoll.cli import settings_help
from atoll.cli.flags import SETTINGS, parse_flags

ROOT = Path(package.__file__).parent.parent


def test_help_of_train_lists_every_setting_once_and_every_recipe(atoll, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    out = atoll("train", "--help").out
    listed = [
        line.split()[0].replace("[no-]", "").removesuffix(".KEY") for line in out.splitlines() if line[:4] == "  --"
    ]
    assert listed == [setting.flag for setting in SETTINGS.values()]
    assert all(f"  {name} " in out for name in settings_help.RECIPES)
    assert out.index("Examples") < out.index("--model.family")


def test_groups_begin_at_settings_that_exist() -> None:
    assert set(settings_help.GROUPS.values()) <= set(SETTINGS)
    assert [title for title, _ in settings_help.grouped()] == list(settings_help.GROUPS)


def test_examples_of_the_help_are_read_without_error() -> None:
    for command, _ in settings_help.EXAMPLES:
        parse_flags(command.split(" train ")[1].split())


@pytest.mark.parametrize("command", ["demo", "generate", "export", "eval", "verify", "doctor"])
def test_every_command_explains_itself(atoll, command: str) -> None:
    answer = atoll(command, "--help")
    assert answer.code == 0
    assert f"Usage: atoll {command}" in answer.out


def test_version(atoll) -> None:
    assert atoll("--version") == (0, f"atoll {package.__version__}\n", "")


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["trian"], "'trian'"),
        (["generate"], "RUN"),
        (["generate", "x", "--top-k", "many"], "'many'"),
        (["doctor", "x"], "x"),
    ],
)
def test_usage_errors_name_what_was_given_and_where_to_look(refused, args: list[str], hint: str) -> None:
    message = refused(*args)
    assert hint in message
    assert "--help" in message


def test_help_does_not_load_torch() -> None:
    code = "import sys; from atoll.cli.main import main; main(['--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
