"""The gradient of a model as the reverse pass emits it: with the semantic operators that engines have kernels for."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
import onnx_ir as ir

from burnish.compiler.gradient import differentiated
from burnish.graph.uses import remove_unused
from oracles.rewritten import rewritten


def semantic_gradients(source: onnx.ModelProto | ir.Model, wrt: Sequence[str], of: str) -> ir.Model:
    """Return what ``burnish.grad`` returns, before it is lowered."""
    return rewritten(remove_unused, differentiated(source, wrt, of))
