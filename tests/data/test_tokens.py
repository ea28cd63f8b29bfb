import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.data import load_data, write_token_shards
from atoll.data.corpus import Document, read_corpus
from atoll.data.tokenizer import byte_tokenizer, train_bpe
from atoll.data.tokens import HEADER, TokenStore, read_token_shards, tokenize
from atoll.errors import DataError
from atoll.train.config import DataConfig


@pytest.fixture
def documents(corpus_folder: Path) -> list[Document]:
    return read_corpus(str(corpus_folder), max_bytes=10**6).documents


@pytest.fixture
def folder(tmp_path: Path, documents: list[Document]) -> Path:
    return write_token_shards(tmp_path / "tokens", documents, tokenizer=byte_tokenizer())


def test_shards_read_back_are_the_shards_in_memory(folder: Path, documents: list[Document]) -> None:
    shards, tokenizer = read_token_shards(folder)
    on_disk, in_memory = TokenStore(shards), TokenStore(tokenize(documents, byte_tokenizer()))
    assert tokenizer.get_vocab() == byte_tokenizer().get_vocab()
    assert on_disk.digest == in_memory.digest
    assert on_disk.domains == in_memory.domains == ["hill", "sea", "town"]
    assert on_disk.num_bytes == in_memory.num_bytes == sum(len(document.text.encode()) for document in documents)
    for index, document in enumerate(documents):
        assert bytes(on_disk.document(index)[:-1].astype(np.uint8)).decode() == document.text


def test_tokens_are_memory_mapped(folder: Path) -> None:
    assert all(isinstance(shard.tokens, np.memmap) for shard in read_token_shards(folder)[0])


def test_many_small_shards_hold_the_same_tokens(tmp_path: Path, documents: list[Document]) -> None:
    write_token_shards(tmp_path / "small", documents, tokenizer=byte_tokenizer(), shard_tokens=2000)
    shards, _ = read_token_shards(tmp_path / "small")
    assert len(shards) > 6
    small, whole = TokenStore(shards), TokenStore(tokenize(documents, byte_tokenizer()))
    positions = np.random.default_rng(0).integers(0, whole.num_tokens, (5, 300))
    assert np.array_equal(small.take(positions), whole.take(positions))
    assert np.array_equal(small.lengths, whole.lengths)


def test_a_folder_of_shards_trains_as_its_text_does(folder: Path, settings: Callable[..., DataConfig]) -> None:
    for shard in ("iid", "domain"):
        text, tokens = (
            load_data(config, sequence_length=32, num_replicas=3, seed=4)
            for config in (settings(shard=shard), settings(shard=shard, source=str(folder)))
        )
        assert text.digest == tokens.digest
        assert torch.equal(text.held_out, tokens.held_out)
        assert torch.equal(text.stream(1).next_batch(9), tokens.stream(1).next_batch(9))


def test_another_tokenizer_on_tokenised_text_is_refused(folder: Path, settings: Callable[..., DataConfig]) -> None:
    with pytest.raises(DataError, match="tokenised already"):
        load_data(settings(source=str(folder), tokenizer="bpe"), sequence_length=32, num_replicas=1, seed=0)


def test_shards_carry_their_own_tokenizer(tmp_path: Path, documents: list[Document]) -> None:
    tokenizer = train_bpe([document.text for document in documents], vocab_size=300)
    write_token_shards(tmp_path / "bpe", documents, tokenizer=tokenizer)
    data = load_data(DataConfig(source=str(tmp_path / "bpe")), sequence_length=16, num_replicas=1, seed=0)
    assert data.vocab_size == 300
    assert data.tokenizer.decode(data.held_out[0]).isascii()


def test_shards_are_never_overwritten(folder: Path, documents: list[Document]) -> None:
    with pytest.raises(DataError, match="never overwritten"):
        write_token_shards(folder, documents, tokenizer=byte_tokenizer())


def test_an_interrupted_write_is_no_set_of_shards(tmp_path: Path, documents: list[Document]) -> None:
    def interrupted():
        yield from documents[:30]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_token_shards(tmp_path / "part", interrupted(), tokenizer=byte_tokenizer(), shard_tokens=1000)
    with pytest.raises(DataError, match="not whole"):
        read_token_shards(tmp_path / "part")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def change_header(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "damage",
    [
        lambda root: cut_short(root / "tokens-00000.npy"),
        lambda root: cut_short(root / "documents-00001.npy"),
        lambda root: cut_short(root / HEADER),
        lambda root: (root / "tokens-00002.npy").unlink(),
        lambda root: (root / "documents-00000.npy").write_bytes((root / "documents-00001.npy").read_bytes()),
        lambda root: change_header(root / HEADER, version=2),
        lambda root: change_header(root / HEADER, dtype="uint32"),
        lambda root: change_header(root / HEADER, vocab_size=300),
        lambda root: change_header(root / HEADER, shards=[{"tokens": "tokens-00000.npy"}]),
        lambda root: change_header(root / HEADER, tokenizer="../elsewhere"),
    ],
)
def test_damaged_shards_are_refused_in_three_lines(folder: Path, damage: Callable[[Path], object]) -> None:
    damage(folder)
    with pytest.raises(DataError, match="not whole") as caught:
        read_token_shards(folder)
    assert len(str(caught.value).splitlines()) <= 3


def test_no_document_at_all_is_refused(tmp_path: Path) -> None:
    write_token_shards(tmp_path / "none", [], tokenizer=byte_tokenizer())
    with pytest.raises(DataError, match="no document"):
        load_data(DataConfig(source=str(tmp_path / "none")), sequence_length=8, num_replicas=1, seed=0)
