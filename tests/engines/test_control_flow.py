"""If, Loop and Scan and their gradients on every engine."""

from __future__ import annotations

import numpy as np
import pytest

from burnish import engines
from oracles.combinations import diagonal, named
from oracles.gradient_harness import assert_close, cast_inputs, differentiated, feeds_of, gradient_graph, random_cotangents
from oracles.torch_gradients import torch_gradients
from specs.control import SPECS, recurrence
from specs.operator_spec import OperatorSpec, Sample

CASES = [(spec, sample) for spec in SPECS for sample in spec.samples(np.random.default_rng(0))]


@diagonal(
    (("spec", "sample"), named(CASES, [f"{spec.op_type}-{sample.name}" for spec, sample in CASES])),
    ("shapes", ["static", "symbolic"]),
    ("engine", ["torch", "reference"]),
    test=7,
)
def test_gradients(spec, sample, shapes: str, engine: str) -> None:
    cotangents = random_cotangents(spec, sample, np.random.default_rng(1))
    wrt = differentiated(sample)
    graph = gradient_graph(spec, sample, "float64", shapes)
    fed = feeds_of(sample, cast_inputs(sample, "float64"), cotangents)
    inputs = {value.name for value in graph.model.graph.inputs}
    results = engines.get(engine).run(graph.model, {name: array for name, array in fed.items() if name in inputs})
    _, expected = torch_gradients(sample.torch, sample.inputs, {}, cotangents, wrt)
    for index, name, gradient in zip(wrt, graph.gradients, expected, strict=True):
        found = np.zeros_like(gradient) if name is None else results[name]
        assert_close(found, gradient, 1e-10, f"gradient of input {index}")


@pytest.mark.parametrize("engine", ["torch", "reference"])
@pytest.mark.parametrize("shapes", ["static", "symbolic"])
def test_a_scan_of_no_slice(shapes: str, engine: str) -> None:
    """ONNX Runtime refuses it, forward too."""
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=shape) for shape in ((2, 3), (0, 2, 3), (3, 3), (3,))]
    sample = Sample(inputs, outputs=2, build=recurrence({}, 0, 0))
    graph = gradient_graph(OperatorSpec("Scan", lambda rng: [sample]), sample, "float64", shapes)
    cotangents = {0: rng.normal(size=(2, 3)), 1: np.zeros((0, 2, 3))}
    results = engines.get(engine).run(graph.model, feeds_of(sample, inputs, cotangents))
    for name, expected in zip(graph.gradients, [cotangents[0], *(np.zeros_like(array) for array in inputs[1:])], strict=True):
        np.testing.assert_array_equal(results[name], expected)
