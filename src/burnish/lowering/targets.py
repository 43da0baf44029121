"""Targets: what a runtime may be given. A program is lowered for one, and checked against its allow-list."""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import onnx_ir as ir

from burnish.errors import UnsupportedOperatorError
from burnish.graph import BURNISH_DOMAIN, describe_node, quantization_of
from burnish.graph.versions import oldest_opset

OLDEST_OPSET = 18


@dataclass(frozen=True)
class Target:
    """A runtime a program is compiled for.

    Attributes:
        name: how it is asked for.
        newest_opset: the newest version of the standard domain it loads.
        newest_ir_version: the newest ONNX file format it loads.
        allowed: the standard operators it runs.
        kernels: the semantic operators it has a kernel of its own for; these are not lowered.
        classical: the operators of the standard's second domain, ``ai.onnx.ml``, that it runs.
    """

    name: str
    newest_opset: int
    newest_ir_version: int
    allowed: frozenset[str]
    kernels: frozenset[str] = frozenset()
    classical: frozenset[str] = frozenset()

    def has_kernel(self, node: ir.Node) -> bool:
        """Whether a node is a semantic operator that the runtime has a kernel for; those of other domains are others."""
        return node.domain == BURNISH_DOMAIN and node.op_type in self.kernels

    def runs(self, node: ir.Node) -> bool:
        """Whether the runtime has a kernel for a node."""
        if node.domain == "ai.onnx.ml":
            return node.op_type in self.classical
        return (node.domain in ("", "ai.onnx") and node.op_type in self.allowed) or self.has_kernel(node)


STANDARD_OPERATORS = frozenset(schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == "")
CLASSICAL_OPERATORS = frozenset(schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == "ai.onnx.ml")

TARGETS = {
    "onnxruntime": Target(
        "onnxruntime", newest_opset=26, newest_ir_version=13, allowed=STANDARD_OPERATORS, classical=CLASSICAL_OPERATORS
    ),
    "reference": Target(
        "reference",
        newest_opset=onnx.defs.onnx_opset_version(),
        newest_ir_version=int(onnx.IR_VERSION),
        allowed=STANDARD_OPERATORS,
        classical=CLASSICAL_OPERATORS,
    ),
}


def settle_opset(model: ir.Model, target: Target) -> None:
    """Declare the oldest opset (at least 18) in which every node means what it means now, so that most runtimes load it.

    Raises:
        UnsupportedOperatorError: a node needs a newer opset than the target loads.
    """
    declared = model.opset_imports[""]
    needed = OLDEST_OPSET
    for node in model.graph.all_nodes():
        if node.domain not in ("", "ai.onnx"):
            continue
        version = oldest_opset(node, declared, OLDEST_OPSET)
        if version > target.newest_opset:
            raise UnsupportedOperatorError(
                f"{describe_node(node)} is of opset {version}, and {target.name} loads opset {target.newest_opset} at most: "
                "update the runtime, or export the model with an older opset"
            )
        needed = max(needed, version)
    model.opset_imports[""] = needed
    model.ir_version = min(max(model.ir_version, 10), target.newest_ir_version)


def check_allowed(model: ir.Model, target: Target) -> None:
    """Raise UnsupportedOperatorError for the first node that is not on the target's allow-list."""
    for node in model.graph.all_nodes():
        if not target.runs(node):
            if quantized := quantization_of(node):
                raise UnsupportedOperatorError(quantized)
            raise UnsupportedOperatorError(
                f"{describe_node(node)} is not among the operators that {target.name} runs: "
                "lower it (burnish.ops.lowering) or choose another target"
            )
