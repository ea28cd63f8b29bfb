"""Names in a run folder, and whose it is. Light to import: the command line asks before anything heavy is loaded."""

from __future__ import annotations

from pathlib import Path

from atoll.errors import ConfigError
from atoll.train.config import TrainConfig

METRICS = "metrics.jsonl"
CONFIG = "config.toml"


def holds_run(run_dir: Path) -> bool:
    """Whether there is anything to lose: a run that failed before its first step left only settings."""
    metrics = run_dir / METRICS
    return (metrics.exists() and metrics.stat().st_size > 0) or any((run_dir / "checkpoints").glob("step-*"))


def refuse_taken(config: TrainConfig) -> None:
    """Raise ConfigError where `output_dir` holds a run that `config` does not ask to go on with."""
    if config.resume == "never" and holds_run(Path(config.output_dir)):
        raise ConfigError(
            f"output_dir={config.output_dir!r} already holds a run. Go on with it by --resume auto, or choose another "
            "--output-dir; nothing was changed."
        )
