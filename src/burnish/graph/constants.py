"""Constants: what is known when a graph is made, nodes that are computed then, initializers, and weights that are integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from burnish.graph.annotations import describe_node
from burnish.graph.uses import remove_node


def constant_array(value: ir.Value | None) -> np.ndarray | None:
    """Return the array behind an initializer or a ``Constant`` node, or None when it is known only at run time.

    A graph input with a default (an initializer that is also an input) is not a constant: a caller may override it.
    """
    if value is None or value.is_graph_input():
        return None
    node = value.producer()
    if value.const_value is None and node is not None and node.op_type == "Constant" and node.domain == "":
        attribute = node.attributes.get("value")
        # Nearly all constants; that the tensor is one by its methods takes long to find out.
        if attribute is not None and isinstance(attribute.value, ir.Tensor):
            return attribute.value.numpy()
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def evaluated(node: ir.Node, operands: Mapping[str, np.ndarray], opset: int) -> list[np.ndarray]:
    """Return the outputs of a node for operands by name; nothing where the evaluator fails: computing early is never needed."""
    from onnx.reference import ReferenceEvaluator  # not above: burnish.compile is imported without it

    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(ir.to_proto(node), opsets={"": opset}).run(None, dict(operands))
    except Exception:
        return []
    return [np.asarray(result) for result in results]


def constant_result(value: ir.Value, opset: int) -> np.ndarray | None:
    """Return what nodes of the standard make of constants alone, such as a transposed or a dequantized weight.

    Args:
        value: of a graph of this opset.
        opset: the version of the standard's operators.

    Returns:
        The array; None where it hangs on an input, or cannot be computed.
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
    """Add an initializer under a name that must be free."""
    tensor = ir.Tensor(array) if isinstance(array, np.ndarray) else array
    tensor.name = name
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor)
    graph.register_initializer(value)
    return value


def replace_by_initializer(graph: ir.Graph, node: ir.Node, array: np.ndarray | ir.TensorProtocol) -> ir.Value:
    """Let an initializer of a graph stand for the output of a node, under its name, and remove the node."""
    output = node.outputs[0]
    name, output.name = output.name, None
    value = add_initializer(graph, name or "weight", array)
    output.replace_all_uses_with(value)
    remove_node(node)
    return value


def initial_array(value: ir.Value) -> np.ndarray:
    """Return what an initializer holds; the array is not to be written to."""
    assert value.const_value is not None
    return np.asarray(value.const_value.numpy())


def set_initializer(value: ir.Value, array: np.ndarray) -> None:
    """Let an initializer hold another array, of any shape, in the dtype that it has."""
    assert value.dtype is not None
    stored = np.asarray(array, value.dtype.numpy(), order="C")
    value.const_value = ir.Tensor(stored, value.dtype, name=value.name)
    value.shape = ir.Shape(stored.shape)


def remove_unread_value(graph: ir.Graph, value: ir.Value) -> None:
    """Remove an initializer, or the node that made a value, unless something reads it."""
    if value.uses() or value.is_graph_output():
        return
    producer = value.producer()
    if producer is not None:
        remove_node(producer)
    elif value.is_initializer():
        graph.initializers.pop(value.name or "")


NARROW_INTEGERS = frozenset(dtype for dtype in ir.DataType if dtype.name in ("INT2", "INT4", "INT8", "UINT2", "UINT4", "UINT8"))
"""What weights are quantized to; indices and shapes are wider."""


QUANTIZERS = frozenset({"DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"})


def is_quantized(graph: ir.Graph) -> bool:
    """Whether a node of a graph, or of a body in it, rounds to integers, or makes numbers of them again."""
    return any(node.op_type in QUANTIZERS for node in graph.all_nodes())


def quantization_of(node: ir.Node) -> str | None:
    """Return, in words and with what to do, that a node computes with weights that are integers; None where it does not.

    Weights are initializers of narrow integers with two dimensions or more.
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
    """Return the weights of a graph that are integers: initializer name -> why they do not train, as a clause."""
    names = [value.name or "" for node in graph.all_nodes() for value in _integer_weights(node)]
    why = "integers, as the model is quantized; what trains all weights is the model in float32 that it was quantized from"
    return dict.fromkeys(names, why)


def _integer_weights(node: ir.Node) -> Iterator[ir.Value]:
    for value in node.inputs:
        if value is None or not value.is_initializer() or value.dtype not in NARROW_INTEGERS:
            continue
        if value.shape is not None and len(value.shape) > 1:
            yield value
