"""Registry of fused operators: semantic operators that only graph passes turn into kernel calls, and nodes replaced as a whole.

A pass registers operators after it has used all kernels for them; the remaining nodes are lowered::

    @fuses(STANDARDIZE, STANDARDIZE_GRAD)
    def fuse_normalization(graph): ...

A kernel that replaces a single node needs only a condition::

    @replaces(RESIZE_GRAD, by=FUSED_RESIZE_GRAD)
    def has_kernel(node): ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import onnx_ir as ir

from burnish.kernels.engine_operator import EngineOperator
from burnish.operators.semantic import SemanticOperator

Condition = Callable[[ir.Node], bool]
_Function = TypeVar("_Function", bound=Callable[..., object])


@dataclass(frozen=True)
class _Replacement:
    operator: EngineOperator
    has_kernel: Condition


_fused: set[str] = set()
_replacements: dict[tuple[str, str], _Replacement] = {}


def fuses(*operators: SemanticOperator) -> Callable[[_Function], _Function]:
    """Register semantic operators that only this pass replaces: ATen has no kernels for them, or only less precise ones."""

    def register(rewrite: _Function) -> _Function:
        _fused.update(operator.name for operator in operators)
        return rewrite

    return register


def replaces(operator: SemanticOperator | str, *, by: EngineOperator) -> Callable[[Condition], Condition]:
    """Register the condition for replacing an operator (standard operators by name) by an engine operator with the same operands.

    The condition gets a node whose operand 0 is float32 of known rank.
    """

    def register(has_kernel: Condition) -> Condition:
        if isinstance(operator, SemanticOperator):
            _fused.add(operator.name)
        key = ("", operator) if isinstance(operator, str) else operator.key
        _replacements[key] = _Replacement(by, has_kernel)
        return has_kernel

    return register


def fused_operators() -> frozenset[str]:
    """Return the names of the semantic operators that only fusion takes."""
    return frozenset(_fused)


def replace_whole_nodes(graph: ir.Graph) -> bool:
    """Replace single nodes that have a kernel, in place."""
    changed = False
    for node in list(graph):
        replacement = _replacements.get((node.domain, node.op_type))
        if replacement is not None and _is_single(node) and replacement.has_kernel(node):
            replacement.operator.replace(node)
            changed = True
    return changed


def _is_single(node: ir.Node) -> bool:
    operand = node.inputs[0] if node.inputs else None
    return operand is not None and operand.dtype == ir.DataType.FLOAT and operand.shape is not None
