"""Every error that Atoll raises on purpose.

Each message names the value that was given, the rule it breaks and the way out, in at most three lines. The
command line prints these without a traceback; a traceback means a bug.

>>> raise ConfigError("inner_steps=0 is not positive; a round needs at least one inner step. Use 1 or more.")
Traceback (most recent call last):
...
atoll.errors.ConfigError: inner_steps=0 is not positive; a round needs at least one inner step. Use 1 or more.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AtollError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line returns."""

    exit_code = 1


class ConfigError(AtollError, ValueError):
    """A setting, a command or an argument that cannot be used as given."""

    exit_code = 2


class DataError(ConfigError):
    """A corpus, a shard or a tokenizer that cannot be used as given."""


class CheckpointError(ConfigError):
    """A checkpoint that is missing, truncated, altered or made by another configuration."""


class TransportError(AtollError):
    """The network between replicas failed: the only kind of error that is ever worth a retry."""

    exit_code = 3


class DesyncError(AtollError):
    """Replicas that must hold the same anchor do not."""


class StorageError(AtollError):
    """The disk refused a write (full, read-only, no permission); nothing already saved was touched."""

    exit_code = 2


def nearest(key: str, known: Iterable[str]) -> str:
    """A hint for a message: the known key most like `key`, or an empty string.

    >>> nearest("iner_steps", ["inner_steps", "seed"])
    " Did you mean 'inner_steps'?"
    """
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
