"""Workers of these tests are forked from a process that has transformers loaded: 0.1 s instead of 4 s each."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

import pytest

FAMILIES = ("llama", "qwen2", "opt", "gpt2")


@pytest.fixture(scope="session", autouse=True)
def loaded_fork_server() -> None:
    """Does nothing where a server runs already, for other tests of this process."""
    modules = [f"transformers.models.{family}.modeling_{family}" for family in FAMILIES]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["atoll.parallel.pipeline", "atoll.train.config", "atoll.models", *modules])
    forkserver.ensure_running()
