"""Work on a corpus that is worth keeping: a trained tokenizer and the tokens it gives.

A result is a folder named by the content it was made from, so that it never goes stale. It is built under another name
and renamed when whole. Processes that start together wait for the one that builds:

    process 0   lock  build in KEY.part  rename to KEY  unlock
    process 1   ...waiting for the lock...                      KEY is there: use it

Folders lie under $XDG_CACHE_HOME/atoll or ~/.cache/atoll and may be deleted at any time between runs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def cache_root() -> Path:
    """The folder of all that is kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atoll"


def cached_folder(key: str, build: Callable[[Path], object]) -> Path | None:
    """The folder that `build` fills for `key`, built at most once; None where the cache cannot be written."""
    folder = cache_root() / key
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                _build(folder, build)
    except OSError:
        return None
    return folder


def _build(folder: Path, build: Callable[[Path], object]) -> None:
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        build(part)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
