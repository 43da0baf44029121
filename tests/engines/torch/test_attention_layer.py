"""Attention and the rotary position embedding as nodes of an inference graph: the standard's own cases."""

from __future__ import annotations

import numpy as np

from burnish.engines.torch import TorchEngine
from burnish.importer import load
from oracles.combinations import spread
from oracles.standard_cases import standard_cases

CASES = [case for case in standard_cases(["attention", "rotaryembedding"]) if "expanded" not in case.name]
NOT_RUN = ("bfloat16",)


@spread("case", CASES, test=53, ids=lambda case: case.name)
def test_the_cases_of_the_standard(case) -> None:
    inputs, expected = case.data_sets[0]
    model = load(case.model)
    feeds = {value.name: np.asarray(array) for value, array in zip(model.graph.inputs, inputs, strict=True)}
    results = TorchEngine().run(model, feeds)
    for value, array in zip(model.graph.outputs, expected, strict=True):
        tolerance = 2e-2 if array.dtype.itemsize < 4 else 1e-5
        actual = np.asarray(results[value.name], np.float64)
        np.testing.assert_allclose(actual, np.asarray(array, np.float64), rtol=tolerance, atol=tolerance, err_msg=value.name)
