"""`atoll plan`, as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import atoll as package
from atoll.train.config import read_config_file

ROOT = Path(package.__file__).parent.parent
LARGE = ["dilocox_107b", "--islands", "2", "--link", "1gbit", "--step-time", "8.79", "--tokens-per-step", "32768"]


def answer(atoll, *args: object) -> dict:
    found = atoll("plan", *args, "--json")
    assert found.code == 0, found.err
    return json.loads(found.out)


def test_the_fixed_names_of_the_json(atoll) -> None:
    found = answer(atoll, *LARGE)
    assert found["parameters"] == pytest.approx(107e9, rel=0.001)
    for name in ("allreduce", "diloco", "dilocox"):
        assert {"tokens_per_s", "sync_s", "utilisation"} <= set(found["methods"][name])
    assert found["methods"]["allreduce"]["tokens_per_s"] == pytest.approx(9.55, rel=0.005)
    assert found["methods"]["dilocox"]["speedup"] == pytest.approx(390, rel=0.005)
    assert found["methods"]["dilocox"]["utilisation"] == 1.0
    assert len(found["recommendation"]["beat"]) == 2
    assert found["recommendation"]["settings"]["replicas"] == 2


def test_the_command_explains_itself(atoll) -> None:
    out = atoll("plan", "--help").out
    assert "Usage: atoll plan" in out
    assert "atoll plan --table streaming-diloco" in out


def test_the_terminal_shows_every_method_the_links_the_memory_and_the_recommendation(atoll) -> None:
    out = atoll("plan", *LARGE, "--tokens", "2e9", "--devices", "80", "--memory", "40GB").out
    for word in ("allreduce", "diloco", "streaming", "delayed", "dilocox", "link needed", "memory", "scaling law"):
        assert word in out
    assert "recommended: " in out and out.count("rather than") == 2
    assert "2 B tokens" in out
    assert "extrapolated: 107 B parameters" in out.replace("\n", " ")


@pytest.mark.parametrize(
    "model",
    [
        ["quickstart"],
        ["opendiloco_1b"],
        ["dilocox_opt_1_3b"],
        ["streaming_1b"],
        ["sparseloco_1b"],
        ["--params", "1.3e9", "--layers", "24", "--tokens-per-step", "1M"],
    ],
    ids=lambda model: model[0],
)
def test_presets_recipes_and_bare_sizes_are_planned_and_their_settings_train(atoll, tmp_path, model: list[str]) -> None:
    path = tmp_path / "next.toml"
    assert atoll("plan", *model, "--step-time", "1s", "--link", "200mbit", "--write", path).code == 0
    config = read_config_file(path)
    assert config.replicas >= 2
    assert config.max_steps >= 1000 or model == ["quickstart"]


def test_a_hugging_face_configuration_is_planned(atoll, tmp_path) -> None:
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048}
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 32000, **sizes}))
    found = answer(atoll, path, "--step-time", "1s", "--tokens-per-step", "65536")
    assert found["model"] == {"family": "llama", "layers": 12, "hidden_size": 768}


def test_a_matrix_of_links_is_read(atoll, tmp_path) -> None:
    path = tmp_path / "links.csv"
    path.write_text("-,1gbit,10mbit\n1gbit,-,1gbit\n10mbit,1gbit,-\n")
    found = answer(atoll, "quickstart", "--islands", 3, "--link", path, "--step-time", "20ms")
    assert found["link_bits_per_s"] == pytest.approx(10e6)


def test_a_run_gives_its_own_times_and_its_model(atoll, trained: Path) -> None:
    found = answer(atoll, "--measure", trained, "--link", "10mbit")
    rounds = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    rounds = [event for event in rounds if event["event"] == "round"]
    assert found["islands"] == 2
    assert found["methods"]["diloco"]["inner_steps"] == 4
    assert found["step_s"] == pytest.approx(sum(event["inner_s"] for event in rounds[1:]) / 8, rel=0.5)
    assert found["tokens_per_step"] == 2 * 2 * 32
    assert found["overhead_s"] > 0
    assert found["recommendation"]["settings"]["output_dir"] != str(trained)


def test_overhead_and_encoding_lengthen_a_sync(atoll) -> None:
    plain = answer(atoll, *LARGE)["methods"]["dilocox"]["sync_s"]
    slower = answer(atoll, *LARGE, "--overhead", "2s", "--encode-rate", "1GB/s")["methods"]["dilocox"]["sync_s"]
    assert slower - plain == pytest.approx(2 + 4 * 106.93, rel=1e-3)


def test_a_step_time_may_follow_from_what_devices_sustain(atoll) -> None:
    found = answer(atoll, "streaming_1b", "--tflops", 100, "--devices", 8, "--tokens-per-step", "2e6")
    assert found["step_s"] == pytest.approx(6 * found["parameters"] * 2e6 / (2 * 8 * 100e12))


def test_the_table_of_the_paper_is_printed_with_its_differences(atoll) -> None:
    out = atoll("plan", "--table", "streaming-diloco").out
    assert "68 of 75 cells equal" in out
    assert out.count("*") == 7 + 1  # the cells that differ, and the line that says what the star means
    cells = json.loads(atoll("plan", "--table", "streaming-diloco", "--json").out)
    assert len(cells) == 75


def test_the_picture_is_written(atoll, tmp_path) -> None:
    path = tmp_path / "plan.png"
    assert atoll("plan", *LARGE, "--plot", path).code == 0
    assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([*LARGE[:3], "--link", "0gbit", "--step-time", "1"], "nothing would ever arrive"),
        ([*LARGE, "--memory", "40GB", "--devices", "8"], "Use --devices"),
        (["dilocox_107", "--step-time", "1"], "dilocox_107b"),
        (["quickstart"], "--step-time"),
        (["--step-time", "1s"], "no model is named"),
        (["quickstart", "--params", "1e9", "--layers", "3", "--step-time", "1s"], "both name a model"),
        (["--params", "1e9", "--step-time", "1s"], "--layers"),
        (["--params", "1e9", "--layers", "12", "--step-time", "1s"], "--tokens-per-step"),
        (["quickstart", "--step-time", "0s"], "not positive"),
        (["quickstart", "--step-time", "1s", "--inner-steps", "-3"], "not positive"),
        (["quickstart", "--step-time", "1s", "--compressor", "int9"], "int8"),
        (["quickstart", "--step-time", "1s", "--fragments", "3"], "multiple of fragments=3"),
        (["quickstart", "--step-time", "1s", "--islands", "0"], "--islands"),
        (["quickstart", "--step-time", "1s", "--tokens-per-step", "0"], "--tokens-per-step"),
        (["quickstart", "--step-time", "1s", "--encode-rate", "0GB/s"], "--encode-rate"),
        (["quickstart", "--step-time", "1s", "--plot", "/nowhere/plan.png"], "cannot be written"),
        (["quickstart", "--measure", "nowhere"], "cannot be read"),
        (["--table", "streaming"], "streaming-diloco"),
    ],
)
def test_what_cannot_be_planned_is_said_plainly(refused, args: list[str], said: str) -> None:
    assert said in refused("plan", *args)


def test_an_h_that_cannot_hide_is_warned_of_with_one_that_would(atoll) -> None:
    found = answer(atoll, *LARGE, "--inner-steps", 10)
    (warning,) = [line for line in found["warnings"] if line.startswith("dilocox")]
    enough = found["methods"]["dilocox"]["inner_steps_to_hide"]
    assert f"Use --inner-steps {enough}" in warning
    hidden = answer(atoll, *LARGE, "--inner-steps", enough)
    assert hidden["methods"]["dilocox"]["exposed_s"] == 0
    assert not [line for line in hidden["warnings"] if line.startswith("dilocox")]


def test_planning_loads_neither_the_trainer_nor_transformers() -> None:
    code = (
        "import sys; from atoll.cli.main import main; main(['plan', 'quickstart', '--step-time', '1s']);"
        "sys.exit(any(name.startswith('atoll.train') or name == 'transformers' for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
