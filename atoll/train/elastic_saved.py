"""Which checkpoint the islands of a run folder wrote last, so that one of them writes each and no other does it again.

islands/saved         its step; removed when a run begins or goes back
islands/saved.lock    held while a checkpoint is written; the kernel lets go of it when its holder dies
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

ISLANDS = "islands"
SAVED = "saved"


@contextmanager
def saving(run_dir: Path, step: int, *, patience_s: float) -> Iterator[bool]:
    """Yields whether the state of `step` is to be saved within the block: no island of this folder has done so.

    Islands that leave together, or when the run is over, come one after the other, and whoever leads may be gone. If
    another one is at it for longer than `patience_s`, the save is left to it.
    """
    folder = run_dir / ISLANDS
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{SAVED}.lock")
    try:
        lock.acquire(timeout=patience_s)
    except Timeout:
        yield False
        return
    try:
        needed = saved_step(run_dir) < step
        yield needed
        if needed:
            (folder / SAVED).write_text(f"{step}\n", encoding="ascii")
    finally:
        lock.release()


def saved_step(run_dir: Path) -> int:
    """The step of the newest checkpoint that an island of this folder has written since the start; -1 for none.

    >>> import tempfile
    >>> run_dir = Path(tempfile.mkdtemp())
    >>> with saving(run_dir, 20, patience_s=1) as needed:
    ...     pass
    >>> needed, saved_step(run_dir)
    (True, 20)
    >>> with saving(run_dir, 10, patience_s=1) as needed:
    ...     pass
    >>> needed, saved_step(run_dir)
    (False, 20)
    """
    try:
        return int((run_dir / ISLANDS / SAVED).read_text(encoding="ascii"))
    except (OSError, ValueError):  # ValueError: its writer was killed
        return -1


def forget_saved(run_dir: Path) -> None:
    """A run begins or goes back: what was saved by an earlier start says nothing of this one."""
    (run_dir / ISLANDS / SAVED).unlink(missing_ok=True)
