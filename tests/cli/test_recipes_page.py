"""The page of recipes is made of the recipes; every one of them dry-runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli.dry_run import Options, make_dry_run
from atoll.cli.recipes import page, summarise
from atoll.recipes import RECIPES, recipe
from atoll.train.config import build_config

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
FROM_PAPERS = [name for name in RECIPES if name not in ("quickstart", "small", "dilocox_tiny")]


def section(name: str) -> str:
    return PAGE.read_text(encoding="utf-8").partition(f"\n### {name}\n")[2].partition("\n### ")[0].partition("\n## ")[0]


def test_the_page_is_what_the_command_writes(atoll) -> None:
    """If not: atoll recipes --markdown > docs/recipes.md."""
    assert PAGE.read_text(encoding="utf-8") == page()
    assert atoll("recipes", "--markdown").out == page()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_dry_runs_as_the_page_says(atoll, name: str) -> None:
    memory = summarise(name).memory_bytes
    assert memory is not None, "it fits no device that there is"
    answer = atoll("train", name, "--dry-run", "--memory", f"{memory / 1e9:.0f}GB")
    assert answer.code == 0, answer
    assert answer.out.splitlines()[-2:] == section(name).rstrip().removesuffix("```").splitlines()[-2:]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_what_it_needs(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8").partition(f"\n### {name}\n")[0].rpartition("\n## ")[2] + section(name)
    assert "need" in text.lower()


@pytest.mark.parametrize("name", FROM_PAPERS)
def test_every_recipe_of_a_paper_names_it_and_what_is_not_from_it(name: str) -> None:
    above = PAGE.read_text(encoding="utf-8").partition(f"\n### {name}\n")[0].rpartition("\n## ")[2]
    text = above + section(name)
    assert "arXiv" in text
    assert "Ours" in section(name) or "we differ" in above


def test_the_table_is_the_same_as_plain_values(atoll) -> None:
    found = json.loads(atoll("recipes", "--json").out)
    assert [entry["name"] for entry in found] == list(RECIPES)
    shown = atoll("recipes").out
    assert all(f"{name} " in shown for name in RECIPES)


def test_dilocox_107b_feeds_80_stages_and_fits_devices_of_40_gb() -> None:
    config = build_config(recipe("dilocox_107b"))
    assert (config.pipeline_stages, config.data_workers, config.replicas, config.num_processes) == (80, 2, 2, 320)
    assert (config.inner_steps, config.rank, config.compressor) == (125, 2048, "lowrank+int4")
    assert config.resolved_microbatches >= config.pipeline_stages
    answer = make_dry_run(config, Options(memory_bytes=40e9))
    assert answer.ways_out == ""
    assert answer.bubble < 0.5
