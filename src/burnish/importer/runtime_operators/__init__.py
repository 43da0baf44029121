"""Runtime-specific operators (domain ``com.microsoft``) as standard operators.

They are written by ONNX Runtime's optimizers, Optimum and onnxruntime-genai. ``registry`` has the rewrites by name, with a module
per family; ``replace`` walks over a model. Operators without a rewrite stay: a runtime that has them runs them, without
gradients.
"""

from burnish.importer.runtime_operators.registry import RUNTIME_DOMAIN, STANDARD_INTEGER_PRODUCTS, rewritten_operators
from burnish.importer.runtime_operators.replace import (
    STANDARD_NAMES,
    declare_runtime_outputs,
    hide_runtime_nodes,
    move_runtime_nodes,
    replace_runtime_operators,
)

__all__ = [
    "RUNTIME_DOMAIN",
    "STANDARD_INTEGER_PRODUCTS",
    "STANDARD_NAMES",
    "declare_runtime_outputs",
    "hide_runtime_nodes",
    "move_runtime_nodes",
    "replace_runtime_operators",
    "rewritten_operators",
]
