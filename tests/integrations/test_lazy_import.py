from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import atoll; assert atoll.__version__", ["torch", "transformers", "pydantic", "atoll.train"]),
        ("from atoll import OuterSync", ["transformers", "tokenizers", "matplotlib", "atoll.models", "atoll.data"]),
    ],
)
def test_importing_it_loads_only_what_it_needs(statement: str, unwanted: list[str]) -> None:
    program = f"{statement}; import sys; print([name for name in {unwanted} if name in sys.modules])"
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout.strip() == "[]"
