"""Imports run one way; this test names the edge that breaks the rule."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "atoll"

# part of the package -> the other parts it may import
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "exchange": set(),
    "algo": {"errors", "exchange"},
    "compress": {"errors", "exchange"},
    "comm": {"errors", "exchange"},
    "data": {"errors"},
    "models": {"errors"},
    "elastic": {"errors", "exchange", "algo", "compress", "comm"},
    "parallel": {"errors", "exchange"},
    "plan": {"errors", "exchange", "algo", "compress", "elastic"},
    "train": {"errors", "exchange", "algo", "compress", "comm", "elastic", "parallel", "data", "models"},
    "integrations": {"errors", "exchange", "algo", "compress", "comm", "train"},
    "recipes": {"errors", "train"},
    "cli": {
        *("errors", "exchange", "algo", "compress", "comm", "elastic", "parallel", "plan", "data", "models"),
        *("train", "integrations", "recipes"),
    },
    "": {"integrations"},
    "__main__": {"cli"},
}

# The pure parts may use torch and these modules of the standard library; no clock, no disk, no network, no chance.
PURE = {"algo", "compress"}
PURE_MAY_IMPORT = {
    "__future__", "collections", "dataclasses", "functools", "itertools", "math", "re", "struct", "typing", "torch",
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported(path: Path) -> list[tuple[str, int]]:
    """Modules that `path` imports when it runs; those for type checkers alone do not count."""
    names: list[tuple[str, int]] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            names.extend((alias.name, node.lineno) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} uses a relative import; write the whole name"
            names.append((node.module or "", node.lineno))
            if node.module == "atoll":
                names.extend((f"atoll.{alias.name}", node.lineno) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path: Path) -> None:
    part = part_of(path)
    for name, line in imported(path):
        if not name.startswith("atoll."):
            continue
        target = name.split(".")[1]
        where = f"{path.relative_to(ROOT.parent)}:{line}"
        assert target == part or target in MAY_IMPORT[part], f"{where}: {part or 'atoll'} must not import {target}"


@pytest.mark.parametrize(
    "path", [path for path in modules() if part_of(path) in PURE], ids=lambda path: str(path.relative_to(ROOT))
)
def test_pure_parts_import_nothing_that_acts(path: Path) -> None:
    for name, line in imported(path):
        where = f"{path.relative_to(ROOT.parent)}:{line}"
        if name == "atoll" or name.startswith("atoll."):
            continue
        assert name.split(".")[0] in PURE_MAY_IMPORT, f"{where}: a pure part must not import {name}"
        assert not name.startswith("torch.distributed"), f"{where}: a pure part must not reach for the network"


def test_every_part_has_a_rule() -> None:
    parts = {part_of(path) for path in modules()}
    assert parts <= set(MAY_IMPORT), f"say in MAY_IMPORT what {sorted(parts - set(MAY_IMPORT))} may import"


def test_the_rule_finds_a_bad_edge(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("if TYPE_CHECKING:\n    import atoll.cli\nfrom atoll.train import loop\n")
    assert imported(bad) == [("atoll.train", 3)]
