"""The command in processes of its own: Ctrl-C, going on, what starting costs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from burnish.cli import main
from oracles.combinations import spread

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
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.skipif(sys.platform == "win32", reason="they are no signals there")
def test_ctrl_c_and_sigterm_save_say_how_to_go_on_and_that_is_bitwise_the_same(run, folder, number, status):
    generator = np.random.default_rng(1)
    np.savez("many.npz", x=generator.normal(size=(100, 4, 4)).astype(np.float32), y=generator.integers(0, 3, 100))
    with subprocess.Popen(
        [*BURNISH, *arguments("parts", MANY_EPOCHS)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        for line in process.stdout:
            if line.startswith("epoch "):
                break
        process.send_signal(number)
        remaining, message = process.communicate(timeout=600)
    assert process.returncode == status, remaining + message
    assert "Traceback" not in message
    assert "Everything is saved in 'parts/checkpoints/latest.safetensors'" in message
    command = message.strip().splitlines()[-1].strip()
    assert command == "burnish train --resume parts"
    assert not (folder / "parts/tuned.onnx").exists()
    epochs = int(re.search(r"Stopped in epoch (\d+)", message)[1])
    run(*shlex.split(command)[1:], "--epochs", str(epochs))
    run(*arguments("whole", epochs))
    assert rows(folder / "parts") == rows(folder / "whole")
    assert (folder / "parts/tuned.onnx").read_bytes() == (folder / "whole/tuned.onnx").read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="SIGTERM ends a process at once there")
def test_sigterm_before_a_run_begins_removes_its_folder(folder):
    """While the model is compiled, in place of which the process waits here."""
    waiting = """
import sys, time
import burnish.cli.compilation_options as options
options.Compilation.program = lambda *arguments, **more: print("here", flush=True) or time.sleep(60)
sys.argv[1:] = ["train", "model.onnx", "--data", "data.npz"]
from burnish.cli import main
main()
"""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    with subprocess.Popen([sys.executable, "-c", waiting], **streams) as process:
        assert process.stdout.readline() == "here\n"
        process.terminate()
        message = process.communicate(timeout=60)[1]
    assert (process.returncode, message) == (143, "Stopped.\n")
    assert not (folder / "runs").exists()


INTERRUPTED = """
import atexit, os, signal, sys
moment = sys.argv[1]
def press(*arguments):
    os.kill(os.getpid(), signal.SIGINT)
class Imports:
    find_spec = staticmethod(lambda name, *more: press() if name == moment else None)
sys.meta_path.insert(0, Imports)
atexit.register(press if moment == "the end" else int)
from burnish.cli import main
sys.argv[1:] = ["--version"]
main()
"""


@pytest.mark.parametrize(
    ("moment", "status", "message"),
    [("burnish.cli.application", 130, "Stopped.\n"), ("burnish.cli.launch", 130, "Stopped.\n"), ("the end", -signal.SIGINT, "")],
)
@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is no signal there")
def test_ctrl_c_at_the_start_and_at_the_end_prints_no_trace(moment, status, message):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, moment], capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stderr) == (status, message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status"), [(["train", "--help"], 0), (["--version"], 0), (["paint"], 2), (["train", "model.onnx"], 2)]
)
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


def test_ctrl_c_while_the_command_is_imported_is_no_traceback(monkeypatch, capsys):
    class Interrupted(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "burnish.cli.application", Interrupted("burnish.cli.application"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "Stopped.\n")


@pytest.mark.slow
def test_an_unknown_command_exits_with_2():
    result = subprocess.run([*BURNISH, "paint"], capture_output=True, text=True, env=environment())
    assert result.returncode == 2
    assert "No such command 'paint'" in result.stderr


@pytest.mark.slow
@spread(
    "command",
    [
        ("inspect", "model.onnx"),
        ("inspect", "model.onnx", "--json"),
        ("check", "model.onnx", "--no-gradients"),
        ("predict", "run", "data.npz"),
        ("evaluate", "run", "data.npz"),
        ("train", "model.onnx", "--data", "data.npz", "-o", "other", "--epochs", "3"),
    ],
    test_all=1,
    ids=lambda command: " ".join(command[:1] + command[2:3]),
)
def test_output_that_nobody_takes(run, folder, command):
    """A reader that goes away stops nothing; a closed or a full output leaves no traceback."""
    run("train", "model.onnx", "--data", "data.npz", "-o", "run", "--threads", "1")
    line = shlex.join([*BURNISH, *command])
    for form in ("{} | true", "{} >&-", "{} > /dev/full", "{} 2>&-"):
        shutil.rmtree("other", ignore_errors=True)
        done = subprocess.run(["bash", "-c", form.format(line)], capture_output=True, text=True, env=environment(), check=False)
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr
        if form.endswith("full"):
            assert done.returncode
            assert "No space left on device" in done.stderr
        else:
            assert done.returncode == 0
            assert command[0] != "train" or (folder / "other/tuned.onnx").is_file()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_help_that_nobody_takes_is_an_error_in_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*BURNISH, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), check=False
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: No space left on device")


@pytest.mark.slow
def test_workers_end_with_a_launcher_that_is_killed_and_one_process_runs_in_a_folder(run, folder):
    generator = np.random.default_rng(1)
    np.savez("many.npz", x=generator.normal(size=(100, 4, 4)).astype(np.float32), y=generator.integers(0, 3, 100))
    command = [*BURNISH, *arguments("parts", MANY_EPOCHS), "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment()) as process:
        for line in process.stdout:
            if line.startswith("epoch "):
                break
        try:
            refused = run(*arguments("parts", 1), "--resume", "--workers", "1", code=1).stderr
        finally:
            process.kill()
        process.stdout.read()  # until the workers have ended, too
    assert "A run is going on in 'parts', in process " in refused
    epochs = int(rows(folder / "parts")[-1][1])
    run(*arguments("parts", epochs + 1), "--resume", "--workers", "1")
    steps = [int(row[0]) for row in rows(folder / "parts")[1:]]
    assert steps == sorted(set(steps))
