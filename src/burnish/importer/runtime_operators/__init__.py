"""Operators that runtimes have of their own, the domain ``com.microsoft``, as standard operators.

ONNX Runtime's optimizers, Optimum and onnxruntime-genai write them. ``registry`` has their rewrites by name; each family is a
file beside it. ``standard_names`` finds those that are written in the standard's domain, ``replace`` walks over a model. What has
no rewrite stays as it is: a runtime that has it runs it, and no gradient passes through.
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
