"""What is looked at before a machine joins a run, a line each; the first that fails is raised and says what to do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import atoll
from atoll.elastic.link import LinkRate, fetch_settings, fetch_status, measure_link
from atoll.elastic.tokens import parse_token
from atoll.errors import ConfigError, StorageError
from atoll.plan.units import format_bandwidth, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from atoll.plan.shapes import ModelShape
    from atoll.train.config import TrainConfig

STATE_BYTES, SAVED_BYTES = 32, 24  # a parameter, at most: in memory while training in fp32, and in a checkpoint


def check_before_joining(line: str, *, output_dir: str = "", device: str = "auto") -> None:
    """Print a line a check. Raises AtollError at the first that fails; nothing was joined or written then."""
    token = parse_token(line)
    told = fetch_settings(token)
    _ok("host key", f"{token.fingerprint[:16]}, as the token names it")
    _ok("version", f"{told['version']} there, {atoll.__version__} here")
    link = measure_link(token)
    config = _settings(told, device)
    shape = _shape(config)
    _ok("model", _model_words(config, shape))
    _ok("link", link_words(link, sync_bytes(config, shape), inner_s=_inner_s(fetch_status(token), config)))
    if shape is not None:
        _ok("memory", memory_words(config, shape.num_parameters))
    folder = Path(output_dir or f"runs/joined-{told['run'][:8]}")
    _ok("disk", disk_words(folder, shape.num_parameters if shape is not None else 0))
    _ok("data", data_words(config))


def link_words(link: LinkRate, size: int, *, inner_s: float) -> str:
    """The link, and what a round of `size` bytes takes on it; inner_s: that training takes a round, 0 if not known."""
    measured = f"{format_seconds(link.latency_s)} there and back, {format_bandwidth(link.up)} up, "
    measured += f"{format_bandwidth(link.down)} down"
    if not size:
        return measured
    sync_s = size / min(link.up, link.down) + 2 * link.latency_s
    share = f", {sync_s / (sync_s + inner_s):.0%} of a round" if inner_s else ""
    return f"{measured}; a sync of {format_bytes(size)} takes about {format_seconds(sync_s)}{share}"


def sync_bytes(config: TrainConfig, shape: ModelShape | None) -> int:
    """What this island sends a round, with one other; 0 where the model cannot be counted before it is built."""
    from atoll.plan.payload import Coding, fragment_payloads

    if shape is None:
        return 0
    coding = Coding(config.compressor)
    return sum(payload.sent_bytes for payload in fragment_payloads(shape, coding, num_islands=2))


def memory_words(config: TrainConfig, num_parameters: int) -> str:
    """Raises ConfigError where the state does not fit into the device, or into the memory of this machine."""
    import torch

    from atoll.elastic.donate import free_memory_bytes
    from atoll.train.build import pick_device

    device = pick_device(config, 0)
    needed = STATE_BYTES * num_parameters
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory_bytes()
    if free is not None and needed > free:
        raise ConfigError(
            f"memory: training takes about {format_bytes(needed)}, and {format_bytes(free)} are free on {device}.\n"
            "Free some, join from a larger machine, or use --device cpu if this one has more memory than its GPU."
        )
    have = "" if free is None else f" of {format_bytes(free)} free"
    return f"about {format_bytes(needed)}{have} on {device}"


def disk_words(folder: Path, num_parameters: int) -> str:
    """Raises StorageError where a checkpoint could not be written."""
    place = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    free, needed = shutil.disk_usage(place).free, SAVED_BYTES * num_parameters
    if not os.access(place, os.W_OK):
        raise StorageError(f"disk: {place} cannot be written to. Use --output-dir with another folder.")
    if needed > free:
        raise StorageError(
            f"disk: a checkpoint takes about {format_bytes(needed)}, and {format_bytes(free)} are free in {place}.\n"
            "Free some, or use --output-dir with another disk."
        )
    return f"{format_bytes(free)} free for {folder}, a checkpoint takes about {format_bytes(needed)}"


def data_words(config: TrainConfig) -> str:
    """Raises ConfigError where the run's texts are not on this machine."""
    source = config.data.source
    if source.startswith("hf:"):
        return f"{source}, streamed while training"
    if source == "python":
        return "the Python sources of this machine; they are the run's only with the same package versions"
    if not Path(source).expanduser().exists():
        raise ConfigError(
            f"data: this run trains on data.source={source!r}, and that is not on this machine.\n"
            "Copy it here to the same path, then give the same command."
        )
    return f"{source} is here"


# --- inside ---


def _ok(what: str, found: str) -> None:
    print(f"ok  {what:<9} {found}", flush=True)


def _settings(told: dict[str, Any], device: str) -> TrainConfig:
    from atoll.train.config import build_config, settings_digest

    config = build_config(dict(told["settings"]) | {"device": device, "report_to": []})
    if settings_digest(config) != told["settings_digest"]:
        raise ConfigError(
            "the coordinator's settings are not those it says it has. Is it of the same version of atoll?"
        )
    return config


def _shape(config: TrainConfig) -> ModelShape | None:
    """None where only building the model would tell."""
    from atoll.plan.shapes import shape_of_settings

    try:
        return None if config.init_from else shape_of_settings(config.model_dump(exclude_none=True))
    except ConfigError:
        return None


def _model_words(config: TrainConfig, shape: ModelShape | None) -> str:
    size = f"{format_count(shape.num_parameters)} parameters, " if shape is not None else ""
    return f"{config.model.family}, {size}{config.max_steps} steps, H={config.inner_steps}, {config.compressor}"


def _inner_s(status: dict[str, Any], config: TrainConfig) -> float:
    """Seconds of inner steps a round, by the fastest island there; 0 where none is known."""
    rate = max((float(member["tokens_per_s"]) for member in status["members"]), default=0.0)
    tokens = config.inner_steps * config.batch_size * config.gradient_accumulation_steps * config.sequence_length
    return tokens / rate if rate else 0.0
