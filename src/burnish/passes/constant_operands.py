"""Giving the constant operands of a node new numbers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Names, add_initializer, constant_array, remove_unread_value
from burnish.graph.uses import is_read_once


def dtype_of(value: ir.Value | None) -> np.dtype:
    """The dtype of a constant."""
    array = constant_array(value)
    assert array is not None
    return array.dtype


def rounded(array: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    """Cast, or None where a narrow dtype cannot hold a number."""
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    return result if np.isfinite(result.astype(np.float64)).all() else None


def put(graph: ir.Graph, names: Names, node: ir.Node, index: int, array: np.ndarray) -> None:
    """Give an operand of a node new numbers; under its name, unless others read the old ones."""
    old = node.inputs[index]
    assert old is not None
    if is_read_once(old) and old.is_initializer():
        old.const_value = ir.Tensor(array, name=old.name)
        old.shape = ir.Shape(array.shape)
        return
    node.replace_input_with(index, add_initializer(graph, names.take(old.name or "weight"), array))
    if not old.is_initializer():
        remove_unread_value(graph, old)


def new_bias_name(graph: ir.Graph, names: Names, weight: ir.Value | None, normalization: ir.Node) -> str:
    """A name for the bias of a layer without one: ``<layer>.bias`` for a weight ``<layer>.weight``, else the normalization's."""
    bias = normalization.inputs[2]
    assert weight is not None
    assert bias is not None
    stem = (weight.name or "").removesuffix(".weight")
    if stem != weight.name:
        return names.take(f"{stem}.bias")
    name = bias.name or "bias"
    if is_read_once(bias) and bias.is_initializer():
        graph.initializers.pop(name)
        bias.name = None
        names.release(name)
    return names.take(name)
