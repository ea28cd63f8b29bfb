"""Weights of a part are those of the whole model, bit for bit, and the whole is never made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel.parallel_work import CPU, SEED, hf_config, whole_model
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.parallel.pipeline import cut_stages
from atoll.parallel.plan import plan_stages
from atoll.parallel.skeleton import build_skeleton, give_weights_

FAMILIES = ("llama", "qwen2", "opt", "gpt2")


class Sizes(TorchDispatchMode):
    """Bytes of the largest tensor on the CPU that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_skeleton_gets_the_weights_of_the_whole_model(family: str, tie: bool) -> None:
    whole = whole_model(family, tie=tie)
    skeleton = build_skeleton(hf_config(family, tie=tie))
    give_weights_(skeleton.model, skeleton.fills, seed=SEED, device=CPU)
    ours, theirs = dict(skeleton.model.named_parameters()), dict(whole.named_parameters())
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(torch.equal(*pair) for pair in zip(skeleton.model.buffers(), whole.buffers(), strict=True))
    assert (skeleton.model.lm_head.weight is skeleton.model.get_input_embeddings().weight) == tie


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stages_together_are_the_model(family: str) -> None:
    whole = dict(whole_model(family).named_parameters())
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    hidden, seen = tokens, {}
    for index in range(3):
        skeleton = build_skeleton(hf_config(family))
        plan = plan_stages(skeleton, 3, split=[1, 2, 1])
        (stage,) = cut_stages(skeleton, plan, [index], seed=SEED, device=CPU)
        assert not seen.keys() & stage.named_weights().keys()
        seen |= stage.named_weights()
        hidden = stage(hidden)
    assert seen.keys() == whole.keys()
    assert all(torch.equal(seen[name], whole[name]) for name in whole)
    assert torch.equal(hidden, whole_model(family)(input_ids=tokens).logits)


def test_one_seed_is_one_model_and_leaves_other_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    models = []
    for seed in (1, 1, 2):
        skeleton = build_skeleton(hf_config("llama"))
        give_weights_(skeleton.model, skeleton.fills, seed=seed, device=CPU)
        models.append(skeleton.model.lm_head.weight)
    assert torch.equal(models[0], models[1]) and not torch.equal(models[0], models[2])
    assert torch.equal(before, torch.get_rng_state())


def test_no_tensor_is_made_that_is_larger_than_one_parameter() -> None:
    config = hf_config("gpt2", num_layers=6)
    largest = 4 * max(param.numel() for param in whole_model("gpt2", num_layers=6).parameters())
    with Sizes() as sizes:
        skeleton = build_skeleton(config)
        assert all(param.is_meta for param in skeleton.model.parameters() if param.dim() > 1)
        assert sizes.largest < largest
        plan = plan_stages(skeleton, 2)
        (stage,) = cut_stages(skeleton, plan, [1], seed=SEED, device=CPU)
    assert sizes.largest == largest
    assert sum(param.numel() for param in stage.parameters()) == plan.num_parameters[1]


def test_only_what_comes_before_the_last_wanted_parameter_is_drawn() -> None:
    skeleton = build_skeleton(hf_config("llama"))
    played = []
    for fill in skeleton.fills:
        original = fill.operation
        object.__setattr__(fill, "operation", _Counting(original, played))
    first_layer = skeleton.model.model.layers[0]
    give_weights_(first_layer, skeleton.fills, seed=SEED, device=CPU)
    whole = whole_model("llama").model.layers[0]  # type: ignore[union-attr, index]
    assert torch.equal(first_layer.mlp.up_proj.weight, whole.mlp.up_proj.weight)
    assert 0 < len(played) < len(skeleton.fills)


class _Counting:
    def __init__(self, operation: Any, played: list[Any]) -> None:
        self.operation, self.played, self.tags = operation, played, operation.tags

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.played.append(self.operation)
        return self.operation(*args, **kwargs)
