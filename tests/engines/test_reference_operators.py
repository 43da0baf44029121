"""The reference engine against stock ONNX Runtime: every operator that has a gradient, and the graph of that gradient.

The evaluator of the standard is an oracle only where it is right. Each sample of the operator tables runs on both, in float64
where ONNX Runtime has the kernels and in float32 else.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from burnish.engines.reference import ReferenceEngine
from burnish.graph import BURNISH_DOMAIN
from burnish.modes import bind_inference
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from oracles.gradient_harness import assert_close, cast_inputs, feeds_of, forward_graph, gradient_graph
from oracles.onnxruntime_outputs import NEWEST_RUNTIME, NO_KERNEL, RUNTIME, onnxruntime_outputs
from oracles.operator_cases import FIRST_OF_EACH, Case, cases_where, cotangents_of
from oracles.rewritten import rewritten

ROUNDING = {"float64": 1e-12, "float32": 5e-6}
# ONNX Runtime computes these in float64 from attributes that it rounds on the way.
FLOAT32_INSIDE = {"Shrink"}
Build = Callable[[Case, str], tuple[ir.Model, ir.Model]]


def forward(case: Case, dtype: str) -> tuple[ir.Model, ir.Model]:
    """The operator alone, as a file has it; and as ONNX Runtime predicts with it, which expands some operators naively."""
    models = []
    for bind in (lambda graph: None, bind_inference):
        graph, _, outputs = forward_graph(case.spec, case.sample, dtype)
        graph.outputs.extend(outputs)
        bind(graph)
        model = rewritten(lower_semantic_operators, ir.Model(graph, ir_version=10))
        graph.opset_imports.pop(BURNISH_DOMAIN, None)
        models.append(model)
    return models[0], models[1]


def backward(case: Case, dtype: str) -> tuple[ir.Model, ir.Model]:
    """The operator and its gradient, in standard operators."""
    model = gradient_graph(case.spec, case.sample, dtype).model
    return model, model


def feeds(case: Case, model: ir.Model, dtype: str) -> dict[str, np.ndarray]:
    arrays = feeds_of(case.sample, cast_inputs(case.sample, dtype), cotangents_of(case))
    return {
        value.name: arrays[value.name].astype(value.dtype.numpy()) for value in model.graph.inputs if value.name and value.dtype
    }


def comparable(case: Case) -> bool:
    """Not a TopK that gives its elements in any order, nor what ONNX Runtime refuses or an older one computes wrong."""
    attributes = case.sample.attributes
    match case.spec.op_type:
        case "LRN":
            return attributes["size"] % 2 == 1
        case "AveragePool" if attributes.get("ceil_mode") and attributes.get("count_include_pad"):
            return RUNTIME >= (1, 29)
        case "AffineGrid" | "Attention" | "DFT" | "STFT":
            return RUNTIME >= NEWEST_RUNTIME
    return attributes.get("sorted", 1) != 0


@cases_where(comparable, test=124, test_all=372)
def test_the_reference_engine_computes_what_onnxruntime_does(case: Case) -> None:
    compare(forward, case)


@cases_where(lambda case: comparable(case) and case in FIRST_OF_EACH.values(), test=41)
def test_a_gradient_is_what_onnxruntime_computes(case: Case) -> None:
    compare(backward, case)


@pytest.mark.slow
@cases_where(lambda case: comparable(case) and case not in FIRST_OF_EACH.values(), test_all=225)
def test_the_gradient_of_another_sample_is_what_onnxruntime_computes(case: Case) -> None:
    """Its operators are those of the tables, of which each runs by itself, with every attribute that a sample has."""
    compare(backward, case)


def compare(build: Build, case: Case) -> None:
    in_float64 = case.takes_float64 and case.spec.op_type not in FLOAT32_INSIDE
    for dtype in ("float64", "float32") if in_float64 else ("float32",):
        model, runnable = build(case, dtype)
        try:
            arrays = feeds(case, model, dtype)
            expected = onnxruntime_outputs(runnable, arrays)
            break
        except NO_KERNEL:
            if dtype == "float64":
                continue
            if RUNTIME < NEWEST_RUNTIME:
                pytest.skip(f"ONNX Runtime {onnxruntime.__version__} has no kernel for {case.spec.op_type}")
            raise
    actual = ReferenceEngine().run(model, arrays)
    tolerance = max(ROUNDING[dtype], case.spec.float64_tolerance if dtype == "float64" else case.spec.tolerance)
    assert len(actual) == len(expected)
    for name, array, other in zip(actual, actual.values(), expected.values(), strict=True):
        assert array.dtype == other.dtype, name
        if other.dtype.kind == "f":
            finite = np.isfinite(other)
            np.testing.assert_array_equal(array[~finite], other[~finite], err_msg=name)
            assert_close(np.where(finite, array, 0), np.where(finite, other, 0), tolerance, name)
        else:
            np.testing.assert_array_equal(array, other, err_msg=name)
