"""Rewrites as functions of a model, for tests that read best so."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir


def rewritten(apply: Callable[..., object], model: ir.Model, *arguments: Any, **options: Any) -> ir.Model:
    """Return the model, after a rewrite changed it in place."""
    apply(model, *arguments, **options)
    return model
