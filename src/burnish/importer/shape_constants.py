"""Shape arithmetic that does not depend on the batch becomes constants.

Exporters write ``Reshape(x, Concat(Gather(Shape(x), 0), ...))``. Where every extent that such a chain reads is known, its
result is a constant, and inference and gradients see a static shape. Chains that read the batch stay.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from burnish.graph import constant_array, static_shape

FOLDED = frozenset(
    "Add Cast Concat ConstantOfShape Div Equal Expand Floor Gather Mod Mul Neg Range ReduceProd Slice Split Squeeze Sub "
    "Transpose Unsqueeze Where Reshape Identity Max Min Greater Less Not And Or".split()
)
LARGEST = 64
"""Shapes and axes are small; a larger result is data and stays computed."""


def fold_shape_constants(model: ir.Model) -> bool:
    """Replace, in place, integer and boolean values of the main graph that static shapes decide; whether any was."""
    graph = model.graph
    known: dict[ir.Value, np.ndarray] = {}
    extents: dict[ir.Value, tuple[object, ...]] = {}
    for node in list(graph):
        if node.domain != "" or any(output.is_graph_output() for output in node.outputs):
            continue
        if node.op_type == "Shape":
            extents[node.outputs[0]] = _extents(node)
            results = _static(extents[node.outputs[0]])
        elif node.op_type in ("Gather", "Slice") and node.inputs[0] in extents:
            results = _select(node, extents[node.inputs[0]], model.opset_imports[""])
        elif node.op_type == "Size":
            results = _count(node)
        elif node.op_type in FOLDED:
            results = _evaluate(node, known, model.opset_imports[""])
        else:
            continue
        for output, result in zip(node.outputs, results, strict=False):
            if result.dtype.kind in "ib" and result.size <= LARGEST:
                known[output] = result
    replaced = False
    producers = {producer for value in known if (producer := value.producer()) is not None}
    for value, array in known.items():
        producer = value.producer()
        if producer is None or not any(usage.node not in producers for usage in value.uses()):
            continue
        constant = ir.node("Constant", [], {"value": ir.tensor(array)})
        graph.insert_before(producer, constant)
        constant.outputs[0].dtype = ir.DataType.from_numpy(array.dtype)
        constant.outputs[0].shape = ir.Shape(array.shape)
        value.replace_all_uses_with(constant.outputs[0])
        replaced = True
    for node in reversed([producer for value in known if (producer := value.producer()) is not None]):
        if node.graph is graph and not any(output.uses() for output in node.outputs):
            graph.remove(node, safe=True)
    return replaced


def _extents(node: ir.Node) -> tuple[object, ...]:
    """Return the dimensions that a Shape node gives, known or not."""
    value = node.inputs[0]
    if value is None or value.shape is None:
        return ()
    start = node.attributes["start"].as_int() if "start" in node.attributes else 0
    end = node.attributes["end"].as_int() if "end" in node.attributes else len(value.shape)
    return tuple(value.shape.dims[start:end]) if len(value.shape) else ()


def _static(dims: tuple[object, ...]) -> list[np.ndarray]:
    return [np.asarray(dims, dtype=np.int64)] if dims and all(isinstance(dim, int) for dim in dims) else []


def _select(node: ir.Node, dims: tuple[object, ...], opset: int) -> list[np.ndarray]:
    """Return what a Gather or Slice takes from a shape, when the extents that it takes are known."""
    arrays = {"": np.arange(len(dims), dtype=np.int64)}
    for value in node.inputs[1:]:
        array = constant_array(value)
        if value is not None and array is None:
            return []
        if value is not None and array is not None:
            arrays[value.name or ""] = array
    assert node.inputs[0] is not None
    arrays[node.inputs[0].name or ""] = arrays.pop("")
    positions = _run(node, arrays, opset)
    if not positions or not all(isinstance(dims[position], int) for position in positions[0].flat):
        return []
    selected = [dims[position] for position in positions[0].flat]
    return [np.asarray(selected, dtype=np.int64).reshape(positions[0].shape)]


def _count(node: ir.Node) -> list[np.ndarray]:
    shape = None if node.inputs[0] is None else static_shape(node.inputs[0])
    return [] if shape is None else [np.asarray(int(np.prod(shape, dtype=np.int64)), dtype=np.int64)]


def _evaluate(node: ir.Node, known: dict[ir.Value, np.ndarray], opset: int) -> list[np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for value in node.inputs:
        if value is None:
            continue
        array = known.get(value)
        if array is None:
            array = constant_array(value) if value.dtype in _SMALL_TYPES and _is_small(value) else None
        if array is None:
            return []
        arrays[value.name or ""] = array
    if not any(value in known for value in node.inputs if value is not None):
        return []
    return _run(node, arrays, opset)


def _run(node: ir.Node, arrays: dict[str, np.ndarray], opset: int) -> list[np.ndarray]:
    """Evaluate one node; nothing where the evaluator cannot, since to fold is never needed."""
    try:
        evaluator = ReferenceEvaluator(ir.to_proto(node), opsets={"": opset})
        return [np.asarray(result) for result in evaluator.run(None, arrays)]
    except Exception:
        return []


_SMALL_TYPES = frozenset({ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL})


def _is_small(value: ir.Value) -> bool:
    shape = static_shape(value)
    return shape is not None and int(np.prod(shape, dtype=np.int64)) <= LARGEST
