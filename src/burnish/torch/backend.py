"""The backend of ``torch.compile``: burnish computes the parts of Dynamo's graphs that it can, PyTorch the others."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from burnish.engines.torch.engine import TorchEngine
from burnish.errors import ConfigurationError
from burnish.torch.segments import Segment, example_of, writes_outside
from burnish.torch.verification import saved_apart

LONGEST_REASON = 300
STOPS_GRADIENTS = frozenset({"detach", "detach_", "requires_grad_", torch.detach, torch._C._set_grad_enabled})


@dataclass(frozen=True)
class Part:
    """Consecutive operators of a captured graph that either burnish or PyTorch computes.

    Attributes:
        graph: number of the captured graph.
        runs_in: ``burnish`` or ``PyTorch``.
        operators: names of the operators, in order.
        reason: why PyTorch computes them; empty for burnish's parts.
        line: the first operator's line in the user's code.
    """

    graph: int
    runs_in: str
    operators: tuple[str, ...]
    reason: str = ""
    line: str = ""


_reports: contextvars.ContextVar[list[list[Part]] | None] = contextvars.ContextVar("reports", default=None)


@contextlib.contextmanager
def reported() -> Iterator[list[list[Part]]]:
    """Collect the parts of all graphs compiled inside this context."""
    collected: list[list[Part]] = []
    token = _reports.set(collected)
    try:
        yield collected
    finally:
        _reports.reset(token)


def compile_graph(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    engine: TorchEngine | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a captured graph, as ``torch.compile(backend="burnish")`` does.

    Args:
        module: a graph of PyTorch functions, as Dynamo captures it.
        example_inputs: the arguments of the call.
        engine: the engine that runs burnish's parts.
        options: ``verify``: True (the default) to compare each part with PyTorch before using it; parts that differ stay in
            PyTorch. ``torch.compile(options={"verify": False})`` skips the comparison.

    Raises:
        ConfigurationError: there is an unknown option.
    """
    verify = bool((options or {}).get("verify", True))
    if unknown := set(options or {}) - {"verify"}:
        raise ConfigurationError(f"options: '{min(unknown)}' is none of burnish's: there is 'verify'")
    collected = _reports.get()
    number = 0 if collected is None else len(collected)
    with saved_apart():
        assembly = _Assembly(module, example_inputs, engine or TorchEngine(capture=False), number, verify)
    if collected is not None:
        collected.append(assembly.parts)
    return assembly.assembled()


class _Assembly:
    """A captured graph with segments instead of the nodes that burnish computes."""

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any], engine: TorchEngine, number: int, verify: bool):
        self.module = module
        self.verify = verify
        self.engine = engine
        self.number = number
        self.parts: list[Part] = []
        self.segments: dict[fx.Node, Segment] = {}  # by their last node
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        pairs = zip(placeholders, example_inputs, strict=False)
        self.parameters = frozenset(node for node, example in pairs if isinstance(example, torch.nn.Parameter))
        _settle_numbers(module.graph)
        self.inside: set[fx.Node] = set()
        run: list[fx.Node] = []
        left: dict[fx.Node, str] = {}
        for node in _computing(module.graph):
            is_part = node.target is operator.getitem and node.args[0] in left
            if reason := left[node.args[0]] if is_part else _left_to_pytorch(node):  # type: ignore[index]
                left[node] = reason
                self._place(run)
                run = []
                self._leave(node, reason)
            else:
                run.append(node)
        self._place(run)

    def _place(self, nodes: list[fx.Node]) -> None:
        """Make segments of the nodes that burnish can compute, splitting the list until each part works or stays in PyTorch."""
        if not nodes:
            return
        outside = next((node for node in nodes if writes_outside(node, set(nodes))), None)
        if outside is not None:
            index = nodes.index(outside)
            self._place(nodes[:index])
            self._leave(outside, "it writes over a tensor that comes from outside")
            self._place(nodes[index + 1 :])
            return
        try:
            segment = Segment(nodes, self.engine, self.parameters, self.verify)
        except Exception as error:  # nodes that cannot be exported or differentiated stay in PyTorch and are reported
            if len(nodes) == 1:
                self._leave(nodes[0], f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST_REASON])
                return
            middle = len(nodes) // 2
            self._place(nodes[:middle])
            self._place(nodes[middle:])
            return
        self.segments[nodes[-1]] = segment
        self.inside.update(nodes)
        self.parts.append(Part(self.number, "burnish", tuple(map(_named, nodes)), line=_line(nodes[0])))

    def _leave(self, node: fx.Node, reason: str) -> None:
        last = self.parts[-1] if self.parts else None
        if last is not None and last.runs_in == "PyTorch" and last.reason == reason:
            self.parts[-1] = Part(self.number, "PyTorch", (*last.operators, _named(node)), reason, last.line)
        else:
            self.parts.append(Part(self.number, "PyTorch", (_named(node),), reason, _line(node)))

    def assembled(self) -> fx.GraphModule:
        graph = fx.Graph()
        root = self.module
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.module.graph.nodes:
            if node not in self.inside:
                copies[node] = graph.node_copy(node, copies.__getitem__)
            elif (segment := self.segments.get(node)) is not None:
                name = f"burnish_segment_{len(copies)}"
                root.add_module(name, segment)
                results = graph.call_module(name, tuple(copies[read] for read in segment.reads))
                for index, result in enumerate(segment.gives):
                    copies[result] = graph.call_function(_item, (results, index))
        graph.lint()
        return fx.GraphModule(root, graph)


def _item(results: tuple[Any, ...], index: int) -> Any:
    return results[index]


def _computing(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def _settle_numbers(graph: fx.Graph) -> None:
    """Replace Dynamo's symbolic floats by numbers (this adds guards on them), and move batch counters to the end.

    An ``add_`` on a tensor with no other readers, as when layers count their batches, may run after all other nodes.
    """
    for node in list(graph.nodes):
        if node.op == "call_method" and node.target == "item" and isinstance(example_of(node), torch.SymFloat | float):
            number = float(example_of(node))
            for user in list(node.users):
                user.args = fx.node.map_aggregate(user.args, functools.partial(_instead, node, number))
                user.kwargs = fx.node.map_aggregate(user.kwargs, functools.partial(_instead, node, number))
            graph.erase_node(node)
    end = next(node for node in graph.nodes if node.op == "output")
    for node in list(graph.nodes):
        counted = node.args[0] if node.op == "call_method" and node.target == "add_" and node.args else None
        if isinstance(counted, fx.Node) and counted.op == "placeholder" and len(counted.users) == 1 and not node.users:
            end.prepend(node)


def _instead(node: fx.Node, number: float, read: Any) -> Any:
    return number if read is node else read


def _left_to_pytorch(node: fx.Node) -> str:
    """Return why a node stays in PyTorch, if that is known without an export, otherwise an empty string."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        name = node.target.__name__
        return "a custom torch.autograd.Function" if name == "autograd_function_apply" else f"the higher-order operator {name}"
    if isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        name = str(node.target)
        return "" if name.startswith(("aten.", "prims.")) else f"the custom operator {name}"
    if node.target in STOPS_GRADIENTS:
        return "it decides whether gradients flow"
    if node.op == "call_module":
        return "it calls a module"
    if node.op == "call_method" and node.target == "add_" and not node.users:
        return "it writes over a tensor that comes from outside"
    return ""


def _named(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", None) or str(node.target)


def _line(node: fx.Node) -> str:
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    return lines[-1] if lines else ""


def captures_recurrence(module: torch.nn.Module) -> AbstractContextManager[object]:
    """Return a context that makes Dynamo capture a module including its recurrent layers.

    By default, Dynamo makes no graph of a function that calls ``torch.nn.RNN``, ``LSTM`` or ``GRU``.
    """
    is_recurrent = any(isinstance(part, torch.nn.RNNBase) for part in module.modules())
    return torch._dynamo.config.patch(allow_rnn=True) if is_recurrent else nullcontext()


class PartialCalls:
    """Calls of one module; burnish computes the parts it can.

    Args:
        module: the module.
        engine: the engine that runs burnish's parts.
        examples: arguments of a call, by position and by name.
        verify: True to compare burnish's parts with PyTorch when they are made.
    """

    def __init__(self, module: torch.nn.Module, engine: TorchEngine, examples: tuple[Any, Any], verify: bool = True):
        self.module = module
        self._engine = engine
        self._examples = examples
        self._verify = verify
        backend = functools.partial(compile_graph, engine=engine, options={"verify": verify})
        self._compiled: Any = torch.compile(module.forward, backend=backend)

    def copied(self, module: torch.nn.Module) -> PartialCalls:
        return PartialCalls(module, self._engine, self._examples, self._verify)

    def made_again(self) -> tuple[Any, ...]:
        """Return the arguments, except the module, for rebuilding a pickled wrapper."""
        return self._examples, None, self._engine, True, self._verify

    def prepare(self) -> None:
        """Do nothing: the first call compiles the module."""

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with captures_recurrence(self.module):
            return self._compiled(*args, **kwargs)
