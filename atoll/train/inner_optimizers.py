"""The inner optimizers: AdamW and SGD of torch, and Muon with AdamW for what is not a hidden matrix.

Muon (Jordan et al., 2024) orthogonalises the momentum of a matrix. It is meant for the matrices between a model's
embeddings and its head; those two, vectors and scalars are AdamW's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from atoll.train.config import TrainConfig

_IN_A_LAYER = re.compile(r"\.\d+\.")  # "model.layers.0.mlp...", "transformer.h.0.attn..."
PEAK_LR = "peak_lr"  # of a group that has another rate than `learning_rate`


class MuonWithAdamW(Optimizer):
    """One optimizer of two: Muon steps the first groups, AdamW those after them. State and rates are as of one.

    muon, adamw: made of disjoint parameters, without state.
    """

    def __init__(self, muon: Muon, adamw: AdamW) -> None:
        self._muon, self._adamw = muon, adamw
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both. closure: computes the gradients; what it returns is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._muon.step()
        self._adamw.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Both work on the groups and the state of this one, which loading replaces."""
        first = len(self._muon.param_groups)
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:first], self.param_groups[first:]
        self._muon.state = self._adamw.state = self.state


def build_inner_optimizer(params: Mapping[str, nn.Parameter], config: TrainConfig) -> Optimizer:
    """The optimizer that `config` names, of parameters by name; vectors (norms, biases) are not decayed."""
    if config.optimizer == "sgd":
        return SGD(_by_decay(params.values(), config), lr=config.learning_rate)
    hidden = [p for name, p in params.items() if is_hidden_matrix(name, p)] if config.optimizer == "muon" else []
    chosen = {id(param) for param in hidden}
    rest = [param for param in params.values() if id(param) not in chosen]
    if not hidden:
        return _adamw(rest, config)
    muon = Muon(
        [{"params": hidden, PEAK_LR: config.resolved_muon_learning_rate}],
        lr=config.resolved_muon_learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonWithAdamW(muon, _adamw(rest, config))


def is_hidden_matrix(name: str, param: torch.Tensor) -> bool:
    """Whether Muon is meant for it: a matrix inside a numbered layer, and so neither an embedding nor the head.

    >>> [is_hidden_matrix(name, torch.ones(2, 2)) for name in ("model.layers.0.mlp.up_proj.weight", "lm_head.weight")]
    [True, False]
    """
    return param.dim() == 2 and _IN_A_LAYER.search(name) is not None


def _adamw(params: Sequence[nn.Parameter], config: TrainConfig) -> AdamW:
    betas = (config.adam_beta1, config.adam_beta2)
    groups = _by_decay(params, config)
    return AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon, fused=True)


def _by_decay(params: Any, config: TrainConfig) -> list[dict[str, Any]]:
    params = list(params)
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
