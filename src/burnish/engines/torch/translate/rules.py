"""The registry of rules that translate ONNX operators, and the interface for rules.

A rule applies PyTorch's functions to proxies: its calls are recorded, one per ATen operator.
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
    """Register a rule for operators: semantic ones, the engine's own, or those of a domain, from a version on."""

    def register(rule: Rule) -> Rule:
        for operator in operators:
            entries = _RULES.setdefault((domain, operator) if isinstance(operator, str) else operator.key, [])
            entries.append((since, rule))
            entries.sort(key=lambda entry: -entry[0])
        return rule

    return register


def find_rule(node: ir.Node, opset: int) -> Rule | None:
    """Return the rule of a node, by domain, operator and version."""
    return next((rule for since, rule in _RULES.get((node.domain, node.op_type), ()) if since <= opset), None)


def translated_operators(domain: str = "") -> frozenset[str]:
    """Return the operators of a domain that have a rule."""
    return frozenset(op_type for owner, op_type in _RULES if owner == domain)


def checked_results(node: ir.Node, results: Any) -> tuple[Any, ...]:
    """Return a rule's result for each output of a node; None for one that nothing reads.

    Raises:
        EngineError: an output is read, but the rule returns nothing for it.
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
    """A rule needs a value that is only known at run time: the node is translated then (``translation.Late``)."""


class Operands(Protocol):
    """The source of answers to a rule's questions about values: a translation, or the tensors of a run."""

    device: torch.device
    opset: int
    communicator: Communicator | None
    started: dict[ir.Value, torch.nn.Module]
    """The start of each exchange that another node waits for, by its value."""

    def tensor(self, value: ir.Value) -> Any:
        """Return the value as a tensor, or a proxy of one."""
        ...

    def host(self, value: ir.Value) -> Host | None:
        """Return the value as host numbers, or None if it is only a tensor."""
        ...

    def number(self, value: ir.Value) -> Number | None:
        """Return the value as one number, if it has rank 0 and the host knows it."""
        ...

    def constant(self, value: ir.Value) -> np.ndarray | None:
        """Return the value as an array, if it is known."""
        ...

    def dtype(self, value: ir.Value) -> ir.DataType | None: ...

    def extents(self, value: ir.Value) -> list[Any] | None:
        """Return the shape as host integers; None if the rank is unknown."""
        ...

    def module(self, module: torch.nn.Module, operands: Sequence[ir.Value]) -> Any:
        """Call a module on operands."""
        ...


class Call:
    """A node that is being translated: its operands in the forms that rules need, and its attributes."""

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
        """The connection to other workers; None if there are none."""
        return self._operands.communicator

    @property
    def started(self) -> dict[ir.Value, torch.nn.Module]:
        return self._operands.started

    def __len__(self) -> int:
        return len(self.node.inputs)

    def has(self, index: int) -> bool:
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def value(self, index: int) -> ir.Value:
        value = self.node.inputs[index]
        assert value is not None
        return value

    def tensor(self, index: int = 0) -> torch.Tensor:
        """Return an operand as a tensor: a proxy that PyTorch's functions accept."""
        return cast(torch.Tensor, self._operands.tensor(self.value(index)))

    def optional(self, index: int) -> torch.Tensor | None:
        """Return an operand as a tensor, or None if it is absent."""
        return self.tensor(index) if self.has(index) else None

    def tensors(self) -> list[torch.Tensor]:
        return [self.tensor(index) for index in range(len(self))]

    def operand(self, index: int) -> Any:
        """Return an operand of arithmetic: a Python number for a constant of rank 0, else a tensor."""
        number = self._operands.number(self.value(index))
        return self.tensor(index) if number is None else number

    def integers(self, index: int, default: Sequence[int] | None = None) -> list[Any]:
        """Return an operand as host integers, such as a shape; a tensor computed from data is read back, which synchronizes.

        Raises:
            NotKnownYet: their number is only known at run time.
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
        """Like ``integers``, for a rule that must see the values, because for example a 0 in a shape has a special meaning.

        Raises:
            NotKnownYet: they are computed from data; extents, known or not, are allowed.
        """
        if self._operands.host(self.value(index)) is None:
            raise NotKnownYet
        return self.integers(index)

    def known(self, index: int) -> np.ndarray | None:
        """Return an operand as an array, if it is constant."""
        return self._operands.constant(self.value(index)) if self.has(index) else None

    def known_integers(self, index: int, default: Sequence[int]) -> list[int]:
        """Return an operand as known integers; ``default`` if it is absent.

        Raises:
            NotKnownYet: they are computed at run time.
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
        """Return an operand as a known array.

        Raises:
            NotKnownYet: it is computed at run time.
        """
        array = self.known(index)
        if array is None:
            raise NotKnownYet
        return array

    def dtype(self, index: int = 0) -> ir.DataType:
        """Return the element type of an operand.

        Raises:
            NotKnownYet: it is only known at run time.
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
        """Return the rank of an operand.

        Raises:
            NotKnownYet: it is only known at run time.
        """
        return len(self.extents(index))

    def extents(self, index: int = 0) -> list[Any]:
        """Return the shape of an operand as host integers.

        Raises:
            NotKnownYet: the rank is only known at run time.
        """
        found = self._operands.extents(self.value(index))
        if found is None:
            raise NotKnownYet
        return found

    def known_extents(self, index: int = 0) -> list[int]:
        """Return the shape of an operand as known integers.

        Raises:
            NotKnownYet: an extent is only known at run time.
        """
        found = self.extents(index)
        if not all(isinstance(extent, int) for extent in found):
            raise NotKnownYet
        return found

    def module(self, module: torch.nn.Module, operands: Sequence[ir.Value]) -> Any:
        """Call a module on operands, for operators that ATen does not have, such as a loop."""
        return self._operands.module(module, operands)

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return an attribute; a fractional default is rounded to float32, like the standard's."""
        found = attribute_value(self.node, name, default)
        return float(np.float32(found)) if isinstance(found, float) else found

    def is_read(self, index: int) -> bool:
        """True if an output exists and is read."""
        outputs = self.node.outputs
        return index < len(outputs) and (bool(outputs[index].uses()) or outputs[index].is_graph_output())

    def unsupported(self, problem: str, remedy: str = "use engine='onnxruntime'") -> EngineError:
        return EngineError(f"{describe_node(self.node)}: {problem}, which the torch engine needs to run it; {remedy}")


Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def records_one_call(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Make a graph that is being traced record one call of a function, instead of the calls inside it.

    The graph calls the function itself, without proxies. During tracing, the function returns a proxy, even of a tuple.
    """

    @functools.wraps(function)
    def run(*arguments: Parameters.args, **named: Parameters.kwargs) -> Returned:
        if has_torch_function(arguments):
            return handle_torch_function(function, arguments, *arguments, **named)
        return function(*arguments, **named)

    return run


def explicit_pads(op: Call, kernel: list[int], strides: list[int], dilations: list[int], pads: list[int]) -> list[Any]:
    """Return the pads of an operator with windows, begins, then ends; those for ``auto_pad`` are computed.

    Raises:
        NotKnownYet: they depend on extents that are only known at run time.
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
