"""Names that a model and the programs made of it both use: told apart where that can be, refused by name where it cannot."""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import burnish
from burnish.errors import ConfigurationError

WEIGHT = np.random.default_rng(0).normal(size=(3, 2)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
LABELS = np.array([0, 1, 1, 0])


def dense(data: str = "x", logits: str = "logits", *, passed_through: bool = False) -> onnx.ModelProto:
    """``logits = data @ w``; with ``passed_through``, ``data`` is an output as well."""
    shapes = {data: ["batch", 3], logits: ["batch", 2]}
    infos = {name: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    outputs = [infos[logits], infos[data]] if passed_through else [infos[logits]]
    graph = helper.make_graph(
        [helper.make_node("MatMul", [data, "w"], [logits])],
        "graph",
        [infos[data]],
        outputs,
        [numpy_helper.from_array(WEIGHT, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize("name", ["labels", "lr", "step", "rng/key", "opt/momentum/w", "loss", "next:param/w", "grad:w"])
@pytest.mark.quick_cases(2)
def test_an_output_may_have_a_name_of_the_program(name, tmp_path):
    session = burnish.Session(burnish.compile(dense(logits=name), optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9)))
    plain = burnish.Session(burnish.compile(dense(), optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9)))
    for _ in range(2):
        assert session.step({"x": X, "labels": LABELS}) == plain.step({"x": X, "labels": LABELS})
    assert session.evaluate({"x": X, "labels": LABELS}) == plain.evaluate({"x": X, "labels": LABELS})
    np.testing.assert_array_equal(session.predict({"x": X})[name], plain.predict({"x": X})["logits"])
    exported = onnxruntime.InferenceSession(session.export(tmp_path / "tuned.onnx"))
    assert [output.name for output in exported.get_outputs()] == [name]


@pytest.mark.parametrize("name", ["labels", "lr", "step", "rng/key", "param/w"])
def test_an_input_with_the_name_of_an_input_of_the_program_is_refused(name):
    with pytest.raises(ConfigurationError, match=f"^the model has an input '{name}', a name the program needs for its .*rename"):
        burnish.compile(dense(name))


@pytest.mark.parametrize("name", ["loss", "accuracy", "next:param/w", "grad:w"])
def test_an_input_with_the_name_of_an_output_of_the_program_is_refused(name):
    with pytest.raises(
        ConfigurationError, match=f"^'{name}' would be both an input and an output of .*: rename it in the model$"
    ):
        burnish.compile(dense(name))


def test_an_output_with_the_name_of_a_parameter_is_refused():
    with pytest.raises(ConfigurationError, match=r"^'param/w' would be both .* of the program's predict graph: rename it"):
        burnish.compile(dense(logits="param/w"))


def test_an_input_that_is_an_output_too(tmp_path):
    session = burnish.Session(burnish.compile(dense(passed_through=True), outputs="logits"))
    session.step({"x": X, "labels": LABELS})
    np.testing.assert_array_equal(session.predict({"x": X})["x"], X)
    exported = onnxruntime.InferenceSession(session.export(tmp_path / "tuned.onnx"))
    np.testing.assert_array_equal(exported.run(["x"], {"x": X})[0], X)


@pytest.mark.parametrize("outputs", [3, ["logits", "logits"], []], ids=str)
def test_outputs_is_one_name_for_a_loss_that_reads_one(outputs):
    message = rf"^outputs is the name of the one output .* not {re.escape(repr(outputs))}; the model has 'logits'$"
    with pytest.raises(ConfigurationError, match=message):
        burnish.compile(dense(), outputs=outputs)


def test_a_list_of_one_output():
    assert burnish.compile(dense(), outputs=["logits"]).signature == burnish.compile(dense(), outputs="logits").signature
