"""From text to token ids: bytes (no training), byte-level BPE trained on the corpus, or a tokenizer folder.

Every tokenizer is a fast tokenizer of transformers, so that what is saved with a model loads with `AutoTokenizer`. The
byte tokenizer has 259 ids: a byte is its own id, then beginning of text, end of text and padding. Any UTF-8 text comes
back exactly, and text that happens to spell a special token is still only text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from atoll.errors import DataError

TokenIds = NDArray[np.unsignedinteger]

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL_TOKENS = (BOS, EOS, PAD)
NUM_BYTES = 256
TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the 256 bytes and three special tokens, which needs no training.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer("né")["input_ids"]
    [110, 195, 169]
    >>> tokenizer.decode([110, 195, 169])
    'né'
    >>> len(tokenizer), tokenizer.eos_token_id
    (259, 257)
    """
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _wrap(tokenizer)


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` ids, special tokens included; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer)


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in `folder`, by way of `AutoTokenizer`. Raises `DataError` where it cannot be used."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise DataError(
            f"data.tokenizer={str(folder)!r} is not a folder here. It must be 'bytes', 'bpe' or the folder of a saved "
            "tokenizer.\nNothing is fetched: save one first with tokenizer.save_pretrained(FOLDER)."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"data.tokenizer={str(folder)!r} cannot be loaded: {reason}\nSave it again.") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise DataError(
            f"the tokenizer in {str(folder)!r} is no fast tokenizer (tokenizer.json). Convert and save it again."
        )
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer in {str(folder)!r} has no end-of-text token, which separates documents.\n"
            "Set tokenizer.eos_token and save it again."
        )
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[TokenIds]:
    """The ids of each text followed by the end-of-text id: 1-D arrays of `token_dtype(tokenizer)`.

    >>> [ids.tolist() for ids in encode(byte_tokenizer(), ["hi", ""])]
    [[104, 105, 257], [257]]
    """
    dtype, eos = token_dtype(tokenizer), tokenizer.eos_token_id
    if is_byte_tokenizer(tokenizer):
        return [_encode_bytes(text, dtype, eos) for text in texts]
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return [np.array([*ids, eos], dtype=dtype) for ids in encoded]


def is_byte_tokenizer(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether each byte is its own id, so that text is encoded by a copy of its bytes."""
    return len(tokenizer) == NUM_BYTES + len(SPECIAL_TOKENS) and tokenizer.convert_ids_to_tokens(
        list(range(len(tokenizer)))
    ) == [*_byte_symbols(), *SPECIAL_TOKENS]


def token_dtype(tokenizer: PreTrainedTokenizerFast) -> np.dtype[np.unsignedinteger]:
    """uint16 where every id fits in it, else uint32."""
    return np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)


PROBE = "Grüße, 世界!  def f(x):\n\treturn 3.14 + x\r\n"


def same_tokenizer(one: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> bool:
    """Whether ids mean the same to both: equal vocabularies, equal ends of text, and equal ids of a text for trial.

    >>> same_tokenizer(byte_tokenizer(), byte_tokenizer())
    True
    """
    if one.get_vocab() != other.get_vocab() or one.eos_token_id != other.eos_token_id:
        return False
    ids = [tokenizer(PROBE, add_special_tokens=False)["input_ids"] for tokenizer in (one, other)]
    return bool(ids[0] == ids[1])


def tokenizer_digest(folder: str | Path) -> str:
    """xxh3_128 over the files that make up the tokenizer saved in `folder`."""
    state = xxhash.xxh3_128()
    root = Path(folder).expanduser()
    for path in sorted({path for pattern in TOKENIZER_FILES for path in root.glob(pattern)}):
        state.update(path.name.encode())
        state.update(path.read_bytes())
    return state.hexdigest()


def _encode_bytes(text: str, dtype: np.dtype[np.unsignedinteger], eos: int) -> TokenIds:
    data = text.encode()
    ids = np.empty(len(data) + 1, dtype)
    ids[:-1] = np.frombuffer(data, np.uint8)
    ids[-1] = eos
    return ids


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    stand_ins = {byte: NUM_BYTES + rank for rank, byte in enumerate(others)}
    return [chr(stand_ins.get(byte, byte)) for byte in range(NUM_BYTES)]
