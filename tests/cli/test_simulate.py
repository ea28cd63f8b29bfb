"""`atoll simulate`, as it is typed."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

import atoll as package
from atoll.cli.simulate_train import StepTimes
from atoll.cli.simulating import Heartbeat, parse_window
from atoll.plan.links import uniform
from atoll.plan.payload import Coding
from atoll.plan.shapes import ModelShape
from atoll.plan.simulate import simulate

ROOT = Path(package.__file__).parent.parent
QUICK = ["quickstart", "--step-time", "20ms", "--link", "100mbit"]
DELAYED = [*QUICK, "--islands", 4, "--inner-steps", 125, "--schedule", "delayed", "--compressor", "int4"]
CHURN = ["--hours", 0.1, "--kill-rate", "1/1min", "--join-after", "10s", "--seed", 1]


def answer(atoll, *args: object) -> dict:
    found = atoll("simulate", *args, "--json")
    assert found.code == 0, found.err
    return json.loads(found.out)


def test_the_fixed_names_of_the_json(atoll) -> None:
    found = answer(atoll, *DELAYED, *CHURN)
    assert (found["islands"], found["schedule"], found["compressor"]) == (4, "delayed", "int4")
    assert (found["inner_steps"], found["simulated_s"], found["seed"]) == (125, 360.0, 1)
    assert found["counts"]["kill"] > 2
    assert 0.5 < found["goodput"] < 1.0
    assert found["fault_free"]["utilisation"] == pytest.approx(1.0, abs=0.01)
    for name in ("rounds", "tokens_per_s", "exposed_s", "bytes_per_island", "timeline", "happened", "warnings"):
        assert name in found


def test_the_same_seed_prints_the_same(atoll) -> None:
    first, again = (atoll("simulate", *DELAYED, *CHURN, "--json").out for _ in range(2))
    assert first == again


def test_the_terminal_shows_what_was_found_beside_the_closed_form(atoll) -> None:
    out = atoll("simulate", *DELAYED, *CHURN).out
    for word in ("as asked", "without faults", "closed form", "goodput", "fetch the state", "killed", "seed 1"):
        assert word in out


def test_the_command_explains_itself(atoll) -> None:
    out = atoll("simulate", "--help").out
    assert "Usage: atoll simulate" in out
    assert "--kill-rate" in out


@pytest.mark.parametrize(
    ("model", "schedule", "compressor"),
    [
        ("dilocox_opt_1_3b", "delayed", "int4"),
        ("dilocox_107b", "delayed", "lowrank+int4"),
        ("streaming_1b", "streaming", "fp4"),
        ("sparseloco_1b", "blocking", "topk+stat2"),
        ("opendiloco_1b", "blocking", "fp16"),
    ],
)
def test_a_model_brings_its_own_method(atoll, model: str, schedule: str, compressor: str) -> None:
    found = answer(atoll, model, "--step-time", "10s", "--link", "1gbit", "--rounds", 3)
    assert (found["schedule"], found["compressor"], found["rounds"]) == (schedule, compressor, 3)


def test_data_parallelism_is_simulated_too(atoll) -> None:
    found = answer(atoll, *QUICK, "--schedule", "data-parallel", "--rounds", 20)
    assert (found["compressor"], found["inner_steps"]) == ("identity", 1)
    assert found["round_s"] == pytest.approx(found["closed_form"]["round_s"], rel=1e-6)


def test_every_flag_reaches_the_simulation(atoll) -> None:
    base = [*QUICK, "--rounds", 20, "--inner-steps", 50]
    plain = answer(atoll, *base)
    slower = [
        ["--latency", "50ms"],
        ["--down", "10mbit"],
        ["--down", "100mbit,100mbit,20mbit,100mbit"],
        ["--overhead", "100ms"],
        ["--outer-time", "100ms"],
        ["--message-time", "100ms"],
        ["--meeting-time", "100ms"],
        ["--jitter", "50%", "--no-adapt"],
        ["--stragglers", "1:1.1x", "--no-adapt"],
        ["--compressor", "identity"],
    ]
    for flags in slower:
        assert answer(atoll, *base, *flags)["round_s"] > 1.01 * plain["round_s"], flags


def test_a_file_of_events_happens(atoll, tmp_path) -> None:
    path = tmp_path / "events.txt"
    path.write_text("30 3 kill\n50 3 join\n80 4 join  # a fifth\n100 0 slow 1.5x\n120 1 leave\n")
    found = answer(atoll, *DELAYED, "--hours", 0.05, "--faults", path)
    assert [(event[1], event[2]) for event in found["happened"] if event[1] in ("kill", "leave", "slow")] == [
        ("kill", 3),
        ("slow", 0),
        ("leave", 1),
    ]
    assert found["counts"]["join"] == 2


def test_a_matrix_of_links_is_simulated(atoll, tmp_path) -> None:
    path = tmp_path / "links.csv"
    path.write_text("-,1gbit,10mbit\n1gbit,-,1gbit\n10mbit,1gbit,-\n")
    found = answer(atoll, "quickstart", "--islands", 3, "--link", path, "--step-time", "20ms", "--rounds", 20)
    assert found["round_s"] == pytest.approx(found["closed_form"]["round_s"], rel=1e-6)


def test_the_picture_and_its_window(atoll, tmp_path) -> None:
    path = tmp_path / "run.png"
    found = answer(atoll, *DELAYED, *CHURN, "--plot", path, "--window", "1min..2min")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert (found["timeline"]["from_s"], found["timeline"]["until_s"]) == (60.0, 120.0)
    assert all(60.0 <= span[3] <= span[4] <= 120.0 for span in found["timeline"]["spans"])


def test_ten_thousand_islands_are_simulated_in_rounds(atoll) -> None:
    found = answer(atoll, "streaming_1b", "--islands", 10_000, "--step-time", "1s", "--rounds", 5, "--jitter", "10%")
    assert (found["model"], found["rounds"]) == ("rounds", 5)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["quickstart", "--step-time", "1s", "--link", "0gbit"], "nothing would ever arrive"),
        (["quickstart", "--step-time", "1s", "--down", "0gbit"], "lets nothing arrive"),
        (["quickstar", "--step-time", "1s"], "quickstart"),
        (["quickstart", "--params", "1e9", "--layers", "3", "--step-time", "1s"], "both name a model"),
        ([*QUICK, "--schedule", "delaid"], "Did you mean 'delayed'"),
        ([*QUICK, "--compressor", "int9"], "int8"),
        ([*QUICK, "--detail", "msgs"], "messages"),
        ([*QUICK, "--schedule", "streaming", "--inner-steps", 7], "no divisor to stream by"),
        ([*QUICK, "--kill-rate", "1/1min"], "--hours"),
        ([*QUICK, "--hours", 1, "--kill-rate", "1/1min"], "--join-after"),
        ([*QUICK, "--hours", 1, "--kill-rate", "1/1min", "--join-after", "10min"], "nobody would hold the state"),
        ([*QUICK, "--hours", 1, "--kill-rate", "often"], "1/10min"),
        ([*QUICK, "--hours", 1, "--join-after", "60s"], "none is killed"),
        ([*QUICK, "--hours", -1], "not positive"),
        ([*QUICK, "--jitter", "much"], "not a share"),
        ([*QUICK, "--stragglers", "9:2x"], "9 of 4 islands"),
        ([*QUICK, "--stragglers", "1x2"], "1:10x"),
        ([*QUICK, "--faults", "nowhere.txt"], "cannot be read"),
        ([*QUICK, "--window", "5min"], "FROM..TO"),
        ([*QUICK, "--plot", "/nowhere/run.png"], "cannot be written"),
        ([*QUICK, "another"], "one MODEL"),
        (["--train", "quickstart", "quickstart"], "both name what to train"),
        (["--train", "quickstar"], "quickstart"),
        (["--train", "quickstart", "--kill-rate", "1/1min"], "not for it"),
        (["--train", "quickstart", "--islands", "1"], "--islands 2"),
        (["--train", "quickstart", "--schedule", "data-parallel"], "compares with"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_what_cannot_be_simulated_is_said_plainly(refused, args: list, said: str) -> None:
    assert said in refused("simulate", *args)


def test_an_h_that_cannot_hide_is_a_warning_and_an_error_where_that_is_asked_for(atoll, refused) -> None:
    short = [*DELAYED[:-4], "--schedule", "delayed", "--compressor", "identity", "--rounds", 10, "--inner-steps", 2]
    (warning,) = answer(atoll, *short)["warnings"]
    assert "too few to hide a sync" in warning
    assert warning in refused("simulate", *short, "--strict")
    enough = warning.split("Use --inner-steps ")[1].split(",")[0]
    assert answer(atoll, *short[:-1], enough, "--strict")["warnings"] == []


def test_a_window_ends_with_the_run() -> None:
    assert parse_window("1min..1h", 90.0) == (60.0, 90.0)


def test_a_long_simulation_says_how_far_it_is(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 6.0, 6.0, 7.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    heartbeat = Heartbeat(3600.0)
    heartbeat(10.0)
    heartbeat(600.0)
    heartbeat(700.0)
    assert capsys.readouterr().err == "simulated 10 min of 60 min\n"


def test_simulating_loads_neither_the_trainer_nor_transformers() -> None:
    words = ["simulate", *map(str, QUICK), "--rounds", "3"]
    code = (
        f"import sys; from atoll.cli.main import main; main({words!r});"
        "sys.exit(any(name.startswith('atoll.train') or name == 'transformers' for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


# --- loss against simulated time


@pytest.fixture(scope="module")
def trained_simulated(tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that is trained, and the flags that asked for it."""
    from atoll.cli.main import main

    folder = tmp_path_factory.mktemp("simulated")
    args = ["simulate", "--train", "quickstart", "--link", "1mbit", "--step-time", "50ms", "--output-dir", str(folder)]
    args += ["--", *tiny, "--eval-steps=4", "--warmup-steps=0"]
    assert main(args) == 0
    return folder, args


def test_losses_are_those_that_were_trained_at_times_that_were_simulated(trained_simulated) -> None:
    folder, _ = trained_simulated
    found = json.loads((folder / "simulated.json").read_text())
    run, parallel = found["methods"]["run"], found["methods"]["data-parallel"]
    metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    losses = {event["step"]: event["loss"] for event in metrics if event["event"] == "eval"}
    assert {point["step"]: point["loss"] for point in run["evals"]} == losses
    assert list(losses) == [4, 8, 12]
    times = [point["simulated_s"] for point in run["evals"]]
    each_s = times[0]  # H 4: a round of 0.2 s and its sync
    assert times == pytest.approx([each_s, 2 * each_s, 3 * each_s])
    assert each_s > 4 * 0.05
    assert parallel["evals"][-1]["simulated_s"] > 3 * times[-1]  # a sync before every step


def test_the_table_holds_every_step_of_both_methods(trained_simulated) -> None:
    folder, _ = trained_simulated
    with (folder / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len({row["method"] for row in rows}) == 2
    assert [row["kind"] for row in rows].count("train") == 2 * 12
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_another_link_needs_no_other_training(atoll, trained_simulated) -> None:
    folder, args = trained_simulated
    before = json.loads((folder / "simulated.json").read_text())["methods"]["run"]["simulated_s"]
    lines = (folder / "run/metrics.jsonl").read_text()
    faster = [*args[:4], "100mbit", *args[5:]]
    assert atoll(*faster[:9], "--json", *faster[9:]).code == 0
    assert (folder / "run/metrics.jsonl").read_text() == lines
    assert json.loads((folder / "simulated.json").read_text())["methods"]["run"]["simulated_s"] < 0.8 * before


def test_steps_lie_on_the_time_line_where_they_were_computed() -> None:
    from atoll.algo.schedule import Schedule
    from atoll.plan.estimate import Method, Workload
    from atoll.plan.sim.scenario import Scenario

    workload = Workload(ModelShape("llama", 64, 2, 1, 128, 1000), 1.0, 1024)
    asked = Scenario(Method("x", Schedule(4), Coding("identity")), workload, uniform(2, 1e5), num_rounds=3)
    found = simulate(asked)
    times, round_s = StepTimes(found.outcome, 12), found.estimate.round_s
    assert [times.done_s(step) for step in (1, 4, 5, 12)] == pytest.approx([1, 4, round_s + 1, 2 * round_s + 4])
    assert [times.landed_s(step) for step in (3, 4, 12)] == pytest.approx([3, round_s, 3 * round_s])
