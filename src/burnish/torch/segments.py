"""A part of a graph captured by Dynamo, as a burnish graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import tracing
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from burnish.engines.torch.engine import TorchEngine
from burnish.errors import ConfigurationError, UnsupportedOperatorError
from burnish.importer import load
from burnish.importer.pytorch import export_module
from burnish.norms import RunningVariance
from burnish.norms import get as policy_of
from burnish.torch.autocast import autocast_off, autocast_precision, cast_input, precision_of
from burnish.torch.bound import Binding, BoundGraph, forget_values
from burnish.torch.verification import verify_segment

RUNNING = ("running_mean", "running_var")
VIEWS = frozenset("chunk detach expand flatten getitem permute reshape select split squeeze transpose unsqueeze view".split())


class Segment(torch.nn.Module):
    """Nodes of a captured graph that burnish computes, as a module from the values they read to the values that others read.

    Args:
        nodes: consecutive nodes of a captured graph.
        engine: the engine that runs them.
        parameters: placeholders of the graph that are parameters.
        verify: True to compare the graph with the nodes.

    Raises:
        BurnishError: burnish cannot compute or differentiate an operator, or its results differ.
    """

    def __init__(self, nodes: Sequence[fx.Node], engine: TorchEngine, parameters: frozenset[fx.Node], verify: bool = True):
        super().__init__()
        self.reads = _read_by(nodes)
        self.gives = _read_of(nodes)
        self._engine = engine
        _refuse_complex((*self.reads, *self.gives))
        self._device = next((tensor.device.type for tensor in map(example_of, self.gives)), "cpu")
        with tracing(None), _disable_current_modes():  # an independent export adds no guards to the captured graph
            extracted = _Extracted(nodes, self.reads, self.gives, parameters)
            examples, shapes = tuple(extracted.examples), extracted.dynamic_shapes
            exported = export_module(extracted.module, examples, None, shapes, called=True, modes=[True])
        if written := [*exported.moving, *exported.written_inputs]:
            raise UnsupportedOperatorError(f"it writes over a tensor that comes from outside: {', '.join(written)}")
        self._model = load(exported.model)
        forget_values(self._model.graph, extracted.state.values())
        names = {name: position for position, name in extracted.state.items()}
        self._exported = exported
        verified = None
        if verify:
            with tracing(None), _disable_current_modes():
                verified = verify_segment(extracted.module, exported, self._model, extracted.examples, engine)
        self._names = names
        self._data = dict(zip(filter(None, exported.inputs.names), extracted.data, strict=True))
        self._policies = {layer: policy_of(policy) for layer, policy in exported.norm_policies.items()}
        self._graphs: dict[str | None, BoundGraph] = {} if verified is None else {None: verified}
        self.bound(None).check_gradients()

    def bound(self, precision: str | None) -> BoundGraph:
        """Return the graph in a precision; without products for autocast to narrow, the graph in the precision of its tensors."""
        if precision not in self._graphs:
            variance = RunningVariance(self._exported.running_variance)
            held = self._exported.held_rows
            binding = Binding(tuple(self._names), self._policies, variance, precision_of(precision), held)
            try:
                self._graphs[precision] = BoundGraph(self._model, binding, self._engine, "segment")
            except ConfigurationError:
                if precision is None:
                    raise
                self._graphs[precision] = self.bound(None)
        return self._graphs[precision]

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        device = next((value.device.type for value in values if isinstance(value, torch.Tensor)), self._device)
        precision = autocast_precision(device)
        graph = self.bound(precision)
        data = [values[self._data[name]] for name in graph.data]
        if precision is not None:
            data = [cast_input(tensor, dtype) for tensor, dtype in zip(data, graph.dtypes, strict=False)]
        with autocast_off(device, precision):
            return graph(data, [values[self._names[name]] for name in graph.state])


class _Extracted:
    """Nodes as a separate module, for export.

    Attributes:
        module: a module that computes the nodes and owns the parameters and running statistics they read.
        state: position of each of these among the values read, and its name in the module.
        data: positions of the other tensors, the inputs.
        examples: examples of the inputs.
        dynamic_shapes: extents of the inputs that Dynamo leaves open.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], reads: Sequence[fx.Node], gives: Sequence[fx.Node], parameters: frozenset[fx.Node]
    ):
        statistics = _statistics(nodes)
        for node in gives:
            if not isinstance(example_of(node), torch.Tensor):
                raise UnsupportedOperatorError(f"'{node.name}', which is read outside, is no tensor")
        root, graph = torch.nn.Module(), fx.Graph()
        self.state: dict[int, str] = {}
        self.data: list[int] = []
        self.examples: list[torch.Tensor] = []
        shapes: list[dict[int, Any] | None] = []
        copies: dict[fx.Node, fx.Node] = {}
        for position, node in enumerate(reads):
            example = example_of(node)
            if node in statistics or node in parameters or not isinstance(example, torch.Tensor):
                continue
            self.data.append(position)
            copies[node] = graph.placeholder(f"input_{len(self.data)}")
            self.examples.append(_stand_in(example))
            is_open = [axis for axis, extent in enumerate(example.shape) if isinstance(extent, torch.SymInt)]
            shapes.append(dict.fromkeys(is_open, torch.export.Dim.DYNAMIC) or None)
        for position, node in enumerate(reads):
            if node in statistics or node in parameters:
                name = statistics.get(node, f"parameter_{position}")
                _register(root, name, _stand_in(example_of(node)), node in parameters)
                self.state[position] = name
                copies[node] = graph.get_attr(name)
        for node in reads:
            if node not in copies:
                copies[node] = _extent(graph, node, [reads[position] for position in self.data], copies)
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in gives))
        graph.lint()
        compiled = fx.GraphModule(root, graph)
        # A plain module, because torch.export treats modules of torch.fx specially.
        self.module = type("Segment", (torch.nn.Module,), {"forward": type(compiled).forward})()
        self.module.__dict__.update({name: value for name, value in compiled.__dict__.items() if name in self.module.__dict__})
        self.dynamic_shapes = tuple(shapes)


def example_of(node: fx.Node) -> Any:
    """Return Dynamo's example of a node: a tensor without elements, or a number."""
    return node.meta.get("example_value")


def _stand_in(example: Any) -> torch.Tensor:
    shape = [extent.node.hint if isinstance(extent, torch.SymInt) else extent for extent in example.shape]
    return torch.ones(shape, dtype=example.dtype, device=example.device)


def _extent(graph: fx.Graph, number: fx.Node, tensors: Sequence[fx.Node], copies: dict[fx.Node, fx.Node]) -> fx.Node:
    """Emit a number read from outside as the extent of a tensor that is also read.

    Raises:
        UnsupportedOperatorError: the number is not such an extent.
    """
    value = example_of(number)
    for tensor in tensors if isinstance(value, torch.SymInt) else ():
        for axis, extent in enumerate(example_of(tensor).shape):
            if isinstance(extent, torch.SymInt) and extent.node.expr == value.node.expr:
                return graph.call_function(torch.ops.aten.sym_size.int, (copies[tensor], axis))
    raise UnsupportedOperatorError(f"'{number.name}', which is read from outside, is a number that is no extent of what is read")


def _register(root: torch.nn.Module, name: str, tensor: torch.Tensor, is_parameter: bool) -> None:
    *path, last = name.split(".")
    owner = root
    for part in path:
        if part not in owner._modules:
            owner.add_module(part, torch.nn.Module())
        owner = owner.get_submodule(part)
    if is_parameter:
        owner.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
    else:
        owner.register_buffer(last, tensor)


def _statistics(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    names: dict[fx.Node, str] = {}
    for node in nodes:
        if node.target is functional.batch_norm:
            layer = f"layer_{len(names) // 2}"
            for own, value in zip(RUNNING, node.args[1:3], strict=False):
                if isinstance(value, fx.Node):
                    names.setdefault(value, f"{layer}.{own}")
    return names


def _read_by(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(nodes)
    return list(dict.fromkeys(read for node in nodes for read in node.all_input_nodes if read not in inside))


def _read_of(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)]


def _refuse_complex(boundary: Iterable[fx.Node]) -> None:
    """Refuse complex numbers at the boundary: inside a graph they are pairs of real numbers.

    Raises:
        UnsupportedOperatorError: there are complex numbers.
    """
    for node in boundary:
        example = example_of(node)
        if isinstance(example, torch.Tensor) and example.is_complex():
            raise UnsupportedOperatorError(f"'{node.name}', which is read or computed outside, is complex")


def writes_outside(node: fx.Node, nodes: set[fx.Node]) -> bool:
    """True if a node overwrites a tensor that does not belong to ``nodes``."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    in_place |= node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None or node.target is operator.setitem
    in_place |= node.op == "call_function" and getattr(operator, name, None) is node.target and name.startswith("i")
    if not in_place or not node.args:
        return False
    written = node.args[0]
    while isinstance(written, fx.Node) and written in nodes and _name(written) in VIEWS and written.args:
        written = written.args[0]
    return written not in nodes


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
