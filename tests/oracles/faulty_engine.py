"""An engine that computes some nodes wrong: what a comparison of engines must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish.compiler.draft import lower_to_target
from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.engines.base import LoadedModel, ProgramRunner, RunsModels
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.graph import Names, insert_behind
from burnish.targets import TARGETS


class FaultyEngine(RunsModels):
    """ONNX Runtime, but for nodes whose first output is multiplied.

    Args:
        is_faulty: whether a node is computed wrong.
        factor: what its first output is multiplied by.
    """

    name = "faulty"
    target = TARGETS["onnxruntime"]

    def __init__(self, is_faulty: Callable[[ir.Node], bool], factor: float = 1.01):
        self.is_faulty = is_faulty
        self.factor = factor

    def open(self, graphs: LoweredGraphs, state: Mapping[str, np.ndarray], **options: Any) -> ProgramRunner:
        return OnnxRuntimeEngine("none").open(graphs.rewritten(self._break, *graphs.signature), state, **options)

    def load(self, model: ir.Model) -> LoadedModel:
        copy = model.clone()
        self._break(copy)
        return OnnxRuntimeEngine("none").load(copy)

    def _break(self, model: ir.Model) -> None:
        names = Names.of(model.graph)
        for node in [node for node in model.graph if self.is_faulty(node)]:
            constant = ir.node("Constant", [], {"value": ir.tensor(np.asarray(self.factor, node.outputs[0].dtype.numpy()))})
            constant.outputs[0].name = f"{node.outputs[0].name}:factor"
            model.graph.insert_before(node, constant)
            following = ir.node("Mul", [node.outputs[0], constant.outputs[0]])
            following.outputs[0].name = f"{node.outputs[0].name}:wrong"
            insert_behind(node, following, names)


class FaultyKernel(FaultyEngine):
    """An engine with a kernel of its own for a semantic operator, which is wrong; all else runs on ONNX Runtime.

    Args:
        operator: of the domain ``burnish``.
        factor: what the kernel's first output is multiplied by.
    """

    name = "kernel"

    def __init__(self, operator: str, factor: float = 1.01):
        super().__init__(lambda node: node.op_type == operator, factor)
        self.target = TARGETS["onnxruntime"].with_kernels({operator})

    def _break(self, model: ir.Model) -> None:
        super()._break(model)
        lower_to_target(model, TARGETS["onnxruntime"])  # what stands for the kernel is its lowering, with the factor after it
