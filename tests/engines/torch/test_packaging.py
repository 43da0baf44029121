"""Packages: a step compiled ahead of time computes what the session computes, from Python and from C++."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._inductor import config

import burnish
from burnish.engines import packaging
from burnish.engines.torch import TorchEngine
from burnish.errors import CheckpointError, ConfigurationError, EngineError
from burnish.models import residual_network
from burnish.program import Signature
from oracles.tiny_program import LR, numpy_step, tiny_batch, tiny_program

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "aot_cpp"


def tensors_of(arrays):
    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


@pytest.mark.slow
def test_a_packaged_step_follows_the_closed_form_over_batches_of_any_size(inductor, tmp_path):
    program = tiny_program()
    path = program.package(tmp_path / "step.pt2")
    assert [file.name for file in tmp_path.iterdir()] == ["step.pt2"]
    step = torch._inductor.aoti_load_package(str(path))
    metadata = step.loader.get_metadata()
    assert metadata["burnish.graph"] == "step"
    read = Signature.from_dict({"step": json.loads(metadata["burnish.signature"])})
    assert read["step"] == program.signature["step"]
    names, outputs, updates = (metadata[f"burnish.{key}"].split("\n") for key in ("inputs", "outputs", "updates"))
    state = program.initial_state(0)
    inputs = tensors_of({**state, **tiny_batch(), "lr": np.float32(LR)})
    for number, size in enumerate((8, 5, 64, 1, 8)):
        batch = tiny_batch(size, seed=number)
        inputs |= tensors_of(batch)
        results = step(*(inputs[name] for name in names))
        loss, state = numpy_step(state, batch)
        reported = dict(zip(outputs, results, strict=True))
        np.testing.assert_allclose(reported["loss"], loss, rtol=3e-6)
        inputs |= {names[int(place)]: result for place, result in zip(updates, results, strict=True) if place != "-1"}
    for name, array in state.items():
        np.testing.assert_allclose(inputs[name], array, rtol=3e-6, atol=2e-6, err_msg=name)


@pytest.mark.campaign
def test_a_packaged_step_computes_activations_again(inductor, tmp_path):
    program = burnish.compile(residual_network(width=4, blocks=(1,)), optimizer="sgd:lr=0.05", recompute="layers")
    step = torch._inductor.aoti_load_package(str(program.package(tmp_path / "step.pt2")))
    signature = program.signature["step"]
    session = burnish.Session(program, "onnxruntime", threads=1)
    inputs = tensors_of({**program.initial_state(0), "lr": np.float32(0.05)})
    rng = np.random.default_rng(0)
    for size in (4, 6):
        batch = {"x": rng.normal(size=(size, 1, 8, 8)).astype(np.float32), "labels": rng.integers(0, 10, size)}
        inputs |= tensors_of(batch)
        results = step(*(inputs[entry.name] for entry in signature.inputs))
        reported = {entry.name: result for entry, result in zip(signature.outputs, results, strict=True)}
        assert float(reported["loss"]) == pytest.approx(session.step(batch)["loss"], rel=1e-4)
        inputs |= {entry.updates: reported[entry.name] for entry in signature.outputs if entry.updates is not None}
    for name, array in session.state().items():
        np.testing.assert_allclose(inputs[name], array, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_the_example_in_cpp_trains_as_the_session_does(inductor, tmp_path):
    if shutil.which("cmake") is None:
        pytest.skip("needs CMake, and none is found")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for command in (
        [sys.executable, str(EXAMPLE / "package_step.py")],
        ["cmake", "-S", str(EXAMPLE), "-B", "build", f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"],
        ["cmake", "--build", "build"],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    printed = subprocess.run(
        [tmp_path / "build" / "train", "step.pt2", "state.safetensors", "6"], cwd=tmp_path, capture_output=True, text=True
    )
    assert printed.returncode == 0, printed.stderr
    losses = [float(number) for number in re.findall(r"^step \d+ loss (\S+)$", printed.stdout, re.MULTILINE)]
    program = burnish.compile(residual_network(width=4, blocks=(1,)), optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9))
    session = burnish.Session(program, TorchEngine(compile="none"), threads=1)
    x = torch.sin(torch.arange(16 * 64, dtype=torch.float32) * 0.7).reshape(16, 1, 8, 8).numpy()
    batch = {"x": x, "labels": np.arange(16) % 10}
    np.testing.assert_allclose(losses, [session.step(batch)["loss"] for _ in range(6)], rtol=2e-4)
    assert losses[-1] < losses[0]


def test_a_package_needs_a_compiler(tmp_path):
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(EngineError, match=r"program\.package needs a C\+\+ compiler, and none was found: install one"),
    ):
        tiny_program().package(tmp_path / "step.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_graph_that_cannot_be_compiled_leaves_an_earlier_package(inductor, tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("no such loop")

    monkeypatch.setattr(torch.export, "export", refuse)
    path = tmp_path / "step.pt2"
    path.write_bytes(b"earlier")
    with pytest.raises(EngineError, match=r"cannot package the step graph: no such loop\. Nothing was written.*extents="):
        tiny_program().package(path)
    assert path.read_bytes() == b"earlier"
    assert [file.name for file in tmp_path.iterdir()] == ["step.pt2"]


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("step.so", {}, r"'step\.so': a package is one of the kinds \.pt2; give its path that suffix"),
        ("step.pt2", {"graph": "train"}, r"graph: unknown 'train'; choose among 'init', 'step'"),
        ("step.pt2", {"extents": {"width": 3}}, r"the step graph has no dimension 'width' to give an extent; it has 'batch'"),
        ("step.pt2", {"extents": {"batch": 0}}, r"extents: 'batch' is 0: give a whole number of at least one"),
    ],
)
def test_what_cannot_be_packaged_is_named(path, options, message):
    with pytest.raises(ConfigurationError, match=message):
        tiny_program().package(path, **options)


def test_an_unknown_device_is_named(tmp_path):
    with pytest.raises(EngineError, match=r"A package cannot be made for the device 'abacus': .*Leave device out for the CPU"):
        tiny_program().package(tmp_path / "step.pt2", device="abacus")


def test_a_folder_that_cannot_be_written_is_named(inductor, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step\.pt2' cannot be written: "):
        tiny_program().package(tmp_path / "file" / "step.pt2")


def test_what_a_package_needs_and_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(packaging.PACKAGERS, ".pt2", "no_such_library.packaging:package")
    with pytest.raises(
        EngineError, match=r"A package \.pt2 cannot be made: .*Install what it needs \(pip install no_such_library\)"
    ):
        tiny_program().package("step.pt2")
