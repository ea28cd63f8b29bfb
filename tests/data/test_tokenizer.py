import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from atoll.data.tokenizer import byte_tokenizer, encode, is_byte_tokenizer, load_tokenizer, token_dtype, train_bpe
from atoll.errors import DataError

ODD_TEXTS = [
    "",
    "plain text",
    " two  spaces \t tab \r\n line ends \n\n",
    "a , b . c ' s don't",
    "é ñ ü ß Ж 漢字 한글 עברית",
    "emoji 👩‍👩‍👧‍👦 🏴󠁧󠁢󠁷󠁬󠁳󠁿 combining e\u0301 é",
    "\0\x01\x7f\x80\u200b\ufeff\u2028\uffff\U0010ffff",
    "special <|eos|> and <|bos|><|pad|> spelled out",
    "".join(chr(i) for i in range(0x20, 0x250)),
]
CORPUS = ["def add(left, right):\n    return left + right\n", "class Reef:\n    pass\n"] * 20


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_byte_tokenizer_gives_back_any_text_exactly(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_bpe_gives_back_any_text_exactly(text: str) -> None:
    tokenizer = train_bpe(CORPUS, vocab_size=300)
    [ids] = encode(tokenizer, [text])
    assert tokenizer.decode(ids[:-1].tolist()) == text


def test_fast_path_equals_the_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    for text, ids in zip(ODD_TEXTS, encode(tokenizer, ODD_TEXTS), strict=True):
        assert ids.tolist() == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


@pytest.mark.parametrize("make", [byte_tokenizer, lambda: train_bpe(CORPUS, vocab_size=300)])
def test_saved_tokenizer_loads_with_auto_tokenizer_and_is_equal(make, tmp_path: Path) -> None:
    tokenizer = make()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    for text in ODD_TEXTS:
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert is_byte_tokenizer(loaded) == is_byte_tokenizer(tokenizer)


def test_bpe_is_determined_by_its_corpus() -> None:
    first, again = (train_bpe(CORPUS, vocab_size=320).backend_tokenizer.to_str() for _ in range(2))
    assert first == again


def test_bpe_keeps_to_its_vocabulary_with_special_tokens_counted() -> None:
    tokenizer = train_bpe(CORPUS, vocab_size=280)
    assert len(tokenizer) == 280
    assert not is_byte_tokenizer(tokenizer)
    assert len(encode(tokenizer, CORPUS[:1])[0]) < len(CORPUS[0])


def test_ids_are_as_small_as_the_vocabulary_allows() -> None:
    assert token_dtype(byte_tokenizer()) == np.uint16
    assert encode(byte_tokenizer(), ["x"])[0].dtype == np.uint16


def test_a_name_that_is_no_folder_is_refused_without_asking_the_network(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'gpt2' is not a folder here"):
        load_tokenizer("gpt2")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_tokenizer_without_an_end_of_text_token_is_refused(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    path.write_text(json.dumps(config))
    with pytest.raises(DataError, match="no end-of-text token"):
        load_tokenizer(tmp_path)
