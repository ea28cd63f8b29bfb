"""`atoll doctor`: one line for each thing that training needs, with what is wrong and the next command."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import rich.console
import torch
import torch.distributed as dist
from rich.text import Text

from atoll.data import read_corpus
from atoll.errors import DataError
from atoll.train.console import format_bytes
from atoll.train.launch import LOOPBACK

OK, WARN, FAIL = "ok", "warn", "fail"
STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}
LOW_DISK_BYTES, NO_DISK_BYTES = 5_000_000_000, 200_000_000
CORPUS_BYTES = 1_000_000  # enough to know that it is there and can be read
GLOO_TIMEOUT_S = 10.0

# Packages that some settings need -> the extra of ours that brings them, and what for.
EXTRAS = {
    "tensorboard": ("tensorboard", "--report-to tensorboard"),
    "wandb": ("wandb", "--report-to wandb"),
    "trackio": ("trackio", "--report-to trackio"),
    "datasets": ("hf", "--data.source hf:NAME"),
    "sklearn": ("clusters", "--data.shard cluster"),
}


@dataclass(frozen=True)
class Finding:
    """One line. way_out: what to do about it, where there is something."""

    status: str
    what: str
    way_out: str = ""


def doctor(output_dir: Path) -> int:
    """Print all findings; returns the exit code."""
    console = rich.console.Console(highlight=False)
    failed = False
    for check in checks(output_dir):
        finding = check()
        failed = failed or finding.status == FAIL
        line = Text.assemble((f"{finding.status:<5}", STYLES[finding.status]), finding.what)
        console.print(line, soft_wrap=True)
        if finding.way_out:
            console.print(f"     {finding.way_out}", markup=False, soft_wrap=True)
    console.print("Something failed: see the lines above." if failed else "Ready. Next: atoll demo")
    return 2 if failed else 0


def checks(output_dir: Path) -> Iterator[Callable[[], Finding]]:
    """What is looked at, in order."""
    yield check_versions
    yield check_devices
    yield lambda: check_threads(os.environ.get("OMP_NUM_THREADS", ""), num_cores=num_cores())
    yield check_memory
    yield check_network
    yield lambda: check_disk(output_dir)
    yield check_corpus
    yield check_extras


# --- the checks ---


def check_versions() -> Finding:
    """Python and torch."""
    import transformers

    what = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    if not dist.is_available() or not dist.is_gloo_available():
        return Finding(FAIL, f"{what}: this torch has no gloo", "pip install torch from pytorch.org or PyPI")
    return Finding(OK, what)


def check_devices() -> Finding:
    """GPUs with their memory, or none."""
    if not torch.cuda.is_available():
        return Finding(OK, "no GPU: training runs on the CPU, in fp32")
    names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return Finding(OK, ", ".join(f"{device.name} with {format_bytes(device.total_memory)}" for device in names))


def check_threads(omp_num_threads: str, *, num_cores: int) -> Finding:
    """Whether processes would fight for the cores.

    >>> check_threads("16", num_cores=2)
    Finding(status='warn', what='2 cores, but OMP_NUM_THREADS=16', way_out='unset OMP_NUM_THREADS, or set --threads')
    """
    cores = f"{num_cores} core{'s' if num_cores > 1 else ''}"
    if omp_num_threads.isdigit() and int(omp_num_threads) > num_cores:
        return Finding(
            WARN, f"{cores}, but OMP_NUM_THREADS={omp_num_threads}", "unset OMP_NUM_THREADS, or set --threads"
        )
    if num_cores == 1:
        return Finding(WARN, "1 core: replicas take turns on it", "start with atoll demo --quick")
    return Finding(OK, f"{cores}, shared evenly among the replicas (--threads sets another number a process)")


def check_memory() -> Finding:
    """Of the machine."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total < 3e9:
        return Finding(WARN, f"{format_bytes(total)} of memory", "a replica needs about 0.5 GB: use --replicas 2")
    return Finding(OK, f"{format_bytes(total)} of memory")


def check_network() -> Finding:
    """Whether two ends of a gloo group reach each other on this machine."""
    try:
        total = all_reduce_on_loopback()
    except RuntimeError as error:
        cause = str(error).splitlines()[0][:160]
        return Finding(FAIL, f"gloo does not work on loopback: {cause}", f"ip link set {LOOPBACK} up; check firewalls")
    if total != [3.0, 3.0]:
        return Finding(FAIL, f"gloo summed 1 and 2 to {total}", "pip install --force-reinstall torch")
    return Finding(OK, "gloo works on loopback (an all_reduce between two ends)")


def check_disk(output_dir: Path) -> Finding:
    """Space, and permission to write."""
    place = next(folder for folder in (output_dir.absolute(), *output_dir.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as trial:
            trial.write(b"atoll")
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Finding(FAIL, f"{place} cannot be written to: {error.strerror}", "use --output-dir with another folder")
    what = f"{format_bytes(free)} free for {output_dir}"
    if free < NO_DISK_BYTES:
        return Finding(FAIL, what, "free some space, or use --output-dir with another disk")
    if free < LOW_DISK_BYTES:
        return Finding(WARN, what, "large models fill that quickly: lower --keep-last")
    return Finding(OK, what)


def check_corpus() -> Finding:
    """Whether the default corpus is here."""
    try:
        corpus = read_corpus("python", max_bytes=CORPUS_BYTES)
    except DataError as error:
        return Finding(FAIL, str(error).splitlines()[0], "name texts of your own: --data.source FOLDER")
    domains = sorted({document.domain for document in corpus.documents})
    return Finding(OK, f"the Python corpus is here: {', '.join(domains)}")


def check_extras() -> Finding:
    """Packages that are not needed to begin with."""
    missing = [package for package in EXTRAS if importlib.util.find_spec(package) is None]
    present = ", ".join(package for package in EXTRAS if package not in missing) or "none"
    hint = "; ".join(f"pip install 'atoll[{EXTRAS[name][0]}]' for {EXTRAS[name][1]}" for name in missing)
    return Finding(OK, f"extras: {present}", f"not installed: {hint}" if hint else "")


# --- inside ---


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def all_reduce_on_loopback() -> list[float]:
    """Two threads as two ends of a real gloo group, one with a 1 and one with a 2: what each has after the sum."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    timeout = timedelta(seconds=GLOO_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tensors = [torch.tensor([1.0]), torch.tensor([2.0])]
    errors: list[RuntimeError] = []

    def work(rank: int) -> None:
        try:
            own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
            group: Any = dist.ProcessGroupGloo(own, rank, 2, timeout)  # torch's stubs know no collectives of it
            group.allreduce([tensors[rank]]).wait()
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [float(tensor) for tensor in tensors]
