"""Files as skl2onnx writes them of fitted pipelines: operators of ``ai.onnx.ml``, and standard ones of which it makes layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

DOMAIN = "ai.onnx.ml"
FEATURES = 4
OFFSETS, SCALES = [0.5, -0.25, 0.0, 1.5], [2.0, 0.5, 1.25, 0.75]


def node(op_type: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> onnx.NodeProto:
    """A node of ``ai.onnx.ml`` that is called after its operator."""
    return helper.make_node(op_type, inputs, outputs, name=op_type, domain=DOMAIN, **attributes)


def graph_of(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: dict[str, np.ndarray] | None = None,
    opset: int = 22,
    version: int = 1,
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(array, name) for name, array in (initializers or {}).items()]
    imports = [helper.make_opsetid(DOMAIN, version), helper.make_opsetid("", opset)]
    graph = helper.make_graph(nodes, "pipeline", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=imports, ir_version=10, producer_name="skl2onnx")


def tensor(name: str, dtype: int, *shape: int | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def floats(name: str, *shape: int | None) -> onnx.ValueInfoProto:
    return tensor(name, TensorProto.FLOAT, *shape)


def scaler(x: str = "X", y: str = "scaled") -> onnx.NodeProto:
    return node("Scaler", [x], [y], offset=OFFSETS, scale=SCALES)


def coefficients(rows: int, seed: int = 0) -> tuple[list[float], list[float]]:
    """Of logistic regression: two rows are one and its negative, as skl2onnx writes two classes."""
    rng = np.random.default_rng(seed)
    matrix, intercepts = rng.normal(size=(rows, FEATURES)).astype(np.float32), rng.normal(size=rows).astype(np.float32)
    if rows == 2:
        matrix, intercepts = np.stack([-matrix[1], matrix[1]]), np.stack([-intercepts[1], intercepts[1]])
    return matrix.reshape(-1).tolist(), intercepts.tolist()


def logistic_regression(classes: Sequence[int] | Sequence[str], zip_map: bool = False) -> onnx.ModelProto:
    """StandardScaler and LogisticRegression, of two classes or more, by default without ZipMap."""
    matrix, intercepts = coefficients(len(classes))
    is_text = isinstance(classes[0], str)
    labels = {"classlabels_strings" if is_text else "classlabels_ints": list(classes)}
    binary = len(classes) == 2
    scores = "probabilities" if binary else "probability_tensor"
    nodes = [
        scaler(),
        node(
            "LinearClassifier",
            ["scaled"],
            ["label", scores],
            coefficients=matrix,
            intercepts=intercepts,
            multi_class=0 if binary else 1,
            post_transform="LOGISTIC" if binary else "SOFTMAX",
            **labels,
        ),
    ]
    if not binary:
        nodes.append(node("Normalizer", ["probability_tensor"], ["probabilities"], norm="L1"))
    label = tensor("label", TensorProto.STRING if is_text else TensorProto.INT64, None)
    model = graph_of(nodes, [floats("X", None, FEATURES)], [label, floats("probabilities", None, len(classes))])
    return with_zip_map(model, classes) if zip_map else model


def perceptron(classes: Sequence[int] | Sequence[str], zip_map: bool = False) -> onnx.ModelProto:
    """StandardScaler and MLPClassifier with one hidden layer."""
    rng = np.random.default_rng(1)
    binary = len(classes) == 2
    units = 1 if binary else len(classes)
    is_text = isinstance(classes[0], str)
    initializers = {
        "coefficient": rng.normal(size=(FEATURES, 8)).astype(np.float32),
        "intercepts": rng.normal(size=(1, 8)).astype(np.float32),
        "coefficient1": rng.normal(size=(8, units)).astype(np.float32),
        "intercepts1": rng.normal(size=(1, units)).astype(np.float32),
        "classes": np.asarray(classes, object if is_text else np.int32),
        "shape_tensor": np.array([-1]),
    }
    nodes = [
        scaler(),
        helper.make_node("Cast", ["scaled"], ["cast_input"], "Cast", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["cast_input", "coefficient"], ["mul_result"], "MatMul"),
        helper.make_node("Add", ["mul_result", "intercepts"], ["add_result"], "Add"),
        helper.make_node("Relu", ["add_result"], ["next_activations"], "Relu"),
        helper.make_node("MatMul", ["next_activations", "coefficient1"], ["mul_result1"], "MatMul1"),
        helper.make_node("Add", ["mul_result1", "intercepts1"], ["add_result1"], "Add1"),
    ]
    if binary:
        initializers["unity"] = np.ones(1, np.float32)
        nodes += [
            helper.make_node("Sigmoid", ["add_result1"], ["positive"], "Relu1"),
            helper.make_node("Sub", ["unity", "positive"], ["negative"], "Sub"),
            helper.make_node("Concat", ["negative", "positive"], ["probabilities"], "Concat", axis=1),
        ]
    else:
        nodes += [
            helper.make_node("Softmax", ["add_result1"], ["out_activations_result"], "Relu1"),
            helper.make_node("Identity", ["out_activations_result"], ["probabilities"], "Identity"),
        ]
    nodes += [
        helper.make_node("ArgMax", ["probabilities"], ["argmax_output"], "ArgMax", axis=1),
        node("ArrayFeatureExtractor", ["classes", "argmax_output"], ["array_feature_extractor_result"]),
        helper.make_node(
            "Reshape", ["array_feature_extractor_result", "shape_tensor"], ["label" if is_text else "reshaped"], "Reshape"
        ),
    ]
    if not is_text:
        nodes.append(helper.make_node("Cast", ["reshaped"], ["label"], "Cast1", to=TensorProto.INT64))
    label = tensor("label", TensorProto.STRING if is_text else TensorProto.INT64, None)
    outputs = [label, floats("probabilities", None, len(classes))]
    model = graph_of(nodes, [floats("X", None, FEATURES)], outputs, initializers, opset=21)
    return with_zip_map(model, classes) if zip_map else model


def linear_regression(targets: int = 1) -> onnx.ModelProto:
    """StandardScaler and LinearRegression."""
    matrix, intercepts = coefficients(3)
    count = {"targets": targets} if targets != 1 else {}
    regressor = node(
        "LinearRegressor",
        ["scaled"],
        ["variable"],
        coefficients=matrix[: FEATURES * targets],
        intercepts=intercepts[:targets],
        **count,
    )
    return graph_of([scaler(), regressor], [floats("X", None, FEATURES)], [floats("variable", None, targets)])


def perceptron_regression() -> onnx.ModelProto:
    """MinMaxScaler and MLPRegressor: the scaler is arithmetic."""
    rng = np.random.default_rng(2)
    initializers = {
        "Mu_Mulcst": np.asarray(SCALES, np.float32),
        "Ad_Addcst": np.asarray(OFFSETS, np.float32),
        "coefficient": rng.normal(size=(FEATURES, 8)).astype(np.float32),
        "intercepts": rng.normal(size=(1, 8)).astype(np.float32),
        "coefficient1": rng.normal(size=(8, 1)).astype(np.float32),
        "intercepts1": rng.normal(size=(1, 1)).astype(np.float32),
        "shape_tensor": np.array([-1, 1]),
    }
    nodes = [
        helper.make_node("Cast", ["X"], ["Ca_output0"], "Ca_Cast", to=TensorProto.FLOAT),
        helper.make_node("Mul", ["Ca_output0", "Mu_Mulcst"], ["Mu_C0"], "Mu_Mul"),
        helper.make_node("Add", ["Mu_C0", "Ad_Addcst"], ["scaled"], "Ad_Add"),
        helper.make_node("MatMul", ["scaled", "coefficient"], ["mul_result"], "MatMul"),
        helper.make_node("Add", ["mul_result", "intercepts"], ["add_result"], "Add"),
        helper.make_node("Tanh", ["add_result"], ["next_activations"], "Tanh"),
        helper.make_node("MatMul", ["next_activations", "coefficient1"], ["mul_result1"], "MatMul1"),
        helper.make_node("Add", ["mul_result1", "intercepts1"], ["add_result1"], "Add1"),
        helper.make_node("Reshape", ["add_result1", "shape_tensor"], ["variable"], "Reshape"),
    ]
    return graph_of(nodes, [floats("X", None, FEATURES)], [floats("variable", None, 1)], initializers, opset=21)


def of_columns() -> onnx.ModelProto:
    """A data frame of four columns of numbers and one of text: imputed, scaled and encoded, and a logistic regression."""
    matrix = np.random.default_rng(3).normal(size=(3, FEATURES + 3)).astype(np.float32)
    columns = ["a", "b", "c", "d"]
    nodes = [
        node("FeatureVectorizer", columns, ["joined"], inputdimensions=[1] * FEATURES),
        node("Imputer", ["joined"], ["imputed"], imputed_value_floats=OFFSETS, replaced_value_float=float("nan")),
        scaler("imputed"),
        node("OneHotEncoder", ["k"], ["encoded"], cats_strings=["blue", "green", "red"], zeros=1),
        helper.make_node("Reshape", ["encoded", "shape_tensor"], ["categories"], "Reshape"),
        helper.make_node("Concat", ["scaled", "categories"], ["transformed_column"], "Concat", axis=1),
        node(
            "LinearClassifier",
            ["transformed_column"],
            ["label", "probability_tensor"],
            coefficients=matrix.reshape(-1).tolist(),
            intercepts=[0.1, 0.2, 0.3],
            classlabels_strings=["setosa", "versi", "virgin"],
            multi_class=1,
            post_transform="SOFTMAX",
        ),
        node("Normalizer", ["probability_tensor"], ["probabilities"], norm="L1"),
    ]
    inputs = [*(floats(name, None, 1) for name in columns), tensor("k", TensorProto.STRING, None, 1)]
    outputs = [tensor("label", TensorProto.STRING, None), floats("probabilities", None, 3)]
    return graph_of(nodes, inputs, outputs, {"shape_tensor": np.array([-1, 3])})


def with_zip_map(model: onnx.ModelProto, classes: Sequence[int] | Sequence[str]) -> onnx.ModelProto:
    """The same with a dictionary for each sample in place of the probabilities, as skl2onnx writes by default."""
    is_text = isinstance(classes[0], str)
    graph = model.graph
    for value, name in zip(graph.output, ("output_label", "output_probability"), strict=True):
        if value.name == "label":
            passed = "Identity" if is_text else "Cast"
            attributes = {} if is_text else {"to": TensorProto.INT64}
            graph.node.append(helper.make_node(passed, ["label"], [name], f"{passed}_label", **attributes))
        value.name = name
    labels = {"classlabels_strings" if is_text else "classlabels_int64s": list(classes)}
    graph.node.append(node("ZipMap", ["probabilities"], ["output_probability"], **labels))
    key = TensorProto.STRING if is_text else TensorProto.INT64
    entry = helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    graph.output[1].type.CopyFrom(helper.make_sequence_type_proto(entry))
    return model
