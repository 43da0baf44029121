"""What prepares data, as standard operators: the same numbers as ONNX Runtime's own kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import burnish
from burnish.errors import ModelError
from oracles.classical_files import DOMAIN, floats, graph_of, node, tensor
from oracles.onnxruntime_outputs import onnxruntime_outputs

NAN, INFINITY = float("nan"), float("inf")
X = np.array([[1, -2, 3], [0, 0, 0], [-1, -2, -3], [1e-3, 0, 5], [NAN, 2, INFINITY]], np.float32)
FINITE = X[:4]
WHOLE = np.array([[1, -2, 3], [0, 0, 0], [5, 1, 2]], np.int64)


def of_one_node(op_type: str, x: np.ndarray, **attributes: Any) -> onnx.ModelProto:
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    inputs = [tensor("x", kind, None, *x.shape[1:])] if x.ndim > 1 else [tensor("x", kind, *x.shape)]
    output = helper.make_tensor_value_info("y", kind if op_type == "Imputer" else TensorProto.FLOAT, None)
    return graph_of([node(op_type, ["x"], ["y"], **attributes)], inputs, [output])


def check(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> None:
    loaded = burnish.load(model)
    assert not any(each.domain == DOMAIN for each in loaded.graph)
    assert DOMAIN not in loaded.opset_imports
    expected, got = (onnxruntime_outputs(each, inputs)["y"] for each in (model, loaded))
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("op_type", "x", "attributes"),
    [
        ("Scaler", FINITE, {"offset": [0.5, 1.0, 2.0], "scale": [2.0, 0.3, 1 / 3]}),
        ("Scaler", FINITE, {"offset": [0.5], "scale": [2.0]}),
        ("Scaler", FINITE[0], {"offset": [0.5, 1.0, 2.0], "scale": [2.0, 0.3, 1 / 3]}),
        ("Scaler", WHOLE, {"offset": [0.5, 1.0, 2.0], "scale": [2.0, 0.3, 1 / 3]}),
        ("Scaler", WHOLE.astype(np.int32), {"offset": [0.5], "scale": [2.0]}),
        ("Normalizer", FINITE, {"norm": "L1"}),
        ("Normalizer", FINITE, {"norm": "L2"}),
        ("Normalizer", FINITE, {"norm": "MAX"}),
        ("Normalizer", FINITE, {}),
        ("Normalizer", FINITE[0], {"norm": "L2"}),
        ("Normalizer", FINITE.astype(np.float64), {"norm": "L1"}),
        ("Normalizer", WHOLE, {"norm": "L2"}),
        ("Imputer", X, {"imputed_value_floats": [7.0, 8.0, 9.0], "replaced_value_float": NAN}),
        ("Imputer", X, {"imputed_value_floats": [7.0, 8.0, 9.0], "replaced_value_float": INFINITY}),
        ("Imputer", X, {"imputed_value_floats": [7.0], "replaced_value_float": -2.0}),
        ("Imputer", X, {"imputed_value_floats": [7.0, 8.0, 9.0]}),
        ("Imputer", X[0], {"imputed_value_floats": [7.0, 8.0, 9.0], "replaced_value_float": 3.0}),
        ("Imputer", WHOLE, {"imputed_value_int64s": [7, 8, 9], "replaced_value_int64": -2}),
        ("Imputer", WHOLE, {"imputed_value_int64s": [7]}),
        ("Binarizer", FINITE, {}),
        ("Binarizer", FINITE, {"threshold": 1e-3}),
        ("OneHotEncoder", WHOLE, {"cats_int64s": [0, 1, 5], "zeros": 1}),
        ("OneHotEncoder", WHOLE[0], {"cats_int64s": [3]}),
        ("OneHotEncoder", np.array([[0.5, 1.9, -0.5]], np.float32), {"cats_int64s": [0, 1, 5]}),
    ],
)
def test_the_same_as_the_kernel(op_type: str, x: np.ndarray, attributes: dict[str, Any]) -> None:
    check(of_one_node(op_type, x, **attributes), {"x": x})


def test_doubles_are_scaled_before_they_are_rounded() -> None:
    x = np.array([[1e8 + 1, 1e8 - 2]], np.float64)
    model = of_one_node("Scaler", x, offset=[1e8, 1e8], scale=[0.5, 0.25])
    check(model, {"x": x})
    np.testing.assert_array_equal(onnxruntime_outputs(burnish.load(model), {"x": x})["y"], [[0.5, -0.5]])


@pytest.mark.parametrize("dtypes", [(TensorProto.FLOAT, TensorProto.FLOAT), (TensorProto.INT64, TensorProto.FLOAT)])
def test_columns_beside_each_other(dtypes: tuple[int, int]) -> None:
    inputs = [tensor("a", dtypes[0], None, 1), tensor("b", dtypes[1], None, 2)]
    vectorizer = node("FeatureVectorizer", ["a", "b"], ["y"], inputdimensions=[1, 2])
    a = np.arange(3).reshape(3, 1).astype(helper.tensor_dtype_to_np_dtype(dtypes[0]))
    if dtypes[0] != dtypes[1]:
        # ONNX Runtime's kernel takes inputs of one dtype.
        got = onnxruntime_outputs(
            burnish.load(graph_of([vectorizer], inputs, [floats("y", None, 3)])), {"a": a, "b": FINITE[:3, :2]}
        )
        np.testing.assert_array_equal(got["y"], np.hstack([a, FINITE[:3, :2]]))
        return
    check(graph_of([vectorizer], inputs, [floats("y", None, 3)]), {"a": a, "b": FINITE[:3, :2]})


@pytest.mark.parametrize("x", [FINITE, FINITE[0], FINITE[None]])
@pytest.mark.parametrize("positions", [[0, 2], [[2], [0]], 1])
def test_columns_by_index(x: np.ndarray, positions: Any) -> None:
    extractor = node("ArrayFeatureExtractor", ["x", "positions"], ["y"])
    initializers = {"positions": np.asarray(positions, np.int64)}
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    check(graph_of([extractor], [floats("x", *x.shape)], [output], initializers), {"x": x})


@pytest.mark.parametrize(
    ("op_type", "x", "attributes"),
    [
        # Runtimes differ in what features are where there are more axes.
        ("Imputer", FINITE[None], {"imputed_value_floats": [7.0, 8.0, 9.0]}),
        ("Imputer", FINITE, {"imputed_value_floats": [7.0, 8.0]}),
        # A category that is not known is an error, which no standard operator raises.
        ("OneHotEncoder", WHOLE, {"cats_int64s": [-2, 0, 1, 2, 3, 5], "zeros": 0}),
        ("LabelEncoder", WHOLE, {"keys_int64s": [0, 1], "values_floats": [0.5, 1.5], "default_float": -1.0}),
    ],
)
def test_what_no_standard_operator_says_stays(op_type: str, x: np.ndarray, attributes: dict[str, Any]) -> None:
    model = of_one_node(op_type, x, **attributes)
    model.opset_import[0].version = 2
    loaded = burnish.load(model)
    assert [each.op_type for each in loaded.graph] == [op_type]
    expected, got = (onnxruntime_outputs(each, {"x": x})["y"] for each in (model, loaded))
    np.testing.assert_array_equal(got, expected)


def test_sizes_of_columns_that_are_not_those_of_the_inputs() -> None:
    """ONNX Runtime cuts off and pads."""
    vectorizer = node("FeatureVectorizer", ["a"], ["y"], inputdimensions=[2])
    loaded = burnish.load(graph_of([vectorizer], [floats("a", None, 3)], [floats("y", None, 2)]))
    assert [each.op_type for each in loaded.graph] == ["FeatureVectorizer"]
    np.testing.assert_array_equal(onnxruntime_outputs(loaded, {"a": FINITE})["y"], FINITE[:, :2])


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"offset": [1.0, 2.0], "scale": [1.0, 2.0]}, "'Scaler' .* has 2 offsets and 2 scales for 3 features: it takes one"),
        ({"offset": [1.0], "scale": [1.0, 2.0, 3.0]}, "has 1 offsets and 3 scales for 3 features"),
        ({"scale": [1.0, 2.0, 3.0]}, "has 0 offsets and 3 scales"),
    ],
)
def test_a_scaler_that_does_not_fit(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        burnish.load(of_one_node("Scaler", FINITE, **attributes))


@pytest.mark.parametrize("norm", ["L1", "L2", "MAX"])
def test_rows_of_zeros_have_finite_gradients(norm: str) -> None:
    x = np.array([[0.0, 0.0], [3.0, -4.0]], np.float32)
    gradient = burnish.grad(of_one_node("Normalizer", x, norm=norm), wrt=["x"])
    got = onnxruntime_outputs(gradient, {"x": x, "cotangent:y": np.array([[1.0, 2.0], [1.0, 2.0]], np.float32)})["grad:x"]
    np.testing.assert_array_equal(got[0], [1, 2])
    jacobian = {
        "L1": np.array([[4, 3], [4, 3]]) / 49,
        "L2": np.array([[16, 12], [12, 9]]) / 125,
        "MAX": np.array([[0, 0], [4 / 9, 1 / 3]]),
    }[norm]
    np.testing.assert_allclose(got[1], np.array([1.0, 2.0]) @ jacobian, rtol=1e-5, atol=1e-7)
