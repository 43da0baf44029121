"""The graphs of a program as an engine with kernels of its own for some semantic operators gets them."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from burnish.compiler.executable import lower
from burnish.program import Program
from burnish.targets import TARGETS


def kernel_graphs(
    program: Program, kernels: Collection[str], names: Collection[str] = ("step", "grad", "evaluate", "predict")
) -> dict[str, ir.Model]:
    """Return these graphs of a program, as copies to rewrite, with the semantic operators of ``kernels`` in them."""
    executable = lower(program, TARGETS["onnxruntime"].with_kernels(kernels))
    return {name: executable.copy_of(name) for name in names}
