"""Folding of shape arithmetic that does not depend on the batch, and of arithmetic on small constants.

Exporters write ``Reshape(x, Concat(Gather(Shape(x), 0), -1))``. Every element of such a chain is tracked as an integer or the
name of a dimension. Values of only integers become constants. A Reshape target of integers and its input's own named dimensions
becomes a constant with 0 for copied dimensions. Other uses of the batch stay computed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish.graph import FLOATING, attribute_value, constant_array, describe_node, remove_node, static_shape
from burnish.graph.annotations import COMPUTED, SHAPE_READER
from burnish.graph.constants import evaluated
from burnish.graph.uses import is_read

Element = int | float | bool | str | None
"""A known number, the name of a dimension, or None for unknown."""

MOVES = {"Gather": (0,), "Slice": (0,), "Squeeze": (0,), "Unsqueeze": (0,), "Identity": (0,), "Cast": (0,), "Concat": None}
"""Operators that move elements, and their source inputs (None: all)."""

COMPUTES = frozenset(
    "Abs Add And Ceil ConstantOfShape Div Equal Expand Floor Greater GreaterOrEqual Less LessOrEqual Max Min Mod Mul Neg Not "
    "Or Pow Range Reciprocal ReduceMax ReduceMin ReduceProd ReduceSum Reshape Sign Size Split Sqrt Sub Sum Transpose Where "
    "Xor".split()
)
"""Operators that are evaluated if all their operands are known."""

GROWS = frozenset({"ConstantOfShape", "Expand", "Range"})
"""Operators whose result may be far larger than their operands."""

LARGEST = 64
"""Largest folded result, in elements: shapes and axes are small, larger results are data."""

INTEGERS = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})


def fold_shape_constants(model: ir.Model) -> bool:
    """Replace, in place, the main graph's shape arithmetic by constants if shapes decide it; return True if any was."""
    graph = model.graph
    known: dict[ir.Value, np.ndarray] = {}
    elements: dict[ir.Value, np.ndarray] = {}
    for node in graph:
        if node.domain == "" and not any(output.is_graph_output() for output in node.outputs):
            _follow(node, known, elements, model.opset_imports[""])
    changed = _replace_known(graph, known)
    for node in list(graph):
        if node.op_type == "Reshape" and node.domain == "" and node.inputs[1] is not None:
            target = elements.get(node.inputs[1], _small_integers(node.inputs[1]))
            changed |= target is not None and _settle_target(graph, node, target)
    if changed:
        _remove_unread_arithmetic(graph)
    return changed


def _follow(node: ir.Node, known: dict[ir.Value, np.ndarray], elements: dict[ir.Value, np.ndarray], opset: int) -> None:
    output = node.outputs[0]
    if node.op_type == "Constant":
        array = _small(output)
        if array is not None:
            known[output] = array
    elif node.op_type == "Shape":
        elements[output] = _dimensions(node)
    elif node.op_type == "Size":
        shape = None if node.inputs[0] is None else static_shape(node.inputs[0])
        if shape is not None:
            known[output] = np.asarray(math.prod(shape), dtype=np.int64)
    elif node.op_type in MOVES:
        moved = _move(node, elements, opset)
        if moved is not None and moved.size <= LARGEST:
            elements[output] = moved
    elif node.op_type in COMPUTES:
        for result, value in zip(_compute(node, known, opset), node.outputs, strict=False):
            if result.size <= LARGEST:
                known[value] = result
    if output in elements and output.dtype is not None and all(_is_number(element) for element in elements[output].flat):
        known[output] = elements[output].astype(output.dtype.numpy())
    for value in node.outputs:
        if value in known:
            elements[value] = known[value].astype(object)


def _is_number(element: Element) -> bool:
    return element is not None and not isinstance(element, str)


def _dimensions(node: ir.Node) -> np.ndarray:
    value = node.inputs[0]
    if value is None or value.shape is None:
        return np.full((), None, dtype=object)
    dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape.dims]
    return np.array(dims[attribute_value(node, "start", 0) : attribute_value(node, "end", None)], dtype=object)


def _move(node: ir.Node, elements: dict[ir.Value, np.ndarray], opset: int) -> np.ndarray | None:
    sources = MOVES[node.op_type]
    pool: list[Element] = []
    arrays: dict[str, np.ndarray] = {}
    for index, value in enumerate(node.inputs):
        if value is None:
            continue
        content = elements.get(value)
        if content is None:
            array = _small_integers(value)
            content = None if array is None else array.astype(object)
        if content is None:
            return None
        if sources is None or index in sources:
            if content.ndim == 0 and content.item() is None:
                return None
            arrays[value.name or ""] = np.arange(len(pool), len(pool) + content.size, dtype=np.int64).reshape(content.shape)
            pool.extend(content.flat)
        elif all(_is_number(element) for element in content.flat):
            arrays[value.name or ""] = content.astype(np.int64)
        else:
            return None
    if node.op_type in ("Identity", "Cast"):
        return np.array(pool, dtype=object).reshape(next(iter(arrays.values())).shape)
    results = evaluated(node, arrays, opset)
    if not results:
        return None
    return np.array([pool[position] for position in results[0].flat], dtype=object).reshape(results[0].shape)


def _compute(node: ir.Node, known: dict[ir.Value, np.ndarray], opset: int) -> list[np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for value in node.inputs:
        if value is None:
            continue
        array = known.get(value)
        if array is None:
            array = _small_integers(value)
        if array is None:
            return []
        arrays[value.name or ""] = array
    if not any(value in known for value in node.inputs if value is not None):
        return []
    output = node.outputs[0]
    if node.op_type == "Expand" and output.dtype in FLOATING:
        return []  # Placeholder ones, which an export would turn into constants that look like weights.
    shape = static_shape(output)
    if node.op_type in GROWS and (shape is None or math.prod(shape) > LARGEST):
        return []
    return evaluated(node, arrays, opset)


def _small_integers(value: ir.Value) -> np.ndarray | None:
    """Return a constant of integers; floating-point initializers may be trained."""
    return _small(value) if value.dtype in INTEGERS else None


def _small(value: ir.Value) -> np.ndarray | None:
    shape = static_shape(value)
    numeric = value.dtype is not None and value.dtype != ir.DataType.STRING
    return constant_array(value) if numeric and shape is not None and math.prod(shape) <= LARGEST else None


def _replace_known(graph: ir.Graph, known: dict[ir.Value, np.ndarray]) -> bool:
    producers = {producer for value in known if (producer := value.producer()) is not None}
    replaced = False
    for value, array in known.items():
        producer = value.producer()
        if producer is None or producer.op_type == "Constant" or not any(usage.node not in producers for usage in value.uses()):
            continue
        value.replace_all_uses_with(_constant_before(graph, producer, array))
        replaced = True
    return replaced


def _settle_target(graph: ir.Graph, node: ir.Node, target: np.ndarray) -> bool:
    data = node.inputs[0]
    if data is None or data.shape is None or target.ndim != 1:
        return False
    dims: list[Element] = [dim if isinstance(dim, int) else dim.value for dim in data.shape.dims]
    written = target.tolist()
    resolved = None if attribute_value(node, "allowzero", 0) and 0 in written else _resolve(dims, written)
    if resolved is None or resolved == written:
        return False
    node.attributes.pop("allowzero", None)
    node.replace_input_with(1, _constant_before(graph, node, np.asarray(resolved, dtype=np.int64)))
    return True


def _resolve(dims: Sequence[Element], target: list[Element]) -> list[int] | None:
    """Return an equivalent integer target, in which 0 copies a dimension and -1 is the remainder."""
    extents = [dims[axis] if element == 0 and axis < len(dims) else element for axis, element in enumerate(target)]
    if None in dims or None in extents:
        return None
    if -1 in extents:
        remainder = _remainder(dims, [element for element in extents if element != -1])
        extents = [remainder if element == -1 else element for element in extents]
    resolved: list[int] = []
    for axis, element in enumerate(extents):
        if isinstance(element, int):
            resolved.append(element)
        else:
            resolved.append(0 if axis < len(dims) and dims[axis] == element else -1)
    return resolved if resolved.count(-1) <= 1 else None


def _remainder(dims: Sequence[Element], rest: Sequence[Element]) -> Element:
    """Return the extent of -1 next to a target's other extents: a number, a dimension, or -1 if it is neither."""
    extents = [math.prod(element for element in side if isinstance(element, int)) for side in (dims, rest)]
    names = [Counter(element for element in side if isinstance(element, str)) for side in (dims, rest)]
    if names[1] - names[0] or extents[1] == 0:
        return -1
    left = list((names[0] - names[1]).elements())
    if not left:
        return extents[0] // extents[1]
    return left[0] if len(left) == 1 and extents[0] == extents[1] else -1


def _constant_before(graph: ir.Graph, node: ir.Node, array: np.ndarray) -> ir.Value:
    constant = ir.node("Constant", [], {"value": ir.tensor(array)})
    graph.insert_before(node, constant)
    output = constant.outputs[0]
    output.dtype = ir.DataType.from_numpy(array.dtype)
    output.shape = ir.Shape(array.shape)
    COMPUTED.set(constant, True)
    return output


def _remove_unread_arithmetic(graph: ir.Graph) -> None:
    arithmetic = {"Shape", "Size", "Constant", *MOVES, *COMPUTES}
    for node in reversed(list(graph)):
        if node.op_type in arithmetic and node.domain == "" and not is_read(node):
            for value in node.inputs:
                if value is not None and value.is_initializer():
                    SHAPE_READER.set(value, describe_node(node))
            remove_node(node)
