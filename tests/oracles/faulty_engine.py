"""An engine that computes some nodes wrong: what a comparison of engines must find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from burnish.engines.base import Arrays, LoadedModel, ProgramRunner
from burnish.engines.onnxruntime import OnnxRuntimeEngine
from burnish.graph import Names, insert_behind
from burnish.lowering import TARGETS
from burnish.program import Program
from burnish.program.draft import settle


class FaultyEngine:
    """ONNX Runtime, but for nodes whose first output is multiplied.

    Args:
        is_faulty: whether a node is computed wrong.
        factor: what its first output is multiplied by.
    """

    name = "faulty"

    def __init__(self, is_faulty: Callable[[ir.Node], bool], factor: float = 1.01):
        self.is_faulty = is_faulty
        self.factor = factor

    def open(
        self, program: Program, state: Mapping[str, np.ndarray], *, device: str | None = None, threads: int | None = None
    ) -> ProgramRunner:
        broken = {name: self._broken(model) for name, model in program.graphs.items()}
        return OnnxRuntimeEngine("none").open(replace(program, **broken), state, device=device, threads=threads)

    def load(self, model: ir.Model) -> LoadedModel:
        return OnnxRuntimeEngine("none").load(self._broken(model))

    def run(self, model: ir.Model, inputs: Mapping[str, np.ndarray]) -> Arrays:
        return self.load(model)(inputs)

    def _broken(self, model: ir.Model) -> ir.Model:
        copy = model.clone()
        names = Names.of(copy.graph)
        for node in [node for node in copy.graph if self.is_faulty(node)]:
            constant = ir.node("Constant", [], {"value": ir.tensor(np.asarray(self.factor, node.outputs[0].dtype.numpy()))})
            constant.outputs[0].name = f"{node.outputs[0].name}:factor"
            copy.graph.insert_before(node, constant)
            following = ir.node("Mul", [node.outputs[0], constant.outputs[0]])
            following.outputs[0].name = f"{node.outputs[0].name}:wrong"
            insert_behind(node, following, names)
        return copy


class FaultyKernel(FaultyEngine):
    """An engine with a kernel of its own for a semantic operator, which is wrong; all else runs on ONNX Runtime.

    Args:
        operator: of the domain ``burnish``.
        factor: what the kernel's first output is multiplied by.
    """

    name = "kernel"

    def __init__(self, operator: str, factor: float = 1.01):
        super().__init__(lambda node: node.op_type == operator, factor)
        self.operator = operator

    def open(
        self, program: Program, state: Mapping[str, np.ndarray], *, device: str | None = None, threads: int | None = None
    ) -> ProgramRunner:
        broken = {name: self._broken(model) for name, model in program.kernel_graphs({self.operator}).items()}
        for model in broken.values():
            settle(model, TARGETS["onnxruntime"])  # what stands for the kernel is its lowering, with the factor behind it
        return OnnxRuntimeEngine("none").open(replace(program, **broken), state, device=device, threads=threads)
