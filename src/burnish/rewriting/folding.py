"""Folding an affine map of channels into the constant weight and bias of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from burnish.graph import Names, add_initializer, constant_array, remove_unread_value
from burnish.graph.uses import is_read_once
from burnish.importer.export_notes import FOLDED


@dataclass(frozen=True)
class Folding:
    """What a batch normalization of inference computes, ``a * x + b`` per channel, on its way into a layer.

    Attributes:
        graph: the graph of both.
        names: those in use in it.
        normalization: the node.
        a, b: float64 [C].
    """

    graph: ir.Graph
    names: Names
    normalization: ir.Node
    a: np.ndarray
    b: np.ndarray

    def give(self, layer: ir.Node, weight: np.ndarray, shift: np.ndarray, factor: np.ndarray | float = 1.0) -> bool:
        """Give a layer a new weight, and ``factor`` times its bias plus ``shift`` as bias, rounded to the weight's dtype.

        Returns:
            Whether that was possible: a bias that it has is constant, and the dtype holds the numbers.
        """
        present = layer.inputs[2] if len(layer.inputs) > 2 else None
        bias = constant_array(present)
        if present is not None and bias is None:
            return False
        if layer.op_type != "Gemm" and bias is not None and bias.shape != shift.shape:
            return False
        dtype = dtype_of(layer.inputs[1])
        scaled, shifted = rounded(weight, dtype), rounded(shift if bias is None else factor * wide(bias) + shift, dtype)
        if scaled is None or shifted is None:
            return False
        self.put(layer, 1, scaled)
        if present is not None:
            self.put(layer, 2, shifted)
        elif shift.any():
            layer.resize_inputs(3)
            layer.replace_input_with(2, self.new_bias(layer.inputs[1], shifted))
        layer.metadata_props[FOLDED] = self.normalization.name or ""
        return True

    def put(self, node: ir.Node, index: int, array: np.ndarray) -> None:
        """Give an operand of a node new numbers; under its name, unless others read the old ones."""
        old = node.inputs[index]
        assert old is not None
        if is_read_once(old) and old.is_initializer():
            old.const_value = ir.Tensor(array, name=old.name)
            old.shape = ir.Shape(array.shape)
            return
        node.replace_input_with(index, add_initializer(self.graph, self.names.take(old.name or "weight"), array))
        if not old.is_initializer():
            remove_unread_value(self.graph, old)

    def new_bias(self, weight: ir.Value | None, array: np.ndarray) -> ir.Value:
        """Add the bias of a layer without one: ``<layer>.bias`` for ``<layer>.weight``, else by the normalization's name."""
        bias = self.normalization.inputs[2]
        assert weight is not None
        assert bias is not None
        stem = (weight.name or "").removesuffix(".weight")
        name = bias.name or "bias"
        if stem != weight.name:
            name = f"{stem}.bias"
        elif is_read_once(bias) and bias.is_initializer():
            self.graph.initializers.pop(name)
            bias.name = None
            self.names.release(name)
        return add_initializer(self.graph, self.names.take(name), array)


def dtype_of(value: ir.Value | None) -> np.dtype:
    """The dtype of a constant."""
    array = constant_array(value)
    assert array is not None
    return array.dtype


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def rounded(array: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    """Cast, or None where a narrow dtype cannot hold a number."""
    with np.errstate(over="ignore"):
        result = array.astype(dtype)
    return result if np.isfinite(wide(result)).all() else None
