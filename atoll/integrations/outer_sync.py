"""DiLoCo in anyone's training loop, in two lines.

    with atoll.OuterSync(model, optimizer, inner_steps=500):        # 1: around the loop
        for batch in loader:
            loss = model(batch)
            loss.backward()
            optimizer.step()          # every 500th call the replicas agree on new weights in here
            optimizer.zero_grad()

Start it with torchrun, a process a replica, each with its own part of the data. The second line is the import.

Two replicas that call `step` at their own pace, H=3 (| a step, R a round, · waiting):

    replica 0   | | | · R | | | · R        replica 0 has no more data after 6 steps
    replica 1   |  |  | R |  |  | R | (2 steps more: replica 0 sits in the round that ends it, and adopts the result)
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.comm.base import Transport
from atoll.errors import CheckpointError, ConfigError
from atoll.integrations.connect import connection, exchange
from atoll.integrations.settings import SyncSettings
from atoll.integrations.start import copy_from_first_, fingerprint, first_difference
from atoll.train.console import waiting
from atoll.train.sync import ReplicaSync, RoundReport

logger = logging.getLogger("atoll")

_STATUS = struct.Struct("<??")  # leaving, has progress
_FIXED = ("outer_optimizer", "compressor")  # settings whose state is saved


class OuterSync:
    """Keeps this replica of `model` in agreement with the others: a round of DiLoCo after every `inner_steps` steps.

    Hooks `optimizer.step` and does nothing else to the loop. The optimizer's state is never sent nor changed. Without
    torchrun and without a process group it is one replica alone, and the outer loop is Lookahead ("sgd") or SNOO
    ("nesterov").

    model: trainable parameters sync, in any dtype and layout, tied ones once, whether `optimizer` holds them or not;
        which they are is settled here. The anchor is fp32. Frozen parameters are never sent and never moved.
    optimizer: whose `step` counts as an inner step. With several, the one that steps last. A step with a closure
        (LBFGS) is one however often it evaluates. A step that GradScaler leaves out is none: it is made up for.
    inner_steps: H, exactly, in every round.
    outer_lr, outer_momentum, outer_optimizer: "nesterov", "momentum", "sgd" or "adam"; outer_epsilon: of "adam" alone.
    weight: how much this replica counts in the mean; a function is asked at every round (tokens it trained on, say). 0
        leaves it out. The divisor is those who contributed.
    compressor: "identity" (fp32), "bf16" or "fp16" on the wire.
    adopt: "replace", or "lerp" to keep `alpha` of the replica's own parameters. Rounds land as they are launched, where
        "carry" and "eager" are the same as "replace".
    buffers: "mean": after each round persistent floating-point buffers become their fp32 mean over the contributors;
        integer ones, and those that start with an infinity or NaN (masks), stay local. "local": all do.
    initial: "check": replicas that start with different parameters are refused at the first step, naming the first.
        "broadcast": all parameters and persistent buffers are taken from replica 0, here, bit for bit.
    final_sync: leaving the block without an exception syncs the steps since the last round. A replica that leaves while
        others still train sits in their rounds with weight 0 until all leave.
    transport, group: the link to the others, or the process group to use; default: see `atoll.integrations.connect`.
    timeout_s: the longest wait for the others in a round.

    Raises ConfigError for what cannot be used, TransportError when the others are lost: leave, and go on from a saved
    state. When the block is left by an exception nothing is sent.

    >>> weight = nn.Parameter(torch.zeros(1))
    >>> model, optimizer = nn.ParameterList([weight]), torch.optim.SGD([weight], lr=0.5)
    >>> with OuterSync(model, optimizer, inner_steps=2) as sync:
    ...     for _ in range(8):
    ...         weight.grad = torch.ones(1)
    ...         optimizer.step()
    ...         print(sync.round, round(weight.item(), 5))
    0 -0.5
    1 -1.33
    1 -1.83
    2 -3.227
    2 -3.727
    3 -5.6343
    3 -6.1343
    4 -8.50087
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        inner_steps: int = 500,
        *,
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
        final_sync: bool = True,
        transport: Transport | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.settings = SyncSettings(
            inner_steps=inner_steps,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            outer_optimizer=outer_optimizer,
            outer_epsilon=outer_epsilon,
            compressor=compressor,
            adopt=adopt,
            alpha=alpha,
            buffers=buffers,
            initial=initial,
            final_sync=final_sync,
        )
        self._model = model
        self._weight = weight
        if not callable(weight):
            _checked_weight(weight)
        self._params = _trainable(model)
        _check_optimizer(optimizer, model)
        self.last_report: RoundReport | None = None
        self._inner_step = 0
        self._num_steps = 0
        with ExitStack() as resources:
            device = next(iter(self._params.values())).device
            link = connection(transport=transport, group=group, timeout_s=_positive(timeout_s), device=device)
            self._transport = resources.enter_context(link)
            self._begin()
            self._resources = resources.pop_all()
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    # --- what can be read

    @property
    def round(self) -> int:
        """Outer steps made so far."""
        return self._sync.round

    @property
    def inner_step(self) -> int:
        """Optimizer steps since the last round, 0 to `inner_steps` − 1."""
        return self._inner_step

    @property
    def replica(self) -> int:
        """Which replica this is, from 0."""
        return self._transport.replica

    @property
    def num_replicas(self) -> int:
        return self._transport.num_replicas

    def anchor(self) -> dict[str, Tensor]:
        """The agreed trainable parameters by name: fp32 views that move with every round; not to be written to.

        To evaluate them: `torch.func.functional_call(model, sync.anchor(), inputs)`.
        """
        return self._sync.anchor()

    def digest(self) -> str:
        """xxh3-128 of the anchor, 32 hex digits: equal on all replicas after every round."""
        return self._sync.digest()

    def tell_all(self, payload: bytes) -> list[bytes]:
        """Hand a few bytes round, as many on every replica; returns those of all in replica order. All must call it."""
        return exchange(self._transport, payload)

    # --- saving and going on

    def state_dict(self) -> dict[str, Any]:
        """All that must be saved beside the model's and the optimizer's own state, at any inner step.

        Plain values and CPU copies of tensors. Every replica saves its own.
        """
        shared, own = self._sync.shared_state(), self._sync.replica_state()
        state = {
            "inner_step": self._inner_step,
            "num_steps": self._num_steps,
            "settings": {name: self.settings.facts()[name] for name in _FIXED},
            "params_digest": fingerprint(self._params.values()),
            "anchor": self.anchor(),
            **shared,
            **own,
        }
        return _copied(state, torch.device("cpu"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. The model and the optimizer load theirs as well, before the next step.

        Raises CheckpointError for the state of another model or of other settings. Nothing is taken over then.
        """
        self._refuse_other(state)
        own = _copied({"fragments": state["fragments"]}, self._device)
        self._sync.load_shared_state(state["anchor"], {"outer": state["outer"], "counts": state["counts"]})
        self._sync.load_replica_state(own)
        self._inner_step = state["inner_step"]
        self._num_steps = state["num_steps"]
        self._params_digest = state["params_digest"]
        self._started = False

    # --- leaving

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._remove_hooks()
            self._resources.__exit__(kind, error, trace)

    def close(self) -> None:
        """What leaving the block does: the last sync, with all; then the hooks are gone. A second call does nothing."""
        if not self._hooks:
            return
        self._remove_hooks()
        with self._resources:
            self._leave_together()

    # --- inside

    @property
    def _device(self) -> torch.device:
        return next(iter(self._params.values())).device

    def _begin(self) -> None:
        """Agree on what is trained and how; take the first anchor."""
        self._refuse_unlike(self.settings.facts() | _described(self._model), "Give all replicas the same.")
        if self.settings.initial == "broadcast" and self.num_replicas > 1:
            copy_from_first_(self._transport, [*self._model.parameters(), *_persistent_buffers(self._model).values()])
        self._averaged = _averaged_buffers(self._model) if self.settings.buffers == "mean" else []
        self._sync = ReplicaSync(self._params, self._transport, self.settings.outer(), companions=self._companions)
        self._params_digest = fingerprint(self._params.values())
        self._started = False

    def _companions(self) -> list[Tensor]:
        """The buffers to average: looked up each time, for modules may put another tensor in their place."""
        if self.num_replicas == 1:
            return []
        return [self._model.get_buffer(name) for name in self._averaged]

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._start_once()

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._inner_step += 1
        self._num_steps += 1
        if self._inner_step == self.settings.inner_steps:
            self._vote(leaving=False, has_progress=True)
            self._make_round(has_progress=True)

    def _vote(self, *, leaving: bool, has_progress: bool) -> list[tuple[bool, bool]]:
        """Hear of all who leaves and who has made steps since the last round. The slowest is waited for here."""
        with self._saying_who_is_waited_for():
            votes = exchange(self._transport, _STATUS.pack(leaving, has_progress))
        return [_STATUS.unpack(vote) for vote in votes]

    @torch.no_grad()
    def _make_round(self, *, has_progress: bool) -> None:
        weight = self._read_weight() if has_progress else 0.0
        adopts = has_progress or self.settings.final_sync
        self._sync.launch(0, weight=weight, present=has_progress, adopts=adopts)
        self.last_report = self._sync.apply(0, step=self._num_steps)
        if adopts:
            self._inner_step = 0
        self._warn_of_refused(self.last_report)

    def _leave_together(self) -> None:
        """Sit in the rounds of those who still train until all leave; the first takes the steps not synced yet."""
        self._start_once()
        all_leave = False
        while not all_leave:
            has_progress = self._inner_step > 0 and self.settings.final_sync
            votes = self._vote(leaving=True, has_progress=has_progress)
            all_leave = all(leaving for leaving, _ in votes)
            if any(progress for _, progress in votes):
                self._make_round(has_progress=has_progress)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _read_weight(self) -> float:
        return _checked_weight(self._weight() if callable(self._weight) else self._weight)

    def _warn_of_refused(self, report: RoundReport) -> None:
        if report.refused:
            names = ", ".join(str(replica) for replica in report.refused)
            logger.warning("replica %s holds NaN or infinity, was refused and starts again from the anchor", names)

    def _saying_who_is_waited_for(self) -> AbstractContextManager[None]:
        if self.num_replicas == 1:
            return nullcontext()
        others = f"the other {self.num_replicas - 1} replicas to reach round {self.round + 1}"
        return waiting(others, emit=lambda line: logger.warning("replica %d: %s", self.replica, line))

    # --- checks

    def _start_once(self) -> None:
        """Before the first step, and the first after loading: does the model hold what it should, here and there?"""
        if self._started:
            return
        self._refuse_changed_params()
        if self.num_replicas > 1:
            remedy = (
                "Seed all replicas alike before the model is built, load one checkpoint everywhere, or pass "
                "initial='broadcast'; to resume, load states that were saved at one step."
            )
            self._refuse_unlike(self._start_facts(), f"A mean over replicas that start apart means nothing.\n{remedy}")
        self._started = True

    def _start_facts(self) -> dict[str, str]:
        frozen = {name: param for name, param in self._model.named_parameters() if name not in self._params}
        values = {**self.anchor(), **frozen}
        digests = {f"parameter {name!r}": f"values {fingerprint([value])[:8]}" for name, value in values.items()}
        return {"round": str(self.round), **digests, "averaged buffers": ", ".join(self._averaged)}

    def _refuse_unlike(self, facts: Mapping[str, str], remedy: str) -> None:
        difference = first_difference(self._transport, facts)
        if difference is not None:
            raise ConfigError(f"{difference.key} differs between replicas: {difference}.\n{remedy}")

    def _refuse_changed_params(self) -> None:
        device = next(iter(self.anchor().values())).device
        if device != self._device:
            raise ConfigError(
                f"the model moved from {device} to {self._device} after OuterSync was made, where its anchor is. "
                "Move the model first, then make OuterSync."
            )
        if fingerprint(self._params.values()) != self._params_digest:
            raise ConfigError(
                "the model's parameters are not those that OuterSync started from, or that its state was saved with.\n"
                "Load weights before OuterSync is made; to resume, load the model's state of the same step as well."
            )

    def _refuse_other(self, state: Mapping[str, Any]) -> None:
        missing = {
            "inner_step",
            "num_steps",
            "settings",
            "params_digest",
            "anchor",
            "outer",
            "counts",
            "fragments",
        } - set(state)
        if missing:
            raise CheckpointError(
                f"the saved state has no {min(missing)!r}. Pass what OuterSync.state_dict() returned."
            )
        for name in _FIXED:
            if state["settings"][name] != self.settings.facts()[name]:
                raise CheckpointError(
                    f"{name}={self.settings.facts()[name]}, but the state was saved with {state['settings'][name]}. "
                    f"Resume with {name}={state['settings'][name]}."
                )
        if state["inner_step"] >= self.settings.inner_steps:
            raise CheckpointError(
                f"inner_steps={self.settings.inner_steps}, but the state is {state['inner_step']} steps into a round. "
                f"Use more than {state['inner_step']}, or resume from another step."
            )
        _refuse_other_shapes(state["anchor"], self.anchor())


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name, tied ones once. Raises ConfigError for what has no place in a flat fp32 anchor."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for name, param in params.items():
        problem = _problem(param)
        if problem:
            raise ConfigError(f"parameter {name!r} {problem}")
    if not any(param.numel() for param in params.values()):
        raise ConfigError(
            "the model has no trainable parameter, so there is nothing to sync. Set requires_grad on some."
        )
    devices = {str(param.device): name for name, param in params.items()}
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ConfigError(f"parameters lie on several devices ({places}); a replica syncs from one. Move them to one.")
    return params


def _problem(param: nn.Parameter) -> str:
    if nn.parameter.is_lazy(param):
        return "has no shape yet. Run one batch through the model first."
    if param.is_meta:
        return "is on the meta device and holds no values. Load or initialise the weights first."
    if param.is_complex():
        return "is complex; only real parameters have a pseudo-gradient here. Store it as torch.view_as_real."
    if hasattr(param, "device_mesh"):
        return "is sharded (DTensor); OuterSync needs whole parameters. Make it before sharding, or do not shard."
    return ""


def _check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_post_hooks"):
        raise ConfigError(
            f"optimizer is a {type(optimizer).__name__}, which has no step hooks; OuterSync counts the steps of a "
            "torch.optim.Optimizer. Pass the optimizer that it wraps."
        )
    known = {id(param) for param in model.parameters()}
    held = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    foreign = [param for param in held if id(param) not in known]
    if foreign:
        raise ConfigError(
            f"{len(foreign)} of the {len(held)} parameters that optimizer trains (the first of shape "
            f"{tuple(foreign[0].shape)}) are not in model and would never sync.\n"
            "Pass a module that holds all of them, e.g. torch.nn.ModuleList([backbone, head])."
        )


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _averaged_buffers(model: nn.Module) -> list[str]:
    """Names of the persistent floating-point buffers, but for masks: an infinity has no mean."""
    buffers = _persistent_buffers(model)
    return [name for name, buffer in buffers.items() if buffer.is_floating_point() and bool(buffer.isfinite().all())]


def _described(model: nn.Module) -> dict[str, str]:
    """What each parameter and persistent buffer is, not what it holds."""
    params = {f"parameter {name!r}": param for name, param in model.named_parameters()}
    buffers = {f"buffer {name!r}": buffer for name, buffer in _persistent_buffers(model).items()}
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)}{' trainable' if tensor.requires_grad else ''}"
        for name, tensor in {**params, **buffers}.items()
    }


def _refuse_other_shapes(saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    for name in sorted({*saved, *own}):
        shapes = [tuple(tensors[name].shape) if name in tensors else None for tensors in (saved, own)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"parameter {name!r}: the saved state has {shapes[0] or 'none'}, the model {shapes[1] or 'none'}. "
                "Resume with the model it was saved from."
            )


def _copied(value: Any, device: torch.device) -> Any:
    """A deep copy of plain containers with its tensors on `device`."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, Mapping):
        return {key: _copied(item, device) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_copied(item, device) for item in value]
    return value


def _checked_weight(weight: float) -> float:
    if not 0 <= weight < math.inf:
        raise ConfigError(f"weight={weight} is not a finite number of 0 or more. Use 1.0 for a plain mean.")
    return float(weight)


def _positive(timeout_s: float) -> float:
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s={timeout_s} is not a positive number of seconds. Use 600 or so.")
    return timeout_s
