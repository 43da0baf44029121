"""The command in processes of its own: Ctrl-C, going on, what starting costs."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BURNISH = (sys.executable, "-m", "burnish")
MANY_EPOCHS = 10_000


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def arguments(folder: str, epochs: int) -> list[str]:
    options = f"--data many.npz --threads 1 --batch-size 4 --lr 0.01 -o {folder} --epochs {epochs}"
    return ["train", "model.onnx", *options.split()]


def rows(folder: Path) -> list[list[str]]:
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    seconds = lines[0].index("seconds")
    return [line[:seconds] + line[seconds + 1 :] for line in lines]


@pytest.mark.slow
def test_ctrl_c_saves_says_how_to_go_on_and_that_is_bitwise_the_same(run, folder):
    generator = np.random.default_rng(1)
    np.savez("many.npz", x=generator.normal(size=(100, 4, 4)).astype(np.float32), y=generator.integers(0, 3, 100))
    with subprocess.Popen(
        [*BURNISH, *arguments("parts", MANY_EPOCHS)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        for line in process.stdout:
            if line.startswith("epoch "):
                break
        process.send_signal(signal.SIGINT)
        remaining, message = process.communicate(timeout=120)
    assert process.returncode == 130, remaining + message
    assert "Traceback" not in message
    assert "Everything is saved in 'parts/checkpoints/latest.safetensors'" in message
    command = message.strip().splitlines()[-1].strip()
    assert command == shlex.join(["burnish", *arguments("parts", MANY_EPOCHS), "--resume"])
    assert not (folder / "parts/tuned.onnx").exists()
    epochs = int(re.search(r"Stopped in epoch (\d+)", message)[1])
    run(*arguments("parts", epochs), "--resume")
    run(*arguments("whole", epochs))
    assert rows(folder / "parts") == rows(folder / "whole")
    assert (folder / "parts/tuned.onnx").read_bytes() == (folder / "whole/tuned.onnx").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "status"), [(["train", "--help"], 0), (["--version"], 0), (["paint"], 2), (["train", "model.onnx"], 2)]
)
@pytest.mark.quick_cases(1)
def test_help_version_and_wrong_usage_load_no_library(arguments, status):
    code = f"""
import sys
from burnish.cli.application import app
try:
    app({arguments})
except SystemExit as stop:
    assert stop.code == {status}, stop.code
libraries = {{"numpy", "onnx", "onnx_ir", "onnxruntime", "sklearn", "matplotlib", "torch", "pyarrow", "PIL"}}
print(sorted(libraries & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment())
    assert result.stdout.splitlines()[-1] == "[]"


def test_an_unknown_command_exits_with_2():
    result = subprocess.run([*BURNISH, "paint"], capture_output=True, text=True, env=environment())
    assert result.returncode == 2
    assert "No such command 'paint'" in result.stderr
