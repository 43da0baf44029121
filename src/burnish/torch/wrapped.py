"""A PyTorch module whose forward and backward are graphs that burnish's engine runs; all else of it stays as it is."""

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
"""The slot in which a wrapped module holds what calls its graphs, apart from the attributes that it shares."""

REPLACED = "_burnish_forward"
"""The slot of what was assigned to ``forward`` of a wrapped module, as accelerate does: the module that it shares attributes with
would be called by it too. None where nothing was."""


def wrap(
    module: torch.nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor,
    *,
    dynamic_shapes: Any = None,
    partial: bool = False,
    verify: bool = True,
    engine: TorchEngine | None = None,
) -> torch.nn.Module:
    """Return a module that computes by burnish's graphs, and that is in all else the module.

    What is returned is of a class derived from the module's, and shares all its attributes: parameters and buffers are the same
    objects, and ``train()`` and ``eval()`` of the one are those of the other. Its ``forward`` is one function to autograd.
    PyTorch's optimizers, losses and schedulers, clipping, ``DistributedDataParallel``, and hooks of the module as a whole and of
    its parameters do with it what they do with any module.

    - A module is exported when it is wrapped, and again where some of its submodules change their mode alone, where its dtype
      changes, or where submodules are replaced.
    - Batch normalization writes to the module's running statistics and counts batches. What else ``forward`` writes to buffers is
      written there. Dropout draws from PyTorch's generator.
    - Kernels of convolutions get their channels last in memory, as by ``module.to(memory_format=torch.channels_last)``; so do
      images that ``forward`` returns.
    - Under ``torch.autocast`` products are computed in its dtype; outputs keep theirs.
    - Only gradients of what requires them are computed, and they can be differentiated again.
    - Submodules are not called: what their hooks did while the module was exported is in the graph, and nothing else of them.

    Args:
        module: the module.
        example_inputs: what ``forward`` is called with: a tuple or list of its arguments, a dictionary of those by name, or the
            only one. Calls have arguments of the same structure; what is no tensor in them has the same value.
        dynamic_shapes: which axes of the inputs are open, as ``torch.export.export`` takes it. None: the first, of all inputs
            that have as many samples there as the first input.
        partial: let burnish compute what it can, and PyTorch the rest: operators of others, functions with a backward of their
            own, control flow that depends on data. ``torch.compile(backend="burnish")`` captures the module then, when it is
            called, and ``burnish.torch.explain`` reports what runs where. ``dynamic_shapes`` has no part in that.
        verify: compare each graph with the module when it is made, on the examples and on others: what both return, and their
            gradients. False skips that.
        engine: what runs it; by default ``TorchEngine()``.

    Warns:
        HooksWarning: a submodule has hooks.
        AttributesWarning: ``forward`` sets attributes of the module, which its graph does not.

    Raises:
        UnsupportedOperatorError: the module cannot be exported, or its graph computes something else: the line and the part are
            named.
        GradientError: at a call: an operator between what requires a gradient and an output has none.
        ConfigurationError: the module is wrapped already, or has a ``forward`` of its own that is not its class's; at a call:
            arguments of another structure or dtype.
        InputError: at a call: one value for each channel of a batch normalization in training; or arguments of too many extents
            that the module has a graph each for.
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
    """The kernels of two-dimensional convolutions that nothing but PyTorch's own ``forward`` reads.

    Other code may take views of a parameter that its memory has to lie in order for, as layers do that standardize their weight.
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
    """A module with the attributes of another, whose forward goes through the calls."""
    wrapped: torch.nn.Module = object.__new__(_wrapped_class(type(module)))
    object.__setattr__(wrapped, "__dict__", module.__dict__)
    object.__setattr__(wrapped, HELD, calls)
    object.__setattr__(wrapped, REPLACED, None)
    return wrapped


def unwrap(wrapped: torch.nn.Module) -> torch.nn.Module:
    """Return the module that was wrapped, which PyTorch computes: with the same parameters, buffers and mode.

    Raises:
        ConfigurationError: it is not wrapped.
    """
    calls = getattr(wrapped, HELD, None)
    if calls is None:
        raise ConfigurationError(f"this {type(wrapped).__name__} is not wrapped: use it as it is")
    module: torch.nn.Module = calls.module
    return module


_classes: dict[type[torch.nn.Module], type[torch.nn.Module]] = {}


def _wrapped_class(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The class of wrapped modules of a class, the same at each call."""
    return _classes.get(cls) or _classes.setdefault(cls, _derived(cls))


class _Forward:
    """``forward`` of a wrapped module: calls the graphs, until something else is assigned to it."""

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
            raise AttributeError("forward")  # as of a module with the forward of its class
        object.__setattr__(module, REPLACED, None)


def _derived(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A class whose ``forward`` calls the graphs; what does is in a slot, and not among the attributes that are shared.

    It has the name of the other: transformers choose losses by it, and write it beside the weights.
    """

    @functools.wraps(cls.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting() or torch._C._is_tracing():
            return cls.forward(self, *args, **kwargs)
        return getattr(self, HELD).call(args, kwargs)

    # What goes by ``__wrapped__`` to the function below decorators, as accelerate does, is to end here.
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
    """What a pickled module is made of again; there is nothing of a graph in a pickle."""
    return _with_calls(module, _calls(module, *settings))
