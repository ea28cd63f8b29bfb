"""Parameters and their state on disk, written by each worker for the rows it owns, read by any other layout.

A file holds rows of tensors and says in its header which rows they are. Whoever reads asks for a range of a name and
gets it from whichever files have it, so that a checkpoint of 2 stages is loaded by 4 or by 1, sharded or not. Files of
transformers (`model.safetensors`), which hold whole tensors, are read in the same way. Nothing here unpickles.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from atoll.errors import CheckpointError
from atoll.parallel.sharding import Shard

_HEADER = "atoll.rows"


def write_shards(path: Path, shards: Mapping[str, Shard]) -> None:
    """Write the rows of one worker. Not atomic: write into a folder that is not yet the checkpoint."""
    tensors = {name: shard.tensor.contiguous() for name, shard in shards.items() if shard.stop > shard.start}
    rows = {name: [shards[name].start, *shards[name].full_shape] for name in tensors}
    save_file(tensors, path, metadata={_HEADER: json.dumps(rows)})  # of two keys the order would be left to chance


@dataclass(frozen=True)
class _Rows:
    """Where the elements [start, stop) of a name lie."""

    path: Path
    start: int
    stop: int


class ShardReader:
    """Ranges of tensors out of files that `write_shards` or transformers wrote.

    shapes: of the whole tensors, by name.

    Raises CheckpointError for files that cannot be read, that contradict each other, or that do not have what is asked.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self.shapes: dict[str, torch.Size] = {}
        self._rows: dict[str, list[_Rows]] = {}
        for path in sorted(paths):
            for name, start, numel, shape in _contents(path):
                if self.shapes.setdefault(name, shape) != shape:
                    raise CheckpointError(
                        f"{path.name} has {name} as {list(shape)}, another file as {list(self.shapes[name])}; they "
                        f"belong to different models. Use the files of one checkpoint."
                    )
                self._rows.setdefault(name, []).append(_Rows(path, start, start + numel))

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """The elements [start, stop) of the flattened tensor `name`; whole rows of it."""
        parts, at = [], start
        for rows in sorted(self._rows.get(name, ()), key=lambda rows: rows.start):
            if at < stop and rows.start <= at < rows.stop:
                parts.append(self._read_file(rows, name, at, min(stop, rows.stop)))
                at = min(stop, rows.stop)
        if at < stop:
            what = f"elements {at} to {stop} of {name}" if name in self.shapes else f"the tensor {name}"
            raise CheckpointError(f"the checkpoint lacks {what}. Use one with the files of all its workers.")
        return torch.cat(parts) if parts else torch.empty(0)

    @torch.no_grad()
    def fill_(self, shards: Iterable[tuple[str, Shard]]) -> None:
        """Write what the files have into the rows of `shards`: (name, rows) pairs."""
        for name, shard in shards:
            if name in self.shapes and self.shapes[name] != shard.full_shape:
                raise CheckpointError(
                    f"{name} is {list(self.shapes[name])} in the checkpoint and {list(shard.full_shape)} in the model. "
                    f"Use the checkpoint of a model of this size."
                )
            if shard.stop > shard.start:
                shard.tensor.copy_(self.read(name, shard.start, shard.stop).view(shard.tensor.shape))

    def whole(self, name: str) -> Tensor:
        shape = self.shapes[name]
        return self.read(name, 0, shape.numel()).view(shape)

    def _read_file(self, rows: _Rows, name: str, start: int, stop: int) -> Tensor:
        shape = self.shapes[name]
        width = shape.numel() // shape[0] if shape else 1
        assert start % width == stop % width == 0, f"[{start}, {stop}) of {name} is not whole rows of {width}"
        with safe_open(rows.path, framework="pt") as file:
            if not shape:
                return file.get_tensor(name).view(1)
            return file.get_slice(name)[(start - rows.start) // width : (stop - rows.start) // width].reshape(-1)


def export_model(reader: ShardReader, folder: Path, config: PreTrainedConfig, *, max_file_bytes: int = 4 << 30) -> None:
    """Write the tensors of `reader` as one Hugging Face folder that `from_pretrained` loads. One file in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    files = list(_fill_files(reader, max_file_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        save_file({name: reader.whole(name) for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        total = sum(shape.numel() for shape in reader.shapes.values()) * 4
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    config.save_pretrained(folder)


def optimizer_values(
    params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """The optimizer's state of the shape of its parameter, by kind and by name: `values["exp_avg"]["model..."]`."""
    values: dict[str, dict[str, Tensor]] = {}
    for name, param in params.items():
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.shape == param.shape and key != "step":
                values.setdefault(key, {})[name] = value
    return values


@torch.no_grad()
def make_optimizer_state_(
    params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, *, keys: Iterable[str], step: int
) -> None:
    """State as after `step` steps, with zeros for `keys` (Adam's `exp_avg`, `exp_avg_sq`) to be filled from files."""
    keys = tuple(keys)
    for param in params.values():
        count = torch.tensor(float(step), dtype=torch.float32, device=param.device)
        optimizer.state[param] = {"step": count} | {key: torch.zeros_like(param) for key in keys}


def _contents(path: Path) -> Iterator[tuple[str, int, int, torch.Size]]:
    """(name, first element, number of elements, whole shape) of each tensor of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            header = _rows_of_header((file.metadata() or {}).get(_HEADER))
            for name in file.keys():  # noqa: SIM118 (a file, not a dict)
                shape = list(file.get_slice(name).get_shape())
                start, *whole = header.get(name, [0, *shape])
                numel = torch.Size(shape).numel()
                if shape[1:] != whole[1:] or not 0 <= start <= start + numel <= torch.Size(whole).numel():
                    raise CheckpointError(f"{path} says of {name} what it does not hold. Use another checkpoint.")
                yield name, start, numel, torch.Size(whole)
    except (OSError, SafetensorError, json.JSONDecodeError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} cannot be read: {error}. Use another checkpoint.") from error


def _rows_of_header(text: str | None) -> dict[str, list[int]]:
    header: Any = json.loads(text) if text else {}
    numbers = [value for row in header.values() for value in row] if isinstance(header, dict) else [None]
    if not all(type(value) is int and value >= 0 for value in numbers):
        raise ValueError("its header of rows is not one")
    return header


def _fill_files(reader: ShardReader, max_file_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, shape in reader.shapes.items():
        if names and size + shape.numel() * 4 > max_file_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += shape.numel() * 4
    yield names
