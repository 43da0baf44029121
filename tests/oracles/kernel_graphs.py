"""The graphs of a program as an engine with kernels of its own for some semantic operators gets them."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.program import Program
from burnish.targets import TARGETS


def kernel_graphs(
    program: Program, kernels: Collection[str], names: Collection[str] = ("step", "grad", "evaluate", "predict")
) -> dict[str, ir.Model]:
    """Return these graphs of a program, as copies to rewrite, with the semantic operators of ``kernels`` in them."""
    graphs = program.graphs.lowered_to(TARGETS["onnxruntime"].with_kernels(kernels))
    return {name: graphs.copy_of(name) for name in names}


def without_semantic_graphs(program: Program) -> Program:
    """Return a program as another tool would have written it: in standard operators alone."""
    return Program(LoweredGraphs.read(dict(program.graphs), program.signature, program.options), program.weights)
