"""What ``burnish.grad`` gives for products, determinants and transforms is differentiated again: against differences of it."""

from __future__ import annotations

import numpy as np
import onnx
from numpy.testing import assert_allclose

import burnish
from burnish.engines import get as engine
from oracles.central_differences import central_differences
from oracles.combinations import spread

ZEROS = np.array([[1.5, 2.0, -0.5, 3.0], [2.0, 0.0, 3.0, 0.5], [0.0, 2.0, 0.0, -1.5]])
DISTINCT = np.array([[1.5, 2.0, -0.5, 3.0], [2.5, 0.7, -3.0, 0.5], [-1.0, 1.2, 0.9, -1.7]])
SIGNAL = np.random.default_rng(2).standard_normal((1, 8, 1))
PLACES = "int64[3,4] places = {0, 0, 1, 2, 0, 2, 1, 2, 0, 1, 1, 0}, double[3,4] u = {2, 0, 1.5, -1, 0.5, 3, 0, 2, 1, -2, 0.5, 0}"
CASES = {
    "ReduceProd": (18, "int64[1] axes = {1}", "y = ReduceProd (x, axes)", ZEROS),
    "ReduceProd of all": (18, "", "y = ReduceProd <keepdims = 0> (x)", ZEROS[:2]),
    "CumProd": (26, "int64 axis = {1}", "y = CumProd (x, axis)", ZEROS),
    "CumProd exclusive": (26, "int64 axis = {1}", "y = CumProd <exclusive = 1> (x, axis)", ZEROS),
    "CumProd reverse": (26, "int64 axis = {-1}", "y = CumProd <reverse = 1> (x, axis)", ZEROS),
    "ScatterElements mul": (18, PLACES, 'y = ScatterElements <reduction = "mul"> (x, places, u)', ZEROS),
    "ScatterElements mul updates": (18, PLACES, 's = Mul (u, x) y = ScatterElements <reduction = "mul"> (x, places, s)', ZEROS),
    "ScatterElements max": (18, PLACES, 's = Mul (x, x) y = ScatterElements <reduction = "max"> (s, places, u)', DISTINCT),
    "Det": (
        18,
        "int64[3] ends = {3, 3, 3}, int64[2] first = {0, 0}, int64[2] last = {3, 3}",
        "m = Slice (x, first, last) y = Det (m)",
        DISTINCT,
    ),
    "DFT": (20, "", "f = DFT (x) y = Mul (f, f)", SIGNAL),
    "STFT": (
        18,
        "int64 step = {2}, double[4] w = {0.5, 1, 1, 0.5}",
        "s = Mul (x, x) y = STFT <onesided = 1> (s, step, w)",
        SIGNAL,
    ),
}


@spread("name", CASES, test=5)
def test_a_gradient_has_its_gradient(name: str) -> None:
    opset, constants, nodes, x = CASES[name]
    shape = ",".join(map(str, x.shape))
    text = f'<ir_version: 11, opset_import: ["": {opset}]> g (double[{shape}] x) => (double y) <{constants}> {{ {nodes} }}'
    source = onnx.parser.parse_model(text.replace("<>", ""))
    del source.graph.output[0].type.tensor_type.shape.dim[:]
    source.graph.output[0].type.tensor_type.ClearField("shape")
    target = "reference" if name == "Det" else "onnxruntime"  # ONNX Runtime has determinants in float32 alone
    first = burnish.grad(source, "x", of="y", target=target)
    second = burnish.grad(first, "x", of="grad:x", target=target)
    rng = np.random.default_rng(1)
    run = engine(target).load(first)
    cotangents = {}
    dy = next((value for value in first.graph.inputs if value.name == "cotangent:y"), None)
    if dy is not None:
        y = engine(target).load(burnish.load(source))({"x": x})["y"]
        cotangents["cotangent:y"] = rng.standard_normal(y.shape)
    v = rng.standard_normal(x.shape)
    expected = central_differences(lambda inputs: float((run({"x": inputs[0], **cotangents})["grad:x"] * v).sum()), [x], 0)
    result = engine(target).load(second)({"x": x, **cotangents, "cotangent:grad:x": v})
    assert_allclose(result["grad:x:x"], expected, rtol=1e-6, atol=1e-7)
