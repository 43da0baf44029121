"""A PyTorch module whose forward and backward passes are graphs run by burnish's engine."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch

from burnish.engines.torch.engine import TorchEngine
from burnish.errors import ConfigurationError
from burnish.importer.pytorch import before_forward, refuse_lazy
from burnish.torch.arguments import arguments
from burnish.torch.backend import PartialCalls
from burnish.torch.changes import warn_of_hooks
from burnish.torch.differentiable import laid_out
from burnish.torch.module_graphs import Calls, ModuleGraphs

HELD = "_burnish_calls"
"""Slot of a wrapped module for its graph calls, separate from the attributes that it shares."""

REPLACED = "_burnish_forward"
"""Slot for a ``forward`` assigned to a wrapped module, as accelerate does; an attribute would also change the original."""


def wrap(
    module: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor,
    *,
    dynamic_shapes: Any = None,
    partial: bool = False,
    verify: bool = True,
    engine: TorchEngine | None = None,
) -> torch.nn.Module:
    """Return a module that computes with burnish's graphs and otherwise behaves like the original.

    The result's class derives from the module's class and shares all attributes: parameters and buffers are the same objects, and
    ``train()`` and ``eval()`` affect both. Autograd sees ``forward`` as one function. PyTorch's optimizers, losses and
    schedulers, clipping, ``DistributedDataParallel``, and hooks of the module itself and of its parameters work as with any
    module.

    - A module is exported when it is wrapped, and again if only some submodules change mode, its dtype changes, or submodules are
      replaced.
    - Batch normalization writes to the module's running statistics and counts batches; other writes to buffers in ``forward``
      happen too. Dropout draws from PyTorch's generator.
    - Convolution kernels, and images that ``forward`` returns, get channels last in memory, as with
      ``module.to(memory_format=torch.channels_last)``.
    - Under ``torch.autocast`` products are computed in its dtype; outputs keep theirs.
    - Only required gradients are computed, and they can be differentiated again.
    - Submodules are not called: the graph contains the effect that their hooks had during the export, and nothing else of them.

    Args:
        module: the module.
        example_inputs: arguments of ``forward``: a tuple or list, a dictionary by name, or a single argument. Calls have
            arguments of the same structure, with equal values for anything that is not a tensor.
        dynamic_shapes: open axes of the inputs, as in ``torch.export.export``. None opens the first axis of all inputs that have
            as many samples as the first input.
        partial: True to let burnish compute the parts it can, and PyTorch the others: custom operators, custom backward
            functions, data-dependent control flow. ``torch.compile(backend="burnish")`` then captures the module at its first
            call, and ``burnish.torch.explain`` reports what runs where. ``dynamic_shapes`` is not used in this case.
        verify: True to compare results and gradients of each new graph with the module, on the examples and on other inputs.
        engine: the engine that runs the graphs; by default ``TorchEngine()``.

    Warns:
        HooksWarning: a submodule has hooks.
        AttributesWarning: ``forward`` sets attributes of the module, but its graph does not.

    Raises:
        UnsupportedOperatorError: the module cannot be exported, or its graph gives other results; the message names line and
            part.
        GradientError: at a call: an operator between an input that requires a gradient and an output has none.
        ConfigurationError: the module is already wrapped, or its ``forward`` is not its class's; at a call: arguments of another
            structure or dtype.
        InputError: at a call: batch normalization in training has only one value per channel; or the arguments need graphs for
            too many extents.
    """
    cls = type(module)
    if hasattr(cls, HELD):
        raise ConfigurationError(f"this {cls.__name__} is wrapped already: call it as it is, or give what unwrap() returns of it")
    if "forward" in module.__dict__:
        raise ConfigurationError(
            f"this {cls.__name__} has a forward that is not its class's, which would be called in place of the graphs: wrap the "
            "module before something else replaces its forward"
        )
    refuse_lazy(module)
    warn_of_hooks(module)
    engine = engine or TorchEngine(capture=False)
    if engine.channels_last:
        for kernel in _kernels(module):
            kernel.data = laid_out(kernel.data)
    examples = before_forward(module, *arguments(example_inputs))[:2]
    calls = _calls(module, examples, dynamic_shapes, engine, partial, verify)
    calls.prepare()
    return _with_calls(module, calls)


def _kernels(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the kernels of two-dimensional convolutions that only PyTorch's own ``forward`` reads.

    Other code, such as layers with standardized weights, may take views of a parameter that need its original memory order.
    """
    layers = (torch.nn.Conv2d, torch.nn.ConvTranspose2d)
    read_by = {layer.forward for layer in layers}
    forwards = {part: inspect.getattr_static(type(part), "forward", None) for part in module.modules()}
    own = [part for part, forward in forwards.items() if forward in read_by and _convolves_as_written(type(part))]
    weights = [part._parameters.get("weight") for part in own]
    return [weight for weight in weights if weight is not None]


def _convolves_as_written(cls: type[torch.nn.Module]) -> bool:
    return not issubclass(cls, torch.nn.Conv2d) or cls._conv_forward is torch.nn.Conv2d._conv_forward


def _calls(
    module: torch.nn.Module, examples: tuple[Any, Any], dynamic_shapes: Any, engine: TorchEngine, partial: bool, verify: bool
) -> Calls | PartialCalls:
    if partial:
        return PartialCalls(module, engine, examples, verify)
    return Calls(ModuleGraphs(*examples, dynamic_shapes, engine, verify), module)


def _with_calls(module: torch.nn.Module, calls: Calls | PartialCalls) -> torch.nn.Module:
    wrapped: torch.nn.Module = object.__new__(_wrapped_class(type(module)))
    object.__setattr__(wrapped, "__dict__", module.__dict__)
    object.__setattr__(wrapped, HELD, calls)
    object.__setattr__(wrapped, REPLACED, None)
    return wrapped


def unwrap(wrapped: torch.nn.Module) -> torch.nn.Module:
    """Return the original of a wrapped module, to run in PyTorch, with the same parameters, buffers and mode.

    Raises:
        ConfigurationError: the module is not wrapped.
    """
    calls = getattr(wrapped, HELD, None)
    if calls is None:
        raise ConfigurationError(f"this {type(wrapped).__name__} is not wrapped: use it as it is")
    module: torch.nn.Module = calls.module
    return module


_classes: dict[type[torch.nn.Module], type[torch.nn.Module]] = {}


def _wrapped_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return the class of wrapped modules, one for each original class."""
    return _classes.get(cls) or _classes.setdefault(cls, _derived(cls))


class _Forward:
    """``forward`` of a wrapped module: calls the graphs unless another function is assigned."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __get__(self, module: torch.nn.Module | None, cls: type | None = None) -> Any:
        if module is None:
            return self._function
        return getattr(module, REPLACED) or MethodType(self._function, module)

    def __set__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        object.__setattr__(module, REPLACED, forward)

    def __delete__(self, module: torch.nn.Module) -> None:
        if getattr(module, REPLACED) is None:
            raise AttributeError("forward")  # as for a module without its own forward
        object.__setattr__(module, REPLACED, None)


def _derived(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return a class whose ``forward`` calls the graphs, which are in a slot instead of a shared attribute.

    It has the name of the original class: transformers chooses losses by the name, and saves it with the weights.
    """

    @functools.wraps(cls.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting() or torch._C._is_tracing():
            return cls.forward(self, *args, **kwargs)
        return getattr(self, HELD).call(args, kwargs)

    # Code that follows ``__wrapped__`` to undecorated functions, such as accelerate, must stop here.
    del forward.__wrapped__
    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]

    def extra_repr(self: torch.nn.Module) -> str:
        return ", ".join(filter(None, (cls.extra_repr(self), "computed by burnish")))

    def deep_copy(self: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        calls: Calls | PartialCalls = getattr(self, HELD)
        module = copy.deepcopy(calls.module, memo)
        memo[id(self)] = copied = _with_calls(module, calls.copied(module))
        return copied

    def reduce(self: torch.nn.Module, protocol: int) -> tuple[Any, ...]:
        calls: Calls | PartialCalls = getattr(self, HELD)
        return _wrap_again, (calls.module, *calls.made_again())

    namespace = {
        "__slots__": (HELD, REPLACED),
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__deepcopy__": deep_copy,
        "__reduce_ex__": reduce,
        "extra_repr": extra_repr,
        "forward": _Forward(forward),
    }
    return type(cls.__name__, (cls,), namespace)


def _wrap_again(module: torch.nn.Module, *settings: Any) -> torch.nn.Module:
    return _with_calls(module, _calls(module, *settings))
