"""`atoll demo`: DiLoCo, one replica alone and data parallelism on one small model, side by side, in minutes.

    1  DiLoCo           four replicas, one sync a round
    2  one replica      the same model and batch, nobody to talk to
    3  data parallel    four replicas, one sync before every step

All three take equal inner steps. Workers of all runs come from one fork server, which has torch loaded.
"""

from __future__ import annotations

import itertools
import multiprocessing
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.box
import rich.console
from rich.table import Table
from rich.text import Text

from atoll.cli.flags import merge, parse_flags
from atoll.cli.models import find_model, printable, write_sample
from atoll.errors import AtollError, ConfigError, StorageError
from atoll.recipes import recipe
from atoll.train.config import TrainConfig, build_config
from atoll.train.console import format_bytes, format_duration, format_factor, print_line
from atoll.train.launch import run_workers, work_in_engine
from atoll.train.metrics import perplexity
from atoll.train.stopping import Interrupted

if TYPE_CHECKING:
    from atoll.train.summary import RunSummary

PROMPT = "def "
SAMPLE_TOKENS = 240

# A thread a process: on models this small a second one gains nothing. Checkpoints at the end alone.
DEMO = {"eval_steps": 50, "logging_steps": 25, "save_steps": 0, "threads": 1}
QUICK = {"max_steps": 100, "inner_steps": 10, "warmup_steps": 10, "eval_steps": 10, "logging_steps": 10}
DECIDED_HERE = ("method", "engine", "output_dir", "resume")


@dataclass(frozen=True)
class Contender:
    """One of the runs. name: for people; settings: what sets it apart."""

    name: str
    folder: str
    settings: Mapping[str, Any]


def demo(args: Sequence[str], *, quick: bool, output_dir: Path) -> None:
    """Train all contenders, then print and write how they compare."""
    began = time.monotonic()
    settings = demo_settings(args, quick=quick)
    contenders = contenders_of(build_config(settings))
    configs = [build_config(merge(settings, contender.settings)) for contender in contenders]
    folder = claim_folder(output_dir)
    if folder != output_dir:
        print_line(f"{output_dir} exists and is left as it is; this demo goes to {folder}")
    for number, (contender, config) in enumerate(zip(contenders, configs, strict=True), start=1):
        print_line(f"\n--- {number}/{len(contenders)}: {contender.name}, {config.max_steps} steps ---")
        _train(config.model_copy(update={"output_dir": str(folder / contender.folder)}))
    sample = _sample_in_worker(folder / contenders[0].folder)
    _conclude(contenders, folder, sample=sample, command=_command(args, quick=quick))
    print_line(f"the demo took {format_duration(time.monotonic() - began)}")


def demo_settings(args: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """The nested settings that all contenders share.

    >>> demo_settings(["--seed", "3"], quick=True)["max_steps"]
    100
    """
    source, flags = parse_flags(args)
    taken = [key for key in DECIDED_HERE if key in flags]
    if source is not None or taken:
        what = repr(source) if source is not None else f"--{taken[0].replace('_', '-')}"
        raise ConfigError(f"{what} is not for the demo, which decides it. Use atoll train, or leave it out.")
    return merge(merge(recipe("quickstart"), DEMO | (QUICK if quick else {})), flags)


def contenders_of(config: TrainConfig) -> list[Contender]:
    """DiLoCo and what it is compared with."""
    several = f"{config.replicas} replicas"
    parallel = {"method": "data-parallel", "compressor": "identity"}  # gradients are averaged in full precision
    return [
        Contender(f"DiLoCo, {several}", "diloco", {}),
        Contender("one replica alone", "alone", {**parallel, "replicas": 1}),
        Contender(f"data parallel, {several}", "data-parallel", parallel),
    ]


def claim_folder(wanted: Path) -> Path:
    """Make the folder `wanted`, or the next free one after it (demo-2, demo-3, ...); nothing is ever overwritten."""
    for number in itertools.count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if wanted.is_file():
                raise ConfigError(f"{str(wanted)!r} is a file. Give another --output-dir.") from None
        except OSError as error:
            raise StorageError(f"{folder} cannot be made: {error.strerror}. Give another --output-dir.") from error
    raise AssertionError("numbers do not end")


# --- running ---


def _train(config: TrainConfig) -> None:
    """In workers, also where there is only one: they start at once, and this process stays light."""
    try:
        run_workers(config, work_in_engine)
    except AtollError as error:
        if error.exit_code in (75, 130):
            signum = signal.SIGINT if error.exit_code == 130 else signal.SIGTERM
            told = str(error).split(" Go on")[0]
            command = f"atoll train {shlex.quote(config.output_dir)} --resume auto"
            raise Interrupted(signum, f"{told}\nThe demo ends here. This run alone goes on by: {command}") from error
        raise


def _sample_in_worker(run_dir: Path) -> str:
    """Text of the newest model in `run_dir`; the worker has transformers loaded already, and this process need not."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(target=_send_sample, args=(str(run_dir), theirs), name="sample", daemon=True)
    worker.start()
    theirs.close()
    try:
        sample: str = ours.recv()
    except EOFError:
        worker.join()
        raise AtollError(f"no text could be written by the model in {run_dir}: see above") from None
    worker.join()
    return sample


def _send_sample(run_dir: str, pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    folder = find_model(run_dir)
    pipe.send(write_sample(folder, PROMPT, max_new_tokens=SAMPLE_TOKENS, temperature=0.7, top_k=0, seed=1))
    pipe.close()


# --- the comparison ---


def _conclude(contenders: Sequence[Contender], folder: Path, *, sample: str, command: str) -> None:
    from atoll.train.report import write_report
    from atoll.train.summary import bytes_finding, loss_finding, summarise

    runs = {contender.name: summarise(folder / contender.folder) for contender in contenders}
    subject = contenders[0].name
    report = write_report(
        runs,
        folder,
        command=command,
        sample=sample,
        prompt=PROMPT,
        sample_of=subject,
        title=f"{subject}, against one replica alone and data parallel",
    )
    console = rich.console.Console(highlight=False)
    console.print()
    console.print(results_table(runs))
    for finding in (loss_finding(runs), bytes_finding(runs)):
        if finding:
            console.print(Text(f"{finding}."), soft_wrap=True)
    console.print(f"\n{subject} writes, after {PROMPT!r}:\n", markup=False)
    console.print(Text(printable(sample)))
    console.print(f"\nreport: {report}\nplots:  {folder / 'plots'}", markup=False, soft_wrap=True)
    newest = shlex.quote(str(folder / contenders[0].folder))
    console.print(f"next:   atoll generate {newest} -p {shlex.quote(PROMPT)}", markup=False, soft_wrap=True)


def results_table(runs: Mapping[str, RunSummary]) -> Table:
    """Loss, bytes and time of each run."""
    most = max(run.sent_bytes for run in runs.values())
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in ("held-out\nloss", "perplexity", "sent by\neach replica", "time"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, run in runs.items():
        loss = run.evals[-1].loss
        sent = _sent(run.sent_bytes, most)
        table.add_row(name, f"{loss:.3f}", f"{perplexity(loss):.2f}", sent, format_duration(run.wall_s))
    return table


def _sent(sent_bytes: int, most: int) -> str:
    """
    >>> _sent(2_000_000, 40_000_000), _sent(40_000_000, 40_000_000), _sent(0, 40_000_000)
    ('2.0 MB (20x less)', '40 MB', 'nothing')
    """
    if not sent_bytes:
        return "nothing"
    less = f" ({format_factor(most / sent_bytes)} less)" if most > 1.05 * sent_bytes else ""
    return format_bytes(sent_bytes) + less


def _command(args: Sequence[str], *, quick: bool) -> str:
    return shlex.join(["atoll", "demo", *(["--quick"] if quick else []), *args])
