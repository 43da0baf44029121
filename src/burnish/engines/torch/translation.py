"""From an ONNX graph to a ``torch.fx`` graph: the walk, and the registry of what each operator becomes.

A rule is written with PyTorch's functions, applied to proxies: what it calls is recorded, one call per ATen operator. It runs
once, when a graph is loaded; a step then runs the recorded calls alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from burnish.engines.communicator import Communicator
from burnish.engines.torch import host
from burnish.engines.torch.dtypes import tensor_of, torch_dtype
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


class NotKnownYet(Exception):
    """A rule asks for what is known only when the graph runs: the node waits until then (``late.Late``)."""


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


class _Tracer(fx.proxy.GraphAppendingTracer):
    """Records calls; a tensor that a rule makes when the graph is loaded becomes a constant of the module."""

    def __init__(self, graph: fx.Graph, keep: Callable[[torch.Tensor], fx.Proxy]):
        super().__init__(graph)
        self._keep = keep

    def create_arg(self, a: Any) -> Any:
        return self._keep(a).node if isinstance(a, torch.Tensor) else super().create_arg(a)


class Translator:
    """Translates one graph.

    Args:
        graph: the graph, or the body of a control operator.
        opset: of the model it is in.
        device: where constants are made.
        captured: of a body, the values of the graphs around it that it reads; they follow its own inputs.
        communicator: to the other workers, where there are any.
    """

    def __init__(
        self,
        graph: ir.Graph,
        opset: int,
        device: torch.device,
        captured: Sequence[ir.Value] = (),
        communicator: Communicator | None = None,
    ):
        self.source = graph
        self.device = device
        self.opset = opset
        self.captured = captured
        self.communicator = communicator
        self.started: dict[ir.Value, torch.nn.Module] = {}
        self.graph = fx.Graph()
        self._tracer = _Tracer(self.graph, self._buffer)
        self._root = torch.nn.Module()
        self._values: dict[ir.Value, fx.Proxy] = {}
        self._hosts: dict[ir.Value, Host | None] = {}
        self._constants: dict[ir.Value, np.ndarray | None] = {}

    def translated(self) -> fx.GraphModule:
        """Translate: the module takes the graph's inputs in their order and returns its outputs as a tuple.

        Raises:
            EngineError: an operator without a rule, or an element type that PyTorch lacks; the message names the node or value.
        """
        for value in (*self.source.inputs, *self.captured):
            self._values[value] = self._proxy(self.graph.placeholder(_identifier(value.name or "input")))
        for node in self.source:
            self._translate(node)
        outputs = tuple(self.tensor(value).node for value in self.source.outputs)
        self.graph.output(outputs)
        self.graph.owning_module = cast(fx.GraphModule, self._root)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return fx.GraphModule(self._root, self.graph, class_name=_identifier(self.source.name or "graph"))

    def tensor(self, value: ir.Value) -> fx.Proxy:
        """The value as a tensor of the traced program; a host value becomes one where it is first asked for as such."""
        found = self._values.get(value)
        if found is not None:
            return found
        array = self.constant(value)
        if array is not None:
            declared = self.dtype(value)
            assert declared is not None
            torch_dtype(declared, f"The constant '{value.name}'")
            self._values[value] = self._buffer(tensor_of(array, declared).to(self.device))
            return self._values[value]
        numbers = self._hosts.get(value)
        if numbers is None:
            raise EngineError(
                f"The value '{value.name}' is read before it is computed: the graph is not in order; load the model again"
            )
        dtype = torch_dtype(numbers.dtype)
        if numbers.is_known:
            elements = numbers.elements[0] if numbers.rank == 0 else list(numbers.elements)
            self._values[value] = self._buffer(torch.tensor(elements, dtype=dtype, device=self.device))
        else:
            # Filled where the tensor lies: a copy from the host could not be part of a CUDA graph.
            filled = [self._filled(element, dtype) for element in numbers.elements]
            self._values[value] = filled[0] if numbers.rank == 0 else cast(fx.Proxy, torch.stack(cast(Any, filled)))
        return self._values[value]

    def _filled(self, element: Number, dtype: torch.dtype) -> fx.Proxy:
        options: dict[str, Any] = {"dtype": dtype, "device": self.device}
        return self._proxy(self.graph.call_function(torch.full, ([], _nodes(element)), options))

    def host(self, value: ir.Value) -> Host | None:
        """The value as host numbers, or None for what is a tensor alone."""
        if value not in self._hosts:
            array = self.constant(value)
            dtype = self.dtype(value)
            self._hosts[value] = None if array is None or dtype is None else Host.of_array(array, dtype)
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

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        if value.dtype is None and (constant := ir.convenience.get_const_tensor(value)) is not None:
            return constant.dtype
        return value.dtype

    def extents(self, value: ir.Value) -> list[Any] | None:
        array = self.constant(value)
        if array is not None:
            return list(array.shape)
        found = host.extents(self.tensor(value), value)
        return None if found is None else list(found.elements)

    def module(self, module: torch.nn.Module, operands: Sequence[ir.Value]) -> fx.Proxy:
        name = f"part_{len(list(self._root.children()))}"
        self._root.add_module(name, module)
        return self._proxy(self.graph.call_module(name, tuple(self.tensor(value).node for value in operands)))

    def _translate(self, node: ir.Node) -> None:
        if node.op_type == "Constant" and node.domain == "":
            return
        if self._on_host(node):
            return
        rule = find_rule(node, (operator_version(node.op_type, self.opset) or self.opset) if node.domain == "" else 1)
        if rule is None:
            raise EngineError(
                f"{describe_node(node)} has no translation to PyTorch: register one with "
                "burnish.engines.torch.translates, or use engine='onnxruntime'"
            )
        try:
            results = rule(Call(node, self))
        except (NotKnownYet, fx.proxy.TraceError):
            results = self._late(node, rule)
        if not isinstance(results, tuple):
            results = (results,)
        for output, result in zip(node.outputs, results, strict=False):
            if isinstance(result, Host):
                self._hosts[output] = result
            elif result is not None:
                self._values[output] = self._buffer(result) if isinstance(result, torch.Tensor) else result

    def _late(self, node: ir.Node, rule: Rule) -> tuple[fx.Proxy, ...]:
        from burnish.engines.torch.late import Late

        operands = list(dict.fromkeys(value for value in node.inputs if value is not None))
        results: Any = self.module(Late(node, rule, operands, self.device, self.opset), operands)
        return tuple(results[index] for index in range(len(node.outputs)))

    def _on_host(self, node: ir.Node) -> bool:
        output = node.outputs[0]
        if node.op_type == "Shape" and node.domain == "" and node.inputs[0] is not None:
            source = node.inputs[0]
            found = self.extents(source)
            if found is None:
                return False
            start, end = attribute_value(node, "start", 0), attribute_value(node, "end", None)
            self._hosts[output] = Host(tuple(found[start:end]), 1, ir.DataType.INT64)
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


def translate(model: ir.Model, device: torch.device, communicator: Communicator | None = None) -> fx.GraphModule:
    """Translate a model of standard (and translated semantic) operators; see ``Translator.translated``."""
    return Translator(model.graph, model.opset_imports[""], device, communicator=communicator).translated()


def captured_values(*graphs: ir.Graph) -> list[ir.Value]:
    """What bodies read of the graphs around them, constants aside; in order, each once."""
    found: dict[ir.Value, None] = {}
    for graph in graphs:
        own = {*graph.inputs, *graph.initializers.values(), *(output for node in graph.all_nodes() for output in node.outputs)}
        for node in graph.all_nodes():
            for body in _bodies(node):
                own.update((*body.inputs, *body.initializers.values()))
        read = [*(value for node in graph.all_nodes() for value in node.inputs), *graph.outputs]
        read += [value for node in graph.all_nodes() for body in _bodies(node) for value in body.outputs]
        found.update((value, None) for value in read if value is not None and value not in own and constant_array(value) is None)
    return list(found)


def _bodies(node: ir.Node) -> list[ir.Graph]:
    return [attribute.as_graph() for attribute in node.attributes.values() if attribute.type == ir.AttributeType.GRAPH]


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
