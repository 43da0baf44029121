"""Folding of constants: computes constant expressions once, instead of in every step.

Only operators with identical results on all runtimes are folded: moving, comparing, counting, and arithmetic that rounds once by
IEEE 754. Exponentials, sines and sums differ in the last digit between runtimes, and random draws must change, so they stay.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from burnish.graph import FLOATING, Builder, constant_array, remove_node, static_shape
from burnish.graph.constants import evaluated

MOVING = frozenset(
    "Concat ConstantOfShape Expand EyeLike Flatten Gather GatherElements GatherND Identity Reshape Shape Size Slice Split "
    "Squeeze Tile Transpose Trilu Unsqueeze Where".split()
)
COMPARING = frozenset("And Equal Greater GreaterOrEqual IsNaN Less LessOrEqual Not Or Xor".split())
ROUNDING_ONCE = frozenset("Abs Add Cast Ceil Floor Max Min Mul Neg Round Sign Sqrt Sub".split())
INTEGER_ONLY = frozenset("CumSum Range ReduceMax ReduceMin ReduceProd ReduceSum".split())
FLOATING_ONLY = frozenset({"Div"})
"""Runtimes differ in the quotient of negative integers."""

KNOWN_DTYPES = frozenset(
    {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL, ir.DataType.UINT8}
)
SMALL = 1 << 10
"""Largest result that may exceed the total size of its operands, in elements."""
LARGEST = 1 << 20
"""Largest result, in elements: programs keep it in files and memory."""


def fold_constants(model: ir.Model) -> bool:
    """Replace, in place, the constant expressions of the main graph by constants.

    Values keep their names. Bodies, graph outputs, results larger than their operands and anything that the evaluator cannot
    compute stay: folding is optional.
    """
    graph = model.graph
    arrays: dict[ir.Value, np.ndarray] = {}
    folded: list[ir.Node] = []
    for node in graph:
        if node.domain == "" and node.op_type != "Constant":
            results = _computed(node, arrays, model.opset_imports[""])
            if results:
                folded.append(node)
                arrays.update(zip(node.outputs, results, strict=True))
    gone = set(folded)
    for node in folded:
        builder = Builder(graph, before=node)
        for output in node.outputs:
            if any(reader not in gone for reader, _ in output.uses()):
                name, output.name = output.name, None
                constant = builder.constant(arrays[output]).value
                constant.name = name
                output.replace_all_uses_with(constant)
    for node in reversed(folded):
        remove_node(node)
    return bool(folded)


def _computed(node: ir.Node, arrays: dict[ir.Value, np.ndarray], opset: int) -> list[np.ndarray]:
    """Return the outputs of a constant node if they are identical on every engine, else an empty list."""
    if not _is_exact(node) or any(not output.name or output.is_graph_output() for output in node.outputs):
        return []
    shapes = [static_shape(output) for output in node.outputs]
    operands = [value for value in node.inputs if value is not None]
    sizes = [_size(value) for value in operands]
    if any(shape is None for shape in shapes) or any(size is None for size in sizes):
        return []
    count = sum(math.prod(shape) for shape in shapes if shape is not None)
    if count > LARGEST or count > max(SMALL, sum(size for size in sizes if size is not None)):
        return []
    if not all(value in arrays or _is_constant(value) for value in operands):
        return []
    feeds = {}
    for value in operands:
        array = arrays.get(value)
        array = constant_array(value) if array is None else array
        if array is None or (node.op_type == "Cast" and not _casts_alike(array, node)):
            return []
        feeds[value.name or ""] = array
    results = evaluated(node, feeds, opset)
    expected = [(output.dtype, shape) for output, shape in zip(node.outputs, shapes, strict=True)]
    return results if [(ir.DataType.from_numpy(array.dtype), array.shape) for array in results] == expected else []


def _is_exact(node: ir.Node) -> bool:
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    if not all(value.dtype in KNOWN_DTYPES for value in values):
        return False
    operator, has_floats = node.op_type, any(value.dtype in FLOATING for value in values)
    if operator in MOVING or operator in COMPARING or operator in ROUNDING_ONCE:
        return True
    return operator in (FLOATING_ONLY if has_floats else INTEGER_ONLY)


def _size(value: ir.Value) -> int | None:
    shape = static_shape(value)
    return None if shape is None else math.prod(shape)


def _is_constant(value: ir.Value) -> bool:
    """True if a value is an initializer or a Constant's output; does not load its numbers."""
    producer = value.producer()
    if producer is None:
        return value.is_initializer() and not value.is_graph_input()
    return producer.op_type == "Constant" and producer.domain == ""


def _casts_alike(array: np.ndarray, node: ir.Node) -> bool:
    """True if all numbers fit the integer type that they are cast to; runtimes differ beyond it."""
    target = node.outputs[0].dtype
    if array.dtype.kind != "f" or target is None or target in FLOATING or target == ir.DataType.BOOL:
        return True
    bounds = np.iinfo(target.numpy())
    return bool(np.isfinite(array).all() and (array > bounds.min).all() and (array < bounds.max).all())
