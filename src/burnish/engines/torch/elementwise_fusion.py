"""Fusion of elementwise arithmetic: a chain of nodes over tensors of one shape becomes one pass over memory.

Groups grow along the edges of the graph, in its order. A node joins the group of an operand where everything that it reads from
outside is computed without that group; so a group can run as one node, at the place of its last.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, constant_array

# The numbers are those of the enumeration in kernels/elementwise.cpp.
OPERATIONS = {
    "Add": 0,
    "Sub": 1,
    "Mul": 2,
    "Div": 3,
    "Max": 4,
    "Min": 5,
    "Neg": 6,
    "Sqrt": 7,
    "Reciprocal": 8,
    "Abs": 9,
    "Relu": 10,
}
LONGEST_GROUP = 24
FEWEST_ELEMENTS = 1024
"""Smaller tensors of known extents are left to ATen: a call costs as much as they do."""


@dataclass
class _Group:
    shape: ir.Shape
    nodes: list[ir.Node] = field(default_factory=list)


def fuse_elementwise(graph: ir.Graph) -> None:
    """Replace chains of elementwise nodes by ``burnish.FusedElementwise`` nodes, in place; the graph stays in order."""
    group_of: dict[ir.Node, _Group] = {}
    groups: list[_Group] = []
    # For every value the groups that it depends on through nodes outside of them.
    behind: dict[ir.Value, frozenset[int]] = {}
    for node in graph:
        operands = [value for value in node.inputs if value is not None]
        depends = frozenset().union(*(behind.get(value, frozenset()) for value in operands)) if operands else frozenset()
        shape = _shape(node)
        joined = None
        if shape is not None:
            for value in operands:
                producer = value.producer()
                group = None if producer is None else group_of.get(producer)
                if group is None or group.shape != shape or len(group.nodes) >= LONGEST_GROUP:
                    continue
                outside = [other for other in operands if (maker := other.producer()) is None or group_of.get(maker) is not group]
                if all(id(group) not in behind.get(other, frozenset()) for other in outside):
                    joined = group
                    break
            if joined is None:
                joined = _Group(shape)
                groups.append(joined)
            joined.nodes.append(node)
            group_of[node] = joined
        own = frozenset() if joined is None else frozenset((id(joined),))
        for output in node.outputs:
            behind[output] = depends | own
    for group in groups:
        if len(group.nodes) > 1:
            _replace(graph, group)
    graph.sort()


def _shape(node: ir.Node) -> ir.Shape | None:
    """The one shape that an elementwise float32 node computes over, or None for any other node."""
    if node.domain != "" or node.op_type not in OPERATIONS or len(node.inputs) > 2:
        return None
    output = node.outputs[0]
    if output.dtype != ir.DataType.FLOAT or output.shape is None or not output.shape.dims:
        return None
    if any(not isinstance(extent, int) and extent.value is None for extent in output.shape.dims):
        return None
    if all(isinstance(extent, int) for extent in output.shape.dims):
        elements = 1
        for extent in output.shape.dims:
            elements *= int(extent)  # type: ignore[arg-type]
        if elements < FEWEST_ELEMENTS:
            return None
    for value in node.inputs:
        if value is None or value.dtype != ir.DataType.FLOAT or value.shape is None:
            return None
        if value.shape.dims and value.shape != output.shape:
            return None
    return output.shape


def _replace(graph: ir.Graph, group: _Group) -> None:
    members = set(group.nodes)
    tensors: dict[ir.Value, int] = {}
    scalars: dict[ir.Value, int] = {}
    constants: dict[float, int] = {}
    for node in group.nodes:
        for value in node.inputs:
            assert value is not None
            assert value.shape is not None
            if value.producer() in members:
                continue
            array = constant_array(value) if not value.shape.dims else None
            if array is not None:
                constants.setdefault(float(array), len(constants))
            elif value.shape.dims:
                tensors.setdefault(value, len(tensors))
            else:
                scalars.setdefault(value, len(scalars))
    if not tensors:
        return
    inputs = len(tensors) + len(scalars) + len(constants)
    register = {value: index for value, index in tensors.items()}
    register |= {value: len(tensors) + index for value, index in scalars.items()}
    program: list[int] = []
    results: list[ir.Value] = []
    for index, node in enumerate(group.nodes):
        operands = []
        for value in node.inputs:
            assert value is not None
            assert value.shape is not None
            if value in register:
                operands.append(register[value])
            else:
                operands.append(len(tensors) + len(scalars) + constants[float(constant_array(value))])  # type: ignore[arg-type]
        program += [OPERATIONS[node.op_type], inputs + index, operands[0], operands[1] if len(operands) > 1 else -1]
        output = node.outputs[0]
        register[output] = inputs + index
        if output.is_graph_output() or any(user not in members for user, _ in output.uses()):
            results.append(output)
    fused = ir.node(
        "FusedElementwise",
        [*tensors, *scalars],
        {
            "tensors": len(tensors),
            "constants": [float(constant) for constant in constants] or [0.0],
            "constant_count": len(constants),
            "program": program,
            "results": [register[value] for value in results],
        },
        domain=BURNISH_DOMAIN,
        num_outputs=len(results),
    )
    graph.insert_after(group.nodes[-1], fused)
    for value, replacement in zip(results, fused.outputs, strict=True):
        replacement.type, replacement.shape = value.type, value.shape
        name = value.name
        value.replace_all_uses_with(replacement, replace_graph_outputs=True)
        value.name, replacement.name = None, name
    for node in reversed(group.nodes):
        graph.remove(node, safe=True)
