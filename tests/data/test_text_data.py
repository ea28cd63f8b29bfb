from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from atoll.data import load_data, text_data
from atoll.data.tokenizer import byte_tokenizer, train_bpe
from atoll.errors import DataError
from atoll.train.config import DataConfig

SHAPE = {"sequence_length": 32, "num_replicas": 3, "seed": 1}


def training_text(data: text_data.TextData) -> str:
    streams = [data.stream(replica) for replica in range(3)]
    return "\n".join(data.tokenizer.decode(row) for s in streams for row in s.next_batch(s.num_examples))


@pytest.mark.parametrize("shard", ["iid", "domain", "cluster"])
def test_no_held_out_document_is_in_a_training_shard(settings: Callable[..., DataConfig], shard: str) -> None:
    data = load_data(settings(shard=shard), **SHAPE)
    held_out = data.tokenizer.decode(data.held_out.flatten()).split("<|eos|>")
    starts = [text.split(":")[0] + ":" for text in held_out[1:-1]]  # "sea 12:" begins one document only
    assert starts
    train = training_text(data)
    assert not [start for start in starts if f"<|eos|>{start}" in train]


@pytest.mark.parametrize("shard", ["iid", "domain", "cluster"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_processes_that_load_alone_agree(settings: Callable[..., DataConfig], shard: str, tokenizer: str) -> None:
    config = settings(shard=shard, tokenizer=tokenizer, bpe_vocab_size=300)
    first, again = (load_data(config, **SHAPE) for _ in range(2))
    assert first.digest == again.digest
    assert first.describe() == again.describe()
    assert torch.equal(first.held_out, again.held_out)
    for replica in range(3):
        assert torch.equal(first.stream(replica).next_batch(4), again.stream(replica).next_batch(4))


def test_description_is_one_line_with_source_counts_and_digest(settings: Callable[..., DataConfig]) -> None:
    config = settings()
    data = load_data(config, **SHAPE)
    line = data.describe()
    assert "\n" not in line
    for part in (config.source, "90 documents", "3 domains (hill, sea, town)", "tokens", "held out", data.digest):
        assert part in line


def test_description_says_that_files_were_skipped(settings: Callable[..., DataConfig], corpus_folder: Path) -> None:
    (corpus_folder / "sea" / "bad.txt").write_bytes(b"\xff\xfe")
    assert "1 files skipped" in load_data(settings(), **SHAPE).describe()


def test_cached_tokens_equal_those_made_without_a_cache(
    settings: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch, cache_home: Path
) -> None:
    config = settings(tokenizer="bpe", bpe_vocab_size=320)
    cold, warm = (load_data(config, **SHAPE) for _ in range(2))
    assert len(list((cache_home / "atoll" / "tokens").glob("*/atoll_tokens.json"))) == 1
    monkeypatch.setattr(text_data, "cached_folder", lambda key, build: None)
    alone = load_data(config, **SHAPE)
    assert cold.digest == warm.digest == alone.digest
    assert cold.tokenizer.get_vocab() == alone.tokenizer.get_vocab()
    assert torch.equal(warm.stream(0).next_batch(8), alone.stream(0).next_batch(8))


def test_a_given_tokenizer_folder_is_used_and_told_apart(settings: Callable[..., DataConfig], tmp_path: Path) -> None:
    train_bpe(["harbour " * 50], vocab_size=270).save_pretrained(tmp_path / "a")
    byte_tokenizer().save_pretrained(tmp_path / "b")
    trained, plain, built_in = (
        load_data(settings(tokenizer=name), **SHAPE) for name in (str(tmp_path / "a"), str(tmp_path / "b"), "bytes")
    )
    assert trained.vocab_size < 270 + 1
    assert trained.digest != plain.digest
    assert plain.digest == built_in.digest


def test_held_out_text_does_not_train_the_tokenizer(
    settings: Callable[..., DataConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def spy(texts, *, vocab_size):
        seen.extend(texts)
        return train_bpe(seen, vocab_size=vocab_size)

    monkeypatch.setattr(text_data, "train_bpe", spy)
    load_data(settings(tokenizer="bpe", bpe_vocab_size=300), **SHAPE)
    assert 0 < len(seen) < 90


def test_python_corpus_loads_with_every_domain() -> None:
    data = load_data(DataConfig(max_bytes=300_000), sequence_length=64, num_replicas=4, seed=0)
    for domain in ("stdlib", "torch", "transformers", "numpy"):
        assert domain in data.describe()
    assert data.vocab_size == 259
    assert len(data.held_out) > 0


def test_a_corpus_of_one_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("too short to be cut, and to be both held out and trained on\n")
    with pytest.raises(DataError, match="replica 0 would get none") as caught:
        load_data(DataConfig(source=str(tmp_path)), sequence_length=8, num_replicas=1, seed=0)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize(
    ("changes", "num_replicas", "message"),
    [
        ({"shard": "iid"}, 10_000, "replicas=10000 is more than the shards"),
        ({"shard": "domain"}, 4, "replicas=4 is more than the 3 domains"),
        ({"shard": "cluster"}, 100, "replicas=100 is more than the"),
        ({"tokenizer": "unigram"}, 2, "'unigram' is not a folder here"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    settings: Callable[..., DataConfig], changes: dict, num_replicas: int, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_data(settings(**changes), sequence_length=32, num_replicas=num_replicas, seed=0)
    assert len(str(caught.value).splitlines()) <= 3
