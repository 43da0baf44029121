"""Joint updates of small tensors.

Most parameters of a network are small, but updating a scale or running mean takes as many nodes as the largest weight. If equal
arithmetic produces outputs of the graph and nothing else, its operands are concatenated, computed once, and split again. Every
element stays identical to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor, constant_array, remove_node, static_shape
from burnish.graph.annotations import source_of
from burnish.graph.uses import remove_unread_nodes, replace_output

ELEMENTWISE = frozenset(
    "Abs Add And Cast Clip Div Equal Exp Greater GreaterOrEqual Less LessOrEqual Log Max Min Mul Neg Not Or Pow Reciprocal Sign "
    "Sqrt Sub Sum Where".split()
)
MOST_ELEMENTS = 2048
"""Largest tensor to join, in elements; copying more takes longer than the saved nodes."""
SEVERAL = "the updates of several layers"
"""Source recorded for nodes that replace nodes with different sources."""

Shape = tuple[int, ...]
_Operand = tuple[str, int | ir.Value] | None


def join_updates(model: ir.Model) -> bool:
    """Join equal updates, in place, if there are enough of them to save nodes; in the main graph only.

    They are joined along the first axis; the other extents must be equal, so that no reshapes are needed.
    """
    groups: dict[str, list[_Update]] = {}
    for update in _updates(model.graph):
        groups.setdefault(update.key, []).append(update)
    changed = False
    for updates in groups.values():
        first = updates[0]
        results = sum(node.outputs[0].is_graph_output() for node in first.nodes)
        # Joining and splitting costs about one node of arithmetic per operand and result.
        if len(updates) * len(first.nodes) >= 2 * (len(first.nodes) + len(first.leaves) + results):
            _join(model.graph, updates)
            changed = True
    return remove_unread_nodes(model.graph) or changed


@dataclass
class _Update:
    """Elementwise arithmetic on tensors of one shape that produces only outputs of the graph.

    Attributes:
        shape: shape of all operands and results except single elements.
        nodes: the nodes in graph order.
        operands: inputs of each node: ``node``, ``leaf`` or ``constant`` with an index into these lists, ``single`` with its
            value, or None if omitted.
        leaves: operands of that shape from outside.
        constants: known single elements.
    """

    shape: Shape
    nodes: list[ir.Node]
    operands: list[list[_Operand]] = field(default_factory=list)
    leaves: list[ir.Value] = field(default_factory=list)
    constants: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        places = {node.outputs[0]: place for place, node in enumerate(self.nodes)}
        self.operands = [[self._operand(node, value, places) for value in node.inputs] for node in self.nodes]

    def _operand(self, node: ir.Node, value: ir.Value | None, places: dict[ir.Value, int]) -> _Operand:
        if value is None:
            return None
        if value in places:
            return "node", places[value]
        if static_shape(value) == self.shape:
            if value not in self.leaves:
                self.leaves.append(value)
            return "leaf", self.leaves.index(value)
        array = constant_array(value)
        if array is None or node.op_type == "Clip":  # bounds of Clip cannot differ per element
            return "single", value
        self.constants.append(array)
        return "constant", len(self.constants) - 1

    @property
    def key(self) -> str:
        dtypes = [[None if value is None else value.dtype for value in (*node.inputs, *node.outputs)] for node in self.nodes]
        attributes = [sorted((name, str(own.value)) for name, own in node.attributes.items()) for node in self.nodes]
        results = [node.outputs[0].is_graph_output() for node in self.nodes]
        operands = [[_identity(operand) for operand in own] for own in self.operands]
        ranks = [array.ndim for array in self.constants]
        return repr((self.shape[1:], [node.op_type for node in self.nodes], attributes, dtypes, operands, ranks, results))


def _identity(operand: _Operand) -> object:
    if operand is None or not isinstance(operand[1], ir.Value):
        return operand
    array = constant_array(operand[1])
    return id(operand[1]) if array is None else array.tobytes()


def _updates(graph: ir.Graph) -> list[_Update]:
    shapes: dict[ir.Node, Shape] = {}
    for node in reversed(graph):
        shape = _shape_of(node)
        if shape is not None and all(shapes.get(reader) == shape for reader, _ in node.outputs[0].uses()):
            shapes[node] = shape
    members: dict[ir.Node, list[ir.Node]] = {}
    for node in reversed(shapes):
        own = members[node] = [node]
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is not None and producer in shapes and members[producer] is not own:
                own.extend(members[producer])
                members.update(dict.fromkeys(members[producer], own))
    order = {node: place for place, node in enumerate(reversed(shapes))}
    connected = {id(nodes): nodes for nodes in members.values()}.values()
    return [_Update(shapes[nodes[0]], sorted(nodes, key=order.__getitem__)) for nodes in connected]


def _shape_of(node: ir.Node) -> Shape | None:
    """Return the shape of an elementwise node's result; None if it is not elementwise or is too large."""
    if node.op_type not in ELEMENTWISE or node.domain != "":
        return None
    shape = static_shape(node.outputs[0])
    if not shape or not 1 < int(np.prod(shape)) <= MOST_ELEMENTS:
        return None
    extents = [static_shape(value) for value in node.inputs if value is not None]
    return shape if all(own is not None and (own == shape or int(np.prod(own)) == 1) for own in extents) else None


def _join(graph: ir.Graph, updates: list[_Update]) -> None:
    builder, first = Builder(graph), updates[0]
    lengths = [update.shape[0] for update in updates]
    shape = (sum(lengths), *first.shape[1:])
    sources = {source_of(node) for update in updates for node in update.nodes}
    with builder.attributed(sources.pop() if len(sources) == 1 else SEVERAL):
        leaves = zip(*(update.leaves for update in updates), strict=True)
        constants = zip(*(update.constants for update in updates), strict=True)
        joined: dict[str, list[Tensor]] = {
            "leaf": [builder.op("Concat", *map(builder.tensor, own), axis=0, shape=shape) for own in leaves],
            "constant": [builder.constant(_joined_constant(own, lengths, len(shape))) for own in constants],
            "node": [],
        }
        for place, (node, operands) in enumerate(zip(first.nodes, first.operands, strict=True)):
            read = [None if operand is None else _read(builder, joined, *operand) for operand in operands]
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            result = builder.op(node.op_type, *read, shape=shape, dtype=node.outputs[0].dtype, **attributes)
            joined["node"].append(result)
            if node.outputs[0].is_graph_output():
                parts = builder.op("Split", result, builder.integers(lengths), axis=0, outputs=len(updates))
                for update, part in zip(updates, parts, strict=True):
                    _take_place(part.value, update.nodes[place].outputs[0])
    for update in updates:
        for node in reversed(update.nodes):
            remove_node(node)


def _read(builder: Builder, joined: dict[str, list[Tensor]], kind: str, reference: int | ir.Value) -> Tensor:
    return builder.tensor(reference) if isinstance(reference, ir.Value) else joined[kind][reference]


def _joined_constant(arrays: tuple[np.ndarray, ...], lengths: list[int], rank: int) -> np.ndarray:
    if all(array.tobytes() == arrays[0].tobytes() for array in arrays):
        return arrays[0]
    rows = np.repeat(np.stack([array.reshape(()) for array in arrays]), lengths)
    return rows.reshape([-1] + [1] * (rank - 1))


def _take_place(value: ir.Value, output: ir.Value) -> None:
    value.type, value.shape = output.type, output.shape
    replace_output(output, value)
    name, output.name = output.name, None
    value.name = name
