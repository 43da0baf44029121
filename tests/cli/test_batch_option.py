"""A model that was exported for one sample, by the command line."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from burnish.compiler.options import read_sample_axis
from burnish.errors import ConfigurationError
from burnish.program import Program


@pytest.fixture
def single(folder):
    """A model of one sample beside data of many."""
    model = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["": 18]>
single (float[1, 4, 1] x) => (float[1, 3] logits) <int64[2] extents = {1, 4}, float[4, 3] w> {
  flat = Reshape(x, extents)
  logits = MatMul(flat, w)
}""")
    generator = np.random.default_rng(0)
    weights = onnx.numpy_helper.from_array(generator.standard_normal((4, 3)).astype(np.float32), "w")
    del model.graph.initializer[1:]
    model.graph.initializer.append(weights)
    onnx.save(model, "single.onnx")
    x = generator.standard_normal((24, 4, 1)).astype(np.float32)
    np.savez("samples.npz", x=x, y=generator.integers(0, 3, 24))


@pytest.mark.slow
def test_train_on_batches_of_any_size(run, single):
    run("train", "single.onnx", "--data", "samples.npz", "-o", "run", "--batch", "open", "--batch-size", "5")
    assert Program.load("run/program").options["batch"] == "open"
    assert json.loads(run("inspect", "run", "--json").stdout)["options"]["batch"] == "open"
    tuned = onnx.load("run/tuned.onnx").graph
    assert tuned.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_without_the_option_the_error_names_it(run, single):
    stderr = run("train", "single.onnx", "--data", "samples.npz", "-o", "run", "--batch-size", "5", code=1).stderr
    assert "compile it with batch='open' (--batch open)" in stderr


@pytest.mark.slow
def test_inspect_and_check_open_the_batch(run, single):
    assert json.loads(run("inspect", "single.onnx", "--json").stdout)["inputs"][0]["shape"] == [1, 4, 1]
    opened = json.loads(run("inspect", "single.onnx", "--json", "--batch", "open").stdout)
    assert opened["inputs"][0]["shape"] == ["batch", 4, 1]
    assert opened["outputs"][0]["shape"] == ["batch", 3]
    assert "can be trained" in run("check", "single.onnx", "--batch", "open").stdout


def test_a_number_is_the_size_of_another_option(run, single):
    stderr = run("train", "single.onnx", "--data", "samples.npz", "-o", "run", "--batch", "5", code=2).stderr
    assert "--batch 5: the only choice is 'open'" in stderr
    assert "--batch-size" in stderr


@pytest.mark.slow
def test_a_program_has_its_own(run, single):
    run("compile", "single.onnx", "-o", "program", "--batch", "open")
    assert "--batch is for a model" in run("inspect", "program", "--batch", "open", code=2).stderr
    assert (
        "--batch says how a model is compiled"
        in run("train", "program", "--data", "samples.npz", "-o", "run", "--batch", "open", code=2).stderr
    )


@pytest.mark.slow
def test_the_axis_of_samples_is_said_and_kept(run, folder):
    model = onnx.parser.parse_model("""
<ir_version: 10, opset_import: ["": 21]>
shared (float[steps, s1, 2] x, float[steps, 1, 2] places) => (float[steps, s1, 2] y) <float[2, 2] w = {1, 2, 3, 4}> {
  placed = Add(x, places)
  y = MatMul(placed, w)
}""")
    onnx.save(model, "shared.onnx")
    rng = np.random.default_rng(0)
    data = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in {"x": (11, 4, 2), "places": (4, 1, 2)}.items()}
    np.savez("data.npz", targets=rng.standard_normal((11, 4, 2)).astype(np.float32), **data)
    axes = ("--sample-axis", "x=1", "--sample-axis", "places=none")
    run("predict", "shared.onnx", "data.npz", *axes, "--batch-size", "4", "-o", "said.npz")
    expected = (data["x"] + data["places"].transpose(1, 0, 2)) @ np.array([[1, 2], [3, 4]], np.float32)
    assert np.allclose(np.load("said.npz")["y"], expected, atol=1e-5)
    run("train", "shared.onnx", "--data", "data.npz", "-o", "run", "--loss", "mse", "--batch-size", "4", "--lr", "0", *axes)
    for kept in ("run", "run/tuned.onnx"):
        run("predict", kept, "data.npz", "-o", "kept.npz")
        assert np.allclose(np.load("kept.npz")["y"], expected, atol=1e-5)
    assert "sample_axis: 'run' is of a program" in run("predict", "run", "data.npz", *axes, code=1).stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [(["x:1"], "write NAME=AXIS"), (["x=-1"], "write NAME=AXIS"), (["x=1", "x=0"], "'x' has an axis already")],
)
def test_an_axis_that_is_written_otherwise_is_refused(text, said):
    with pytest.raises(ConfigurationError, match=said):
        read_sample_axis(text)


def test_axes_are_read_as_compile_takes_them():
    assert read_sample_axis([]) is None
    assert read_sample_axis(["1"]) == 1
    assert read_sample_axis(["x=1", "grid=none"]) == {"x": 1, "grid": None}
