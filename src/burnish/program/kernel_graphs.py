"""The graphs of a program for an engine that has kernels of its own for semantic operators.

What a program is known by are its six graphs in standard operators. Beside them it keeps ``grad``, ``evaluate`` and ``predict``
as they were before they were lowered: an engine gets these with the operators that it has kernels for, and all others lowered.
They compute the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import onnx_ir as ir

from burnish.lowering import Target
from burnish.ops import semantic_operators
from burnish.optim import Optimizer
from burnish.program.draft import settle
from burnish.program.signature import GraphSignature
from burnish.program.update import update_graphs

SEMANTIC_GRAPHS = ("grad", "evaluate", "predict")


def semantic_target(target: Target) -> Target:
    """The target as it would be with a kernel for every semantic operator."""
    return replace(target, kernels=semantic_operators())


def kernel_graphs(
    semantic: Mapping[str, ir.Model],
    grad: GraphSignature,
    forward: Iterable[ir.Model],
    optimizer: Optimizer,
    target: Target,
    kernels: Collection[str],
    names: Collection[str],
) -> dict[str, ir.Model]:
    """Return graphs with the semantic operators of ``kernels`` in them.

    Args:
        semantic: the graphs of ``SEMANTIC_GRAPHS``, not lowered; left as they are.
        grad: the signature of the graph of the gradients.
        forward: the program's graphs that predict and evaluate, which tell what the parameters are for.
        optimizer: what updates the parameters.
        target: the runtime.
        kernels: the semantic operators that it has kernels for.
        names: which graphs: ``step``, and those of ``semantic``.
    """
    target = replace(target, kernels=frozenset(kernels))
    graphs = {}
    for name, model in semantic.items():
        if name in names or (name == "grad" and "step" in names):
            graphs[name] = model.clone()
            settle(graphs[name], target)
    if "step" in names:
        updates, _ = update_graphs(graphs["grad"], grad, forward, optimizer, target, ("step",))
        graphs["step"] = updates["step"]
    return {name: model for name, model in graphs.items() if name in names}
