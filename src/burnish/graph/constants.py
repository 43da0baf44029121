"""Constants of a graph: known values, early evaluation, initializers, and integer weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from burnish.graph.annotations import describe_node
from burnish.graph.uses import remove_node


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """Return the array of an initializer or ``Constant`` node, or None if the value is known only at run time.

    A graph input with a default (an initializer that is also an input) is not a constant: callers may override it.
    """
    if value is None or value.is_graph_input():
        return None
    node = value.producer()
    if value.const_value is None and node is not None and node.op_type == "Constant" and node.domain == "":
        attribute = node.attributes.get("value")
        # Fast path for nearly all constants; the general protocol check is slow.
        if attribute is not None and isinstance(attribute.value, ir.Tensor):
            return attribute.value.numpy()
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def evaluated(node: ir.Node, operands: Mapping[str, np.ndarray], opset: int) -> list[np.ndarray]:
    """Return the outputs of a node for operands by name; an empty list if the evaluator fails."""
    from onnx.reference import ReferenceEvaluator  # imported here because burnish.compile loads this module without it

    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(ir.to_proto(node), opsets={"": opset}).run(None, dict(operands))
    except Exception:
        return []
    return [np.asarray(result) for result in results]


def constant_result(value: ir.Value, opset: int) -> np.ndarray | None:
    """Return a value that standard nodes compute from constants, such as a transposed or dequantized weight.

    Args:
        value: a value of a graph with this opset.
        opset: version of the standard domain.

    Returns:
        The array; None if it depends on an input or cannot be computed.
    """
    arrays: dict[ir.Value, np.ndarray] = {}
    pending = [value]
    while pending:
        current = pending[-1]
        array, node = constant_array(current), current.producer()
        if array is None and (node is None or node.domain != ""):
            return None
        operands = [] if node is None or array is not None else [operand for operand in node.inputs if operand is not None]
        missing = [operand for operand in operands if operand not in arrays]
        if missing:
            pending += missing
            continue
        if array is not None:
            arrays[current] = array
        else:
            assert node is not None
            results = evaluated(node, {operand.name or "": arrays[operand] for operand in operands}, opset)
            if not results:
                return None
            arrays.update(zip(node.outputs, results, strict=False))
        pending.pop()
    return arrays[value]


def add_initializer(graph: ir.Graph, name: str, array: np.ndarray | ir.TensorProtocol) -> ir.Value:
    """Add an initializer under an unused name."""
    tensor = ir.Tensor(array) if isinstance(array, np.ndarray) else array
    tensor.name = name
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
    graph.register_initializer(value)
    return value


def replace_by_initializer(graph: ir.Graph, node: ir.Node, array: np.ndarray | ir.TensorProtocol) -> ir.Value:
    """Replace a node by an initializer with the name of its output."""
    output = node.outputs[0]
    name, output.name = output.name, None
    value = add_initializer(graph, name or "weight", array)
    output.replace_all_uses_with(value)
    remove_node(node)
    return value


def initial_array(value: ir.Value) -> np.ndarray:
    """Return the array of an initializer; do not write to it."""
    assert value.const_value is not None
    return np.asarray(value.const_value.numpy())


def set_initializer(value: ir.Value, array: np.ndarray) -> None:
    """Store an array of any shape in an initializer, in its present dtype."""
    assert value.dtype is not None
    stored = np.asarray(array, value.dtype.numpy(), order="C")
    value.const_value = ir.Tensor(stored, value.dtype, name=value.name)
    value.shape = ir.Shape(stored.shape)


def remove_unread_value(graph: ir.Graph, value: ir.Value) -> None:
    """Remove an initializer, or the producer of a value, if nothing reads it."""
    if value.uses() or value.is_graph_output():
        return
    producer = value.producer()
    if producer is not None:
        remove_node(producer)
    elif value.is_initializer():
        graph.initializers.pop(value.name or "")


NARROW_INTEGERS = frozenset(dtype for dtype in ir.DataType if dtype.name in ("INT2", "INT4", "INT8", "UINT2", "UINT4", "UINT8"))
"""Dtypes of quantized weights; indices and shapes are wider."""


QUANTIZERS = frozenset({"DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"})


def is_quantized(graph: ir.Graph) -> bool:
    """True if any node of a graph, including its subgraphs, quantizes or dequantizes."""
    return any(node.op_type in QUANTIZERS for node in graph.all_nodes())


def quantization_of(node: ir.Node) -> str | None:
    """Return an explanation and remedy if a node has integer weights, else None.

    Weights are initializers of narrow integers with at least two dimensions.
    """
    for value in _integer_weights(node):
        assert value.dtype is not None
        assert value.shape is not None
        tensor = f"'{value.name}', {value.dtype.name.lower()} of shape {list(value.shape.numpy())}"
        return (
            f"the weights of {describe_node(node)} are integers ({tensor}), which no gradient moves: the model is "
            "quantized. Train the model in float32 that it was quantized from, and quantize the result"
        )
    return None


def integer_weights(graph: ir.Graph) -> dict[str, str]:
    """Return the integer weights of a graph: initializer name -> why they are not trained, as a clause."""
    names = [value.name or "" for node in graph.all_nodes() for value in _integer_weights(node)]
    why = "integers, as the model is quantized; what trains all weights is the model in float32 that it was quantized from"
    return dict.fromkeys(names, why)


def _integer_weights(node: ir.Node) -> Iterator[ir.Value]:
    for value in node.inputs:
        if value is None or not value.is_initializer() or value.dtype not in NARROW_INTEGERS:
            continue
        if value.shape is not None and len(value.shape) > 1:
            yield value
