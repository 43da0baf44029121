"""The reference engine adds up values of sixteen bits in float32, and rounds once."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from ml_dtypes import bfloat16
from torch.nn import functional

import burnish
from burnish.graph import Builder


@pytest.mark.parametrize("dtype", [np.float16, bfloat16])
@pytest.mark.parametrize(
    ("operator", "shapes", "attributes", "oracle"),
    [
        ("Conv", [(2, 64, 6, 6), (4, 64, 3, 3)], {"strides": [2, 2]}, lambda x, w: functional.conv2d(x, w, stride=2)),
        (
            "ConvTranspose",
            [(2, 64, 6, 6), (64, 4, 3, 3)],
            {"strides": [2, 2]},
            lambda x, w: functional.conv_transpose2d(x, w, stride=2),
        ),
        ("MatMul", [(4, 2000), (2000, 3)], {}, lambda x, w: x @ w),
        ("Gemm", [(4, 2000), (3, 2000)], {"transB": 1}, lambda x, w: x @ w.T),
    ],
)
def test_products_are_those_of_float64_rounded_once(operator, shapes, attributes, oracle, dtype):
    """The terms have a mean of one, so that a sum in sixteen bits would be off by many units."""
    generator = np.random.default_rng(0)
    arrays = [(generator.normal(size=shape) + mean).astype(dtype) for shape, mean in zip(shapes, (1.0, 1.0), strict=True)]
    kind = ir.DataType.from_numpy(np.dtype(dtype))
    values = [ir.Value(name=f"i{n}", type=ir.TensorType(kind), shape=ir.Shape(shape)) for n, shape in enumerate(shapes)]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": 22})
    builder = Builder(graph)
    result = builder.op(operator, *map(builder.tensor, values), **attributes)
    result.value.name = "y"
    graph.outputs.append(result.value)
    model = ir.Model(graph, ir_version=10)
    y = burnish.engines.get("reference").run(model, {"i0": arrays[0], "i1": arrays[1]})["y"]
    assert y.dtype == np.dtype(dtype)
    exact = oracle(*(torch.from_numpy(array.astype(np.float64)) for array in arrays)).numpy()
    unit = 2.0**-11 if dtype is np.float16 else 2.0**-8
    np.testing.assert_allclose(y.astype(np.float64), exact, rtol=1.02 * unit, atol=unit)
