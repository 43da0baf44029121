"""ONNX functions: replacement of calls by the nodes of their bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import onnx
import onnx_ir as ir

from burnish.graph.attributes import attribute_value, bodies
from burnish.graph.inference import infer_outputs, operator_schema
from burnish.graph.names import Names
from burnish.graph.protos import graphs_within, read_apart
from burnish.graph.uses import captured_once, remove_node
from burnish.graph.versions import keeps_meaning

CAPTURED = "burnish:captured:"
"""Prefix, followed by a number, of temporary names for captured values while a node's function is made."""


def settle_attributes(function: ir.Function, values: Mapping[str, ir.Attr]) -> None:
    """Set, in place, the attributes that refer to a function's attributes; those without a value are removed."""
    for node in function.all_nodes():
        for name, attribute in list(node.attributes.items()):
            if not attribute.is_ref():
                continue
            value = values.get(attribute.ref_attr_name or "")
            if value is None:
                del node.attributes[name]
            else:
                node.attributes[name] = ir.Attr(name, value.type, value.value, doc_string=value.doc_string)


def bind_operands(function: ir.Function, call: ir.Node) -> list[ir.Value | None]:
    """Connect a function's nodes to the inputs of a call, in place, and return the values of the function's outputs.

    An output that is an omitted operand is None.
    """
    operands = dict(zip(function.inputs, [*call.inputs, *[None] * len(function.inputs)], strict=False))
    for parameter, operand in operands.items():
        for reader, index in tuple(parameter.uses()):
            reader.replace_input_with(index, operand)
    return [operands.get(output, output) for output in function.outputs]


@cache
def has_function(op_type: str, opset: int) -> bool:
    """True if the standard defines an operator by a function, either general or dependent on the operand types."""
    schema: Any = operator_schema(op_type, opset)  # the type stubs lack its functions
    return schema is not None and bool(schema.has_function or schema.has_context_dependent_function)


def standard_function(node: ir.Node, opset: int) -> ir.Function | None:
    """Return the standard's function for a node of a graph with this opset; None if there is none.

    The functions are written in the opset that introduced the operator or a later one. The newest is used in which all operators
    mean the same as in the graph's opset.
    """
    schema: Any = operator_schema(node.op_type, opset)
    if node.domain != "" or schema is None:
        return None
    versions: list[tuple[int, Callable[[int], bytes]]] = []
    captured: dict[str, ir.Value] = {}
    own = {output.name for body in bodies(node) for inner in body.all_nodes() for output in inner.outputs}
    if schema.has_function:
        versions += [(version, schema.get_function_with_opset_version) for version in schema.function_opset_versions]
    if schema.has_context_dependent_function:
        proto, captured = _with_captured(node)
        types = [_type(value).SerializeToString() for value in node.inputs]

        def of_node(version: int) -> bytes:
            return bytes(schema.get_context_dependent_function_with_opset_version(version, proto.SerializeToString(), types))

        versions += [(version, of_node) for version in schema.context_dependent_function_opset_versions]
    for version, body in sorted(versions, key=lambda entry: -entry[0]):
        if version > opset or not (written := body(version)):
            continue
        function = _deserialized(onnx.FunctionProto.FromString(written), node)
        _bind_captured(function, captured)
        # The node's own bodies use the graph's opset, not the function's.
        added = [inner for inner in function.all_nodes() if not any(output.name in own for output in inner.outputs)]
        if set(function.opset_imports) <= {""} and all(keeps_meaning(inner, version, opset) for inner in added):
            settle_attributes(function, {**_defaults(schema), **node.attributes})
            return function
    return None


def _deserialized(proto: onnx.FunctionProto, node: ir.Node) -> ir.Function:
    """Return the function with the outputs of the node; a function made for a node may have fewer."""
    del proto.output[len(node.outputs) :]
    known = {*proto.input, *(name for inner in proto.node for name in inner.output)}
    proto.node.extend(onnx.helper.make_node("Constant", [], [name], value_int=0) for name in proto.output if name not in known)
    with read_apart():
        return ir.serde.deserialize_function(proto)


def _with_captured(node: ir.Node) -> tuple[onnx.NodeProto, dict[str, ir.Value]]:
    """Return a node as a proto in which bodies read captured values under unused names, and these values by name."""
    proto = ir.serde.serialize_node(node)
    captured = {f"{CAPTURED}{number}": value for number, value in enumerate(captured_once(node))}
    names = {value.name: name for name, value in captured.items()}
    own = [body for attribute in proto.attribute for body in (attribute.g, *attribute.graphs)]
    for body in graphs_within(*own) if captured else ():
        for inner in body.node:
            inner.input[:] = [names.get(name, name) for name in inner.input]
        for output in body.output:
            output.name = names.get(output.name, output.name)
    return proto, captured


def _bind_captured(function: ir.Function, captured: Mapping[str, ir.Value]) -> None:
    for node in function.all_nodes() if captured else ():
        for index, value in enumerate(node.inputs):
            outer = None if value is None else captured.get(value.name or "")
            if outer is not None:
                node.replace_input_with(index, outer)
        for body in bodies(node):
            for position, output in enumerate(body.outputs):
                outer = captured.get(output.name or "")
                if outer is not None:
                    body.outputs[position] = outer


def write_out(call: ir.Node, function: ir.Function, names: Names, node_names: Names) -> None:
    """Replace a node by the nodes of a function. The node's output values keep their identity.

    Args:
        call: the node, in a graph.
        function: its function, with settled attributes; consumed.
        names, node_names: names of the values and the nodes of the graph. New names are ``<call>/<name in the function>``.
    """
    graph = call.graph
    assert isinstance(graph, ir.Graph)
    stem = call.name or next((output.name for output in call.outputs if output.name), call.op_type)
    for node in function.all_nodes():
        node.name = node_names.take(f"{stem}/{node.name or node.op_type}")
        node.metadata_props.update(call.metadata_props)
        for value in (*node.outputs, *(value for body in bodies(node) for value in body.inputs)):
            if value.name:
                value.name = names.take(f"{stem}/{value.name}")
    results = bind_operands(function, call)
    nodes = list(function)
    function.outputs.clear()
    function.remove(nodes)
    graph.insert_before(call, nodes)
    for node in nodes:
        _infer(node, graph.opset_imports)
    outputs = [(output, tuple(output.uses())) for output in call.outputs]
    for (_, uses), result in zip(outputs, results, strict=False):
        for reader, index in uses:
            reader.replace_input_with(index, result)
    call.resize_outputs(0)
    for (output, uses), result in zip(outputs, results, strict=False):
        if result is None or not output.name:
            continue
        graph.insert_before(call, ir.node("Identity", [result], outputs=[output], metadata_props=dict(call.metadata_props)))
        for reader, index in uses:
            reader.replace_input_with(index, output)
    remove_node(call)


def _type(value: ir.Value | None) -> onnx.TypeProto:
    if value is None or value.type is None:
        return onnx.TypeProto()
    return ir.serde.serialize_value(value).type


def _defaults(schema: onnx.defs.OpSchema) -> dict[str, ir.Attr]:
    stated = {name: formal.default_value for name, formal in schema.attributes.items()}
    undefined = onnx.AttributeProto.UNDEFINED
    return {name: ir.serde.deserialize_attribute(value) for name, value in stated.items() if value.type != undefined}


def _infer(node: ir.Node, imports: Mapping[str, int]) -> None:
    inner = bodies(node)
    if not inner:
        infer_outputs(node, imports)
        return
    for body in inner:
        for value, operand, dropped in _entering(node, body):
            if operand is not None:
                value.type, value.shape = operand.type, _without(operand.shape, dropped)
        for inside in body:
            _infer(inside, imports)
    carried = _carried(node)
    for index, output in enumerate(node.outputs):
        result = inner[0].outputs[index + (node.op_type == "Loop")]
        output.type = result.type
        if node.op_type == "Scan":
            axes = attribute_value(node, "scan_output_axes", [])
            axis = axes[index - carried] if index >= carried and axes else 0
            output.shape = result.shape if index < carried else _with(result.shape, axis)
        elif index >= carried:
            output.shape = _with(result.shape, 0)


def _carried(node: ir.Node) -> int:
    """Return the number of outputs that are final values of carried variables; all outputs for an If."""
    if node.op_type == "Scan":
        return len(node.inputs) - int(attribute_value(node, "num_scan_inputs", 0))
    return len(node.inputs) - 2 if node.op_type == "Loop" else len(node.outputs)


def _entering(node: ir.Node, body: ir.Graph) -> Sequence[tuple[ir.Value, ir.Value | None, int | None]]:
    """Return, for each input of a body, the operand that it comes from and the operand's axis that it lacks."""
    if node.op_type == "Loop":
        return [(value, operand, None) for value, operand in zip(body.inputs[2:], node.inputs[2:], strict=False)]
    if node.op_type != "Scan":
        return []
    carried, axes = _carried(node), attribute_value(node, "scan_input_axes", [])
    dropped = [None] * carried + (list(axes) or [0] * (len(node.inputs) - carried))
    return list(zip(body.inputs, node.inputs, dropped, strict=False))


def _without(shape: ir.Shape | None, axis: int | None) -> ir.Shape | None:
    if shape is None:
        return None
    dims = list(shape.dims)
    if axis is not None:
        del dims[axis]
    return ir.Shape(dims)


def _with(shape: ir.Shape | None, axis: int) -> ir.Shape | None:
    if shape is None:
        return None
    dims = list(shape.dims)
    dims.insert(axis if axis >= 0 else len(dims) + 1 + axis, ir.SymbolicDim(None))
    return ir.Shape(dims)
