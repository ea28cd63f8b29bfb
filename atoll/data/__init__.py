"""Text to batches: corpora, tokenizers, shards for the replicas, and streams with a position that can be saved."""

from atoll.data.corpus import Corpus, Document, read_corpus
from atoll.data.stream import TokenStream
from atoll.data.text_data import TextData, load_data
from atoll.data.tokenizer import byte_tokenizer, load_tokenizer, train_bpe
from atoll.data.tokens import write_token_shards

__all__ = [
    "Corpus",
    "Document",
    "TextData",
    "TokenStream",
    "byte_tokenizer",
    "load_data",
    "load_tokenizer",
    "read_corpus",
    "train_bpe",
    "write_token_shards",
]
