"""What `atoll simulate` does: from what was typed to a scenario, and from what came of it to a person."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from atoll.cli import plan as planning
from atoll.errors import ConfigError
from atoll.plan.estimate import Method
from atoll.plan.payload import IDENTITY, Coding
from atoll.plan.plan import Request
from atoll.plan.recommend import default_rank
from atoll.plan.sim.faults import Rates, parse_duration, parse_rate, read_faults
from atoll.plan.sim.methods import DATA_PARALLEL, method_of
from atoll.plan.sim.scenario import Patience, Scenario, Speeds
from atoll.plan.simulate import Simulation, as_json, simulate
from atoll.plan.units import format_seconds, parse_bandwidth, parse_seconds

DEFAULT_ROUNDS = 100
SILENCE_S = 5.0  # the longest without a word


@dataclass(frozen=True)
class Asked:
    """What was typed beside what `atoll plan` knows too; an empty text or 0 is not given."""

    down: str = ""
    schedule: str = ""
    outer_time: str = "0s"
    message_time: str = "0s"
    meeting_time: str = "0s"
    hours: float = 0.0
    rounds: int = 0
    jitter: str = ""
    stragglers: str = ""
    kill_rate: str = "0"
    join_after: str = ""
    repair_time: str = ""
    stop_rate: str = "0"
    stop_for: str = "30s"
    leave_rate: str = "0"
    join_rate: str = "0"
    faults: str = ""
    quorum: float = 0.0
    deadline: str = ""
    lost_after: str = ""
    adapt: bool = True
    seed: int = 0
    detail: str = "auto"
    strict: bool = False
    window: str = ""
    train: str = ""
    output_dir: str = ""


def run(args: Sequence[str], values: Mapping[str, Any]) -> None:
    """Do what was typed. args: the model, and settings for --train."""
    options, asked = split(values)
    model = args[0] if args and not args[0].startswith("-") else ""
    rest = args[bool(model) :]
    if asked.train:
        if model:
            raise ConfigError(f"--train {asked.train} and {model!r} both name what to train. Give one of them.")
        from atoll.cli.simulate_train import train_simulated

        return train_simulated(options, asked, rest)
    if rest:
        raise ConfigError(f"{rest[0]!r} is not understood: one MODEL is simulated. Settings after -- are for --train.")
    options = replace(options, model=model)
    scenario = build_scenario(options, asked)
    found = simulate(scenario, model=asked.detail, watch=Heartbeat(scenario.duration_s))
    show(found, options, asked)


def split(values: Mapping[str, Any]) -> tuple[planning.Options, Asked]:
    """What `atoll plan` reads, and the rest."""
    own = {field.name for field in fields(Asked)}
    known = {name: value for name, value in values.items() if name not in own}
    return planning.options_from(known), Asked(**{name: value for name, value in values.items() if name in own})


def show(found: Simulation, options: planning.Options, asked: Asked) -> None:
    """Print what came of it; draw it where a file is named."""
    if asked.strict and found.warnings:
        raise ConfigError(found.warnings[0])
    window = parse_window(asked.window, found.outcome.simulated_s) if asked.window else None
    if options.plot:
        from atoll.plan.sim.plot import plot_simulation

        planning._written(options.plot, lambda path: plot_simulation(found, path, window))
    if options.json:
        print(json.dumps(as_json(found, window), indent=2))
        return
    from atoll.plan.sim.show import print_simulation

    console = planning._console()
    print_simulation(found, console)
    if options.plot:
        console.print(f"picture: {options.plot}", highlight=False)


class Heartbeat:
    """Says on stderr how far a long simulation is."""

    def __init__(self, duration_s: float) -> None:
        self._whole = f" of {format_seconds(duration_s)}" if duration_s < float("inf") else ""
        self._spoke_at = time.monotonic()

    def __call__(self, simulated_s: float) -> None:
        if time.monotonic() - self._spoke_at >= SILENCE_S:
            self._spoke_at = time.monotonic()
            print(f"simulated {format_seconds(simulated_s)}{self._whole}", file=sys.stderr, flush=True)


# --- the scenario


def build_scenario(options: planning.Options, asked: Asked, *, source: planning.Source | None = None) -> Scenario:
    """All that was typed, with the planner's reading of links and step times. source: the model, where it is known."""
    source = source or planning.find_model(options)
    request = planning.build_request(options, source)
    islands = request.network.num_islands
    landing_s = request.workload.landing_s + parse_seconds(asked.outer_time)
    hours = _positive(asked.hours, "--hours") if asked.hours else 0.0
    rates = parse_rates(asked)
    script = tuple(read_faults(asked.faults, num_islands=islands)) if asked.faults else ()
    if rates.any and not hours:
        raise ConfigError("faults by rates are drawn for a time. Give how long to simulate, as --hours 1.")
    return Scenario(
        build_method(options, asked, source, request),
        replace(request.workload, landing_s=landing_s),
        request.network,
        duration_s=hours * 3600 if hours else float("inf"),
        num_rounds=asked.rounds or (0 if hours else DEFAULT_ROUNDS),
        seed=asked.seed,
        speeds=Speeds(parse_share(asked.jitter) if asked.jitter else 0.0, parse_stragglers(asked.stragglers, islands)),
        patience=parse_patience(asked),
        down_bytes_per_s=tuple(parse_bandwidth(part) for part in asked.down.split(",")) if asked.down else (),
        message_s=parse_seconds(asked.message_time),
        meeting_s=parse_seconds(asked.meeting_time),
        rates=rates,
        script=script,
    )


def build_method(options: planning.Options, asked: Asked, source: planning.Source, request: Request) -> Method:
    """The schedule and the compressor that are named, or those of the model."""
    kind = asked.schedule or _known_schedule(options, source)
    coding = build_coding(options, source)
    if kind == DATA_PARALLEL and not options.compressor:
        coding = IDENTITY
    return method_of(
        kind,
        coding,
        inner_steps=request.inner_steps,
        num_layers=request.workload.shape.num_layers,
        fragments=request.fragments,
        delay=request.delay,
        blocking_first=source.settings.get("first_round", "blocking") == "blocking",
    )


def _known_schedule(options: planning.Options, source: planning.Source) -> str:
    """That of the recipe or file; of a preset, what its paper does."""
    if options.fragments > 1 or source.fragments > 1:
        return "streaming"
    if options.model.startswith("dilocox"):
        return "delayed"
    return str(source.settings.get("schedule", "blocking"))


def build_coding(options: planning.Options, source: planning.Source) -> Coding:
    """The compressor that is named, or the model's own."""
    name = options.compressor or source.compressor or "identity"
    if "lowrank" not in name:
        return Coding(name)
    return Coding(name, options.rank or source.rank or default_rank(source.shape.hidden_size))


def parse_rates(asked: Asked) -> Rates:
    """How often what happens."""
    if asked.join_after and asked.repair_time:
        raise ConfigError("--join-after is exact and --repair-time an average; give one of them.")
    repair = asked.join_after or asked.repair_time
    rates = Rates(
        kill=parse_rate(asked.kill_rate),
        stop=parse_rate(asked.stop_rate),
        join=parse_rate(asked.join_rate),
        leave=parse_rate(asked.leave_rate),
        repair_s=parse_duration(repair) if repair else float("inf"),
        repair_varies=bool(asked.repair_time),
        stop_s=parse_duration(asked.stop_for),
    )
    if repair and not rates.kill:
        raise ConfigError(f"islands come back after {repair}, and none is killed. Add --kill-rate 1/10min.")
    if not rates.repair_s >= 0 or not rates.stop_s > 0:
        raise ConfigError("--join-after, --repair-time and --stop-for are times from 0. Give them as 60s.")
    return rates


def parse_patience(asked: Asked) -> Patience:
    """What the coordinator is told, where it is not left to be as in training."""
    known = Patience(adapt=asked.adapt)
    return replace(
        known,
        quorum=asked.quorum or known.quorum,
        deadline_s=_positive(parse_duration(asked.deadline), "--deadline") if asked.deadline else known.deadline_s,
        lost_after_s=_positive(parse_duration(asked.lost_after), "--lost-after")
        if asked.lost_after
        else known.lost_after_s,
    )


def parse_share(text: str) -> float:
    """A share of 1.

    >>> parse_share("10%"), parse_share("0.25")
    (0.1, 0.25)
    """
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < float("inf"):
        raise ConfigError(f"--jitter {text} is not a share. Give it as 0.1 or 10%.")
    return share


def parse_stragglers(text: str, islands: int) -> tuple[tuple[int, float], ...]:
    """Who is how many times slower, from the last island on.

    >>> parse_stragglers("1:10x,2:3x", 8)
    ((7, 10.0), (6, 3.0), (5, 3.0))
    """
    slower: list[tuple[int, float]] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*(\d+):(\d+(?:\.\d+)?)x\s*", part)
        if match is None or not float(match[2]) > 0:
            raise ConfigError(f"--stragglers {part!r} is not N:Fx. Write 1:10x for one island at a tenth of the speed.")
        slower += [(islands - 1 - len(slower) - number, float(match[2])) for number in range(int(match[1]))]
    if len(slower) > islands:
        raise ConfigError(f"--stragglers {text} are {len(slower)} of {islands} islands. Use at most {islands}.")
    return tuple(slower)


def parse_window(text: str, simulated_s: float) -> tuple[float, float]:
    """`10min..12min` in seconds, inside what was simulated."""
    first, dots, last = text.partition("..")
    if not dots:
        raise ConfigError(f"--window {text!r} is not FROM..TO. Write it as 10min..12min.")
    start_s, end_s = parse_duration(first), min(parse_duration(last), simulated_s)
    if not 0 <= start_s < end_s:
        raise ConfigError(f"--window {text} holds nothing of the {format_seconds(simulated_s)} that are simulated.")
    return start_s, end_s


def _positive(value: float, name: str) -> float:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} {value:g} is not positive. Give more than 0.")
    return value
