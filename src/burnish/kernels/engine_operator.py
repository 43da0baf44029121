"""Operators that only engines know: graph passes insert them for kernels to compute.

Each is one object, like semantic operators in ``burnish.operators``: declared in the folder of its family here, or next to the
binding of the only engine that knows it. No other Python code spells its name::

    DEPTHWISE_CONV = EngineOperator("DepthwiseConv", ("x", "w", "b"), ("y",))


    @translates(DEPTHWISE_CONV)
    def depthwise_convolution(op): ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, replace_node
from burnish.operators.semantic import BurnishOperator, semantic_operator


@dataclass(frozen=True, eq=False)
class EngineOperator(BurnishOperator):
    """An operator of engines only, in the domain ``burnish``; a translation may leave an output in memory that it shares."""

    def __post_init__(self) -> None:
        if self.name in _operators:
            raise ValueError(f"the operator {self.name} of engines is declared twice: give one of the two another name")
        _operators[self.name] = self

    def replace(self, node: ir.Node, **attributes: Any) -> None:
        """Replace a node by this operator, with the node's operands, outputs and attributes, and additional attributes."""
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        builder = Builder(graph, before=node)
        operands = [None if value is None else builder.tensor(value) for value in node.inputs]
        results = self._put(operands, builder, len(node.outputs), None, attributes)
        maker = results[0].value.producer()
        assert maker is not None
        for attribute in node.attributes.values():
            maker.attributes.add(attribute)
        replace_node(node, results)


_operators: dict[str, EngineOperator] = {}


def engine_operators() -> Mapping[str, EngineOperator]:
    """Return all declared operators of this kind, by name."""
    return MappingProxyType(_operators)


def may_share_memory(node: ir.Node) -> bool:
    """True if a result of a node may share the memory of an operand: unless each is known to have its own."""
    if node.domain != BURNISH_DOMAIN:
        return node.domain != "" or node.op_type not in _WITHOUT_VIEWS
    operator = _operators.get(node.op_type) or semantic_operator(node)
    return operator is None or bool(operator.shares_memory)


_WITHOUT_VIEWS = frozenset({"Add", "Conv", "MatMul", "Mul", "Sub"})
"""Standard operators whose results always have their own memory in PyTorch."""
