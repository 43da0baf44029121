"""The arguments that a module is called with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return examples as positional and keyword arguments: from a tuple or list, a dictionary by name, or a single argument."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def examples_like(module: torch.nn.Module, examples: Arguments, call: Arguments) -> Arguments:
    """Return examples with the structure of a call, filled in from the call if there is no example of a parameter.

    Open axes are traced with the extents of the examples; a call may have an extent that takes another branch, such as the
    longest.

    Args:
        module: the module that is called.
        examples: other arguments, by position and by name.
        call: the arguments of the call.
    """
    names = list(inspect.signature(module.forward).parameters)
    known = dict(zip(names, examples[0], strict=False)) | examples[1]
    wanted, present = _batch(examples), _batch(call)

    def resized(leaf: Any) -> Any:
        is_batch = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == present
        return leaf.detach()[torch.arange(wanted or 0, device=leaf.device) % leaf.shape[0]] if is_batch else leaf

    def example(name: str, value: Any) -> Any:
        return known[name] if name in known and _kind(known[name]) == _kind(value) else pytree.tree_map(resized, value)

    by_position = tuple(example(name, value) for name, value in zip(names, call[0], strict=False))
    rest = call[0][len(by_position) :]
    by_name = {name: example(name, value) for name, value in call[1].items()}
    return (*by_position, *pytree.tree_map(resized, rest)), by_name


def _batch(call: Arguments) -> int | None:
    extents = (leaf.shape[0] for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0)
    return next(extents, None)


def _kind(value: Any) -> Any:
    """Return the structure of a value, the dtypes and ranks of its tensors, and the other leaves."""
    leaves, spec = pytree.tree_flatten(value)
    return spec, [(leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else (type(leaf), repr(leaf)) for leaf in leaves]
