"""Text streamed by Hugging Face `datasets`: a name on the hub or a local data set, larger than memory or disk.

    hf:NAME_OR_PATH[:CONFIGURATION]

The *head*, the first `data.max_bytes` of text, is read at the start: it gives the held-out sequences, trains a BPE
tokenizer and names the data in the digest. The training stream reads on past it without end:

    data set --split over the replicas--> documents --held-out ones dropped--> tokens --packed--> sequences

Documents come in the order of the data set (no shuffle buffer: its content would be lost on resume), so a data set
sorted by topic should be shuffled when it is written. The split is that of `split_dataset_by_node`: whole files where
their number is a multiple of the replicas, else every M-th document. A position is the data set's own state before the
current document and an offset into its tokens, of fixed size; restoring it reads the current file again up to that
document, so its cost is bounded by the size of a file, not by how far the run has come.

`datasets` is an extra and imported only here. Shards by domain or cluster need the whole corpus: write it with
`write_token_shards` and name that folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from atoll.data.corpus import Corpus, Document, text_hash
from atoll.data.shards import is_held_out
from atoll.data.stream import State, check_identity, read_count
from atoll.data.tokenizer import TokenIds, encode
from atoll.errors import DataError

if TYPE_CHECKING:
    from datasets import IterableDataset

PREFIX = "hf:"


@dataclass(frozen=True)
class HubSource:
    """A data set of text: `text_column` of `split`. name: "NAME_OR_PATH" or "NAME_OR_PATH:CONFIGURATION"."""

    name: str
    split: str
    text_column: str
    held_out_percent: float

    def open(self) -> IterableDataset:
        """Open the data set for streaming. Raises `DataError` where it has no such name, split or column."""
        load_dataset = _load_dataset_function()
        path, configuration = _split_name(self.name)
        try:
            dataset = load_dataset(path, configuration, split=self.split, streaming=True)
        except (OSError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"data.source='hf:{self.name}', data.hf_split={self.split!r} cannot be opened: {reason}\n"
                "Check the name and the split, or name a local folder of parquet or JSON lines."
            ) from error
        columns = dataset.column_names
        if columns is not None and self.text_column not in columns:
            raise DataError(
                f"data.hf_text_column={self.text_column!r} is not a column of 'hf:{self.name}'. "
                f"It has: {', '.join(columns)}."
            )
        return dataset

    def holds_out(self, text: str) -> bool:
        """Whether this text belongs to the held-out documents, by its hash alone."""
        return bool(is_held_out(np.array([text_hash(text)], np.uint64), self.held_out_percent)[0])

    def head(self, max_bytes: int) -> Corpus:
        """The documents in the first `max_bytes` bytes of text (always at least one)."""
        documents: list[Document] = []
        left = max_bytes
        for number, text in enumerate(self._texts(self.open())):
            documents.append(Document(str(number), "hf", text))
            left -= len(text.encode())
            if left <= 0:
                break
        if not documents:
            raise DataError(
                f"data.source='hf:{self.name}' holds no document: column {self.text_column!r} of split "
                f"{self.split!r} has no text.\nName another source, split or column."
            )
        return Corpus(f"{PREFIX}{self.name}", documents)

    def _texts(self, rows: Iterable[Any]) -> Iterator[str]:
        return (row[self.text_column] for row in rows if row[self.text_column])


class HubStream:
    """The packed training documents of one replica, read as a stream; the data set starts again when it is used up.

    num_examples: sequences of the head a replica, as the size of an endless shard is not known; equal for all replicas.
    """

    def __init__(
        self, source: HubSource, tokenizer: PreTrainedTokenizerFast, *, num_examples: int, identity: State
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._identity = identity
        self._num_examples = num_examples
        self._dataset: IterableDataset | None = None
        self._epoch = 0
        self._next_cursor: State | None = (
            None  # the data set's state before the row that comes next; None: at its start
        )
        self._cursor: State | None = None  # the same before the row of the current document
        self._document: TokenIds | None = None
        self._offset = 0  # tokens of the current document that were given out
        self._rows: Iterator[Any] | None = None

    @property
    def num_examples(self) -> int:
        return self._num_examples

    def next_batch(self, batch_size: int) -> Tensor:
        if batch_size < 1:
            raise DataError(f"batch_size={batch_size} is not a positive number of sequences. Use at least 1.")
        length = self._identity["sequence_length"]
        tokens = self._take(batch_size * length)
        return torch.from_numpy(tokens.astype(np.int64)).view(batch_size, length)

    def state_dict(self) -> State:
        cursor = self._next_cursor if self._document is None else self._cursor
        return {"epoch": self._epoch, "cursor": cursor, "offset": self._offset, **self._identity}

    def load_state_dict(self, state: State) -> None:
        check_identity(state, self._identity)
        self._epoch, offset = read_count(state, "epoch"), read_count(state, "offset")
        self._dataset, self._rows = None, None  # a data set keeps the state it was once started from: open it afresh
        self._next_cursor, self._document, self._offset = state.get("cursor"), None, 0
        if offset:
            self._next_document()
            self._offset = offset

    def _take(self, num_tokens: int) -> TokenIds:
        parts: list[TokenIds] = []
        while num_tokens:
            document = self._document if self._document is not None else self._next_document()
            part = document[self._offset : self._offset + num_tokens]
            parts.append(part)
            num_tokens -= len(part)
            self._offset += len(part)
            if self._offset == len(document):
                self._document, self._offset = None, 0
        return np.concatenate(parts)

    def _next_document(self) -> TokenIds:
        """Go on to the next document that is not held out, into the next epoch where this one is used up."""
        text = self._next_training_text()
        if text is None:
            self._epoch, self._next_cursor, self._rows = self._epoch + 1, None, None
            text = self._next_training_text()
        if text is not None:
            [self._document] = encode(self._tokenizer, [text])
            return self._document
        raise DataError(
            f"replica {self._identity['replica']} of {self._identity['num_replicas']} has no training document in "
            f"'hf:{self._source.name}'.\nUse fewer replicas or a larger data set."
        )

    def _next_training_text(self) -> str | None:
        """The next text of this epoch that is not held out, noting before each row where the data set stands."""
        dataset, rows = self._open_epoch()
        while (row := next(rows, None)) is not None:
            self._cursor, self._next_cursor = self._next_cursor, dataset.state_dict()
            text: str | None = row[self._source.text_column]
            if text and not self._source.holds_out(text):
                return text
        return None

    def _open_epoch(self) -> tuple[IterableDataset, Iterator[Any]]:
        """The data set and its rows from `_next_cursor` on; a state is taken up only in the epoch it names."""
        if self._dataset is None:
            self._dataset = self._split(self._source.open())
        if self._rows is None:
            self._dataset.set_epoch(self._epoch)
            if self._next_cursor is not None:
                self._dataset.load_state_dict(self._next_cursor)
            self._rows = iter(self._dataset)
        return self._dataset, self._rows

    def _split(self, dataset: IterableDataset) -> IterableDataset:
        from datasets.distributed import split_dataset_by_node

        replica, num_replicas = self._identity["replica"], self._identity["num_replicas"]
        return split_dataset_by_node(dataset, rank=replica, world_size=num_replicas)


def _load_dataset_function() -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError("data.source='hf:...' needs the package datasets. Run: pip install 'atoll[hf]'") from error
    return load_dataset


def _split_name(name: str) -> tuple[str, str | None]:
    """("allenai/c4", "en") from "allenai/c4:en"; a local path is taken as it is."""
    if Path(name).expanduser().exists() or ":" not in name:
        return str(Path(name).expanduser()) if name.startswith("~") else name, None
    path, _, configuration = name.rpartition(":")
    return path, configuration
