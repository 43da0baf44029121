"""Operators: one file per family; for each operator its gradient rule and, where it has one, its semantic gradient
operator and that operator's lowering, side by side.

An operator knows no engine. What walks the graph and calls the rules is ``burnish.autodiff``; what calls the lowerings is
``burnish.lowering``. Importing this package registers every rule.
"""

from burnish.ops import (  # noqa: F401  # registers the rules
    activation,
    alignment,
    assignment,
    attention,
    collectives,
    control,
    convolution,
    cross_entropy,
    deformable_convolution,
    determinant,
    dot_product_attention,
    einsum,
    elementwise,
    indexing,
    loss,
    matmul,
    normalization,
    patches,
    pooling,
    products,
    quantization,
    random,
    recurrent,
    reduction,
    regions,
    resize,
    row_gradients,
    sampling,
    scatter,
    shape,
    spectrum,
    stop_gradient,
    training,
)
from burnish.ops.registry import (
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
