"""A model that was exported for one sample, by the command line."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

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


def test_train_on_batches_of_any_size(run, single):
    run("train", "single.onnx", "--data", "samples.npz", "-o", "run", "--batch", "open", "--batch-size", "5")
    assert Program.load("run/program").options["batch"] == "open"
    assert json.loads(run("inspect", "run", "--json").stdout)["options"]["batch"] == "open"
    tuned = onnx.load("run/tuned.onnx").graph
    assert tuned.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_without_the_option_the_error_names_it(run, single):
    stderr = run("train", "single.onnx", "--data", "samples.npz", "-o", "run", "--batch-size", "5", code=1).stderr
    assert "compile it with batch='open' (--batch open)" in stderr


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


def test_a_program_has_its_own(run, single):
    run("compile", "single.onnx", "-o", "program", "--batch", "open")
    assert "--batch is for a model" in run("inspect", "program", "--batch", "open", code=2).stderr
    assert (
        "--batch says how a model is compiled"
        in run("train", "program", "--data", "samples.npz", "-o", "run", "--batch", "open", code=2).stderr
    )
