"""One call from settings to data: the corpus tokenised, a part held out, the rest shared out among the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tokenizers
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from atoll.data import hub
from atoll.data.cache import cached_folder
from atoll.data.corpus import Corpus, read_corpus, text_hash
from atoll.data.shards import (
    PackedDocuments,
    Shard,
    check_shards,
    is_held_out,
    pack_held_out,
    share_by_cluster,
    share_by_domain,
    share_iid,
    split_held_out,
)
from atoll.data.stream import ShardStream, State, TokenStream
from atoll.data.tokenizer import byte_tokenizer, load_tokenizer, tokenizer_digest, train_bpe
from atoll.data.tokens import (
    TokenShard,
    TokenStore,
    is_token_folder,
    read_token_shards,
    tokenize,
    write_token_shards,
)
from atoll.errors import DataError

if TYPE_CHECKING:
    from atoll.train.config import DataConfig

CACHE_VERSION = 1  # raised when the same settings give other tokens
CLUSTER_TOKENS = 2048  # tokens at the beginning of a document by which it is put into a cluster


@dataclass(frozen=True)
class Split:
    """How the run cuts the tokens up and among how many."""

    sequence_length: int
    num_replicas: int
    seed: int


class TextData:
    """The data of a run.

    tokenizer: the fast tokenizer that made the ids.
    digest: hex, of the token content and its order; where documents were clustered, of the clusters too.
    held_out: int64 [num_sequences, sequence_length], of documents never trained on.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerFast,
        digest: str,
        held_out: Tensor,
        summary: str,
        streams: Sequence[Callable[[], TokenStream]],
    ) -> None:
        self.tokenizer = tokenizer
        self.digest = digest
        self.held_out = held_out
        self._summary = summary
        self._streams = streams

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    def describe(self) -> str:
        """One line: source, documents, domains, bytes and tokens, held out, digest."""
        return f"{self._summary}; {len(self.held_out):,} sequences held out; digest {self.digest}"

    def stream(self, replica: int) -> TokenStream:
        """A new stream over the shard of `replica`, at its beginning."""
        if not 0 <= replica < len(self._streams):
            raise DataError(f"replica={replica} has no shard: there are {len(self._streams)}, counted from 0.")
        return self._streams[replica]()

    def num_examples(self, replica: int) -> int:
        """Sequences in the shard of `replica` (for a streamed data set: in its part of the head)."""
        return self.stream(replica).num_examples


def load_data(config: DataConfig, *, sequence_length: int, num_replicas: int, seed: int) -> TextData:
    """Read, tokenise, hold out and share out as `config` says; the same settings and files give the same data anywhere.

    Raises `DataError` where the source, the tokenizer or the number of replicas cannot be used.
    """
    split = Split(sequence_length, num_replicas, seed)
    if config.source.startswith(hub.PREFIX):
        return _load_hub(config, split)
    shards, tokenizer, note = _load_tokens(config)
    store = TokenStore(shards)
    train, held_out = split_held_out(store, percent=config.held_out_percent, sequence_length=sequence_length)
    parts = _share_out(config, split, store=store, documents=train, tokenizer=tokenizer)
    check_shards(parts, sequence_length=sequence_length)
    digest = _digest(store, parts, shard=config.shard)
    return TextData(
        tokenizer=tokenizer,
        digest=digest,
        held_out=pack_held_out(store, held_out, sequence_length=sequence_length),
        summary=_summary(config, store, vocab_size=len(tokenizer), note=note),
        streams=[
            partial(ShardStream, part, identity=_identity(config, split, digest=digest, replica=replica))
            for replica, part in enumerate(parts)
        ],
    )


def _load_tokens(config: DataConfig) -> tuple[list[TokenShard], PreTrainedTokenizerFast, str]:
    """Tokens of a source that is read as a whole, their tokenizer, and what is worth saying about the reading."""
    if is_token_folder(config.source):
        if config.tokenizer != "bytes":
            raise DataError(
                f"data.tokenizer={config.tokenizer!r} cannot be applied to data.source={config.source!r}, which is "
                "tokenised already.\nLeave data.tokenizer out: the tokenizer saved with the shards is used."
            )
        return *read_token_shards(config.source), ""
    corpus = read_corpus(config.source, max_bytes=config.max_bytes)
    note = f", {corpus.num_skipped} files skipped (not UTF-8 text)" if corpus.num_skipped else ""
    return *_tokenize_corpus(corpus, config), note


def _tokenize_corpus(corpus: Corpus, config: DataConfig) -> tuple[list[TokenShard], PreTrainedTokenizerFast]:
    """Bytes are encoded on the spot; the work of other tokenizers is kept for the next run and the other processes."""
    if config.tokenizer == "bytes":
        tokenizer = byte_tokenizer()
        return tokenize(corpus.documents, tokenizer), tokenizer

    def build(folder: Path) -> None:
        write_token_shards(folder, corpus.documents, tokenizer=_make_tokenizer(corpus, config), shard_tokens=None)

    folder = cached_folder(f"tokens/{_cache_key(corpus, config)}", build)
    if folder is not None:
        return read_token_shards(folder)
    tokenizer = _make_tokenizer(corpus, config)
    return tokenize(corpus.documents, tokenizer), tokenizer


def _make_tokenizer(corpus: Corpus, config: DataConfig) -> PreTrainedTokenizerFast:
    if config.tokenizer == "bytes":
        return byte_tokenizer()
    if config.tokenizer != "bpe":
        return load_tokenizer(config.tokenizer)
    hashes = np.array([text_hash(document.text) for document in corpus.documents], np.uint64)
    held_out = is_held_out(hashes, config.held_out_percent)
    texts = (document.text for document, out in zip(corpus.documents, held_out, strict=True) if not out)
    return train_bpe(texts, vocab_size=config.bpe_vocab_size)


def _cache_key(corpus: Corpus, config: DataConfig) -> str:
    """Everything that the tokens follow from."""
    if config.tokenizer == "bpe":
        made_by = f"bpe {config.bpe_vocab_size} {config.held_out_percent}"
    else:
        made_by = tokenizer_digest(config.tokenizer)
    parts = [str(CACHE_VERSION), tokenizers.__version__, made_by, corpus.digest()]
    return xxhash.xxh3_128_hexdigest("\n".join(parts).encode())


def _share_out(
    config: DataConfig,
    split: Split,
    *,
    store: TokenStore,
    documents: NDArray[np.int64],
    tokenizer: PreTrainedTokenizerFast,
) -> list[Shard]:
    length, num_replicas = split.sequence_length, split.num_replicas
    if config.shard == "domain":
        return share_by_domain(store, documents, num_replicas=num_replicas, sequence_length=length)
    if config.shard == "cluster":
        texts = tokenizer.batch_decode([store.document(index)[:CLUSTER_TOKENS].tolist() for index in documents])
        return share_by_cluster(
            store, documents, texts=texts, num_replicas=num_replicas, sequence_length=length, seed=split.seed
        )
    packed = PackedDocuments(store, documents, sequence_length=length)
    return share_iid(packed, num_replicas=num_replicas, seed=split.seed)


def _digest(store: TokenStore, parts: Sequence[Shard], *, shard: str) -> str:
    """The digest of the tokens; with clusters also of who holds which document, which machines must agree on."""
    if shard != "cluster":
        return store.digest
    state = xxhash.xxh3_128(store.digest.encode())
    for part in parts:
        state.update(part.packed.documents.astype("<i8").tobytes())
    return state.hexdigest()


def _identity(config: DataConfig, split: Split, *, digest: str, replica: int) -> State:
    """What must be equal for a position in the stream of `replica` to mean the same samples."""
    return {
        "digest": digest,
        "sequence_length": split.sequence_length,
        "seed": split.seed,
        "shard": config.shard,
        "held_out_percent": config.held_out_percent,
        "replica": replica,
        "num_replicas": split.num_replicas,
    }


def _summary(config: DataConfig, store: TokenStore, *, vocab_size: int, note: str) -> str:
    domains = ", ".join(store.domains[:6]) + (", ..." if len(store.domains) > 6 else "")
    return (
        f"{config.source}: {store.num_documents:,} documents in {len(store.domains)} domains ({domains}), "
        f"{store.num_bytes / 1e6:.1f} MB, {store.num_tokens:,} tokens of {vocab_size:,} kinds{note}"
    )


def _load_hub(config: DataConfig, split: Split) -> TextData:
    if config.shard != "iid":
        raise DataError(
            f"data.shard={config.shard!r} needs the whole corpus, and {config.source!r} is streamed.\n"
            "Use data.shard='iid', or write the corpus with atoll.data.write_token_shards and name that folder."
        )
    name = config.source.removeprefix(hub.PREFIX)
    source = hub.HubSource(name, config.hf_split, config.hf_text_column, config.held_out_percent)
    head = source.head(config.max_bytes)
    tokenizer = _hub_tokenizer(head, config)
    store = TokenStore(tokenize(head.documents, tokenizer))
    is_out = is_held_out(store.hashes, config.held_out_percent)
    num_examples = int(store.lengths[~is_out].sum()) // split.sequence_length // split.num_replicas
    held_out = pack_held_out(store, np.flatnonzero(is_out), sequence_length=split.sequence_length)
    _check_head(config, split, num_documents=store.num_documents, num_sequences=min(num_examples, len(held_out)))
    digest = xxhash.xxh3_128_hexdigest(f"{config.hf_split}\0{config.hf_text_column}\0{store.digest}".encode())
    return TextData(
        tokenizer=tokenizer,
        digest=digest,
        held_out=held_out,
        summary=_summary(config, store, vocab_size=len(tokenizer), note=" in the head, streamed on"),
        streams=[
            partial(
                hub.HubStream,
                source,
                tokenizer,
                num_examples=num_examples,
                identity=_identity(config, split, digest=digest, replica=replica),
            )
            for replica in range(split.num_replicas)
        ],
    )


def _check_head(config: DataConfig, split: Split, *, num_documents: int, num_sequences: int) -> None:
    if num_sequences == 0:
        raise DataError(
            f"the first data.max_bytes={config.max_bytes} bytes of {config.source!r} ({num_documents} documents) make "
            f"no held-out sequence, or none for some of {split.num_replicas} replicas, of "
            f"sequence_length={split.sequence_length}.\n"
            "Raise data.max_bytes or data.held_out_percent, or use fewer replicas or shorter sequences."
        )


def _hub_tokenizer(head: Corpus, config: DataConfig) -> PreTrainedTokenizerFast:
    """As `_make_tokenizer`, with a trained one kept for the next run and the other processes."""
    if config.tokenizer != "bpe":
        return _make_tokenizer(head, config)

    def build(folder: Path) -> None:
        _make_tokenizer(head, config).save_pretrained(folder)

    folder = cached_folder(f"tokenizers/{_cache_key(head, config)}", build)
    return load_tokenizer(folder) if folder is not None else _make_tokenizer(head, config)
