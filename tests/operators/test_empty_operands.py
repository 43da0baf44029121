"""Gradients of operators over tensors without elements, or that write nothing."""

from __future__ import annotations

import numpy as np
import pytest

from oracles.gradient_harness import check_standard, gradient_graph, random_cotangents, run_gradients
from specs.operator_spec import OperatorSpec, Sample

EMPTY = np.zeros((0, 3))
NO_INDICES = np.zeros((0, 3), np.int64)
DATA = np.array([[1.5, -2.0, 0.0]])
SAMPLES = {
    "ReduceProd": Sample([EMPTY, np.array([1])]),
    "ReduceProd-all": Sample([EMPTY]),
    "CumProd": Sample([EMPTY, np.array(0)], opset=26),
    "Det": Sample([np.zeros((0, 2, 2))]),
    "Slice-backward": Sample([EMPTY, *(np.array([number]) for number in (0, 0, 0, -2))]),
    "Slice-backward_at_run_time": Sample([EMPTY, *(np.array([number]) for number in (0, 0, 0, -2))], constants=(3, 4)),
    "TensorScatter": Sample([np.ones((2, 4, 3)), np.ones((2, 0, 3))], opset=24),
    **{
        f"{operator}-{reduction}": Sample([DATA, indices, EMPTY], {"reduction": reduction})
        for operator, indices in (("ScatterElements", NO_INDICES), ("ScatterND", np.zeros((0, 1), np.int64)))
        for reduction in ("none", "add", "mul", "max", "min")
    },
}


@pytest.mark.parametrize("shapes", ["static", "symbolic"])
@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_not_written_over_passes_its_cotangent_on(name: str, shapes: str) -> None:
    sample = SAMPLES[name]
    spec = OperatorSpec(name.partition("-")[0], lambda rng: [sample])
    graph = gradient_graph(spec, sample, "float64", shapes)
    check_standard(graph)
    first = sample.inputs[0]
    assert first is not None
    cotangents = random_cotangents(spec, sample, np.random.default_rng(3))
    _, gradients = run_gradients(graph, sample, "float64", cotangents)
    assert np.array_equal(gradients[0], cotangents[0] if first.size else first)
    assert all(gradient.size == 0 for gradient in gradients[1:])
