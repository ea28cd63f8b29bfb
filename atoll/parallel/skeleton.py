"""A model's weights for the part of it that a worker holds, bit for bit those of the whole model.

Initial weights come from one stream of random numbers, in the order in which the modules are made, so the weights of
layer 40 depend on how many numbers layers 0 to 39 took. To have them without 40 layers in memory the model is built
once with parameters that have no storage, while every in-place fill of a parameter is written down. Playing the list
back makes the fills of the parameters wanted, and draws and drops those of all others, one tensor at a time.

                       wanted: layer 1          memory: the parameters wanted, and one more
    normal_(layer 0)   drawn and dropped
    normal_(layer 1)   drawn and kept
    normal_(layer 2)   not played: nothing wanted comes after
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Fill:
    """One in-place operation on a parameter without storage, as the constructor of the model made it."""

    operation: Any
    target: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def is_random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.operation.tags

    def play(self, flat: Tensor, generator: torch.Generator) -> None:
        """Do it to `flat`, which has the elements of the whole parameter that the target lies in."""
        view = flat.as_strided(self.target.shape, self.target.stride(), self.target.storage_offset())
        kwargs = dict(self.kwargs) | ({"generator": generator} if self.is_random else {})
        self.operation(view, *self.args, **kwargs)


@dataclass(frozen=True)
class Skeleton:
    """A causal language model whose matrices have shapes and names but no storage, and how they would be filled."""

    model: PreTrainedModel
    fills: Sequence[Fill]


def build_skeleton(config: PreTrainedConfig) -> Skeleton:
    """The model of `config` as `AutoModelForCausalLM.from_config` makes it in fp32, without memory for its matrices.

    Buffers, and vectors that the model makes full of ones, are real. `config` is left as it is.
    """
    with _Recorder() as recorder:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa", dtype=torch.float32)
    return Skeleton(model.train(), recorder.fills)


@torch.no_grad()
def give_weights_(module: nn.Module, fills: Sequence[Fill], *, seed: int | None, device: torch.device) -> None:
    """Give the parameters of `module` their storage on `device`, and the first weights that `seed` stands for.

    module: a part of the skeleton's model, or all of it. Parameters that are tied stay tied. Random numbers are drawn
    on the CPU from a generator of their own; no other is touched. seed None: no weights, for those who load some.
    """
    for name, buffer in module.named_buffers():
        assert not buffer.is_meta, f"buffer {name} has no values; only in-place fills of parameters can be played back"
    wanted = {_storage(param): param for param in module.parameters() if param.is_meta}
    flats = {key: torch.empty(_storage_numel(param), dtype=param.dtype) for key, param in wanted.items()}
    if seed is not None:
        _play(fills, flats, torch.Generator().manual_seed(seed))
    before = list(module.parameters())  # kept alive, so that no id is given out twice
    real = {id(param): _real(param, flats, device) for param in before}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is not None:
                part._parameters[name] = real[id(param)]
    module.to(device)  # buffers


def _real(param: nn.Parameter, flats: dict[int, Tensor], device: torch.device) -> nn.Parameter:
    values = param.data
    if param.is_meta:
        values = flats[_storage(param)].as_strided(param.shape, param.stride(), param.storage_offset())
    return nn.Parameter(values.to(device), requires_grad=param.requires_grad)


def _play(fills: Sequence[Fill], flats: Mapping[int, Tensor], generator: torch.Generator) -> None:
    last = max((i for i, fill in enumerate(fills) if _storage(fill.target) in flats), default=-1)
    for fill in fills[: last + 1]:
        flat = flats.get(_storage(fill.target))
        if flat is None and fill.is_random:
            flat = torch.empty(_storage_numel(fill.target), dtype=fill.target.dtype)
        if flat is not None:
            fill.play(flat, generator)


class _Recorder(TorchDispatchMode):
    """Makes `torch.empty` return tensors without storage, and writes down what is done to those in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fills: list[Fill] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return func(*args, **(kwargs | {"device": torch.device("meta")}))
        random = torch.Tag.nondeterministic_seeded in func.tags
        if func._schema.is_mutable and isinstance(args[0], Tensor) and (args[0].is_meta or random):
            assert args[0].is_meta, f"{func} fills a tensor that has storage already; it could not be played back"
            self.fills.append(Fill(func, args[0], args[1:], kwargs))
            return args[0]
        assert not random, f"{func} draws numbers outside a parameter; the order of the others would be lost"
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    """The same for tensors that share storage; only meaningful while they live, and the skeleton keeps them alive."""
    return int(tensor.untyped_storage()._cdata)


def _storage_numel(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()
