"""`atoll plan`: know before you spend."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from atoll.errors import ConfigError, StorageError, nearest
from atoll.plan.estimate import Workload
from atoll.plan.links import Network, read_network
from atoll.plan.measure import Measured, read_run
from atoll.plan.payload import Coding
from atoll.plan.plan import Plan, Request, as_json, make_plan
from atoll.plan.presets import PRESETS, Preset
from atoll.plan.recommend import default_rank
from atoll.plan.shapes import SEQUENCE_LENGTH, ModelShape, shape_of_count, shape_of_hf_config, shape_of_settings
from atoll.plan.units import parse_bandwidth, parse_bytes, parse_count, parse_seconds
from atoll.recipes import RECIPES, recipe

DEFAULT_ISLANDS, DEFAULT_INNER_STEPS, DEFAULT_COMPRESSOR = 2, 100, "int4"
PLAIN_COMPRESSORS = ("", "identity", "bf16", "fp16")  # of a recipe: DiLoCoX is shown with a code that saves more
FLOPS_A_TOKEN_AND_PARAMETER = 6
TABLES = ("streaming-diloco",)


@dataclass(frozen=True)
class Options:
    """What was typed; an empty text or 0 is not given."""

    model: str = ""
    params: str = ""
    layers: int = 0
    islands: int = 0
    link: str = "1gbit"
    latency: str = "0ms"
    devices: int = 1
    memory: str = ""
    step_time: str = ""
    tflops: float = 0.0
    tokens_per_step: str = ""
    tokens: str = ""
    inner_steps: int = 0
    compressor: str = ""
    rank: int = 0
    fragments: int = 0
    delay: int = 0
    overhead: str = "0s"
    encode_rate: str = ""
    measure: str = ""
    measured_link: str = ""
    bf16: bool | None = None
    json: bool = False
    plot: str = ""
    write: str = ""
    table: str = ""


@dataclass(frozen=True)
class Source:
    """A model and the run it comes from, as far as it is known; 0 or empty for what is not."""

    shape: ModelShape
    settings: dict[str, Any]
    note: str = ""
    islands: int = 0
    inner_steps: int = 0
    tokens_per_step: float = 0.0
    micro_tokens: int = 0
    compressor: str = ""
    rank: int = 0
    fragments: int = 0
    bf16: bool = False


def plan(options: Options) -> None:
    """Print the plan that `options` ask for; write the picture and the settings where they name a file."""
    if options.table:
        return print_table(options)
    source = find_model(options)
    made = make_plan(build_request(options, source))
    if options.plot:
        from atoll.plan.plot import plot_plan

        _written(options.plot, lambda path: plot_plan(made, path))
    if options.write:
        _written(options.write, lambda path: write_settings(made, path))
    if options.json:
        print(json.dumps(as_json(made), indent=2))
    else:
        _print(made, source, options)


def print_table(options: Options) -> None:
    """A table of a paper, computed again."""
    if options.table not in TABLES:
        hint = nearest(options.table, TABLES)
        raise ConfigError(f"--table {options.table!r} is not known.{hint} Known: {', '.join(TABLES)}.")
    from atoll.plan.show import streaming_tables
    from atoll.plan.streaming_table import as_rows, table

    cells = table()
    if options.json:
        print(json.dumps(as_rows(cells), indent=2))
        return
    console = _console()
    for part in streaming_tables(cells):
        console.print(part)
        console.print()


# --- the question


def find_model(options: Options) -> Source:
    """The model that is meant: numbers, a preset, a recipe, a file of settings, a run, or a Hugging Face config."""
    name = options.model
    if options.params:
        if name:
            raise ConfigError(f"{name!r} and --params both name a model. Give one of them.")
        if not options.layers:
            raise ConfigError("--params needs --layers: what is sent depends on the shapes. Add --layers 24.")
        shape = shape_of_count(parse_count(options.params), options.layers)
        return Source(shape, shape_settings(shape), shape.assumed)
    path = Path(name or options.measure)
    if not name and not options.measure:
        raise ConfigError("no model is named. Give a preset or recipe, a config.json, or --params 1.3e9 --layers 24.")
    if name in PRESETS:
        return _of_preset(PRESETS[name])
    if name in RECIPES:
        return _of_settings(recipe(name))
    if (path / "config.toml").is_file() or path.suffix == ".toml":
        return _of_file(path)
    if path.suffix == ".json" or (path / "config.json").is_file():
        shape = shape_of_hf_config(path)
        return Source(shape, shape_settings(shape))
    known = [*PRESETS, *RECIPES]
    hint = nearest(name, known)
    raise ConfigError(f"{name!r} is neither a preset, a recipe, a file nor a run.{hint}\nKnown: {', '.join(known)}.")


def build_request(options: Options, source: Source) -> Request:
    """All numbers together: typed ones first, then measured ones, then those of the preset or recipe."""
    measured = read_run(options.measure) if options.measure else None
    islands = options.islands or source.islands or (measured.replicas if measured else 0) or DEFAULT_ISLANDS
    network = read_network(options.link, islands, latency_s=parse_seconds(options.latency))
    inner_steps = options.inner_steps or source.inner_steps or (measured.inner_steps if measured else 0)
    if options.inner_steps < 0:
        raise ConfigError(f"--inner-steps {options.inner_steps} is not positive; a round needs a step. Use 1 or more.")
    tokens_per_step = _tokens_per_step(options, source, measured, islands)
    workload = _workload(options, source, measured, network=network, tokens_per_step=tokens_per_step)
    tokens = parse_count(options.tokens) if options.tokens else 0.0
    return Request(
        workload,
        network,
        inner_steps=inner_steps or DEFAULT_INNER_STEPS,
        coding=_coding(options, source),
        free_inner_steps=not inner_steps,
        fragments=options.fragments or (source.fragments if source.fragments > 1 else 0),
        delay=options.delay,
        devices=options.devices,
        memory_bytes=parse_bytes(options.memory) if options.memory else None,
        bf16=source.bf16 if options.bf16 is None else options.bf16,
        micro_tokens=source.micro_tokens,
        tokens=tokens,
        base=_base_settings(source, islands, tokens_per_step, tokens),
    )


def _workload(
    options: Options, source: Source, measured: Measured | None, *, network: Network, tokens_per_step: float
) -> Workload:
    overhead_s = parse_seconds(options.overhead)
    if options.encode_rate:
        overhead_s += 4 * source.shape.num_parameters / options.devices / _rate(options.encode_rate)
    landing_s = 0.0
    if measured:
        link = parse_bandwidth(options.measured_link) if options.measured_link else None
        overhead_s += measured.overhead_s(link)
        landing_s = measured.landing_s
    step_s = _step_s(options, source, measured, network.num_islands, tokens_per_step)
    return Workload(source.shape, step_s, tokens_per_step, overhead_s, landing_s, workers=options.devices)


def _step_s(options: Options, source: Source, measured: Measured | None, islands: int, tokens_per_step: float) -> float:
    if options.step_time:
        step_s = parse_seconds(options.step_time)
        if not step_s > 0:
            raise ConfigError(f"--step-time {options.step_time} is not positive. Give what a step takes, as 1.5s.")
        return step_s
    if measured:
        return measured.step_s
    if options.tflops > 0:
        flops = FLOPS_A_TOKEN_AND_PARAMETER * source.shape.num_parameters * tokens_per_step
        return flops / (islands * options.devices * options.tflops * 1e12)
    raise ConfigError(
        "how long a step takes is not known. Give --step-time 1.5s, --measure RUN to take it from a run,\n"
        "or --tflops 150 for what a device sustains."
    )


def _tokens_per_step(options: Options, source: Source, measured: Measured | None, islands: int) -> float:
    if options.tokens_per_step:
        count = parse_count(options.tokens_per_step)
    elif measured and measured.tokens_per_step:
        count = measured.tokens_per_step / measured.replicas * islands
    elif source.tokens_per_step and source.islands:
        count = source.tokens_per_step / source.islands * islands
    else:
        raise ConfigError("how many tokens a step takes is not known. Give --tokens-per-step, over all islands.")
    if not count > 0:
        raise ConfigError(f"--tokens-per-step {options.tokens_per_step} is not positive. Give 1 or more.")
    return count


def _coding(options: Options, source: Source) -> Coding:
    known = source.compressor if source.compressor not in PLAIN_COMPRESSORS else DEFAULT_COMPRESSOR
    name = options.compressor or known
    if "lowrank" not in name:
        return Coding(name)
    return Coding(name, options.rank or source.rank or default_rank(source.shape.hidden_size))


def _rate(text: str) -> float:
    """Bytes a second of `0.5GB/s` or `0.5GB`."""
    rate = parse_bytes(text.removesuffix("/s"))
    if not rate > 0:
        raise ConfigError(f"--encode-rate {text} is not positive. Give fp32 bytes a second of a device, as 0.5GB/s.")
    return rate


# --- where a model comes from


def _of_preset(preset: Preset) -> Source:
    return Source(
        preset.shape,
        {**shape_settings(preset.shape), "sequence_length": preset.sequence_length},
        preset.source,
        islands=preset.islands,
        inner_steps=preset.inner_steps,
        tokens_per_step=preset.tokens_per_step,
        micro_tokens=preset.sequence_length,
        compressor=preset.compressor,
        rank=preset.rank,
        fragments=preset.fragments,
        bf16=preset.bf16,
    )


def _of_settings(settings: dict[str, Any]) -> Source:
    """A recipe or a file for `atoll train`; what it leaves out has the trainer's defaults."""
    sequence_length = settings.get("sequence_length", SEQUENCE_LENGTH)
    micro_tokens = settings.get("batch_size", 4) * sequence_length
    islands = settings.get("replicas", 1)
    return Source(
        shape_of_settings(settings),
        settings,
        islands=islands,
        inner_steps=settings.get("inner_steps", 500),
        tokens_per_step=micro_tokens * settings.get("gradient_accumulation_steps", 1) * islands,
        micro_tokens=micro_tokens,
        compressor=settings.get("compressor", ""),
        rank=settings.get("rank", 0),
        fragments=settings.get("fragments", 0),
    )


def _of_file(path: Path) -> Source:
    """A TOML file, or a run: what is planned from that goes to a folder beside it."""
    if not path.is_dir():
        return _of_settings(_read_toml(path))
    settings = _read_toml(path / "config.toml")
    return _of_settings(settings | {"output_dir": f"{settings.get('output_dir', path)}-planned"})


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as TOML: {error}. Mend it, or name a recipe.") from None


def shape_settings(shape: ModelShape) -> dict[str, Any]:
    """The settings of `atoll train` that build `shape`."""
    model: dict[str, Any] = {
        "family": shape.family,
        "hidden_size": shape.hidden_size,
        "num_layers": shape.num_layers,
        "num_heads": shape.num_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_positions": shape.positions,
        "tie_embeddings": shape.tie_embeddings,
    }
    overrides = {"num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    given = {name: value for name, value in overrides.items() if value}
    return {"model": model | ({"overrides": given} if given else {})}


def _base_settings(source: Source, islands: int, tokens_per_step: float, tokens: float) -> dict[str, Any]:
    """The settings of the source, long and wide enough for what is planned."""
    settings = dict(source.settings)
    sequence_length = settings.setdefault("sequence_length", 1024)
    sequences = max(1, round(tokens_per_step / islands / sequence_length))
    if "batch_size" not in settings:
        batch_size = next(size for size in range(min(16, sequences), 0, -1) if sequences % size == 0)
        settings |= {"batch_size": batch_size, "gradient_accumulation_steps": sequences // batch_size}
    if tokens or "max_steps" not in settings:
        wanted = tokens or 20 * source.shape.num_parameters
        settings["max_steps"] = max(1000, round(wanted / tokens_per_step))
    settings.setdefault("output_dir", "runs/planned")
    return settings


# --- the answer


def write_settings(plan: Plan, path: Path) -> None:
    """The recommended settings as TOML, for `atoll train FILE`."""
    import tomlkit

    path.write_text(tomlkit.dumps(plan.settings), encoding="utf-8")


def _print(plan: Plan, source: Source, options: Options) -> None:
    from atoll.plan.show import print_plan

    console = _console()
    print_plan(plan, console)
    if source.note:
        console.print(f"model: {source.note}", style="dim", highlight=False)
    if options.plot:
        console.print(f"picture: {options.plot}", highlight=False)
    if options.write:
        console.print(f"next: atoll train {options.write}", highlight=False)


def _console() -> Console:
    """As wide as the terminal, or wide enough for the tables where there is none."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 140)


def _written(name: str, write: Callable[[Path], None]) -> None:
    """Write the file `name`, or say why it cannot be."""
    try:
        write(Path(name))
    except OSError as error:
        raise StorageError(f"{name} cannot be written ({error.strerror}). Choose another file.") from None


def options_from(values: Mapping[str, Any]) -> Options:
    """What click read, with None for nothing."""
    return Options(**{name: value for name, value in values.items() if value is not None})
