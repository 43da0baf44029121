"""Explanations of missing gradients: the operator that keeps a gradient from an initializer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from burnish.graph import FLOATING, bodies, describe_node, integer_weights
from burnish.graph.annotations import BRANCH_OF, HELD, LEFT_OUT, SHAPE_READER
from burnish.graph.uses import read_by
from burnish.importer import InitializerKind, reached_by_gradients
from burnish.importer.operands import CONFIGURATION_OPERANDS, NOT_DIFFERENTIABLE, QUANTIZES, constant_operands, may_hold_integers

SHOWN = 3

SETTINGS: Mapping[str, tuple[int, ...]] = {
    **{operator: operands for operator, operands in CONFIGURATION_OPERANDS.items() if operator not in ("Clip", "Pow")},
    "QLinearConv": (1, 4, 6),
    "QLinearMatMul": (1, 4, 6),
}
"""Floating-point operands that are settings, not weights: scales of resampling and quantization, class weights.

Bounds of Clip and exponents are absent: some models learn them (learned quantization, generalized-mean pooling).
"""

ARRANGES = frozenset("Cast Concat Expand Flatten Gather Identity Reshape Slice Split Squeeze Transpose Unsqueeze".split())
"""Operators that only rearrange a setting before it is read."""


def why_no_weight(graph: ir.Graph, value: ir.Value) -> str:
    """Return why an initializer of a canonical model is not a weight, as a clause: ``no operator reads it``."""
    if value.dtype not in FLOATING:
        return integer_weights(graph).get(value.name or "", "it is not floating-point")
    if value.shape is not None and len(value.shape) == 0:
        return "it is a scalar, which counts as a constant"
    return why_no_gradient(graph, value, graph.outputs)


def why_no_gradient(graph: ir.Graph, value: ir.Value, targets: Collection[ir.Value]) -> str:
    """Return why no gradient flows from ``targets`` to ``value``, as a clause that names the first operator in the way.

    Args:
        graph: the graph that contains both.
        value: an input or initializer.
        targets: the values to differentiate.
    """
    return Obstacles(graph, targets).why(value)


class Obstacles:
    """The operators that stop gradients between the values of a graph and the differentiated ones.

    Args:
        graph: the graph of the values; a value is also followed into the bodies of nodes that read it.
        targets: the values to differentiate.
    """

    def __init__(self, graph: ir.Graph, targets: Collection[ir.Value]):
        self._targets = targets
        self._place: dict[ir.Node, int] = {}
        self._returned_by: dict[ir.Value, list[ir.Node]] = {}  # output of a body -> the nodes with that body
        self._needed = set(targets)
        inside: dict[ir.Node, list[ir.Node]] = {}
        for index, node in enumerate(graph):
            inside[node] = [inner for body in bodies(node) for inner in body.all_nodes()]
            for owner in (node, *inside[node]):
                for output in (output for body in bodies(owner) for output in body.outputs):
                    self._returned_by.setdefault(output, []).append(owner)
            self._place |= dict.fromkeys((node, *inside[node]), index)
        for node in reversed(graph):
            if any(output in self._needed for output in node.outputs):
                self._needed.update(read_by(node))
                # A value inside a body is needed if the node of the body is.
                self._needed.update(output for reader in inside[node] for output in reader.outputs)

    def why(self, value: ir.Value) -> str:
        """Return why no gradient reaches ``value``, as a clause that names the first operator in the way."""
        if not value.uses() and value not in self._returned_by:
            reader = SHAPE_READER.get(value)
            return "no operator reads it" if reader is None else f"{reader} lets no gradient through"
        if value not in self._needed:
            return f"nothing that leads to {_names(self._targets)} reads it"
        stops = self._stops(value)
        if not stops:
            return f"its gradient from {_names(self._targets)} is zero"
        node, index = min(stops, key=lambda stop: self._place[stop[0]])
        if node.inputs[index] is value and index in constant_operands(node):
            return f"{describe_node(node)} takes it as a constant"
        return f"{describe_node(node)} lets no gradient through"

    def _stops(self, value: ir.Value) -> list[tuple[ir.Node, int]]:
        """Return the operators that stop the gradient of ``value``, each with the index of the input in question."""
        stops: list[tuple[ir.Node, int]] = []
        seen, pending = {value}, [value]

        def go_on(carrying: Sequence[ir.Value]) -> bool:
            pending.extend(output for output in carrying if output not in seen)
            seen.update(carrying)
            return bool(carrying)

        while pending:
            current = pending.pop()
            for node, index in current.uses():
                if not any(output in self._needed for output in node.outputs):
                    continue
                # The inputs of a loop and of its body have the same order.
                inside = _floating([body.inputs[index] for body in bodies(node) if index < len(body.inputs)])
                if index in constant_operands(node) or _is_cut(node) or not go_on([*_carrying(node, index), *inside]):
                    stops.append((node, index))
            for owner in self._returned_by.get(current, ()):
                go_on(_floating(owner.outputs))
        return stops


def candidates(graph: ir.Graph, kinds: Mapping[str, InitializerKind]) -> dict[str, ir.Value]:
    """Return the constants of a canonical model that look like weights: floating-point tensors that are not settings.

    Args:
        graph: the main graph.
        kinds: the kinds of its initializers.
    """
    weights = {}
    for name, kind in kinds.items():
        value = graph.initializers[name]
        is_tensor = value.dtype in FLOATING and value.shape is not None and len(value.shape) > 0
        if kind is InitializerKind.CONSTANT and is_tensor and not HELD.is_on(value) and not _is_setting(value):
            weights[name] = value
    return weights


def left_out_weights(graph: ir.Graph) -> dict[str, str]:
    """Return the weights read only by a branch that is never taken: initializer name -> why, as a clause."""
    weights = LEFT_OUT.get(graph) or {}
    return {name: f"{BRANCH_OF.get(value)} never takes the branch that reads it" for name, value in weights.items()}


def unreached_weights(graph: ir.Graph, kinds: Mapping[str, InitializerKind], targets: Collection[ir.Value]) -> dict[str, str]:
    """Return the tensors of a canonical model that look like weights but get no gradient from ``targets``.

    Args:
        graph: the main graph.
        kinds: the kinds of its initializers.
        targets: the values to differentiate.

    Returns:
        Initializer name -> why, as a clause that names the operator in the way.
    """
    reached = reached_by_gradients(graph, targets)
    alike = candidates(graph, kinds)
    obstacles = Obstacles(graph, targets)
    unreached = {}
    for name, kind in kinds.items():
        value = graph.initializers[name]
        if name in alike or (kind is InitializerKind.WEIGHT and value not in reached):
            unreached[name] = obstacles.why(value)
    return unreached


def reasons(named: Sequence[tuple[str, str]]) -> str:
    """Return ``'first': why; 'second': why; and 4 more``."""
    shown = "; ".join(f"'{name}': {why}" for name, why in named[:SHOWN])
    return shown + (f"; and {len(named) - SHOWN} more" if len(named) > SHOWN else "")


def reasons_together(named: Mapping[str, str]) -> str:
    """Return ``'first', 'second' and 4 more: why; 'other': why``, with names grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in named.items():
        by_reason.setdefault(why, []).append(name)
    clauses = []
    for why, names in list(by_reason.items())[:SHOWN]:
        shown = ", ".join(f"'{name}'" for name in names[:SHOWN])
        clauses.append(f"{shown}{f' and {len(names) - SHOWN} more' if len(names) > SHOWN else ''}: {why}")
    rest = sum(len(names) for names in list(by_reason.values())[SHOWN:])
    return "; ".join(clauses) + (f"; and {rest} more" if rest else "")


def _is_setting(value: ir.Value) -> bool:
    seen, pending = {value}, [value]
    while pending:
        for node, index in pending.pop().uses():
            if node.domain == "" and index in SETTINGS.get(node.op_type, ()):
                continue
            if node.domain != "" or node.op_type not in ARRANGES:
                return False
            pending.extend(output for output in node.outputs if output not in seen)
            seen.update(node.outputs)
    return bool(value.uses())


def _is_cut(node: ir.Node) -> bool:
    return node.domain == "" and node.op_type in NOT_DIFFERENTIABLE


def _carrying(node: ir.Node, index: int) -> list[ir.Value]:
    """Return the outputs that pass a gradient to an input: floating-point ones, or integers from a quantization."""
    value = node.inputs[index]
    if value is not None and value.dtype is not None and value.dtype not in FLOATING:
        return list(node.outputs) if may_hold_integers(node, index) else []
    if node.domain == "" and node.op_type in QUANTIZES:
        return list(node.outputs[:1])
    return _floating(node.outputs)


def _floating(values: Sequence[ir.Value]) -> list[ir.Value]:
    return [value for value in values if value.dtype is None or value.dtype in FLOATING]


def _names(targets: Collection[ir.Value]) -> str:
    return f"'{next(iter(targets)).name}'" if len(targets) == 1 else "an output"
