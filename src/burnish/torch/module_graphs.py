"""The graphs of a module, by mode, dtype and precision, and the calls that run them on its parameters and buffers."""

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
from burnish.errors import ConfigurationError, InputError, UnsupportedOperatorError
from burnish.importer import load
from burnish.importer.pytorch import ExportedModule, Structure, export_module, open_batch, shapes_by_name
from burnish.torch.arguments import examples_like
from burnish.torch.autocast import all_autocast_off, autocast_off, autocast_precision, cast_input
from burnish.torch.bound import BoundGraph, bind_export, forget_values, pairs
from burnish.torch.changes import Noted, Place, warn_of_hooks
from burnish.torch.verification import check_extents, computes_the_same, saved_apart, verify_export

Modes = tuple[bool, ...]
"""``training`` of the module and all its submodules."""


class ModuleKey(NamedTuple):
    """The key of an export: the module's modes, None if all are equal, and the dtype of its first parameter."""

    modes: Modes | None
    dtype: torch.dtype | None


class GraphKey(NamedTuple):
    exported: ModuleKey
    training: bool
    precision: str | None


class ModuleGraphs:
    """The graphs of modules that differ only in the values of parameters and buffers, made on first use.

    Args:
        args, kwargs: arguments of ``forward`` for an export.
        dynamic_shapes: as in ``wrap``.
        engine: the engine that runs them.
        verify: True to compare exports with the module.
    """

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, engine: TorchEngine, verify: bool = True
    ):
        self.args = args
        self.kwargs = kwargs
        self.dynamic_shapes = dynamic_shapes
        self.engine = engine
        self.verify = verify
        self._exports: dict[ModuleKey, ExportedModule] = {}
        self._graphs: dict[GraphKey, BoundGraph] = {}
        self._making = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleGraphs:
        return self  # it holds no state of a module

    def exported(self, key: ModuleKey, module: torch.nn.Module, training: bool | None = None) -> ExportedModule:
        """Return the module's export, which works at least in the given mode (by default the module's own).

        Raises:
            UnsupportedOperatorError: the module cannot be exported in this mode, or its graph computes something else.
        """
        with self._making:
            if key not in self._exports:
                for name, parameter in module.named_parameters():
                    _refuse_sharded(name, parameter)
                needed = {module.training if training is None else training}
                # A graph has its own form of mixed precision; a trace under autocast would add PyTorch's casts to it.
                with _modes_set(module, key.modes), saved_apart(), all_autocast_off():
                    args, kwargs = pytree.tree_map(lambda leaf: _converted(leaf, key.dtype), (self.args, self.kwargs))
                    exported = export_module(module, args, kwargs, self.dynamic_shapes, called=True, needed=needed)
                    state = (*exported.parameters, *exported.buffers)
                    model, inference = (_without_values(model, state) for model in (exported.model, exported.inference))
                    assert model is not None
                    exported = replace(exported, model=model, inference=inference)
                    if self.verify:
                        shapes = self.dynamic_shapes
                        graphs = verify_export(module, exported, args, kwargs, shapes, self.engine, called=True)
                        self._graphs |= {GraphKey(key, mode, None): graph for mode, graph in graphs.items() if mode in needed}
                self._exports[key] = exported
            if training in (exported := self._exports[key]).failed:
                raise exported.failed[bool(training)]
            return exported

    def is_exported_as(self, key: ModuleKey, exported: ExportedModule) -> bool:
        """True if the module's earlier export for a key has the same contents."""
        before = self._exports.get(key)
        return before is not None and _contents(before) == _contents(exported)

    def graph(self, key: GraphKey, module: torch.nn.Module) -> BoundGraph:
        with self._making:
            if key not in self._graphs:
                exported = self.exported(key.exported, module, key.training)
                self._graphs[key] = bind_export(exported, self.engine, key.training, type(module).__name__, key.precision)
            return self._graphs[key]


class Removed(Exception):
    """A parameter or buffer was removed from the module or set to None."""


class _Entry(NamedTuple):
    """The location of a parameter or buffer, read at each call so that a replaced tensor is noticed."""

    held_in: Mapping[str, Any]
    owner: torch.nn.Module
    name: str

    @classmethod
    def of(cls, module: torch.nn.Module, name: str) -> _Entry:
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        return cls(owner._parameters if last in owner._parameters else owner._buffers, owner, last)

    def tensor(self) -> torch.Tensor:
        # Fully sharded data parallelism unregisters parameters and sets plain tensors as attributes instead.
        tensor = self.held_in.get(self.name)
        found: torch.Tensor | None = getattr(self.owner, self.name, None) if tensor is None else tensor
        if found is None:
            raise Removed(self.name)
        return found


class _Prepared(NamedTuple):
    """A graph and the locations of its state in one module.

    Attributes:
        graph: the graph.
        exported: the module's export.
        outputs: structure of ``forward``'s result in this mode.
        state: locations of ``graph.state``.
        unread: parameters and buffers that the graph does not read, although it may hold their extents as constants.
        shapes: shapes of ``state`` and ``unread`` at the export.
        counts: the batch counts that a call increases.
        batches: the increase of each count.
        inputs: positions of the graph's inputs among the arguments, if all arguments are tensors given by position.
        single: True if ``forward`` returns one tensor and nothing remains to be done.
        written: positions of the graph's inputs that are overwritten, with the positions of the outputs to write.
    """

    graph: BoundGraph
    exported: ExportedModule
    outputs: Structure
    state: list[_Entry]
    unread: list[_Entry]
    shapes: list[torch.Size]
    counts: list[_Entry]
    batches: list[int]
    inputs: list[int] | None
    single: bool
    written: list[tuple[int, int]]


class _How(NamedTuple):
    """The condition of a module at a call.

    Attributes:
        modes: ``training`` of the module and all its submodules.
        dtype: dtype of its first parameter.
        device: device type of that parameter.
        precision: dtype of autocast on that device, if it is on.
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
    """Return the tensors at these locations, without a call for each, since nearly all are still registered."""
    return [entry.tensor() if (tensor := entry[0].get(entry[2])) is None else tensor for entry in entries]


class OtherArguments(Exception):
    """A call's arguments differ from the examples in structure or in a value that is not a tensor."""

    def __init__(self, message: str, structure: Hashable):
        super().__init__(message)
        self.structure = structure


MOST_STRUCTURES = 8
"""Largest number of argument structures that a module is exported for: a number that changes at each call would need more
forever.
"""


class Calls:
    """Calls of one module through its graphs.

    Args:
        graphs: graphs of the module; others may share them.
        module: the module that PyTorch would run.
        opened: inputs and axes that the graphs opened for other extents.
    """

    def __init__(self, graphs: ModuleGraphs, module: torch.nn.Module, opened: frozenset[tuple[str, int | None]] = frozenset()):
        self.graphs = graphs
        self.module = module
        self._opened = opened
        self._prepared: dict[GraphKey, _Prepared] = {}
        self._latest: tuple[_How, _Prepared] | None = None
        self._others: dict[Hashable, Calls] = {}
        self._elsewhere: list[Calls] = []
        self._irrelevant: set[Place] = set()
        self._changes = 0
        self._noted = Noted(module)
        self._first = _first_parameter(module)
        self._constants: list[tuple[torch.Tensor, int]] = []

    def copied(self, module: torch.nn.Module) -> Calls:
        self._look()
        return Calls(self.graphs, module, self._opened)

    def made_again(self) -> tuple[Any, ...]:
        """Return the arguments, except the module, for rebuilding a pickled wrapper."""
        graphs = self.graphs
        return (graphs.args, graphs.kwargs), graphs.dynamic_shapes, graphs.engine, False, graphs.verify

    def prepare(self) -> None:
        exported = self.graphs.exported(self._how().key().exported, self.module)
        self._irrelevant.update(Place("", name) for name in exported.attributes)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of ``forward``.

        Raises:
            ConfigurationError: the arguments differ from the examples in structure or dtype.
        """
        try:
            how, prepared = self._current()
        except UnsupportedOperatorError:
            # Training may take targets that evaluation does not, and vice versa.
            other = self._otherwise(args, kwargs)
            if other is None:
                raise
            return self._calls_of(other, args, kwargs).call(args, kwargs)
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
            is_other = not self._takes(how, prepared, data, args, kwargs)
        except AttributeError:
            is_other = False  # not tensors: the graph raises the error
        if is_other:
            return self._calls_at(prepared, data, args, kwargs).call(args, kwargs)
        shapes: list[torch.Size] | None
        try:
            state, counts = _tensors(prepared.state), _tensors(prepared.counts)
            shapes = [tensor.shape for tensor in (*state, *_tensors(prepared.unread))]
        except Removed:
            shapes = None
        if shapes != prepared.shapes:
            self._start_again(self._fresh_graphs())
            return self.call(args, kwargs)
        step = counts[0].clone() if graph.counts else None
        given = data
        if prepared.written:
            # Autograd saves the graph's inputs, so they must not be overwritten.
            data = list(data)
            for index, _ in prepared.written:
                data[index] = data[index].clone()
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
        for index, output in prepared.written:
            given[index].copy_(results[output])
        return prepared.outputs.unflatten(dict(zip(graph.outputs, results, strict=True)))

    def _current(self) -> tuple[_How, _Prepared]:
        how = self._how()
        latest = self._latest
        if latest is None or latest[0] != how:
            key = how.key()
            self._latest = latest = how, self._prepared.get(key) or self._prepare(key)
        return latest

    def _how(self) -> _How:
        if not self._noted.is_current():
            self._look()
        for tensor, version in self._constants:
            if tensor._version != version:
                self._constants = []
                self._change("a tensor that forward reads and that is neither a parameter nor a buffer", self._fresh_graphs())
                break
        modes = self._noted.modes
        try:
            first = None if self._first is None else self._first.tensor()
        except Removed:
            self._first = _first_parameter(self.module)
            first = None if self._first is None else self._first.tensor()
        if first is None:
            return _How(modes, None, "cpu", autocast_precision("cpu"))
        device = "cpu" if first.is_cpu else first.device.type
        return _How(modes, first.dtype, device, autocast_precision(device))

    def _look(self) -> None:
        noted, self._noted = self._noted, Noted(self.module)
        is_hooked_otherwise = noted.is_hooked_otherwise()
        if is_hooked_otherwise:
            warn_of_hooks(self.module)
        if is_hooked_otherwise or noted.is_built_otherwise():
            self._start_again(self._fresh_graphs())
            return
        changed = [place for place in noted.changed() if place not in self._irrelevant]
        if changed:
            self._look_at(changed)

    def _look_at(self, changed: Sequence[Place]) -> None:
        """Export the module again after attributes changed; keep the existing graphs if the export is the same."""
        fresh, key = self._fresh_graphs(), self._how().key().exported
        exported = fresh.exported(key, self.module)
        if self.graphs.is_exported_as(key, exported):
            self._irrelevant.update(changed)
            return
        self._change(f"'{changed[0]}'", fresh)

    def _change(self, what: str, graphs: ModuleGraphs) -> None:
        self._changes += 1
        if self._changes > MOST_STRUCTURES:
            raise ConfigurationError(
                f"{what} of {type(self.module).__name__} has changed {self._changes} times since the module was wrapped: "
                "what is set on a module is a constant of its graph. Give what changes from step to step to forward as a tensor, "
                "or hold it in a buffer"
            )
        self._start_again(graphs)

    def _fresh_graphs(self) -> ModuleGraphs:
        return self._graphs_of(self.graphs.args, self.graphs.kwargs, self.graphs.dynamic_shapes)

    def _start_again(self, graphs: ModuleGraphs) -> None:
        self.graphs = graphs
        self._prepared, self._latest, self._others, self._elsewhere = {}, None, {}, []
        self._first = _first_parameter(self.module)

    def _prepare(self, key: GraphKey) -> _Prepared:
        try:
            graph = self.graphs.graph(key, self.module)
        except ConfigurationError:
            if key.precision is None:
                raise
            # The module has no float32 products for autocast to narrow.
            graph = self.graphs.graph(key._replace(precision=None), self.module)
        exported = self.graphs.exported(key.exported, self.module, key.training)
        self._irrelevant.update(Place("", name) for name in exported.attributes)
        self._constants = [(tensor, tensor._version) for tensor in exported.constants if not tensor.is_inference()]
        outputs = exported.outputs if key.training else exported.outputs_in_evaluation
        written = exported.written_inputs if key.training else exported.written_inputs_in_evaluation
        state = {name: _Entry.of(self.module, name) for name in graph.state}
        for name, entry in state.items():
            _refuse_sharded(name, entry.tensor())
        others = [name for name in (*exported.parameters, *exported.buffers) if name not in {*state, *exported.counted_batches}]
        unread = [_Entry.of(self.module, name) for name in others]
        prepared = _Prepared(
            graph,
            exported,
            outputs,
            list(state.values()),
            unread,
            [entry.tensor().shape for entry in (*state.values(), *unread)],
            [_Entry.of(self.module, name) for name in exported.counted_batches] if key.training else [],
            list(exported.batches_per_call.values()),
            None if exported.inputs.kinds else _positions(exported.inputs, graph.data),
            outputs.names == tuple(graph.outputs) and outputs.spec.is_leaf() and not outputs.kinds,
            [(graph.data.index(name), graph.outputs.index(output)) for name, output in written.items()],
        )
        self._prepared[key] = prepared
        return prepared

    def _calls_of(self, other: OtherArguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Calls:
        """Return the calls for arguments of another structure; the first such call makes their graphs."""
        calls = self._others.get(other.structure)
        if calls is None:
            shapes = self.graphs.dynamic_shapes
            if isinstance(shapes, Mapping):
                shapes = shapes_by_name(self.module, args, kwargs, shapes)
            elif shapes is not None or len(self._others) == MOST_STRUCTURES:
                raise ConfigurationError(str(other))
            examples = examples_like(self.module, (self.graphs.args, self.graphs.kwargs), (args, kwargs))
            calls = self._others[other.structure] = Calls(self._graphs_of(*examples, shapes), self.module)
        return calls

    def _takes(
        self, how: _How, prepared: _Prepared, data: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """True if a graph is right for the extents of the inputs.

        If ``forward`` may take another branch for them, both are run and compared, once per extent.

        Raises:
            InputError: PyTorch cannot call the module with these inputs.
        """
        graph = prepared.graph
        if graph.fits(data):
            return True
        if graph.misfits(data):
            return False
        graph.refuse_extents(data)
        doubts = graph.doubts(data)
        if self.graphs.verify:
            training, engine = any(how.modes), self.graphs.engine
            check_extents(self.module, prepared.exported, args, kwargs, training)
            takes = computes_the_same(self.module, prepared.exported, args, kwargs, training, engine)
        else:
            takes = all(doubt.given < 2 for doubt in doubts)  # without verification, one sample is treated like any other number
        if takes:
            graph.settle(doubts)
        return takes

    def _calls_at(
        self, prepared: _Prepared, data: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Calls:
        """Return the calls for extents that the graph does not accept, with these axes open if possible.

        Raises:
            InputError: PyTorch cannot call the module with these inputs, or there are already graphs for too many extents.
        """
        for calls in self._elsewhere:
            how, other = calls._current()
            if calls._takes(how, other, calls._data(other, args, kwargs), args, kwargs):
                return calls
        if self.graphs.verify:
            check_extents(self.module, prepared.exported, args, kwargs, any(self._how().modes))
        misfits = prepared.graph.misfits(data) or sorted(prepared.graph.doubts(data))
        places = frozenset((misfit.name, misfit.axis) for misfit in misfits)
        if len(self._elsewhere) == MOST_STRUCTURES:
            raise InputError(
                f"{type(self.module).__name__}: {misfits[0]}; there are graphs of {MOST_STRUCTURES} other extents already, and "
                "each takes one: what forward does with the extent fixes it. Let forward read it from the shape, as x.shape[1], "
                "or give extents that were there before"
            )
        names = prepared.exported.inputs.names
        opened: dict[int, list[int]] = {}
        for name, leaf in zip(names, pytree.tree_leaves((args, kwargs)), strict=True):
            opened.setdefault(id(leaf), []).extend(axis for at, axis in self._opened | places if at == name and axis is not None)
        shapes = None if any(misfit.axis is None for misfit in misfits) else open_batch(self.module, args, kwargs, opened)
        try:
            calls = Calls(self._graphs_of(args, kwargs, shapes), self.module, self._opened | places)
            calls._current()
        except UnsupportedOperatorError:
            calls = Calls(self._graphs_of(args, kwargs, {}), self.module)
            calls._current()
        self._elsewhere.append(calls)
        return calls

    def _graphs_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> ModuleGraphs:
        return ModuleGraphs(args, kwargs, shapes, self.graphs.engine, self.graphs.verify)

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
                values[name] = pairs(leaf) if name in structure.kinds and leaf.is_complex() else leaf
            elif leaf is not constant and not _is_same_constant(leaf, constant):
                raise OtherArguments(
                    f"{type(self.module).__name__} was wrapped with {constant!r} where it is called with {leaf!r}: what is no "
                    "tensor is a constant of the graph. Wrap it again for the other value, or give it as a tensor",
                    _structure(leaves, spec),
                )
        return [values[name] for name in prepared.graph.data]

    def _otherwise(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OtherArguments | None:
        examples = pytree.tree_structure((self.graphs.args, self.graphs.kwargs))
        leaves, spec = pytree.tree_flatten(self._arranged(args, kwargs))
        return (
            None
            if spec == examples
            else OtherArguments(f"{type(self.module).__name__}: other arguments", _structure(leaves, spec))
        )

    def _arranged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


def _is_same_constant(leaf: Any, constant: Any) -> bool:
    """True if a value that is not a tensor is unchanged: 1 differs from True, -0.0 from 0.0, and NaN equals NaN."""
    if type(leaf) is not type(constant):
        return False
    return repr(leaf) == repr(constant) if isinstance(leaf, float | complex) else bool(leaf == constant)


def _structure(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Hashable:
    """Return a key of a call's arguments: the structure, the positions of the tensors, and the other values."""
    return repr(spec), tuple(None if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)


def _without_values(model: ir.Model | None, state: Iterable[str]) -> ir.Model | None:
    if model is None:
        return None
    loaded = load(model)
    # The exporter's objects form cycles, which would keep copies of the weights until they are collected.
    forget_values(model.graph, state)
    forget_values(loaded.graph, state)
    return loaded


def _fingerprint(model: ir.Model) -> list[Any]:
    """Return the computation of a model for comparison: nodes, value names and constants."""
    graph = model.graph
    constants = {name: value.const_value for name, value in graph.initializers.items()}
    return [
        [value.name for value in (*graph.inputs, *graph.outputs)],
        {name: None if constant is None else constant.tobytes() for name, constant in constants.items()},
        *[_without_origin(ir.serde.serialize_node(node)).SerializeToString(deterministic=True) for node in graph],
    ]


def _without_origin(node: onnx.NodeProto) -> onnx.NodeProto:
    """Remove the record of a node's source code, in place: it depends on the caller."""
    node.ClearField("metadata_props")
    for attribute in node.attribute:
        for inner in attribute.g.node:
            _without_origin(inner)
    return node


def _contents(exported: ExportedModule) -> list[Any]:
    models = [exported.model, *([] if exported.inference is None else [exported.inference])]
    rest = {field.name: repr(getattr(exported, field.name)) for field in fields(exported)}
    del rest["model"], rest["inference"], rest["constants"]
    return [rest | {"counted_batches": repr(list(exported.counted_batches))}, *map(_fingerprint, models)]


def _refuse_sharded(name: str, tensor: torch.Tensor) -> None:
    """Refuse a sharded parameter: PyTorch would gather it when it calls the submodule, but a graph does not call submodules."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        raise ConfigurationError(
            f"'{name}' is sharded over workers inside of a wrapped module, whose submodules are not called: shard the wrapped "
            "module as a whole (fully_shard(wrap(module, ...))), or wrap submodules and shard these"
        )


def _first_parameter(module: torch.nn.Module) -> _Entry | None:
    """Return the first floating-point parameter, or else the first; its dtype and device stand for the module's."""
    names = (name for name, parameter in module.named_parameters() if parameter.is_floating_point())
    name = next(names, None) or next((name for name, _ in module.named_parameters()), None)
    return None if name is None else _Entry.of(module, name)


def _positions(structure: Structure, data: Sequence[str]) -> list[int] | None:
    """Return the positions of a graph's inputs among the arguments; None if not all arguments are tensors given by position."""
    args, kwargs = pytree.tree_unflatten(list(structure.names), structure.spec)
    if kwargs or not all(isinstance(name, str) for name in args) or set(args) != set(data):
        return None
    return [args.index(name) for name in data]


def _converted(leaf: Any, dtype: torch.dtype | None) -> Any:
    is_other = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and dtype is not None and dtype.is_floating_point
    return leaf.to(dtype) if is_other and leaf.dtype != dtype else leaf


@contextlib.contextmanager
def _modes_set(module: torch.nn.Module, modes: Modes | None) -> Iterator[None]:
    """Set the modes for an export: everything in training, or the given modes with the module itself in training."""
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
