"""Operators of ONNX Runtime as standard ones: its kernels' numbers, and gradients that differences confirm."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import burnish
from oracles.central_differences import TOLERANCE, central_differences
from oracles.combinations import diagonal, named, spread
from oracles.gradient_harness import Evaluator, assert_close
from oracles.onnxruntime_outputs import onnxruntime_outputs
from oracles.runtime_operators import DOMAIN, Case, cases

CASES = cases()
ROUNDING = 2e-6


def of_defined_rows(case: Case, array: np.ndarray) -> np.ndarray:
    return array if case.rows is None else array[case.rows]


@diagonal(
    ("case", named(CASES, str)),
    ("symbolic", named([pytest.param(False, marks=pytest.mark.slow), True], ["static", "batch"])),
    test=21,
)
def test_the_same_as_the_kernel(case: Case, symbolic: bool) -> None:
    file = case.model(symbolic=symbolic)
    loaded = burnish.load(file)
    assert {node.domain for node in loaded.graph.all_nodes()} == {""}
    assert DOMAIN not in loaded.opset_imports
    feeds = case.feeds("float32")
    expected, actual = onnxruntime_outputs(file, feeds), onnxruntime_outputs(loaded, feeds)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        assert actual[name].shape == array.shape
        if array.dtype.kind != "f":
            np.testing.assert_array_equal(actual[name], array, err_msg=name)
            continue
        one, other = of_defined_rows(case, actual[name]), of_defined_rows(case, array)
        assert_close(one, other, ROUNDING, name)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4], ids=["int4", "uint4"])
def test_rows_of_a_table_of_four_bits(dtype: type) -> None:
    """As ONNX Runtime's quantizer writes tables since opset 21: not packed into bytes."""
    rng = np.random.default_rng(0)
    table, zeros = (rng.integers(0, 8, shape).astype(dtype) for shape in ((9, 32), (9, 2)))
    inputs = [table, rng.integers(0, 9, (2, 5)), rng.uniform(0.05, 0.2, (9, 2)), zeros]
    sizes = {"bits": 4, "block_size": 16, "gather_axis": 0, "quantize_axis": 1}
    for operands in (inputs[:3], inputs):
        case = Case("GatherBlockQuantized", "wide", operands, sizes, held=(0, 2, 3), batched=(1,))
        file, feeds = case.model(opset=21), case.feeds("float32")
        actual, expected = (onnxruntime_outputs(model, feeds)["output0"] for model in (burnish.load(file), file))
        assert_close(actual, expected, ROUNDING, "rows")


@pytest.mark.slow
def test_the_product_or_the_last_node_has_the_name() -> None:
    """A layer without a name of its own is called after it."""
    for case in CASES:
        if case.op_type in ("MatMulNBits", "MatMulBnb4", "BiasGelu"):
            graph = burnish.load(case.model()).graph
            (named,) = [node for node in graph if node.name == "node"]
            assert named.op_type == "MatMul" if case.op_type != "BiasGelu" else named.outputs[0].is_graph_output()


@spread("case", [case for case in CASES if case.differentiated()], test=11, ids=str, test_all=30)
def test_gradients_against_differences(case: Case) -> None:
    wrt = case.differentiated()
    rng = np.random.default_rng(3)
    model = burnish.grad(case.model("float64", symbolic=True), wrt, of="output0")
    evaluate = Evaluator(model)
    feeds = case.feeds("float64")
    names = {value.name for value in model.graph.inputs}
    feeds = {name: array for name, array in feeds.items() if name in names}
    forward = Evaluator(burnish.load(case.model("float64", symbolic=True)))
    cotangent = rng.normal(size=forward(feeds)["output0"].shape)
    if case.rows is not None:
        cotangent[~case.rows] = 0
    gradients = evaluate(feeds | {"cotangent:output0": cotangent})
    arrays = [feeds[name] for name in wrt]

    def value(moved: list[np.ndarray | None]) -> float:
        return float((forward(feeds | dict(zip(wrt, moved, strict=True)))["output0"] * cotangent).sum())

    for index, name in enumerate(wrt):
        assert_close(gradients[f"grad:{name}"], central_differences(value, arrays, index), TOLERANCE, name)
