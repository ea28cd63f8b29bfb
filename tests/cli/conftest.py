"""A tiny corpus, a tiny run trained once, and the command line called as a function."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from atoll.cli.main import main

SIZES = ["--model.hidden-size=32", "--model.num-layers=1", "--model.num-heads=2", "--model.intermediate-size=64"]
LENGTHS = ["--sequence-length=32", "--batch-size=2", "--max-steps=12", "--inner-steps=4", "--learning-rate=0.003"]


class Answer(NamedTuple):
    """What a command came to."""

    code: int
    out: str
    err: str


Atoll = Callable[..., Answer]


@pytest.fixture
def atoll(capfd: pytest.CaptureFixture[str]) -> Atoll:
    """Run a command in this process."""

    def run(*args: object) -> Answer:
        capfd.readouterr()
        code = main([str(arg) for arg in args])
        return Answer(code, *capfd.readouterr())

    return run


@pytest.fixture
def refused(atoll: Atoll) -> Callable[..., str]:
    """Run a command that must fail with exit code 2, in at most three lines, without a traceback; the message."""

    def run(*args: object) -> str:
        answer = atoll(*args)
        assert answer.code == 2, answer
        assert answer.err.startswith("error: ")
        assert len(answer.err.splitlines()) <= 3, answer.err
        assert "Traceback" not in answer.err + answer.out
        return answer.err

    return run


def write_corpus(folder: Path, *, domains: int) -> Path:
    """Sentences of a few words, the same each time; a sub-folder a domain."""
    words = "the island sends one round of weights to every other island and waits for none".split()
    chance = random.Random(7)
    for domain in range(domains):
        (folder / f"domain-{domain}").mkdir(parents=True)
        for number in range(8):
            lines = (" ".join(chance.choices(words, k=9)) for _ in range(40))
            (folder / f"domain-{domain}" / f"{number}.txt").write_text(".\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 40 kB of text in two domains."""
    return write_corpus(tmp_path_factory.mktemp("corpus"), domains=2)


@pytest.fixture(scope="session")
def tiny(corpus: Path) -> list[str]:
    """Flags of a run that takes a second: two replicas in this process."""
    others = ["--data.held-out-percent=10", "--replicas=2", "--engine=local", "--device=cpu", "--threads=1"]
    return [*SIZES, *LENGTHS, f"--data.source={corpus}", *others]


@pytest.fixture(scope="session")
def trained(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny run that is done, with checkpoints at steps 6 and 12. Leave it as it is."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    assert main(["train", *tiny, "--save-steps=6", f"--output-dir={folder}"]) == 0
    return folder
