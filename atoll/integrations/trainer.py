"""DiLoCo in the `Trainer` of transformers, a process an island.

    island = own_island()                                    # before TrainingArguments
    args = TrainingArguments(f"out/island-{island.replica}", max_steps=5000, save_steps=250)
    outer = OuterSyncCallback(island, inner_steps=500)
    Trainer(model, args, train_dataset=data.shard(island.num_replicas, island.replica), callbacks=[outer]).train()

Start it with torchrun. The Trainer sees one process and trains alone; the callback wraps its model and optimizer in
`OuterSync`. What happens at the steps of a run of max_steps=7 with inner_steps=3, eval_steps=2, save_steps=5:

    step        1    2    3    4    5    6    7
    round                 R              R    R the last, partial one
    evaluate         due  E    due       E    E of the anchor: at the next round
    save                           S          S with the outer state, in the middle of a round or not
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from atoll.errors import CheckpointError, ConfigError
from atoll.integrations.island import Island
from atoll.integrations.outer_sync import OuterSync
from atoll.integrations.settings import check_one_of
from atoll.train.checkpoint import load_state, save_state

logger = logging.getLogger("atoll")

STATE = "outer_sync.safetensors"
EVALUATE = {"anchor": "at the next round, where parameters are the anchor", "own": "when the Trainer says so"}
_BEGINNING = struct.Struct("<q16s")  # step, where checkpoints go


class OuterSyncCallback(TrainerCallback):
    """Keeps the model of a Trainer in agreement with those of the other islands.

    It attaches when training begins, counts the optimizer's steps (gradient accumulation makes several batches one),
    and makes the last, partial round after step max_steps, so that what the Trainer evaluates and saves last is the
    anchor, equal everywhere. Its state is in the Trainer's checkpoints: `trainer.train(resume_from_checkpoint=...)`
    goes on exactly, when all islands resume from the same step.

    With fp16 a step that the gradient scaler leaves out is one for the Trainer and none for the rounds, which then fall
    behind global_step on that island; the others wait for it. With bf16 there is no scaler.

    island: what `own_island` returned. inner_steps and the rest: as `OuterSync` takes them.
    evaluate: "anchor" puts an evaluation off until the next round, where the parameters are the anchor; with
        load_best_model_at_end the save that belongs to it too. "own" leaves it where the Trainer wants it.
    resume_from: the checkpoint that `trainer.train` resumes from, where it does not lie in output_dir.

    Raises ConfigError where the Trainer spans several processes or islands share an output_dir.
    """

    def __init__(
        self,
        island: Island,
        *,
        inner_steps: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        outer_optimizer: str = "nesterov",
        outer_epsilon: float = 0.1,
        weight: float | Callable[[], float] = 1.0,
        compressor: str = "identity",
        adopt: str = "replace",
        alpha: float = 0.0,
        buffers: str = "mean",
        initial: str = "check",
        timeout_s: float = 600.0,
        evaluate: str = "anchor",
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        check_one_of("evaluate", evaluate, EVALUATE)
        if evaluate == "anchor" and adopt != "replace":
            raise ConfigError(
                f"adopt={adopt!r} leaves parameters that are not the anchor, so evaluate='anchor' has no step for it. "
                "Use evaluate='own', and `with callback.anchor_in_model(): trainer.evaluate()`."
            )
        self._island = island
        self._initial = initial
        self._evaluates_anchor = evaluate == "anchor"
        self._resume_from = resume_from
        self._wrap = partial(
            OuterSync,
            inner_steps=inner_steps,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            outer_optimizer=outer_optimizer,
            outer_epsilon=outer_epsilon,
            weight=weight,
            compressor=compressor,
            adopt=adopt,
            alpha=alpha,
            buffers=buffers,
            timeout_s=timeout_s,
        )
        self._timeout_s = timeout_s
        self._link = ExitStack()
        self._sync: OuterSync | None = None
        self._model: nn.Module | None = None
        self._owes_evaluation = self._owes_save = False
        self._told_round = 0

    # --- what can be read and done

    @property
    def sync(self) -> OuterSync:
        """The wrapped loop: `round`, `anchor()`, `digest()` and more; from when training begins, and afterwards."""
        if self._sync is None:
            raise ConfigError("training has not begun: the callback attaches then. Call trainer.train() first.")
        return self._sync

    @contextmanager
    def anchor_in_model(self) -> Iterator[None]:
        """Within the block the model holds the anchor: evaluate, generate or save it. Then its own parameters again."""
        anchor, model = self.sync.anchor(), self._held_model()
        params = {name: param for name, param in model.named_parameters() if name in anchor}
        own = {name: param.detach().clone() for name, param in params.items()}
        _write_(params, anchor)
        try:
            yield
        finally:
            _write_(params, own)

    def save_anchor(self, folder: str | os.PathLike[str]) -> None:
        """Write the anchor as a model folder, as `save_pretrained` does."""
        model: Any = self._held_model()
        with self.anchor_in_model():
            model.save_pretrained(folder)

    # --- what the Trainer calls

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _refuse_other_worlds(args, state)
        self._model = kwargs["model"]
        resumed = self._saved_state(args, state) if state.global_step else None
        # A saved model is the island's own; what replica 0 holds must not be written over it.
        initial = "check" if resumed is not None else self._initial
        device = next(self._held_model().parameters()).device
        link = self._link.enter_context(self._island.link(device, timeout_s=self._timeout_s))
        self._sync = self._wrap(self._held_model(), _plain(kwargs["optimizer"]), initial=initial, transport=link)
        self._refuse_unlike_beginnings(args, state)
        if resumed is not None:
            self._sync.load_state_dict(resumed)
        self._told_round = self._sync.round
        self._owes_evaluation = self._owes_save = False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            self._leave()
        self._put_off(args, control)
        self._tell_round(state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if control.should_training_stop:
            self._leave()  # before the Trainer may put the best model in place of what was trained
        self._put_off(args, control)
        self._tell_round(state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not args.save_only_model:
            save_state(_checkpoint(args, state) / STATE, self.sync.state_dict())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._leave()

    # --- inside

    def _leave(self) -> None:
        """The last round, with all who still train; a second call does nothing."""
        self.sync.close()
        self._link.close()

    def _held_model(self) -> nn.Module:
        assert self._model is not None, "the callback attaches when training begins"
        return self._model

    def _put_off(self, args: TrainingArguments, control: TrainerControl) -> None:
        """Between two rounds parameters are not the anchor: what is to be of the anchor waits for the next."""
        if not self._evaluates_anchor:
            return
        with_save = args.load_best_model_at_end and control.should_evaluate and control.should_save
        self._owes_evaluation |= control.should_evaluate
        self._owes_save |= with_save
        at_anchor = self.sync.inner_step == 0
        control.should_evaluate = self._owes_evaluation and at_anchor
        control.should_save = self._owes_save and at_anchor if self._owes_save else control.should_save
        if at_anchor:
            self._owes_evaluation = self._owes_save = False

    def _tell_round(self, state: TrainerState) -> None:
        if self.sync.round > self._told_round:
            self._told_round = self.sync.round
            logger.info("step %d: round %d, anchor %s", state.global_step, self.sync.round, self.sync.digest()[:6])

    def _saved_state(self, args: TrainingArguments, state: TrainerState) -> Any:
        folder = Path(self._resume_from) if self._resume_from is not None else _checkpoint(args, state)
        if not (folder / STATE).is_file():
            raise CheckpointError(
                f"{folder} holds no {STATE}, and the Trainer resumes from step {state.global_step}.\n"
                "Resume from a checkpoint that was saved with OuterSyncCallback; name one that is not in output_dir "
                "as resume_from too."
            )
        return load_state(folder / STATE)

    def _refuse_unlike_beginnings(self, args: TrainingArguments, state: TrainerState) -> None:
        """All begin at one step, and none writes over the checkpoints of another."""
        place = f"{socket.gethostname()}\0{os.path.realpath(args.output_dir or '')}"
        own = _BEGINNING.pack(state.global_step, hashlib.sha256(place.encode()).digest()[:16])
        seen = [_BEGINNING.unpack(payload) for payload in self.sync.tell_all(own)]
        steps = [step for step, _ in seen]
        if len(set(steps)) > 1:
            raise ConfigError(
                f"the islands begin at steps {', '.join(map(str, steps))}. Resume all from checkpoints of one step, "
                "or none."
            )
        if len({place for _, place in seen}) < len(seen):
            raise ConfigError(
                f"output_dir={args.output_dir!r} is that of several islands, which would write over each other's "
                'checkpoints.\nGive each its own: TrainingArguments(f"out/island-{island.replica}").'
            )


def _refuse_other_worlds(args: TrainingArguments, state: TrainerState) -> None:
    if args.world_size > 1:
        raise ConfigError(
            f"the Trainer spans {args.world_size} processes and would average their gradients at every step.\n"
            "Call island = own_island() before TrainingArguments is made; an island is one process."
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"the Trainer would spread its batches over {args.n_gpu} GPUs by DataParallel. Set CUDA_VISIBLE_DEVICES "
            "to one GPU, or start with torchrun and own_island()."
        )
    if state.is_hyper_param_search:
        raise ConfigError("a hyperparameter search makes many runs of one Trainer. Use a Trainer for each run.")


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _plain(optimizer: Any) -> Any:
    """The optimizer within Accelerate's wrapper, whose `step` is called only where a step is made."""
    return _plain(optimizer.optimizer) if hasattr(optimizer, "optimizer") else optimizer


@torch.no_grad()
def _write_(params: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    for name, param in params.items():
        param.copy_(values[name])
