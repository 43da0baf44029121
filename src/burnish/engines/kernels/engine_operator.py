"""Operators that engines alone know: what graph passes put in place of others, for kernels to compute.

Each is one object, as semantic operators are in ``burnish.operators``: declared next to the PyTorch engine's translation, or in a
folder here where several engines have kernels of it. Nothing else in Python spells its name::

    DEPTHWISE_CONV = EngineOperator("DepthwiseConv", ("x", "w", "b"), ("y",))


    @translates(DEPTHWISE_CONV)
    def depthwise_convolution(op): ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, Builder, Tensor
from burnish.operators.semantic import semantic_operator


@dataclass(frozen=True, eq=False)
class EngineOperator:
    """An operator of engines alone, in the domain ``burnish``.

    Attributes:
        name: its name in the domain.
        inputs: their names, in order; the last may end in ``...``, for any number of them. A node may leave inputs out.
        outputs: their names, likewise.
        shares_memory: output -> input in whose memory its translation may leave it, as itself or as a view.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shares_memory: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name in _operators:
            raise ValueError(f"the operator {self.name} of engines is declared twice: give one of the two another name")
        _operators[self.name] = self

    @property
    def key(self) -> tuple[str, str]:
        """Its domain and name, as a node has them."""
        return BURNISH_DOMAIN, self.name

    def __call__(
        self, *operands: Tensor | None, builder: Builder | None = None, like: Tensor | None = None, **attributes: Any
    ) -> Tensor:
        """Emit a node that has one output, and return it; arguments as for ``emit``."""
        (result,) = self.emit(*operands, builder=builder, like=like, **attributes)
        return result

    def emit(
        self, *operands: Tensor | None, builder: Builder | None = None, like: Tensor | None = None, **attributes: Any
    ) -> tuple[Tensor, ...]:
        """Emit a node and return its outputs.

        Args:
            operands: the inputs; None leaves one out.
            builder: where to; that of the first operand by default.
            like: what has the dtype and shape of the first output, where that is known.
            attributes: of the node.
        """
        if builder is None:
            builder = next(tensor.builder for tensor in operands if tensor is not None)
        results = builder.op(self.name, *operands, domain=BURNISH_DOMAIN, outputs=len(self.outputs), like=like, **attributes)
        return results if isinstance(results, tuple) else (results,)

    def is_of(self, node: ir.Node | None) -> bool:
        """Whether a node is one of this operator."""
        return node is not None and node.op_type == self.name and node.domain == BURNISH_DOMAIN


_operators: dict[str, EngineOperator] = {}


def engine_operators() -> Mapping[str, EngineOperator]:
    """Return every such operator that is declared, by name."""
    return MappingProxyType(_operators)


def may_share_memory(node: ir.Node) -> bool:
    """Whether a result of a node may lie in the memory of an operand: unless it is known that each has memory of its own."""
    if node.domain != BURNISH_DOMAIN:
        return node.domain != "" or node.op_type not in _WITHOUT_VIEWS
    operator = _operators.get(node.op_type) or semantic_operator(node)
    return operator is None or bool(operator.shares_memory)


_WITHOUT_VIEWS = frozenset({"Add", "Conv", "MatMul", "Mul", "Sub"})
"""Standard operators whose results PyTorch always gives memory of their own."""
