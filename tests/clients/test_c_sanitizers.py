"""The C client under the sanitizers of the compiler and under valgrind: every function, in several threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import c_library
import pytest

import burnish
from oracles.small_networks import perceptron

reason = c_library.missing()
pytestmark = [pytest.mark.skipif(reason is not None, reason=str(reason)), pytest.mark.slow]

SUPPRESSED = "".join(
    f"{{\n   inside-onnx-runtime\n   Memcheck:{kind}\n   ...\n   obj:*libonnxruntime*\n}}\n"
    for kind in ("Cond", "Value8", "Value4", "Addr8", "Overlap")
)
"""Of valgrind: what is wrong in the client's own frames is told all the same. Leaks are what the address sanitizer looks for."""


@pytest.fixture(scope="module", params=["trained", "cached"])
def program(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("exercised") / request.param
    model = perceptron()
    options = {"trainable": ["head*"], "cached_features": "auto"} if request.param == "cached" else {}
    burnish.compile(model, optimizer=burnish.optim.ema(burnish.optim.adamw(lr=0.01), decay=0.9), **options).save(path)
    return path


def exercise(tmp_path: Path, program: Path, flags: tuple[str, ...], *before: str, threads: int) -> None:
    source = Path(__file__).with_name("exercise.c")
    built = c_library.build(tmp_path, "exercise", source, flags=(*flags, "-pthread"))
    (tmp_path / "out").mkdir()
    command = [*before, str(built), str(program), str(tmp_path / "out"), str(threads)]
    # Files of ONNX Runtime stay in memory to the end, and TSan does not see the locks in it.
    (tmp_path / "races").write_text("race:libonnxruntime.so\n")
    environment = {
        **os.environ,
        "TSAN_OPTIONS": f"suppressions={tmp_path / 'races'}:report_mutex_bugs=0",
        "ASAN_OPTIONS": "detect_leaks=1",
    }
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr[-5000:]
    assert "WARNING" not in run.stderr, run.stderr[-5000:]


def test_no_address_is_wrong_and_nothing_undefined(program, tmp_path) -> None:
    exercise(tmp_path, program, c_library.SANITIZED, threads=3)


def test_threads_do_not_race(program, tmp_path) -> None:
    if shutil.which("setarch") is None:
        pytest.skip("there is no setarch, which gives TSan the addresses that it needs: install util-linux")
    exercise(tmp_path, program, ("-g", "-fsanitize=thread"), "setarch", "-R", threads=4)


@pytest.mark.campaign  # which takes a minute
def test_valgrind_finds_nothing(program, tmp_path) -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("there is no valgrind: install the package of that name")
    (tmp_path / "suppressed").write_text(SUPPRESSED)
    checks = ("--error-exitcode=9", "--leak-check=no", "--quiet")
    exercise(tmp_path, program, ("-gdwarf-4",), "valgrind", *checks, f"--suppressions={tmp_path / 'suppressed'}", threads=1)
