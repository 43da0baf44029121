"""Semantic operators: one node of the domain ``burnish`` that equals several nodes of standard ONNX.

Each is one object, declared in the file of its family. The object emits the node, infers the types of its outputs, recognizes
the node, and has the properties that passes and engines ask for. Its name is spelled nowhere else::

    RELU_GRAD = SemanticOperator("ReluGrad", ("dy", "y"), ("dx",), like("dy"), lowering=lower_relu_grad)

An engine with a kernel for it refers to the same object; for every other target it is lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, FLOATING, Builder, Tensor
from burnish.graph.annotations import NEVER_REPEATED
from burnish.graph.uses import operands_of
from burnish.operators.registry import Operator, find_record, records

ANY_NUMBER = "..."
"""Suffix of the last input or output name if a node may have any number of them."""


@dataclass(frozen=True)
class OutputType:
    """The dtype of an output, and its shape; None if not even its rank is known."""

    dtype: ir.DataType
    shape: ir.Shape | None

    @staticmethod
    def of(tensor: Tensor) -> OutputType:
        return OutputType(tensor.dtype, tensor.shape)


class Operands:
    """The operands and attributes of an emitted node, for inference."""

    def __init__(self, operator: SemanticOperator, tensors: Sequence[Tensor | None], attributes: Mapping[str, Any]):
        self._names = operator.inputs
        self.tensors = tensors
        self.attributes = attributes

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors[self._names.index(name)]
        assert tensor is not None, name
        return tensor


Inference = Callable[[Operands], Sequence[OutputType]]


def like(*names: str) -> Inference:
    """Return an inference: each output has the dtype and shape of the named input."""
    return lambda operands: [OutputType.of(operands[name]) for name in names]


@dataclass(frozen=True, eq=False)
class BurnishOperator(Operator):
    """An operator of the domain ``burnish``: the base of semantic operators and those of engines.

    Attributes:
        inputs: their names, in order; the last may end in ``...``, for any number of them. A node may omit inputs.
        outputs: their names, likewise.
        domain: ``burnish``.
        shares_memory: output -> input that may share its memory in an engine: the same numbers, or a view of them.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    domain: str = field(default=BURNISH_DOMAIN, kw_only=True)
    shares_memory: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    def __call__(self, *operands: Tensor | None, builder: Builder | None = None, **attributes: Any) -> Tensor:
        """Emit a node with one output, and return it; arguments as for ``emit``."""
        (result,) = self.emit(*operands, builder=builder, **attributes)
        return result

    def emit(
        self, *operands: Tensor | None, builder: Builder | None = None, like: Tensor | None = None, **attributes: Any
    ) -> tuple[Tensor, ...]:
        """Emit a node and return its outputs.

        Args:
            operands: the inputs; None omits one.
            builder: emits the node; by default the builder of the first operand.
            like: a tensor with the dtype and shape of the first output, if known.
            attributes: the attributes of the node; None omits one.
        """
        return self._put(operands, builder, len(self.outputs), like, attributes)

    def _put(
        self,
        operands: Sequence[Tensor | None],
        builder: Builder | None,
        count: int,
        like: Tensor | None,
        attributes: Mapping[str, Any],
    ) -> tuple[Tensor, ...]:
        if builder is None:
            builder = next(tensor.builder for tensor in operands if tensor is not None)
        results = builder.op(self.name, *operands, domain=self.domain, outputs=count, like=like, **attributes)
        return results if isinstance(results, tuple) else (results,)


@dataclass(frozen=True, eq=False)
class SemanticOperator(BurnishOperator):
    """An operator of the domain ``burnish`` that is lowered to standard ONNX for a target without a kernel for it.

    Attributes:
        infer: returns the dtype and shape of each output of a node, from its operands and attributes.
        constants: outputs that count as constants in derivatives, such as a count, for any dtype.
        internal: outputs that only its gradient reads, without cotangents: it is lowered before its gradient is differentiated.
        repeatable: True if it may be recomputed instead of keeping its outputs; False for exchanges between workers.
    """

    infer: Inference
    constants: tuple[str, ...] = ()
    internal: tuple[str, ...] = ()
    repeatable: bool = True

    def emit(self, *operands: Tensor | None, builder: Builder | None = None, **attributes: Any) -> tuple[Tensor, ...]:
        """Emit a node and return its outputs, with the dtypes and shapes from ``infer``; arguments as for the base class."""
        types = self.infer(Operands(self, operands, attributes))
        results = self._put(operands, builder, len(types), None, attributes)
        for result, inferred in zip(results, types, strict=True):
            result.value.dtype = inferred.dtype
            result.value.shape = None if inferred.shape is None else ir.Shape(inferred.shape.dims)
        if not self.repeatable:
            producer = results[0].value.producer()
            assert producer is not None
            NEVER_REPEATED.set(producer, True)
        return results

    def shared_input(self, position: int) -> int | None:
        """Return the index of the input that the output at this position may share memory with, or None."""
        output = self.outputs[min(position, len(self.outputs) - 1)]
        shared = self.shares_memory.get(output)
        if shared is None:
            return None
        beyond = position - self.outputs.index(output) if shared.endswith(ANY_NUMBER) else 0
        return self.inputs.index(shared) + beyond


def semantic_operator(node: ir.Node | None) -> SemanticOperator | None:
    """Return the semantic operator of a node, or None for a node of another domain."""
    record = find_record(node) if node is not None and node.domain == BURNISH_DOMAIN else None
    return record if isinstance(record, SemanticOperator) else None


def differentiable_outputs(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the outputs of a node that a derivative may flow through: floating-point, or of unknown dtype."""
    operator = semantic_operator(node)
    for index, output in enumerate(node.outputs):
        is_constant = operator is not None and operator.constants and operator.outputs[index] in operator.constants
        if not is_constant and (output.dtype is None or output.dtype in FLOATING):
            yield output


def declared_operators() -> Mapping[str, SemanticOperator]:
    every = (operator for versions in records().values() for operator in versions)
    return {operator.name: operator for operator in every if isinstance(operator, SemanticOperator)}


def semantic_operators() -> frozenset[str]:
    """Return the names of the operators of the ``burnish`` domain that have a lowering."""
    every = (operator for versions in records().values() for operator in versions)
    return frozenset(each.name for each in every if each.domain == BURNISH_DOMAIN and each.lowering is not None)


def reached_from(nodes: Iterable[ir.Node], sources: Iterable[ir.Value]) -> set[ir.Value]:
    """Return ``sources``, and the floating-point values that nodes, in order, compute from them: these carry gradients."""
    reached = set(sources)
    for node in nodes:
        if any(value in reached for value in operands_of(node)):
            reached.update(differentiable_outputs(node))
    return reached


def needed_for(nodes: Iterable[ir.Node], targets: Iterable[ir.Value]) -> set[ir.Value]:
    """Return ``targets``, and the values that nodes, in order, compute them from."""
    needed = set(targets)
    for node in reversed(list(nodes)):
        if any(output in needed for output in differentiable_outputs(node)):
            needed.update(value for value in operands_of(node) if value is not None)
    return needed
