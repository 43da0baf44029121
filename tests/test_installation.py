"""Installs a fresh clone and a wheel into empty environments, and sees that a step there calls the installed kernels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from burnish.kernels import compiling

PROJECT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kernels are installed on Linux only"),
    pytest.mark.skipif(not (PROJECT / ".git").exists(), reason="needs a checkout to clone"),
    pytest.mark.skipif(compiling.find_compiler() is None, reason="needs a C++ compiler"),
]


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=1800, **options)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


# Each takes two minutes, most of them to compile the same kernels; make test-wheels tries wheels too.
@pytest.mark.parametrize("source", ["clone", pytest.param("wheel", marks=pytest.mark.campaign)])
def test_an_installation_finds_its_kernels_and_calls_them(source, tmp_path):
    clone, environment = tmp_path / "clone", tmp_path / "environment"
    run("git", "clone", "--quiet", "--no-hardlinks", PROJECT, clone)
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BURNISH_"))}
    venv.create(environment, with_pip=True)
    pip = [environment / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    if source == "clone":
        run(*pip, "install", "--no-compile", f"{clone}[demo]", env=settings)
    else:
        level = next(level.name for level in compiling.LEVELS if level.runs_here())
        run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, clone, env=settings | {"BURNISH_INSTALLED_KERNELS": level})
        (wheel,) = tmp_path.glob("*.whl")
        run(*pip, "install", "--no-compile", f"{wheel}[demo]", env=settings)
    shutil.rmtree(clone)
    settings |= {"PATH": str(environment / "bin"), "BURNISH_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    trial = [environment / "bin" / "python", PROJECT / "wheels" / "trial.py", "installed", "onnxruntime", "reference"]
    found = json.loads(run(*trial, env=settings, cwd=tmp_path).splitlines()[-1])
    kernels = Path(found["ran_on"]["onnxruntime"]["kernels"])
    assert kernels.is_relative_to(environment)
    assert kernels.is_file()
    assert {"FusedBatchNorm", "FusedBatchNormGrad"} <= set(found["operators"])
    assert not (tmp_path / "cache").exists()
