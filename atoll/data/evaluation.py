"""Text to evaluate a finished model on, and how many bytes of it the model predicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from atoll.data import hub
from atoll.data.corpus import Document, read_corpus
from atoll.data.shards import is_held_out, pack_held_out, split_held_out
from atoll.data.tokenizer import same_tokenizer
from atoll.data.tokens import TokenShard, TokenStore, is_token_folder, read_token_shards, tokenize
from atoll.errors import DataError

if TYPE_CHECKING:
    from atoll.train.config import DataConfig

SPLITS = ("heldout", "all")


def load_sequences(
    config: DataConfig, tokenizer: PreTrainedTokenizerFast, *, split: str, sequence_length: int
) -> Tensor:
    """Sequences of the text that `config` names, int64 [num_sequences, sequence_length], in the model's own tokens.

    split: "heldout", the documents that training on `config` leaves out; or "all". At most about 4 million tokens.

    Raises DataError where there is not one whole sequence, or where shards hold the tokens of another tokenizer.
    """
    store = TokenStore(_shards(config, tokenizer))
    documents = np.arange(store.num_documents)
    if split == "heldout" and config.source.startswith(hub.PREFIX):
        documents = np.flatnonzero(is_held_out(store.hashes, config.held_out_percent))
    elif split == "heldout":
        documents = split_held_out(store, percent=config.held_out_percent, sequence_length=sequence_length)[1]
    sequences = pack_held_out(store, documents, sequence_length=sequence_length)
    if not len(sequences):
        raise DataError(
            f"the {split} text of {config.source!r} makes no sequence of {sequence_length} tokens. Use --split all, "
            "a shorter --sequence-length, or more text."
        )
    return sequences


def predicted_bytes(tokenizer: PreTrainedTokenizerFast, sequences: Tensor) -> int:
    """UTF-8 bytes of the text that the tokens from the second on stand for; special tokens stand for none.

    Exact for byte-level tokenizers, whose tokens are runs of bytes. Others are decoded a sequence at a time, which may
    miss a space or a part of a character at its ends.

    >>> from atoll.data.tokenizer import byte_tokenizer
    >>> predicted_bytes(byte_tokenizer(), torch.tensor([[110, 195, 169, 257]]))  # "né", end of text
    2
    """
    predicted = sequences[:, 1:]
    if not _is_byte_level(tokenizer):
        return sum(len(text.encode()) for text in tokenizer.batch_decode(predicted, skip_special_tokens=True))
    special = set(tokenizer.all_special_ids)
    symbols = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    sizes = [0 if number in special else len(symbol or "") for number, symbol in enumerate(symbols)]
    return int(torch.tensor(sizes)[predicted].sum())


def _is_byte_level(tokenizer: PreTrainedTokenizerFast) -> bool:
    decoder = json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder")
    return decoder is not None and decoder["type"] == "ByteLevel"


def _shards(config: DataConfig, tokenizer: PreTrainedTokenizerFast) -> list[TokenShard]:
    if not is_token_folder(config.source):
        return tokenize(_documents(config), tokenizer)
    shards, theirs = read_token_shards(config.source)
    if not same_tokenizer(tokenizer, theirs):
        raise DataError(
            f"the token shards in {config.source!r} were made by another tokenizer than the model's. Name the text "
            "itself."
        )
    return shards


def _documents(config: DataConfig) -> Sequence[Document]:
    if not config.source.startswith(hub.PREFIX):
        return read_corpus(config.source, max_bytes=config.max_bytes).documents
    name = config.source.removeprefix(hub.PREFIX)
    source = hub.HubSource(name, config.hf_split, config.hf_text_column, config.held_out_percent)
    return source.head(config.max_bytes).documents
