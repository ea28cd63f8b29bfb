"""One replica: a full copy of the model, its inner optimizer, its data and its random numbers.

What is trained is a `Trainee`: the whole model in this process (`WholeModel`), or, where a replica has many workers,
this worker's part of it (`atoll.train.workers`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from atoll.algo.rates import inner_lr
from atoll.comm.base import Transport
from atoll.train.config import TrainConfig
from atoll.train.data_parallel import GradientSync
from atoll.train.inner_optimizers import PEAK_LR, build_inner_optimizer
from atoll.train.sync import ReplicaSync

if TYPE_CHECKING:
    from atoll.data import TokenStream
    from atoll.train.workers import ShardSync


@dataclass(frozen=True)
class StepReport:
    """One inner step of one replica.

    loss: nats a token. tokens: trained on by this replica so far. skipped: the gradient was not finite, so no step was
    made.
    """

    replica: int
    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    seconds: float
    skipped: bool


class Trainee(Protocol):
    """What a replica trains in this process.

    params: trainable parameters held here by their names in the whole model, tied ones once.
    """

    params: dict[str, nn.Parameter]

    def compute_gradients(self, batches: Iterable[Tensor], *, parts: int) -> Tensor:
        """Gradients of the mean loss over `parts` batches of token ids [batch, sequence]; returns that loss (0-dim)."""
        ...

    def clip_gradients_(self, max_norm: float) -> float:
        """Clip by the norm over the whole replica; returns it."""
        ...

    def evaluate(self, sequences: Tensor, *, batch_size: int) -> tuple[float, int]:
        """Summed loss in nats, and predicted tokens, of `sequences` [number, sequence], over the whole replica."""
        ...

    def load_(self, weights: Mapping[str, Tensor]) -> None:
        """Take over `weights`: by name, of what this process syncs."""
        ...


class WholeModel:
    """All of the model, in this process."""

    def __init__(self, model: nn.Module, *, device: torch.device, bfloat16: bool) -> None:
        self.model = model.to(device)
        self.params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self._device = device
        self._bfloat16 = bfloat16

    def compute_gradients(self, batches: Iterable[Tensor], *, parts: int) -> Tensor:
        total = torch.zeros((), device=self._device)
        for batch in batches:
            loss = self.batch_loss(batch) / parts
            loss.backward()
            total += loss.detach()
        return total

    def clip_gradients_(self, max_norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(self.params.values(), max_norm))

    def batch_loss(self, batch: Tensor) -> Tensor:
        """Mean next-token loss in nats of a batch of token ids [batch, sequence]."""
        batch = batch.to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16):
            return self.model(input_ids=batch, labels=batch).loss

    def evaluate(self, sequences: Tensor, *, batch_size: int) -> tuple[float, int]:
        self.model.eval()
        total, count = 0.0, 0
        for batch in sequences.split(batch_size):
            predicted = batch.shape[0] * (batch.shape[1] - 1)
            total += float(self.batch_loss(batch)) * predicted
            count += predicted
        self.model.train()
        return total, count

    def load_(self, weights: Mapping[str, Tensor]) -> None:
        for name, param in self.params.items():
            param.copy_(weights[name])


class Replica:
    """Trains alone: `compute_gradients`, then `update`.

    model: all of it, or what this worker has of it. worker: its number among those of the replica. pace: seconds, and
    the inner steps they were spent on, since somebody last took note.
    """

    def __init__(
        self,
        index: int,
        *,
        model: nn.Module | Trainee,
        stream: TokenStream,
        config: TrainConfig,
        device: torch.device,
        worker: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.index = index
        self._clock = clock
        self.pace = (0.0, 0)
        self.stream = stream
        self.config = config
        self.device = device
        self.tokens = 0
        self.tokens_at_sync = 0
        if isinstance(model, nn.Module):
            model = WholeModel(model, device=device, bfloat16=computes_in_bfloat16(config, device))
        self.trainee: Trainee = model
        self.optimizer = build_inner_optimizer(self.trainable(), config)
        self._random_state = _fresh_random_state(config.seed * 10_007 + index + worker * 1_000_003, device)
        self._loss = torch.zeros((), device=device)
        self._seconds = 0.0

    @property
    def model(self) -> nn.Module:
        """The whole model, where this process has it."""
        assert isinstance(self.trainee, WholeModel), "a worker of many holds a part of the model only"
        return self.trainee.model

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters of this process by name, tied ones once."""
        return self.trainee.params

    def compute_gradients(self, step: int) -> None:
        """Forward and backward over the batches of inner step `step`; gradients are their mean."""
        began = self._clock()
        self.optimizer.zero_grad(set_to_none=True)
        with self._own_random_numbers():
            self._loss = self.trainee.compute_gradients(self._batches(), parts=self.config.gradient_accumulation_steps)
        self._seconds = self._clock() - began

    def update(self, step: int) -> StepReport:
        """Clip and take the optimizer's step. A gradient that is not finite is left out, and said."""
        began = self._clock()
        lr = self.lr(step)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(step, group[PEAK_LR]) if PEAK_LR in group else lr
        norm = self.trainee.clip_gradients_(self.config.max_grad_norm or float("inf"))
        finite = norm < float("inf")
        if finite:
            self.optimizer.step()
        loss = float(self._loss)
        seconds = self._seconds + self._clock() - began
        self.pace = (self.pace[0] + seconds, self.pace[1] + 1)
        return StepReport(self.index, step, loss, norm, lr, self.tokens, seconds, not finite)

    def lr(self, step: int) -> float:
        """The rate of inner step `step`, a function of the global step alone."""
        return self._rate(step, self.config.learning_rate)

    def take_pace(self) -> float:
        """Seconds an inner step took since this was last asked."""
        seconds, steps = self.pace
        self.pace = (0.0, 0)
        return seconds / max(1, steps)

    def _rate(self, step: int, peak: float) -> float:
        return inner_lr(
            step,
            learning_rate=peak,
            warmup_steps=self.config.warmup_steps,
            max_steps=self.config.max_steps,
            decay=self.config.lr_schedule,
            min_ratio=self.config.min_lr_ratio,
            restart_step=self.config.pretrain_steps,
        )

    @torch.no_grad()
    def evaluate(self, sequences: Tensor, weights: Mapping[str, Tensor]) -> tuple[float, int]:
        """Summed loss in nats, and predicted tokens, of held-out `sequences` under `weights` (the anchor)."""
        if not len(sequences):
            return 0.0, 0
        own = {name: param.detach().clone() for name, param in self.trainable().items()}
        self.trainee.load_(weights)
        answer = self.trainee.evaluate(sequences, batch_size=max(self.config.batch_size, 16))
        self._load(own)
        return answer

    def inner_moments(self) -> list[Tensor]:
        """The floating-point state of the inner optimizer, step counts excepted."""
        return [
            value
            for param in self.trainable().values()
            for value in self.optimizer.state.get(param, {}).values()
            if isinstance(value, Tensor) and value.dim() > 0
        ]

    def start_afresh(self) -> None:
        """Forget the inner optimizer's state: a replica that joins begins with none."""
        self.optimizer = build_inner_optimizer(self.trainable(), self.config)

    def state_dict(self) -> dict[str, Any]:
        """Everything of this replica's own: parameters, inner optimizer, random numbers, data position, counts.

        The tensors are those in use: save or copy them before the next step.
        """
        return {
            "params": {name: param.detach() for name, param in self.trainable().items()},
            "optimizer": self.optimizer.state_dict(),
            "random_state": self.random_state,
            "stream": self.stream.state_dict(),
            "tokens": self.tokens,
            "tokens_at_sync": self.tokens_at_sync,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where `state` was taken."""
        self._load(state["params"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.random_state = state["random_state"]
        self.stream.load_state_dict(state["stream"])
        self.tokens = state["tokens"]
        self.tokens_at_sync = state["tokens_at_sync"]

    @property
    def random_state(self) -> dict[str, Tensor]:
        """Of the generators that dropout draws from."""
        return self._random_state

    @random_state.setter
    def random_state(self, state: Mapping[str, Tensor]) -> None:
        self._random_state |= state  # saved on a machine with a GPU, perhaps, and loaded on one without

    @torch.no_grad()
    def _load(self, values: Mapping[str, Tensor]) -> None:
        for name, param in self.trainable().items():
            param.copy_(values[name])

    def _batches(self) -> Iterator[Tensor]:
        for _ in range(self.config.gradient_accumulation_steps):
            batch = self.stream.next_batch(self.config.batch_size)
            self.tokens += batch.numel()
            yield batch

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Dropout draws from this replica's own numbers, however many replicas share the process."""
        on_gpu = self.device.type == "cuda"
        with torch.random.fork_rng(devices=[self.device] if on_gpu else []):
            torch.set_rng_state(self._random_state["cpu"])
            if on_gpu:
                torch.cuda.set_rng_state(self._random_state["cuda"], self.device)
            yield
            self._random_state["cpu"] = torch.get_rng_state()
            if on_gpu:
                self._random_state["cuda"] = torch.cuda.get_rng_state(self.device)


@dataclass
class Member:
    """One replica of this process with its end of the network and its outer loop."""

    replica: Replica
    transport: Transport
    sync: ReplicaSync | GradientSync | ShardSync

    @property
    def index(self) -> int:
        return self.replica.index


def computes_in_bfloat16(config: TrainConfig, device: torch.device) -> bool:
    return config.dtype == "bfloat16" or (config.dtype == "auto" and device.type == "cuda")


def _fresh_random_state(seed: int, device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.Generator().manual_seed(seed).get_state()}
    if device.type == "cuda":
        state["cuda"] = torch.Generator(device).manual_seed(seed).get_state()
    return state
