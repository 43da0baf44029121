"""Random graphs of the operator tables, with branches and loops: gradients against differences in float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings

import burnish
from burnish import engines
from burnish.errors import EngineError
from burnish.targets import TARGETS, check_allowed
from oracles.model_differences import Feeds, Function, evaluators, gradient_problem, quietly
from oracles.random_graphs import RandomGraph, random_graphs

CALM = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
quick = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=CALM)
long = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=CALM)
AGREEMENT = {"torch": 1e-9, "onnxruntime": 2e-7}
"""What engines may differ by in float64; ONNX Runtime takes functions from the standard, whose constants are of float32."""


def forward_function(model: ir.Model, feeds: Feeds, of: str) -> tuple[Function, np.ndarray]:
    """What computes a model in float64, and the output that counts: ONNX Runtime where it agrees with the reference engine."""
    reference = engines.get("reference").load(model)
    expected = quietly(reference, feeds)[of]
    try:
        session = next(evaluators(ir.to_proto(model)))
        if np.allclose(quietly(session, feeds)[of], expected, 1e-11, 1e-11, equal_nan=True):
            return session, expected
    except Exception:  # it has no kernels for float64; its errors share no base class
        pass
    return reference, expected


def problem_of(graph: RandomGraph) -> str:
    """What is wrong with the gradients of a graph, on the reference engine and for every size of the batch; nothing if right."""
    gradients = burnish.grad(graph.model, graph.wrt, graph.of)
    check_allowed(gradients, TARGETS["onnxruntime"])
    onnx.checker.check_model(ir.to_proto(gradients), full_check=True)
    loaded = engines.get("reference").load(gradients)
    model = graph.with_weights_as_inputs
    for batch in graph.batches:
        feeds = {**batch, **graph.weights}
        function, expected = forward_function(model, feeds, graph.of)
        cotangent = cotangent_of(expected)
        results = quietly(loaded, {**batch, f"cotangent:{graph.of}": cotangent})
        problem = problem_beside(function, feeds, graph.of, cotangent, {name: results[f"grad:{name}"] for name in graph.wrt})
        if problem:
            return problem
    return ""


def problem_beside(function: Function, feeds: Feeds, of: str, cotangent: np.ndarray, gradients: Mapping[str, np.ndarray]) -> str:
    """Where gradients part from differences of a function."""
    rng = np.random.default_rng(1)
    for name, gradient in gradients.items():
        problem = gradient_problem(function, feeds, of, cotangent, name, gradient, rng)
        if problem:
            return f"d {of} / d {name}: {problem}"
    return ""


def cotangent_of(output: np.ndarray) -> np.ndarray:
    """Random and signed; of a number, 1."""
    return np.asarray(np.random.default_rng(0).standard_normal(output.shape)) if output.ndim else np.ones(())


def second_problem_of(graph: RandomGraph) -> str:
    """What is wrong with the gradients of the first gradient, by all that it depends on."""
    model, first = graph.with_weights_as_inputs, graph.wrt[0]
    once = burnish.grad(model, first, graph.of)
    of, flowing = f"grad:{first}", f"cotangent:{graph.of}"
    is_number = flowing not in {value.name for value in once.graph.inputs}
    wrt = [*graph.wrt, *([] if is_number else [flowing])]
    twice = burnish.grad(once, wrt, of)
    loaded = engines.get("reference").load(twice)
    outputs = {value.name for value in twice.graph.outputs}
    for batch in graph.batches:
        feeds = {**batch, **graph.weights}
        feeds[flowing] = cotangent_of(quietly(engines.get("reference").load(model), feeds)[graph.of])
        function, expected = forward_function(once, feeds, of)
        cotangent = cotangent_of(expected)
        results = quietly(loaded, {**feeds, f"cotangent:{of}": cotangent})
        names = {name: next(n for n in (f"{of}:{name}", f"{of}:{name}:of:{of}") if n in outputs) for name in wrt}
        problem = problem_beside(function, feeds, of, cotangent, {name: results[full] for name, full in names.items()})
        if problem:
            return problem
    return ""


def unlike_engines(graph: RandomGraph) -> str:
    """Where the outputs and gradients of another engine part from those of the reference engine."""
    gradients = burnish.grad(graph.model, graph.wrt, graph.of)
    forward, reference = engines.get("reference").load(graph.model), engines.get("reference").load(gradients)
    others = {"torch": engines.get("torch").load(gradients)}
    try:
        others["onnxruntime"] = engines.get("onnxruntime").load(gradients)
    except EngineError as error:
        if "Could not find an implementation" not in str(error):  # it lacks some kernels for float64
            raise
    inputs = {value.name for value in gradients.graph.inputs}
    for batch in graph.batches:
        feeds = {**batch, f"cotangent:{graph.of}": cotangent_of(quietly(forward, batch)[graph.of])}
        feeds = {name: array for name, array in feeds.items() if name in inputs}
        expected = quietly(reference, feeds)
        for engine, run in others.items():
            for name, array in quietly(run, feeds).items():
                allowed = AGREEMENT[engine] * max(1.0, float(np.abs(expected[name]).max(initial=0.0)))
                if array.shape != expected[name].shape or not np.allclose(array, expected[name], 0, allowed, equal_nan=True):
                    return f"{engine}: {name} is {array}, on the reference engine {expected[name]}"
    return ""


@pytest.mark.slow
@quick
@given(random_graphs())
def test_gradients(graph: RandomGraph) -> None:
    assert problem_of(graph) == ""


@pytest.mark.campaign
@long
@given(random_graphs())
def test_gradients_of_many(graph: RandomGraph) -> None:
    assert problem_of(graph) == ""


@quick
@given(random_graphs())
@pytest.mark.slow
def test_engines(graph: RandomGraph) -> None:
    assert unlike_engines(graph) == ""


@pytest.mark.campaign
@long
@given(random_graphs())
def test_engines_on_many(graph: RandomGraph) -> None:
    assert unlike_engines(graph) == ""


@quick
@given(random_graphs(control=False))
@pytest.mark.slow
def test_second_gradients(graph: RandomGraph) -> None:
    assert second_problem_of(graph) == ""


@pytest.mark.campaign
@long
@given(random_graphs())
def test_second_gradients_of_many(graph: RandomGraph) -> None:
    assert second_problem_of(graph) == ""
