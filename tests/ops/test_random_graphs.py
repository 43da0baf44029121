"""Random graphs of the operator tables, with branches and loops: gradients against differences in float64."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings

import burnish
from burnish import engines
from burnish.lowering import TARGETS, check_allowed
from oracles.model_differences import Feeds, Function, evaluators, gradient_problem, quietly
from oracles.random_graphs import RandomGraph, random_graphs

CALM = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
quick = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=CALM)
long = settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=CALM)


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
    rng = np.random.default_rng(0)
    loaded = engines.get("reference").load(gradients)
    model = graph.with_weights_as_inputs
    for batch in graph.batches:
        feeds = {**batch, **graph.weights}
        function, expected = forward_function(model, feeds, graph.of)
        cotangent = np.asarray(rng.standard_normal(expected.shape)) if expected.ndim else np.ones(())
        results = loaded({**batch, f"cotangent:{graph.of}": cotangent})
        for name in graph.wrt:
            problem = gradient_problem(function, feeds, graph.of, cotangent, name, results[f"grad:{name}"], rng)
            if problem:
                return f"d {graph.of} / d {name}: {problem}"
    return ""


@quick
@given(random_graphs())
def test_gradients(graph: RandomGraph) -> None:
    assert problem_of(graph) == ""


@pytest.mark.slow
@long
@given(random_graphs())
def test_gradients_of_many(graph: RandomGraph) -> None:
    assert problem_of(graph) == ""
