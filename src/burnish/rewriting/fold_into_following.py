"""Folding of inference-mode batch normalization into the linear layer after it.

With ``y = a * x + b`` per channel, ``W y + c = (W a) x + (W b + c)``. A convolution that pads its input with zeros pads y and
not x, so that its borders would differ, unless b is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from burnish.graph import attribute_value, constant_array, insert_behind
from burnish.graph.uses import is_read_once
from burnish.rewriting.folding import Folding, rounded, wide


def fold_into_following(folding: Folding) -> bool:
    """Fold ``a * x + b``, in place, into the only reader of a normalization: Conv, Gemm or MatMul, also after a Flatten.

    Weights and biases keep their names. The normalization stays for the caller to remove; its output is still what the layer
    reads.

    Returns:
        Whether that was possible.
    """
    use = _only_use(folding.normalization.outputs[0])
    if use is None:
        return False
    reader, index = use
    if reader.op_type in ("Flatten", "Reshape") and reader.domain == "" and index == 0:
        positions = _flattened_positions(reader)
        use = _only_use(reader.outputs[0])
        if positions is None or use is None:
            return False
        reader, index = use
        folding = replace(folding, a=np.repeat(folding.a, positions), b=np.repeat(folding.b, positions))
    rule = _RULES.get(reader.op_type) if reader.domain == "" and index == 0 and reader.graph is folding.graph else None
    return rule is not None and rule(folding, reader)


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


def _convolution(folding: Folding, layer: ir.Node) -> bool:
    weight = constant_array(layer.inputs[1])
    if weight is None or (folding.b.any() and _pads(layer)):
        return False
    groups = attribute_value(layer, "group", 1)
    # Output channel o of group g reads the input channels g * (channels of a group) onwards.
    grouped = wide(weight).reshape(groups, -1, *weight.shape[1:])
    shape = (groups, 1, weight.shape[1], *[1] * (weight.ndim - 2))
    shift = (grouped * folding.b.reshape(shape)).sum(axis=tuple(range(2, grouped.ndim))).reshape(-1)
    return folding.give(layer, (grouped * folding.a.reshape(shape)).reshape(weight.shape), shift)


def _pads(layer: ir.Node) -> bool:
    return attribute_value(layer, "auto_pad", "NOTSET") not in ("NOTSET", "VALID") or any(attribute_value(layer, "pads", ()))


def _gemm(folding: Folding, layer: ir.Node) -> bool:
    weight = constant_array(layer.inputs[1])
    if weight is None or attribute_value(layer, "transA", 0):
        return False
    alpha, beta = (attribute_value(layer, name, 1.0) for name in ("alpha", "beta"))
    matrix, a, b = wide(weight), folding.a, folding.b
    if attribute_value(layer, "transB", 0):
        scaled, shift = matrix * a[None, :], matrix @ b
    else:
        scaled, shift = matrix * a[:, None], b @ matrix
    if not folding.give(layer, scaled, alpha * shift, beta):
        return False
    layer.attributes.pop("beta", None)
    return True


def _matmul(folding: Folding, layer: ir.Node) -> bool:
    """The input must be [N, C]: only there are the channels the axis that is summed over."""
    weight = constant_array(layer.inputs[1])
    x = layer.inputs[0]
    if weight is None or weight.ndim != 2 or x is None or x.shape is None or len(x.shape) != 2:
        return False
    scaled, shift = rounded(wide(weight) * folding.a[:, None], weight.dtype), folding.b @ wide(weight)
    product = layer.outputs[0]
    use = _only_use(product)
    added = None if use is None or use[0].op_type != "Add" or use[0].domain != "" else constant_array(use[0].inputs[1 - use[1]])
    shifted = rounded(shift if added is None else wide(added) + shift, weight.dtype)
    if scaled is None or shifted is None:
        return False
    if use is not None and added is not None:
        folding.put(use[0], 1 - use[1], shifted)
    elif shift.any():
        insert_behind(layer, ir.node("Add", [product, folding.new_bias(layer.inputs[1], shifted)]), folding.names)
    folding.put(layer, 1, scaled)
    return True


_RULES: dict[str, Callable[[Folding, ir.Node], bool]] = {"Conv": _convolution, "Gemm": _gemm, "MatMul": _matmul}
