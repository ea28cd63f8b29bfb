import os
from pathlib import Path

import pytest

from atoll.data.corpus import Document, cut_text, read_corpus, share_bytes
from atoll.errors import DataError


def test_python_corpus_has_a_domain_a_package_and_shares_the_bytes_evenly() -> None:
    corpus = read_corpus("python", max_bytes=400_000)
    bytes_of: dict[str, int] = {}
    for document in corpus.documents:
        bytes_of[document.domain] = bytes_of.get(document.domain, 0) + len(document.text.encode())
    assert bytes_of.keys() >= {"stdlib", "torch", "transformers", "numpy"}
    assert sum(bytes_of.values()) <= 400_000
    assert min(bytes_of.values()) > 90_000


def test_python_corpus_is_the_same_whatever_order_the_disk_lists_files_in(monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_corpus("python", max_bytes=200_000)
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: reversed(list(scandir(path))))
    again = read_corpus("python", max_bytes=200_000)
    assert again.documents == first.documents
    assert again.digest() == first.digest()


def test_documents_are_sorted_by_domain_then_name(corpus_folder: Path) -> None:
    keys = [(document.domain, document.name) for document in read_corpus(str(corpus_folder), max_bytes=10**6).documents]
    assert keys == sorted(keys)


def test_each_top_level_folder_is_a_domain_and_loose_files_are_one_more(corpus_folder: Path) -> None:
    (corpus_folder / "notes.txt").write_text("loose\n")
    documents = read_corpus(str(corpus_folder), max_bytes=10**6).documents
    assert {document.domain for document in documents} == {"sea", "hill", "town", "corpus"}


def test_a_cap_takes_files_from_all_over_a_domain(corpus_folder: Path) -> None:
    names = [d.name for d in read_corpus(str(corpus_folder), max_bytes=9_000).documents if d.domain == "sea"]
    assert 3 <= len(names) < 40
    assert max(names) > "010.txt"


def test_digest_follows_content_and_order(corpus_folder: Path) -> None:
    before = read_corpus(str(corpus_folder), max_bytes=10**6).digest()
    (corpus_folder / "sea" / "000.txt").write_text("another text\n")
    assert read_corpus(str(corpus_folder), max_bytes=10**6).digest() != before


def test_files_that_are_no_utf8_text_are_skipped_and_counted(corpus_folder: Path) -> None:
    (corpus_folder / "sea" / "latin1.txt").write_bytes("Mädchen".encode("latin-1"))
    (corpus_folder / "sea" / "image.bin").write_bytes(b"PNG\0\0")
    (corpus_folder / "sea" / "empty.txt").write_bytes(b"")
    (corpus_folder / "sea" / ".hidden").write_text("hidden")
    corpus = read_corpus(str(corpus_folder), max_bytes=10**6)
    assert corpus.num_skipped == 2
    assert len(corpus.documents) == 90


def test_text_comes_byte_for_byte(tmp_path: Path) -> None:
    data = "one\r\ntwo\rthree\u2028 \ufeff é\n".encode()
    (tmp_path / "a.txt").write_bytes(data)
    [document] = read_corpus(str(tmp_path / "a.txt"), max_bytes=10**6).documents
    assert document.text.encode() == data


def test_one_long_file_becomes_many_documents_that_lose_nothing(tmp_path: Path) -> None:
    text = "".join(f"line {i} of a long file\n" for i in range(20_000))
    (tmp_path / "book.txt").write_text(text)
    documents = read_corpus(str(tmp_path / "book.txt"), max_bytes=10**7).documents
    assert len(documents) >= 190
    pieces = sorted(documents, key=lambda document: int(document.name.split("#")[1]))
    assert "".join(piece.text for piece in pieces) == text


def test_a_file_larger_than_the_cap_is_cut_at_a_line_end(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("0123456789\n" * 100)
    assert "".join(d.text for d in read_corpus(str(tmp_path), max_bytes=40).documents) == "0123456789\n" * 3


def test_a_cap_in_mid_character_cuts_before_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("éééé", encoding="utf-8")
    assert read_corpus(str(tmp_path), max_bytes=5).documents == [Document("a.txt", tmp_path.name, "éé")]


@pytest.mark.parametrize(("text", "size"), [("", 3), ("abc", 3), ("a\n\n\nb", 2), ("x" * 10, 3), ("é\n" * 9, 4)])
def test_cutting_loses_nothing_and_keeps_to_the_size(text: str, size: int) -> None:
    pieces = list(cut_text(text, size))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= size for piece in pieces)


def test_shares_are_even_and_never_more_than_there_is() -> None:
    assert share_bytes([5, 5, 5], 100) == [5, 5, 5]
    assert share_bytes([1000, 10, 1000], 210) == [100, 10, 100]
    assert share_bytes([], 10) == []


def test_a_missing_source_names_the_choices(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist here.*\n.*'python'") as caught:
        read_corpus(str(tmp_path / "nowhere"), max_bytes=10)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\0\1")
    with pytest.raises(DataError, match=r"holds no document.*1 skipped"):
        read_corpus(str(tmp_path), max_bytes=10)
