from pathlib import Path

import numpy as np
import pytest

from atoll.data.corpus import read_corpus
from atoll.data.shards import (
    PackedDocuments,
    Shard,
    balance,
    check_shards,
    share_by_cluster,
    share_by_domain,
    share_iid,
    split_held_out,
)
from atoll.data.tokenizer import byte_tokenizer
from atoll.data.tokens import TokenStore, tokenize
from atoll.errors import DataError

LENGTH = 32


@pytest.fixture
def store(corpus_folder: Path) -> TokenStore:
    return TokenStore(tokenize(read_corpus(str(corpus_folder), max_bytes=10**6).documents, byte_tokenizer()))


def read_all(shard: Shard) -> list[bytes]:
    return [bytes(row.numpy().astype(np.uint16)) for row in shard.packed.read(shard.rows)]


def test_packing_is_the_documents_end_to_end_cut_into_windows(store: TokenStore) -> None:
    documents = np.array([5, 1, 60, 89, 2])
    packed = PackedDocuments(store, documents, sequence_length=LENGTH)
    joined = np.concatenate([store.document(index) for index in documents])
    expected = joined[: len(joined) // LENGTH * LENGTH].reshape(-1, LENGTH)
    assert np.array_equal(packed.read(np.arange(packed.num_sequences)).numpy(), expected)


def test_held_out_documents_are_never_trained_on(store: TokenStore) -> None:
    train, held_out = split_held_out(store, percent=10, sequence_length=LENGTH)
    assert sorted([*train, *held_out]) == list(range(store.num_documents))
    assert 1 <= len(held_out) <= 20


def test_held_out_is_decided_by_the_text_alone(store: TokenStore, corpus_folder: Path) -> None:
    _, held_out = split_held_out(store, percent=10, sequence_length=LENGTH)
    (corpus_folder / "town" / "new.txt").write_text("a text that was not there before\n")
    more = TokenStore(tokenize(read_corpus(str(corpus_folder), max_bytes=10**6).documents, byte_tokenizer()))
    _, held_out_now = split_held_out(more, percent=10, sequence_length=LENGTH)
    assert {bytes(store.document(i)) for i in held_out} <= {bytes(more.document(i)) for i in held_out_now}


def test_equal_texts_are_on_one_side(corpus_folder: Path) -> None:
    for number in range(20):
        (corpus_folder / "town" / f"copy{number}.txt").write_text((corpus_folder / "sea" / "003.txt").read_text())
    store = TokenStore(tokenize(read_corpus(str(corpus_folder), max_bytes=10**6).documents, byte_tokenizer()))
    train, held_out = split_held_out(store, percent=30, sequence_length=LENGTH)
    assert not set(store.hashes[train]) & set(store.hashes[held_out])


def test_a_tiny_corpus_still_holds_out_a_sequence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789\n" * 200)
    store = TokenStore(tokenize(read_corpus(str(tmp_path), max_bytes=10**6).documents, byte_tokenizer()))
    _, held_out = split_held_out(store, percent=0.001, sequence_length=600)
    assert store.lengths[held_out].sum() >= 600


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7])
def test_iid_shards_are_disjoint_even_and_cover_all(store: TokenStore, num_replicas: int) -> None:
    packed = PackedDocuments(store, np.arange(store.num_documents), sequence_length=LENGTH)
    shards = share_iid(packed, num_replicas=num_replicas, seed=0)
    rows = np.concatenate([shard.rows for shard in shards])
    assert np.array_equal(np.sort(rows), np.arange(packed.num_sequences))
    assert max(shard.num_examples for shard in shards) - min(shard.num_examples for shard in shards) <= 1


def test_iid_shards_hold_every_domain(store: TokenStore) -> None:
    packed = PackedDocuments(store, np.arange(store.num_documents), sequence_length=LENGTH)
    for shard in share_iid(packed, num_replicas=3, seed=0):
        text = b"".join(read_all(shard))
        assert all(word.encode("utf-16-le") in text for word in ("reef", "goat", "tram"))


def test_domain_shards_hold_their_domains_only(store: TokenStore) -> None:
    shards = share_by_domain(store, np.arange(store.num_documents), num_replicas=3, sequence_length=LENGTH)
    for shard in shards:
        assert len(set(store.domain_ids[shard.packed.documents])) == 1
    documents = np.concatenate([shard.packed.documents for shard in shards])
    assert sorted(documents) == list(range(store.num_documents))


def test_domains_are_balanced_by_size(store: TokenStore) -> None:
    shards = share_by_domain(store, np.arange(store.num_documents), num_replicas=2, sequence_length=LENGTH)
    sizes = [int(store.lengths[shard.packed.documents].sum()) for shard in shards]
    assert max(sizes) < 1.5 * min(sizes)
    assert balance([8, 7, 6, 5, 4], 2) == [0, 1, 1, 0, 0]


def test_more_replicas_than_domains_names_the_way_out(store: TokenStore) -> None:
    with pytest.raises(DataError, match="replicas=4 is more than the 3 domains") as caught:
        share_by_domain(store, np.arange(store.num_documents), num_replicas=4, sequence_length=LENGTH)
    assert "at most 3" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


def test_clusters_find_the_documents_that_share_words(store: TokenStore) -> None:
    pytest.importorskip("sklearn")
    texts = [bytes(store.document(i)[:-1].astype(np.uint8)).decode() for i in range(store.num_documents)]
    shares = [
        share_by_cluster(store, np.arange(len(texts)), texts=texts, num_replicas=3, sequence_length=LENGTH, seed=seed)
        for seed in (0, 0)
    ]
    domains = [set(store.domain_ids[shard.packed.documents]) for shard in shares[0]]
    assert sorted(map(len, domains)) == [1, 1, 1]
    for first, again in zip(*shares, strict=True):
        assert np.array_equal(first.packed.documents, again.packed.documents)


def test_more_clusters_than_documents_is_refused(store: TokenStore) -> None:
    with pytest.raises(DataError, match="replicas=3 is more than the 2 training documents"):
        share_by_cluster(store, np.arange(2), texts=["a", "b"], num_replicas=3, sequence_length=LENGTH, seed=0)


def test_a_replica_without_a_sequence_is_refused(store: TokenStore) -> None:
    packed = PackedDocuments(store, np.array([0]), sequence_length=LENGTH)
    shards = share_iid(packed, num_replicas=packed.num_sequences + 1, seed=0)
    with pytest.raises(DataError, match=f"replicas={packed.num_sequences + 1} is more than the shards") as caught:
        check_shards(shards, sequence_length=LENGTH)
    assert len(str(caught.value).splitlines()) <= 3
