"""The Trainer of transformers: rounds as in a plain loop, exact resume, evaluations of the anchor."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations import trainer_island
from transformers import AutoModelForCausalLM

from atoll.errors import AtollError, CheckpointError, ConfigError
from atoll.integrations.island import Island, own_island
from atoll.integrations.trainer import STATE, OuterSyncCallback

ROOT = Path(__file__).parents[2]
ALONE = Island({})


@pytest.fixture(scope="module")
def islands(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes under torchrun say, in the order of replicas."""
    folder = tmp_path_factory.mktemp("islands")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    finished = subprocess.run(
        [*launcher, trainer_island.__file__, str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    lines = [json.loads(line) for line in finished.stdout.splitlines() if line.startswith('{"replica"')]
    return sorted(lines, key=lambda line: line["replica"])


@pytest.mark.slow
def test_two_trainers_hold_one_anchor_and_end_with_it(islands: list[dict[str, Any]]) -> None:
    ends = [island["trainer"] for island in islands]
    assert len(ends) == 2
    assert ends[0]["anchor"] == ends[1]["anchor"]
    assert ends[0]["model"] == ends[1]["model"]
    assert ends[0]["round"] == 3  # after steps 3, 6 and the last, 7


@pytest.mark.slow
def test_a_trainer_gives_the_bits_of_a_plain_loop(islands: list[dict[str, Any]]) -> None:
    for island in islands:
        assert {key: island["trainer"][key] for key in ("round", "anchor", "model")} == island["loop"]


@pytest.mark.slow
def test_a_trainer_resumed_in_mid_round_gives_the_bits_of_one_that_was_not(islands: list[dict[str, Any]]) -> None:
    for island in islands:
        assert {key: island["trainer"][key] for key in ("round", "anchor", "model")} == island["resumed"]


@pytest.mark.slow
def test_evaluations_wait_for_the_anchor(islands: list[dict[str, Any]]) -> None:
    """They are due after 2, 4 and 6 steps and at the end; rounds are after 3, 6 and 7."""
    assert [island["trainer"]["evaluated"] for island in islands] == [[3, 6, 7]] * 2


@pytest.mark.slow
def test_islands_that_would_spoil_each_others_run_are_refused(islands: list[dict[str, Any]]) -> None:
    for island in islands:
        assert "is that of several islands" in island["one folder"]
        assert "the islands begin at steps 0, 5" in island["two beginnings"]


def trained(folder: Path, callback: OuterSyncCallback, **changes: Any) -> Any:
    trainer = trainer_island.trainer_of(ALONE, folder, trainer_island.new_model(), callback, **changes)
    trainer.train()
    return trainer


def test_the_anchor_can_be_looked_at_and_saved_in_mid_round(tmp_path: Path) -> None:
    class Look(OuterSyncCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_end(args, state, control, **kwargs)
            if state.global_step == 4:
                model = kwargs["model"]
                own = model.lm_head.weight.detach().clone()
                with self.anchor_in_model():
                    seen.append((own, model.lm_head.weight.detach().clone()))
                assert torch.equal(model.lm_head.weight, own)
                self.save_anchor(tmp_path / "anchor")

    seen: list[Any] = []
    trained(tmp_path / "run", Look(ALONE, inner_steps=3), save_strategy="no", eval_strategy="no")
    [(own, anchor)] = seen
    assert not torch.equal(own, anchor)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "anchor")
    assert torch.equal(saved.lm_head.weight, anchor)


def test_a_checkpoint_without_the_outer_state_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, OuterSyncCallback(ALONE, inner_steps=3), eval_strategy="no")
    (tmp_path / "checkpoint-5" / STATE).unlink()
    callback = OuterSyncCallback(ALONE, inner_steps=3)
    trainer = trainer_island.trainer_of(ALONE, tmp_path, trainer_island.new_model(), callback)
    with pytest.raises(CheckpointError, match=r"holds no outer_sync\.safetensors"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))


def test_a_checkpoint_elsewhere_is_named(tmp_path: Path) -> None:
    whole = trained(tmp_path / "run", OuterSyncCallback(ALONE, inner_steps=3), eval_strategy="no")
    elsewhere = shutil.copytree(tmp_path / "run" / "checkpoint-5", tmp_path / "copy")
    callback = OuterSyncCallback(ALONE, inner_steps=3, resume_from=elsewhere)
    trainer = trainer_island.trainer_of(
        ALONE, tmp_path / "next", trainer_island.new_model(), callback, eval_strategy="no", save_strategy="no"
    )
    trainer.train(resume_from_checkpoint=str(elsewhere))
    assert torch.equal(trainer.model.lm_head.weight, whole.model.lm_head.weight)


def test_the_best_model_is_one_of_the_anchor(tmp_path: Path) -> None:
    """Evaluations and saves are due after 2, 4 and 6 steps; both wait for rounds, after 3, 6 and 7."""
    callback = OuterSyncCallback(ALONE, inner_steps=3)
    trainer = trained(tmp_path, callback, load_best_model_at_end=True, save_steps=2, eval_steps=2)
    saved = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert saved == ["checkpoint-3", "checkpoint-6", "checkpoint-7"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-7")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"world_size": 2}, r"spans 2 processes .*\n?Call island = own_island\(\)"),
        ({"n_gpu": 4}, "over 4 GPUs"),
    ],
)
def test_a_trainer_that_would_average_gradients_is_refused(facts: dict[str, int], message: str) -> None:
    args = SimpleNamespace(**{"world_size": 1, "n_gpu": 1, **facts})
    state = SimpleNamespace(is_hyper_param_search=False, global_step=0)
    with pytest.raises(ConfigError, match=message) as caught:
        OuterSyncCallback(ALONE).on_train_begin(args, state, None, model=None, optimizer=None)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"adopt": "lerp", "alpha": 0.5}, "parameters that are not the anchor"),
        ({"evaluate": "ancor"}, "Did you mean 'anchor'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OuterSyncCallback(ALONE, **settings)


def test_the_wrapped_loop_is_there_when_training_has_begun() -> None:
    with pytest.raises(AtollError, match="training has not begun"):
        _ = OuterSyncCallback(ALONE).sync


def test_half_of_torchruns_variables_are_a_mistake() -> None:
    environment = {"WORLD_SIZE": "2", "RANK": "0"}
    with pytest.raises(ConfigError, match="MASTER_ADDR, MASTER_PORT is not"):
        own_island(environment)
    assert environment == {"WORLD_SIZE": "2", "RANK": "0"}


@pytest.mark.parametrize(("visible", "kept"), [("", "1"), ("4,7", "7")])
def test_an_island_keeps_one_of_several_gpus(monkeypatch: pytest.MonkeyPatch, visible: str, kept: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    if visible:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    own_island(environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": kept}
