"""The settings of a run: typed, bounded, written as TOML, changed by dotted flags.

Names are those that users of PyTorch and Hugging Face know. Every bound is checked before anything starts, and
a message names the value, the rule and the way out. `essential` says which settings a resumed run may not change.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import tomlkit
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from atoll.algo import adopt, outer
from atoll.compress import COMPRESSORS, CompressorOptions
from atoll.errors import ConfigError, nearest

# Settings whose value is a name in a registry.
REGISTRIES: dict[str, Mapping[str, Any]] = {
    "outer_optimizer": outer.OUTER_OPTIMIZERS,
    "adopt": {"auto": None, **adopt.ADOPT_RULES},
    "compressor": COMPRESSORS,
}


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, validate_default=True)


class ModelConfig(Section):
    """Any causal language model of transformers, built from its configuration; nothing is fetched.

    `overrides` go to the transformers configuration class of `family` as they are, e.g. `dropout` or `rope_theta`.
    `vocab_size` 0 means: the tokenizer's.
    """

    family: Literal["llama", "gpt2", "opt", "qwen2"] = Field("llama", description="architecture")
    hidden_size: int = Field(192, ge=1, description="width of the model")
    num_layers: int = Field(2, ge=1, description="transformer blocks")
    num_heads: int = Field(4, ge=1, description="attention heads; divides hidden_size")
    intermediate_size: int = Field(512, ge=1, description="width inside the feed-forward blocks")
    vocab_size: int = Field(0, ge=0, description="0: as many as the tokenizer has")
    max_positions: int = Field(0, ge=0, description="0: sequence_length")
    tie_embeddings: bool = Field(True, description="one matrix for input and output tokens")
    overrides: dict[str, Any] = Field(default_factory=dict, description="other keys of the transformers configuration")


class DataConfig(Section):
    """Where the text comes from, how it becomes tokens, and how it is shared out among the replicas.

    source: "python" (the Python sources installed on this machine), a path to text files (file or folder), a folder of
    pre-tokenised shards made by `atoll.data`, or "hf:NAME_OR_PATH" (Hugging Face datasets, streaming).
    tokenizer: "bytes" (no training), "bpe" (trained on the corpus) or a folder that `AutoTokenizer` loads.
    shard: how training documents are shared out: "iid", "domain" or "cluster" (both non-i.i.d.).
    """

    source: str = Field("python", description="python, a text file or folder, token shards, or hf:NAME_OR_PATH")
    tokenizer: str = Field("bytes", description="bytes, bpe (trained on the corpus) or a tokenizer folder")
    bpe_vocab_size: int = Field(4096, ge=300, description="tokens of a trained tokenizer")
    shard: Literal["iid", "domain", "cluster"] = Field("iid", description="how documents are shared out")
    held_out_percent: float = Field(2.0, gt=0, lt=50, description="share of the documents kept for evaluation")
    max_bytes: int = Field(24_000_000, ge=1, description="bytes of text read at most, shared evenly over the domains")
    hf_split: str = Field("train", description="of a Hugging Face data set")
    hf_text_column: str = Field("text", description="of a Hugging Face data set")


class TrainConfig(Section):
    """Everything that defines a run."""

    # what is trained, on what
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    sequence_length: int = Field(128, ge=2, description="tokens a sequence")
    init_from: str = Field("", description="a checkpoint or a Hugging Face folder to start from; empty: random weights")

    # inside a replica
    max_steps: int = Field(1000, ge=1, description="inner steps a replica takes in all")
    batch_size: int = Field(4, ge=1, description="sequences a replica takes in one forward pass")
    gradient_accumulation_steps: int = Field(1, ge=1, description="forward passes a step")
    optimizer: Literal["adamw", "sgd", "muon"] = Field(
        "adamw", description="the inner optimizer; muon: for matrices inside layers, AdamW for all else"
    )
    muon_learning_rate: float = Field(0.0, ge=0, description="optimizer=muon: of its matrices; 0: learning_rate")
    muon_momentum: float = Field(0.95, ge=0, lt=1, description="optimizer=muon: of its matrices")
    learning_rate: float = Field(1e-3, gt=0, description="of the inner optimizer, at its highest")
    lr_schedule: Literal["cosine", "constant"] = "cosine"
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="where the cosine ends, as a share of learning_rate")
    warmup_steps: int = Field(0, ge=0, description="steps in which the rate rises from 0")
    weight_decay: float = Field(0.1, ge=0, description="of matrices; vectors are not decayed")
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, ge=0, description="0: no clipping")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="autocast; auto: bfloat16 on GPU")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(0, ge=0, description="CPU threads a process; 0: cores / processes, at least 1")

    # the workers of a replica: data_workers x pipeline_stages processes
    pipeline_stages: int = Field(1, ge=1, description="workers a replica's layers are cut over")
    data_workers: int = Field(1, ge=1, description="workers that share a replica's batch")
    microbatches: int = Field(
        0, ge=0, description="parts of a worker's batch that follow each other through the stages; 0: what fits"
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = Field(
        "1f1b", description="order in which stages work on microbatches"
    )
    sharding: Literal["replicate", "shard"] = Field(
        "replicate", description="what data_workers hold of a stage: all of it, or their rows (FSDP)"
    )
    activation_checkpointing: bool = Field(
        False, description="keep a layer's input only and compute the rest again in the backward"
    )

    # between replicas
    method: Literal["diloco", "data-parallel"] = Field("diloco", description="data-parallel: sync before every step")
    replicas: int = Field(1, ge=1, description="copies of the model that train apart; in prose, islands")
    inner_steps: int = Field(500, ge=1, description="H: steps a replica takes between two syncs")
    outer_optimizer: str = Field("nesterov", description="moves the anchor by the averaged pseudo-gradient")
    outer_lr: float = Field(0.7, gt=0, description="rate of the outer optimizer")
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    outer_lr_schedule: Literal["constant", "cosine"] = "constant"
    outer_epsilon: float = Field(0.1, gt=0, description="outer Adam only; small values are unstable")
    merge: Literal["uniform", "examples", "tokens"] = Field("uniform", description="what a replica's weight follows")
    schedule: Literal["blocking", "delayed", "streaming"] = Field(
        "blocking", description="rounds land at once, a whole round later, or a fragment at a time"
    )
    delay: int = Field(0, ge=0, description="inner steps from launch to landing; 0: what the schedule needs")
    fragments: int = Field(1, ge=1, description="schedule=streaming: slices of the model, sent one after the other")
    first_round: Literal["blocking", "delayed"] = Field("blocking", description="whether the first round lands at once")
    adopt: str = Field("auto", description="how a replica takes over the new anchor; auto: what the schedule needs")
    alpha: float = Field(0.0, ge=0, le=1, description="adopt=lerp: how much of the replica's own parameters stays")
    carry_share: float = Field(
        0.0, ge=0, le=1, description="adopt=carry: share kept of the progress the anchor lacks; 0: 1/replicas"
    )
    compressor: str = Field("identity", description="how a pseudo-gradient is sent; identity: fp32")
    rank: int = Field(32, ge=1, description="compressor=lowrank: columns of the factors")
    adaptive: bool = Field(False, description="rank and inner_steps follow the effective rank of pseudo-gradients")
    adaptive_window: int = Field(5, ge=1, description="adaptive: rounds the effective rank is averaged over")
    adaptive_floor: float = Field(0.25, gt=0, le=1, description="adaptive: least share of rank and inner_steps")
    adaptive_max_fall: float = Field(0.2, ge=0, lt=1, description="adaptive: share they fall by at most in a round")
    adaptive_energy: float = Field(0.95, gt=0, lt=1, description="adaptive: energy that the effective rank holds")
    error_feedback: bool | None = Field(None, description="owe what a compressor left out; default: where it is needed")
    residual_dtype: Literal["float32", "bfloat16"] = Field("float32", description="of what error feedback owes")
    link_mbps: float = Field(0.0, ge=0, description="Mbit/s of the slow link, by which codes choose how to be averaged")
    link_latency_ms: float = Field(0.0, ge=0, description="of the slow link, one way")
    average_inner_state: bool = Field(False, description="average the inner Adam state as well; sends 3x as much")
    outer_state: Literal["device", "host"] = Field(
        "device", description="where anchor, outer momentum and rounds in flight lie; the same memory on a CPU"
    )

    # the experiments of the DiLoCo paper
    pretrain_steps: int = Field(0, ge=0, description="steps of one replica alone before the rounds begin")
    replica_schedule: Literal["constant", "doubling", "halving", "ramp-up", "ramp-down"] = Field(
        "constant", description="how many replicas train in each round"
    )
    drop_probability: float = Field(0.0, ge=0, lt=1, description="chance that a contribution is lost")
    drop_merge: Literal["received", "all"] = Field("received", description="divide by those received, or by all")
    drop_base: Literal["anchor", "own"] = Field("anchor", description="where a returning replica's progress begins")
    prune_fraction: float = Field(0.0, ge=0, lt=1, description="share of each pseudo-gradient set to zero")
    prune_rule: Literal["magnitude", "sign"] = "magnitude"

    # islands that come and go
    elastic: bool = Field(False, description="replicas may join, leave and die while the run goes on")
    min_replicas: int = Field(
        1, ge=1, description="elastic: the run ends when fewer are left for longer than deadline_s"
    )
    quorum: float = Field(
        0.6, gt=0, le=1, description="elastic: share of the replicas that must be ready to close a round"
    )
    deadline_s: float = Field(
        30.0, gt=0, description="elastic: the longest a round waits for a replica after the quorum"
    )
    clip_ratio: float = Field(
        10.0, gt=1, description="elastic: a contribution this many times the median norm is refused"
    )
    adapt_inner_steps: bool = Field(True, description="elastic: a slower replica takes fewer steps a round (DyLU)")

    # the run
    engine: Literal["torchdist", "local"] = Field("torchdist", description="a process a replica, or all in one process")
    seed: int = Field(0, ge=0, lt=2**32, description="of the weights, the order of the data and dropout")
    output_dir: str = Field("runs/default", description="the run folder")
    save_steps: int = Field(0, ge=0, description="steps between two checkpoints; 0: only at the end")
    keep_last: int = Field(3, ge=1, description="checkpoints kept")
    eval_steps: int = Field(0, ge=0, description="0: only at the end; the anchor is evaluated at the next outer step")
    eval_sequences: int = Field(256, ge=1, description="held-out sequences an evaluation reads at most")
    logging_steps: int = Field(10, ge=1, description="steps between two lines on the terminal")
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list, description="trackers")
    resume: str = Field("never", description="auto, never, or the path of a checkpoint")
    port: int = Field(0, ge=0, le=65535, description="rendezvous port on loopback; 0: any free one")
    timeout_s: float = Field(600.0, gt=0, description="a sync that takes longer than this fails")
    dry_run: bool = Field(False, description="say what each worker would hold and send; start nothing")

    @model_validator(mode="after")
    def _check_relations(self) -> TrainConfig:
        for name, known in REGISTRIES.items():
            _one_of(name, getattr(self, name), known)
        if self.model.hidden_size % self.model.num_heads:
            width, heads = self.model.hidden_size, self.model.num_heads
            raise ValueError(
                f"model.hidden_size={width} is not a multiple of model.num_heads={heads}. "
                f"Use model.hidden_size={math.ceil(width / heads) * heads}."
            )
        if self.pretrain_steps >= self.max_steps:
            raise ValueError(
                f"pretrain_steps={self.pretrain_steps} leaves no step of max_steps={self.max_steps} for the rounds. "
                f"Use at most {self.max_steps - 1}."
            )
        if self.method == "diloco" and self.inner_steps > self.max_steps - self.pretrain_steps:
            raise ValueError(
                f"inner_steps={self.inner_steps} is more than the {self.max_steps - self.pretrain_steps} steps there "
                f"are: no round would be complete. Use at most {self.max_steps - self.pretrain_steps}."
            )
        if self.method == "data-parallel" and (
            self.pretrain_steps or self.drop_probability or self.replica_schedule != "constant"
        ):
            raise ValueError(
                "method='data-parallel' has no rounds: all replicas take part in every step. Leave pretrain_steps, "
                "drop_probability and replica_schedule as they are by default, or use method='diloco'."
            )
        if self.average_inner_state and (self.replica_schedule != "constant" or self.optimizer != "adamw"):
            raise ValueError(
                "average_inner_state=true needs replica_schedule='constant' and optimizer='adamw': a replica that sits "
                "out has no inner state to average. Change one of them."
            )
        _check_schedule(self)
        _check_workers(self)
        if self.adaptive:
            _check_adaptive(self)
        if self.elastic:
            _check_elastic(self)
        return self

    @property
    def num_workers(self) -> int:
        """Processes of one replica."""
        return self.data_workers * self.pipeline_stages

    @property
    def num_processes(self) -> int:
        """Of the whole run, where each worker is one."""
        return self.replicas * self.num_workers

    @property
    def sequences_a_worker(self) -> int:
        """That one of the data workers takes a step."""
        return self.batch_size * self.gradient_accumulation_steps // self.data_workers

    @property
    def resolved_microbatches(self) -> int:
        """As given; else the fewest that keep every stage busy and are no larger than batch_size."""
        if self.microbatches:
            return self.microbatches
        least = max(self.pipeline_stages, math.ceil(self.sequences_a_worker / self.batch_size))
        return next((m for m in range(least, self.sequences_a_worker + 1) if _microbatches_fit(self, m)), least)

    @property
    def resolved_muon_learning_rate(self) -> float:
        """The highest rate of Muon's matrices."""
        return self.muon_learning_rate or self.learning_rate

    @property
    def compressor_options(self) -> CompressorOptions:
        """What the compressor is told."""
        return CompressorOptions(rank=self.rank, feedback=self.error_feedback, residual_dtype=self.residual_dtype)

    @property
    def resolved_delay(self) -> int:
        """Inner steps from launch to landing."""
        if self.schedule == "blocking":
            return 0
        return self.delay or (self.inner_steps if self.schedule == "delayed" else 1)

    @property
    def resolved_adopt(self) -> str:
        """The adopt rule, where `auto` leaves it to the schedule."""
        if self.adopt != "auto":
            return self.adopt
        return {"blocking": "replace", "delayed": "carry", "streaming": "lerp"}[self.schedule]

    @property
    def resolved_carry_share(self) -> float:
        """The share of progress that `carry` keeps: 1/M damps the differences between replicas."""
        return self.carry_share or 1 / self.replicas


def _check_schedule(config: TrainConfig) -> None:
    """Delays and fragments that belong to another schedule, and settings that need rounds to land at once."""
    if config.schedule == "blocking" and (config.delay or config.fragments > 1):
        raise ValueError(
            f"schedule='blocking' lands every round at once and whole: delay={config.delay}, "
            f"fragments={config.fragments} mean nothing. Use schedule=delayed or schedule=streaming."
        )
    if config.schedule == "delayed" and config.fragments > 1:
        raise ValueError(
            f"schedule='delayed' sends the model whole, not in fragments={config.fragments}. Use streaming."
        )
    if config.schedule != "blocking" and (config.method != "diloco" or config.average_inner_state):
        raise ValueError(
            f"schedule={config.schedule!r} lands rounds after they were launched, which method='data-parallel' and "
            "average_inner_state=true have no use for. Use schedule=blocking, or leave those out."
        )
    if config.drop_probability and config.schedule != "blocking":
        raise ValueError(
            "drop_probability is an experiment of blocking rounds. Use schedule=blocking, or leave it at 0."
        )


def _check_adaptive(config: TrainConfig) -> None:
    """Rank and round length are decided for whole rounds of low-rank factors, by replicas that are all there."""
    if not config.compressor.startswith("lowrank"):
        raise ValueError(
            f"adaptive=true decides the rank of low-rank factors, and compressor={config.compressor!r} has none. "
            "Use compressor=lowrank+int4 or compressor=lowrank."
        )
    if config.schedule == "streaming" or config.resolved_delay not in (0, config.inner_steps):
        raise ValueError(
            f"adaptive=true takes rounds whole, at once or a round later, not schedule={config.schedule!r} with "
            f"delay={config.delay}. Use schedule=delayed or schedule=blocking, and leave delay out."
        )
    fixed = {"method": "diloco", "replica_schedule": "constant", "elastic": False}
    fixed |= {"data_workers": 1, "pipeline_stages": 1, "average_inner_state": False}
    wrong = [f"{key}={getattr(config, key)!r}" for key, value in fixed.items() if getattr(config, key) != value]
    if wrong:
        raise ValueError(
            f"adaptive=true cannot be combined with {', '.join(wrong)}: replicas of one worker decide together, all "
            "of them in every round. Leave that setting as it is by default, or adaptive out."
        )


def _microbatches_fit(config: TrainConfig, microbatches: int) -> bool:
    """Whether they divide a worker's sequences, and come in the equal rounds that schedules of two stages need."""
    in_rounds = config.pipeline_schedule in ("gpipe", "1f1b") or not microbatches % config.pipeline_stages
    return in_rounds and config.sequences_a_worker % microbatches == 0


def _check_workers(config: TrainConfig) -> None:
    """Settings that a replica of many workers has no use for, and batches that its workers cannot share."""
    if config.num_workers == 1:
        if config.microbatches > 1:
            raise ValueError(
                f"microbatches={config.microbatches} are for replicas of several workers. "
                f"Use gradient_accumulation_steps={config.microbatches}, or pipeline_stages=2 or more."
            )
        return
    if config.optimizer == "muon":
        raise ValueError(
            f"optimizer='muon' orthogonalises whole matrices, and pipeline_stages={config.pipeline_stages} x "
            f"data_workers={config.data_workers} hold parts. Use optimizer=adamw, or 1 x 1."
        )
    alone = {"method": "diloco", "engine": "torchdist", "average_inner_state": False}
    wrong = [f"{key}={getattr(config, key)!r}" for key, value in alone.items() if getattr(config, key) != value]
    if wrong:
        raise ValueError(
            f"{', '.join(wrong)} is for replicas of one worker, and pipeline_stages={config.pipeline_stages} x "
            f"data_workers={config.data_workers} is {config.num_workers}. Leave it as it is by default, or use 1 x 1."
        )
    _check_sharing(config)


def _check_sharing(config: TrainConfig) -> None:
    """A step's sequences go evenly to the data workers, and each worker's evenly into microbatches."""
    steps, workers, parts = config.gradient_accumulation_steps, config.data_workers, config.resolved_microbatches
    sequences = config.batch_size * steps
    if sequences % workers:
        raise ValueError(
            f"the {sequences} sequences of a step (batch_size={config.batch_size}) cannot be shared evenly by "
            f"data_workers={workers}. Use batch_size={_fitting_batch(config, workers)}."
        )
    if parts >= config.pipeline_stages and config.sequences_a_worker % parts:
        least = config.pipeline_stages
        fitting = [m for m in range(least, config.sequences_a_worker + 1) if _microbatches_fit(config, m)]
        other = f", or microbatches={min(fitting, key=lambda m: abs(m - parts))}" if fitting else ""
        raise ValueError(
            f"microbatches={parts} do not divide the {config.sequences_a_worker} sequences that a worker takes a step "
            f"(batch_size={config.batch_size}). Use batch_size={_fitting_batch(config, workers * parts)}{other}."
        )


def _fitting_batch(config: TrainConfig, parts: int) -> int:
    """The smallest batch_size, from that given on, whose steps come in equal `parts`."""
    unit = parts // math.gcd(parts, config.gradient_accumulation_steps)
    return math.ceil(config.batch_size / unit) * unit


def _check_elastic(config: TrainConfig) -> None:
    """Rounds whose replicas come and go have no use for experiments that say beforehand who takes part."""
    fixed = {
        "method": "diloco",
        "engine": "torchdist",
        "pretrain_steps": 0,
        "replica_schedule": "constant",
        "drop_probability": 0.0,
        "average_inner_state": False,
        "data.shard": "iid",
    }
    if config.schedule == "streaming" or config.resolved_delay not in (0, config.inner_steps):
        raise ValueError(
            f"elastic=true takes rounds whole, at once or a round later, not schedule={config.schedule!r} with "
            f"delay={config.delay}. Use schedule=blocking or schedule=delayed."
        )
    settings = flatten(config.model_dump())
    wrong = [f"{key}={settings[key]!r}" for key, value in fixed.items() if settings[key] != value]
    if config.data.source.startswith("hf:"):
        raise ValueError(
            f"elastic=true cannot read data.source={config.data.source!r}: islands lease samples by their place in one "
            "order, and a stream can only be read from its beginning.\nWrite it as token shards once "
            "(atoll.data.write_token_shards) and name their folder."
        )
    if wrong:
        raise ValueError(
            f"elastic=true cannot be combined with {', '.join(wrong)}: islands lease samples from one order and decide "
            "by themselves who takes part. Leave that setting as it is by default, or elastic out."
        )


# Settings that change what is computed: a run may not be resumed with others.
FREE = frozenset(
    {
        *("device", "dtype", "threads", "engine", "output_dir", "save_steps", "keep_last", "eval_steps"),
        *("eval_sequences", "logging_steps", "report_to", "resume", "port", "timeout_s", "init_from"),
        *("min_replicas", "quorum", "deadline_s", "clip_ratio"),
        *("pipeline_stages", "data_workers", "microbatches", "pipeline_schedule", "sharding"),  # to rounding
        *("activation_checkpointing", "outer_state", "dry_run"),
    }
)


def essential(config: TrainConfig) -> dict[str, Any]:
    """The settings that a resumed run must share with the run it goes on from, flattened to dotted keys.

    max_steps is one of them where rates or replica counts are stretched over the length of the run.
    """
    stretched = (config.lr_schedule, config.outer_lr_schedule, config.replica_schedule) != ("constant",) * 3
    free = FREE if stretched else FREE | {"max_steps"}
    return {key: value for key, value in flatten(config.model_dump()).items() if key.split(".")[0] not in free}


def settings_digest(config: TrainConfig) -> str:
    """Of the settings that all who take part in a run must share; hex."""
    return hashlib.sha256(json.dumps(essential(config), sort_keys=True).encode()).hexdigest()


def write_config_file(config: TrainConfig, path: str | Path) -> None:
    """Write every setting of `config` as TOML, whole or not at all."""
    draft = Path(path).with_suffix(".partial")
    draft.write_text(tomlkit.dumps(config.model_dump(exclude_none=True)), encoding="utf-8")
    draft.replace(path)


def read_settings(path: str | Path) -> dict[str, Any]:
    """The nested settings of a TOML file, not checked yet."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {str(path)!r}. Name a recipe or an existing TOML file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as TOML: {error}. Mend that line.") from None


def read_config_file(path: str | Path) -> TrainConfig:
    """The checked settings of a TOML file."""
    return build_config(read_settings(path))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys.

    >>> flatten({"a": 1, "b": {"c": 2}})
    {'a': 1, 'b.c': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and key != "overrides":
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def build_config(settings: Mapping[str, Any]) -> TrainConfig:
    """A checked `TrainConfig` from nested settings; raises `ConfigError` in at most three lines."""
    try:
        return TrainConfig.model_validate(dict(settings))
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors()[:3])) from None


def known_keys() -> list[str]:
    """Every dotted key that a file or a flag may set."""
    return list(flatten(TrainConfig().model_dump()))


def _one_of(name: str, value: str, known: Mapping[str, Any]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not known.{nearest(value, known)} Known: {', '.join(known)}.")


def _explain(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{key!r} is not a setting.{nearest(key, known_keys())}"
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    return f"{key}={item['input']!r} cannot be used: {item['msg'][0].lower()}{item['msg'][1:]}."
