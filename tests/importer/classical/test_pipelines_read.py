"""Pipelines as skl2onnx writes them, read: the same outputs, which tensors are weights, and what the classes are called."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import burnish
from burnish.importer import classify_initializers
from oracles import classical_files as files
from oracles.onnxruntime_outputs import onnxruntime_outputs

X = np.random.default_rng(0).normal(size=(7, files.FEATURES)).astype(np.float32)
LINEAR = ["LinearClassifier.coefficients", "LinearClassifier.intercepts"]
LAYERS = ["coefficient", "intercepts", "coefficient1", "intercepts1"]


def of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    inputs = {value.name: X[:, index : index + 1] for index, value in enumerate(model.graph.input) if value.name != "k"}
    if len(inputs) == 1:
        return {"X": X}
    return {**inputs, "k": np.array([["red"], ["green"], ["blue"], ["red"], ["pink"], ["blue"], ["red"]], object)}


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        (files.logistic_regression([0, 1]), LINEAR),
        (files.logistic_regression([0, 1, 2]), LINEAR),
        (files.logistic_regression(["no", "yes"]), LINEAR),
        (files.logistic_regression(["a", "b", "c"]), LINEAR),
        (files.perceptron([0, 1]), LAYERS),
        (files.perceptron([0, 1, 2]), LAYERS),
        (files.perceptron(["a", "b", "c"]), LAYERS),
        (files.linear_regression(), ["LinearRegressor.coefficients", "LinearRegressor.intercepts"]),
        (files.linear_regression(2), ["LinearRegressor.coefficients", "LinearRegressor.intercepts"]),
        (files.perceptron_regression(), LAYERS),
        (files.of_columns(), LINEAR),
    ],
)
def test_outputs_and_weights(model: onnx.ModelProto, weights: list[str]) -> None:
    """What scales data is no weight, and neither is the 1 of 1 - p."""
    inputs = of(model)
    if "a" in inputs:
        inputs["a"] = np.where(inputs["a"] > 0, np.float32("nan"), inputs["a"])
    loaded = burnish.load(model)
    expected, got = (onnxruntime_outputs(each, inputs) for each in (model, loaded))
    assert list(got) == list(expected)
    for name, array in expected.items():
        if array.dtype == np.float32:
            np.testing.assert_allclose(got[name], array, rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(got[name], array)
    assert [name for name, kind in classify_initializers(loaded).items() if kind == "weight"] == weights


def test_an_older_opset() -> None:
    """Before the opset of most standard operators that stand for them."""
    model = files.logistic_regression([0, 1, 2])
    model.opset_import[1].version = 9
    expected, got = (onnxruntime_outputs(each, {"X": X}) for each in (model, burnish.load(model)))
    np.testing.assert_allclose(got["probabilities"], expected["probabilities"], rtol=1e-6)


def test_arithmetic_of_other_producers_prepares_the_input() -> None:
    """Only of a converter is it known that it writes fitted steps so; of others the place before all layers tells."""
    model = files.perceptron_regression()
    model.producer_name = "pytorch"
    kinds = classify_initializers(burnish.load(model))
    assert [name for name, kind in kinds.items() if kind == "weight"] == LAYERS
    assert kinds["Mu_Mulcst"] == kinds["Ad_Addcst"] == "buffer"


def test_the_share_of_a_softmax_is_the_softmax() -> None:
    """Else a loss would not find the scores behind it. Of other numbers it is a division."""
    model = files.logistic_regression([0, 1, 2])
    assert [node.op_type for node in burnish.load(model).graph][-1] == "Softmax"
    of_scores = files.logistic_regression([0, 1, 2])
    classifier = next(node for node in of_scores.graph.node if node.op_type == "LinearClassifier")
    classifier.attribute.remove(next(each for each in classifier.attribute if each.name == "post_transform"))
    loaded = burnish.load(of_scores)
    assert "Div" in [node.op_type for node in loaded.graph]
    expected, got = (onnxruntime_outputs(each, {"X": X}) for each in (of_scores, loaded))
    np.testing.assert_allclose(got["probabilities"], expected["probabilities"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "names", "numbers"),
    [
        (files.logistic_regression(["no", "yes"]), ["no", "yes"], None),
        (files.logistic_regression(["a", "b", "c"], zip_map=True), ["a", "b", "c"], None),
        (files.perceptron(["a", "b", "ü"]), ["a", "b", "ü"], None),
        (files.logistic_regression([3, 5]), ["3", "5"], [3, 5]),
        (files.perceptron([1, 2, 3], zip_map=True), ["1", "2", "3"], [1, 2, 3]),
        (files.perceptron([0, 1, 2]), None, None),
        (files.logistic_regression([0, 1, 2]), None, None),
        (files.linear_regression(), None, None),
    ],
)
def test_what_classes_are_called(model: onnx.ModelProto, names: list[str] | None, numbers: list[int] | None) -> None:
    metadata = burnish.load(model).metadata_props
    known = {key: json.loads(metadata[key]) for key in ("burnish.classes", "burnish.class_numbers") if key in metadata}
    expected = {"burnish.classes": names, "burnish.class_numbers": numbers}
    assert known == {key: value for key, value in expected.items() if value is not None}


def test_names_that_the_file_states_stay() -> None:
    model = files.logistic_regression(["no", "yes"])
    helper.set_model_props(model, {"burnish.classes": '["cat", "dog"]'})
    assert burnish.load(model).metadata_props["burnish.classes"] == '["cat", "dog"]'


def test_dictionaries_are_tensors_where_the_model_is_read() -> None:
    model = files.logistic_regression([0, 1, 2], zip_map=True)
    before = model.SerializeToString()
    loaded = burnish.load(model)
    assert model.SerializeToString() == before
    expected, got = (onnxruntime_outputs(each, {"X": X}) for each in (model, loaded))
    assert list(got) == ["output_label", "output_probability"]
    np.testing.assert_allclose(
        got["output_probability"], [list(row.values()) for row in expected["output_probability"]], rtol=1e-6
    )


@pytest.mark.parametrize("op_type", ["TreeEnsembleRegressor", "SVMRegressor", "SVMClassifier"])
def test_the_dtype_of_what_stays(op_type: str) -> None:
    """The standard's inference knows nothing of them; a cast behind one says what it is of."""
    index = 1 if op_type == "SVMClassifier" else 0
    outputs = ["label", "scores"][1 - index :]
    nodes = [files.node(op_type, ["X"], outputs), helper.make_node("Cast", ["scores"], ["y"], to=TensorProto.DOUBLE)]
    model = files.graph_of(nodes, [files.floats("X", None, 4)], [files.tensor("y", TensorProto.DOUBLE, None, None)])
    if index:
        model.graph.value_info.append(files.tensor("label", TensorProto.INT64, None))
    loaded = burnish.load(model)
    node = next(each for each in loaded.graph if each.op_type == op_type)
    assert node.outputs[index].dtype is not None
    assert node.outputs[index].dtype.name == "FLOAT"
