"""A module, called with examples, as a graph of ATen operators."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind
from torch.nn.modules import transformer
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from burnish.importer.pytorch.refusals import OwnBackwardError, PackingError

DEFAULT_MOMENTUM = 0.1
"""Stands for the momentum None of a layer while it is traced; what the layer does is its policy."""


@dataclass(frozen=True)
class Captured:
    """A module as a graph of ATen operators.

    Attributes:
        program: the graph; its outputs are the tensors that ``forward`` returns, in their order.
        returned: what ``forward`` returns, with the stand-ins of the trace as tensors.
        cumulative: names of the normalization layers whose statistics are averages over all updates.
    """

    program: torch.export.ExportedProgram
    returned: Any
    cumulative: frozenset[str]


def capture(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic_shapes: Any, training: bool
) -> Captured:
    """Trace ``forward`` in training or evaluation mode; the module is left as it is.

    Args:
        module: the module. In training, submodules that are in evaluation mode stay so; unless the module as a whole is in
            evaluation mode, which is then as if ``train()`` had been called.
        args, kwargs: what ``forward`` is called with.
        dynamic_shapes: as ``torch.export.export`` takes it.
        training: the mode.
    """
    returned: list[Any] = []
    with (
        _mode(module, training),
        _countless(module) as cumulative,
        _returns_tensors(module, returned, kwargs),
        _no_own_backward(),
        _masks_unexamined(),
        _no_packing(),
        _partial_graph_unprinted(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        program = torch.export.export(module, args, dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False)
    return Captured(program, returned[-1], cumulative)


@contextlib.contextmanager
def _mode(module: torch.nn.Module, training: bool) -> Iterator[None]:
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
    """Normalization layers that count no batches, which would be a change of the module that the graph cannot hold."""
    named = module.named_modules(remove_duplicate=False)  # a graph has any of the names of one that has several
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
def _returns_tensors(module: torch.nn.Module, returned: list[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Let ``forward`` return the tensors of what it returns; what that was is added to ``returned``.

    It takes ``kwargs`` as parameters of its own: PyTorch 2.13 cannot open an axis where there are others (``**kwargs``).
    """
    forward = module.forward
    own = module.__dict__.get("forward")

    @functools.wraps(forward)
    def tensors(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        result = forward(*args, **kwargs)
        register_dataclasses(result)
        returned.append(result)
        return tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))

    parameters = {name: entry for name, entry in inspect.signature(forward).parameters.items() if entry.kind != entry.VAR_KEYWORD}
    others = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name not in parameters]
    tensors.__signature__ = inspect.Signature([*parameters.values(), *others])  # type: ignore[attr-defined]
    module.__dict__["forward"] = tensors
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


@contextlib.contextmanager
def _no_own_backward() -> Iterator[None]:
    """Refuse functions with a backward of their own, which a trace of their forward loses, and with it all gradients.

    Reentrant checkpoints are one, whose backward is that of what they run: this is traced in their place. What else PyTorch has
    of them lies in layers and collectives; those that its tracers use, and the one that calls hooks, lose nothing.
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
    """Refuse packed sequences with what to write in their place."""

    def pack(*_: Any) -> Any:
        raise PackingError(
            "pack_padded_sequence packs by the values of lengths, and a graph has no extents that depend on values; give the "
            "recurrent layer the padded sequences, and gather its outputs at the lengths"
        )

    torch._VF._pack_padded_sequence = pack  # type: ignore[assignment]
    try:
        yield
    finally:
        del torch._VF._pack_padded_sequence  # the module looks up what it has no attribute for


@contextlib.contextmanager
def _partial_graph_unprinted() -> Iterator[None]:
    """Keep to itself what PyTorch prints of the graph where an export fails: the error has the line, and the way round."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        yield
    sys.stderr.write(printed.getvalue())


@contextlib.contextmanager
def _masks_unexamined() -> Iterator[None]:
    """Let ``torch.nn.Transformer`` take masks as they are, without a look at whether their values are those of a causal one.

    A trace has no values; the mask is added to the scores either way.
    """
    own = transformer._detect_is_causal_mask
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = own


def register_dataclasses(value: Any) -> None:
    """Make the dataclasses in a value known to PyTorch as structures."""
    for leaf in pytree.tree_leaves(value):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            torch.export.register_dataclass(type(leaf))
            for entry in fields(leaf):
                register_dataclasses(getattr(leaf, entry.name))


def bound_arguments(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each parameter of ``forward`` is given, by name; what ``**kwargs`` takes has its own."""
    signature = inspect.signature(module.forward)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    others = next((name for name, entry in signature.parameters.items() if entry.kind == entry.VAR_KEYWORD), "")
    return bound | bound.pop(others, {})


def told_apart(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the examples with a tensor of its own for each: a trace takes one that is given twice for one input.

    The same goes for one that is a parameter or a buffer of the module.
    """
    seen = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in seen:
            leaf = leaf.detach().clone()
        seen.add(id(leaf))
        return leaf

    apart: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(own, (args, kwargs))
    return apart


def with_several_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the examples with two samples where they have one: PyTorch takes an extent of 1 for one that never changes."""
    if _batch((args, kwargs)) != 1:
        return args, dict(kwargs)

    def doubled(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == 1:
            return torch.cat([leaf.detach()] * 2)
        return leaf

    repeated: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(doubled, (args, dict(kwargs)))
    return repeated


def open_batch(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return shapes that are open along the first axis, of all tensors that have as many samples there as the first."""
    batch = _batch((args, kwargs))

    def axes(leaf: Any) -> dict[int, Any] | None:
        is_batch = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return {0: torch.export.Dim.AUTO} if is_batch else None

    return {name: pytree.tree_map(axes, value) for name, value in bound_arguments(module, args, kwargs).items()}


def shapes_by_name(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return shapes that are open as given for some parameters of ``forward``, and for others along the first axis."""
    return {name: shapes.get(name, axes) for name, axes in open_batch(module, args, kwargs).items()}


def fixed_batch(program: torch.export.ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return how many samples a traced module takes, where it takes no other number than its examples have; else None.

    Inputs without a first axis have no samples.
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
