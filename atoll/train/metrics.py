"""metrics.jsonl: one JSON object a line, the same keys everywhere, readable with no code of ours.

    MetricsWriter      appends events; any number of processes may append to one file
    read_metrics       every event of a file, also of one whose writer was killed in mid-line
    truncate_metrics   on resume: forget what happened after the step that is resumed from
    open_trackers      the same numbers to TensorBoard, wandb or trackio

The event classes below are the one place that lists the keys. Times are seconds, losses are nats a token.

>>> encode(EvalEvent(step=10, round=1, loss=2.0, perplexity=perplexity(2.0), tokens=4096))
'{"event": "eval", "step": 10, "round": 1, "loss": 2.0, "perplexity": 7.38905609893065, "tokens": 4096}'
"""

from __future__ import annotations

import fcntl
import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol

from atoll.errors import ConfigError, StorageError

# --- events ---


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """One inner step of one replica.

    loss, grad_norm: of this step, the norm before clipping.
    tokens: trained on by this replica since the run began. tokens_per_s: of this replica, since its last step event.
    """

    event: ClassVar[str] = "step"
    step: int
    replica: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class RoundEvent:
    """One committed round, written once a round, by replica 0.

    step: the inner step after which the round was applied. replicas: that were there; contributors: that were counted.
    payload_bytes: that replica 0 sent for parameters. The others sent as much, to within one element a tensor.
    inner_s: its inner steps. sync_s: from launch to adopted. exposed_s: the part of that in which it could not compute.
    delta_norm: of the averaged pseudo-gradient. norms: of each replica's. cosines: between those, M x M. None where
    what travels does not tell.
    refused: the replicas whose contribution was not let in.
    rank, inner_steps, observed: where rounds adapt, what was decided of this one, and what it was like for all:
    effective_rank, sync_s, step_s and residual_share (see `atoll.algo.adaptive.Observation`); None if nobody counted.
    """

    event: ClassVar[str] = "round"
    round: int
    step: int
    replicas: int
    contributors: int
    payload_bytes: int
    sync_s: float
    exposed_s: float
    inner_s: float
    anchor_digest: str
    delta_norm: float | None
    cosine_mean: float | None = None
    cosines: Sequence[Sequence[float | None]] | None = None
    norms: Sequence[float] = ()
    refused: Sequence[int] = ()
    compressor: str = "identity"
    rank: int | None = None
    inner_steps: int | None = None
    observed: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class EvalEvent:
    """The anchor on held-out text. tokens: that the loss is a mean over."""

    event: ClassVar[str] = "eval"
    step: int
    round: int
    loss: float
    perplexity: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class FaultEvent:
    """Something went wrong and the run went on, or ended by it. replica: None where no single one is meant."""

    event: ClassVar[str] = "fault"
    what: str
    replica: int | None
    step: int
    detail: str = ""


Event = StepEvent | RoundEvent | EvalEvent | FaultEvent

# Events that are undone when a run goes back to an earlier step. A fault happened, whatever was resumed after it.
UNDONE_BY_RESUME = frozenset({StepEvent.event, RoundEvent.event, EvalEvent.event})


def encode(event: Event) -> str:
    """One line of JSON, without its newline. NaN and infinities become null: a reader in any language understands it.

    >>> encode(FaultEvent(what="loss is nan", replica=3, step=7))
    '{"event": "fault", "what": "loss is nan", "replica": 3, "step": 7, "detail": ""}'
    """
    values = {field.name: _finite(getattr(event, field.name)) for field in fields(event)}
    return json.dumps({"event": event.event, **values}, allow_nan=False)


def perplexity(loss: float) -> float:
    """exp(loss), and infinity where that is too large for a float.

    >>> perplexity(0.0), perplexity(1000.0)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _finite(value: Any) -> Any:
    """`value` with every float that JSON has no word for replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return value


# --- the file ---


class MetricsWriter:
    """Appends events to a metrics.jsonl. A process opens its own; several may append to one file at a time.

    Each line is a single write on an O_APPEND descriptor: the kernel puts it whole at the end, wherever that is.
    A buffered file would flush in the middle of a line, and the lines of two replicas would mix.
    Raises `StorageError` where the disk refuses.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
    >>> with MetricsWriter(path) as metrics:
    ...     metrics.write(FaultEvent(what="evicted", replica=1, step=20))
    >>> read_metrics(path)
    [{'event': 'fault', 'what': 'evicted', 'replica': 1, 'step': 20, 'detail': ''}]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            _mend_last_line(self._descriptor)
        except OSError as error:
            raise _refused(self.path, error) from None

    def write(self, event: Event) -> None:
        """Append one event; it is in the kernel's hands, and survives a SIGKILL, when this returns."""
        self._append(encode(event))

    def append(self, event: Mapping[str, Any]) -> None:
        """As `write`, of an event that is plain JSON already."""
        plain = {key: _finite(value) for key, value in event.items()}
        self._append(json.dumps(plain, allow_nan=False))

    def _append(self, text: str) -> None:
        line = (text + "\n").encode()
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise _refused(self.path, error) from None
        if written < len(line):
            _take_back(self._descriptor, written)
            raise StorageError(f"{self.path}: the disk is full. Free some space and use --resume auto.")

    def close(self) -> None:
        """Give the descriptor back. Closing twice is allowed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All events of a metrics.jsonl, oldest first.

    A last line that was torn (its writer was killed, or is at it right now) is left out. Any other line that is not a
    JSON object raises `ConfigError` with its number.
    """
    return [json.loads(line) for line in _whole_lines(Path(path))]


def truncate_metrics(path: str | Path, step: int) -> int:
    """Drop the step, round and eval events after inner step `step`: the file tells one history. Returns how many.

    Atomic: a crash leaves the old file or the new one. A new file takes the place of the old, so exactly one process
    calls this, before any `MetricsWriter` is open: a writer would go on with the old file, which nobody sees any more.
    """
    path = Path(path)
    if not path.exists():
        return 0
    lines = _whole_lines(path)
    kept = [line for line in lines if not _is_after(json.loads(line), step)]
    if len(kept) < len(lines):
        try:
            _replace_file(path, b"".join(line + b"\n" for line in kept))
        except OSError as error:
            raise _refused(path, error) from None
    return len(lines) - len(kept)


def _is_after(event: Mapping[str, Any], step: int) -> bool:
    return event.get("event") in UNDONE_BY_RESUME and event["step"] > step


def _whole_lines(path: Path) -> list[bytes]:
    """The non-empty lines of a file, each known to be a JSON object, without a torn last one."""
    try:
        *lines, tail = path.read_bytes().split(b"\n")
    except OSError as error:
        rule = "Give the folder of a run that has started."
        raise ConfigError(f"{path} cannot be read ({error.strerror}). {rule}") from None
    for number, line in enumerate(lines, start=1):
        if line.strip() and not _is_object(line):
            raise ConfigError(
                f"{path}, line {number} is not a JSON object: {line[:40]!r}\n"
                "Only the last line of a run that was killed may be broken. Repair or remove this line."
            )
    if _is_object(tail):
        lines.append(tail)
    return [line for line in lines if line.strip()]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _mend_last_line(descriptor: int) -> None:
    """Remove a last line that was torn by a kill, so that the next line does not become its second half.

    The lock is for replicas that open at one time. Without it: A sees a torn line; B mends it and appends; A cuts off
    what B wrote.
    """
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        size = os.fstat(descriptor).st_size
        tail = _tail(descriptor, size)
        if _is_object(tail):
            os.write(descriptor, b"\n")
        elif tail:
            os.ftruncate(descriptor, size - len(tail))
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _tail(descriptor: int, size: int) -> bytes:
    """What stands after the last newline of a file of `size` bytes."""
    tail = b""
    while size > 0 and b"\n" not in tail:
        start = max(0, size - 65536)
        tail = os.pread(descriptor, size - start, start) + tail
        size = start
    return tail.rpartition(b"\n")[2]


def _take_back(descriptor: int, written: int) -> None:
    """Remove the half line that a full disk let through, unless another replica has already written after it."""
    end = os.lseek(descriptor, 0, os.SEEK_CUR)
    if os.fstat(descriptor).st_size == end:
        os.ftruncate(descriptor, end - written)


def _replace_file(path: Path, content: bytes) -> None:
    """Atomic and durable: written beside the old file, synced, then renamed over it."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _refused(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be written ({error.strerror}). Free some space or choose another --output-dir.")


# --- trackers ---


class Tracker(Protocol):
    """Where scalars go besides metrics.jsonl."""

    def log(self, scalars: dict[str, float], step: int) -> None:
        """Record finite numbers at an inner step."""

    def close(self) -> None:
        """Flush and let go."""


def open_trackers(report_to: Sequence[str], run_dir: str | Path, config: dict[str, Any]) -> list[Tracker]:
    """A tracker for each name: "tensorboard", "wandb" or "trackio". Nothing is imported for a name that is not given.

    `config` is shown beside the curves. Never a prompt: without an API key wandb writes to the run folder only.
    Raises `ConfigError` for an unknown name or a package that is not installed, before any tracker is opened.
    """
    for name in report_to:
        _require(name)
    return [TRACKERS[name](Path(run_dir), config) for name in report_to]


def scalars_of(event: Event) -> dict[str, float]:
    """The finite numbers of an event, under the names that trackers group by.

    >>> scalars_of(EvalEvent(step=10, round=1, loss=2.0, perplexity=float("inf"), tokens=64))
    {'eval/round': 1, 'eval/loss': 2.0, 'eval/tokens': 64}
    """
    group = "train" if isinstance(event, StepEvent) else event.event
    names = [field.name for field in fields(event) if field.name not in ("step", "replica")]
    values = {f"{group}/{name}": getattr(event, name) for name in names}
    return {key: value for key, value in values.items() if isinstance(value, (int, float)) and math.isfinite(value)}


class TensorBoardTracker:
    """Event files in RUN/tensorboard, for `tensorboard --logdir RUN`."""

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(run_dir / "tensorboard"))
        self._writer.add_text("config", f"```\n{json.dumps(config, indent=2, default=str)}\n```")

    def log(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A wandb run named after the run folder; offline, in RUN/wandb, unless WANDB_API_KEY is set."""

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run = importlib.import_module("wandb").init(
            project="atoll", name=run_dir.name, dir=str(run_dir), config=config, mode=wandb_mode(os.environ)
        )

    def log(self, scalars: dict[str, float], step: int) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()


class TrackioTracker:
    """A local trackio run named after the run folder, for `trackio show`."""

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        self._run = importlib.import_module("trackio").init(project="atoll", name=run_dir.name, config=config)

    def log(self, scalars: dict[str, float], step: int) -> None:
        self._run.log(scalars, step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[TensorBoardTracker] | type[WandbTracker] | type[TrackioTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "trackio": TrackioTracker,
}

_MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


def wandb_mode(environment: Mapping[str, str]) -> str:
    """Online needs a key: without one, wandb would ask for it and wait.

    >>> wandb_mode({}), wandb_mode({"WANDB_API_KEY": "k"}), wandb_mode({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"})
    ('offline', 'online', 'offline')
    """
    wanted = environment.get("WANDB_MODE", "online")
    return wanted if environment.get("WANDB_API_KEY") or wanted == "disabled" else "offline"


def _require(name: str) -> None:
    if name not in TRACKERS:
        raise ConfigError(f"report_to={name!r} is not known. Known: {', '.join(TRACKERS)}.")
    try:
        importlib.import_module(_MODULES[name])
    except ImportError:
        raise ConfigError(f"report_to={name!r} needs a package that is missing: pip install 'atoll[{name}]'") from None
