"""Find out whether a value holds probabilities, from the graph or from the numbers themselves."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import bodies, constant_array

BOUNDED = frozenset({"Sigmoid", "HardSigmoid", "Softmax", "Hardmax"})
"""Operators whose output is always in [0, 1]."""
NEVER_NEGATIVE = frozenset({"Exp", "Relu", "Softplus", "Abs", "Sigmoid", "HardSigmoid", "Softmax"})
KEEPS_BOUNDS = frozenset(
    {
        *("Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Slice", "Split", "Gather", "GatherND"),
        *("GatherElements", "Expand", "Tile", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "AveragePool", "MaxPool"),
        *("GlobalAveragePool", "GlobalMaxPool", "DepthToSpace", "SpaceToDepth", "Resize"),
    }
)
"""Operators whose output is between the smallest and the largest element of the first operand, or a product of elements."""
OF_ALL_OPERANDS = frozenset({"Concat", "Max", "Min", "Mul", "Mean"})
"""Operators whose output is in [0, 1] if all operands are."""
LINEAR = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "BatchNormalization", "LayerNormalization", "GroupNormalization"})
MOVES = frozenset({"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Dropout"})
ADDS_TO = frozenset({"Add", "Sub", "Mul", "Div", "Relu", "LeakyRelu", "Elu", "Gelu", "PRelu", *KEEPS_BOUNDS, "Concat"})
"""Operators that do not turn the results of linear layers into probabilities."""


def bounding_node(value: ir.Value | None, bounding: dict[ir.Node, ir.Node | None] | None = None) -> ir.Node | None:
    """Return a node that bounds every element of a value to [0, 1], or None if none is known.

    Args:
        value: the value.
        bounding: answers for nodes that several others read; filled here.
    """
    bounding = {} if bounding is None else bounding
    pending = [value.producer()] if value is not None else []
    while pending:
        node = pending[-1]
        operands = [] if node is None else [each.producer() for each in _deciding(node)]
        open_operands = [each for each in operands if each is not None and each not in bounding]
        if node is None or node in bounding:
            pending.pop()
        elif open_operands:
            pending.extend(open_operands)
        else:
            bounding[node] = _bounding(node, [None if each is None else bounding[each] for each in operands])
            pending.pop()
    producer = None if value is None else value.producer()
    return None if producer is None else bounding[producer]


def _deciding(node: ir.Node) -> list[ir.Value]:
    if node.domain != "":
        return []
    if node.op_type in KEEPS_BOUNDS or (node.op_type == "Pow" and _constant_between(node.inputs[1], 0.0, np.inf)):
        operands = node.inputs[:1]
    elif node.op_type == "Sub" and _constant_between(node.inputs[0], 1.0, 1.0):
        operands = node.inputs[1:2]
    elif node.op_type in OF_ALL_OPERANDS or node.op_type == "Where":
        operands = node.inputs[1:] if node.op_type == "Where" else node.inputs
    else:
        operands = ()
    return [operand for operand in operands if operand is not None and not _constant_between(operand, 0.0, 1.0)]


def _bounding(node: ir.Node, deciding: list[ir.Node | None]) -> ir.Node | None:
    if node.domain != "":
        return None
    if node.op_type in BOUNDED or (node.op_type == "Clip" and _clips_to_probabilities(node)):
        return node
    if node.op_type == "Div" and _is_share(node):
        return node
    if node.op_type == "If":
        return node if _branches_are_bounded(node) else None
    if _may_extrapolate(node) or not deciding or any(each is None for each in deciding):
        return None
    return deciding[0]


def is_open(value: ir.Value | None) -> bool:
    """True if a value comes from a linear layer with nothing in between that could make it a probability."""
    pending, seen = [value], set()
    while pending:
        current = pending.pop()
        node = None if current is None else current.producer()
        if node is None or node.domain != "" or node in seen:
            continue
        if node.op_type in LINEAR:
            return True
        seen.add(node)
        if node.op_type in ADDS_TO:
            pending.extend(node.inputs[:2])
    return False


def open_node(value: ir.Value | None) -> ir.Node | None:
    """Return the linear layer that computes an unbounded value: only constants and weights were added or multiplied since."""
    while value is not None and (node := value.producer()) is not None and node.domain == "":
        if node.op_type in LINEAR:
            return node
        value = _only_operand(node)
    return None


def moved_from(value: ir.Value | None) -> ir.Node | None:
    """Return the standard node that computes the elements of a value, if they were only moved since; else None."""
    while value is not None and (node := value.producer()) is not None and node.domain == "":
        if node.op_type not in MOVES:
            return node
        value = node.inputs[0]
    return None


def bounded_logits_node(value: ir.Value | None) -> ir.Node | None:
    """Return the Tanh, Softsign or Clip that bounds a value to at most 1 or 2 in magnitude, with either sign; else None."""
    node = moved_from(value)
    if node is None or (node.op_type == "Clip" and not _clips_closely(node)):
        return None
    return node if node.op_type in ("Tanh", "Softsign", "Clip") else None


def node_of_last_axis(value: ir.Value | None) -> ir.Node | None:
    """Return the node that computes each line along the last axis of a value of three or more axes independently."""
    while value is not None and (node := value.producer()) is not None and node.domain == "":
        rank = None if value.shape is None else len(value.shape)
        if rank is None or rank < 3:
            return None
        if node.op_type in ("Softmax", "LogSoftmax"):
            axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
            return node if axis in (-1, rank - 1) else None
        if node.op_type == "MatMul":
            matrix = node.inputs[1]
            is_weight = matrix is not None and (matrix.is_initializer() or constant_array(matrix) is not None)
            return node if is_weight and matrix is not None and matrix.shape is not None and len(matrix.shape) == 2 else None
        value = None if node.op_type in ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten") else _only_operand(node)
    return None


def _only_operand(node: ir.Node) -> ir.Value | None:
    """Return the operand of a node that moves elements, or adds or multiplies a constant or a weight; else None."""
    if node.op_type in MOVES:
        return node.inputs[0]
    if node.op_type not in ("Add", "Sub", "Mul", "Div"):
        return None
    computed = [each for each in node.inputs if each is not None and not each.is_initializer() and constant_array(each) is None]
    return computed[0] if len(computed) == 1 else None


def are_probabilities(array: np.ndarray, class_axis: int) -> bool:
    """True if the numbers of an output are in [0, 1] and sum to 1 along an axis, up to rounding."""
    if array.size == 0 or array.ndim <= class_axis or array.shape[class_axis] < 2:
        return False
    values = array.astype(np.float64)
    tolerance = 16 * float(np.finfo(array.dtype).eps) if array.dtype.kind == "f" else 1e-1
    in_range = bool(np.all((values >= 0) & (values <= 1 + tolerance)))
    return in_range and bool(np.all(np.abs(values.sum(axis=class_axis) - 1) <= tolerance * array.shape[class_axis]))


def _clips_to_probabilities(node: ir.Node) -> bool:
    low, high = (node.inputs[index] if len(node.inputs) > index else None for index in (1, 2))
    return _constant_between(low, 0.0, np.inf) and _constant_between(high, -np.inf, 1.0)


def _clips_closely(node: ir.Node) -> bool:
    low, high = (node.inputs[index] if len(node.inputs) > index else None for index in (1, 2))
    return _constant_between(low, -2.0, 0.0) and _constant_between(high, 0.0, 2.0)


def _constant_between(value: ir.Value | None, low: float, high: float) -> bool:
    array = None if value is None else constant_array(value)
    return array is not None and array.dtype.kind in "fiu" and array.size > 0 and bool(np.all((array >= low) & (array <= high)))


def _may_extrapolate(node: ir.Node) -> bool:
    """Cubic interpolation exceeds the range of its points."""
    return node.op_type == "Resize" and "mode" in node.attributes and node.attributes["mode"].as_string() == "cubic"


def _is_share(node: ir.Node) -> bool:
    numerator, divisor = node.inputs[:2]
    source = None if numerator is None else numerator.producer()
    total = None if divisor is None else divisor.producer()
    while total is not None and total.op_type in ("Reshape", "Expand", "Unsqueeze", "Identity", "Cast") and total.inputs[0]:
        total = total.inputs[0].producer()
    if source is None or total is None or total.op_type not in ("ReduceSum", "ReduceL1"):
        return False
    return source.op_type in NEVER_NEGATIVE and total.inputs[0] is numerator


def _branches_are_bounded(node: ir.Node) -> bool:
    return bool(bodies(node)) and all(bounding_node(output) is not None for body in bodies(node) for output in body.outputs)
