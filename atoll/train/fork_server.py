"""The process that workers are forked from: it loads torch and transformers once, so that each worker starts in 0.1 s.

Imports nothing heavy: the server can load while the process that started it still does.
"""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing import forkserver


def start_fork_server() -> None:
    """Start it, unless it runs already; it ends with the process that calls this. To be called in the main thread.

    A Ctrl-C on the terminal reaches it as well, as does a SIGTERM to a whole service, and would end it with a traceback
    while it loads, or while the workers it looks after still save.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["atoll.train.engine"])
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        forkserver.ensure_running()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
