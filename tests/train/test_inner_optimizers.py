"""Inner optimizers against plain loops of torch's own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from train.tiny import but, checkpoint, contents, history, tiny_config, train_tiny

from atoll.errors import ConfigError
from atoll.train.inner_optimizers import MuonWithAdamW, build_inner_optimizer


@pytest.fixture(autouse=True)
def no_waiting_for_the_medium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"embed.weight": (12, 8), "layers.0.up.weight": (16, 8), "layers.0.up.bias": (16,), "head.weight": (12, 8)}
    return {f"model.{name}": nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)


def plain_loop(params: dict[str, nn.Parameter], steps: int) -> list[Tensor]:
    """What torch's own two optimizers make of it."""
    embed, up, bias, head = params.values()
    muon = torch.optim.Muon([up], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": [embed, head], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.003, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for step in range(steps):
        give_gradients([embed, up, bias, head], step)
        muon.step()
        adamw.step()
    return [param.detach() for param in params.values()]


def test_muon_is_torchs_muon_and_adamw(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, optimizer="muon", learning_rate=0.003, muon_learning_rate=0.02)
    params = parameters()
    optimizer = build_inner_optimizer(params, config)
    assert isinstance(optimizer, MuonWithAdamW)
    for step in range(3):
        give_gradients(list(params.values()), step)
        optimizer.step()
    saved, before = optimizer.state_dict(), {name: param.detach().clone() for name, param in params.items()}
    again = {name: nn.Parameter(value) for name, value in before.items()}
    resumed = build_inner_optimizer(again, config)
    resumed.load_state_dict(saved)
    for step in range(3, 6):
        give_gradients(list(again.values()), step)
        resumed.step()
    for ours, theirs in zip(again.values(), plain_loop(parameters(), 6), strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_with_muon_goes_on_exactly(tmp_path: Path) -> None:
    whole = tiny_config(tmp_path, optimizer="muon", muon_learning_rate=0.01, save_steps=1, keep_last=100)
    train_tiny(whole)
    for step in (2, 5, 7):
        resumed = but(
            whole, output_dir=str(tmp_path / f"from-{step}"), resume=str(checkpoint(whole, step)), save_steps=0
        )
        Path(resumed.output_dir).mkdir()
        for name in ("metrics.jsonl", "config.toml"):
            shutil.copy(Path(whole.output_dir, name), resumed.output_dir)
        train_tiny(resumed)
        assert history(resumed) == history(whole), f"resumed after step {step}"
        assert contents(resumed, whole.max_steps) == contents(whole, whole.max_steps), f"resumed after step {step}"


def test_muon_refuses_parts_of_matrices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="optimizer=adamw"):
        tiny_config(tmp_path, optimizer="muon", engine="torchdist", data_workers=2)
