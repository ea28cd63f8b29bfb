"""Cutting a causal language model of transformers into stages by layers.

A stage is the model itself with most of its modules taken out, so that masks, positions and rotary embeddings are
computed by transformers' own code in every stage, and parameters keep their full names (`model.layers.7...`).

    stage 0             stage 1             stage 2
    embed_tokens        ·                   ·
    layers 0 1 2 · ·    layers · · · 3 4    layers · · · · · 5
    ·                   ·                   norm, lm_head
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from atoll.errors import ConfigError


class _Elsewhere(nn.Module):
    """Stands where a layer of another stage would be."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return hidden_states


class _NoPositions(nn.Module):
    """Stands where learned positions would be added a second time; 0 + x is x, and a 0-dim tensor changes no dtype."""

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        return torch.zeros(())


@dataclass(frozen=True)
class Family:
    """Where the parts of a family's models are, and what stands in for those that another stage holds.

    body: path of the module whose forward runs the layers. first, last: names in the body that only the first or the
    last stage holds, with a maker of what the others have instead (None: nothing).
    """

    body: str
    layers: str
    first: Mapping[str, Callable[[], nn.Module] | None]
    last: Mapping[str, Callable[[], nn.Module] | None] = field(default_factory=lambda: {"norm": nn.Identity})

    def layer_list(self, model: PreTrainedModel) -> nn.ModuleList:
        layers = model.get_submodule(f"{self.body}.{self.layers}")
        assert isinstance(layers, nn.ModuleList)
        return layers


_ROTARY = Family("model", "layers", first={"embed_tokens": None})

FAMILIES: dict[str, Family] = {
    "llama": _ROTARY,
    "qwen2": _ROTARY,
    "opt": Family(
        "model.decoder",
        "layers",
        first={"embed_tokens": None, "embed_positions": _NoPositions, "project_in": None},
        last={"final_layer_norm": None, "project_out": None},
    ),
    "gpt2": Family(
        "transformer",
        "h",
        first={"wte": None, "wpe": _NoPositions, "drop": nn.Identity},
        last={"ln_f": nn.Identity},
    ),
}


def family_of(config: PreTrainedConfig) -> Family:
    """Raises ConfigError for a family that this module cannot cut."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"models of family {config.model_type!r} cannot be cut into stages. "
            f"Use one of {', '.join(FAMILIES)}, or pipeline_stages=1."
        )
    return FAMILIES[config.model_type]


class Stage(nn.Module):
    """Consecutive layers of a model, with its embeddings if they are the first and its head if they are the last.

    index: 0 <= index < num_stages. autocast: dtype to compute in where the operation allows it; None: that of the
    parameters. activation_dtype: dtype handed to the next stage.

    Called with token ids [batch, sequence] in the first stage and hidden states [batch, sequence, hidden] in the
    others; returns hidden states, or logits [batch, sequence, vocabulary] in the last.
    """

    def __init__(self, model: PreTrainedModel, layers: range, *, index: int, num_stages: int) -> None:
        super().__init__()
        self.model = model
        self.layers = layers
        self.index = index
        self.num_stages = num_stages
        self.autocast: torch.dtype | None = None
        self.activation_dtype = torch.float32
        _take_out(model, layers, first=self.is_first, last=self.is_last)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers that this stage holds."""
        layers = family_of(self.model.config).layer_list(self.model)
        return [layers[i] for i in self.layers]

    def forward(self, inputs: Tensor) -> Tensor:
        family = family_of(self.model.config)
        body = self.model.get_submodule(family.body)
        with self._precision(inputs.device):
            known = {"input_ids": inputs} if self.is_first else {"inputs_embeds": inputs}
            hidden = body(**known, use_cache=False).last_hidden_state
            if self.is_last:
                return self.model.lm_head(hidden)
        hidden = hidden.to(self.activation_dtype)
        return hidden.clone() if hidden._is_view() else hidden  # zero-bubble detaches it in place, which no view allows

    def loss(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Mean next-token loss in nats, of logits [batch, sequence, vocabulary] and token ids [batch, sequence]."""
        return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by their names in the whole model, tied ones once."""
        return {name: param for name, param in self.model.named_parameters() if param.requires_grad}

    def _precision(self, device: torch.device) -> torch.autocast | nullcontext[None]:
        return nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)


def _take_out(model: PreTrainedModel, layers: range, *, first: bool, last: bool) -> None:
    family = family_of(model.config)
    body = model.get_submodule(family.body)
    blocks = family.layer_list(model)
    for i in range(len(blocks)):
        if i not in layers:
            blocks[i] = _Elsewhere()
    gone = ({} if first else dict(family.first)) | ({} if last else dict(family.last))
    for name, stand_in in gone.items():
        if getattr(body, name) is not None:
            setattr(body, name, stand_in() if stand_in is not None else None)
    if not last:
        model.lm_head = None


def split_layers(costs: Sequence[int], num_stages: int, *, first: int = 0, last: int = 0) -> list[range]:
    """Consecutive layers for each stage, such that the costliest stage costs least; among those, the evenest.

    costs: of each layer. first, last: what the first and the last stage carry besides (embeddings, head).

    >>> split_layers([4, 4, 4, 4, 4, 4], 2, first=8, last=0)
    [range(0, 2), range(2, 6)]

    Raises ConfigError when there are fewer layers than stages.
    """
    if num_stages > len(costs):
        raise ConfigError(
            f"pipeline_stages={num_stages} is more than the model's {len(costs)} layers; every stage needs at least "
            f"one. Use at most {len(costs)}."
        )
    best: list[dict[int, tuple[int, int, tuple[int, ...]]]] = [{0: (0, 0, ())}]  # after each stage: layers used -> cost
    for stage in range(num_stages):
        extra = (first if stage == 0 else 0) + (last if stage == num_stages - 1 else 0)
        best.append(_one_more_stage(best[-1], costs, extra, left=num_stages - stage - 1))
    ends = best[-1][len(costs)][2]
    return [range(start, stop) for start, stop in zip((0, *ends[:-1]), ends, strict=True)]


def _one_more_stage(
    before: Mapping[int, tuple[int, int, tuple[int, ...]]], costs: Sequence[int], extra: int, *, left: int
) -> dict[int, tuple[int, int, tuple[int, ...]]]:
    after: dict[int, tuple[int, int, tuple[int, ...]]] = {}
    stops = [len(costs)] if left == 0 else range(1, len(costs) - left + 1)
    for start, (worst, squares, ends) in before.items():
        for stop in stops:
            if stop > start:
                cost = sum(costs[start:stop]) + extra
                choice = (max(worst, cost), squares + cost * cost, (*ends, stop))
                after[stop] = min(after.get(stop, choice), choice)
    return after


def given_split(split: Sequence[int], num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage, from how many layers each is to have.

    >>> given_split([1, 3], 4, 2)
    [range(0, 1), range(1, 4)]

    Raises ConfigError when the numbers do not fit the model.
    """
    if len(split) != num_stages or sum(split) != num_layers or min(split) < 1:
        even = [num_layers * (i + 1) // num_stages - num_layers * i // num_stages for i in range(num_stages)]
        raise ConfigError(
            f"the split {list(split)} does not give each of {num_stages} stages at least one of {num_layers} layers. "
            f"Use {even}, or none for a split by parameters."
        )
    ends = [sum(split[: i + 1]) for i in range(num_stages)]
    return [range(end - size, end) for end, size in zip(ends, split, strict=True)]
