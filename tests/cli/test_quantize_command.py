"""``burnish quantize``: a file that is trained as any other, and whose export holds integers."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import burnish
from burnish.cli.application import app


def initializers(path) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in onnx.load(path).graph.initializer}


@pytest.mark.filterwarnings("error::burnish.errors.ObjectiveWarning")
@pytest.mark.slow
def test_a_quantized_file_trains_and_is_exported_as_integers(run, folder) -> None:
    when = ("--scales", "observed", "--freeze-observers-after", "2 epochs")
    result = run("quantize", "model.onnx", "--data", "data.npz", "-o", "to-train.onnx", "--samples", "16", *when)
    assert "calibrated on 16 samples of data.npz; burnish train to-train.onnx trains it" in " ".join(result.output.split())
    assert "QuantizeLinear" in {node.op_type for node in onnx.load("to-train.onnx").graph.node}
    options = ("--epochs", "1", "--lr", "0.001", "--threads", "1", "--batch-size", "5", "-o", "trained")
    run("train", "to-train.onnx", "--data", "data.npz", *options)
    assert burnish.Program.load("trained/program").options["steps_per_epoch"] == 4
    tensors = initializers("trained/tuned.onnx")
    quantized = [name for name, tensor in tensors.items() if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) > 1]
    assert quantized
    assert all(np.abs(onnx.numpy_helper.to_array(tensors[name])).max() <= 63 for name in quantized)


def test_weights_alone_need_no_data(run, folder) -> None:
    run("quantize", "model.onnx", "--activations", "none", "--weights", "int4 per channel", "-o", "to-train.onnx")
    nodes = [node for node in onnx.load("to-train.onnx").graph.node if node.op_type == "QuantizeLinear"]
    assert len(nodes) == len([tensor for tensor in initializers("model.onnx").values() if len(tensor.dims) > 1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--activations", "none", "--data", "d.npz", "-o", "t.onnx"), "--data is for the ranges of activations, and"),
        (("-o", "to-train.onnx"), "ranges of activations are measured on data: give --data, or --activations none"),
        (("-o", "to-train.npz", "--data", "data.npz"), "a model is written as .onnx"),
    ],
)
def test_what_does_not_fit_is_refused(run, folder, arguments, message) -> None:
    result = run("quantize", "model.onnx", *arguments, code=2)
    assert message in " ".join(result.output.replace("│", " ").split())


def test_the_command_is_listed() -> None:
    assert any(command.callback is not None and command.callback.__name__ == "quantize" for command in app.registered_commands)
