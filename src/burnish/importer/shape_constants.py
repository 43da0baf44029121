"""Shape arithmetic that does not depend on the batch becomes constants.

Exporters write ``Reshape(x, Concat(Gather(Shape(x), 0), -1))``. Every element of such a chain is followed through the graph, as
an integer or as the name of a dimension. Values of integers alone become constants; a Reshape whose target is its input's
own named dimensions beside integers gets a constant target, with 0 for a dimension that is copied. What else reads the
batch stays computed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from burnish.graph import constant_array, static_shape

Element = int | str | None
"""A known integer, the name of a dimension, or unknown."""

MOVES = {"Gather": (0,), "Slice": (0,), "Squeeze": (0,), "Unsqueeze": (0,), "Identity": (0,), "Cast": (0,), "Concat": None}
"""Operators that move elements, and the inputs they take them from (None: all)."""

COMPUTES = frozenset(
    "Add And ConstantOfShape Div Equal Expand Greater Less Max Min Mod Mul Not Or Range ReduceProd Reshape Split Sub Transpose "
    "Where".split()
)
"""Operators that are evaluated when all their operands are known."""

LARGEST = 64
"""Shapes and axes are small; a larger result is data and stays computed."""

INTEGERS = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})


def fold_shape_constants(model: ir.Model) -> bool:
    """Replace, in place, shape arithmetic of the main graph by constants where shapes decide it; whether any was."""
    graph = model.graph
    known: dict[ir.Value, np.ndarray] = {}
    elements: dict[ir.Value, np.ndarray] = {}
    for node in graph:
        if node.domain == "" and not any(output.is_graph_output() for output in node.outputs):
            _follow(node, known, elements, model.opset_imports[""])
    changed = _replace_known(graph, known)
    for node in list(graph):
        if node.op_type == "Reshape" and node.domain == "" and node.inputs[1] in elements:
            changed |= _settle_target(graph, node, elements[node.inputs[1]])
    if changed:
        _remove_unread(graph)
    return changed


def _follow(node: ir.Node, known: dict[ir.Value, np.ndarray], elements: dict[ir.Value, np.ndarray], opset: int) -> None:
    output = node.outputs[0]
    if node.op_type == "Shape":
        elements[output] = _dimensions(node)
    elif node.op_type == "Size":
        shape = None if node.inputs[0] is None else static_shape(node.inputs[0])
        if shape is not None:
            known[output] = np.asarray(math.prod(shape), dtype=np.int64)
    elif node.op_type in MOVES and output.dtype in INTEGERS:
        moved = _move(node, elements, opset)
        if moved is not None:
            elements[output] = moved
    elif node.op_type in COMPUTES:
        for result, value in zip(_compute(node, known, opset), node.outputs, strict=False):
            if result.dtype.kind in "ib" and result.size <= LARGEST:
                known[value] = result
    if output in elements and all(isinstance(element, int) for element in elements[output].flat) and output.dtype is not None:
        known[output] = elements[output].astype(output.dtype.numpy())
    if output in known:
        elements[output] = known[output].astype(object)


def _dimensions(node: ir.Node) -> np.ndarray:
    value = node.inputs[0]
    if value is None or value.shape is None:
        return np.full((), None, dtype=object)
    dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape.dims]
    start = node.attributes["start"].as_int() if "start" in node.attributes else 0
    end = node.attributes["end"].as_int() if "end" in node.attributes else len(dims)
    return np.array(dims[start:end], dtype=object)


def _move(node: ir.Node, elements: dict[ir.Value, np.ndarray], opset: int) -> np.ndarray | None:
    """Move numbers that stand for the elements through a node, and return the elements they stand for."""
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
        elif all(isinstance(element, int) for element in content.flat):
            arrays[value.name or ""] = content.astype(np.int64)
        else:
            return None
    if node.op_type in ("Identity", "Cast"):
        return np.array(pool, dtype=object).reshape(next(iter(arrays.values())).shape)
    results = _run(node, arrays, opset)
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
    return _run(node, arrays, opset)


def _small_integers(value: ir.Value) -> np.ndarray | None:
    shape = static_shape(value)
    if value.dtype not in INTEGERS or shape is None or math.prod(shape) > LARGEST:
        return None
    return constant_array(value)


def _run(node: ir.Node, arrays: dict[str, np.ndarray], opset: int) -> list[np.ndarray]:
    """Evaluate one node; nothing where the evaluator cannot, since to fold is never needed."""
    try:
        evaluator = ReferenceEvaluator(ir.to_proto(node), opsets={"": opset})
        return [np.asarray(result) for result in evaluator.run(None, arrays)]
    except Exception:
        return []


def _replace_known(graph: ir.Graph, known: dict[ir.Value, np.ndarray]) -> bool:
    producers = {producer for value in known if (producer := value.producer()) is not None}
    replaced = False
    for value, array in known.items():
        producer = value.producer()
        if producer is None or not any(usage.node not in producers for usage in value.uses()):
            continue
        value.replace_all_uses_with(_constant_before(graph, producer, array))
        replaced = True
    return replaced


def _settle_target(graph: ir.Graph, node: ir.Node, target: np.ndarray) -> bool:
    """Give a Reshape a constant target where its input's shape tells all of it; whether it did."""
    data = node.inputs[0]
    if data is None or data.shape is None or target.ndim != 1 or "allowzero" in node.attributes:
        return False
    dims: list[Element] = [dim if isinstance(dim, int) else dim.value for dim in data.shape.dims]
    resolved = _resolve(dims, list(target))
    if resolved is None:
        return False
    node.replace_input_with(1, _constant_before(graph, node, np.asarray(resolved, dtype=np.int64)))
    return True


def _resolve(dims: Sequence[Element], target: list[Element]) -> list[int] | None:
    """Return a target of integers that means the same: 0 copies a dimension, -1 is what remains."""
    wanted = [dims[axis] if element == 0 and axis < len(dims) else element for axis, element in enumerate(target)]
    names = Counter(dim for dim in dims if not isinstance(dim, int))
    if None in names or None in wanted:
        return None
    rest = [element for element in wanted if element != -1]
    extent = math.prod(element for element in rest if isinstance(element, int))
    if len(rest) < len(wanted) and extent > 0 and Counter(element for element in rest if isinstance(element, str)) == names:
        remaining = math.prod(dim for dim in dims if isinstance(dim, int)) // extent
        wanted = [remaining if element == -1 else element for element in wanted]
    resolved: list[int] = []
    for axis, element in enumerate(wanted):
        if isinstance(element, int):
            resolved.append(element)
        else:
            resolved.append(0 if axis < len(dims) and dims[axis] == element else -1)
    return resolved if resolved.count(-1) <= 1 else None


def _constant_before(graph: ir.Graph, node: ir.Node, array: np.ndarray) -> ir.Value:
    constant = ir.node("Constant", [], {"value": ir.tensor(array)})
    graph.insert_before(node, constant)
    output = constant.outputs[0]
    output.dtype = ir.DataType.from_numpy(array.dtype)
    output.shape = ir.Shape(array.shape)
    return output


def _remove_unread(graph: ir.Graph) -> None:
    """Remove the arithmetic that nothing reads any more."""
    arithmetic = {"Shape", "Size", "Constant", *MOVES, *COMPUTES}
    for node in reversed(list(graph)):
        read = any(output.uses() or output.is_graph_output() for output in node.outputs)
        if not read and node.op_type in arithmetic and node.domain == "":
            graph.remove(node, safe=True)
