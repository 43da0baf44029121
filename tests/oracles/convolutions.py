"""Gradients of convolutions built, run and compared with PyTorch's, and convolutions drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from hypothesis import strategies as st

from burnish.autodiff import differentiate
from burnish.graph import BURNISH_DOMAIN, Builder
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from oracles.gradient_harness import Evaluator, assert_close
from oracles.rewritten import rewritten
from specs.convolution import torch_convolution, torch_transposed_convolution

TORCH = {"Conv": torch_convolution, "ConvTranspose": torch_transposed_convolution}
TOLERANCE = 5e-6


def gradient_model(
    op_type: str,
    x_shape: Sequence[int | str],
    w: np.ndarray,
    attributes: dict[str, Any],
    bias: np.ndarray | None = None,
    lowered: bool = True,
    w_known: Sequence[int | str] | None = None,
    dtype: ir.DataType = ir.DataType.FLOAT,
) -> ir.Model:
    """y, dx, dw (and db) of one convolution for a cotangent that is an input; so is a weight of a shape ``w_known``."""
    graph = ir.Graph([], [], nodes=[], name="convolution", opset_imports={"": 18, BURNISH_DOMAIN: 1})
    builder = Builder(graph)
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(x_shape))
    graph.inputs.append(x)
    values = [x]
    for name, array in (("w", w), ("bias", bias)):
        if name == "w" and w_known is not None:
            values.append(ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(w_known)))
            graph.inputs.append(values[-1])
        elif array is not None:
            value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(array.shape))
            value.const_value = ir.tensor(array.astype(dtype.numpy()), name=name)
            graph.register_initializer(value)
            values.append(value)
    y = builder.op(op_type, *(builder.tensor(value) for value in values), **attributes)
    dy = ir.Value(name="dy", type=y.value.type, shape=None if y.shape is None else ir.Shape(y.shape.dims))
    graph.inputs.append(dy)
    gradients = differentiate(builder, {y.value: builder.tensor(dy)}, values)
    y.value.name = "y"
    graph.outputs.append(y.value)
    for value in values:
        gradient = gradients[value]
        assert gradient is not None
        gradient.value.name = f"grad:{value.name}"
        graph.outputs.append(gradient.value)
    model = ir.Model(graph, ir_version=10)
    return rewritten(lower_semantic_operators, model) if lowered else model


def check_against_torch(
    op_type: str,
    x_shape: Sequence[int],
    w_shape: Sequence[int],
    attributes: dict[str, Any],
    known: Sequence[int | str] | None = None,
    bias: bool = False,
    seed: int = 0,
    w_known: Sequence[int | str] | None = None,
) -> ir.Model:
    """Compare y, dx, dw, db on ONNX Runtime with PyTorch in float64.

    ``known`` is what the graph knows of the shape of x, ``w_known`` what of that of a weight that is an input.
    """
    rng = np.random.default_rng(seed)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in (x_shape, w_shape))
    channels = w_shape[0] if op_type == "Conv" else w_shape[1] * attributes.get("group", 1)
    extra = rng.standard_normal(channels).astype(np.float32) if bias else None
    arrays = [x, w] if extra is None else [x, w, extra]
    leaves = [torch.from_numpy(array.astype(np.float64)).requires_grad_() for array in arrays]
    expected = TORCH[op_type](*leaves, **attributes)
    dy = rng.standard_normal(tuple(expected.shape)).astype(np.float32)
    gradients = torch.autograd.grad(expected, leaves, torch.from_numpy(dy.astype(np.float64)))
    model = gradient_model(op_type, x_shape if known is None else known, w, attributes, extra, w_known=w_known)
    assert {node.domain for node in model.graph.all_nodes()} == {""}
    evaluate = Evaluator(model)
    assert evaluate.on_onnxruntime
    results = evaluate({"x": x, "dy": dy, "w": w})
    assert_close(results["y"], expected.detach().numpy(), TOLERANCE, "y")
    for name, gradient in zip(("x", "w", "bias"), gradients, strict=False):
        assert_close(results[f"grad:{name}"], gradient.numpy(), TOLERANCE, f"gradient of {name}")
    return model


def operators(model: ir.Model) -> list[str]:
    return [str(node.op_type) for node in model.graph]


@st.composite
def convolutions(draw: st.DrawFn, op_type: str) -> tuple[list[int], list[int], dict[str, Any]]:
    """Shapes and attributes of a small valid convolution."""
    rank = draw(st.sampled_from([1, 2, 2, 2, 3]))
    group = draw(st.sampled_from([1, 1, 2, 3]))
    inputs, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    if draw(st.booleans()) and group > 1:
        inputs = 1
    kernel = [draw(st.integers(1, 4 if rank < 3 else 3)) for _ in range(rank)]
    strides = [draw(st.integers(1, 3)) for _ in range(rank)]
    dilations = [draw(st.integers(1, 3 if rank < 3 else 2)) for _ in range(rank)]
    pads = [draw(st.integers(0, 3)) for _ in range(2 * rank)]
    sizes = []
    for axis in range(rank):
        extent = (kernel[axis] - 1) * dilations[axis] + 1
        if op_type == "Conv":
            sizes.append(max(extent - pads[axis] - pads[axis + rank], 1) + draw(st.integers(0, 4)))
        else:
            smallest = 1
            while (smallest - 1) * strides[axis] + extent - pads[axis] - pads[axis + rank] < 1:
                smallest += 1
            sizes.append(smallest + draw(st.integers(0, 2)))
    attributes: dict[str, Any] = {"strides": strides, "dilations": dilations, "pads": pads, "group": group}
    if op_type == "ConvTranspose":
        attributes["output_padding"] = [draw(st.integers(0, max(strides[axis] - 1, 0))) for axis in range(rank)]
    batch = draw(st.integers(1, 3))
    weight = [group * outputs, inputs, *kernel] if op_type == "Conv" else [group * inputs, outputs, *kernel]
    return [batch, group * inputs, *sizes], weight, attributes
