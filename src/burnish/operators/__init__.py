"""Operators: one file per family, with a record per operator and version that ``families`` lists.

A family holds, for each operator, its gradient rule and, where it has one, its semantic gradient operator and that operator's
lowering, side by side. An operator knows no engine. What walks the graph and calls the rules is ``burnish.autodiff``; what
calls the lowerings is ``burnish.rewriting.stages``.
"""

from burnish.operators.registry import (
    Gradients,
    Operation,
    Operator,
    find_gradient,
    find_lowering,
    find_training_form,
    gradient,
    has_gradient,
    lowering,
)
from burnish.operators.semantic import semantic_operators

__all__ = [
    "Gradients",
    "Operation",
    "Operator",
    "find_gradient",
    "find_lowering",
    "find_training_form",
    "gradient",
    "has_gradient",
    "lowering",
    "semantic_operators",
]
