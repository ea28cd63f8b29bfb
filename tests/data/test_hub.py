import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.data import load_data
from atoll.data.tokenizer import byte_tokenizer, encode
from atoll.errors import DataError
from atoll.train.config import DataConfig

datasets = pytest.importorskip("datasets")

LENGTH = 32
TEXTS = [f"document {number} says " + f"{number * number} " * (number % 40) for number in range(120)]


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)


def write_json_lines(folder: Path, num_files: int) -> None:
    folder.mkdir()
    for number in range(num_files):
        lines = [json.dumps({"text": text}) for text in TEXTS[number::num_files]]
        (folder / f"train-{number:02d}.jsonl").write_text("\n".join(lines) + "\n")


def write_parquet(folder: Path, num_files: int) -> None:
    folder.mkdir()
    for number in range(num_files):
        table = datasets.Dataset.from_dict({"text": TEXTS[number::num_files]})
        table.to_parquet(folder / f"train-{number:02d}.parquet", batch_size=7)


def settings(folder: Path, **changes: object) -> DataConfig:
    return DataConfig.model_validate({"source": f"hf:{folder}", "held_out_percent": 15.0, **changes})


@pytest.mark.parametrize("write", [write_json_lines, write_parquet])
@pytest.mark.parametrize(("num_files", "num_replicas"), [(1, 2), (4, 2), (3, 1)])
def test_next_batch_after_resume_is_the_next_batch_without_it(
    write, num_files: int, num_replicas: int, tmp_path: Path
) -> None:
    write(tmp_path / "set", num_files)
    data = load_data(settings(tmp_path / "set"), sequence_length=LENGTH, num_replicas=num_replicas, seed=0)
    stream = data.stream(num_replicas - 1)
    batches, states = [], [stream.state_dict()]
    for _ in range(80 * 2 // num_replicas):
        batches.append(stream.next_batch(4))
        states.append(json.loads(json.dumps(stream.state_dict())))
    assert states[-1]["epoch"] >= 1
    for saved in range(0, len(batches), 23):
        state = states[saved]
        for batch in batches[saved : saved + 4]:  # a chain: each batch by a stream resumed from the one before
            resumed = data.stream(num_replicas - 1)
            resumed.load_state_dict(state)
            assert torch.equal(resumed.next_batch(4), batch)
            state = resumed.state_dict()
    resumed = data.stream(num_replicas - 1)
    resumed.load_state_dict(states[7])
    for batch in batches[7:]:
        assert torch.equal(resumed.next_batch(4), batch)


def test_a_stream_in_use_goes_back_to_any_position(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "set", 2)
    stream = load_data(settings(tmp_path / "set"), sequence_length=LENGTH, num_replicas=1, seed=0).stream(0)
    beginning, first = stream.state_dict(), stream.next_batch(9)
    middle, second = stream.state_dict(), stream.next_batch(9)
    stream.load_state_dict(middle)
    assert torch.equal(stream.next_batch(9), second)
    stream.load_state_dict(beginning)
    assert torch.equal(stream.next_batch(9), first)


@pytest.mark.parametrize(("num_files", "num_replicas"), [(1, 3), (4, 2)])
def test_replicas_share_the_training_documents_and_never_read_held_out_ones(
    num_files: int, num_replicas: int, tmp_path: Path
) -> None:
    write_json_lines(tmp_path / "set", num_files)
    data = load_data(settings(tmp_path / "set"), sequence_length=1, num_replicas=num_replicas, seed=0)
    held_out = data.tokenizer.decode(data.held_out.flatten()).split("<|eos|>")[:-1]
    assert 5 < len(held_out) < 40
    train = [text for text in TEXTS if text not in held_out]
    read: list[str] = []
    for replica in range(num_replicas):
        stream, texts = data.stream(replica), ""
        while stream.state_dict()["epoch"] == 0:
            texts += data.tokenizer.decode(stream.next_batch(1)[0])
        read += texts.split("<|eos|>")[:-1]
    assert sorted(read) == sorted(train)


def test_packing_is_the_documents_end_to_end(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "set", 1)
    data = load_data(settings(tmp_path / "set"), sequence_length=LENGTH, num_replicas=1, seed=0)
    held_out = data.tokenizer.decode(data.held_out.flatten())
    train = [text for text in TEXTS if text not in held_out]
    expected = np.concatenate(encode(byte_tokenizer(), train))[: 10 * LENGTH]
    assert np.array_equal(data.stream(0).next_batch(10).flatten().numpy(), expected)


def test_state_has_a_fixed_size(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "set", 1)
    stream = load_data(settings(tmp_path / "set"), sequence_length=LENGTH, num_replicas=1, seed=0).stream(0)
    sizes = set()
    for _ in range(30):
        stream.next_batch(2)
        sizes.add(len(json.dumps(stream.state_dict())) // 100)
    assert max(sizes) - min(sizes) <= 1


def test_bpe_is_trained_on_the_head(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "set", 1)
    config = settings(tmp_path / "set", tokenizer="bpe", bpe_vocab_size=300)
    first, again = (load_data(config, sequence_length=8, num_replicas=1, seed=0) for _ in range(2))
    assert first.vocab_size == 300
    assert first.digest == again.digest
    assert torch.equal(first.stream(0).next_batch(4), again.stream(0).next_batch(4))


def test_a_position_in_another_data_set_is_refused(tmp_path: Path) -> None:
    write_json_lines(tmp_path / "one", 1)
    write_json_lines(tmp_path / "two", 2)
    one, two = (
        load_data(settings(tmp_path / name), sequence_length=LENGTH, num_replicas=1, seed=0) for name in ("one", "two")
    )
    with pytest.raises(DataError, match="belongs to other data: digest"):
        two.stream(0).load_state_dict(one.stream(0).state_dict())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hf_text_column": "content"}, "'content' is not a column of .*: text"),
        ({"hf_split": "validation"}, "cannot be opened"),
        ({"shard": "domain"}, "needs the whole corpus"),
        ({"shard": "cluster"}, "needs the whole corpus"),
        ({"max_bytes": 10}, "make no held-out sequence"),
    ],
)
def test_what_cannot_be_streamed_is_refused_in_three_lines(changes: dict, message: str, tmp_path: Path) -> None:
    write_json_lines(tmp_path / "set", 1)
    with pytest.raises(DataError, match=message) as caught:
        load_data(settings(tmp_path / "set", **changes), sequence_length=LENGTH, num_replicas=1, seed=0)
    assert len(str(caught.value).splitlines()) <= 3


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be opened"):
        load_data(settings(tmp_path / "nowhere"), sequence_length=LENGTH, num_replicas=1, seed=0)


@pytest.mark.parametrize(
    ("module", "changes", "extra"),
    [
        ("datasets", {}, r"atoll\[hf\]"),
        ("sklearn.cluster", {"source": "python", "shard": "cluster"}, r"atoll\[clusters\]"),
    ],
)
def test_a_missing_extra_names_its_install_command(
    module: str, changes: dict, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = settings(tmp_path, **{"max_bytes": 100_000, **changes})
    with pytest.raises(DataError, match=f"pip install '{extra}'"):
        load_data(config, sequence_length=LENGTH, num_replicas=2, seed=0)
