"""Compiled codes give the bytes of the plain ones."""

from __future__ import annotations

import shutil

import pytest
import torch

from atoll.compress.codecs import Blocks, Code, Fp4, Int4, Int8, Stat2
from atoll.compress.fused import fused, is_fused

CODES = {"int8": (Int8(), 1024), "int4": (Int4(), 128), "fp4": (Fp4(), 128), "stat2": (Stat2(), 256)}


def rows_of(blocks: int, length: int) -> torch.Tensor:
    return torch.randn(blocks, length, generator=torch.Generator().manual_seed(0)) * 1e-3


def test_only_gpus_compile() -> None:
    assert is_fused(torch.device("cuda", 1)) and not is_fused(torch.device("cpu"))


@pytest.mark.parametrize("name", CODES)
def test_every_code_is_one_graph_with_the_same_bits(name: str) -> None:
    """Traced, not made into machine code: what cannot be compiled fails here."""
    code, length = CODES[name]
    encode, decode = (
        torch.compile(way, dynamic=True, fullgraph=True, backend="aot_eager") for way in (code.encode, code.decode)
    )
    _check(code, encode, decode, length)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own
def test_machine_code_has_the_same_bits() -> None:
    """Of int4, whose head is rounded to bf16 half-way: a kernel that computed on in fp32 would code otherwise."""
    code = Int4()
    kernels = fused(code)
    _check(code, kernels.encode, kernels.decode, 128)
    assert kernels.row_bytes(128) == code.row_bytes(128) and fused(Int4()) is kernels


def _check(code: Code, encode, decode, length: int) -> None:  # type: ignore[no-untyped-def]
    for blocks in (64, 7):
        rows = rows_of(blocks, length)
        expected, found = (torch.empty(blocks, code.row_bytes(length), dtype=torch.uint8) for _ in range(2))
        code.encode(rows, expected)
        encode(rows, found)
        assert torch.equal(found, expected)
        plain, compiled = torch.empty_like(rows), torch.empty_like(rows)
        code.decode(expected, plain)
        decode(expected, compiled)
        assert torch.equal(compiled, plain)


def test_where_codes_are_fused_all_full_blocks_are_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = rows_of(1, 300_000).view(-1)
    codec = Blocks(Int8(), 1024)
    expected = codec.encode(flat)
    monkeypatch.setattr("atoll.compress.codecs.is_fused", lambda device: True)
    monkeypatch.setattr("atoll.compress.codecs.fused", lambda code: code)
    assert len(list(codec._chunks(flat.numel(), flat.device))) == 2
    assert torch.equal(codec.encode(flat), expected)
