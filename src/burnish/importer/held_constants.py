"""Constants that look like weights and are none: they stay as they are when a model trains.

PyTorch's exporter writes the root of the scale of ``scaled_dot_product_attention`` as a tensor of one element that multiplies
queries and keys, before opset 23, and a causal mask of fixed shapes as a matrix; torchvision's Swin has such masks of windows.
Exporters and simplifiers also make initializers of other constants, under names of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from burnish.graph import FLOATING, constant_array
from burnish.graph.uses import origin_of, producer_of
from burnish.importer.initializers import ARRANGES, weight_operands
from burnish.importer.operands import HELD

LARGEST_EXCLUDING = -100.0
"""What a mask adds to exclude a place is this or less: exp(-100) is nothing beside 1 in float32."""

_ARRANGES = frozenset({"Cast", "Expand", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_ARITHMETIC = frozenset({"Cast", "Gather", "Mul", "Slice", "Sub", "Unsqueeze"})
_MASKED = {"Attention": 3, "Softmax": 0}
"""The operand that a mask is, or is added to."""
_ADDED = {"Add": (0, 1), "Where": (1, 2)}
"""The operands of which a masked score is made."""


def hold_attention_constants(model: ir.Model) -> None:
    """Note, in place, that such initializers are no weights.

    A scale has one element and multiplies both operands of a product of matrices. A mask is added to what a softmax reads, or
    chosen into it, and consists of zeros and of numbers of -100 or less; or it is a lower triangle of ones, which arithmetic
    reads, as in early GPT-2.
    """
    for value in model.graph.initializers.values():
        if _is_triangle(value):
            value.meta[HELD] = True
    for graph in model.graphs():
        for node in graph:
            if node.op_type == "MatMul" and node.domain == "" and len(node.inputs) == 2:
                left, right = (_factors(operand) for operand in node.inputs)
                for scale in left & right:
                    scale.meta[HELD] = True
            elif node.op_type in _MASKED and node.domain == "":
                for value in _summands(*node.inputs[_MASKED[node.op_type] :][:1]):
                    if _excludes(value):
                        value.meta[HELD] = True


def _factors(value: ir.Value | None) -> set[ir.Value]:
    """The initializers of one element that a value is multiplied by."""
    product = None if value is None else producer_of(origin_of(value, _ARRANGES), "Mul")
    operands = () if product is None else product.inputs
    return {operand for operand in operands if operand is not None and operand.is_initializer() and _is_one_element(operand)}


def _is_one_element(value: ir.Value) -> bool:
    return value.shape is not None and all(extent == 1 for extent in value.shape)


def _is_triangle(value: ir.Value) -> bool:
    dims = () if value.shape is None else value.shape.dims
    is_square = len(dims) > 1 and dims[-1] == dims[-2] != 1 and all(extent == 1 for extent in dims[:-2])
    if not is_square or value.dtype not in FLOATING or not {node.op_type for node, _ in value.uses()} <= _ARITHMETIC:
        return False
    array = constant_array(value)
    return array is not None and bool((array == np.tril(np.ones(array.shape[-2:]))).all())


def _summands(value: ir.Value | None = None) -> Iterator[ir.Value]:
    """The initializers that are added to make a value, or chosen."""
    pending, seen = [value], {value}
    while pending:
        current = pending.pop()
        origin = None if current is None else origin_of(current, _ARRANGES)
        if origin is not None and origin.is_initializer():
            yield origin
        node = producer_of(origin, *_ADDED)
        if node is not None:
            operands = [node.inputs[index] for index in _ADDED[node.op_type]]
            pending += [operand for operand in operands if operand not in seen]
            seen.update(operands)


def _excludes(value: ir.Value) -> bool:
    array = constant_array(value)
    if array is None or array.size == 0 or not (array <= LARGEST_EXCLUDING).any():
        return False
    return bool(((array == 0) | (array <= LARGEST_EXCLUDING)).all())


NAME = re.compile(r"(.*/)?Constant(_\d+)?_output_\d+")
IN_TENSORFLOW = re.compile(r".*/(Const(_\d+)?|[xy])(:0)?")


def hold_simplified_constants(model: ir.Model) -> None:
    """Note, in place, that initializers of such a name are no weights, but for those that a layer reads as its weights."""
    patterns = (NAME, IN_TENSORFLOW) if model.producer_name == "tf2onnx" else (NAME,)
    initializers = model.graph.initializers
    named = {value for name, value in initializers.items() if any(pattern.fullmatch(name) for pattern in patterns)}
    if not named:
        return
    layers = {
        origin_of(operand, ARRANGES) for graph in model.graphs() for node in graph for operand in weight_operands(node, False)
    }
    for value in named - layers:
        value.meta[HELD] = True
