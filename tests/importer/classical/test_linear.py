"""Linear models whose coefficients are attributes: the scores and labels of ONNX Runtime's kernels, and weights that train."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import burnish
from burnish.errors import ModelError, UnsupportedOperatorError
from burnish.importer import classify_initializers
from oracles.classical_files import DOMAIN, floats, graph_of, node, tensor
from oracles.onnxruntime_outputs import onnxruntime_outputs

TRANSFORMS = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT"]
X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
NUMBERS, TEXTS = [5, 7, 9], ["one", "two", "drei ü"]


def rows(count: int, dtype: type = np.float32) -> np.ndarray:
    """Coefficients; PROBIT wants scores between 0 and 1."""
    return (np.random.default_rng(count).normal(size=(count, 3)) * 0.1).astype(dtype)


def classifier(
    matrix: np.ndarray, labels: list[Any], intercepts: np.ndarray | None = None, kind: int = TensorProto.FLOAT, **attributes: Any
) -> onnx.ModelProto:
    count = len(matrix)
    intercepts = np.linspace(0.3, 0.6, count) if intercepts is None else intercepts
    is_text = bool(labels) and isinstance(labels[0], str)
    named = {"classlabels_strings" if is_text else "classlabels_ints": labels} if labels else {}
    linear = node(
        "LinearClassifier",
        ["x"],
        ["label", "scores"],
        coefficients=matrix.reshape(-1).tolist(),
        **({"intercepts": intercepts.tolist()} if intercepts.size else {}),
        **named,
        **attributes,
    )
    label = tensor("label", TensorProto.STRING if is_text else TensorProto.INT64, None)
    return graph_of([linear], [tensor("x", kind, None, 3)], [label, helper.make_tensor_value_info("scores", 1, None)])


def regressor(matrix: np.ndarray, intercepts: list[float] | None, **attributes: Any) -> onnx.ModelProto:
    given = {} if intercepts is None else {"intercepts": intercepts}
    linear = node("LinearRegressor", ["x"], ["scores"], coefficients=matrix.reshape(-1).tolist(), **given, **attributes)
    return graph_of([linear], [floats("x", None, 3)], [floats("scores", None, len(matrix))])


def check(model: onnx.ModelProto, x: np.ndarray = X) -> dict[str, tuple[int, ...]]:
    """Compare with the kernel; returns the shapes of the weights."""
    loaded = burnish.load(model)
    assert not any(each.domain == DOMAIN for each in loaded.graph)
    expected, got = (onnxruntime_outputs(each, {"x": x}) for each in (model, loaded))
    assert list(got) == list(expected)
    if "label" in got:
        np.testing.assert_array_equal(got["label"], expected["label"])
    assert got["scores"].dtype == np.float32
    np.testing.assert_allclose(got["scores"], expected["scores"], rtol=1e-6, atol=1e-6)
    weights = [name for name, kind in classify_initializers(loaded).items() if kind == "weight"]
    return {name: tuple(loaded.graph.initializers[name].shape.numpy()) for name in weights}


CASES = [(1, []), (2, NUMBERS[:2]), (2, TEXTS), (3, NUMBERS), (3, TEXTS), (3, [0, 1, 2])]
BINARY = [(1, NUMBERS[:2]), (1, TEXTS[:2])]


@pytest.mark.parametrize(
    ("count", "labels", "transform"),
    [
        *((count, labels, transform) for count, labels in CASES for transform in TRANSFORMS),
        *((count, labels, transform) for count, labels in BINARY for transform in TRANSFORMS if transform != "PROBIT"),
    ],
)
def test_classes(count: int, labels: list[Any], transform: str) -> None:
    shapes = check(classifier(rows(count), labels, post_transform=transform))
    assert shapes == {"LinearClassifier.coefficients": (count, 3), "LinearClassifier.intercepts": (count,)}


def test_probit_of_one_row_for_two_classes_is_refused() -> None:
    """ONNX Runtime reads past the scores there."""
    with pytest.raises(
        UnsupportedOperatorError, match=r"'LinearClassifier' .* is PROBIT of one row .*: export the model with a row"
    ):
        burnish.load(classifier(rows(1), NUMBERS[:2], post_transform="PROBIT"))


def test_two_rows_that_are_one_and_its_negative_stay_that() -> None:
    """The row of the second class is the weight: probabilities go on to sum to 1 while it trains."""
    row, intercept = rows(1)[0], np.float32(0.3)
    model = classifier(np.stack([-row, row]), NUMBERS[:2], np.array([-intercept, intercept]), post_transform="LOGISTIC")
    assert check(model) == {"LinearClassifier.coefficients": (1, 3), "LinearClassifier.intercepts": (1,)}
    loaded = burnish.load(model)
    np.testing.assert_array_equal(loaded.graph.initializers["LinearClassifier.coefficients"].const_value.numpy(), [row])
    # On the border, the first class wins.
    zeros = classifier(np.zeros((2, 3)), NUMBERS[:2], np.zeros(2), post_transform="LOGISTIC")
    assert onnxruntime_outputs(burnish.load(zeros), {"x": X})["label"].tolist() == [5] * len(X)
    check(zeros)


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX"])
def test_two_rows_of_scores_that_are_no_probabilities_each_stay_two(transform: str) -> None:
    row = rows(1)[0]
    model = classifier(np.stack([-row, row]), NUMBERS[:2], np.zeros(2), post_transform=transform)
    assert check(model)["LinearClassifier.coefficients"] == (2, 3)


def test_scores_of_zero_have_no_part_in_softmax_zero() -> None:
    x = np.array([[0, 1e-8, 2], [1e-7, -1e-7, 1], [2e-7, -2e-7, -3]], np.float32)
    check(classifier(np.eye(3), NUMBERS, np.zeros(3), post_transform="SOFTMAX_ZERO"), x)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.int32])
def test_other_numbers_are_read_as_float32(dtype: type) -> None:
    x = (X * 3).astype(dtype)
    check(classifier(rows(3), NUMBERS, kind=helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), post_transform="SOFTMAX"), x)


def test_one_sample_without_an_axis() -> None:
    model = classifier(rows(3), NUMBERS, post_transform="SOFTMAX")
    model.graph.input[0].CopyFrom(floats("x", 3))
    check(model, X[0])


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("targets", "intercepts"), [(1, [0.3]), (1, None), (2, [0.4, 0.6])])
def test_targets(targets: int, intercepts: list[float] | None, transform: str) -> None:
    x = np.abs(X) if transform == "PROBIT" and intercepts is None else X
    matrix = np.abs(rows(targets)) if transform == "PROBIT" and intercepts is None else rows(targets)
    shapes = check(regressor(matrix, intercepts, targets=targets, post_transform=transform), x)
    assert shapes.pop("LinearRegressor.coefficients") == (targets, 3)
    assert shapes == ({} if intercepts is None else {"LinearRegressor.intercepts": (targets,)})


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (classifier(rows(3), NUMBERS[:2]), ModelError, "'LinearClassifier' .* has 3 intercepts and 2 class labels"),
        (classifier(rows(1), NUMBERS), ModelError, "has 1 intercepts and 3 class labels"),
        (classifier(rows(2)[:, :2], NUMBERS[:2]), ModelError, "reads 3 features, and has coefficients for 2"),
        (classifier(rows(2).reshape(3, 2), NUMBERS[:2], np.zeros(4)), ModelError, "has 4 intercepts and 2 class labels"),
        (classifier(rows(2), NUMBERS, np.zeros(0)), ModelError, "has no intercepts, which tell how many classes"),
        (classifier(rows(3)[:, :1], NUMBERS, np.zeros(2)), ModelError, "has 3 coefficients, which do not make 2 rows"),
        (classifier(rows(2), NUMBERS, post_transform="CAUCHIT"), UnsupportedOperatorError, "post_transform 'CAUCHIT', which the"),
        (regressor(rows(2), [0.1], targets=2), ModelError, "'LinearRegressor' .* has 2 targets and 1 intercepts"),
        (regressor(rows(1), None, targets=0), ModelError, "has 0 targets"),
    ],
)
def test_a_model_that_does_not_fit_together(model: onnx.ModelProto, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        burnish.load(model)


def test_a_label_that_nothing_reads_is_not_computed() -> None:
    model = classifier(rows(3), NUMBERS, post_transform="SOFTMAX")
    del model.graph.output[0]
    assert {each.op_type for each in burnish.load(model).graph} == {"Gemm", "Softmax"}
