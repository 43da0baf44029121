"""Tracing of a module with examples into a graph of ATen operators."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import sys
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.export.graph_signature import InputKind
from torch.nn.modules import transformer
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from burnish.errors import ConfigurationError
from burnish.importer.pytorch.layers import same_but_for_mode
from burnish.importer.pytorch.python_state import PythonState
from burnish.importer.pytorch.refusals import (
    FrozenValueError,
    OwnBackwardError,
    PackingError,
    ReturnedError,
    UnregisteredError,
)
from burnish.sample_axes import AskedAxes

DEFAULT_MOMENTUM = 0.1
"""Placeholder for the momentum None of a layer during tracing; the layer's policy defines its behaviour."""


@dataclass(frozen=True)
class Captured:
    """A module as a graph of ATen operators.

    Attributes:
        program: the graph; its outputs are the tensors that ``forward`` returns, in order.
        returned: the result of ``forward``, with the trace's tensors.
        cumulative: names of normalization layers that average their statistics over all updates.
        attributes: attributes that ``forward`` sets to tensors with a gradient, which the graph does not.
        constants: tensors that ``forward`` reads that are no arguments, parameters or buffers.
    """

    program: torch.export.ExportedProgram
    returned: Any
    cumulative: frozenset[str]
    attributes: tuple[str, ...] = ()
    constants: tuple[torch.Tensor, ...] = ()


def capture(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    training: bool,
    hooks: bool = True,
) -> Captured:
    """Trace ``forward`` in training or evaluation mode, without changing the module.

    Args:
        module: the module. In training, submodules in evaluation mode stay so, unless the whole module is in evaluation mode,
            which counts as if ``train()`` had been called.
        args, kwargs: arguments of ``forward``.
        dynamic_shapes: as for ``torch.export.export``.
        training: the mode.
        hooks: True to include hooks of the whole module; False if they are also called when the graph runs.

    Raises:
        FrozenValueError: a Python random number or a counter in ``forward`` would become a constant of the graph.
        UnregisteredError: so would a tensor that requires a gradient but is no parameter of the module.
    """
    with _asked_for_gradients() as asking:
        first, state = _traced(module, args, kwargs, dynamic_shapes, training, hooks)
    others = [*state.others()]
    if asking:
        others.append((ASKS_FOR_GRADIENTS, functools.partial(_asked_for_gradients, answer=False)))
    # Python state that changes the graph would be frozen into it.
    for name, other_state in others:
        try:
            with other_state():
                other, _ = _traced(module, args, kwargs, dynamic_shapes, training, hooks)
            is_same = same_but_for_mode(first.program.graph, other.program.graph) and _same_constants(first, other)
        except Exception:  # for example a branch for another random number
            is_same = False
        if not is_same:
            raise FrozenValueError(name)
    return replace(first, attributes=state.computed)


ASKS_FOR_GRADIENTS = (
    "forward asks whether gradients are recorded (torch.is_grad_enabled), and computes something else where they are not: in a "
    "graph the answer would be a constant. Ask for self.training in its place"
)


@contextlib.contextmanager
def _asked_for_gradients(answer: bool | None = None) -> Iterator[list[bool]]:
    """Observe or override ``torch.is_grad_enabled`` for code outside PyTorch; yields the list of answers."""
    own, told = torch.is_grad_enabled, list[bool]()

    def is_grad_enabled() -> bool:
        is_enabled = own()
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch"):
            is_enabled = is_enabled if answer is None else answer
            told.append(is_enabled)
        return is_enabled

    torch.is_grad_enabled = is_grad_enabled
    try:
        yield told
    finally:
        torch.is_grad_enabled = own


def _same_constants(captured: Captured, other: Captured) -> bool:
    mine, theirs = captured.program.constants, other.program.constants
    return mine.keys() == theirs.keys() and all(
        not isinstance(mine[name], torch.Tensor) or torch.equal(mine[name], theirs[name]) for name in mine
    )


def _traced(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any, training: bool, hooks: bool
) -> tuple[Captured, PythonState]:
    returned: list[Any] = []
    outside = _Outside(module)
    with (
        _global_hooks_apart(module),
        mode_set(module, training),
        _countless(module) as cumulative,
        _unsynchronized(),
        PythonState(module) as state,
        _returns_tensors(module, returned, kwargs, hooks, state, outside),
        _no_own_backward(),
        _masks_unexamined(),
        _no_packing(),
        _partial_graph_unprinted(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        program = torch.export.export(module, args, dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False)
    return Captured(program, returned[-1], cumulative, constants=tuple(outside.constants.values())), state


@contextlib.contextmanager
def mode_set(module: torch.nn.Module, training: bool) -> Iterator[None]:
    before = {submodule: submodule.training for submodule in module.modules()}
    try:
        if not training:
            module.eval()
        elif not module.training:
            module.train()
        yield
    finally:
        for submodule, mode in before.items():
            submodule.training = mode


@contextlib.contextmanager
def _countless(module: torch.nn.Module) -> Iterator[frozenset[str]]:
    """Stop normalization layers from counting batches, a module change that the graph cannot hold."""
    named = module.named_modules(remove_duplicate=False)  # a graph may use any of a layer's names
    layers = {name: layer for name, layer in named if isinstance(layer, _NormBase)}
    before = {layer: (layer.momentum, layer._buffers.get("num_batches_tracked")) for layer in layers.values()}
    cumulative = frozenset(name for name, layer in layers.items() if layer.momentum is None)
    try:
        for layer, (momentum, count) in before.items():
            layer.momentum = DEFAULT_MOMENTUM if momentum is None else momentum
            if count is not None:
                layer._buffers["num_batches_tracked"] = None
        yield cumulative
    finally:
        for layer, (momentum, count) in before.items():
            layer.momentum = momentum
            if count is not None:
                layer._buffers["num_batches_tracked"] = count


@contextlib.contextmanager
def _unsynchronized() -> Iterator[None]:
    """Let synchronized batch normalization compute like its base class: workers synchronize according to its policy.

    Its own ``forward`` asserts that batches are counted, and requires a GPU if a process group is open.
    """
    own = torch.nn.SyncBatchNorm.__dict__["forward"]
    torch.nn.SyncBatchNorm.forward = _BatchNorm.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.SyncBatchNorm.forward = own  # type: ignore[method-assign]


HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""Attributes of a module with hooks."""


@contextlib.contextmanager
def _returns_tensors(
    module: torch.nn.Module,
    returned: list[Any],
    kwargs: Mapping[str, Any],
    hooks: bool,
    state: PythonState,
    outside: TorchFunctionMode,
) -> Iterator[None]:
    """Make ``forward`` return only its tensors, including open extents; its original result is appended to ``returned``.

    Its parameters become explicit for ``kwargs``: PyTorch 2.13 cannot open an axis with ``**kwargs``. Hooks of the whole module
    see the original arguments and results; without ``hooks`` they are not called.
    """
    forward = module.forward
    own = {name: module.__dict__[name] for name in ("forward", *HOOKS) if name in module.__dict__}

    @functools.wraps(forward)
    def tensors(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        if hooks:
            del module.__dict__["forward"]
            module.__dict__.update(own)
            try:
                with outside:
                    result = torch.nn.Module._call_impl(module, *args, **kwargs)  # type: ignore[no-untyped-call]
            finally:
                module.__dict__.update(traced)
        else:
            with outside:
                result = forward(*args, **kwargs)
        state.note()
        register_dataclasses(result)
        returned.append(result)
        found = [_tensor_of(leaf) for leaf in pytree.tree_leaves(result) if is_computed(leaf)]
        _refuse_others(result)
        return tuple(found)

    parameters = {name: entry for name, entry in inspect.signature(forward).parameters.items() if entry.kind != entry.VAR_KEYWORD}
    others = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name not in parameters]
    tensors.__signature__ = inspect.Signature([*parameters.values(), *others])  # type: ignore[attr-defined]
    traced = {"forward": tensors, **{name: OrderedDict() for name in own if name != "forward"}}
    module.__dict__.update(traced)
    try:
        yield
    finally:
        del module.__dict__["forward"]
        module.__dict__.update(own)


class _Outside(TorchFunctionMode):
    """Collects tensors with values that ``forward`` reads while traced: they are constants of the graph.

    Raises:
        UnregisteredError: one requires a gradient.
    """

    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module
        self.constants: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in _READS_NO_VALUE:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and not is_fake(leaf) and leaf.device.type != "meta":
                    self._note(leaf)
        return func(*args, **(kwargs or {}))

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise UnregisteredError(
                f"forward reads {_unregistered(self.module, tensor)}, which requires a gradient and is no parameter of the "
                "module: in a graph it would be a constant. Make it one (torch.nn.Parameter, ModuleList, ParameterList), or give "
                "it to forward as an input"
            )
        self.constants[id(tensor)] = tensor


_READS_NO_VALUE = frozenset("__get__ size dim numel __len__ stride is_floating_point is_complex detach".split())


def _unregistered(module: torch.nn.Module, tensor: torch.Tensor) -> str:
    for part, inner in module.named_modules():
        for name, value in inner.__dict__.items():
            for path, leaf in pytree.tree_flatten_with_path(value)[0]:
                tensors = dict(leaf.named_parameters()) if isinstance(leaf, torch.nn.Module) else {"": leaf}
                for inside, found in tensors.items():
                    if found is tensor and not name.startswith("_"):
                        place = ".".join(filter(None, (part, name + pytree.keystr(path), inside)))
                        return f"'{place}', a tensor of the shape {list(tensor.shape)}"
    return f"a tensor of the shape {list(tensor.shape)} from outside of the module"


@contextlib.contextmanager
def _global_hooks_apart(module: torch.nn.Module) -> Iterator[None]:
    """Disable global hooks for the traced module itself: PyTorch calls them around it."""
    of_all = [getattr(torch.nn.modules.module, name) for name in ("_global_forward_pre_hooks", "_global_forward_hooks")]
    before = [dict(hooks) for hooks in of_all]

    def of_others(hook: Any) -> Any:
        return lambda part, *rest: None if part is module else hook(part, *rest)

    try:
        for hooks in of_all:
            hooks.update({number: of_others(hook) for number, hook in hooks.items()})
        yield
    finally:
        for hooks, own in zip(of_all, before, strict=True):
            hooks.update(own)


def refuse_lazy(module: torch.nn.Module) -> None:
    """Refuse parameters and buffers without a shape.

    Raises:
        ConfigurationError: there is one.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ConfigurationError(
                f"'{name}' has no shape yet, as {type(module).__name__} has lazy layers: call the module once with the examples"
            )


def before_forward(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, torch.Tensor]]:
    """Return the arguments of ``forward`` after a module's hooks, and the tensor attributes that they set, by name.

    PyTorch's older ``weight_norm`` and ``spectral_norm`` are hooks that set attributes. The module is not changed.
    """
    before, kwargs = dict(module.__dict__), dict(kwargs)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    given = args, kwargs
    with PythonState(module), _reparametrize_module(module, buffers):
        for number, hook in module._forward_pre_hooks.items():
            try:
                if number in module._forward_pre_hooks_with_kwargs:
                    result = hook(module, args, kwargs)
                    args, kwargs = (args, kwargs) if result is None else result
                elif (result := hook(module, args)) is not None:
                    args = result if isinstance(result, tuple) else (result,)
            except Exception:
                return *given, {}  # a call reports it
        set_by_hooks = {
            name: value.detach().requires_grad_(value.requires_grad)
            for name, value in module.__dict__.items()
            if isinstance(value, torch.Tensor) and value is not before.get(name)
        }
    return args, kwargs, set_by_hooks


@contextlib.contextmanager
def held_as_buffers(module: torch.nn.Module, attributes: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Hold attributes of a module as buffers, which a graph reads at each call."""
    before = {name: module.__dict__.pop(name) for name in attributes if name in module.__dict__}
    module._buffers.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del module._buffers[name]
        module.__dict__.update(before)


def is_computed(leaf: Any) -> bool:
    """True if a result of ``forward`` is computed: a tensor, or a number that depends on extents."""
    return isinstance(leaf, torch.Tensor | torch.SymInt)


def _tensor_of(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf
    return torch.scalar_tensor(leaf, dtype=torch.int64)


def _refuse_others(result: Any) -> None:
    leaves = pytree.tree_leaves(result)
    for leaf in leaves:
        if isinstance(leaf, torch.SymFloat | torch.SymBool):
            raise ReturnedError(
                "forward returns a number of Python's that it computes from tensors, as item() does: return the "
                "tensor, and call item() on "
                "what the module returns"
            )
        if not isinstance(leaf, torch.Tensor) and _holds_tensors(leaf):
            raise ReturnedError(
                f"forward returns a {type(leaf).__name__}, which is no structure of tensors that PyTorch knows: "
                f"return a tensor, a "
                "tuple, a dictionary, a named tuple or a dataclass, or make the class known by "
                "torch.utils._pytree.register_pytree_node"
            )
    if not any(map(is_computed, leaves)):
        raise ReturnedError("forward returns no tensor, and a graph computes tensors: return one, or call the module as it is")


def _holds_tensors(value: Any, depth: int = 3) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if depth == 0 or isinstance(value, str | bytes | int | float | type | torch.nn.Module):
        return False
    inner = [*vars(value).values()] if hasattr(value, "__dict__") else []
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ()) if isinstance(name, str)]
    if isinstance(value, Mapping):
        inner.extend(value.values())
    elif isinstance(value, Collection):
        inner.extend(value)
    return any(_holds_tensors(each, depth - 1) for each in (*inner, *slots))


@contextlib.contextmanager
def _no_own_backward() -> Iterator[None]:
    """Refuse functions with a custom backward, which tracing their forward would lose.

    Reentrant checkpoints have one, but it is the backward of the function that they run, so that is traced instead. PyTorch's
    others are in layers and collectives; those of its tracers, and the one that calls hooks, are harmless.
    """
    own = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            run_function, _, *inputs = args
            return run_function(*inputs)
        is_layers = cls.__module__.startswith(("torch.nn.", "torch.distributed.")) and cls is not BackwardHookFunction
        if is_layers or not cls.__module__.startswith("torch."):
            raise OwnBackwardError(f"the torch.autograd.Function {cls.__name__} has a backward of its own, and a graph would not")
        return own.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]


@contextlib.contextmanager
def _no_packing() -> Iterator[None]:
    def pack(*_: Any) -> Any:
        raise PackingError(
            "pack_padded_sequence packs by the values of lengths, and a graph has no extents that depend on values; give the "
            "recurrent layer the padded sequences, and gather its outputs at the lengths"
        )

    torch._VF._pack_padded_sequence = pack  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._VF._pack_padded_sequence  # the module looks up missing attributes


@contextlib.contextmanager
def _partial_graph_unprinted() -> Iterator[None]:
    """Suppress the graph that PyTorch prints when an export fails: the error names the line and a remedy."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        yield
    sys.stderr.write(printed.getvalue())


@contextlib.contextmanager
def _masks_unexamined() -> Iterator[None]:
    """Let ``torch.nn.Transformer`` accept masks without checking if their values are causal.

    A trace has no values; the mask is added to the scores in any case.
    """
    own = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = own


def register_dataclasses(value: Any) -> None:
    """Register the dataclasses in a value with PyTorch."""
    for leaf in pytree.tree_leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            torch.export.register_dataclass(type(leaf))
            for entry in fields(leaf):
                register_dataclasses(getattr(leaf, entry.name))


def bound_arguments(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by parameter of ``forward``, including those of ``**kwargs``."""
    signature = inspect.signature(module.forward)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    others = next((name for name, entry in signature.parameters.items() if entry.kind == entry.VAR_KEYWORD), "")
    return bound | bound.pop(others, {})


def told_apart(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the examples with a separate tensor for each: a trace would treat repeated tensors as one input.

    Also copies parameters and buffers of the module among the examples.
    """
    seen = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in seen:
            leaf = leaf.detach().clone()
        elif leaf.requires_grad:
            # PyTorch would treat its .grad as another input.
            leaf = leaf.detach().requires_grad_()
        seen.add(id(leaf))
        return leaf

    apart: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(own, (args, kwargs))
    return apart


def with_several_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Double examples with one sample: PyTorch assumes that an extent of 1 never changes."""
    if _batch((args, kwargs)) != 1:
        return args, dict(kwargs)

    def doubled(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == 1:
            return torch.cat([leaf.detach()] * 2)
        return leaf

    repeated: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(doubled, (args, dict(kwargs)))
    return repeated


def open_batch(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    others: Mapping[int, Collection[int]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return shapes open along the first axis, for all tensors with as many samples there as the first.

    Args:
        module, args, kwargs: the module and its arguments.
        others: additional open axes, by the ``id`` of a tensor.
    """
    batch = _batch((args, kwargs))

    def axes(leaf: Any) -> dict[int, Any] | None:
        is_batch = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return dict.fromkeys([*([0] if is_batch else []), *others.get(id(leaf), [])], torch.export.Dim.AUTO) or None

    return {name: pytree.tree_map(axes, value) for name, value in bound_arguments(module, args, kwargs).items()}


def open_along(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], asked: AskedAxes) -> dict[str, Any]:
    """Return shapes open along the requested sample axes, by default the first."""

    def opened(name: str, leaf: Any) -> dict[int, Any] | None:
        axis = asked.get(name, 0) if isinstance(asked, Mapping) else asked
        if axis is None or not isinstance(leaf, torch.Tensor) or not 0 <= axis < leaf.dim():
            return None
        return {axis: torch.export.Dim.AUTO}

    bound = bound_arguments(module, args, kwargs)
    return {name: pytree.tree_map(functools.partial(opened, name), value) for name, value in bound.items()}


def shapes_by_name(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return shapes open as given for some parameters of ``forward``, and along the first axis for others."""
    return {name: shapes.get(name, axes) for name, axes in open_batch(module, args, kwargs).items()}


def fixed_batch(program: torch.export.ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the number of samples if a traced module accepts only that of its examples, else None.

    Inputs without axes have no samples.
    """
    batch = _batch((args, kwargs))
    inputs = (
        node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder" and node.name in _user_inputs(program)
    )
    first = next((value for value in inputs if isinstance(value, torch.Tensor) and value.dim() > 0), None)
    is_open = first is None or (isinstance(first.shape[0], torch.SymInt) and not str(first.shape[0]).isdigit())
    return None if is_open else batch


def _user_inputs(program: torch.export.ExportedProgram) -> set[str]:
    return {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT}


def _batch(examples: Any) -> int | None:
    extents = (leaf.shape[0] for leaf in pytree.tree_leaves(examples) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0)
    return next(extents, None)
