"""What an ONNX operator becomes: the registry of rules, and what a rule is given to work with.

A rule is written with PyTorch's functions, applied to proxies: what it calls is recorded, one call per ATen operator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import numpy as np
import onnx_ir as ir
import torch
from torch import fx
from torch.overrides import handle_torch_function, has_torch_function

from burnish.engines.communicator import Communicator
from burnish.engines.torch.translate.dtypes import torch_dtype
from burnish.engines.torch.translate.host_shapes import Host, Number
from burnish.errors import EngineError
from burnish.graph import attribute_value, describe_node, same_padding, split_padding
from burnish.kernels.engine_operator import EngineOperator
from burnish.operators.semantic import SemanticOperator

Result = fx.Proxy | Host | None
Rule = Callable[["Call"], Any]

_RULES: dict[tuple[str, str], list[tuple[int, Rule]]] = {}


def translates(*operators: str | SemanticOperator | EngineOperator, domain: str = "", since: int = 1) -> Callable[[Rule], Rule]:
    """Register a rule for operators: semantic ones, the engine's own, or those of a domain by name, from a version of it on."""

    def register(rule: Rule) -> Rule:
        for operator in operators:
            entries = _RULES.setdefault((domain, operator) if isinstance(operator, str) else operator.key, [])
            entries.append((since, rule))
            entries.sort(key=lambda entry: -entry[0])
        return rule

    return register


def find_rule(node: ir.Node, opset: int) -> Rule | None:
    """The rule of a node, by domain, operator and version."""
    return next((rule for since, rule in _RULES.get((node.domain, node.op_type), ()) if since <= opset), None)


def translated_operators(domain: str = "") -> frozenset[str]:
    """The operators of a domain that have a rule."""
    return frozenset(op_type for owner, op_type in _RULES if owner == domain)


def checked_results(node: ir.Node, results: Any) -> tuple[Any, ...]:
    """Return what a rule gives for each output of a node; None for one that nothing reads.

    Raises:
        EngineError: an output is read, and the rule gives nothing for it.
    """
    given = results if isinstance(results, tuple) else (results,)
    complete = (*given, *(None for _ in node.outputs))[: len(node.outputs)]
    for index, (output, result) in enumerate(zip(node.outputs, complete, strict=True)):
        if result is None and (output.uses() or output.is_graph_output()):
            raise EngineError(
                f"the translation of {describe_node(node)} returned {len(given)} of {len(node.outputs)} results, and none for "
                f"its output {index}, '{output.name}', which is read: let it (burnish.engines.torch.translates) return one each"
            )
    return complete


class NotKnownYet(Exception):
    """A rule asks for what is known only when the graph runs: the node waits until then (``translation.Late``)."""


class Operands(Protocol):
    """What a rule's questions about values are answered from: a translation, or the tensors of a run."""

    device: torch.device
    opset: int
    communicator: Communicator | None
    started: dict[ir.Value, torch.nn.Module]
    """By its value, what began an exchange that another node waits for."""

    def tensor(self, value: ir.Value) -> Any:
        """The value as a tensor, or a proxy of one."""
        ...

    def host(self, value: ir.Value) -> Host | None:
        """The value as host numbers, or None for what is a tensor alone."""
        ...

    def number(self, value: ir.Value) -> Number | None:
        """The value as one number, where it is of rank 0 and known to the host."""
        ...

    def constant(self, value: ir.Value) -> np.ndarray | None:
        """The value as an array, where it is known."""
        ...

    def dtype(self, value: ir.Value) -> ir.DataType | None: ...

    def extents(self, value: ir.Value) -> list[Any] | None:
        """The shape as host integers; None where not even the rank is known."""
        ...

    def module(self, module: torch.nn.Module, operands: Sequence[ir.Value]) -> Any:
        """Call a module on operands."""
        ...


class Call:
    """One node that is being translated: its operands, as a rule wants them, and its attributes."""

    def __init__(self, node: ir.Node, operands: Operands):
        self.node = node
        self._operands = operands

    @property
    def device(self) -> torch.device:
        return self._operands.device

    @property
    def opset(self) -> int:
        return self._operands.opset

    @property
    def communicator(self) -> Communicator | None:
        """The other workers; None where there are none."""
        return self._operands.communicator

    @property
    def started(self) -> dict[ir.Value, torch.nn.Module]:
        return self._operands.started

    def __len__(self) -> int:
        return len(self.node.inputs)

    def has(self, index: int) -> bool:
        """Whether the node has an operand at this place."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def value(self, index: int) -> ir.Value:
        """The ONNX value of an operand that is there."""
        value = self.node.inputs[index]
        assert value is not None
        return value

    def tensor(self, index: int = 0) -> torch.Tensor:
        """An operand as a tensor: a proxy, which PyTorch's functions take as one."""
        return cast(torch.Tensor, self._operands.tensor(self.value(index)))

    def optional(self, index: int) -> torch.Tensor | None:
        """An operand as a tensor, None where it is left out."""
        return self.tensor(index) if self.has(index) else None

    def tensors(self) -> list[torch.Tensor]:
        return [self.tensor(index) for index in range(len(self))]

    def operand(self, index: int) -> Any:
        """An operand of arithmetic: a Python number for a constant of rank 0, else a tensor."""
        number = self._operands.number(self.value(index))
        return self.tensor(index) if number is None else number

    def integers(self, index: int, default: Sequence[int] | None = None) -> list[Any]:
        """An operand as host integers, such as a shape; a tensor computed from data is read back, which waits for it.

        Raises:
            NotKnownYet: how many there are is known only when the graph runs.
        """
        if not self.has(index):
            if default is None:
                raise EngineError(f"{describe_node(self.node)} lacks its operand {index}: export the model again")
            return list(default)
        value = self.value(index)
        found = self._operands.host(value)
        if found is not None:
            return list(found.elements)
        extents = self._operands.extents(value)
        if extents == []:
            return [self.tensor(index).item()]
        if extents is None or len(extents) != 1 or not isinstance(extents[0], int):
            raise NotKnownYet
        numbers = self.tensor(index).tolist()
        return [numbers[position] for position in range(extents[0])]

    def host_integers(self, index: int) -> list[Any]:
        """As ``integers``, for a rule that has to see what stands there, as a 0 in a shape has a meaning of its own.

        Raises:
            NotKnownYet: they are computed from data; extents, known or not, are no such numbers.
        """
        if self._operands.host(self.value(index)) is None:
            raise NotKnownYet
        return self.integers(index)

    def known(self, index: int) -> np.ndarray | None:
        """An operand as an array, where it is constant."""
        return self._operands.constant(self.value(index)) if self.has(index) else None

    def known_integers(self, index: int, default: Sequence[int]) -> list[int]:
        """An operand as integers that are known; ``default`` where it is left out.

        Raises:
            NotKnownYet: they are computed when the graph runs.
        """
        if not self.has(index):
            return list(default)
        array = self.known(index)
        if array is not None:
            return [int(number) for number in array.reshape(-1)]
        found = self._operands.host(self.value(index))
        if found is None or not found.is_known:
            raise NotKnownYet
        return [int(number) for number in found.elements]

    def known_array(self, index: int) -> np.ndarray:
        """An operand as an array that is known.

        Raises:
            NotKnownYet: it is computed when the graph runs.
        """
        array = self.known(index)
        if array is None:
            raise NotKnownYet
        return array

    def dtype(self, index: int = 0) -> ir.DataType:
        """The element type of an operand.

        Raises:
            NotKnownYet: it is known only when the graph runs.
        """
        dtype = self._operands.dtype(self.value(index))
        if dtype is None:
            raise NotKnownYet
        return dtype

    def torch_dtype(self, index: int = 0) -> torch.dtype:
        return torch_dtype(self.dtype(index))

    def output_dtype(self, index: int = 0) -> torch.dtype:
        dtype = self.node.outputs[index].dtype
        if dtype is None:
            raise self.unsupported("the type of its output is not known", "load the model with burnish.load, which infers it")
        return torch_dtype(dtype)

    def rank(self, index: int = 0) -> int:
        """The rank of an operand.

        Raises:
            NotKnownYet: it is known only when the graph runs.
        """
        return len(self.extents(index))

    def extents(self, index: int = 0) -> list[Any]:
        """The shape of an operand as host integers.

        Raises:
            NotKnownYet: not even the rank is known before the graph runs.
        """
        found = self._operands.extents(self.value(index))
        if found is None:
            raise NotKnownYet
        return found

    def known_extents(self, index: int = 0) -> list[int]:
        """The shape of an operand as integers that are known.

        Raises:
            NotKnownYet: one of them is known only when the graph runs.
        """
        found = self.extents(index)
        if not all(isinstance(extent, int) for extent in found):
            raise NotKnownYet
        return found

    def module(self, module: torch.nn.Module, operands: Sequence[ir.Value]) -> Any:
        """Call a module on operands: what has no ATen operator, such as a loop."""
        return self._operands.module(module, operands)

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute; a default that is a fraction has the digits that the standard keeps of it, those of float32."""
        found = attribute_value(self.node, name, default)
        return float(np.float32(found)) if isinstance(found, float) else found

    def is_read(self, index: int) -> bool:
        """Whether an output is there and anything reads it."""
        outputs = self.node.outputs
        return index < len(outputs) and (bool(outputs[index].uses()) or outputs[index].is_graph_output())

    def unsupported(self, problem: str, remedy: str = "use engine='onnxruntime'") -> EngineError:
        return EngineError(f"{describe_node(self.node)}: {problem}, which the torch engine needs to run it; {remedy}")


Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def records_one_call(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Let a graph that is being made record one call of a function, in place of the calls that the function makes.

    The graph calls the function itself, which then looks for no proxies. While the graph is made, what the function returns is a
    proxy, be it of a tuple.
    """

    @functools.wraps(function)
    def run(*arguments: Parameters.args, **named: Parameters.kwargs) -> Returned:
        if has_torch_function(arguments):
            return handle_torch_function(function, arguments, *arguments, **named)
        return function(*arguments, **named)

    return run


def explicit_pads(op: Call, kernel: list[int], strides: list[int], dilations: list[int], pads: list[int]) -> list[Any]:
    """The pads that an operator with windows declares, begins, then ends; those that ``auto_pad`` asks for are worked out.

    Raises:
        NotKnownYet: they depend on extents that are known only when the graph runs.
    """
    automatic = op.attribute("auto_pad", "NOTSET")
    if automatic not in ("SAME_UPPER", "SAME_LOWER"):
        return [0] * len(pads) if automatic == "VALID" else list(pads)
    sizes = [extent if isinstance(extent, int) else None for extent in op.extents()[2:]]
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    totals = [same_padding(*axis) for axis in zip(sizes, spans, strides, strict=True)]
    known = [total for total in totals if total is not None]
    if len(known) < len(kernel):
        raise NotKnownYet
    begins, ends = split_padding(known, more_at_end=automatic == "SAME_UPPER")
    return [*begins, *ends]
