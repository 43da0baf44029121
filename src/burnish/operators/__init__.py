"""Operators: one file per family; for each operator its gradient rule and, where it has one, its semantic gradient
operator and that operator's lowering, side by side.

An operator knows no engine. What walks the graph and calls the rules is ``burnish.autodiff``; what calls the lowerings is
``burnish.lowering``. The rules are registered when one is first looked up (``rules``).
"""

from burnish.operators.registry import (
    Gradients,
    Operation,
    find_gradient,
    find_lowering,
    find_training_form,
    gradient,
    has_gradient,
    lowering,
    semantic_operators,
    training_form,
)

__all__ = [
    "Gradients",
    "Operation",
    "find_gradient",
    "find_lowering",
    "find_training_form",
    "gradient",
    "has_gradient",
    "lowering",
    "semantic_operators",
    "training_form",
]
