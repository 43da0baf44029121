"""``package(runtime="c")``: a folder that a compiler and ONNX Runtime are enough for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import c_library
import numpy as np
import programs
import pytest
from typer.testing import CliRunner

import burnish
from burnish.cli.application import app
from burnish.errors import CheckpointError, ConfigurationError
from burnish.program import Program
from oracles.standard_operators import STANDARD

reason = c_library.missing()
needs_compiler = pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """A package of a small network, by the command."""
    root = tmp_path_factory.mktemp("package")
    programs.program("mobile")[0].save(root / "program")
    result = CliRunner().invoke(app, ["package", str(root / "program"), "--runtime", "c", "-o", str(root / "board")])
    assert result.exit_code == 0, result.output
    assert "make -C" in result.output
    assert "INFO" not in result.stderr
    return root / "board"


@pytest.mark.slow
def test_a_package_holds_the_program_and_what_a_reduced_build_needs(package) -> None:
    program = programs.program("mobile")[0]
    assert Program.load(package / "program").signature == program.signature
    operators = (package / "models" / "required_operators.config").read_text()
    assert "/" not in operators.replace("model/s", "")
    listed = set(re.findall(r"[A-Z]\w+", operators.partition("\nai.onnx")[2]))
    assert {"Conv", "BatchNormalization", "MaxPool", "ReduceSum", "MatMul"} & listed >= {"Conv", "ReduceSum"}
    sizes = {path.stem: path.stat().st_size for path in (package / "models").glob("*.ort")}
    assert sizes.keys() == {"init", "step", "evaluate", "predict"}
    assert sizes["init"] < sizes["step"]
    assert "--data x=x.npy --data labels=labels.npy" in (package / "README.md").read_text()


@needs_compiler
@pytest.mark.slow
def test_a_package_builds_trains_and_runs_its_own_models(package, tmp_path) -> None:
    lib = c_library.link_folder(tmp_path / "ort" / "lib")
    built = subprocess.run(["make", "-C", str(package), f"ORT={lib.parent}", "CFLAGS=-O1"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    batch = programs.program("mobile")[1]
    command = [str(package / "train"), "program", "--batch", str(len(batch["labels"])), "--steps", "4", "--threads", "1"]
    for name, array in batch.items():
        np.save(tmp_path / f"{name}.npy", array)
        command += ["--data", f"{name}={tmp_path / name}.npy"]
    runs = [
        subprocess.run([*command, *more], cwd=package, capture_output=True, text=True, check=True).stdout.splitlines()
        for more in ([], ["--models", "models"])
    ]
    losses = [[float(line.split()[-1]) for line in lines] for lines in runs]
    session = burnish.Session(programs.program("mobile")[0], engine=STANDARD, threads=1)
    expected = [session.step(batch)["loss"] for _ in range(4)]
    assert [np.float32(loss) for loss in losses[0]] == [np.float32(loss) for loss in expected]
    np.testing.assert_allclose(
        losses[1], expected, rtol=1e-5
    )  # without the blocked layout of this processor: another order of sums


@needs_compiler
@pytest.mark.slow
def test_packed_graphs_are_as_they_were_packed_and_of_their_program(package, tmp_path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=package / "models", check=True)
    client = c_library.Client(c_library.build(tmp_path, "libburnish.so"))
    models = shutil.copytree(package / "models", tmp_path / "models")
    sums = (models / "SHA256SUMS").read_text()
    step = (models / "step.ort").read_bytes()
    batch = programs.program("mobile")[1]
    session = client.open(package / "program", models=models)
    for name, content in (("step.ort", step[:-1] + bytes([step[-1] ^ 1])), ("SHA256SUMS", sums.replace("step", "stop"))):
        whole = (models / name).read_bytes()
        (models / name).write_bytes(content.encode() if isinstance(content, str) else content)
        message = (
            r"CheckpointError: .*step\.ort' is not the file that .*SHA256SUMS' lists as 'step\.ort': .* Pack the program again"
        )
        with pytest.raises(c_library.ClientError, match=message):
            session.step(batch)
        (models / name).write_bytes(whole)
    assert session.step(batch)["loss"] > 0
    session.close()
    programs.program("dropout")[0].save(tmp_path / "other")
    with pytest.raises(c_library.ClientError, match=r"other/program\.json' is not the file that .* belongs to another package"):
        client.open(tmp_path / "other", models=models)
    (models / "SHA256SUMS").unlink()
    with pytest.raises(c_library.ClientError, match=r"SHA256SUMS' cannot be opened"):
        client.open(package / "program", models=models)


def test_what_cannot_be_packed_is_named(package, tmp_path) -> None:
    program = programs.program("mobile")[0]
    with pytest.raises(CheckpointError, match="is a file, or holds files: give the path of a new folder"):
        program.package(package, runtime="c")
    with pytest.raises(ConfigurationError, match="runtime: unknown 'rust'; choose among 'c', or leave it out"):
        program.package(tmp_path / "board", runtime="rust")
    with pytest.raises(ConfigurationError, match=r"runtime='c' packs all graphs .* leave graph, extents and device out"):
        program.package(tmp_path / "board", runtime="c", graph="step")
    with pytest.raises(ConfigurationError, match=r"a package is one of the kinds \.pt2; .* or runtime='c'"):
        program.package(tmp_path / "board")
    assert not list(tmp_path.iterdir())
