"""What the docs say is run: commands, code and links."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atoll.comm.local import drive_together

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def readme_commands() -> list[str]:
    lines = [line for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith(".venv/bin/atoll")]


@pytest.mark.slow
def test_the_commands_of_the_readme_run_in_order(tmp_path: Path) -> None:
    commands = readme_commands()
    assert len(commands) >= 4, "the README lost its commands"
    for command in commands:
        words = [sys.executable, "-m", "atoll", *shlex.split(command, comments=True)[1:]]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert (tmp_path / "runs/first-hf/model.safetensors").exists()
    assert (tmp_path / "runs/first/report.md").exists()


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"^make (\w+)", "\n".join(blocks(ROOT / "README.md", "bash")), re.MULTILINE))
    assert {"demo", "test", "check", "bench"} <= named
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_the_two_lines_of_the_readme_train_any_loop() -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    layer = torch.nn.Linear(3, 1)
    before = layer.weight.detach().clone()
    names = {
        "model": lambda batch: SimpleNamespace(loss=layer(batch).square().mean()),
        "optimizer": torch.optim.AdamW(layer.parameters()),
        "batches": list(torch.randn(5, 4, 3)),
    }
    exec(code.replace("OuterSync(model,", "OuterSync(layer,"), names | {"layer": layer})
    assert not torch.equal(layer.weight, before)


def test_the_compressor_of_the_docs_keeps_its_rules() -> None:
    (code,) = blocks(ROOT / "docs/adding_a_method.md", "python")
    names: dict = {"__name__": "sign"}
    exec(code, names)
    sign = names["Sign"]()
    tensors = [torch.tensor([1.0, -3.0, 2.0]), torch.tensor([-1.0, -1.0, 1.0])]
    results = drive_together([sign.average(tensor, {}) for tensor in tensors], [1.0, 1.0])
    assert torch.equal(results[0][0], torch.tensor([0.5, -1.5, 1.5]))
    assert torch.equal(results[0][0], results[1][0])
    assert sign.sent_bytes((3,), num_replicas=2, replica=0) == 7


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"
