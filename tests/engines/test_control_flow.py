"""If, Loop and Scan and their gradients on every engine."""

from __future__ import annotations

import numpy as np
import pytest

from burnish import engines
from oracles.gradient_harness import assert_close, cast_inputs, differentiated, feeds_of, gradient_graph, random_cotangents
from oracles.torch_gradients import torch_gradients
from specs.control import SPECS

CASES = [(spec, sample) for spec in SPECS for sample in spec.samples(np.random.default_rng(0))]


@pytest.mark.parametrize("engine", ["torch", "reference"])
@pytest.mark.parametrize("shapes", ["static", "symbolic"])
@pytest.mark.parametrize(("spec", "sample"), CASES, ids=[f"{spec.op_type}-{sample.name}" for spec, sample in CASES])
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
