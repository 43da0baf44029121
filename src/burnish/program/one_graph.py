"""A single graph as a program, so that an engine runs it as it runs a step: with its own kernels, dtypes and device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import onnx_ir as ir

from burnish.lowering import TARGETS, Target
from burnish.program.draft import settle, shape_of
from burnish.program.program import Program
from burnish.program.signature import Entry, GraphSignature, Role, Signature


class OneGraph(Program):
    """A program whose ``step`` is a graph without state: every input is data, every output is returned. It has no other graph."""

    def kernel_graphs(self, kernels: Collection[str], names: Collection[str] = ("step",)) -> dict[str, ir.Model]:
        """Return the graph as ``step``, with the semantic operators of ``kernels`` in it."""
        assert set(names) == {"step"}
        model = self.semantic["step"].clone()
        settle(model, replace(self._target, kernels=frozenset(kernels)))
        return {"step": model}


def one_graph(model: ir.Model, target: Target = TARGETS["onnxruntime"]) -> OneGraph:
    """Return a program with the model as its ``step``; open it with an empty state.

    Args:
        model: inputs and outputs with dtypes, and inputs with ranks; may hold semantic operators, which are lowered for engines
            that do not ask for ``kernel_graphs``; left as it is.
        target: the runtime that it is lowered for.

    Raises:
        UnsupportedOperatorError: an operator that the target does not run.
    """
    lowered = model.clone()
    settle(lowered, target)
    signature = GraphSignature(
        tuple(_entry(value, Role.DATA) for value in model.graph.inputs),
        tuple(_entry(value, Role.OUTPUT) for value in model.graph.outputs),
    )
    return OneGraph(
        **dict.fromkeys(("init", "step", "grad", "apply", "evaluate", "predict"), lowered),
        signature=Signature({"step": signature}),
        weights={},
        options={"target": target.name},
        semantic={"step": model.clone()},
    )


def _entry(value: ir.Value, role: Role) -> Entry:
    assert value.dtype is not None
    return Entry(value.name or "", role, value.dtype, shape_of(value))
