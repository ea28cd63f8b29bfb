import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from atoll.errors import ConfigError, StorageError
from atoll.train import plots, report
from atoll.train import summary as summaries
from atoll.train.metrics import EvalEvent, FaultEvent, MetricsWriter, RoundEvent, StepEvent
from atoll.train.summary import Point, RunSummary, bytes_finding, loss_finding

DILOCO, ALONE, PARALLEL = "DiLoCo, 4 replicas", "one replica", "data parallel"


def summary(
    method: str = "diloco",
    *,
    replicas: int = 4,
    last: float = 2.3,
    sent: int = 48_000_000,
    points: int = 12,
    evaluated: bool = True,
) -> RunSummary:
    """A run of 600 steps whose loss falls from 5.5 to `last`."""
    steps = [600 * (i + 1) // points for i in range(points)]
    curve = [Point(step, last + (5.5 - last) * math.exp(-step / 60), sent * step // 600) for step in steps]
    curve[-1] = replace(curve[-1], loss=last)
    return RunSummary(
        settings={"method": method, "replicas": replicas, "seed": 1, "output_dir": method},
        steps=600,
        rounds=12,
        curve=curve,
        evals=curve if evaluated else [],
        sent_bytes=sent,
        sent_bytes_all=sent * replicas,
        tokens=1_228_800,
        wall_s=127.0,
        utilisation=0.97,
        digest="9f3c1a77d0",
    )


def three(*, diloco: float = 2.3, alone: float = 2.4, parallel: float = 2.25) -> dict[str, RunSummary]:
    return {
        DILOCO: summary(last=diloco),
        ALONE: summary(replicas=1, last=alone, sent=0),
        PARALLEL: summary("data-parallel", last=parallel, sent=2_400_000_000),
    }


# --- a run folder ---


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two replicas, four steps, rounds after 2 and 4."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text('method = "diloco"\nreplicas = 2\n[model]\nhidden_size = 8\n')
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(1, 5):
            for replica in range(2):
                loss = math.nan if step == 3 else 5.0 - step + replica
                writer.write(
                    StepEvent(
                        step=step, replica=replica, loss=loss, grad_norm=1.0, lr=0.1, tokens=10 * step, tokens_per_s=5.0
                    )
                )
            if step % 2 == 0:
                writer.write(
                    RoundEvent(
                        round=step // 2,
                        step=step,
                        replicas=2,
                        contributors=2,
                        payload_bytes=100,
                        sync_s=2.0,
                        exposed_s=1.0,
                        inner_s=3.0,
                        anchor_digest=f"d{step}",
                        delta_norm=1.0,
                        refused=[1] if step == 4 else [],
                    )
                )
                writer.write(EvalEvent(step=step, round=step // 2, loss=4.0 - step / 2, perplexity=1.0, tokens=64))
        writer.write(FaultEvent(what="left", replica=1, step=4, detail="no heartbeat"))
    return folder


def test_a_summary_adds_up_what_the_metrics_say(run_dir: Path) -> None:
    run = summaries.summarise(run_dir)
    assert (run.steps, run.rounds, run.replicas, run.role) == (4, 2, 2, "diloco")
    assert run.settings["model.hidden_size"] == 8
    assert (run.sent_bytes, run.sent_bytes_all, run.tokens) == (200, 400, 80)
    assert (run.wall_s, run.utilisation) == (8.0, 0.75)
    assert (run.digest, run.num_refused) == ("d4", 1)
    assert run.fault_lines == ["step 4, replica 1: left: no heartbeat"]


def test_each_loss_stands_at_its_step_and_at_the_bytes_sent_until_then(run_dir: Path) -> None:
    run = summaries.summarise(run_dir)
    assert run.evals == [Point(2, 3.0, 100, 4.0), Point(4, 2.0, 200, 8.0)]
    assert run.curve == [
        Point(1, 4.5, 0, 2.0),
        Point(2, 3.5, 100, 4.0),
        Point(4, 1.5, 200, 8.0),
    ]  # the mean over replicas, NaN left out


def test_a_run_without_rounds_takes_its_time_from_its_steps(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()
    with MetricsWriter(run_dir / "metrics.jsonl") as writer:
        for tokens, rate in [(100, 50.0), (300, 100.0)]:
            writer.write(
                StepEvent(step=tokens, replica=0, loss=1.0, grad_norm=1.0, lr=0.1, tokens=tokens, tokens_per_s=rate)
            )
    run = summaries.summarise(run_dir)
    assert (run.wall_s, run.utilisation, run.digest, run.sent_bytes) == (4.0, None, "", 0)


def test_smoothing_keeps_a_constant_and_the_steps() -> None:
    points = [Point(step, 2.0, 0) for step in range(100)]
    assert summaries._smooth(points) == points
    noisy = [Point(step, 2.0 + (-1) ** step, 0) for step in range(100)]
    assert max(abs(point.loss - 2.0) for point in summaries._smooth(noisy)[10:]) < 0.25


@pytest.mark.parametrize(("name", "text"), [("config.toml", "= ="), ("metrics.jsonl", "broken\n")])
def test_a_broken_file_of_a_run_is_named(run_dir: Path, name: str, text: str) -> None:
    (run_dir / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(name)):
        summaries.summarise(run_dir)


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read"):
        summaries.summarise(tmp_path / "nothing")


# --- the folder of an elastic run, whose islands train elsewhere ---


@pytest.fixture
def elastic_dir(tmp_path: Path) -> Path:
    """What a coordinator keeps of three rounds of two islands, one of which is lost and one of which comes late."""
    folder = tmp_path / "reef"
    folder.mkdir()
    (folder / "config.toml").write_text('method = "diloco"\nreplicas = 2\nelastic = true\n')
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for replica in range(2):
            about = {"replica": replica, "name": f"host-{replica}", "pid": 1, "why": "", "member": "m"}
            writer.append({"event": "member", "what": "joined", "round": 0, "step": 0, **about})
        for number in (1, 2, 3):
            weights = {"0": 100.0, "1": 300.0} if number < 3 else {"0": 100.0}
            writer.append(elastic_round(number, weights))
            if number == 2:
                lost = {"replica": 1, "name": "host-1", "pid": 1, "why": "no word for 5 s", "member": "m"}
                writer.append({"event": "member", "what": "lost", "round": 2, "step": 20, **lost})
                late = {"replica": 1, "name": "host-2", "pid": 1, "why": "", "member": "n"}
                writer.append({"event": "member", "what": "joined", "round": 2, "step": 20, **late})
                writer.append({"event": "member", "what": "carried", "round": 2, "step": 20, **late})
    return folder


def elastic_round(number: int, weights: dict[str, float]) -> dict:
    return {
        "event": "round",
        "round": number,
        "step": 10 * number,
        "replicas": 2,
        "contributors": len(weights),
        "payload_bytes": 50,
        "wire_bytes": 100,
        "data_parallel_bytes": 4000,
        "sync_s": 0.5,
        "exposed_s": 9.0,
        "idle_s": 1.0 if number > 1 else None,
        "inner_s": 3.0,
        "anchor_digest": f"digest-{number}",
        "loss": 5.0 - number,
        "weights": weights,
        "refused": [],
        "voids": 1 if number == 2 else 0,
        "islands": {seat: {"sent_bytes": 50} for seat in weights},
    }


def test_an_elastic_run_is_summed_up_from_what_its_islands_told(elastic_dir: Path) -> None:
    run = summaries.summarise(elastic_dir)
    assert (run.steps, run.rounds, run.tokens, run.sent_bytes_all) == (30, 3, 900, 300)
    assert [(point.step, point.loss) for point in run.curve] == [(10, 4.0), (20, 3.0), (30, 2.0)]
    assert run.utilisation == 9.0 / (9.0 + 9.0 + 1.0 + 1.0), "of the first round only the wait for its commit is known"
    assert {seat: (one.name, one.rounds, one.tokens) for seat, one in run.islands.items()} == {
        0: ("host-0", 3, 300.0),
        1: ("host-2", 2, 600.0),
    }
    assert (run.num_voids, run.members["lost"], run.data_parallel_bytes) == (1, 1, 12_000)
    assert run.fault_lines == ["step 20, replica 1: lost: no word for 5 s", "step 20, replica 1: joined"]


def test_the_report_of_an_elastic_run_tells_who_made_it_and_what_it_survived(elastic_dir: Path) -> None:
    text = report.report_run(elastic_dir, command="atoll coordinator quickstart").read_text()
    assert "reef: 3 rounds were committed while 1 island was lost and 0 left; averagings tried again: 1" in text
    assert "| reef | 1 | host-2 | 2 | 600 | 100 B |" in text
    assert "300 B (40x less than data parallel)" in text
    assert "`digest-3`" in text and "| 1 | `digest-1` |" in text
    assert "```text\natoll coordinator quickstart\n```" in text
    for picture in ("steps", "time", "bytes"):
        assert f"](plots/loss_by_{picture}.png)" in text
        assert (elastic_dir / "plots" / f"loss_by_{picture}.png").stat().st_size > 10_000


def test_a_report_lists_no_more_faults_than_can_be_read(tmp_path: Path) -> None:
    run = replace(summary(points=1), fault_lines=["step 4: void"] * 1000)
    text = report.write_report({"mine": run}, tmp_path).read_text()
    assert text.count("step 4: void") == report.MOST_FAULTS
    assert "and 900 more" in text


def test_time_goes_evenly_between_two_rounds() -> None:
    until = summaries._Until([elastic_round(1, {}), elastic_round(2, {})])
    points = [until.point(step, 1.0).seconds for step in (0, 5, 10, 15, 20, 25)]
    assert points == [0.0, 6.0, 12.0, 14.0, 16.0, 16.0]


def test_time_goes_on_without_rounds_as_the_steps_took() -> None:
    until = summaries._Until([], step_s=0.5)
    assert [until.point(step, 1.0).seconds for step in (0, 4, 10)] == [0.0, 2.0, 5.0]


# --- findings ---


def test_findings_follow_the_numbers_when_diloco_wins() -> None:
    runs = three(diloco=2.2, alone=2.4, parallel=2.25)
    assert loss_finding(runs) == (
        "DiLoCo, 4 replicas ends with a loss 0.200 lower than one replica and 0.050 lower than data parallel "
        "after 600 steps"
    )
    assert bytes_finding(runs) == "DiLoCo, 4 replicas sends 50x less than data parallel, for a loss 0.050 lower"


def test_findings_follow_the_numbers_when_diloco_loses() -> None:
    runs = three(diloco=2.6, alone=2.4, parallel=2.25)
    runs[PARALLEL] = replace(runs[PARALLEL], sent_bytes=24_000_000)
    assert "0.200 higher than one replica and 0.350 higher than data parallel" in loss_finding(runs)
    assert bytes_finding(runs) == "DiLoCo, 4 replicas sends 2x more than data parallel, for a loss 0.350 higher"


def test_losses_that_cannot_be_told_apart_are_called_the_same() -> None:
    runs = three(diloco=2.251, parallel=2.25)
    assert "level with data parallel" in loss_finding(runs)
    assert bytes_finding(runs).endswith("for the same loss (2.251)")


def test_runs_of_different_lengths_are_compared_where_the_shorter_ends() -> None:
    short = replace(summary(replicas=1), evals=[Point(100, 3.0, 0), Point(200, 2.0, 0)])
    long = replace(summary(), evals=[Point(100, 3.0, 1), Point(300, 1.0, 2)])
    assert loss_finding({DILOCO: long, ALONE: short}).endswith("level with one replica after 200 steps")


@pytest.mark.parametrize(
    ("losses", "says"),
    [((3.0, 2.0), "fell to 2.000"), ((2.0, 3.0), "rose to 3.000"), ((2.0, 2.001), "stayed at 2.001")],
)
def test_one_run_alone_says_how_its_loss_went(losses: tuple[float, float], says: str) -> None:
    run = replace(summary(), evals=[Point(0, losses[0], 0), Point(600, losses[1], 1)])
    assert loss_finding({"mine": run}).startswith(f"Held-out loss {says} in 600 steps, from {losses[0]:.3f}")


def test_one_evaluation_is_no_course() -> None:
    assert loss_finding({"mine": summary(points=1)}) == "Held-out loss 2.300 after 600 steps"


def test_without_evaluations_the_training_loss_is_named_as_such() -> None:
    runs = {DILOCO: summary(), ALONE: summary(replicas=1, evaluated=False)}
    assert summaries.series_of(runs).kind == "training loss"


def test_nothing_recorded_finds_nothing() -> None:
    empty = replace(summary(), curve=[], evals=[], sent_bytes=0)
    assert loss_finding({"mine": empty}) == bytes_finding({"mine": empty}) == ""


# --- pictures ---


def names_in(figure: Figure) -> dict[str, Text]:
    texts = figure.axes[0].texts
    return {text.get_text().rpartition("\n")[0].replace("\n", " "): text for text in texts if "\n" in text.get_text()}


@pytest.mark.parametrize("width_in", [5.0, 8.5])
@pytest.mark.parametrize("plot", [plots.plot_loss_by_steps, plots.plot_loss_by_bytes])
@pytest.mark.parametrize("diloco", [2.2, 2.25, 2.399, 3.0])
def test_every_line_is_named_inside_the_picture_and_no_two_names_touch(
    plot: Callable[..., Figure], width_in: float, diloco: float
) -> None:
    figure = plot(three(diloco=diloco), width_in=width_in)
    figure.draw_without_rendering()
    names = names_in(figure)
    assert set(names) == {DILOCO, ALONE, PARALLEL}
    boxes = [Text.get_window_extent(text) for text in names.values()]
    for i, box in enumerate(boxes):
        assert figure.bbox.contains(box.x0, box.y0) and figure.bbox.contains(box.x1, box.y1)
        assert not any(box.overlaps(other) for other in boxes[:i])
    assert all(float(text.get_fontsize()) >= 10 for text in figure.findobj(Text) if isinstance(text, Text))


def test_a_role_has_one_colour_in_all_pictures_and_no_two_lines_share_one() -> None:
    runs = three()
    colours = plots.colours_of(runs | {"DiLoCo, int8": summary()})
    assert colours[DILOCO] == plots.colours_of({DILOCO: runs[DILOCO]})[DILOCO]
    assert len(set(colours.values())) == 4
    for plot in (plots.plot_loss_by_steps, plots.plot_loss_by_bytes):
        assert {name: text.get_color() for name, text in names_in(plot(runs)).items()} == plots.colours_of(runs)


def test_a_run_that_sends_nothing_is_a_level_line() -> None:
    figure = plots.plot_loss_by_bytes(three(alone=2.4))
    (level,) = [line for line in figure.axes[0].lines if np.ptp(line.get_ydata()) == 0]
    assert np.all(np.asarray(level.get_ydata()) == 2.4)
    assert names_in(figure)[ALONE].get_text() == "one replica\n2.400, sends nothing"


def test_titles_are_the_findings() -> None:
    runs = three()
    (title,) = plots.plot_loss_by_bytes(runs).texts
    assert title.get_text().replace("\n", " ") == bytes_finding(runs)


def test_the_arrow_is_drawn_only_for_a_real_saving() -> None:
    def arrows(runs: dict[str, RunSummary]) -> list[str]:
        return [text.get_text() for text in plots.plot_loss_by_bytes(runs).axes[0].texts if "less" in text.get_text()]

    runs = three()
    assert arrows(runs) == ["50x less"]
    assert arrows(runs | {PARALLEL: replace(runs[PARALLEL], sent_bytes=50_000_000)}) == []
    assert arrows({DILOCO: runs[DILOCO]}) == []


@pytest.mark.parametrize("points", [1, 2, 300])
@pytest.mark.parametrize("evaluated", [True, False])
def test_short_and_long_runs_are_drawn(points: int, evaluated: bool) -> None:
    runs = {"a $x_1$ run": summary(points=points, evaluated=evaluated)}
    for plot in (plots.plot_loss_by_steps, plots.plot_loss_by_bytes, plots.plot_loss_by_time):
        plot(runs).draw_without_rendering()


# --- report.md ---


def test_the_report_holds_the_numbers_the_pictures_and_the_way_to_make_it_again(tmp_path: Path) -> None:
    path = report.write_report(
        three(), tmp_path / "out", command="make demo", sample="def f():\n```\x00", prompt="def", sample_of=DILOCO
    )
    text = path.read_text()
    assert path == tmp_path / "out" / "report.md"
    assert "| DiLoCo, 4 replicas | 600 | 12 | 2.300 | 9.97 | 48 MB | 192 MB | 1,228,800 | 2m07s | 97.0 % |" in text
    assert "| `method` | diloco | diloco | data-parallel |" in text and "output_dir" not in text
    assert "| `seed` | 1 |" in text and "`9f3c1a77d0`" in text
    assert "````text\ndef f():\n```\N{REPLACEMENT CHARACTER}\n````" in text and "```text\nmake demo\n```" in text
    for picture in re.findall(r"\]\((.+?)\)", text):
        assert (path.parent / picture).read_bytes().startswith(b"\x89PNG")
    assert len(re.findall(r"!\[", text)) == 2


def test_a_run_without_any_loss_still_has_a_report(tmp_path: Path) -> None:
    text = report.write_report({"mine | ours": replace(summary(), curve=[], evals=[])}, tmp_path).read_text()
    assert "![" not in text and "not evaluated" in text and "| mine \\| ours |" in text


def test_faults_are_told(tmp_path: Path) -> None:
    run = replace(summary(points=1), fault_lines=["step 4, replica 1: left"])
    assert "- mine, step 4, replica 1: left" in report.write_report({"mine": run}, tmp_path).read_text()


def test_a_report_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="the report cannot be written"):
        report.write_report({"mine": summary(points=1)}, tmp_path / "file")
