"""Targets: what a runtime can do. A program is lowered for one, and its graphs are checked against what it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Self

import onnx
import onnx_ir as ir

from burnish.errors import UnsupportedOperatorError
from burnish.graph import BURNISH_DOMAIN, describe_node, quantization_of
from burnish.graph.inference import operator_version
from burnish.graph.versions import oldest_opset
from burnish.operators.semantic import SemanticOperator

OLDEST_OPSET = 18
STANDARD_DOMAINS = ("", "ai.onnx")
CLASSICAL_DOMAIN = "ai.onnx.ml"
ANY_DOMAIN = "*"
"""Stands, among the domains of a target, for every domain but the standard's and burnish's own."""


@dataclass(frozen=True)
class Support:
    """What a runtime runs of one operator.

    Attributes:
        newest: the newest version of the operator that it runs; None for any.
        dtypes: the element types that a node may read and return; None for any.
        outputs: how many outputs it gives of a node, from the first on; None for all. ``MaxPool`` with one has no ``Indices``.
    """

    newest: int | None = None
    dtypes: frozenset[ir.DataType] | None = None
    outputs: int | None = None


_SCHEMAS = [(schema.domain, schema.name) for schema in onnx.defs.get_all_schemas()]
STANDARD_OPERATORS: Mapping[str, Support] = MappingProxyType({name: Support() for domain, name in _SCHEMAS if domain == ""})
CLASSICAL_OPERATORS = frozenset(name for domain, name in _SCHEMAS if domain == CLASSICAL_DOMAIN)


@dataclass(frozen=True)
class Target:
    """What a runtime can do: the standard operators that it may be given, and the semantic operators that it has kernels for.

    Attributes:
        name: how it is asked for, and what errors call it.
        newest_opset: the newest version of the standard domain that it loads.
        newest_ir_version: the newest ONNX file format that it loads.
        operators: the standard operators that it runs, with what it runs of each.
        domains: other domain -> its operators that the runtime runs, None for all of them; ``ANY_DOMAIN`` stands for all others.
        kernels: the names of the semantic operators that it has kernels of its own for: these are not lowered (``with_kernels``).
        collectives: the names of those that it runs besides where it has a communicator to other workers.
        symbolic_shapes: whether the dimensions of inputs may be open, as a batch of any size is.
        float64: whether it computes in float64. Where not, what a program computes in float64 beside the model (rates, factors of
            the optimizer, norms of gradients) is float32.
    """

    name: str
    newest_opset: int
    newest_ir_version: int
    operators: Mapping[str, Support] = field(default_factory=lambda: STANDARD_OPERATORS)
    domains: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    kernels: frozenset[str] = frozenset()
    collectives: frozenset[str] = frozenset()
    symbolic_shapes: bool = True
    float64: bool = True

    def with_kernels(self, kernels: Collection[SemanticOperator | str]) -> Self:
        """Return the same runtime with kernels for these semantic operators, and for no others."""
        names = (kernel.name if isinstance(kernel, SemanticOperator) else kernel for kernel in kernels)
        return replace(self, kernels=frozenset(names))

    def among_workers(self) -> Self:
        """Return what it runs where it has a communicator to other workers."""
        return self.with_kernels(self.kernels | self.collectives)

    def has_kernel(self, node: ir.Node) -> bool:
        """Whether a node is a semantic operator that the runtime has a kernel for; those of other domains are others."""
        return node.domain == BURNISH_DOMAIN and node.op_type in self.kernels

    def runs(self, node: ir.Node) -> bool:
        """Whether the runtime has an operator of this domain and name."""
        if node.domain in STANDARD_DOMAINS:
            return node.op_type in self.operators
        if node.domain == BURNISH_DOMAIN:
            return self.has_kernel(node)
        operators = self.domains.get(node.domain, self.domains.get(ANY_DOMAIN, frozenset()))
        return operators is None or node.op_type in operators

    @property
    def output_limits(self) -> dict[str, int]:
        """Standard operator -> how many outputs the runtime gives, of those of which it does not give all."""
        return {name: support.outputs for name, support in self.operators.items() if support.outputs is not None}

    @property
    def takes_joined_updates(self) -> bool:
        """Whether updates of small tensors are joined for it, by operators with an operand or a result for each of them.

        A runtime with kernels of its own updates many tensors in one call; one that does not run all of the standard may read
        few buffers at once, as WebGPU does.
        """
        return not self.kernels and self.operators is STANDARD_OPERATORS

    @property
    def takes_products(self) -> bool:
        """Whether products of matrices stand for operators that ONNX Runtime has slow kernels of on processors, as a runtime
        with kernels of its own, and one on a graphics processor, does not want."""
        return not self.kernels and self.operators is STANDARD_OPERATORS

    @property
    def gathers_blocks(self) -> bool:
        """Whether blocks of a tensor are best gathered into another order: ONNX Runtime slices and concatenates on one thread."""
        return self.name == ONNXRUNTIME.name

    def covers(self, other: Target) -> bool:
        """Whether it is known, without a look at a graph, to run whatever another target runs."""
        if self is other:
            return True
        return (
            self.newest_opset >= other.newest_opset
            and self.newest_ir_version >= other.newest_ir_version
            and self.operators is other.operators
            and self.kernels >= other.kernels
            and self.symbolic_shapes >= other.symbolic_shapes
            and self.float64 >= other.float64
            and self.domains.items() >= other.domains.items()
        )


ONNXRUNTIME = Target(
    "onnxruntime", newest_opset=26, newest_ir_version=13, domains=MappingProxyType({CLASSICAL_DOMAIN: CLASSICAL_OPERATORS})
)
WEBGPU = Target(
    "webgpu",
    newest_opset=26,
    newest_ir_version=13,
    operators=MappingProxyType({**STANDARD_OPERATORS, "BatchNormalization": Support(outputs=1), "MaxPool": Support(outputs=1)}),
    float64=False,
)
"""What onnxruntime-web 1.30 runs with WebGPU; what has no kernel there it runs on the CPU."""

TARGETS = {
    "onnxruntime": ONNXRUNTIME,
    "web": replace(ONNXRUNTIME, name="web"),
    "webgpu": WEBGPU,
    "mobile": replace(ONNXRUNTIME, name="mobile"),
    "ort-minimal": replace(ONNXRUNTIME, name="ort-minimal", domains=MappingProxyType({})),
    "reference": Target(
        "reference",
        newest_opset=onnx.defs.onnx_opset_version(),
        newest_ir_version=int(onnx.IR_VERSION),
        domains=MappingProxyType({CLASSICAL_DOMAIN: CLASSICAL_OPERATORS}),
    ),
}


def settle_opset(model: ir.Model, target: Target) -> None:
    """Declare the oldest opset (at least 18) in which every node means what it means now, so that most runtimes load it.

    Raises:
        UnsupportedOperatorError: a node needs a newer opset than the target loads.
    """
    model.opset_imports[""] = _needed_opset(model, target)
    model.ir_version = min(max(model.ir_version, 10), target.newest_ir_version)


def _needed_opset(model: ir.Model, target: Target) -> int:
    declared = model.opset_imports[""]
    needed = OLDEST_OPSET
    for node in model.graph.all_nodes():
        if node.domain not in STANDARD_DOMAINS:
            continue
        version = oldest_opset(node, declared, OLDEST_OPSET)
        if version > target.newest_opset:
            raise UnsupportedOperatorError(
                f"{describe_node(node)} is of opset {version}, and {target.name} loads opset {target.newest_opset} at most: "
                "update the runtime, or export the model with an older opset"
            )
        needed = max(needed, version)
    return needed


def check_allowed(model: ir.Model, target: Target) -> None:
    """Raise UnsupportedOperatorError for the first node that the target does not run.

    The domain of a node is looked at, and for standard operators the version that the model's opset gives them, and the element
    types that they read and return.
    """
    opset = model.opset_imports[""]
    for node in model.graph.all_nodes():
        if not target.runs(node):
            if quantized := quantization_of(node):
                raise UnsupportedOperatorError(quantized)
            raise UnsupportedOperatorError(
                f"{describe_node(node)} is not among the operators that {target.name} runs: "
                "lower it (burnish.operators.lowering) or choose another target"
            )
        if node.domain in STANDARD_DOMAINS:
            _check_support(node, opset, target)


def _check_support(node: ir.Node, opset: int, target: Target) -> None:
    support = target.operators[node.op_type]
    if support.newest is not None:
        version = operator_version(node.op_type, opset)
        if version is not None and version > support.newest:
            raise UnsupportedOperatorError(
                f"{describe_node(node)} is of version {version} of its operator, and {target.name} runs version {support.newest} "
                "at most: export the model with an older opset, or choose another target"
            )
    given = sum(1 for output in node.outputs if output.uses() or output.is_graph_output())
    if support.outputs is not None and given > support.outputs:
        raise UnsupportedOperatorError(
            f"{describe_node(node)} is read from its output '{node.outputs[given - 1].name}', and {target.name} gives "
            f"{support.outputs} of the outputs of {node.op_type}: give the model's inputs fixed sizes, but for the batch, "
            "or choose another target"
        )
    if not target.float64:
        _check_no_float64(node, target)
    if support.dtypes is None:
        return
    for value in (*node.inputs, *node.outputs):
        if value is not None and value.dtype is not None and value.dtype not in support.dtypes:
            taken = ", ".join(sorted(dtype.name.lower() for dtype in support.dtypes))
            raise UnsupportedOperatorError(
                f"{describe_node(node)} reads or returns '{value.name}', {value.dtype.name.lower()}, and {target.name} runs "
                f"{node.op_type} over {taken}: change the model's dtypes, or choose another target"
            )


def _check_no_float64(node: ir.Node, target: Target) -> None:
    for value in (*node.inputs, *node.outputs):
        if value is not None and value.dtype == ir.DataType.DOUBLE:
            raise UnsupportedOperatorError(
                f"{describe_node(node)} reads or returns '{value.name}', float64, which {target.name} has not: convert the model "
                "to float32, or choose another target"
            )


def check_has_dtypes(model: ir.Model, target: Target) -> None:
    """Raise UnsupportedOperatorError where a model has inputs, outputs or weights of float64, and the target has not."""
    if target.float64:
        return
    for value in (*model.graph.inputs, *model.graph.initializers.values(), *model.graph.outputs):
        if value.dtype == ir.DataType.DOUBLE:
            raise UnsupportedOperatorError(
                f"'{value.name}' of the model is float64, which {target.name} has not: convert the model to float32, or choose "
                "another target"
            )


def check_runs(model: ir.Model, target: Target) -> None:
    """Raise UnsupportedOperatorError where the target does not run a finished model as it is."""
    if model.opset_imports[""] > target.newest_opset:
        _needed_opset(model, target)
    check_allowed(model, target)
