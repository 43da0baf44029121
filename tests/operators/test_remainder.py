"""What the table of elementwise operators cannot say of Mod: since opset 28 it has real numbers with ``fmod=0``."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from numpy.testing import assert_allclose

import burnish
from burnish.engines import get as engine

A, B = np.array([5.3, -5.3, 5.3, -5.3]), np.array([2.0, 2.0, -2.0, -3.0])
DY = np.array([1.0, 2.0, -3.0, 0.5])


@pytest.mark.parametrize(("fmod", "quotient"), [(0, np.floor(A / B)), (1, np.trunc(A / B))])
def test_the_quotient_is_a_constant(fmod: int, quotient: np.ndarray) -> None:
    text = f"""<ir_version: 12, opset_import: ["": 28]> g (double[N] a, double[N] b) => (double[N] y)
        {{ y = Mod <fmod = {fmod}> (a, b) }}"""
    gradient = burnish.grad(onnx.parser.parse_model(text), ["a", "b"], target="reference")
    results = engine("reference").load(gradient)({"a": A, "b": B, "cotangent:y": DY})
    assert_allclose(results["y"], A - quotient * B)
    assert_allclose(results["grad:a"], DY)
    assert_allclose(results["grad:b"], -DY * quotient)
