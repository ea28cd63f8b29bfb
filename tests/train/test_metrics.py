import json
import math
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from atoll.errors import ConfigError, StorageError
from atoll.train import metrics
from atoll.train.metrics import EvalEvent, FaultEvent, MetricsWriter, RoundEvent, StepEvent


def step_event(step: int, *, replica: int = 0, loss: float = 3.0) -> StepEvent:
    return StepEvent(
        step=step, replica=replica, loss=loss, grad_norm=0.8, lr=3e-4, tokens=step * 512, tokens_per_s=900.0
    )


def round_event(step: int, *, cosines: list[list[float]] | None = None) -> RoundEvent:
    return RoundEvent(
        round=step // 10,
        step=step,
        replicas=2,
        contributors=2,
        payload_bytes=4000,
        sync_s=0.2,
        exposed_s=0.1,
        inner_s=1.0,
        anchor_digest="9f3c1a",
        delta_norm=0.5,
        cosines=cosines,
        norms=[1.0, math.inf],
    )


def eval_event(step: int) -> EvalEvent:
    return EvalEvent(step=step, round=step // 10, loss=2.0, perplexity=math.exp(2), tokens=64)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def write(path: Path, *events: metrics.Event) -> None:
    with MetricsWriter(path) as writer:
        for event in events:
            writer.write(event)


def test_the_keys_are_those_that_scripts_outside_rely_on(path: Path) -> None:
    write(path, step_event(1), round_event(10), eval_event(10), FaultEvent(what="late", replica=1, step=10))
    step, round_, eval_, fault = read = metrics.read_metrics(path)
    assert [event["event"] for event in read] == ["step", "round", "eval", "fault"]
    assert list(step) == ["event", "step", "replica", "loss", "grad_norm", "lr", "tokens", "tokens_per_s"]
    assert list(round_)[:7] == ["event", "round", "step", "replicas", "contributors", "payload_bytes", "sync_s"]
    assert list(round_)[7:12] == ["exposed_s", "inner_s", "anchor_digest", "delta_norm", "cosine_mean"]
    assert list(round_)[12:] == ["cosines", "norms", "refused", "compressor", "rank", "inner_steps", "observed"]
    assert list(eval_) == ["event", "step", "round", "loss", "perplexity", "tokens"]
    assert list(fault)[:4] == ["event", "what", "replica", "step"]


def test_nan_and_infinity_become_null_at_any_depth(path: Path) -> None:
    write(path, step_event(1, loss=math.nan), round_event(10, cosines=[[1.0, math.nan], [math.nan, 1.0]]))
    text = path.read_text()
    assert "NaN" not in text and "Infinity" not in text
    step, round_ = metrics.read_metrics(path)
    assert step["loss"] is None
    assert round_["cosines"] == [[1.0, None], [None, 1.0]] and round_["norms"] == [1.0, None]


def test_each_line_is_one_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []

    def record(_: int, data: bytes) -> int:
        writes.append(data)
        return len(data)

    with MetricsWriter(path) as writer:
        monkeypatch.setattr(os, "write", record)
        writer.write(round_event(10))
    assert len(writes) == 1 and writes[0].endswith(b"\n") and writes[0].count(b"\n") == 1


ONE_REPLICA = """
import sys
from atoll.train.metrics import FaultEvent, MetricsWriter
with MetricsWriter(sys.argv[1]) as writer:
    print("ready", flush=True)
    sys.stdin.readline()
    for step in range(500):
        writer.write(FaultEvent(what="x" * (step % 300), replica=int(sys.argv[2]), step=step))
"""


def test_lines_of_several_processes_never_mix(path: Path) -> None:
    replicas = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_REPLICA, path, str(replica)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for replica in range(3)
    ]
    for process in replicas:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in replicas:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in replicas:
        process.communicate()
        assert process.returncode == 0
    events = metrics.read_metrics(path)
    for replica in range(3):
        assert [event["step"] for event in events if event["replica"] == replica] == list(range(500))


@pytest.mark.parametrize("lost", range(1, len(metrics.encode(eval_event(20)))))
def test_a_line_torn_at_any_byte_is_left_out_and_never_becomes_half_of_the_next(path: Path, lost: int) -> None:
    write(path, eval_event(10), eval_event(20))
    os.truncate(path, path.stat().st_size - 1 - lost)
    assert [event["step"] for event in metrics.read_metrics(path)] == [10]
    write(path, eval_event(30))
    assert [event["step"] for event in metrics.read_metrics(path)] == [10, 30]


def test_a_last_line_without_its_newline_is_whole(path: Path) -> None:
    write(path, eval_event(10), eval_event(20))
    os.truncate(path, path.stat().st_size - 1)
    assert len(metrics.read_metrics(path)) == 2
    write(path, eval_event(30))
    assert [event["step"] for event in metrics.read_metrics(path)] == [10, 20, 30]


def test_a_torn_line_longer_than_a_block_is_mended(path: Path) -> None:
    write(path, eval_event(10))
    with path.open("a") as file:
        file.write('{"event": "round", "norms": [' + "1.0, " * 40_000)
    write(path, eval_event(20))
    assert [event["step"] for event in metrics.read_metrics(path)] == [10, 20]


def test_a_file_that_is_only_a_torn_line_is_emptied(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"event": "st')
    MetricsWriter(path).close()
    assert path.read_bytes() == b"" and metrics.read_metrics(path) == []


@pytest.mark.parametrize("broken", ["{nonsense", "[1, 2]", "\x00\x00", '{"event": "step"'])
def test_a_broken_line_in_the_middle_is_an_error_that_names_its_number(path: Path, broken: str) -> None:
    write(path, eval_event(10))
    with path.open("a") as file:
        file.write(broken + "\n")
    write(path, eval_event(20))
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2 is not a JSON object"):
        metrics.read_metrics(path)


def test_reading_a_run_that_never_started_says_so(path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        metrics.read_metrics(path)


def test_truncating_leaves_one_history_and_every_fault(path: Path) -> None:
    write(path, step_event(10), round_event(10), eval_event(10), step_event(11))
    write(path, FaultEvent(what="late", replica=1, step=15), step_event(20), round_event(20), eval_event(20))
    assert metrics.truncate_metrics(path, 10) == 4
    kept = [(event["event"], event["step"]) for event in metrics.read_metrics(path)]
    assert kept == [("step", 10), ("round", 10), ("eval", 10), ("fault", 15)]
    assert sorted(item.name for item in path.parent.iterdir()) == ["metrics.jsonl"]


def test_truncating_where_nothing_is_to_drop_leaves_the_file_as_it_is(path: Path) -> None:
    assert metrics.truncate_metrics(path, 10) == 0
    write(path, step_event(10))
    before = path.stat().st_ino
    assert metrics.truncate_metrics(path, 10) == 0
    assert path.stat().st_ino == before


def test_a_crash_while_truncating_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, step_event(10), step_event(20))
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match="No space left"):
        metrics.truncate_metrics(path, 10)
    assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1


def test_a_full_disk_leaves_whole_lines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(path, step_event(10))
    before = path.read_bytes()
    real_write = os.write
    with MetricsWriter(path) as writer:
        monkeypatch.setattr(os, "write", lambda fd, data: real_write(fd, data[:20]))
        with pytest.raises(StorageError, match="disk is full"):
            writer.write(step_event(20))
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"metrics\.jsonl cannot be written"):
        MetricsWriter(tmp_path / "file" / "metrics.jsonl")


# --- trackers ---


@pytest.mark.parametrize("name", metrics.TRACKERS)
def test_a_missing_tracker_package_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'atoll\[{name}\]'"):
        metrics.open_trackers([name], tmp_path, {})


def test_an_unknown_tracker_is_refused_and_none_is_no_tracker(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Known: tensorboard, wandb, trackio"):
        metrics.open_trackers(["tensorbord"], tmp_path, {})
    assert metrics.open_trackers([], tmp_path, {}) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tracker,) = metrics.open_trackers(["tensorboard"], tmp_path, {"seed": 1})
    tracker.log(metrics.scalars_of(step_event(10, loss=2.5)), 10)
    tracker.close()
    board = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (scalar,) = board.Scalars("train/loss")
    assert (scalar.step, scalar.value) == (10, 2.5)


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = False

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.logged.append((scalars, step))

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_hosted_trackers_get_the_name_the_settings_and_the_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, settings = FakeRun(), {}
    module = types.ModuleType(name)
    module.init = lambda **given: settings.update(given) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tracker,) = metrics.open_trackers([name], tmp_path / "mine", {"seed": 1})
    tracker.log({"train/loss": 2.0}, 10)
    tracker.close()
    assert settings["name"] == "mine" and settings["config"] == {"seed": 1}
    assert settings.get("mode", "offline") == "offline"
    assert run.logged == [({"train/loss": 2.0}, 10)] and run.finished


def test_scalars_leave_out_what_is_no_finite_number() -> None:
    scalars = metrics.scalars_of(round_event(10))
    assert scalars["round/payload_bytes"] == 4000
    assert not {"round/cosine_mean", "round/norms", "round/anchor_digest"} & set(scalars)
    assert "train/loss" not in metrics.scalars_of(step_event(1, loss=math.nan))
    json.dumps(scalars, allow_nan=False)
