"""Tokenised documents: in memory or on disk, one form for both.

On disk a folder of token shards is

    FOLDER/
      atoll_tokens.json        what is here; written last, so a folder without it is not a set of shards
      tokenizer/               loads with AutoTokenizer
      tokens-00000.npy         1-D uint16 or uint32: the ids of whole documents, each ended by the end-of-text id
      documents-00000.npy      uint64 [num_documents, 2]: where each document ends in the tokens; the hash of its text

with a header of

    {"format": "atoll-tokens", "version": 1, "tokenizer": "tokenizer", "dtype": "uint16", "vocab_size": 259,
     "shards": [{"tokens": "tokens-00000.npy", "documents": "documents-00000.npy", "domain": "stdlib",
                 "num_tokens": 1234567, "num_bytes": 1230000, "digest": "<xxh3_128 of both arrays>"}]}

A shard holds documents of one domain. Tokens are read memory-mapped: processes of one machine share the same pages, and
opening a set costs its document tables, whatever its size. The digests are those recorded when it was written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from atoll.data.corpus import Document, text_hash
from atoll.data.tokenizer import TokenIds, encode, load_tokenizer, token_dtype
from atoll.errors import DataError

HEADER = "atoll_tokens.json"
FORMAT, VERSION = "atoll-tokens", 1
SHARD_TOKENS = 2**27
ENCODE_CHARACTERS = 2**22  # text handed to the tokenizer at once: bounds the memory of encoding


@dataclass(frozen=True)
class TokenShard:
    """Whole documents of one domain.

    tokens: 1-D uint16 or uint32, perhaps memory-mapped. ends: int64 [num_documents], where each document ends in
    `tokens`. hashes: uint64 [num_documents], `text_hash` of each. num_bytes: UTF-8 bytes of their text.
    """

    domain: str
    tokens: TokenIds
    ends: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    num_bytes: int
    digest: str


class TokenStore:
    """All tokens of a corpus under one numbering, with a table of documents. Positions count over all shards in order.

    begins, lengths, domain_ids: int64 [num_documents]; hashes: uint64 [num_documents]; domains: their names.
    """

    def __init__(self, shards: Sequence[TokenShard]) -> None:
        if not any(len(shard.ends) for shard in shards):
            raise DataError("the corpus holds no document. Name a source that holds text.")
        self._arrays = [shard.tokens for shard in shards]
        self._bases = np.cumsum([0, *(len(array) for array in self._arrays)])
        self.domains = list(dict.fromkeys(shard.domain for shard in shards))
        begins = [np.concatenate([[0], shard.ends[:-1]]) for shard in shards]
        self.begins = np.concatenate([base + begin for base, begin in zip(self._bases, begins, strict=False)])
        self.lengths = np.concatenate([shard.ends - begin for shard, begin in zip(shards, begins, strict=True)])
        self.hashes = np.concatenate([shard.hashes for shard in shards])
        self.domain_ids = np.repeat(
            [self.domains.index(shard.domain) for shard in shards], [len(shard.ends) for shard in shards]
        )
        self.num_bytes = sum(shard.num_bytes for shard in shards)
        self._shard_digests = [(shard.domain, shard.digest) for shard in shards]

    @property
    def num_documents(self) -> int:
        return len(self.begins)

    @property
    def num_tokens(self) -> int:
        return int(self._bases[-1])

    @cached_property
    def digest(self) -> str:
        """xxh3_128 over the tokens, the ends of documents and the domains, in order."""
        state = xxhash.xxh3_128()
        for domain, digest in self._shard_digests:
            state.update(f"{domain}\0{digest}\n".encode())
        return state.hexdigest()

    def document(self, index: int) -> TokenIds:
        """The ids of one document, its end-of-text id included."""
        begin = int(self.begins[index])
        shard = int(np.searchsorted(self._bases, begin, side="right")) - 1
        begin -= int(self._bases[shard])
        return self._arrays[shard][begin : begin + int(self.lengths[index])]

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids at `positions`, of any shape, as int64."""
        if len(self._arrays) == 1:
            return self._arrays[0][positions].astype(np.int64)
        shards = np.searchsorted(self._bases, positions, side="right") - 1
        ids = np.empty(positions.shape, np.int64)
        for shard in np.unique(shards):
            inside = shards == shard
            ids[inside] = self._arrays[shard][positions[inside] - self._bases[shard]]
        return ids


def tokenize(documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast) -> list[TokenShard]:
    """Encode documents that are grouped by domain into one shard a domain, in memory."""
    return list(_shards(documents, tokenizer, shard_tokens=None))


def write_token_shards(
    folder: str | Path,
    documents: Iterable[Document],
    *,
    tokenizer: PreTrainedTokenizerFast,
    shard_tokens: int | None = SHARD_TOKENS,
) -> Path:
    """Encode `documents`, grouped by domain, into a folder that `data.source` may name, and return it.

    Documents are read as a stream: what is held in memory is one shard of about `shard_tokens` tokens. The header comes
    last and whole, so that an interrupted write is never taken for a set of shards.
    """
    root = Path(folder).expanduser()
    if (root / HEADER).exists():
        raise DataError(f"{str(root)!r} holds token shards already, which are never overwritten. Name another folder.")
    root.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(root / "tokenizer")
    entries = [
        _write_shard(root, number, shard) for number, shard in enumerate(_shards(documents, tokenizer, shard_tokens))
    ]
    header = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": "tokenizer",
        "dtype": token_dtype(tokenizer).name,
        "vocab_size": len(tokenizer),
        "shards": entries,
    }
    part = root / f"{HEADER}.part"
    part.write_text(json.dumps(header, indent=1), encoding="utf-8")
    os.replace(part, root / HEADER)
    return root


def is_token_folder(source: str) -> bool:
    """Whether `source` names a folder that `write_token_shards` has finished."""
    return (Path(source).expanduser() / HEADER).is_file()


def read_token_shards(folder: str | Path) -> tuple[list[TokenShard], PreTrainedTokenizerFast]:
    """Open a folder of token shards, memory-mapped, and its tokenizer. Raises `DataError` where it is not whole."""
    root = Path(folder).expanduser()
    header = _read_header(root)
    tokenizer = load_tokenizer(root / _plain_name(root, header["tokenizer"]))
    if len(tokenizer) != header["vocab_size"]:
        raise _broken(root, f"the tokenizer has {len(tokenizer)} ids, the header says {header['vocab_size']}")
    return [_read_shard(root, entry, header["dtype"]) for entry in header["shards"]], tokenizer


def _shards(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast, shard_tokens: int | None
) -> Iterator[TokenShard]:
    for domain, group in groupby(documents, key=lambda document: document.domain):
        pending: list[tuple[TokenIds, Document]] = []
        num_tokens = 0
        for ids, document in _encoded(group, tokenizer):
            pending.append((ids, document))
            num_tokens += len(ids)
            if shard_tokens is not None and num_tokens >= shard_tokens:
                yield _join(domain, pending)
                pending, num_tokens = [], 0
        if pending:
            yield _join(domain, pending)


def _encoded(documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[TokenIds, Document]]:
    """Encode in batches of about `ENCODE_CHARACTERS`, so that neither the texts nor the tokenizer's lists pile up."""
    batch: list[Document] = []
    num_characters = 0
    for document in documents:
        batch.append(document)
        num_characters += len(document.text)
        if num_characters >= ENCODE_CHARACTERS:
            yield from zip(encode(tokenizer, [item.text for item in batch]), batch, strict=True)
            batch, num_characters = [], 0
    yield from zip(encode(tokenizer, [item.text for item in batch]), batch, strict=True)


def _join(domain: str, encoded: Sequence[tuple[TokenIds, Document]]) -> TokenShard:
    tokens = np.concatenate([ids for ids, _ in encoded])
    ends = np.cumsum([len(ids) for ids, _ in encoded])
    hashes = np.array([text_hash(document.text) for _, document in encoded], np.uint64)
    num_bytes = sum(len(document.text.encode()) for _, document in encoded)
    return TokenShard(domain, tokens, ends, hashes, num_bytes, _digest(tokens, _table(ends, hashes)))


def _table(ends: NDArray[np.int64], hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.stack([ends.astype(np.uint64), hashes], axis=1)


def _digest(tokens: TokenIds, table: NDArray[np.uint64]) -> str:
    state = xxhash.xxh3_128(np.ascontiguousarray(tokens).view(np.uint8).data)
    state.update(np.ascontiguousarray(table).view(np.uint8).data)
    return state.hexdigest()


def _write_shard(root: Path, number: int, shard: TokenShard) -> dict[str, Any]:
    names = {"tokens": f"tokens-{number:05d}.npy", "documents": f"documents-{number:05d}.npy"}
    np.save(root / names["tokens"], shard.tokens, allow_pickle=False)
    np.save(root / names["documents"], _table(shard.ends, shard.hashes), allow_pickle=False)
    return {
        **names,
        "domain": shard.domain,
        "num_tokens": len(shard.tokens),
        "num_bytes": shard.num_bytes,
        "digest": shard.digest,
    }


def _read_header(root: Path) -> dict[str, Any]:
    try:
        header = json.loads((root / HEADER).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _broken(root, f"{HEADER} cannot be read ({error})") from error
    if not isinstance(header, dict) or (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        raise _broken(root, f"{HEADER} is not of format {FORMAT!r}, version {VERSION}")
    missing = {"tokenizer", "dtype", "vocab_size", "shards"} - header.keys()
    if missing:
        raise _broken(root, f"{HEADER} lacks {', '.join(sorted(missing))}")
    return header


def _read_shard(root: Path, entry: dict[str, Any], dtype: str) -> TokenShard:
    missing = {"tokens", "documents", "domain", "num_tokens", "num_bytes", "digest"} - entry.keys()
    if missing:
        raise _broken(root, f"a shard in {HEADER} lacks {', '.join(sorted(missing))}")
    tokens = _open_array(root, entry["tokens"])
    table = _open_array(root, entry["documents"])
    if tokens.ndim != 1 or tokens.dtype.name != dtype or len(tokens) != entry["num_tokens"]:
        raise _broken(root, f"{entry['tokens']} is not {entry['num_tokens']} ids of {dtype}")
    if table.ndim != 2 or table.shape[1] != 2 or table.dtype != np.uint64 or not _ends_fit(table[:, 0], len(tokens)):
        raise _broken(root, f"{entry['documents']} does not describe the {len(tokens)} ids of {entry['tokens']}")
    ends, hashes = table[:, 0].astype(np.int64), np.ascontiguousarray(table[:, 1])
    return TokenShard(entry["domain"], tokens, ends, hashes, entry["num_bytes"], entry["digest"])


def _ends_fit(ends: NDArray[np.uint64], num_tokens: int) -> bool:
    return len(ends) > 0 and int(ends[-1]) == num_tokens and bool((np.diff(ends.astype(np.int64), prepend=0) > 0).all())


def _open_array(root: Path, name: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(root / _plain_name(root, name), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise _broken(root, f"{name} cannot be opened ({error})") from error
    return array


def _plain_name(root: Path, name: str) -> str:
    """A header may name only what lies in its own folder."""
    if Path(name).name != name:
        raise _broken(root, f"{name!r} is not the plain name of a file in it")
    return name


def _broken(root: Path, reason: str) -> DataError:
    return DataError(
        f"the token shards in {str(root)!r} are not whole: {reason}.\nWrite them again with write_token_shards."
    )
