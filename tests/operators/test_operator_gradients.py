"""Generic gradient tests over every operator table in ``tests/specs``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import onnx_ir as ir
import pytest

from oracles.central_differences import TOLERANCE, directional_problem
from oracles.gradient_harness import (
    NEWEST_OPSET,
    GradientGraph,
    as_stored,
    assert_close,
    cast_inputs,
    check_standard,
    gradient_graph,
    numerical_gradients,
    run_gradients,
    weighted_output,
)
from oracles.operator_cases import FIRST_OF_EACH, Case, cases_where, cotangents_of, in_turn, specs
from oracles.torch_gradients import torch_gradients
from specs.operator_spec import ErrorInput, OperatorSpec, Sample

FLOAT16_TOLERANCE = 2e-2


@cache
def static_graph(case: Case, dtype: str) -> GradientGraph:
    """The gradient graph with static shapes, which several tests look at and none changes."""
    return gradient_graph(case.spec, case.sample, dtype)


@cache
def results(case: Case, dtype: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Outputs and gradients with static shapes."""
    return run_gradients(static_graph(case, dtype), case.sample, dtype, cotangents_of(case))


def rounded(case: Case, dtype: str) -> Sample:
    """The sample with inputs that ``dtype`` holds exactly."""
    inputs = [None if x is None else (x.astype(dtype).astype(x.dtype) if x.dtype.kind == "f" else x) for x in case.sample.inputs]
    return replace(case.sample, inputs=inputs)


def same_up_to_rounding(case: Case) -> float:
    """What two graphs of the same mathematics may differ by in the widest dtype."""
    return 1e-12 if case.widest == "float64" else case.spec.tolerance


def torch_function(case: Case) -> Callable | None:
    return case.sample.torch or case.spec.torch


def is_measured(case: Case) -> bool:
    """Return True if differences say something: in float64, away from kinks."""
    return case.sample.smooth and case.widest == "float64"


def against_torch(case: Case, dtype: str, tolerance: float) -> None:
    """Compare with PyTorch in float64 at the very point that ``dtype`` rounds the inputs to."""
    own = case.sample.torch_attributes
    attributes = as_stored(case.sample.attributes if own is None else own)
    expected_outputs, expected_gradients = torch_gradients(
        torch_function(case), rounded(case, dtype).inputs, attributes, cotangents_of(case), case.wrt
    )
    outputs, gradients = results(case, dtype)
    for index in cotangents_of(case):
        assert_close(outputs[index], expected_outputs[index], tolerance, f"{dtype}: output {index}")
    for index, actual, expected in zip(case.wrt, gradients, expected_gradients, strict=True):
        assert_close(actual, expected, tolerance, f"{dtype}: gradient of input {index}")


@pytest.mark.slow
@cases_where(lambda case: torch_function(case) is None, test_all=24)
def test_matches_central_differences(case: Case) -> None:
    assert is_measured(case), "PyTorch is the only oracle here: give a torch function"
    expected = numerical_gradients(case.spec, case.sample, cotangents_of(case), case.wrt)
    for index, actual, reference in zip(case.wrt, results(case, "float64")[1], expected, strict=True):
        assert_close(actual, reference, TOLERANCE, f"gradient of input {index}")


@pytest.mark.campaign
@cases_where(lambda case: torch_function(case) is not None and is_measured(case))
def test_matches_central_differences_as_it_does_torch(case: Case) -> None:
    """A check of the oracle more than of the gradient: two that are independent say the same, along random directions."""
    total, inputs = weighted_output(case.spec, case.sample, cotangents_of(case), case.wrt), cast_inputs(case.sample, "float64")
    for index, gradient in zip(case.wrt, results(case, "float64")[1], strict=True):
        assert directional_problem(total, inputs, index, gradient, np.random.default_rng(5)) == "", f"gradient of input {index}"


@cases_where(lambda case: torch_function(case) is not None)
def test_matches_torch(case: Case) -> None:
    against_torch(case, case.widest, case.widest_tolerance)
    if "float32" in in_turn(case, case.spec.dtypes):
        against_torch(case, "float32", case.spec.tolerance)


@pytest.mark.slow
@cases_where(lambda case: torch_function(case) is not None and "float32" in case.spec.dtypes, test_all=250)
def test_matches_torch_in_float32(case: Case) -> None:
    against_torch(case, "float32", case.spec.tolerance)


@cases_where(lambda case: torch_function(case) is None, test=12)
def test_float32_matches_float64(case: Case) -> None:
    sample = rounded(case, "float32")
    _, expected = run_gradients(gradient_graph(case.spec, sample, "float64"), sample, "float64", cotangents_of(case))
    for index, single, double in zip(case.wrt, results(case, "float32")[1], expected, strict=True):
        assert_close(single, double, case.spec.tolerance, f"gradient of input {index}")


@cases_where(lambda case: "float16" in case.spec.dtypes, test=40)
def test_half_precision_stays_half(case: Case) -> None:
    sample = rounded(case, "float16")
    graph = gradient_graph(case.spec, sample, "float16")
    check_standard(graph)
    wide = [output for node in graph.model.graph for output in node.outputs if output.dtype == ir.DataType.FLOAT]
    assert all(output.shape is not None and len(output.shape) == 0 for output in wide), f"upcast to float32: {wide}"
    _, expected = run_gradients(gradient_graph(case.spec, sample, "float64"), sample, "float64", cotangents_of(case))
    _, actual = run_gradients(graph, sample, "float16", cotangents_of(case))
    for index, half, double in zip(case.wrt, actual, expected, strict=True):
        assert_close(half, double, FLOAT16_TOLERANCE, f"gradient of input {index}")


def symbolic(case: Case) -> list[str]:
    return [shapes for shapes in case.spec.shapes if shapes != "static"]


@cases_where(lambda case: True, test=125, test_all=375)
def test_standard_operators_under_some_shape_knowledge(case: Case) -> None:
    graph = static_graph(case, case.widest)
    check_standard(graph)
    assert not graph.dead, f"static shapes: nothing reads {graph.dead}"
    check_shape_knowledge(case, in_turn(case, symbolic(case)))


@pytest.mark.campaign
@cases_where(lambda case: True)
def test_standard_operators_under_every_other_shape_knowledge(case: Case) -> None:
    done = in_turn(case, symbolic(case))
    check_shape_knowledge(case, [shapes for shapes in symbolic(case) if shapes not in done])


def check_shape_knowledge(case: Case, knowledge: list[str]) -> None:
    expected = results(case, case.widest)[1] if knowledge else []
    for shapes in knowledge:
        graph = gradient_graph(case.spec, case.sample, case.widest, shapes)
        check_standard(graph)
        assert not graph.dead, f"{shapes} shapes: nothing reads {graph.dead}"
        _, actual = run_gradients(graph, case.sample, case.widest, cotangents_of(case))
        for index, one, other in zip(case.wrt, actual, expected, strict=True):
            assert_close(one, other, same_up_to_rounding(case), f"{shapes} shapes: gradient of input {index}")


def check_newest_opset(case: Case) -> None:
    if not case.sample.newest_opset:
        return
    newest = replace(case.sample, opset=max(NEWEST_OPSET, case.sample.opset))
    graph = gradient_graph(case.spec, newest, "float32")
    check_standard(graph)
    _, actual = run_gradients(graph, newest, "float32", cotangents_of(case))
    for index, new, old in zip(case.wrt, actual, results(case, "float32")[1], strict=True):
        assert_close(new, old, case.spec.tolerance, f"gradient of input {index}")


# Rules go by the opset, if at all, in the same way for every sample of an operator.
@cases_where(lambda case: case in FIRST_OF_EACH.values(), test=61)
def test_newest_opset(case: Case) -> None:
    check_newest_opset(case)


@pytest.mark.campaign
@cases_where(lambda case: case not in FIRST_OF_EACH.values())
def test_newest_opset_in_other_samples(case: Case) -> None:
    check_newest_opset(case)


def alone(case: Case) -> list[tuple[int, int]]:
    return list(enumerate(case.wrt))


@cases_where(lambda case: len(case.wrt) > 1, test=49, test_all=147)
def test_some_gradient_alone(case: Case) -> None:
    check_gradients_alone(case, in_turn(case, alone(case)))


@pytest.mark.slow
@cases_where(lambda case: len(case.wrt) > 1 and case not in FIRST_OF_EACH.values(), test_all=100)
def test_every_other_gradient_alone(case: Case) -> None:
    done = in_turn(case, alone(case))
    check_gradients_alone(case, [each for each in alone(case) if each not in done])


def check_gradients_alone(case: Case, chosen: list[tuple[int, int]]) -> None:
    full = static_graph(case, case.widest)
    for position, index in chosen:
        graph = gradient_graph(case.spec, case.sample, case.widest, wrt=[index])
        assert not graph.dead, f"gradient of input {index} alone: nothing reads {graph.dead}"
        assert len(graph.emitted) <= len(full.emitted)
        _, (actual,) = run_gradients(graph, case.sample, case.widest, cotangents_of(case), wrt=[index])
        assert_close(
            actual, results(case, case.widest)[1][position], same_up_to_rounding(case), f"gradient of input {index} alone"
        )


@cases_where(lambda case: case.sample.outputs > 1, test=12, test_all=36)
def test_absent_cotangents(case: Case) -> None:
    """Gradients are linear in the cotangents: those of each output alone add up to those of all."""
    total = [np.zeros_like(gradient) for gradient in results(case, case.widest)[1]]
    for output, cotangent in cotangents_of(case).items():
        graph = gradient_graph(case.spec, case.sample, case.widest, cotangents=[output])
        assert not graph.dead, f"cotangent of output {output} alone: nothing reads {graph.dead}"
        _, parts = run_gradients(graph, case.sample, case.widest, {output: cotangent})
        total = [whole + part for whole, part in zip(total, parts, strict=True)]
    for index, actual, expected in zip(case.wrt, total, results(case, case.widest)[1], strict=True):
        assert_close(actual, expected, same_up_to_rounding(case), f"gradient of input {index}")


@cases_where(lambda case: case.sample.most_nodes is not None)
def test_emits_few_nodes(case: Case) -> None:
    emitted = static_graph(case, "float32").emitted
    assert len(emitted) <= (case.sample.most_nodes or 0), emitted


ERRORS = [(spec, error) for spec in specs() for error in spec.error_inputs]


@pytest.mark.parametrize(("spec", "error"), ERRORS, ids=[f"{spec.op_type}-{error.sample.name}" for spec, error in ERRORS])
def test_refused_with_a_named_error(spec: OperatorSpec, error: ErrorInput) -> None:
    with pytest.raises(error.error, match=error.match):
        gradient_graph(spec, error.sample, "float32", error.shapes)
