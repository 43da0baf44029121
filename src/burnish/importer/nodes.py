"""Sorting, checking and naming of nodes, and Gradient nodes.

``ai.onnx.preview.training.Gradient`` refers to values by text attributes, which graph rewrites do not update. In the canonical
model it is ``burnish.Gradient``, which reads these values::

    points (the node's own inputs), xs, zs, y -> the gradient of y with respect to each of xs

Its attributes ``xs`` and ``zs`` hold the number of values of each kind.
"""

from __future__ import annotations

import graphlib
import heapq
import math
from collections.abc import Iterable, Sequence
from functools import cache

import onnx
import onnx_ir as ir

from burnish.errors import ModelError, UnsupportedOperatorError
from burnish.graph import (
    BURNISH_DOMAIN,
    TRAINING_DOMAIN,
    Names,
    attribute_value,
    bodies,
    constant_array,
    describe_node,
    remove_node,
    replace_uses,
    static_shape,
)
from burnish.graph.inference import operator_schema
from burnish.graph.protos import Body, graphs_within
from burnish.graph.uses import is_used, read_by


def is_sorted(graph: ir.Graph | ir.Function) -> bool:
    """True if every node follows its inputs, in a graph or function and its bodies."""
    following = set(graph)
    for node in graph:
        if any(value.producer() in following for value in read_by(node)) or not all(is_sorted(body) for body in bodies(node)):
            return False
        following.remove(node)
    return True


def with_sorted_nodes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with nodes sorted after their inputs, in bodies and functions too, and otherwise in their old order.

    Returns:
        The model itself if it is sorted, else a copy.

    Raises:
        ModelError: nodes depend on each other in a cycle.
    """
    bodies_of = list(graphs_within(proto.graph, *proto.functions))
    orders = [_order(body) for body in bodies_of]
    if all(order == sorted(order) for order in orders):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    # Innermost first: a node moves together with its bodies.
    for body, order in reversed(list(zip(graphs_within(copy.graph, *copy.functions), orders, strict=True))):
        nodes = [onnx.NodeProto.FromString(body.node[place].SerializeToString()) for place in order]
        body.ClearField("node")
        body.node.extend(nodes)
    return copy


def _order(body: Body) -> list[int]:
    """Return the order of computation as positions; among ready nodes the first comes first."""
    nodes = body.node
    given = {value if isinstance(value, str) else value.name for value in body.input}
    producers = {name: place for place, node in enumerate(nodes) for name in node.output if name and name not in given}
    waits = [{producers[name] for name in _read(node) if name in producers} for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for place, awaited in enumerate(waits):
        for producer in awaited:
            readers[producer].append(place)
    missing = [len(awaited) for awaited in waits]
    ready = [place for place, count in enumerate(missing) if not count]
    order: list[int] = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for reader in readers[place]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        raise _in_a_circle(nodes, waits)
    return order


def _read(node: onnx.NodeProto) -> set[str]:
    names = {name for name in node.input if name}
    for attribute in node.attribute:
        for body in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
            own = {value.name for value in (*body.input, *body.initializer)}
            own |= {name for inner in body.node for name in inner.output}
            read = {value.name for value in body.output}.union(*map(_read, body.node))
            names |= read - own
    return names


def _in_a_circle(nodes: Sequence[onnx.NodeProto], waits: Sequence[set[int]]) -> ModelError:
    try:
        graphlib.TopologicalSorter(dict(enumerate(waits))).prepare()
    except graphlib.CycleError as error:
        circle = [ir.from_proto(nodes[place]) for place in reversed(error.args[1])]
        said = " reads ".join(describe_node(node) for node in circle)
        return ModelError(f"nodes of the model read each other in a circle: {said}. Export the model again")
    raise AssertionError("nodes that wait for each other are in no circle")


_REMEDY = "Export the model again"
_ONE_NUMBER = {("Clip", 1), ("Clip", 2), ("CumSum", 1), ("OneHot", 1), ("TopK", 1), ("Trilu", 1)}
"""Operator and index of operands that must be single numbers, which the standard's checks do not verify."""
_Option = onnx.defs.OpSchema.FormalParameterOption


def check_references(model: ir.Model) -> None:
    """Raise ModelError for a node outside functions, in bodies too, with an attribute that refers to a function's attribute."""
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.is_ref():
                raise ModelError(
                    f"{describe_node(node)} takes its attribute '{attribute.name}' from the attribute "
                    f"'{attribute.ref_attr_name}' of a function, and stands in none. {_REMEDY}"
                )


def check_nodes(model: ir.Model) -> None:
    """Check every node of a model without functions, including bodies, before dtypes are inferred.

    Raises:
        ModelError: a node lacks a required input, has more outputs than its operator, or splits into a different number of pieces
            than it has outputs; or a constant does not have exactly one value.
    """
    opset = model.opset_imports.get("", 1)
    for node in model.graph.all_nodes():
        if node.domain != "":
            continue
        schema = operator_schema(node.op_type, opset)
        if schema is not None and len(node.outputs) > schema.max_output:
            raise ModelError(
                f"{describe_node(node)} has {len(node.outputs)} outputs, and its operator {schema.max_output} at most. {_REMEDY}"
            )
        if node.op_type == "Constant" and len(node.attributes) != 1:
            attributes = ", ".join(f"'{name}'" for name in node.attributes) or "none"
            raise ModelError(f"{describe_node(node)} has the attributes {attributes}, and a constant has one value. {_REMEDY}")
        if node.op_type == "Split":
            _check_split(node)
        for index, formal in enumerate(_formal_inputs(node.op_type, opset)):
            if formal.option == _Option.Single and (index >= len(node.inputs) or node.inputs[index] is None):
                raise ModelError(
                    f"{describe_node(node)} leaves out its input '{formal.name}', which its operator needs. {_REMEDY}"
                )


def check_operands(model: ir.Model) -> None:
    """Check the known dtypes of every node's operands.

    The standard's inference does not suffice: it expands operators into functions, some of which are wrong for dtypes other than
    float32.

    Raises:
        ModelError: an operand has a dtype that the operator does not accept, disagrees with another operand, or has several
            numbers instead of one.
    """
    opset = model.opset_imports.get("", 1)
    for node in model.graph.all_nodes():
        if node.domain != "":
            continue
        bound: dict[str, tuple[str, str]] = {}
        formals = _formal_inputs(node.op_type, opset)
        for index, value in enumerate(node.inputs):
            if not formals or value is None or value.type is None:
                continue
            formal = formals[min(index, len(formals) - 1)]
            kind = _type_name(value.type)
            name = f"{describe_node(node)} takes '{value.name}' of type {kind} as its input '{formal.name}'"
            if kind is None or (formal.option == _Option.Variadic and not formal.is_homogeneous):
                continue
            if formal.types and kind not in formal.types and not _takes_later(node, index, kind):
                raise ModelError(f"{name}, which can be {', '.join(sorted(formal.types))}. {_REMEDY}")
            other, other_kind = bound.setdefault(formal.type_str, (value.name or "", kind))
            if other_kind != kind:
                raise ModelError(f"{name}, beside '{other}' of type {other_kind}, and both have to be of one. {_REMEDY}")
            shape = static_shape(value) if (node.op_type, index) in _ONE_NUMBER else ()
            if shape is not None and math.prod(shape) != 1:
                raise ModelError(
                    f"{describe_node(node)} takes '{value.name}' of shape {list(shape)} as its input '{formal.name}', which is a "
                    f"single number. {_REMEDY}"
                )
        if node.op_type == "PRelu":
            _check_slope(node)


def _check_slope(node: ir.Node) -> None:
    """Raise ModelError for a PRelu slope that does not broadcast to the input; the standard's inference does not check it."""
    x, slope = node.inputs[0], node.inputs[1]
    if x is None or slope is None or x.shape is None or slope.shape is None:
        return
    pairs = zip(reversed(x.shape.dims), reversed(slope.shape.dims), strict=False)
    fits = len(slope.shape) <= len(x.shape) and all(
        low == 1 or low == extent or not (isinstance(low, int) and isinstance(extent, int)) for extent, low in pairs
    )
    if not fits:
        raise ModelError(
            f"{describe_node(node)} has the slope '{slope.name}' of shape {slope.shape}, which does not broadcast to the shape "
            f"{x.shape} of its input '{x.name}'. Before opset 7 a slope had one number for each channel: give it the shape "
            "[C, 1, ...], with a one for each axis behind the channels, or export the model again"
        )


def _takes_later(node: ir.Node, index: int, kind: str) -> bool:
    """True if a later version of an operator accepts bfloat16: exporters write it in opsets that do not allow it yet."""
    formals = _formal_inputs(node.op_type, onnx.defs.onnx_opset_version())
    return kind == "tensor(bfloat16)" and bool(formals) and kind in formals[min(index, len(formals) - 1)].types


def _check_split(node: ir.Node) -> None:
    """Raise ModelError if pieces and outputs differ in number: the standard's inference would crash the process."""
    count, sizes = attribute_value(node, "num_outputs", None), attribute_value(node, "split", None)
    operand = constant_array(node.inputs[1]) if len(node.inputs) > 1 else None
    pieces = {len(sizes) if sizes else None, count, None if operand is None else operand.size} - {None, len(node.outputs)}
    if pieces:
        raise ModelError(f"{describe_node(node)} cuts {pieces.pop()} pieces and has {len(node.outputs)} outputs. {_REMEDY}")


@cache
def _formal_inputs(op_type: str, opset: int) -> tuple[onnx.defs.OpSchema.FormalParameter, ...]:
    schema = operator_schema(op_type, opset)
    return () if schema is None else tuple(schema.inputs)


def _type_name(kind: object) -> str | None:
    """Return a type as in schemas: ``tensor(float)``, ``seq(tensor(int64))``."""
    if isinstance(kind, ir.TensorType):
        return f"tensor({kind.dtype.name.lower()})"
    prefix = "seq" if isinstance(kind, ir.SequenceType) else "optional" if isinstance(kind, ir.OptionalType) else None
    inner = _type_name(kind.elem_type) if isinstance(kind, ir.SequenceType | ir.OptionalType) else None
    return None if inner is None else f"{prefix}({inner})"


def name_everything(model: ir.Model) -> bool:
    """Name all nodes and values, in place, and rename duplicates.

    Inputs, outputs and initializers of the main graph keep their names.
    """
    graph = model.graph
    fixed = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
    taken = Names(value.name for value in fixed)
    settled = set(fixed)
    node_names = Names()
    changed = False
    for node in graph.all_nodes():
        name = node_names.take(node.name or node.op_type)
        changed |= name != node.name
        node.name = name
    for inner in model.graphs():
        values = [*inner.inputs, *inner.initializers.values(), *(output for node in inner for output in node.outputs)]
        changed |= _name_values((value for value in values if value not in settled), taken)
    for value in fixed:
        if not value.name:
            value.name = taken.take("value")
            changed = True
    return changed


def _name_values(values: Iterable[ir.Value], taken: Names) -> bool:
    changed = False
    for value in values:
        if not value.name:
            if is_absent(value):
                continue
            producer = value.producer()
            value.name = taken.take(f"{producer.name}_output_{value.index()}" if producer is not None else "value")
            changed = True
        else:
            name = taken.take(value.name)
            changed |= name != value.name
            value.name = name
    return changed


def is_absent(value: ir.Value) -> bool:
    """True if a value is an omitted optional output: no name and no use."""
    return not value.name and not is_used(value)


def is_gradient(node: ir.Node) -> bool:
    """True if a node is a gradient inside the model."""
    return node.op_type == "Gradient" and node.domain == BURNISH_DOMAIN


def bind_gradients(model: ir.Model) -> bool:
    """Replace, in place, the names in the main graph's Gradient nodes by the values.

    Raises:
        ModelError: a name does not exist, the numbers of inputs and names differ, or a differentiated value depends on its own
            gradient.
    """
    graph = model.graph
    nodes = [node for node in graph if node.domain == TRAINING_DOMAIN and node.op_type == "Gradient"]
    if not nodes:
        return False
    values = {value.name: value for value in (*graph.inputs, *graph.initializers.values())}
    values |= {output.name: output for node in graph for output in node.outputs if output.name}
    for node in nodes:
        _bind(node, values)
    graph.opset_imports[BURNISH_DOMAIN] = 1
    try:
        # The standard does not require the node to follow the value that it names.
        graph.sort()
    except ValueError as error:
        raise ModelError(
            f"{describe_node(nodes[0])}: what a Gradient of the model differentiates depends on that gradient. {_REMEDY}"
        ) from error
    return True


def refuse_gradients(model: ir.Model, what: str) -> None:
    """Raise UnsupportedOperatorError for a canonical model with a Gradient, since the mode of its layers would change."""
    for node in model.graph:
        if is_gradient(node):
            raise UnsupportedOperatorError(
                f"{describe_node(node)} is a gradient inside the model, which {what} does not take as it is. Give "
                "burnish.lower(model) in its place, in which it is standard operators"
            )


def stand_in_for_gradients(graph: ir.Graph) -> None:
    """Replace, in place, each gradient by an Identity of its point, from which inference gets dtype and shape."""
    for node in [node for node in graph if is_gradient(node)]:
        for point, output in zip(node.inputs[: len(node.outputs)], node.outputs, strict=True):
            if not output.name:
                continue
            name, output.name = output.name, None
            copy = ir.node("Identity", [point])
            copy.outputs[0].name = name
            graph.insert_before(node, copy)
            replace_uses(output, copy.outputs[0])
        remove_node(node)


def _bind(node: ir.Node, values: dict[str | None, ir.Value]) -> None:
    xs, zs = (tuple(attribute_value(node, name, ())) for name in ("xs", "zs"))
    names = (*xs, *zs, attribute_value(node, "y", ""))
    unknown = next((name for name in names if name not in values), None)
    if unknown is not None:
        raise ModelError(
            f"{describe_node(node)} differentiates '{unknown}', a value that the model's graph does not have. {_REMEDY}"
        )
    count = len(xs) + len(zs)
    if len(node.inputs) != count or any(value is None for value in node.inputs):
        raise ModelError(
            f"{describe_node(node)} has {len(node.inputs)} inputs, and names {count} values in xs and zs, which need one "
            f"each. {_REMEDY}"
        )
    if len(node.outputs) > len(xs):
        raise ModelError(f"{describe_node(node)} has {len(node.outputs)} outputs, and names {len(xs)} values in xs. {_REMEDY}")
    node.domain = BURNISH_DOMAIN
    node.attributes.clear()
    node.attributes["xs"] = ir.AttrInt64("xs", len(xs))
    node.attributes["zs"] = ir.AttrInt64("zs", len(zs))
    node.resize_inputs(count + len(names))
    for index, name in enumerate(names, start=count):
        node.replace_input_with(index, values[name])
