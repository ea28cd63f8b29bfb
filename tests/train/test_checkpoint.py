from __future__ import annotations

import ast
import errno
import hashlib
import json
import math
import os
import random
import shutil
import struct
import subprocess
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from atoll.errors import CheckpointError, ConfigError, StorageError
from atoll.train import checkpoint
from atoll.train.checkpoint import (
    CheckpointWriter,
    Disk,
    find_checkpoint,
    load_json,
    load_state,
    load_tensors,
    pack_state,
    prepare_run_dir,
    read_manifest,
    refuse_other_config,
    save_json,
    save_state,
    save_tensors,
    unpack_state,
    verify_checkpoint,
)

EXPECTED = ["config.json", "model.safetensors", "outer.safetensors", "replica-0.safetensors", "state.json"]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory, where the machine has a folder that is: these tests lay out thousands of small trees."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def no_waiting_for_the_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a power cut can tell whether a sync was done, and those are simulated, from the calls that were made."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def write_model(folder: Path) -> None:
    """Stands for transformers: writes files of its own, one in a subfolder, and syncs nothing."""
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(bytes(range(200)))
    (folder / "chat_templates").mkdir(exist_ok=True)
    (folder / "chat_templates" / "default.jinja").write_text("{{ messages }}")


def save(run: Path, step: int, *, value: float = 0.0, keep_last: int = 3, disk: Disk = checkpoint.DISK) -> Path:
    replica = CheckpointWriter(run, step, keep_last=keep_last, disk=disk)
    replica.save_state("replica-0.safetensors", {"optimizer": {0: {"exp_avg": torch.full((3,), value)}}, "lr": 0.1})
    leader = CheckpointWriter(run, step, keep_last=keep_last, disk=disk)
    leader.save_files(write_model)
    leader.save_state("outer.safetensors", {"anchor": torch.full((5,), value), "round": step // 10})
    leader.save_json("state.json", {"step": step, "value": value})
    return leader.commit(expected_files=EXPECTED)


def identity(folder: Path) -> str:
    """Equal for two checkpoints when every byte of every file is: their manifests have the same digest."""
    assert verify_checkpoint(folder) == []
    return str(read_manifest(folder)["sha256"])


def find(run: Path, resume: str | Path = "auto") -> Path | None:
    """`find_checkpoint` where nothing may be amiss."""
    warnings: list[str] = []
    found = find_checkpoint(run, resume, warn=warnings.append)
    assert warnings == []
    return found


def visible(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def latest(run: Path) -> Path:
    return run / (run / "latest").read_text().strip()


def assert_short(error: pytest.ExceptionInfo[Any]) -> None:
    assert len(str(error.value).splitlines()) <= 3


# ---------------------------------------------------------------------------------------------------------------------
# Packing and files


DTYPES = list(checkpoint._DTYPES)


def same(left: Any, right: Any) -> bool:
    """Equal in type, order and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        equal_kind = left.dtype == right.dtype and left.shape == right.shape
        return equal_kind and bytes(checkpoint._raw_bytes(left)) == bytes(checkpoint._raw_bytes(right))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def make_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    num_bytes = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).reshape(shape)


tensors = st.builds(make_tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 1000))
keys = st.one_of(st.text(max_size=6), st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text()))
leaves = st.one_of(
    tensors, st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(categories=None), max_size=8)
)
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(state=states)
def test_any_nested_state_comes_back_from_a_file_bit_for_bit(state: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.safetensors")
        save_state(path, state)
        assert same(load_state(path), state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_dtype_is_read_back_by_the_library_of_the_format(dtype: torch.dtype, tmp_path: Path) -> None:
    shapes: dict[str, list[int]] = {"scalar": [], "empty": [0, 3], "cube": [2, 3, 2]}
    saved = {name: make_tensor(dtype, shape, seed=7) for name, shape in shapes.items()}
    save_tensors(tmp_path / "t.safetensors", saved, {"note": "a"})
    by_library = load_file(tmp_path / "t.safetensors")
    ours, metadata = load_tensors(tmp_path / "t.safetensors")
    assert all(same(by_library[name], tensor) and same(ours[name], tensor) for name, tensor in saved.items())
    assert metadata == {"note": "a"}


def test_files_of_the_library_are_read(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6.0).reshape(2, 3)}, tmp_path / "t.safetensors")
    loaded, metadata = load_tensors(tmp_path / "t.safetensors")
    assert torch.equal(loaded["w"], torch.arange(6.0).reshape(2, 3))
    assert metadata == {}


def test_strided_conjugated_and_tied_tensors_are_saved_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    complex_view = torch.tensor([1 + 2j, 3 - 4j]).conj()
    state: dict[str, torch.Tensor] = {
        "transposed": base.t(), "every_other": base[:, ::2], "expanded": base[:1].expand(5, 4), "conj": complex_view,
        "embedding": base, "head": base, "parameter": torch.nn.Parameter(base),
    }  # fmt: skip
    save_state(tmp_path / "t.safetensors", state)
    loaded = load_state(tmp_path / "t.safetensors")
    assert all(torch.equal(loaded[name], tensor.detach()) for name, tensor in state.items())
    loaded["embedding"].zero_()
    assert torch.equal(loaded["head"], base), "loaded tensors own their memory"


def test_an_inner_optimizer_goes_on_from_a_file_as_if_nothing_had_been(tmp_path: Path) -> None:
    def steps(model: torch.nn.Linear, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()

    def fresh() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.95))

    model, optimizer = fresh()
    steps(model, optimizer, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    save_state(tmp_path / "r.safetensors", state)
    loaded = load_state(tmp_path / "r.safetensors")
    assert same(loaded["optimizer"], state["optimizer"])
    other_model, other_optimizer = fresh()
    other_model.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    steps(model, optimizer, 3)
    steps(other_model, other_optimizer, 3)
    assert torch.equal(model.weight, other_model.weight)
    assert same(loaded["rng"], state["rng"])


def test_tensors_whose_paths_look_alike_keep_their_own_names() -> None:
    state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 0: torch.tensor(3), "0": torch.tensor(4)}
    packed, tree = pack_state(state)
    assert len(packed) == 4
    assert same(unpack_state(packed, tree), state)


def test_the_names_that_the_format_reserves_or_cannot_spell_are_replaced(tmp_path: Path) -> None:
    state = {"__metadata__": torch.tensor(1), "\udc80": torch.tensor(2), "": torch.tensor(3)}
    save_state(tmp_path / "t.safetensors", state)
    assert same(load_state(tmp_path / "t.safetensors"), state)


def test_subclasses_of_dict_and_tuple_come_back_plain() -> None:
    packed, tree = pack_state(OrderedDict(size=torch.Size([2, 3])))
    assert same(unpack_state(packed, tree), {"size": (2, 3)})


@pytest.mark.parametrize("value", [object(), b"bytes", {1, 2}, torch.float32], ids=lambda value: type(value).__name__)
def test_what_would_need_pickle_is_refused_with_its_place(value: Any) -> None:
    with pytest.raises(TypeError, match=r"state\.groups\.1 is a .*needs pickle"):
        pack_state({"groups": [1, value]})


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, device="meta"), torch.zeros(2, 2).to_sparse(), torch.zeros(2, dtype=torch.complex128)],
    ids=["meta", "sparse", "complex128"],
)
def test_a_tensor_that_the_format_cannot_hold_is_refused_before_anything_is_written(
    tensor: torch.Tensor, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=r"'w' .* cannot be saved"):
        save_tensors(tmp_path / "t.safetensors", {"w": tensor})
    assert list(tmp_path.iterdir()) == []


def test_a_header_beyond_what_readers_accept_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_HEADER_LIMIT", 1000)
    with pytest.raises(ValueError, match="Keep long lists of numbers as tensors"):
        save_state(tmp_path / "t.safetensors", list(range(1000)))


def test_a_state_without_its_tensors_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not of one save"):
        unpack_state({}, {"tensor": "w"})
    with pytest.raises(CheckpointError, match="not of one save"):
        unpack_state({}, {"pickle": "cos\nsystem"})


def test_files_that_cannot_be_read_are_checkpoint_errors(tmp_path: Path) -> None:
    (tmp_path / "short.safetensors").write_bytes(b"\x80\x04")
    (tmp_path / "short.json").write_text("{")
    save_tensors(tmp_path / "plain.safetensors", {"w": torch.ones(1)})
    cases: list[tuple[Callable[[Path], Any], str]] = [
        (load_tensors, "absent.safetensors"), (load_tensors, "short.safetensors"), (load_state, "plain.safetensors"),
        (load_json, "absent.json"), (load_json, "short.json"),
    ]  # fmt: skip
    for load, name in cases:
        with pytest.raises(CheckpointError, match=f"{name} cannot be read") as error:
            load(tmp_path / name)
        assert_short(error)


def test_json_keys_that_would_silently_change_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\.json\.replicas\.0 has the key 3"):
        save_json(tmp_path / "state.json", {"replicas": [{3: "position"}]})
    save_json(tmp_path / "state.json", {"replicas": [{"3": "position"}]})
    assert load_json(tmp_path / "state.json") == {"replicas": [{"3": "position"}]}


def test_nothing_here_imports_pickle_or_torch_load() -> None:
    tree = ast.parse(Path(checkpoint.__file__).read_text())
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert not modules & {"pickle", "marshal", "shelve", "dill"}
    assert "load" not in names


# ---------------------------------------------------------------------------------------------------------------------
# Saving


def test_a_checkpoint_holds_the_files_of_all_and_a_manifest_of_them(tmp_path: Path) -> None:
    folder = save(tmp_path, 40, value=2.5)
    assert folder == tmp_path / "checkpoints" / "step-000040"
    manifest = read_manifest(folder)
    assert sorted(manifest["files"]) == sorted([*EXPECTED, "chat_templates/default.jinja"])
    assert (manifest["format"], manifest["step"], manifest["serial"]) == (1, 40, 1)
    model = folder / "model.safetensors"
    assert manifest["files"]["model.safetensors"] == {
        "bytes": 200,
        "sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
    }
    assert torch.equal(load_state(folder / "outer.safetensors")["anchor"], torch.full((5,), 2.5))
    assert load_json(folder / "state.json") == {"step": 40, "value": 2.5}
    assert (tmp_path / "latest").read_text() == "checkpoints/step-000040\n"
    assert find(tmp_path) == folder


def test_a_missing_replica_file_is_a_storage_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    old = save(tmp_path, 10)
    writer = CheckpointWriter(tmp_path, 20)
    writer.save_json("state.json", {})
    with pytest.raises(StorageError, match=r"replica-1.safetensors did not reach .* all replicas share") as error:
        writer.commit(expected_files=["state.json", "replica-1.safetensors"])
    assert_short(error)
    assert visible(tmp_path) == ["step-000010"]
    assert latest(tmp_path) == find(tmp_path) == old


def test_a_commit_without_any_file_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="did not reach"):
        CheckpointWriter(tmp_path, 20).commit(expected_files=["state.json"])


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_the_newest_keep_last_checkpoints_stay(keep_last: int, tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep_last=keep_last)
    assert visible(tmp_path) == [f"step-0000{step}" for step in (10, 20, 30, 40)[-keep_last:]]


def test_a_new_branch_counts_as_newer_than_the_abandoned_one(tmp_path: Path) -> None:
    for step in (20, 40, 60):
        save(tmp_path, step)
    branch = save(tmp_path, 30, keep_last=2)  # after an explicit resume from step 20
    assert visible(tmp_path) == ["step-000030", "step-000060"]
    assert latest(tmp_path) == find(tmp_path) == branch


def test_damaged_checkpoints_neither_count_as_kept_nor_are_deleted(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 20) / "outer.safetensors").write_bytes(b"")
    save(tmp_path, 30, keep_last=2)
    assert visible(tmp_path) == ["step-000010", "step-000020", "step-000030"]


def test_keep_last_of_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_last=0"):
        CheckpointWriter(tmp_path, 1, keep_last=0)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    old = identity(save(tmp_path, 40, value=1.0))
    folder = save(tmp_path, 40, value=2.0)
    assert identity(folder) != old
    assert load_json(folder / "state.json")["value"] == 2.0
    assert visible(tmp_path) == ["step-000040"]


def test_remains_of_a_killed_save_go_at_the_next_start_which_says_so(tmp_path: Path) -> None:
    save(tmp_path, 10)
    CheckpointWriter(tmp_path, 20).save_json("state.json", {"half": True})
    assert find(tmp_path) == tmp_path / "checkpoints" / "step-000010"
    warnings: list[str] = []
    prepare_run_dir(tmp_path, warn=warnings.append)
    assert warnings == ["the save of step-000020 was cut off; its remains were removed."]
    assert visible(tmp_path) == ["step-000010"]


def test_remains_of_an_older_save_go_at_the_next_save_and_those_of_a_later_one_stay(tmp_path: Path) -> None:
    CheckpointWriter(tmp_path, 10).save_json("state.json", {})
    CheckpointWriter(tmp_path, 30).save_json("state.json", {})  # a fast replica has begun the next save
    save(tmp_path, 20)
    assert visible(tmp_path) == [".step-000030.partial", "step-000020"]


def test_a_file_from_a_killed_save_of_the_same_step_does_not_pass_for_a_new_one(tmp_path: Path) -> None:
    CheckpointWriter(tmp_path, 20).save_json("replica-1.json", {"of": "the killed run"})
    prepare_run_dir(tmp_path, warn=lambda message: None)
    writer = CheckpointWriter(tmp_path, 20)
    writer.save_json("replica-0.json", {})
    with pytest.raises(StorageError, match=r"replica-1\.json did not reach"):
        writer.commit(expected_files=["replica-0.json", "replica-1.json"])


def test_a_bug_in_the_model_writer_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        raise RuntimeError("no such module")

    with pytest.raises(RuntimeError, match="no such module"):
        CheckpointWriter(tmp_path, 1).save_files(broken)


def test_a_full_disk_reported_from_rust_is_a_storage_error(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise Exception("No space left on device (os error 28)")

    with pytest.raises(StorageError, match="the disk is full"):
        CheckpointWriter(tmp_path, 1).save_files(full)
    assert visible(tmp_path) == []


# ---------------------------------------------------------------------------------------------------------------------
# Disks that refuse, processes that die


class Killed(BaseException):
    """SIGKILL: nothing of the program runs after it, neither except nor finally."""


@dataclass
class FaultyDisk(Disk):
    """Fails at operation `at`, and at every later one if `lasting`; a write fails half-way."""

    at: int
    fault: Callable[[], BaseException]
    lasting: bool = False
    count: int = 0

    def _step(self) -> None:
        self.count += 1
        if self.count == self.at or (self.lasting and self.count > self.at):
            raise self.fault()

    def make_dir(self, path: Path) -> None:
        self._step()
        super().make_dir(path)

    def write(self, path: Path, chunks: Iterable[Any]) -> None:
        data = b"".join(bytes(chunk) for chunk in chunks)
        try:
            self._step()
        except BaseException:
            if self.count == self.at:
                super().write(path, [data[: len(data) // 2]])
            raise
        super().write(path, [data])

    def sync(self, path: Path) -> None:
        self._step()
        super().sync(path)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._step()
        super().remove(path)


@dataclass(frozen=True)
class Scenario:
    """A save of `step` with what was there before."""

    name: str
    before: tuple[int, ...]
    step: int
    keep_last: int = 1

    def start(self, run: Path) -> str | None:
        run.mkdir()
        folders = [save(run, step, value=1.0) for step in self.before]
        return identity(folders[-1]) if folders else None

    def save(self, run: Path, disk: Disk) -> Path:
        prepare_run_dir(run, warn=lambda message: None, disk=disk)
        return save(run, self.step, value=2.0, keep_last=self.keep_last, disk=disk)


SCENARIOS = [
    Scenario("first", (), 10),
    Scenario("next, pruning", (10, 20, 30), 40),
    Scenario("again", (10,), 10),
    Scenario("again, older step", (10, 20), 10, keep_last=2),
]


def num_operations(scenario: Scenario, run: Path) -> int:
    disk = FaultyDisk(0, Killed)
    scenario.start(run)
    scenario.save(run, disk)
    return disk.count


def new_identity(scenario: Scenario, run: Path) -> str:
    scenario.start(run)
    return identity(scenario.save(run, checkpoint.DISK))


def found(run: Path) -> str | None:
    folder = find(run)
    return None if folder is None else identity(folder)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_kill_at_any_operation_leaves_the_old_or_the_new_checkpoint(scenario: Scenario, tmp_path: Path) -> None:
    new = new_identity(scenario, tmp_path / "whole")
    total = num_operations(scenario, tmp_path / "count")
    seen = set()
    old = scenario.start(tmp_path / "start")
    for k in range(1, total + 1):
        run = tmp_path / f"run-{k}"
        shutil.copytree(tmp_path / "start", run)
        with pytest.raises(Killed):
            scenario.save(run, FaultyDisk(k, Killed, lasting=True))
        state = found(run)
        assert state in (old, new), f"killed at operation {k}"
        prepare_run_dir(run, warn=lambda message: None)
        assert found(run) == state, f"the next start changed what is there, killed at operation {k}"
        assert all(name.startswith("step-") for name in visible(run))
        if (run / "latest").exists():
            assert verify_checkpoint(latest(run)) == []
        scenario.save(run, checkpoint.DISK)
        assert load_json((find(run) or run) / "state.json") == {"step": scenario.step, "value": 2.0}
        seen.add(state)
        shutil.rmtree(run)
    assert seen == {old, new}


@pytest.mark.parametrize(
    ("code", "lasting"),
    [(errno.ENOSPC, False), (errno.EROFS, True)],
    ids=["disk full once", "read-only from then on"],
)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_refusal_at_any_operation_is_a_storage_error_that_costs_nothing_saved(
    scenario: Scenario, code: int, lasting: bool, tmp_path: Path
) -> None:
    new = new_identity(scenario, tmp_path / "whole")
    total = num_operations(scenario, tmp_path / "count")
    scenario.start(tmp_path / "start")
    for k in range(1, total + 1):
        run = tmp_path / f"run-{k}"
        shutil.copytree(tmp_path / "start", run)
        old = found(run)
        with pytest.raises(StorageError, match="What was saved before is untouched") as error:
            scenario.save(run, FaultyDisk(k, lambda: OSError(code, os.strerror(code)), lasting=lasting))
        assert_short(error)
        assert found(run) in (old, new), f"refused at operation {k}"
        if not lasting and (run / "checkpoints").exists():
            hidden = [name for name in visible(run) if name.endswith((".partial", ".replaced"))]
            assert hidden == [] or found(run) == new, f"refused at operation {k}"
            assert not (run / ".latest.partial").exists()
        if not lasting and (run / "latest").exists():
            assert verify_checkpoint(latest(run)) == [], f"refused at operation {k}"
        shutil.rmtree(run)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs a tmpfs of its own: root, and mount allowed")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_keeps_the_last_checkpoint(tiny_disk: Path) -> None:
    def by_library(folder: Path) -> None:
        save_file({"w": torch.zeros(100_000)}, folder / "model.safetensors")

    old = save(tiny_disk, 10)
    big = CheckpointWriter(tiny_disk, 20)
    with pytest.raises(StorageError, match=r"replica-0.safetensors cannot be written: the disk is full") as error:
        big.save_tensors("replica-0.safetensors", {"w": torch.zeros(100_000)})
    assert_short(error)
    with pytest.raises(StorageError, match="the disk is full"):
        big.save_files(by_library)
    assert visible(tiny_disk) == ["step-000010"]
    assert latest(tiny_disk) == find(tiny_disk) == old
    assert save(tiny_disk, 20) == find(tiny_disk)


@contextmanager
def as_ordinary_user() -> Iterator[Path]:
    """A folder of root's that everybody may read; inside, this process may not write to it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield_as = 65534 if os.geteuid() == 0 else os.geteuid()
        save(folder / "run", 10)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = os.geteuid()
        os.seteuid(yield_as)
        try:
            yield folder
        finally:
            os.seteuid(before)
            for path in [folder, *folder.rglob("*")]:
                path.chmod(0o755 if path.is_dir() else 0o644)


def test_a_folder_without_permission_is_refused_at_the_start_and_at_a_save() -> None:
    with as_ordinary_user() as folder:
        for run in (folder / "run", folder / "other"):
            with pytest.raises(StorageError, match=r"no permission to write.*\nSet output_dir to") as error:
                prepare_run_dir(run, warn=lambda message: None)
            assert_short(error)
            with pytest.raises(StorageError, match="no permission to write"):
                save(run, 20)
        assert find(folder / "run") == folder / "run" / "checkpoints" / "step-000010"


def test_an_output_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("notes")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("notes")
    for run in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "run"):
        with pytest.raises(StorageError, match="a file stands where a folder must be"):
            prepare_run_dir(run, warn=lambda message: None)
        with pytest.raises(StorageError, match="a file stands where a folder must be"):
            save(run, 1)


def test_a_folder_that_vanishes_under_a_save_is_a_storage_error(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, 1)

    def vanish(folder: Path) -> None:
        shutil.rmtree(folder)
        (folder / "config.json").write_text("{}")

    with pytest.raises(StorageError, match="vanished while it was written to"):
        writer.save_files(vanish)


# ---------------------------------------------------------------------------------------------------------------------
# Power cuts: a model of what a medium may hold when everything not yet synced can be lost


@dataclass
class File:
    data: bytes
    synced: bool = False


@dataclass
class Folder:
    """`entries` as programs see them; `kept` as synced; `pending`, the changes since, in order."""

    entries: dict[str, File | Folder] = field(default_factory=dict)
    kept: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[tuple[Any, ...]] = field(default_factory=list)

    def change(self, *operation: Any) -> None:
        apply(operation, self.entries)
        self.pending.append(operation)


def apply(operation: tuple[Any, ...], entries: dict[str, File | Folder]) -> None:
    match operation:
        case ("link", name, node):
            entries[name] = node
        case ("unlink", name):
            entries.pop(name, None)
        case ("rename", old, new) if old in entries and isinstance(entries.get(new), Folder):
            # Onto a folder that should have been moved away before: no system call does that, so anything may be left.
            del entries[old], entries[new]
        case ("rename", old, new) if old in entries:
            entries[new] = entries.pop(old)


@dataclass
class RecordingDisk(Disk):
    """Does everything for real and writes it down."""

    log: list[tuple[Any, ...]] = field(default_factory=list)

    def make_dir(self, path: Path) -> None:
        if not path.exists():
            self.log.append(("make_dir", path))
        super().make_dir(path)

    def write(self, path: Path, chunks: Iterable[Any]) -> None:
        super().write(path, chunks)
        self.log.append(("write", path, path.read_bytes()))

    def sync(self, path: Path) -> None:
        super().sync(path)
        self.log.append(("sync", path))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        assert old.parent == new.parent, "only a rename in one folder is atomic for a power cut"
        self.log.append(("rename", old, new))

    def remove(self, path: Path) -> None:
        if path.exists():
            self.log.append(("remove", path))
        super().remove(path)

    def note_foreign_files(self, folder: Path) -> None:
        """Files that a library has written beside the disk."""
        for path in sorted(folder.rglob("*")):
            if path.is_dir():
                self.log.append(("make_dir", path))
            elif not any(entry[:2] == ("write", path) for entry in self.log):
                self.log.append(("write", path, path.read_bytes()))


def read_medium(path: Path) -> Folder:
    entries: dict[str, File | Folder] = {
        child.name: read_medium(child) if child.is_dir() else File(child.read_bytes(), synced=True)
        for child in path.iterdir()
    }
    return Folder(entries, dict(entries))


def replay(root: Folder, base: Path, entry: tuple[Any, ...]) -> None:
    kind, path = entry[0], entry[1]
    if base not in (path, *path.parents) or (path == base and kind != "sync"):
        return
    parent, node = root, root
    for part in path.relative_to(base).parts:
        parent, node = node, node.entries.get(part)  # type: ignore[assignment]
    if kind == "make_dir":
        parent.change("link", path.name, Folder())
    elif kind == "write":
        parent.change("link", path.name, File(entry[2]))
    elif kind == "rename":
        parent.change("rename", path.name, entry[2].name)
    elif kind == "remove":
        parent.change("unlink", path.name)
    elif isinstance(node, Folder):
        node.kept, node.pending = dict(node.entries), []
    elif isinstance(node, File):
        node.synced = True


@dataclass
class Cut:
    """Which of the unsynced changes survive: all, none, or by chance; with order kept in a folder or without."""

    chance: random.Random
    share: float

    def survivors(self, pending: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        if self.chance.random() < 0.5:  # a journal: the first changes of a folder survive
            return pending[: round(len(pending) * (self.share if self.share in (0, 1) else self.chance.random()))]
        return [operation for operation in pending if self.chance.random() < self.share]

    def contents(self, file: File) -> bytes:
        if file.synced:
            return file.data
        torn = file.data[: self.chance.randrange(len(file.data) + 1)]
        return self.chance.choice([b"", torn, bytes(len(file.data)), file.data])


def survive(folder: Folder, cut: Cut) -> dict[str, Any]:
    entries = dict(folder.kept)
    for operation in cut.survivors(folder.pending):
        apply(operation, entries)
    return {
        name: survive(node, cut) if isinstance(node, Folder) else cut.contents(node)
        for name, node in sorted(entries.items())
    }


def lay_out(tree: dict[str, Any], path: Path) -> None:
    path.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            lay_out(content, path / name)
        else:
            (path / name).write_bytes(content)


class NotingWriter(CheckpointWriter):
    """Tells the recording disk of the files that `save_files` wrote, unsynced, at the moment they were written."""

    def save_files(self, write: Callable[[Path], object]) -> None:
        super().save_files(write)
        assert isinstance(self.disk, RecordingDisk)
        self.disk.note_foreign_files(self.staging)


def crash_states(scenario: Scenario, base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Distinct trees that a power cut may leave after each operation of a save."""
    before, disk = read_medium(base), RecordingDisk()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "CheckpointWriter", NotingWriter)
        scenario.save(base, disk)
    seen = set()
    chance = random.Random(0)
    for entry in disk.log:
        replay(before, base, entry)
        for share in (0.0, 1.0, *[0.5, 0.8] * 5):
            tree = survive(before, Cut(chance, share))
            key = repr(tree)
            if key not in seen:
                seen.add(key)
                yield tree


def test_a_power_cut_leaves_the_old_or_the_new_checkpoint_in_every_legal_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 0
    for number, scenario in enumerate(SCENARIOS):
        base = tmp_path / f"base-{number}"
        old = scenario.start(base)
        outcomes = set()
        states_found = list(crash_states(scenario, base, monkeypatch))
        new = identity(base / "checkpoints" / f"step-{scenario.step:06d}")
        for tree in states_found:
            run = tmp_path / "cut"
            lay_out(tree, run)
            state = found(run)
            assert state in (old, new), tree
            prepare_run_dir(run, warn=lambda message: None)
            assert found(run) == state
            if (run / "latest").exists():
                assert verify_checkpoint(latest(run)) == []
            shutil.rmtree(run)
            outcomes.add(state)
        assert outcomes == {old, new}
        count += len(states_found)
    assert count >= 500


@pytest.mark.parametrize("forgotten", ["files", "staging", "checkpoints", "run"])
def test_the_model_of_power_cuts_notices_a_forgotten_sync(
    forgotten: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, real_sync = tmp_path / "base", RecordingDisk.sync

    def forgets(path: Path) -> bool:
        staging = path.name.endswith(".partial") and path.is_dir()
        kinds = {
            "files": path.is_file(),
            "staging": staging,
            "checkpoints": path.name == "checkpoints",
            "run": path == base,
        }
        return kinds[forgotten]

    def sync(self: RecordingDisk, path: Path) -> None:
        if not forgets(path):
            real_sync(self, path)

    monkeypatch.setattr(RecordingDisk, "sync", sync)
    SCENARIOS[1].start(base)
    assert any(is_harmed(tree, tmp_path / "cut") for tree in crash_states(SCENARIOS[1], base, monkeypatch))


def is_harmed(tree: dict[str, Any], run: Path) -> bool:
    """Whether nothing, something damaged or a dead pointer is found while a second checkpoint is being saved."""
    lay_out(tree, run)
    warnings: list[str] = []
    try:
        nothing = find_checkpoint(run, "auto", warn=warnings.append) is None
        return nothing or bool(warnings) or not latest(run).exists()
    except CheckpointError:
        return True
    finally:
        shutil.rmtree(run)


# ---------------------------------------------------------------------------------------------------------------------
# Damage


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def damages(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Ways to damage a checkpoint, named; each is applied to a whole one."""
    chance = random.Random(0)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        yield f"{path.name} removed", path.unlink
        yield f"{path.name} grown", partial(path.write_bytes, data + b"\n")
        yield f"{path.name} replaced by a folder", partial(become_a_folder, path)
        lengths = {0, 1, len(data) - 1, *(chance.randrange(len(data)) for _ in range(20))}
        for length in sorted(lengths):
            yield f"{path.name} cut to {length}", partial(path.write_bytes, data[:length])
        for _ in range(130):
            flipped = bytearray(data)
            place, bit = chance.randrange(len(data)), chance.randrange(8)
            flipped[place] ^= 1 << bit
            yield f"{path.name} bit {place}.{bit}", partial(path.write_bytes, flipped)


def edits(manifest: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Manifests that are JSON and wrong."""
    for key in manifest:
        yield f"no {key}", {name: value for name, value in manifest.items() if name != key}
        yield f"{key} null", manifest | {key: None}
    yield "other step", manifest | {"step": 7}
    yield "other serial", manifest | {"serial": 99}
    yield "later format", manifest | {"format": 2}
    yield "no file", manifest | {"files": {}}
    for name, entry in manifest["files"].items():
        yield f"{name} left out", manifest | {"files": {k: v for k, v in manifest["files"].items() if k != name}}
        yield f"{name} resized", manifest | {"files": manifest["files"] | {name: entry | {"bytes": 1}}}
        yield f"{name} null", manifest | {"files": manifest["files"] | {name: None}}
    yield from [("a list", []), ("a number", 1), ("null", None), ("a string", "manifest")]


def mend(whole: dict[Path, bytes]) -> None:
    for path, data in whole.items():
        if path.is_dir():
            path.rmdir()
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)


def test_every_damage_is_found_told_and_passed_over(tmp_path: Path) -> None:
    old, folder = save(tmp_path, 10), save(tmp_path, 20)
    whole = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    manifest = read_manifest(folder)
    path = folder / "manifest.json"
    edited = [
        (f"manifest: {name}", partial(path.write_text, json.dumps(value, indent=1, sort_keys=True) + "\n"))
        for name, value in edits(manifest)
    ]
    reformatted = ("manifest reformatted", partial(path.write_text, json.dumps(manifest)))
    cases: list[tuple[str, Callable[[], object]]] = [*damages(folder), *edited, reformatted]
    assert len(cases) >= 1000
    for name, damage in cases:
        damage()
        assert verify_checkpoint(folder), name
        warnings: list[str] = []
        assert find_checkpoint(tmp_path, "auto", warn=warnings.append) == old, name
        assert len(warnings) == 1 and warnings[0].startswith(f"{folder} is damaged and passed over: "), name
        mend(whole)
    assert verify_checkpoint(folder) == []


def test_an_edited_manifest_with_a_new_digest_still_has_to_match_the_files(tmp_path: Path) -> None:
    folder = save(tmp_path, 10)
    manifest = read_manifest(folder)
    manifest["files"]["outer.safetensors"]["sha256"] = "0" * 64
    (folder / "manifest.json").write_bytes(checkpoint._encode_manifest(manifest))
    assert verify_checkpoint(folder) == ["outer.safetensors is altered (its SHA-256 is not the one that was saved)"]
    assert verify_checkpoint(folder, quick=True) == []


def test_a_checkpoint_of_a_later_format_is_named_as_such(tmp_path: Path) -> None:
    folder = save(tmp_path, 10)
    (folder / "manifest.json").write_bytes(checkpoint._encode_manifest(read_manifest(folder) | {"format": 2}))
    assert verify_checkpoint(folder) == ["manifest.json is of format 2; this atoll reads up to 1"]


def test_files_beside_those_of_the_manifest_are_no_damage(tmp_path: Path) -> None:
    folder = save(tmp_path, 10)
    (folder / "notes.txt").write_text("the good one")
    assert verify_checkpoint(folder) == []


# ---------------------------------------------------------------------------------------------------------------------
# Finding


def test_nothing_saved_means_a_fresh_start(tmp_path: Path) -> None:
    assert find(tmp_path / "absent") is None
    prepare_run_dir(tmp_path, warn=lambda message: None)
    assert find(tmp_path) is None
    save(tmp_path, 10)
    assert find(tmp_path, "never") is None


def test_only_damaged_checkpoints_are_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    for step in (10, 20):
        (save(tmp_path, step) / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 2 .*step-000020: config.json is missing") as error:
        find_checkpoint(tmp_path, "auto", warn=lambda message: None)
    assert_short(error)


def test_the_pointer_is_not_trusted(tmp_path: Path) -> None:
    folder = save(tmp_path, 10)
    for text in ("", "checkpoints/step-999999\n", "../../etc\n"):
        (tmp_path / "latest").write_text(text)
        assert find(tmp_path) == folder


def test_a_path_is_taken_when_valid(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", 10)
    save(tmp_path / "a", 20)
    assert find(tmp_path / "b", folder) == folder
    assert find(tmp_path / "b", str(folder)) == folder


def test_a_damaged_path_is_refused_and_a_valid_one_is_named(tmp_path: Path) -> None:
    good, bad = save(tmp_path, 10), save(tmp_path, 20)
    (bad / "outer.safetensors").write_bytes(b"")
    message = r"step-000020' is no valid checkpoint: outer.safetensors has 0 bytes.*\nValid is .*step-000010:"
    with pytest.raises(CheckpointError, match=message) as error:
        find(tmp_path, bad)
    assert_short(error)
    shutil.rmtree(good)
    with pytest.raises(CheckpointError, match="No other valid checkpoint") as error:
        find(tmp_path, bad)
    assert_short(error)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        (".", "manifest.json is missing"),
        ("latest", "it is a file"),
        ("checkpoints/step-000077", "there is no such folder"),
        ("checkpoints/step-000010/config.json", "it is a file"),
        ("checkpoints/step-000010/config.json/x", "there is no such folder"),
    ],
)
def test_a_path_that_is_no_checkpoint_folder_is_refused_with_the_one_that_was_meant(
    path: str, problem: str, tmp_path: Path
) -> None:
    save(tmp_path, 10)
    with pytest.raises(CheckpointError, match=rf"{problem}.*\nValid is .*step-000010") as error:
        find(tmp_path, tmp_path / path)
    assert_short(error)


def test_a_checkpoint_that_may_not_be_read_is_an_error_without_traceback(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="checkpoints cannot be read") as error:
        find(tmp_path / "run")
    assert_short(error)


# ---------------------------------------------------------------------------------------------------------------------
# Settings


def test_equal_settings_pass_through_json() -> None:
    current = {"betas": (0.9, 0.95), "seed": 1, "data.source": "python"}
    refuse_other_config(json.loads(json.dumps(current)), current)


def test_other_settings_are_refused_with_three_of_them_named() -> None:
    saved = {"seed": 1, "inner_steps": 10, "outer_lr": 0.7, "merge": "uniform", "gone": 1}
    current = {"seed": 2, "inner_steps": 20, "outer_lr": 0.9, "merge": "tokens", "fresh": None}
    told = r"seed=1 \(now 2\), inner_steps=10 \(now 20\), outer_lr=0.7 \(now 0.9\) and 3 more\."
    with pytest.raises(CheckpointError, match=told) as error:
        refuse_other_config(saved, current)
    assert_short(error)


def test_a_setting_of_one_side_only_is_told_as_unset() -> None:
    with pytest.raises(CheckpointError, match=r"old=1 \(now unset\), new=unset \(now None\)"):
        refuse_other_config({"old": 1}, {"new": None})
