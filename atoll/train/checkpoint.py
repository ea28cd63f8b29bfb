"""Checkpoints on disk: saved whole or not at all, verified before they are used, safetensors and JSON only.

    RUN/latest                            text, one line: the newest checkpoint, relative to RUN
    RUN/checkpoints/step-000040/
        config.json, model.safetensors    the model, and its tokenizer, as transformers writes them
        outer.safetensors                 the outer state
        replica-0.safetensors ...         parameters, inner optimizer, generators: one file a replica
        state.json                        round, step, essential settings, data positions
        manifest.json                     size and SHA-256 of every file above, format, version, serial number
    RUN/checkpoints/.step-000040.partial  being written; `.replaced`: the older save of the same step, until the newer
                                          one stands; `.trash`: being deleted

This layer knows files, not optimizers. A save of several processes:

    leader                                     every replica, the leader too
    prepare_run_dir(run)  [once, before any replica writes]
                                               writer = CheckpointWriter(run, step)
                                               writer.save_state("replica-1.safetensors", state)
    writer.save_files(model.save_pretrained)
    writer.save_json("state.json", ...)
                       ── barrier ──
    writer.commit(expected_files=[...])

`latest` is a text file, not a symbolic link: it survives copies and filesystems that know no links, and is replaced in
one rename. It is there for people and scripts. `find_checkpoint` trusts no pointer: it takes the newest folder that
verifies. Newest goes by the serial number in the manifest, one more for each save in the folder, not by step: after
an explicit resume from step 20 beside an abandoned step 60, the new step 30 is what `auto` goes on from.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import atoll
from atoll.errors import CheckpointError, ConfigError, StorageError

FORMAT = 1
MANIFEST = "manifest.json"

_VISIBLE = re.compile(r"step-(\d+)")
_HIDDEN = re.compile(r"\.(step-(\d+))\.(partial|replaced|trash)")
_STATE_KEY = "atoll_state"
_HEADER_LIMIT = 100_000_000  # bytes; readers of safetensors refuse a longer header
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


# ---------------------------------------------------------------------------------------------------------------------
# The disk, and what it refuses


class Disk:
    """The five things a save does to a disk. Tests put a recorder, a fault or a power cut in its place."""

    def make_dir(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def write(self, path: Path, chunks: Iterable[Any]) -> None:
        with open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def sync(self, path: Path) -> None:
        """Waits until a file's bytes, or a folder's entries, are on the medium."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network filesystems know no fsync of a folder: their renames are synchronous, or nothing helps.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
                raise
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """Removes a file, a link or an empty folder; one that is gone already is fine."""
        with suppress(FileNotFoundError):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()


DISK = Disk()

_MORE_SPACE = "Free some space there, lower keep_last, or set output_dir to a disk with more."
_ELSEWHERE = "Set output_dir to a folder that you may write to."
_MOVE_IT = "Move that file away, or set output_dir to another folder."
_REFUSALS = {
    errno.ENOSPC: ("the disk is full", _MORE_SPACE),
    errno.EDQUOT: ("the disk quota is used up", _MORE_SPACE),
    errno.EFBIG: ("the file is larger than the filesystem allows", "Set output_dir to another filesystem."),
    errno.EACCES: ("there is no permission to write", _ELSEWHERE),
    errno.EPERM: ("there is no permission to write", _ELSEWHERE),
    errno.EROFS: ("the filesystem is read-only", _ELSEWHERE),
    errno.ENOTDIR: ("a file stands where a folder must be", _MOVE_IT),
    errno.EEXIST: ("a file stands where a folder must be", _MOVE_IT),
    errno.ENOENT: (
        "the folder vanished while it was written to",
        "Another replica failed to save, or another program cleans up there: see their messages.",
    ),
}


def _refusal(path: Path, error: OSError) -> StorageError:
    """What the disk said about `path`, as value, rule and way out."""
    place = error.filename or path
    reason, way_out = _REFUSALS.get(
        error.errno or 0, (error.strerror or str(error), "Check the disk, or set output_dir to another one.")
    )
    return StorageError(f"{place} cannot be written: {reason}. What was saved before is untouched.\n{way_out}")


@contextmanager
def _refusals(path: Path, *, undo: Callable[[], None] | None = None) -> Iterator[None]:
    """Turns an OSError of the disk work inside into a `StorageError`, after `undo`."""
    try:
        yield
    except OSError as error:
        if undo is not None:
            undo()
        raise _refusal(path, error) from error


def _write(disk: Disk, path: Path, chunks: Iterable[Any]) -> None:
    disk.write(path, chunks)
    disk.sync(path)


def _make_dirs(disk: Disk, folder: Path) -> None:
    """Makes a folder and its parents; each new entry is synced, or a power cut would drop the tree with all in it."""
    missing = list(itertools.takewhile(lambda path: not path.is_dir(), [folder, *folder.parents]))
    for path in reversed(missing):
        disk.make_dir(path)
        disk.sync(path.parent)


def _remove_tree(disk: Disk, folder: Path) -> None:
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in sorted(files) + sorted(folders):
            disk.remove(Path(parent, name))
    disk.remove(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Nested state as tensors and JSON


def pack_state(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Splits nested state into named tensors and a JSON value that `unpack_state` puts together again, exactly.

    Taken: tensors, dict (any keys of the other kinds, order kept), list, tuple, str, bool, int, None, and float bit for
    bit, NaN and infinities included. Subclasses of dict and tuple come back as dict and tuple. A tensor that occurs
    twice, or shares memory with another (tied weights), is stored for each and comes back as separate tensors; strides
    are not kept. Anything else is a TypeError that names the place.

    >>> tensors, tree = pack_state({"state": {0: {"step": torch.tensor(3.0)}}, "lr": 0.1})
    >>> tensors
    {'state.0.step': tensor(3.)}
    >>> tree
    {'dict': [['state', {'dict': [[0, {'dict': [['step', {'tensor': 'state.0.step'}]]}]]}], ['lr', 0.1]]}
    >>> unpack_state(tensors, tree)
    {'state': {0: {'step': tensor(3.)}}, 'lr': 0.1}
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _pack(state, "", tensors)


def unpack_state(tensors: Mapping[str, Tensor], tree: Any) -> Any:
    """The state that `pack_state` split. Raises `CheckpointError` when the two parts do not belong together."""
    try:
        return _unpack(tree, tensors)
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"a packed state cannot be put together: {error!r}. Its tensors and its JSON are not of one save.\n"
            "Use another checkpoint, or save again."
        ) from error


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    # In JSON an object always stands for something else, named by its one key, so that no state can look like a tag.
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if isinstance(value, Tensor):
        name = _unused_name(path, tensors)
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, dict):
        items = value.items()
        return {"dict": [[_pack(key, path, tensors), _pack(item, f"{path}.{key}", tensors)] for key, item in items]}
    if isinstance(value, list | tuple):
        packed = [_pack(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return packed if isinstance(value, list) else {"tuple": packed}
    raise TypeError(
        f"state{path} is a {type(value).__module__}.{type(value).__qualname__}, which is no tensor, number, string or "
        "container; a checkpoint holds nothing that needs pickle. Turn it into one of those."
    )


def _unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((tag, content),) = tree.items()
    if tag == "tensor":
        return tensors[content]
    if tag == "float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if tag == "tuple":
        return tuple(_unpack(item, tensors) for item in content)
    if tag == "dict":
        return {_unpack(key, tensors): _unpack(item, tensors) for key, item in content}
    raise KeyError(tag)


def _unused_name(path: str, taken: Mapping[str, Tensor]) -> str:
    """A readable name for the tensor at `path`; {"a.b": t} and {"a": {"b": t}} differ by a suffix."""
    name = path[1:].encode("ascii", "backslashreplace").decode() or "tensor"
    names = itertools.chain([name], (f"{name}#{count}" for count in itertools.count(2)))
    return next(name for name in names if name not in taken and name != "__metadata__")


# ---------------------------------------------------------------------------------------------------------------------
# Files


def save_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, *, disk: Disk = DISK
) -> None:
    """Writes a safetensors file, tensor by tensor, and syncs it.

    Any dtype of `_DTYPES`, any shape (0-dim and empty too), any strides, any device; tensors may share memory, each is
    written in full. At most one tensor is copied at a time: a replica's state is several times its model. Raises
    `StorageError` when the disk refuses, TypeError for a tensor that has no bytes to save (sparse, meta, quantized).
    """
    path = Path(path)
    # Wide dtypes first, so that each tensor lies aligned in the file.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header = _header(ordered, metadata or {})
    with _refusals(path):
        _write(disk, path, itertools.chain([header], (_raw_bytes(tensor) for _, tensor in ordered)))


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, on the CPU, each in memory of its own, and the file's metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            # clone: what the library returns are views into the mapped file, which may be pruned while they are used
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is no dict)
            return tensors, dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise _unreadable(Path(path), error) from error


def save_state(path: str | Path, state: Any, *, disk: Disk = DISK) -> None:
    """Writes nested state, as `pack_state` takes it, to one safetensors file."""
    tensors, tree = pack_state(state)
    save_tensors(path, tensors, {_STATE_KEY: json.dumps(tree)}, disk=disk)


def load_state(path: str | Path) -> Any:
    """The nested state of a file made by `save_state`."""
    tensors, metadata = load_tensors(path)
    try:
        tree = json.loads(metadata[_STATE_KEY])
    except (KeyError, ValueError) as error:
        raise _unreadable(Path(path), "it holds tensors, but no state saved by atoll") from error
    return unpack_state(tensors, tree)


def save_json(path: str | Path, value: Any, *, disk: Disk = DISK) -> None:
    """Writes a JSON value; keys must be strings, for JSON turns all others into strings without a word."""
    _check_keys(value, Path(path).name)
    text = json.dumps(value, indent=1) + "\n"
    with _refusals(Path(path)):
        _write(disk, Path(path), [text.encode()])


def load_json(path: str | Path) -> Any:
    """The value in a JSON file; raises `CheckpointError` when it is missing or cut off."""
    try:
        return json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise _unreadable(Path(path), error) from error


def _check_keys(value: Any, place: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{place} has the key {key!r}; JSON would turn it into a string. Use {str(key)!r}.")
            _check_keys(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_keys(item, f"{place}.{index}")


def _unreadable(path: Path, reason: object) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {reason}.\nUse another checkpoint, e.g. resume='auto'.")


def _header(ordered: Sequence[tuple[str, Tensor]], metadata: Mapping[str, str]) -> bytes:
    """The head of a safetensors file: its length (8 bytes, little-endian), then JSON padded to a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided or tensor.is_meta:
            raise TypeError(
                f"tensor {name!r} ({tensor.dtype}, {tensor.layout}, {tensor.device}) cannot be saved: safetensors "
                "holds dense tensors of the usual dtypes. Convert it first."
            )
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _HEADER_LIMIT:
        raise ValueError(
            f"{len(text):,} bytes of names and JSON state are more than the {_HEADER_LIMIT:,} of a safetensors header. "
            "Keep long lists of numbers as tensors."
        )
    return struct.pack("<Q", len(text)) + text


def _raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, without a copy where they lie so on the CPU already."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


# ---------------------------------------------------------------------------------------------------------------------
# Saving


class CheckpointWriter:
    """Writes one checkpoint, in one process or in several that share `run_dir`, and makes it visible in one rename.

    Every process writes files of its own with `save_*`; when all have (a barrier), one of them, the leader, calls
    `commit`. Until then the folder is hidden and nothing reads it. When the disk refuses, the half-written folder is
    removed, a `StorageError` says why, and every earlier checkpoint and `latest` are as they were. In whichever process
    that happens, `commit` then fails as well, for want of that process's file: the caller only has to see to it that
    a process whose save failed still comes to the barrier.
    """

    def __init__(self, run_dir: str | Path, step: int, *, keep_last: int = 3, disk: Disk = DISK) -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last={keep_last} would keep no checkpoint at all. Use 1 or more.")
        self.run_dir = Path(run_dir)
        self.step = step
        self.keep_last = keep_last
        self.disk = disk
        self.checkpoints = self.run_dir / "checkpoints"
        self.folder = self.checkpoints / f"step-{step:06d}"
        self.staging = _hidden(self.folder, "partial")

    def save_tensors(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Writes a safetensors file `name`; see `save_tensors` of this module."""
        with self._into_staging():
            save_tensors(self.staging / name, tensors, metadata, disk=self.disk)

    def save_state(self, name: str, state: Any) -> None:
        """Writes nested state to a safetensors file `name`; see `save_state` of this module."""
        with self._into_staging():
            save_state(self.staging / name, state, disk=self.disk)

    def save_json(self, name: str, value: Any) -> None:
        """Writes a JSON file `name`; keys must be strings."""
        with self._into_staging():
            save_json(self.staging / name, value, disk=self.disk)

    def save_files(self, write: Callable[[Path], object]) -> None:
        """Lets `write` put files of its own into the folder, e.g. `model.save_pretrained`; `commit` syncs them."""
        with self._into_staging():
            try:
                write(self.staging)
            except Exception as error:
                # safetensors and tokenizers report a full disk from Rust as a SafetensorError or a bare Exception
                # with the number in its text. Whatever has no such number is none of our business and goes on up.
                found = re.search(r"\(os error (\d+)\)", str(error))
                if isinstance(error, OSError) or found is None:
                    raise
                raise OSError(int(found[1]), os.strerror(int(found[1])), str(self.staging)) from error

    def commit(self, *, expected_files: Iterable[str]) -> Path:
        """Seals the folder, gives it its name, moves `latest`, removes old checkpoints; returns the folder.

        `expected_files`: names that must have arrived, those of the other processes above all. Call it in exactly one
        process, after the others have written.
        """
        # The order of syncs, and what a power cut would leave without each (it may drop anything not yet synced):
        #
        #   1 sync every file         else: rename kept, bytes lost: step-40 exists and is empty
        #   2 sync staging folders    else: rename kept, entries lost: step-40 exists and lacks files
        #   3 rename to step-40
        #   4 sync checkpoints/       else: 6 kept, 3 lost: step-30 is deleted and step-40 has no name: nothing is left;
        #                                   or 5 kept, 3 lost: latest names a folder that is not there
        #   5 write, sync, rename latest, sync RUN    else: 6 kept, 5 lost: latest names a deleted folder
        #   6 rename step-10 to .step-10.trash, sync checkpoints/, delete
        #                             else: deletions kept, rename lost: step-10 looks damaged instead of gone
        with self._cleaning_up(), _refusals(self.folder, undo=self._roll_back):
            self._require(expected_files)
            _sweep(self.disk, self.checkpoints, before_step=self.step)
            self._seal()
            self._publish()
            self._point_latest()
            _discard(self.disk, self._outdated())
        return self.folder

    def abort(self) -> None:
        """Removes what was written so far; for a save that cannot go on."""
        with suppress(OSError):  # the error that led here is the one to tell; what stays goes at the next start
            _remove_tree(self.disk, self.staging)

    @property
    def _latest_draft(self) -> Path:
        return self.run_dir / ".latest.partial"

    def _roll_back(self) -> None:
        """Undoes the visible half of a commit: an older save of the same step gets its name back."""
        replaced = _hidden(self.folder, "replaced")
        with suppress(OSError):
            if replaced.exists() and not self.folder.exists():
                self.disk.rename(replaced, self.folder)
        with suppress(OSError):
            self.disk.remove(self._latest_draft)

    @contextmanager
    def _cleaning_up(self) -> Iterator[None]:
        try:
            with _refusals(self.staging):
                yield
        except StorageError:
            self.abort()
            raise

    @contextmanager
    def _into_staging(self) -> Iterator[None]:
        with self._cleaning_up():
            _make_dirs(self.disk, self.checkpoints)
            self.disk.make_dir(self.staging)
            yield

    def _require(self, names: Iterable[str]) -> None:
        missing = [name for name in names if not (self.staging / name).is_file()]
        if missing:
            told = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if missing[3:] else "")
            raise StorageError(
                f"{told} did not reach {self.staging}: output_dir must be on a filesystem that all replicas share.\n"
                "Set output_dir to one; if it is, see the message of the replica that did not write. What was saved "
                "before is untouched."
            )

    def _seal(self) -> None:
        # Each process has synced its own files: on a network filesystem only the writer can. Here those of
        # `save_files` follow; for the rest it costs nothing.
        files = sorted(path for path in self.staging.rglob("*") if path.is_file())
        for path in files:
            self.disk.sync(path)
        manifest = {
            "format": FORMAT,
            "atoll": atoll.__version__,
            "step": self.step,
            "serial": 1 + max((_serial(folder) or 0 for folder in _listed(self.checkpoints)), default=0),
            "files": {path.relative_to(self.staging).as_posix(): _fingerprint(path) for path in files},
        }
        _write(self.disk, self.staging / MANIFEST, [_encode_manifest(manifest)])
        for folder, _, _ in os.walk(self.staging, topdown=False):
            self.disk.sync(Path(folder))

    def _publish(self) -> None:
        # No rename replaces a folder that has files in it, so an older save of this step (made before a resume from an
        # earlier one) steps aside first. Between the two renames it is valid under its hidden name, which
        # `find_checkpoint` knows; the sync keeps the second rename from being on the medium before the first.
        if self.folder.exists():
            self.disk.rename(self.folder, _hidden(self.folder, "replaced"))
            self.disk.sync(self.checkpoints)
        self.disk.rename(self.staging, self.folder)
        self.disk.sync(self.checkpoints)

    def _point_latest(self) -> None:
        line = self.folder.relative_to(self.run_dir).as_posix() + "\n"
        _write(self.disk, self._latest_draft, [line.encode()])
        self.disk.rename(self._latest_draft, self.run_dir / "latest")
        self.disk.sync(self.run_dir)

    def _outdated(self) -> list[Path]:
        """What this save makes superfluous. Damaged folders count as nothing and are left for people to look at."""
        replaced = _hidden(self.folder, "replaced")
        others = [path for path in _newest_first(self.checkpoints) if path not in (self.folder, replaced)]
        whole = [path for path in others if not verify_checkpoint(path, quick=True)]
        return whole[self.keep_last - 1 :] + [replaced] * replaced.exists()


def prepare_run_dir(run_dir: str | Path, *, warn: Callable[[str], None], disk: Disk = DISK) -> None:
    """Makes `run_dir` ready for saves: called by the leader at the start, before `find_checkpoint` and any save.

    Creates the folders, tries whether they can be written to (better now than after an hour), removes what a killed
    save left behind, and says so through `warn`. Raises `StorageError`.
    """
    checkpoints = Path(run_dir) / "checkpoints"
    with _refusals(checkpoints):
        _make_dirs(disk, checkpoints)
        trial = checkpoints / ".write-trial"
        disk.write(trial, [b"atoll"])
        disk.remove(trial)
        for message in _sweep(disk, checkpoints, before_step=None):
            warn(message)


def _hidden(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


def _sweep(disk: Disk, checkpoints: Path, *, before_step: int | None) -> list[str]:
    """Puts in order what a killed save left: returns what to say about it.

    Partial folders of `before_step` and later are left alone: it is being saved, and a fast replica may have begun the
    next. None: all go.
    """
    messages, replaced = [], []
    for path in sorted(checkpoints.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match is None or (match[3] == "partial" and before_step is not None and int(match[2]) >= before_step):
            continue
        if match[3] == "replaced":
            replaced.append(path)
            continue
        if match[3] == "partial":
            messages.append(f"the save of {match[1]} was cut off; its remains were removed.")
        _delete(disk, path)
    for path in [path for path in replaced if not _final(path).exists()]:
        messages.append(f"the second save of {_final(path).name} was cut off; its first save is used.")
        disk.rename(path, _final(path))
    if replaced:
        disk.sync(checkpoints)
    _discard(disk, [path for path in replaced if path.exists()])
    return messages


def _final(path: Path) -> Path:
    """The visible folder that a hidden one belongs to."""
    match = _HIDDEN.fullmatch(path.name)
    return path.with_name(match[1]) if match else path


def _discard(disk: Disk, folders: Sequence[Path]) -> None:
    """Deletes checkpoints; a crash in the middle never leaves one that looks damaged, for trash is never looked at."""
    if not folders:
        return
    trash = [_hidden(_final(folder), "trash") for folder in folders]
    for folder, target in zip(folders, trash, strict=True):
        disk.rename(folder, target)
    disk.sync(folders[0].parent)
    for target in trash:
        _delete(disk, target)


def _delete(disk: Disk, folder: Path) -> None:
    """Deletes a hidden folder; what another process still holds open (network filesystems) goes at the next sweep."""
    try:
        _remove_tree(disk, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise


# ---------------------------------------------------------------------------------------------------------------------
# Verifying and finding


def verify_checkpoint(folder: str | Path, *, quick: bool = False) -> list[str]:
    """What is wrong with a checkpoint, one line each; an empty list: nothing.

    Every file of the manifest must be there with its size and, unless `quick`, its SHA-256. The manifest itself carries
    a digest of its content, so that no flipped bit in it passes. Files that it does not list are no concern.
    """
    folder = Path(folder)
    try:
        files = read_manifest(folder)["files"]
    except CheckpointError as error:
        return [str(error)]
    problems = [_size_problem(folder / name, entry["bytes"], name) for name, entry in files.items()]
    if not quick and not any(problems):
        problems = [_digest_problem(folder / name, entry["sha256"], name) for name, entry in files.items()]
    return [problem for problem in problems if problem]


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint: format, atoll (version), step, serial, files ({name: {bytes, sha256}}).

    Raises `CheckpointError`, in one line, when it is missing, altered or of a later format.
    """
    path = Path(folder) / MANIFEST
    try:
        raw = path.read_bytes()
        manifest: Any = json.loads(raw)
    except OSError as error:
        raise CheckpointError(_no_manifest(path, error)) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged ({len(raw)} bytes that are not JSON)") from error
    if isinstance(manifest, dict) and isinstance(manifest.get("format"), int) and manifest["format"] > FORMAT:
        raise CheckpointError(f"{MANIFEST} is of format {manifest['format']}; this atoll reads up to {FORMAT}")
    if not _is_manifest(manifest) or _encode_manifest(manifest) != raw:
        raise CheckpointError(f"{MANIFEST} is damaged (its content does not match its own digest)")
    checked: dict[str, Any] = manifest
    return checked


def find_checkpoint(run_dir: str | Path, resume: str | Path, *, warn: Callable[[str], None]) -> Path | None:
    """The checkpoint folder to go on from, verified; None: start afresh.

    resume: "never"; "auto", the newest valid checkpoint of `run_dir`, each damaged one passed over being told through
    `warn`; or the path of a checkpoint. It reads every byte: call it in one process, after `prepare_run_dir`, and tell
    the others. Raises `CheckpointError` when the path is no valid checkpoint, or when "auto" finds only damaged ones,
    for starting afresh would bury them.
    """
    if str(resume) == "never":
        return None
    checkpoints = Path(run_dir) / "checkpoints"
    if str(resume) == "auto":
        return _newest_valid(checkpoints, warn)
    problems = verify_checkpoint(resume)
    if not problems:
        return Path(resume)
    more = f" (and {len(problems) - 1} more)" if problems[1:] else ""
    way_out = _another(Path(resume), Path(run_dir))
    raise CheckpointError(f"resume={str(resume)!r} is no valid checkpoint: {problems[0]}{more}.\n{way_out}")


def refuse_other_config(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` when the settings of a checkpoint and of this run, flat dicts, are not the same.

    >>> refuse_other_config({"seed": 1, "inner_steps": 10}, {"seed": 2, "inner_steps": 10})
    Traceback (most recent call last):
    ...
    atoll.errors.CheckpointError: the checkpoint was made with other settings: seed=1 (now 2).
    A resumed run must compute the same. Give those values again, or start anew with another output_dir.
    """
    absent = object()
    keys = [*saved, *(key for key in current if key not in saved)]
    # A checkpoint's settings have been through JSON; both go through it here, so that (1, 2) equals [1, 2].
    then, now = (json.loads(json.dumps(dict(settings))) for settings in (saved, current))
    differing = [key for key in keys if then.get(key, absent) != now.get(key, absent)]
    if not differing:
        return
    told = [f"{key}={_shown(then, key)} (now {_shown(now, key)})" for key in differing[:3]]
    more = f" and {len(differing) - 3} more" if differing[3:] else ""
    raise CheckpointError(
        f"the checkpoint was made with other settings: {', '.join(told)}{more}.\n"
        "A resumed run must compute the same. Give those values again, or start anew with another output_dir."
    )


def _shown(settings: Mapping[str, Any], key: str) -> str:
    return repr(settings[key]) if key in settings else "unset"


def _newest_valid(checkpoints: Path, warn: Callable[[str], None]) -> Path | None:
    try:
        folders = _newest_first(checkpoints)
    except OSError as error:
        raise _unreadable(checkpoints, error) from error
    first_problem = ""
    for folder in folders:
        problems = verify_checkpoint(folder)
        if not problems:
            return folder
        first_problem = first_problem or f"{folder.name}: {problems[0]}"
        warn(f"{folder} is damaged and passed over: {problems[0]}.")
    if not folders:
        return None
    raise CheckpointError(
        f"none of the {len(folders)} checkpoints in {checkpoints} is valid ({first_problem}).\n"
        "Starting afresh here would bury them: put one back from a copy, or set another output_dir."
    )


def _another(asked: Path, run_dir: Path) -> str:
    """The way out when `asked` is no checkpoint: a valid one nearby, if there is one."""
    # asked may be a checkpoint, a run folder, or the `latest` in one
    for place in (asked.parent, asked / "checkpoints", asked.parent / "checkpoints", run_dir / "checkpoints"):
        with suppress(OSError):
            for folder in _newest_first(place):
                if folder != asked and not verify_checkpoint(folder):
                    return f"Valid is {folder}: give that path, or resume='auto' for the newest one of output_dir."
    return "No other valid checkpoint was found beside it; give another path, or start afresh with resume='never'."


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """All checkpoints in a folder, valid or not, by step."""
    return sorted(_listed(checkpoints), key=lambda folder: int(re.findall(r"\d+", folder.name)[0]))


def _listed(checkpoints: Path) -> list[Path]:
    """The checkpoints in a folder, valid or not; the older save of a step counts while the newer one has no name."""
    if not checkpoints.exists():
        return []
    visible = [path for path in checkpoints.iterdir() if _VISIBLE.fullmatch(path.name)]
    hidden = [path for path in checkpoints.glob(".step-*.replaced") if _HIDDEN.fullmatch(path.name)]
    return visible + hidden


def _newest_first(checkpoints: Path) -> list[Path]:
    """By serial number, then step. One without a readable manifest comes first: it may be the newest, so it is told."""

    def age(folder: Path) -> tuple[float, int]:
        serial = _serial(folder)
        return (math.inf if serial is None else serial), int(re.findall(r"\d+", folder.name)[0])

    return sorted(_listed(checkpoints), key=age, reverse=True)


def _serial(folder: Path) -> int | None:
    try:
        return int(read_manifest(folder)["serial"])
    except CheckpointError:
        return None


def _encode_manifest(manifest: Mapping[str, Any]) -> bytes:
    """The one way to write a manifest: its digest is over its own text without the digest."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(content, indent=1, sort_keys=True).encode()).hexdigest()
    return (json.dumps(content | {"sha256": digest}, indent=1, sort_keys=True) + "\n").encode()


def _is_manifest(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("files"), dict):
        return False
    numbers = all(isinstance(value.get(key), int) for key in ("format", "step", "serial"))
    return numbers and all(_is_fingerprint(entry) for entry in value["files"].values())


def _is_fingerprint(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("bytes"), int) and isinstance(value.get("sha256"), str)


def _no_manifest(path: Path, error: OSError) -> str:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        return f"{MANIFEST} cannot be read ({error.strerror})"
    if path.parent.is_file():
        return "it is a file; a checkpoint is a folder"
    return f"{MANIFEST} is missing" if path.parent.exists() else "there is no such folder"


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size_problem(path: Path, size: int, name: str) -> str | None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if found == size else f"{name} has {found:,} bytes, not the {size:,} that were saved"


def _digest_problem(path: Path, digest: str, name: str) -> str | None:
    try:
        found = _sha256(path)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if found == digest else f"{name} is altered (its SHA-256 is not the one that was saved)"
