"""The picture: every method has a line and a dot on the user's link."""

import math

import pytest

from atoll.plan.estimate import Workload
from atoll.plan.links import uniform
from atoll.plan.payload import Coding
from atoll.plan.plan import Request, make_plan
from atoll.plan.plot import draw_plan, plot_plan
from atoll.plan.presets import PRESETS


def plan_on(bytes_per_s: float, islands: int = 2):
    workload = Workload(PRESETS["streaming_1b"].shape, 0.5, 1e6)
    return make_plan(Request(workload, uniform(islands, bytes_per_s), inner_steps=100, coding=Coding("int4")))


def test_each_method_has_a_line_and_a_dot_at_its_share_on_the_link() -> None:
    plan = plan_on(125e6)
    (axes,) = draw_plan(plan).axes
    lines = [line for line in axes.lines if len(line.get_xdata()) > 2]
    dots = [line for line in axes.lines if len(line.get_xdata()) == 1]
    assert len(lines) == len(dots) == len(plan.methods) == 5
    heights = sorted(float(dot.get_ydata()[0]) for dot in dots)
    assert heights == pytest.approx(sorted(100 * found.utilisation for found in plan.methods.values()))
    assert {float(dot.get_xdata()[0]) for dot in dots} == {1e9}
    low, high = axes.get_xlim()
    assert low < 1e9 < high


def test_the_picture_says_what_it_shows() -> None:
    figure = draw_plan(plan_on(125e6))
    words = " ".join(text.get_text() for text in (*figure.texts, *figure.axes[0].texts))
    assert "your link: 1 Gbit/s" in words
    assert "data parallel" in words and "tokens/s" in words and "2 islands" in words


@pytest.mark.parametrize("bytes_per_s", [1.0, 1e3, 1e12, math.inf])
def test_links_far_beyond_reason_are_drawn_too(bytes_per_s: float, tmp_path) -> None:
    plot_plan(plan_on(bytes_per_s), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_one_island_is_drawn_although_nothing_is_sent(tmp_path) -> None:
    plot_plan(plan_on(125e6, islands=1), tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").stat().st_size > 1000
