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
        verify: whether what is exported is compared with the module.
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
        return self  # which holds no state of a module

    def exported(self, key: ModuleKey, module: torch.nn.Module, training: bool | None = None) -> ExportedModule:
        """The module as a graph, of a mode that is asked for at least: by default of the module's own.

        Raises:
            UnsupportedOperatorError: it cannot be exported in this mode, or computes something else than its graph.
        """
        with self._making:
            if key not in self._exports:
                for name, parameter in module.named_parameters():
                    _refuse_sharded(name, parameter)
                needed = {module.training if training is None else training}
                # Under autocast a graph has a precision of its own; a trace would hold the casts of PyTorch's besides.
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
        """Whether the module was exported for a key to the same."""
        before = self._exports.get(key)
        return before is not None and _contents(before) == _contents(exported)

    def graph(self, key: GraphKey, module: torch.nn.Module) -> BoundGraph:
        """The graph of a mode."""
        with self._making:
            if key not in self._graphs:
                exported = self.exported(key.exported, module, key.training)
                self._graphs[key] = bind_export(exported, self.engine, key.training, type(module).__name__, key.precision)
            return self._graphs[key]


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
        outputs: how the outputs of the graph are what ``forward`` returns in this mode.
        state: of ``graph.state``.
        unread: the parameters and buffers that the graph does not read, though it may have their extents as constants.
        shapes: of these tensors and of ``state``, as they were.
        counts: the counts of batches that a call adds to.
        batches: how many it adds to each.
        inputs: the positions of the graph's inputs among the arguments, where all of these are tensors given by position.
        single: whether ``forward`` returns one tensor, and nothing else is to be done.
        written: the positions of the graph's inputs that are written over, with those of the outputs that are written there.
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
        opened: inputs and axes that the graphs were made for other extents of.
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
        """The same for a copy of the module."""
        self._look()
        return Calls(self.graphs, module, self._opened)

    def made_again(self) -> tuple[Any, ...]:
        """What ``wrap`` takes beside the module."""
        graphs = self.graphs
        return (graphs.args, graphs.kwargs), graphs.dynamic_shapes, graphs.engine, False, graphs.verify

    def prepare(self) -> None:
        """Export the module as it is."""
        exported = self.graphs.exported(self._how().key().exported, self.module)
        self._irrelevant.update(Place("", name) for name in exported.attributes)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``forward`` returns.

        Raises:
            ConfigurationError: the arguments are not of the structure or the dtypes of the examples.
        """
        try:
            how, prepared = self._current()
        except UnsupportedOperatorError:
            # Training may take targets that evaluation does not, and the other way round.
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
            is_other = False  # no tensors: the graph says so
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
            # Autograd saves what a graph reads, which is not to be written over.
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
        """See what has changed in the module since the last call."""
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
        """Export the module again where attributes were set; where that gives the same graph, go on with the graphs there are."""
        fresh, key = self._fresh_graphs(), self._how().key().exported
        exported = fresh.exported(key, self.module)
        if self.graphs.is_exported_as(key, exported):
            self._irrelevant.update(changed)
            return
        self._change(f"'{changed[0]}'", fresh)

    def _change(self, what: str, graphs: ModuleGraphs) -> None:
        """Start again with other graphs, unless that happened too often."""
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
        """Forget the graphs for others."""
        self.graphs = graphs
        self._prepared, self._latest, self._others, self._elsewhere = {}, None, {}, []
        self._first = _first_parameter(self.module)

    def _prepare(self, key: GraphKey) -> _Prepared:
        try:
            graph = self.graphs.graph(key, self.module)
        except ConfigurationError:
            if key.precision is None:
                raise
            # Nothing in the module is a product of float32: it computes as without autocast.
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
        """The calls with arguments of another structure, whose graphs are made when the first comes."""
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
        """Whether a graph computes what the module does with the extents that inputs have.

        Where ``forward`` may go another way for them, both are run, once for each such extent.

        Raises:
            InputError: PyTorch cannot call the module with them.
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
            takes = all(doubt.given < 2 for doubt in doubts)  # one sample counts as any other number then
        if takes:
            graph.settle(doubts)
        return takes

    def _calls_at(
        self, prepared: _Prepared, data: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Calls:
        """The calls with other extents than the graph takes: by a graph in which these axes are open, where they can be.

        Raises:
            InputError: PyTorch cannot call the module with them, or there are graphs for too many extents already.
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
        """What of the arguments has another structure than the examples."""
        examples = pytree.tree_structure((self.graphs.args, self.graphs.kwargs))
        leaves, spec = pytree.tree_flatten(self._arranged(args, kwargs))
        return (
            None
            if spec == examples
            else OtherArguments(f"{type(self.module).__name__}: other arguments", _structure(leaves, spec))
        )

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


def _is_same_constant(leaf: Any, constant: Any) -> bool:
    """Whether what is no tensor is what it was: 1 is not True, -0.0 is not 0.0, and what is not a number is itself."""
    if type(leaf) is not type(constant):
        return False
    return repr(leaf) == repr(constant) if isinstance(leaf, float | complex) else bool(leaf == constant)


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
    del rest["model"], rest["inference"], rest["constants"]
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
