from __future__ import annotations

import pytest

from atoll.compress import COMPRESSORS, CompressorOptions, Feedback, build_compressor, check_compressor
from atoll.errors import ConfigError

SHAPES = [(256, 512), (512, 128), (64, 64), (512,), (3, 4, 5)]


@pytest.mark.parametrize("name", COMPRESSORS)
def test_feedback_is_on_where_the_method_needs_it(name: str) -> None:
    coarse = {"stat2", "topk", "topk+stat2", "lowrank", "lowrank+int4"}
    assert isinstance(build_compressor(name), Feedback) == (name in coarse)
    assert isinstance(build_compressor(name, CompressorOptions(feedback=True)), Feedback)
    assert not isinstance(build_compressor(name, CompressorOptions(feedback=False)), Feedback)


def test_options_reach_what_they_are_for() -> None:
    options = CompressorOptions(rank=5, topk=3, chunk=9, feedback_beta=0.5, residual_dtype="bfloat16")
    low_rank, top = build_compressor("lowrank+int4", options), build_compressor("topk", options)
    assert low_rank.inner.rank == 5 and low_rank.beta == 0.5 and str(low_rank.residual_dtype) == "torch.bfloat16"
    assert (top.inner.k, top.inner.chunk) == (3, 9)
    assert build_compressor("stat2", CompressorOptions(reduction="requantise")).inner.reduction == "requantise"
    assert build_compressor("int8", CompressorOptions(reduction="gather")).reduction == "gather"
    assert build_compressor("stat2").inner.reduction == "gather" and build_compressor("int8").reduction == "requantise"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, ["rank=0", "rank=64"]),
        ({"topk": 0}, ["topk=0", "topk=64"]),
        ({"topk": 65, "chunk": 64}, ["topk=65", "chunk=64", "topk=1"]),
        ({"chunk": 4097}, ["chunk=4097", "12 bits", "chunk=4096"]),
        ({"feedback_beta": 0.0}, ["feedback_beta=0.0", "feedback_beta=1.0"]),
        ({"feedback_beta": float("nan")}, ["feedback_beta=nan"]),
        ({"residual_dtype": "int8"}, ["residual_dtype='int8'", "bfloat16"]),
        ({"reduction": "sum"}, ["reduction='sum'", "requantise"]),
    ],
)
def test_options_that_cannot_be_used_are_refused_with_one_that_can(options: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        CompressorOptions(**options)
    assert all(word in str(caught.value) for word in words)
    assert len(str(caught.value).splitlines()) <= 3


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"compressor='lowrnk' is not known. Did you mean 'lowrank'\?"):
        build_compressor("lowrnk")


def test_a_rank_too_large_for_every_matrix_is_refused_with_the_largest_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"rank=4096 .* 256×512.* Use rank=85 or less") as caught:
        check_compressor("lowrank", CompressorOptions(rank=4096), shapes=SHAPES)
    assert len(str(caught.value).splitlines()) <= 3
    assert check_compressor("lowrank", CompressorOptions(rank=85), shapes=[(256, 512)]) == []
    with pytest.raises(ConfigError, match="int4"):
        check_compressor("lowrank+int4", CompressorOptions(rank=1), shapes=[(2, 2)])


def test_a_rank_too_large_for_some_matrices_is_a_warning_that_names_them() -> None:
    (warning,) = check_compressor("lowrank+int4", CompressorOptions(rank=40), shapes=SHAPES)
    assert "rank=40" in warning and "64×64" in warning and "rank=15" in warning and "256×512" not in warning
    assert check_compressor("lowrank+int4", CompressorOptions(rank=15), shapes=SHAPES) == []
    assert check_compressor("int4", CompressorOptions(rank=4096), shapes=SHAPES) == []


@pytest.mark.parametrize("name", ["stat2", "topk", "topk+stat2", "lowrank", "lowrank+int4"])
def test_a_coarse_method_without_feedback_is_warned_about(name: str) -> None:
    (warning,) = check_compressor(name, CompressorOptions(feedback=False))
    assert name in warning and "error_feedback=true" in warning
    assert check_compressor(name) == []


def test_top_k_with_outer_momentum_is_warned_about() -> None:
    (warning,) = check_compressor("topk+stat2", outer_momentum=0.9)
    assert "outer_momentum=0.9" in warning and "outer_momentum=0." in warning
    assert check_compressor("int4", outer_momentum=0.9) == []
