from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.train.config import DataConfig

WORDS = {
    "sea": ["wave", "tide", "reef", "salt", "gull", "anchor", "harbour"],
    "hill": ["stone", "goat", "path", "ridge", "cairn", "snow", "larch"],
    "town": ["tram", "clock", "market", "lamp", "bridge", "stair", "bell"],
}


def make_text(domain: str, number: int, num_words: int = 60) -> str:
    """A text of its own for each number, in the words of its domain."""
    words = WORDS[domain]
    return (
        " ".join([f"{domain} {number}:", *(words[(number * 7 + i * i) % len(words)] for i in range(num_words))]) + "\n"
    )


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the cache of the person who runs it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus_folder(tmp_path: Path) -> Path:
    """Three domains of 40, 30 and 20 small files."""
    for domain, count in zip(WORDS, (40, 30, 20), strict=True):
        folder = tmp_path / "corpus" / domain
        folder.mkdir(parents=True)
        for number in range(count):
            (folder / f"{number:03d}.txt").write_text(make_text(domain, number), encoding="utf-8")
    return tmp_path / "corpus"


@pytest.fixture
def settings(corpus_folder: Path) -> Callable[..., DataConfig]:
    """`DataConfig` over the small corpus, with the settings given changed."""

    def build(**changes: object) -> DataConfig:
        return DataConfig.model_validate({"source": str(corpus_folder), "held_out_percent": 10.0, **changes})

    return build
