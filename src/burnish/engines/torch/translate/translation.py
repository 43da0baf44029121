"""Translate an ONNX graph into a ``torch.fx`` graph: the walk that applies the rules.

It runs once, when a graph is loaded; a step only runs the recorded calls.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from burnish.engines.communicator import Communicator
from burnish.engines.torch.translate import host_shapes
from burnish.engines.torch.translate.dtypes import ONNX_DTYPES, array_of, in_bytes, tensor_of, torch_dtype
from burnish.engines.torch.translate.failures import note_place
from burnish.engines.torch.translate.host_shapes import Host, Number
from burnish.engines.torch.translate.rules import Call, NotKnownYet, Rule, checked_results, find_rule
from burnish.errors import BurnishError, EngineError
from burnish.graph import attribute_value, bodies, constant_array, describe_node, operator_version


class Late(torch.nn.Module):
    """Runs a node's rule in each run, if its translation depends on values that are only known then, such as a rank.

    It costs some Python in every step, so it is the exception: shapes are usually known up to the batch.

    Args:
        node: the node.
        rule: its rule.
        operands: the values that ``forward`` gets, in order.
        device: device of new tensors.
        opset: opset of the model.
    """

    def __init__(self, node: ir.Node, rule: Rule, operands: Sequence[ir.Value], device: torch.device, opset: int):
        super().__init__()
        self._node, self._rule, self._operands = node, rule, tuple(operands)
        self._device, self._opset = device, opset

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        found = dict(zip(self._operands, tensors, strict=True))
        results = self._rule(Call(self._node, _Tensors(found, self._device, self._opset)))
        return tuple(self._tensor(result) for result in checked_results(self._node, results))

    def _tensor(self, result: Any) -> Any:
        if not isinstance(result, Host):
            return result
        elements = result.elements[0] if result.rank == 0 else list(result.elements)
        return torch.tensor(elements, dtype=torch_dtype(result.dtype), device=self._device)


class _Tensors:
    def __init__(self, tensors: dict[ir.Value, torch.Tensor], device: torch.device, opset: int):
        self._tensors = tensors
        self.device = device
        self.opset = opset
        self.communicator: Communicator | None = None  # an exchange is never translated this late
        self.started: dict[ir.Value, torch.nn.Module] = {}

    def tensor(self, value: ir.Value) -> torch.Tensor:
        return self._tensors[value]

    def host(self, value: ir.Value) -> Host | None:
        array = self.constant(value)
        return None if array is None else Host.of_array(array, self.dtype(value), longest=array.size)

    def number(self, value: ir.Value) -> Number | None:
        tensor = self.tensor(value)
        return tensor.item() if tensor.ndim == 0 else None

    def constant(self, value: ir.Value) -> np.ndarray | None:
        return array_of(self.tensor(value), self.dtype(value))

    def dtype(self, value: ir.Value) -> ir.DataType:
        return ONNX_DTYPES[self.tensor(value).dtype]

    def extents(self, value: ir.Value) -> list[Any]:
        return list(self.tensor(value).shape)

    def module(self, module: torch.nn.Module, operands: Sequence[ir.Value]) -> Any:
        return module(*(self.tensor(value) for value in operands))


class _Tracer(fx.proxy.GraphAppendingTracer):
    """Records calls; a tensor that a rule makes at loading becomes a constant of the module."""

    def __init__(self, graph: fx.Graph, keep: Callable[[torch.Tensor], fx.Proxy]):
        super().__init__(graph)
        self._keep = keep

    def create_arg(self, a: Any) -> Any:
        return self._keep(a).node if isinstance(a, torch.Tensor) else super().create_arg(a)


class Translator:
    """Translates one graph.

    Args:
        graph: the graph, or the body of a control operator.
        opset: opset of its model.
        device: device of constants.
        captured: for a body, the outer values that it reads, which are passed after its own inputs.
        communicator: connection to the other workers, if any.
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
        self._parts, self._buffers = itertools.count(), itertools.count()
        self._values: dict[ir.Value, fx.Proxy] = {}
        self._hosts: dict[ir.Value, Host | None] = {}
        self._constants: dict[ir.Value, np.ndarray | None] = {}
        # Read once, so that an extent that comes back to a value is recognized as its own.
        self._extents: dict[ir.Value, Host | None] = {}

    def translated(self) -> fx.GraphModule:
        """Translate: the module takes the graph's inputs in order and returns its outputs as a tuple.

        Raises:
            EngineError: an operator without a rule, or an element type that PyTorch lacks; the message names the node or value.
        """
        for value in (*self.source.inputs, *self.captured):
            if value.dtype is not None:
                torch_dtype(value.dtype, f"The input '{value.name}'")
            self._values[value] = self._proxy(self.graph.placeholder(_identifier(value.name or "input")))
        for node in self.source:
            self._translate(node)
            note_place(self.graph, node)
        outputs = tuple(self.tensor(value).node for value in self.source.outputs)
        self.graph.output(outputs)
        self.graph.owning_module = cast(fx.GraphModule, self._root)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return fx.GraphModule(self._root, self.graph, class_name=_identifier(self.source.name or "graph"))

    def tensor(self, value: ir.Value) -> fx.Proxy:
        """Return the value as a tensor of the traced program; a host value is converted at the first request."""
        found = self._values.get(value)
        if found is not None:
            return found
        array = self.constant(value)
        if array is not None:
            declared = self.dtype(value)
            assert declared is not None
            array, declared = in_bytes(array, declared)
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
            # Filled on the device: a copy from the host could not be part of a CUDA graph.
            filled = [self._filled(element, dtype) for element in numbers.elements]
            self._values[value] = filled[0] if numbers.rank == 0 else cast(fx.Proxy, torch.stack(cast(Any, filled)))
        return self._values[value]

    def _filled(self, element: Number, dtype: torch.dtype) -> fx.Proxy:
        options: dict[str, Any] = {"dtype": dtype, "device": self.device}
        return self._proxy(self.graph.call_function(torch.full, ([], _nodes(element)), options))

    def host(self, value: ir.Value) -> Host | None:
        if value not in self._hosts:
            array = self.constant(value)
            dtype = self.dtype(value)
            self._hosts[value] = None if array is None or dtype is None else Host.of_array(array, dtype)
        return self._hosts[value]

    def number(self, value: ir.Value) -> Number | None:
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
        if value not in self._extents:
            self._extents[value] = host_shapes.extents(self.tensor(value), value)
        found = self._extents[value]
        return None if found is None else list(found.elements)

    def module(self, module: torch.nn.Module, operands: Sequence[ir.Value]) -> fx.Proxy:
        name = f"part_{next(self._parts)}"
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
        except BurnishError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise EngineError(
                f"{describe_node(node)} could not be translated to PyTorch ({type(error).__name__}: {reason}): "
                "check its operands and attributes, or use engine='onnxruntime'"
            ) from error
        for output, result in zip(node.outputs, checked_results(node, results), strict=True):
            if isinstance(result, Host):
                self._hosts[output] = result
            elif result is not None:
                self._values[output] = self._buffer(result) if isinstance(result, torch.Tensor) else result

    def _late(self, node: ir.Node, rule: Rule) -> tuple[fx.Proxy, ...]:
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
        computed = host_shapes.evaluate(node, operands)
        if computed is None:
            return False
        self._hosts[output] = computed
        return True

    def _buffer(self, tensor: torch.Tensor) -> fx.Proxy:
        name = f"constant_{next(self._buffers)}"
        self._root.register_buffer(name, tensor)
        return self._proxy(self.graph.get_attr(name))

    def _proxy(self, node: fx.Node) -> fx.Proxy:
        return fx.Proxy(node, self._tracer)


def translate(model: ir.Model, device: torch.device, communicator: Communicator | None = None) -> fx.GraphModule:
    """Translate a model of standard (and translated semantic) operators; see ``Translator.translated``."""
    return Translator(model.graph, model.opset_imports[""], device, communicator=communicator).translated()


def captured_values(*graphs: ir.Graph) -> list[ir.Value]:
    """Return the outer values that bodies read, without constants; in order, without duplicates."""
    found: dict[ir.Value, None] = {}
    for graph in graphs:
        own = {*graph.inputs, *graph.initializers.values(), *(output for node in graph.all_nodes() for output in node.outputs)}
        for node in graph.all_nodes():
            for body in bodies(node):
                own.update((*body.inputs, *body.initializers.values()))
        read = [*(value for node in graph.all_nodes() for value in node.inputs), *graph.outputs]
        read += [value for node in graph.all_nodes() for body in bodies(node) for value in body.outputs]
        found.update((value, None) for value in read if value is not None and value not in own and constant_array(value) is None)
    return list(found)


@functools.cache
def _identifier(name: str) -> str:
    letters = "".join(letter if letter.isalnum() else "_" for letter in name)
    return letters if letters and not letters[0].isdigit() else f"_{letters}"


def _nodes(elements: Any) -> Any:
    return fx.node.map_aggregate(elements, lambda element: element.node if isinstance(element, fx.Proxy) else element)


def run(module: fx.GraphModule, model: ir.Model, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run a translated model on tensors by name; return its outputs by name."""
    with torch.inference_mode():
        outputs = module(*(inputs[value.name or ""] for value in model.graph.inputs))
    return {value.name or "": output for value, output in zip(model.graph.outputs, outputs, strict=True)}
