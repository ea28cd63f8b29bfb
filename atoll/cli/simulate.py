"""`atoll simulate`: the command and its flags. Light to import; what it does is in `cli.simulating`."""

from __future__ import annotations

from typing import Any

import click


@click.command(short_help="Watch a run on a network clock: churn, stragglers, links.")
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[MODEL] [-- SETTINGS]")
@click.option("--params", help="Parameters, as 1.3e9 or 1.3B, where no MODEL is given; needs --layers.")
@click.option("--layers", type=int, help="Layers of such a model.")
@click.option("--islands", type=click.IntRange(min=1), help="Islands that train apart. [default: the model's, or 2]")
@click.option("--link", default="1gbit", show_default=True, help="What an island sends: 100mbit, or a matrix file.")
@click.option("--down", help="What an island receives in all; or one each, as 50mbit,10mbit. [default: as it sends]")
@click.option("--latency", default="0ms", show_default=True, help="Of one message between islands, as 50ms.")
@click.option("--devices", type=click.IntRange(min=1), help="Devices of an island, which share its link.")
@click.option("--step-time", help="Of an inner step, as 20ms.")
@click.option("--tflops", type=click.FloatRange(min=0), help="What a device sustains, where no step time is known.")
@click.option("--tokens-per-step", help="Of all islands together. [default: the model's]")
@click.option("--measure", metavar="RUN", help="Take step time and overhead from the metrics of a run.")
@click.option("--measured-link", help="The link of that run; without it all of its sync counts as overhead.")
@click.option("--schedule", help="blocking, delayed, streaming or data-parallel. [default: the model's]")
@click.option("--inner-steps", type=int, help="H. [default: the model's, or 100]")
@click.option("--fragments", type=click.IntRange(min=1), help="Of streaming. [default: the model's, or 3 layers each]")
@click.option("--delay", type=click.IntRange(min=1), help="Of streaming, in inner steps. [default: 1]")
@click.option("--compressor", help="What is sent. [default: the model's, or identity]")
@click.option("--rank", type=click.IntRange(min=1), help="Of low-rank compressors. [default: width / 8]")
@click.option("--overhead", default="0s", show_default=True, help="Of each sync beside sending.")
@click.option("--encode-rate", help="Fp32 bytes a device encodes and decodes a second, as 0.5GB/s.")
@click.option("--outer-time", default="0s", show_default=True, help="Of a round: the outer step, when nothing trains.")
@click.option("--message-time", default="0s", show_default=True, help="Of each message between two islands, as 140us.")
@click.option("--meeting-time", default="0s", show_default=True, help="Until the members of an averaging have met.")
@click.option("--hours", type=float, help="To simulate. [default: as many as --rounds take]")
@click.option(
    "--rounds", type=click.IntRange(min=1), help="To simulate at most. [default: 100 where no hours are given]"
)
@click.option("--jitter", help="Standard deviation of a step over its mean, as 0.1 or 10%.")
@click.option("--stragglers", metavar="N:Fx,...", help="N islands whose steps take F times as long, as 1:10x,2:3x.")
@click.option("--kill-rate", help="Over all islands, as 1/10min: a process is gone.")
@click.option("--join-after", help="A killed island is back after exactly so long, without state. [default: never]")
@click.option("--repair-time", help="The same on average, exponentially distributed.")
@click.option("--stop-rate", help="Over all islands: a process is frozen.")
@click.option("--stop-for", default="30s", show_default=True, help="How long it is.")
@click.option("--leave-rate", help="Over all islands: one leaves in good order, for good.")
@click.option("--join-rate", help="New islands.")
@click.option("--faults", metavar="FILE", help="Lines `time_s island what`: kill, stop, go, leave, join, slow 2x.")
@click.option("--quorum", type=click.FloatRange(0, 1, min_open=True), help="Share that closes a round. [default: 0.6]")
@click.option("--deadline", help="Longest that a round waits after its quorum. [default: 30s]")
@click.option("--lost-after", help="Silence after which an island is out. [default: 5s]")
@click.option("--adapt/--no-adapt", default=True, show_default=True, help="Slower islands take fewer steps (DyLU).")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="One seed is one history.")
@click.option("--detail", default="auto", show_default=True, help="messages, or whole rounds: for many islands.")
@click.option("--strict", is_flag=True, help="What would be a warning is an error.")
@click.option("--json", is_flag=True, help="Print everything as JSON.")
@click.option("--plot", metavar="FILE.png", help="Draw the time line, an island a row.")
@click.option("--window", metavar="FROM..TO", help="Of the time line, as 10min..12min. [default: the first fault]")
@click.option("--train", metavar="RECIPE", help="Really train it here: loss against simulated time.")
@click.option("--output-dir", help="With --train: where runs and results go. [default: runs/simulated-RECIPE]")
def simulate(args: tuple[str, ...], **values: Any) -> None:
    """Simulate a run of MODEL on islands joined by slow links: who computes, sends and waits when, what faults cost.

    The schedule, the bytes and the coordinator's rules are those of `atoll train`; time is simulated. MODEL is what
    `atoll plan` takes: a preset, a recipe, a TOML file, a run, or a Hugging Face config.json.

    \b
    atoll simulate dilocox_opt_1_3b --islands 4 --link 100mbit --step-time 1.4s --rounds 50 --plot run.png
    atoll simulate quickstart --islands 4 --link 100mbit --step-time 20ms --inner-steps 125 --schedule delayed \\
        --compressor int4 --hours 1 --kill-rate 1/10min --join-after 60s --seed 1
    atoll simulate streaming_1b --islands 10000 --link 1gbit --step-time 0.1s --hours 24 --jitter 10%
    atoll simulate --train dilocox_tiny --link 100mbit
    atoll simulate --train quickstart --link 10mbit -- --max-steps 200
    """
    from atoll.cli.simulating import run

    run(args, {name: value for name, value in values.items() if value is not None})
