"""Operators: one file per family, with a record per operator and version, listed in ``families``.

A family contains, for each operator, its gradient rule and, if it has one, its semantic gradient operator with its lowering.
Operators know no engine. ``burnish.autodiff`` walks the graph and calls the gradient rules; ``burnish.rewriting.stages`` calls
the lowerings.
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
