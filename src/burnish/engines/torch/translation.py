"""From an ONNX graph to a ``torch.fx`` graph: the walk, and the registry of what each operator becomes.

A rule is written with PyTorch's functions, applied to proxies: what it calls is recorded, one call per ATen operator. It runs
once, when a graph is loaded; a step then runs the recorded calls alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from burnish.engines.torch import host
from burnish.engines.torch.dtypes import TORCH_DTYPES, tensor_of
from burnish.engines.torch.host import Host, Number
from burnish.errors import EngineError
from burnish.graph import attribute_value, constant_array, describe_node, operator_version

Result = fx.Proxy | Host | None
Rule = Callable[["Call"], Any]

_RULES: dict[tuple[str, str], list[tuple[int, Rule]]] = {}


def translates(*op_types: str, domain: str = "", since: int = 1) -> Callable[[Rule], Rule]:
    """Register a rule for operators; ``since`` is the first version of the operator's domain that it holds for."""

    def register(rule: Rule) -> Rule:
        for op_type in op_types:
            entries = _RULES.setdefault((domain, op_type), [])
            entries.append((since, rule))
            entries.sort(key=lambda entry: -entry[0])
        return rule

    return register


def find_rule(node: ir.Node, opset: int) -> Rule | None:
    """The rule of a node, by domain, operator and version."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return next((rule for since, rule in _RULES.get((domain, node.op_type), ()) if since <= opset), None)


def translated_operators(domain: str = "") -> frozenset[str]:
    """The operators of a domain that have a rule."""
    return frozenset(op_type for owner, op_type in _RULES if owner == domain)


class Call:
    """One node that is being translated: its operands, as a rule wants them, and its attributes."""

    def __init__(self, node: ir.Node, translator: Translator):
        self.node = node
        self._translator = translator

    @property
    def device(self) -> torch.device:
        return self._translator.device

    @property
    def opset(self) -> int:
        return self._translator.opset

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
        return cast(torch.Tensor, self._translator.tensor(self.value(index)))

    def optional(self, index: int) -> torch.Tensor | None:
        """An operand as a tensor, None where it is left out."""
        return self.tensor(index) if self.has(index) else None

    def tensors(self) -> list[torch.Tensor]:
        return [self.tensor(index) for index in range(len(self))]

    def operand(self, index: int) -> Any:
        """An operand of arithmetic: a Python number for a constant of rank 0, else a tensor."""
        number = self._translator.number(self.value(index))
        return self.tensor(index) if number is None else number

    def integers(self, index: int, default: Sequence[int] | None = None) -> list[Any]:
        """An operand as host integers, such as a shape; a tensor computed from data is read back, which waits for it."""
        if not self.has(index):
            if default is None:
                raise EngineError(f"{describe_node(self.node)} lacks its operand {index}: export the model again")
            return list(default)
        value = self.value(index)
        found = self._translator.host(value)
        if found is not None:
            return list(found.elements)
        length = None if value.shape is None or not value.shape.dims else value.shape.dims[0]
        if value.shape is not None and not value.shape.dims:
            return [self.tensor(index).item()]
        if not isinstance(length, int):
            raise EngineError(
                f"{describe_node(self.node)} takes '{value.name}' as a shape, and how many numbers it holds is not known when "
                "the graph is loaded: give the model static ranks, or use engine='onnxruntime'"
            )
        numbers = self.tensor(index).tolist()
        return [numbers[position] for position in range(length)]

    def known(self, index: int) -> np.ndarray | None:
        """An operand as an array, where it is constant."""
        return self._translator.constant(self.value(index)) if self.has(index) else None

    def known_integers(self, index: int, default: Sequence[int] | None = None) -> list[int] | None:
        """An operand as integers known when the graph is loaded; None where they are not."""
        if not self.has(index):
            return None if default is None else list(default)
        array = self.known(index)
        if array is not None:
            return [int(number) for number in array.reshape(-1)]
        found = self._translator.host(self.value(index))
        return [int(number) for number in found.elements] if found is not None and found.is_known else None

    def dtype(self, index: int = 0) -> ir.DataType:
        dtype = self.value(index).dtype
        assert dtype is not None
        return dtype

    def torch_dtype(self, index: int = 0) -> torch.dtype:
        return TORCH_DTYPES[self.dtype(index)]

    def output_dtype(self, index: int = 0) -> torch.dtype:
        dtype = self.node.outputs[index].dtype
        assert dtype is not None
        return TORCH_DTYPES[dtype]

    def rank(self, index: int = 0) -> int:
        """The rank of an operand.

        Raises:
            EngineError: it is not known.
        """
        shape = self.value(index).shape
        if shape is None:
            raise self.unsupported(
                f"the rank of '{self.value(index).name}' is not known", "declare the shapes of the model's inputs"
            )
        return len(shape)

    def extents(self, index: int = 0) -> list[Any]:
        """The shape of an operand as host integers."""
        self.rank(index)
        found = host.extents(self._translator.tensor(self.value(index)), self.value(index))
        assert found is not None
        return list(found.elements)

    def attribute(self, name: str, default: Any = None) -> Any:
        return attribute_value(self.node, name, default)

    def is_read(self, index: int) -> bool:
        """Whether an output is there and anything reads it."""
        outputs = self.node.outputs
        return index < len(outputs) and (bool(outputs[index].uses()) or outputs[index].is_graph_output())

    def unsupported(self, problem: str, remedy: str = "use engine='onnxruntime'") -> EngineError:
        return EngineError(f"{describe_node(self.node)}: {problem}, which the torch engine needs to run it; {remedy}")


class Translator:
    """Translates one graph.

    Args:
        model: the graph.
        device: where constants are made.
    """

    def __init__(self, model: ir.Model, device: torch.device):
        self.model = model
        self.device = device
        self.opset = model.graph.opset_imports[""]
        self.graph = fx.Graph()
        self._tracer = fx.proxy.GraphAppendingTracer(self.graph)
        self._root = torch.nn.Module()
        self._values: dict[ir.Value, fx.Proxy] = {}
        self._hosts: dict[ir.Value, Host | None] = {}
        self._constants: dict[ir.Value, np.ndarray | None] = {}

    def module(self) -> fx.GraphModule:
        """Translate: the module takes the graph's inputs in their order and returns its outputs as a tuple.

        Raises:
            EngineError: an operator without a rule; the message names the node.
        """
        graph = self.model.graph
        for value in graph.inputs:
            self._values[value] = self._proxy(self.graph.placeholder(_identifier(value.name or "input")))
        for node in graph:
            self._translate(node)
        outputs = tuple(self.tensor(value).node for value in graph.outputs)
        self.graph.output(outputs)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return fx.GraphModule(self._root, self.graph, class_name=_identifier(graph.name or "graph"))

    def tensor(self, value: ir.Value) -> fx.Proxy:
        """The value as a tensor of the traced program; a host value becomes one where it is first asked for as such."""
        found = self._values.get(value)
        if found is not None:
            return found
        array = self.constant(value)
        if array is not None:
            assert value.dtype is not None
            self._values[value] = self._buffer(tensor_of(array, value.dtype).to(self.device))
            return self._values[value]
        numbers = self._hosts.get(value)
        if numbers is None:
            raise EngineError(
                f"The value '{value.name}' is read before it is computed: the graph is not in order; load the model again"
            )
        elements = numbers.elements[0] if numbers.rank == 0 else list(numbers.elements)
        dtype = TORCH_DTYPES[numbers.dtype]
        node = self.graph.call_function(torch.tensor, (_nodes(elements),), {"dtype": dtype, "device": self.device})
        self._values[value] = self._proxy(node)
        return self._values[value]

    def host(self, value: ir.Value) -> Host | None:
        """The value as host numbers, or None for what is a tensor alone."""
        if value not in self._hosts:
            array = self.constant(value)
            self._hosts[value] = None if array is None or value.dtype is None else Host.of_array(array, value.dtype)
        return self._hosts[value]

    def number(self, value: ir.Value) -> Number | None:
        """The value as one number, where it is of rank 0 and known to the host."""
        array = self.constant(value)
        if array is not None:
            return array.item() if array.ndim == 0 and array.dtype.kind in "iufb" else None
        found = self.host(value)
        return found.elements[0] if found is not None and found.rank == 0 else None

    def constant(self, value: ir.Value) -> np.ndarray | None:
        if value not in self._constants:
            self._constants[value] = constant_array(value)
        return self._constants[value]

    def _translate(self, node: ir.Node) -> None:
        if node.op_type == "Constant" and node.domain == "":
            return
        output = node.outputs[0]
        if self._on_host(node):
            return
        rule = find_rule(node, (operator_version(node.op_type, self.opset) or self.opset) if node.domain == "" else 1)
        if rule is None:
            raise EngineError(
                f"{describe_node(node)} has no translation to PyTorch: register one with "
                "burnish.engines.torch.translates, or use engine='onnxruntime'"
            )
        results = rule(Call(node, self))
        if not isinstance(results, tuple):
            results = (results,)
        for output, result in zip(node.outputs, results, strict=False):
            if isinstance(result, Host):
                self._hosts[output] = result
            elif result is not None:
                self._values[output] = result

    def _on_host(self, node: ir.Node) -> bool:
        output = node.outputs[0]
        if node.op_type == "Shape" and node.domain == "" and node.inputs[0] is not None:
            source = node.inputs[0]
            array = self.constant(source)
            found = Host(array.shape, 1, ir.DataType.INT64) if array is not None else host.extents(self.tensor(source), source)
            if found is None:
                return False
            start, end = attribute_value(node, "start", 0), attribute_value(node, "end", None)
            self._hosts[output] = Host(found.elements[start:end], 1, found.dtype)
            return True
        operands = [None if value is None else self.host(value) for value in node.inputs]
        if not operands:
            return False
        computed = host.evaluate(node, operands)
        if computed is None:
            return False
        self._hosts[output] = computed
        return True

    def _buffer(self, tensor: torch.Tensor) -> fx.Proxy:
        name = f"constant_{len(list(self._root.buffers()))}"
        self._root.register_buffer(name, tensor)
        return self._proxy(self.graph.get_attr(name))

    def _proxy(self, node: fx.Node) -> fx.Proxy:
        return fx.Proxy(node, self._tracer)


def translate(model: ir.Model, device: torch.device) -> fx.GraphModule:
    """Translate a model of standard (and translated semantic) operators; see ``Translator.module``."""
    return Translator(model, device).module()


@functools.cache
def _identifier(name: str) -> str:
    letters = "".join(letter if letter.isalnum() else "_" for letter in name)
    return letters if letters and not letters[0].isdigit() else f"_{letters}"


def _nodes(elements: Any) -> Any:
    return fx.node.map_aggregate(elements, lambda element: element.node if isinstance(element, fx.Proxy) else element)


def run(module: fx.GraphModule, model: ir.Model, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run a translated model on tensors by name; returns its outputs by name."""
    with torch.inference_mode():
        outputs = module(*(inputs[value.name or ""] for value in model.graph.inputs))
    return {value.name or "": output for value, output in zip(model.graph.outputs, outputs, strict=True)}
