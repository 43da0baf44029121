"""Launchers that know nothing of burnish start a script, whose workers come to what one process comes to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from worker_processes import free_port

SCRIPT = str(Path(__file__).with_name("launched.py"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def largest_differences(command: Sequence[str], **variables: str) -> list[float]:
    """What each worker prints, by rank; without a variable of burnish's in the environment."""
    own = {name: text for name, text in os.environ.items() if not name.startswith("BURNISH")}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**own, "OMP_NUM_THREADS": "1", **variables}, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {int(rank): float(number) for rank, number in re.findall(r"rank (\d+) of \d+: (\S+?)(?=rank|\s|$)", done.stdout)}
    assert sorted(found) == list(range(len(found)))
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize(
    "options",
    [
        ("--nproc-per-node", "3", SCRIPT),
        pytest.param(("--nproc-per-node", "4", SCRIPT, "--group"), marks=pytest.mark.slow),
        pytest.param(("--standalone", "--nproc-per-node", "2", SCRIPT, "--engine", "onnxruntime"), marks=pytest.mark.slow),
    ],
)
def test_torchrun(options):
    # Alone it takes port 29500, which another test may have.
    place = () if "--standalone" in options else ("--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    found = largest_differences([*TORCHRUN, *place, *options])
    assert len(found) == int(options[options.index("--nproc-per-node") + 1])
    assert max(found) <= 1e-10


@pytest.mark.slow
def test_torchrun_starts_workers_again_if_one_is_killed(tmp_path):
    place = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--max-restarts", "1", "--nproc-per-node", "3")
    checkpoint = tmp_path / "run.safetensors"
    assert max(largest_differences([*TORCHRUN, *place, SCRIPT, "--interrupted", str(checkpoint)])) <= 1e-10
    assert checkpoint.exists()
