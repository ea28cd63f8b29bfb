"""`atoll`: the commands, and what becomes of errors.

Exit codes: 0 done; 1 a bug, with a traceback; 2 settings or usage; 3 unreachable or refused; 4 evicted; 5 too few
islands left; 75 told to end (SIGTERM), saved; 130 interrupted (Ctrl-C).

Everything heavy is imported by the command that needs it: `atoll --help` and a typing error answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import atoll
from atoll.cli.elastic import COMMANDS
from atoll.cli.evaluate import command as evaluate
from atoll.cli.recipes import recipes
from atoll.cli.simulate import simulate
from atoll.cli.verify import verify
from atoll.errors import AtollError

INTERRUPTED, PREEMPTED, CLOSED_PIPE = 130, 75, 141

# Everything after the command is a setting of the run: click hands it on as it is.
SETTINGS = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(atoll.__version__, "--version", message="atoll %(version)s")
def cli() -> None:
    """Train one language model on islands of accelerators joined by slow links.

    \b
    atoll demo                                  see it work: DiLoCo against two baselines, minutes
    atoll recipes                               what there is to train, and what each needs
    atoll train quickstart --replicas 2         train; flags change any setting
    atoll train runs/x --resume auto            go on with a run that was stopped
    atoll generate runs/x -p "def main():"      text from the newest checkpoint of a run
    atoll export runs/x model                   a plain Hugging Face folder
    atoll eval runs/x                           loss and bits per byte on held-out text
    atoll verify runs/x                         are its checkpoints as they were saved?
    atoll plan quickstart --step-time 20ms      what a run takes on your link
    atoll simulate quickstart --step-time 20ms  watch it, with faults and stragglers
    atoll host quickstart                       train here, and let other machines join
    atoll coordinator quickstart                serve a run that other machines join
    atoll join TOKEN                            train in such a run
    atoll status runs/x                         how it is doing
    atoll doctor                                is this machine ready?
    """


@cli.command(context_settings=SETTINGS, short_help="Train a model; `atoll train --help` lists all settings.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def train(args: tuple[str, ...]) -> None:
    """Train a model from a recipe or a file of settings, changed by flags."""
    if "--help" in args or "-h" in args:
        from atoll.cli.settings_help import print_train_help

        return print_train_help()
    from atoll.cli.train import train as run

    run(args)


@cli.command(context_settings={"ignore_unknown_options": True}, short_help="See it work, in minutes.")
@click.option("--quick", is_flag=True, help="A smaller model and fewer steps: half a minute.")
@click.option("--output-dir", default="runs/demo", show_default=True, help="Where the runs and the report go.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def demo(args: tuple[str, ...], quick: bool, output_dir: str) -> None:
    """Train DiLoCo with four replicas on this machine, one replica alone, and data parallelism, and compare them.

    Needs no download and no account: the corpus is the Python code found on this machine. Any other setting of `atoll
    train` may follow and holds for all three runs.
    """
    from atoll.train.fork_server import start_fork_server

    start_fork_server()  # it loads torch for the workers while the next line does so for this process
    from atoll.cli.demo import demo as run

    run(args, quick=quick, output_dir=Path(output_dir))


@cli.command(short_help="Text from a trained model.")
@click.argument("run")
@click.option("-p", "--prompt", default="", help="What the text begins with.")
@click.option("--max-new-tokens", default=200, show_default=True, help="Tokens to add at most.")
@click.option("--temperature", default=0.8, show_default=True, help="0: the likeliest token each time.")
@click.option("--top-k", default=0, show_default=True, help="Draw from the k likeliest tokens; 0: from all.")
@click.option("--seed", default=0, show_default=True, help="The same seed writes the same text.")
def generate(run: str, prompt: str, max_new_tokens: int, temperature: float, top_k: int, seed: int) -> None:
    """Print PROMPT and what a model makes of it.

    RUN is a run folder (its newest checkpoint is taken), a checkpoint, or a Hugging Face folder.

    \b
    atoll generate runs/quickstart -p "def main():"
    atoll generate runs/quickstart/checkpoints/step-000500 -p "import" --temperature 0
    """
    from atoll.cli.models import generate as write_text

    write_text(run, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed)


@cli.command(short_help="A trained model as a plain Hugging Face folder.")
@click.argument("run")
@click.argument("folder")
def export(run: str, folder: str) -> None:
    """Write the model and the tokenizer of RUN to FOLDER, for AutoModelForCausalLM and AutoTokenizer.

    RUN is a run folder (its newest checkpoint is taken) or a checkpoint. FOLDER must be new or empty.

    \b
    atoll export runs/quickstart my-model
    """
    from atoll.cli.models import export as write_folder

    write_folder(run, Path(folder))


@cli.command(short_help="Know before you spend: time, bytes and memory of a run.")
@click.argument("model", required=False)
@click.option("--params", help="Parameters, as 1.3e9 or 1.3B, where no MODEL is given; needs --layers.")
@click.option("--layers", type=int, help="Layers of such a model.")
@click.option("--islands", type=click.IntRange(min=1), help="Islands that train apart. [default: the model's, or 2]")
@click.option("--link", default="1gbit", show_default=True, help="Of an island: 100mbit, 10Gbps, or a matrix file.")
@click.option("--latency", default="0ms", show_default=True, help="Of one message between islands, as 50ms.")
@click.option("--devices", type=click.IntRange(min=1), help="Devices of an island, over which state is spread.")
@click.option("--memory", help="Of a device, as 40GB: does it fit, and what must live on the host?")
@click.option("--step-time", help="Of an inner step, pipeline bubble included, as 8.79s.")
@click.option("--tflops", type=click.FloatRange(min=0), help="What a device sustains, where no step time is known.")
@click.option("--tokens-per-step", help="Of all islands together. [default: the model's]")
@click.option("--tokens", help="To train on, as 26e9: adds how long that takes.")
@click.option("--inner-steps", type=int, help="H. [default: the model's; else 100, and the recommendation is free]")
@click.option("--compressor", help="Of streaming and DiLoCoX. [default: the model's, or int4]")
@click.option("--rank", type=click.IntRange(min=1), help="Of low-rank compressors. [default: width / 8]")
@click.option("--fragments", type=click.IntRange(min=1), help="Of streaming. [default: three layers each]")
@click.option("--delay", type=click.IntRange(min=1), help="Of streaming, in inner steps. [default: 1]")
@click.option("--overhead", default="0s", show_default=True, help="Of each sync beside sending.")
@click.option("--encode-rate", help="Fp32 bytes a device encodes and decodes a second, as 0.5GB/s.")
@click.option("--measure", metavar="RUN", help="Take step time and overhead from the metrics of a run.")
@click.option("--measured-link", help="The link of that run; without it all of its sync counts as overhead.")
@click.option("--bf16/--fp32", default=None, help="Mixed precision. [default: fp32, bf16 for dilocox_107b]")
@click.option("--json", is_flag=True, help="Print everything as JSON.")
@click.option("--plot", metavar="FILE.png", help="Draw the share of time computed against bandwidth.")
@click.option("--write", metavar="FILE.toml", help="Write the recommendation for `atoll train`.")
@click.option("--table", help="streaming-diloco: the paper's table of bandwidths, computed again.")
def plan(**values: Any) -> None:
    """Compare data parallelism, DiLoCo, streaming and DiLoCoX for MODEL on your islands, and recommend one.

    MODEL is a preset (dilocox_107b, dilocox_opt_1_3b, streaming_1b, sparseloco_1b), a recipe, a TOML file, a run, or a
    Hugging Face config.json. Nothing is built and nothing is sent.

    \b
    atoll plan dilocox_107b --islands 2 --link 1gbit --step-time 8.79 --tokens-per-step 32768
    atoll plan --params 1.3e9 --layers 24 --link 100mbit --tflops 150 --devices 8 --tokens-per-step 1e6 --plot plan.png
    atoll plan --measure runs/x --link 100mbit --islands 8 --write next.toml
    atoll plan --table streaming-diloco
    """
    from atoll.cli.plan import options_from
    from atoll.cli.plan import plan as answer

    answer(options_from(values))


@cli.command(short_help="Is this machine ready to train?")
@click.option("--output-dir", default="runs", show_default=True, help="Where runs will be written.")
@click.option("--from-join", metavar="TOKEN", help="Look at what joining this run needs instead; joins nothing.")
def doctor(output_dir: str, from_join: str | None) -> int:
    """Look at what training needs: versions, devices, the network on this machine, disk, data.

    One line each: ok, warn or fail, with the next command to give. The exit code is 2 if anything failed.
    """
    if from_join is not None:
        from atoll.cli.elastic import token_line
        from atoll.cli.joining import check_before_joining

        check_before_joining(token_line(from_join), output_dir="" if output_dir == "runs" else output_dir)
        print("Ready. Next: atoll join, with the same token")
        return 0
    from atoll.cli.doctor import doctor as examine

    return examine(Path(output_dir))


for command in (recipes, simulate, evaluate, verify, *COMMANDS):
    cli.add_command(command)


# --- the way out ---


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code; a bug is left to Python, with its traceback."""
    try:
        code = cli.main(args, prog_name="atoll", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        return _fail(_usage(error), 2)
    except AtollError as error:
        return _end_run(error)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted.", INTERRUPTED, label="")
    except BrokenPipeError:
        _forget_output()
        return CLOSED_PIPE


def _end_run(error: AtollError) -> int:
    """Say why a run ended; one that was told to stop did not fail."""
    stopped = error.exit_code in (INTERRUPTED, PREEMPTED)
    return _fail(str(error), error.exit_code, label="" if stopped else "error: ")


def _usage(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f" See {context.command_path} --help." if context is not None else ""
    return error.format_message() + hint


def _fail(message: str, code: int, *, label: str = "error: ") -> int:
    try:
        sys.stdout.flush()
        print(f"{label}{message}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        _forget_output()
    return code


def _forget_output() -> None:
    """Who read along has left: what is still to be written goes nowhere, or Python would complain at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
