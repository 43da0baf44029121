"""Verification of a model after a pass, for tests: names, the order of nodes, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from burnish.errors import BurnishError, ModelError
from burnish.graph import bodies, describe_node
from burnish.graph.inference import infer_outputs
from burnish.graph.uses import is_used


class PassError(BurnishError):
    """A pass left the model wrong or misreported its changes: a defect in burnish."""


class Verification:
    """State of a stage's model after the previous pass, to detect the changes of the next one."""

    def __init__(self, stage: str, model: ir.Model):
        self._stage = stage
        self._model = model
        self._nodes = _listed(model.graph)
        self._new: list[ir.Node] = []

    def ran(self, name: str, changed: bool, is_ordered: bool) -> None:
        """Check the invariants after a pass.

        Args:
            name: name of the pass.
            changed: the change that it reported.
            is_ordered: True if nodes must follow their inputs.

        Raises:
            PassError: it changed nodes without reporting it, or a value is read before it is computed.
        """
        nodes = _listed(self._model.graph)
        if nodes == self._nodes:
            return
        known, found = _by_key(self._nodes), _by_key(nodes)
        new = [node for key, node in found.items() if key not in known]
        is_other = bool(new) or len(found) != len(known)
        # Nodes of an abandoned attempt that no earlier node reads are no change.
        before = set(known.values())
        told = [node for node in new if node in before or any(output.is_graph_output() for output in node.outputs)]
        if not changed and (told or known.keys() - found.keys()):
            which = describe_node(told[0]) if told else "a node that is gone"
            raise self._error(name, f"it changed {which} and said that it changed nothing")
        if is_other and is_ordered:
            self._check_graph(name, self._model.graph, set(), None)
        self._nodes = nodes
        self._new += new

    def settled(self, names: str) -> None:
        """Check the invariants after passes whose names, dtypes and shapes have been restored.

        Raises:
            PassError: a name is missing or used twice, or a value's dtype or shape differs from its node's result.
        """
        self._check_graph(names, self._model.graph, set(), {})
        self._nodes = _listed(self._model.graph)
        held = {node for node, *_ in self._nodes}
        for node in self._new:
            if node in held:  # others were removed with a body
                self._check_types(names, node)
        self._new = []

    def _check_graph(self, name: str, graph: ir.Graph, known: set[ir.Value], names: dict[str, ir.Value] | None) -> None:
        own = {*graph.inputs, *graph.initializers.values()}
        for value in own:
            self._check_name(name, value, names)
        visible = known | own
        for node in graph:
            for operand in node.inputs:
                if operand is not None and operand not in visible:
                    raise self._error(name, f"{describe_node(node)} reads '{operand.name}' before it is computed")
            for body in bodies(node):
                self._check_graph(name, body, visible, None if names is None else dict(names))
            for output in node.outputs:
                self._check_name(name, output, names)
            visible.update(node.outputs)
        for output in graph.outputs:
            if output not in visible:
                raise self._error(name, f"the output '{output.name}' of graph '{graph.name}' is computed by no node")

    def _check_name(self, name: str, value: ir.Value, names: dict[str, ir.Value] | None) -> None:
        if names is None:
            return
        if not value.name:
            if is_used(value) or value.is_graph_output():
                producer = value.producer()
                raise self._error(name, f"an output of {describe_node(producer)} has no name" if producer else "no name")
        elif names.setdefault(value.name, value) is not value:
            raise self._error(name, f"two values have the name '{value.name}'")

    def _check_types(self, name: str, node: ir.Node) -> None:
        if node.domain != "" or bodies(node) or node.graph is None:
            return
        if any(operand is not None and operand.dtype == ir.DataType.BFLOAT16 for operand in node.inputs):
            return  # files use it in operators of opsets that do not list it yet
        copy = ir.Node("", node.op_type, node.inputs, node.attributes.values(), num_outputs=len(node.outputs))
        for index, output in enumerate(copy.outputs):
            output.name = f"output{index}"
        try:
            infer_outputs(copy, self._model.graph.opset_imports)
        except ModelError as error:
            raise self._error(name, f"{describe_node(node)} cannot read what it reads: {error}") from error
        finally:
            for index in range(len(copy.inputs)):
                copy.replace_input_with(index, None)
        for output, inferred in zip(node.outputs, copy.outputs, strict=True):
            if inferred.type is not None and output.type is not None and inferred.type != output.type:
                problem = f"'{output.name}' of {describe_node(node)} is {inferred.type}, and said to be {output.type}"
                raise self._error(name, problem)
            if not _agree(output.shape, inferred.shape):
                problem = f"'{output.name}' of {describe_node(node)} is {inferred.shape}, and said to be {output.shape}"
                raise self._error(name, problem)

    def _error(self, name: str, problem: str) -> PassError:
        return PassError(f"the pass {name} of {self._stage} left the graph '{self._model.graph.name}' wrong: {problem}")


_Listed = tuple[ir.Node, str, Sequence[ir.Value | None], tuple[ir.Attr, ...]]
_Key = tuple[int, str, tuple[int, ...], tuple[int, ...]]


def described(graph: ir.Graph) -> dict[_Key, ir.Node]:
    """Return the nodes of a graph by their type, inputs, attributes and position."""
    return _by_key(_listed(graph))


def _listed(graph: ir.Graph) -> list[_Listed]:
    nodes: list[_Listed] = []
    for node in graph:
        attributes = tuple(node.attributes.data.values())
        nodes.append((node, node.op_type, node.inputs, attributes))
        for attribute in attributes:
            if attribute.type is ir.AttributeType.GRAPH and not attribute.is_ref():
                nodes += _listed(attribute.as_graph())
            elif attribute.type is ir.AttributeType.GRAPHS and not attribute.is_ref():
                for body in attribute.as_graphs():
                    nodes += _listed(body)
    return nodes


def _by_key(nodes: list[_Listed]) -> dict[_Key, ir.Node]:
    return {
        (id(node), op_type, tuple(map(id, inputs)), tuple(map(id, attributes))): node
        for node, op_type, inputs, attributes in nodes
    }


def _agree(one: ir.Shape | None, other: ir.Shape | None) -> bool:
    if one is None or other is None:
        return True
    if len(one) != len(other):
        return False
    pairs = zip(one.dims, other.dims, strict=True)
    return all(a == b for a, b in pairs if isinstance(a, int) and isinstance(b, int))
