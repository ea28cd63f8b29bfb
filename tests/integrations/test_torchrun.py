from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from integrations import torchrun_replica
from integrations.threaded import run_together

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_processes_under_torchrun_give_the_bits_of_replicas_in_one_process() -> None:
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            torchrun_replica.__file__,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    lines = [json.loads(line) for line in finished.stdout.splitlines()]
    outcomes = sorted(lines, key=lambda line: line["replica"])
    assert [outcome.pop("group") for outcome in outcomes] == [False, False]
    assert outcomes == run_together(lambda link: torchrun_replica.run(link, replica=link.replica), 2)
    assert outcomes[0]["round"] == 4
    assert {key: value for key, value in outcomes[0].items() if key != "replica"} == {
        key: value for key, value in outcomes[1].items() if key != "replica"
    }
