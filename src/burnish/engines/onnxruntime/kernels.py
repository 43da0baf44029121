"""Kernels of burnish's own on ONNX Runtime: the library of their operators, and the graph passes that call them."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from burnish.engines.kernels.building import build_library, find_built, is_switched_off
from burnish.engines.kernels.elementwise.fusion import fuse_elementwise
from burnish.engines.kernels.elementwise.groups import join_groups
from burnish.errors import EngineError
from burnish.graph import BURNISH_DOMAIN

SOURCE = Path(__file__).parent / "native" / "elementwise_operators.cpp"


def library(build: bool) -> Path | None:
    """Return the library of operators; None where kernels are switched off, or it is not there and not to be built.

    Args:
        build: whether to build it where it is missing.

    Raises:
        EngineError: it is to be built, and cannot be.
    """
    if is_switched_off():
        return None
    if not build:
        return find_built(SOURCE)
    try:
        return build_library(SOURCE)
    except (OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EngineError(f"kernels=True: the kernels could not be built ({reason}); kernels=False goes without them") from error


def call_kernels(model: ir.Model) -> None:
    """Rewrite a graph of standard operators so that it calls kernels where it can, in place."""
    fuse_elementwise(model.graph)
    join_groups(model.graph)
    model.opset_imports[BURNISH_DOMAIN] = 1
