"""The graphs of a module, by its mode, dtype and precision, and the calls that run them on its parameters and buffers."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
import torch
from torch.utils import _pytree as pytree

from burnish.engines.torch.engine import TorchEngine
from burnish.errors import ConfigurationError
from burnish.importer import load
from burnish.importer.pytorch import ExportedModule, Structure, export_module, shapes_by_name
from burnish.norms import RunningVariance
from burnish.norms import get as policy_of
from burnish.torch.arguments import examples_like
from burnish.torch.autocast import autocast_off, autocast_precision, cast_input, precision_of
from burnish.torch.bound import Binding, BoundGraph, forget_values
from burnish.torch.changes import Noted, Place

Modes = tuple[bool, ...]
"""``training`` of the module and all its submodules."""


class ModuleKey(NamedTuple):
    """What a module is exported for: its modes, and the dtype of its first parameter. Modes that are all one are equal."""

    modes: Modes | None
    dtype: torch.dtype | None


class GraphKey(NamedTuple):
    """What a graph is bound to."""

    exported: ModuleKey
    training: bool
    precision: str | None


class ModuleGraphs:
    """The graphs of modules that differ in the values of parameters and buffers alone, made when they are first asked for.

    Args:
        args, kwargs: what ``forward`` is called with at an export.
        dynamic_shapes: as ``wrap`` takes it.
        engine: what runs them.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, engine: TorchEngine):
        self.args = args
        self.kwargs = kwargs
        self.dynamic_shapes = dynamic_shapes
        self.engine = engine
        self._exports: dict[ModuleKey, ExportedModule] = {}
        self._graphs: dict[GraphKey, BoundGraph] = {}
        self._making = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleGraphs:
        return self  # which holds no state of a module

    def exported(self, key: ModuleKey, module: torch.nn.Module) -> ExportedModule:
        """The module as a graph."""
        with self._making:
            if key not in self._exports:
                with _modes_set(module, key.modes):
                    args, kwargs = pytree.tree_map(lambda leaf: _converted(leaf, key.dtype), (self.args, self.kwargs))
                    exported = export_module(module, args, kwargs, self.dynamic_shapes)
                state = (*exported.parameters, *exported.buffers)
                model, inference = (_without_values(model, state) for model in (exported.model, exported.inference))
                assert model is not None
                self._exports[key] = replace(exported, model=model, inference=inference)
            return self._exports[key]

    def is_exported_as(self, key: ModuleKey, exported: ExportedModule) -> bool:
        """Whether the module was exported for a key to the same."""
        before = self._exports.get(key)
        return before is not None and _contents(before) == _contents(exported)

    def graph(self, key: GraphKey, module: torch.nn.Module) -> BoundGraph:
        """The graph of a mode."""
        with self._making:
            if key not in self._graphs:
                self._graphs[key] = self._bound(key, self.exported(key.exported, module), type(module).__name__)
            return self._graphs[key]

    def _bound(self, key: GraphKey, exported: ExportedModule, name: str) -> BoundGraph:
        state = (*exported.parameters, *exported.buffers)
        binding = Binding(
            state,
            {layer: policy_of(policy) for layer, policy in exported.norm_policies.items()} if key.training else None,
            RunningVariance(exported.running_variance),
            precision_of(key.precision),
            exported.held_rows,
            exported.moving,
            exported.written if key.training else exported.written_in_evaluation,
        )
        model = exported.model if key.training or exported.inference is None else exported.inference
        return BoundGraph(model, binding, self.engine, name)


class Removed(Exception):
    """A parameter or buffer was taken out of the module, or replaced by None."""


class _Entry(NamedTuple):
    """Where a parameter or buffer is, so that one that is replaced is seen."""

    held_in: Mapping[str, Any]
    owner: torch.nn.Module
    name: str

    @classmethod
    def of(cls, module: torch.nn.Module, name: str) -> _Entry:
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        return cls(owner._parameters if last in owner._parameters else owner._buffers, owner, last)

    def tensor(self) -> torch.Tensor:
        # Fully sharded data parallelism takes parameters out of where they are registered, and puts tensors in their place.
        tensor = self.held_in.get(self.name)
        found: torch.Tensor | None = getattr(self.owner, self.name, None) if tensor is None else tensor
        if found is None:
            raise Removed(self.name)
        return found


class _Prepared(NamedTuple):
    """A graph with where its state is in one module.

    Attributes:
        graph: the graph.
        exported: the module as it was exported.
        state: of ``graph.state``.
        counts: the counts of batches that a call adds to.
        batches: how many it adds to each.
        inputs: the positions of the graph's inputs among the arguments, where all of these are tensors given by position.
        single: whether ``forward`` returns one tensor.
    """

    graph: BoundGraph
    exported: ExportedModule
    state: list[_Entry]
    counts: list[_Entry]
    batches: list[int]
    inputs: list[int] | None
    single: bool


class _How(NamedTuple):
    """How a module is at a call.

    Attributes:
        modes: ``training`` of the module and all its submodules.
        dtype: of its first parameter.
        device: the kind of device that this is on.
        precision: what autocast computes in there, where it is on.
    """

    modes: Modes
    dtype: torch.dtype | None
    device: str
    precision: str | None

    def key(self) -> GraphKey:
        training = any(self.modes)
        mixed = self.modes if training and not all(self.modes) else None
        return GraphKey(ModuleKey(mixed, self.dtype), training, self.precision)


def _tensors(entries: Sequence[_Entry]) -> list[torch.Tensor]:
    """What stands where entries say; without a call for each, as nearly all stand where they are registered."""
    return [entry.tensor() if (tensor := entry[0].get(entry[2])) is None else tensor for entry in entries]


class OtherArguments(Exception):
    """A call has arguments of another structure than the examples, or another value where there is no tensor."""

    def __init__(self, message: str, structure: Hashable):
        super().__init__(message)
        self.structure = structure


MOST_STRUCTURES = 8
"""How many structures of arguments a module is exported for: a number that is another at each call would ask for ever more."""


class Calls:
    """Calls of one module by its graphs.

    Args:
        graphs: of the module; others may share them.
        module: the module, which PyTorch would compute.
    """

    def __init__(self, graphs: ModuleGraphs, module: torch.nn.Module):
        self.graphs = graphs
        self.module = module
        self._prepared: dict[GraphKey, _Prepared] = {}
        self._latest: tuple[_How, _Prepared] | None = None
        self._others: dict[Hashable, Calls] = {}
        self._irrelevant: set[Place] = set()
        self._changes = 0
        self._noted = Noted(module)
        self._first = _first_parameter(module)

    def copied(self, module: torch.nn.Module) -> Calls:
        """The same for a copy of the module."""
        self._look()
        return Calls(self.graphs, module)

    def made_again(self) -> tuple[Any, ...]:
        """What ``wrap`` takes beside the module."""
        graphs = self.graphs
        return (graphs.args, graphs.kwargs), graphs.dynamic_shapes, graphs.engine, False

    def prepare(self) -> None:
        """Export the module as it is."""
        self.graphs.exported(self._how().key().exported, self.module)
        self._noted = Noted(self.module)  # forward may have set attributes, which it does not at a call

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``forward`` returns.

        Raises:
            ConfigurationError: the arguments are not of the structure or the dtypes of the examples.
        """
        how, prepared = self._current()
        graph = prepared.graph
        if prepared.inputs is not None and not kwargs and len(args) == len(prepared.inputs):
            data: Sequence[torch.Tensor] = [args[index] for index in prepared.inputs]
        else:
            elsewhere = None
            try:
                data = self._data(prepared, args, kwargs)
            except OtherArguments as other:
                elsewhere = self._calls_of(other, args, kwargs)
            if elsewhere is not None:
                return elsewhere.call(args, kwargs)
        try:
            state, counts = _tensors(prepared.state), _tensors(prepared.counts)
        except Removed:
            state = None
        if state is None:
            self._start_again(self._fresh_graphs())
            return self.call(args, kwargs)
        step = counts[0].clone() if graph.counts else None
        if how.precision is None:
            results = graph(data, state, step)
        else:
            data = [cast_input(tensor, dtype) for tensor, dtype in zip(data, graph.dtypes, strict=False)]
            with autocast_off(how.device, how.precision):
                results = graph(data, state, step)
        if counts:
            torch._foreach_add_(counts, prepared.batches)
        if prepared.single:
            return results[0]
        return prepared.exported.outputs.unflatten(dict(zip(graph.outputs, results, strict=True)))

    def _current(self) -> tuple[_How, _Prepared]:
        """How the module is, and the graph for that: most often those of the call before."""
        how = self._how()
        latest = self._latest
        if latest is None or latest[0] != how:
            key = how.key()
            self._latest = latest = how, self._prepared.get(key) or self._prepare(key)
        return latest

    def _how(self) -> _How:
        if not self._noted.is_current():
            self._look()
        modes = self._noted.modes
        if self._first is None:
            return _How(modes, None, "cpu", autocast_precision("cpu"))
        first = self._first.tensor()
        device = "cpu" if first.is_cpu else first.device.type
        return _How(modes, first.dtype, device, autocast_precision(device))

    def _look(self) -> None:
        """See what has changed in the module since the last call."""
        noted, self._noted = self._noted, Noted(self.module)
        if noted.is_built_otherwise():
            self._start_again(self._fresh_graphs())
            return
        changed = [place for place in noted.changed() if place not in self._irrelevant]
        if changed:
            self._look_at(changed)

    def _look_at(self, changed: Sequence[Place]) -> None:
        """Export the module again where attributes were set; where that gives the same graph, go on with the graphs there are."""
        fresh, key = self._fresh_graphs(), self._how().key().exported
        exported = fresh.exported(key, self.module)
        self._noted = Noted(self.module)
        if self.graphs.is_exported_as(key, exported):
            self._irrelevant.update(changed)
            return
        self._changes += 1
        if self._changes > MOST_STRUCTURES:
            raise ConfigurationError(
                f"'{changed[0]}' of {type(self.module).__name__} has changed {self._changes} times since the module was wrapped: "
                "what is set on a module is a constant of its graph. Give what changes from step to step to forward as a tensor, "
                "or hold it in a buffer"
            )
        self._start_again(fresh)

    def _fresh_graphs(self) -> ModuleGraphs:
        graphs = self.graphs
        return ModuleGraphs(graphs.args, graphs.kwargs, graphs.dynamic_shapes, graphs.engine)

    def _start_again(self, graphs: ModuleGraphs) -> None:
        """Forget the graphs for others."""
        self.graphs = graphs
        self._prepared, self._latest, self._others = {}, None, {}
        self._first = _first_parameter(self.module)

    def _prepare(self, key: GraphKey) -> _Prepared:
        try:
            graph = self.graphs.graph(key, self.module)
        except ConfigurationError:
            if key.precision is None:
                raise
            # Nothing in the module is a product of float32: it computes as without autocast.
            graph = self.graphs.graph(key._replace(precision=None), self.module)
        exported = self.graphs.exported(key.exported, self.module)
        state = {name: _Entry.of(self.module, name) for name in graph.state}
        for name, entry in state.items():
            _refuse_sharded(name, entry.tensor())
        prepared = _Prepared(
            graph,
            exported,
            list(state.values()),
            [_Entry.of(self.module, name) for name in exported.counted_batches] if key.training else [],
            list(exported.batches_per_call.values()),
            _positions(exported.inputs, graph.data),
            exported.outputs.names == (graph.outputs[0],) and exported.outputs.spec.is_leaf(),
        )
        self._prepared[key] = prepared
        return prepared

    def _calls_of(self, other: OtherArguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Calls:
        """The calls with arguments of another structure, whose graphs are made when the first comes."""
        calls = self._others.get(other.structure)
        if calls is None:
            shapes = self.graphs.dynamic_shapes
            if isinstance(shapes, Mapping):
                shapes = shapes_by_name(self.module, args, kwargs, shapes)
            elif shapes is not None or len(self._others) == MOST_STRUCTURES:
                raise ConfigurationError(str(other))
            examples = examples_like(self.module, (self.graphs.args, self.graphs.kwargs), (args, kwargs))
            calls = self._others[other.structure] = Calls(ModuleGraphs(*examples, shapes, self.graphs.engine), self.module)
        return calls

    def _data(self, prepared: _Prepared, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        structure = prepared.exported.inputs
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != structure.spec:
            args, kwargs = self._arranged(args, kwargs)
            leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != structure.spec:
            raise OtherArguments(
                f"{type(self.module).__name__} was wrapped with arguments of another structure: {structure.spec}, and is called "
                f"with {spec}. Wrap it with example_inputs like those of the call",
                _structure(leaves, spec),
            )
        values: dict[str, torch.Tensor] = {}
        for name, constant, leaf in zip(structure.names, structure.constants, leaves, strict=True):
            if name is not None:
                values[name] = leaf
            elif leaf is not constant and leaf != constant:
                raise OtherArguments(
                    f"{type(self.module).__name__} was wrapped with {constant!r} where it is called with {leaf!r}: what is no "
                    "tensor is a constant of the graph. Wrap it again for the other value, or give it as a tensor",
                    _structure(leaves, spec),
                )
        return [values[name] for name in prepared.graph.data]

    def _arranged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments, by position and by name where the examples have them so."""
        signature = inspect.signature(self.module.forward)
        try:
            given = signature.bind(*args, **kwargs)
            wanted = signature.bind(*self.graphs.args, **self.graphs.kwargs)
        except TypeError as error:
            raise ConfigurationError(f"{type(self.module).__name__}: {error}") from None
        if given.arguments.keys() != wanted.arguments.keys() or len(given.args) < len(self.graphs.args):
            return args, kwargs
        by_name = {name: given.arguments[name] for name in self.graphs.kwargs if name in given.arguments}
        by_position = [given.arguments[name] for name in list(given.arguments)[: len(self.graphs.args)]]
        return (tuple(by_position), by_name) if len(by_position) + len(by_name) == len(args) + len(kwargs) else (args, kwargs)


def _structure(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Hashable:
    """What graphs are made for: where the tensors are, and what stands elsewhere."""
    return repr(spec), tuple(None if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)


def _without_values(model: ir.Model | None, state: Iterable[str]) -> ir.Model | None:
    if model is None:
        return None
    loaded = load(model)
    # What the exporter made lies in cycles, and would hold the copies of the weights until these are collected.
    forget_values(model.graph, state)
    forget_values(loaded.graph, state)
    return loaded


def _fingerprint(model: ir.Model) -> list[Any]:
    """What a model computes: its nodes, with the values between them, and its constants."""
    graph = model.graph
    constants = {name: value.const_value for name, value in graph.initializers.items()}
    return [
        [value.name for value in (*graph.inputs, *graph.outputs)],
        {name: None if constant is None else constant.tobytes() for name, constant in constants.items()},
        *[_without_origin(ir.serde.serialize_node(node)).SerializeToString(deterministic=True) for node in graph],
    ]


def _without_origin(node: onnx.NodeProto) -> onnx.NodeProto:
    """A node without what is noted of the code that it comes from, in place: who called that is noted, too."""
    node.ClearField("metadata_props")
    for attribute in node.attribute:
        for inner in attribute.g.node:
            _without_origin(inner)
    return node


def _contents(exported: ExportedModule) -> list[Any]:
    """What an export is compared by: all of it but counts of batches as they stand."""
    models = [exported.model, *([] if exported.inference is None else [exported.inference])]
    rest = {field.name: repr(getattr(exported, field.name)) for field in fields(exported)}
    del rest["model"], rest["inference"]
    return [rest | {"counted_batches": repr(list(exported.counted_batches))}, *map(_fingerprint, models)]


def _refuse_sharded(name: str, tensor: torch.Tensor) -> None:
    """Refuse a part of a parameter: its module would have put the whole of it together, had PyTorch called that."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        raise ConfigurationError(
            f"'{name}' is sharded over workers inside of a wrapped module, whose submodules are not called: shard the wrapped "
            "module as a whole (fully_shard(wrap(module, ...))), or wrap submodules and shard these"
        )


def _first_parameter(module: torch.nn.Module) -> _Entry | None:
    """The first parameter that is floating-point, or else the first, whose dtype and device are the module's."""
    names = (name for name, parameter in module.named_parameters() if parameter.is_floating_point())
    name = next(names, None) or next((name for name, _ in module.named_parameters()), None)
    return None if name is None else _Entry.of(module, name)


def _positions(structure: Structure, data: Sequence[str]) -> list[int] | None:
    """The positions of a graph's inputs among arguments that are all tensors given by position; None where they are not."""
    args, kwargs = pytree.tree_unflatten(list(structure.names), structure.spec)
    if kwargs or not all(isinstance(name, str) for name in args) or set(args) != set(data):
        return None
    return [args.index(name) for name in data]


def _converted(leaf: Any, dtype: torch.dtype | None) -> Any:
    """An example in the dtype that the module has by now."""
    is_other = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and dtype is not None and dtype.is_floating_point
    return leaf.to(dtype) if is_other and leaf.dtype != dtype else leaf


@contextlib.contextmanager
def _modes_set(module: torch.nn.Module, modes: Modes | None) -> Iterator[None]:
    """The module in the modes that it is exported in: all in training, or as they are, and the module itself in training."""
    before = [(part, part.training) for part in module.modules()]
    try:
        if modes is None:
            module.train()
        else:
            module.training = True
        yield
    finally:
        for part, training in before:
            part.training = training
