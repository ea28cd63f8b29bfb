"""Where the text comes from: documents with a name and a domain, found on this machine, in a fixed order.

Nothing is fetched. The "python" corpus is the source code that every machine able to run this package holds already:
the standard library and the installed packages, each a domain of its own. A path is a text file or a folder of them,
each top-level sub-folder a domain.

The order never depends on the operating system: files are chosen in the order of a hash of their relative path, so
that a cap on the bytes keeps a representative part of each domain, and are then sorted by name.
"""

from __future__ import annotations

import codecs
import importlib.util
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from atoll.errors import DataError

PYTHON_PACKAGES = ("torch", "transformers", "numpy")
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})

MIN_PIECES = 200  # a folder of text is cut finely enough that a few per cent of it can be held out
PIECE_CHARACTERS = (512, 65_536)


@dataclass(frozen=True)
class Document:
    """One text, the unit that is held out or trained on as a whole."""

    name: str
    domain: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents sorted by domain, then name. `num_skipped` files were no UTF-8 text or could not be read."""

    source: str
    documents: list[Document]
    num_skipped: int = 0

    def digest(self) -> str:
        """xxh3_128 over the domain and the text of every document, in order."""
        state = xxhash.xxh3_128()
        for document in self.documents:
            state.update(f"{document.domain}\0{text_hash(document.text)}\n".encode())
        return state.hexdigest()


@dataclass(frozen=True)
class TextFile:
    """A file that may be read: its name relative to the root of its domain, with forward slashes; its size in bytes."""

    name: str
    path: Path
    size: int


def text_hash(text: str) -> int:
    """The 64-bit hash that names a document by its content; equal texts are held out together, whatever their names.

    >>> text_hash("import this") == text_hash("import this")
    True
    """
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


def read_corpus(source: str, *, max_bytes: int) -> Corpus:
    """Read at most `max_bytes` bytes of text from `source`, shared evenly over the domains.

    source: "python", or the path of a text file or of a folder. Python files are documents as they are; other text is
    cut at line ends into pieces (at least about 200 in the corpus), so that a single long file can be held out in part.
    Raises `DataError` where there is nothing to read.
    """
    if source == "python":
        corpus = _read_domains(source, _python_domains(), max_bytes)
    else:
        corpus = _cut_documents(_read_domains(source, _folder_domains(source), max_bytes))
    if not corpus.documents:
        raise DataError(
            f"data.source={source!r} holds no document: no file with UTF-8 text in it ({corpus.num_skipped} skipped).\n"
            "Name a text file, a folder of text files, or 'python' for the Python code on this machine."
        )
    return corpus


def share_bytes(sizes: Sequence[int], total: int) -> list[int]:
    """Share `total` bytes evenly; what a small domain leaves is shared among the larger ones.

    >>> share_bytes([10, 100, 100], 90)
    [10, 40, 40]
    """
    shares = [0] * len(sizes)
    left = total
    by_size = sorted(range(len(sizes)), key=lambda i: (sizes[i], i))
    for rank, i in enumerate(by_size):
        shares[i] = min(sizes[i], left // (len(sizes) - rank))
        left -= shares[i]
    return shares


def cut_text(text: str, size: int) -> Iterator[str]:
    r"""Cut `text` into pieces of at most `size` characters, after a line end where there is one. Nothing is lost.

    >>> list(cut_text("ab\ncd\nefghi", 4))
    ['ab\n', 'cd\n', 'efgh', 'i']
    """
    begin = 0
    while begin < len(text):
        end = begin + size
        if end < len(text):
            newline = text.rfind("\n", begin, end)
            end = newline + 1 if newline >= 0 else end
        yield text[begin:end]
        begin = end


def _python_domains() -> dict[str, list[TextFile]]:
    roots = {"stdlib": Path(sysconfig.get_path("stdlib"))}
    for package in PYTHON_PACKAGES:
        spec = importlib.util.find_spec(package)  # finds the folder without importing the package
        if spec is not None and spec.submodule_search_locations:
            roots[package] = Path(next(iter(spec.submodule_search_locations)))
    return {domain: list(_walk(root, suffix=".py")) for domain, root in roots.items()}


def _folder_domains(source: str) -> dict[str, list[TextFile]]:
    root = Path(source).expanduser()
    if root.is_file():
        return {root.stem: [TextFile(root.name, root, root.stat().st_size)]}
    if not root.is_dir():
        raise DataError(
            f"data.source={source!r} does not exist here (looked for {root.absolute()}).\n"
            "Name 'python', a text file, a folder, or 'hf:NAME_OR_PATH'."
        )
    domains: dict[str, list[TextFile]] = {}
    for file in _walk(root, suffix=""):
        top, _, rest = file.name.partition("/")
        domain, name = (top, rest) if rest else (root.name or "text", top)
        domains.setdefault(domain, []).append(TextFile(name, file.path, file.size))
    return domains


def _walk(root: Path, *, suffix: str, prefix: str = "") -> Iterator[TextFile]:
    """Every non-empty file under `root` whose name ends in `suffix`; hidden ones and folders of caches are left out."""
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        name = prefix + entry.name
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in SKIPPED_FOLDERS:
                yield from _walk(Path(entry.path), suffix=suffix, prefix=name + "/")
        elif entry.name.endswith(suffix) and entry.is_file() and entry.stat().st_size:
            yield TextFile(name, Path(entry.path), entry.stat().st_size)


def _read_domains(source: str, domains: Mapping[str, list[TextFile]], max_bytes: int) -> Corpus:
    names = sorted(domains)
    shares = share_bytes([sum(file.size for file in domains[name]) for name in names], max_bytes)
    documents: list[Document] = []
    num_skipped = 0
    for name, share in zip(names, shares, strict=True):
        read, skipped = _read_domain(name, domains[name], share)
        documents += read
        num_skipped += skipped
    return Corpus(source, documents, num_skipped)


def _read_domain(domain: str, files: list[TextFile], max_bytes: int) -> tuple[list[Document], int]:
    """The first files in hash order that fit in `max_bytes`, the last one cut to fit; and how many were skipped."""
    documents: list[Document] = []
    num_skipped = 0
    left = max_bytes
    for file in sorted(files, key=lambda file: (xxhash.xxh3_64_intdigest(file.name.encode()), file.name)):
        if left <= 0:
            break
        text = _read_text(file.path, left)
        if text is None:
            num_skipped += 1
        elif text.strip():
            documents.append(Document(file.name, domain, text))
            left -= len(text.encode())
    return sorted(documents, key=lambda document: document.name), num_skipped


def _read_text(path: Path, max_bytes: int) -> str | None:
    """The text of a file, byte for byte; cut to whole lines within `max_bytes`; None where it is no UTF-8 text."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError:
        return None
    is_cut = len(data) > max_bytes
    if is_cut:
        data = data[:max_bytes]
        data = data[: data.rfind(b"\n") + 1] or data
    if b"\0" in data:
        return None
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data, final=not is_cut)
    except UnicodeDecodeError:
        return None


def _cut_documents(corpus: Corpus) -> Corpus:
    total = sum(len(document.text) for document in corpus.documents)
    smallest, largest = PIECE_CHARACTERS
    size = min(max(total // MIN_PIECES, smallest), largest)
    pieces = [piece for document in corpus.documents for piece in _cut_document(document, size)]
    return Corpus(corpus.source, pieces, corpus.num_skipped)


def _cut_document(document: Document, size: int) -> list[Document]:
    if len(document.text) <= size:
        return [document]
    return [
        Document(f"{document.name}#{number}", document.domain, piece)
        for number, piece in enumerate(cut_text(document.text, size))
    ]
