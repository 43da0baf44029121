"""Folding of inference-mode batch normalization into the linear layer behind it.

With ``y = a * x + b`` per channel, ``W y + c = (W a) x + (W b + c)``. A convolution that pads its input with zeros pads y and
not x, so that its borders would differ, unless b is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from burnish.graph import Names, add_initializer, constant_array, insert_behind
from burnish.graph.uses import is_read_once
from burnish.passes.constant_operands import dtype_of, new_bias_name, put, rounded


def fold_into_following(graph: ir.Graph, names: Names, normalization: ir.Node, a: np.ndarray, b: np.ndarray) -> bool:
    """Fold ``a * x + b``, in place, into the only reader of a normalization: Conv, Gemm or MatMul, also behind a Flatten.

    Weights and biases keep their names. The normalization stays for the caller to remove.

    Args:
        graph: the graph.
        names: those in use in it.
        normalization: the node; its output is still what the layer reads.
        a, b: float64 [C].

    Returns:
        Whether that was possible.
    """
    output = normalization.outputs[0]
    use = _only_use(output)
    if use is None:
        return False
    reader, index = use
    if reader.op_type in ("Flatten", "Reshape") and reader.domain == "" and index == 0:
        positions = _flattened_positions(reader)
        use = _only_use(reader.outputs[0])
        if positions is None or use is None:
            return False
        reader, index = use
        a, b = np.repeat(a, positions), np.repeat(b, positions)
    rule = _RULES.get(reader.op_type) if reader.domain == "" and index == 0 and reader.graph is graph else None
    return rule is not None and rule(graph, names, reader, normalization, a, b)


def _only_use(value: ir.Value) -> tuple[ir.Node, int] | None:
    if not is_read_once(value):
        return None
    reader, index = next(iter(value.uses()))
    return reader, index


def _flattened_positions(node: ir.Node) -> int | None:
    """How many positions of each channel a node puts side by side that makes [N, C · positions] of [N, C, ...]; else None."""
    before, behind = node.inputs[0], node.outputs[0]
    if before is None or before.shape is None or behind.shape is None or len(behind.shape) != 2 or len(before.shape) < 2:
        return None
    extents = [extent for extent in before.shape.dims[1:] if isinstance(extent, int)]
    if len(extents) != len(before.shape) - 1 or behind.shape.dims[1] != math.prod(extents):
        return None
    return math.prod(extents[1:])


def _convolution(graph: ir.Graph, names: Names, layer: ir.Node, normalization: ir.Node, a: np.ndarray, b: np.ndarray) -> bool:
    weight = constant_array(layer.inputs[1])
    if weight is None or (b.any() and _pads(layer)):
        return False
    groups = layer.attributes["group"].as_int() if "group" in layer.attributes else 1
    # Output channel o of group g reads the input channels g * (channels of a group) onwards.
    grouped = weight.astype(np.float64).reshape(groups, -1, *weight.shape[1:])
    shape = (groups, 1, weight.shape[1], *[1] * (weight.ndim - 2))
    shift = (grouped * b.reshape(shape)).sum(axis=tuple(range(2, grouped.ndim))).reshape(-1)
    return _put_weight_and_bias(
        graph, names, layer, normalization, (grouped * a.reshape(shape)).reshape(weight.shape), shift, 1.0
    )


def _pads(layer: ir.Node) -> bool:
    automatic = layer.attributes.get("auto_pad")
    if automatic is not None and automatic.as_string() not in ("NOTSET", "VALID"):
        return True
    pads = layer.attributes.get("pads")
    return pads is not None and any(pads.as_ints())


def _gemm(graph: ir.Graph, names: Names, layer: ir.Node, normalization: ir.Node, a: np.ndarray, b: np.ndarray) -> bool:
    weight = constant_array(layer.inputs[1])
    if weight is None or ("transA" in layer.attributes and layer.attributes["transA"].as_int()):
        return False
    alpha, beta = (layer.attributes[name].as_float() if name in layer.attributes else 1.0 for name in ("alpha", "beta"))
    wide = weight.astype(np.float64)
    if "transB" in layer.attributes and layer.attributes["transB"].as_int():
        scaled, shift = wide * a[None, :], wide @ b
    else:
        scaled, shift = wide * a[:, None], b @ wide
    if not _put_weight_and_bias(graph, names, layer, normalization, scaled, alpha * shift, beta):
        return False
    layer.attributes.pop("beta", None)
    return True


def _put_weight_and_bias(
    graph: ir.Graph, names: Names, layer: ir.Node, normalization: ir.Node, scaled: np.ndarray, shift: np.ndarray, factor: float
) -> bool:
    """Give a layer a scaled weight, and ``factor`` times its bias plus ``shift`` as bias."""
    present = layer.inputs[2] if len(layer.inputs) > 2 else None
    bias = constant_array(present)
    if present is not None and bias is None:
        return False
    dtype = dtype_of(layer.inputs[1])
    weight = rounded(scaled, dtype)
    shifted = rounded(shift if bias is None else factor * bias.astype(np.float64) + shift, dtype)
    if weight is None or shifted is None:
        return False
    if present is not None:
        put(graph, names, layer, 2, shifted)
    elif shift.any():
        layer.resize_inputs(3)
        layer.replace_input_with(2, add_initializer(graph, new_bias_name(graph, names, layer.inputs[1], normalization), shifted))
    put(graph, names, layer, 1, weight)
    return True


def _matmul(graph: ir.Graph, names: Names, layer: ir.Node, normalization: ir.Node, a: np.ndarray, b: np.ndarray) -> bool:
    """Of [N, C], the only case where the channels are the axis that is summed over."""
    weight = constant_array(layer.inputs[1])
    x = layer.inputs[0]
    if weight is None or weight.ndim != 2 or x is None or x.shape is None or len(x.shape) != 2:
        return False
    wide = weight.astype(np.float64)
    scaled, shift = rounded(wide * a[:, None], weight.dtype), b @ wide
    product = layer.outputs[0]
    use = _only_use(product)
    added = None if use is None or use[0].op_type != "Add" or use[0].domain != "" else constant_array(use[0].inputs[1 - use[1]])
    shifted = rounded(shift if added is None else added.astype(np.float64) + shift, weight.dtype)
    if scaled is None or shifted is None:
        return False
    if use is not None and added is not None:
        put(graph, names, use[0], 1 - use[1], shifted)
    elif shift.any():
        bias = add_initializer(graph, new_bias_name(graph, names, layer.inputs[1], normalization), shifted)
        insert_behind(layer, ir.node("Add", [product, bias]), names)
    put(graph, names, layer, 1, scaled)
    return True


_Rule = Callable[[ir.Graph, Names, ir.Node, ir.Node, np.ndarray, np.ndarray], bool]
_RULES: dict[str, _Rule] = {"Conv": _convolution, "Gemm": _gemm, "MatMul": _matmul}
