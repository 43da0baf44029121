"""PyTorch's composite operators, looked for once: each of its decompositions looks through all operators several times."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._export import utils
from torch.export import decomp_utils, exported_program

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

_collect = utils._collect_all_valid_cia_ops
_override = exported_program._override_composite_implicit_decomp


@contextlib.contextmanager
def composites_known() -> Iterator[None]:
    """Let decompositions know the composite operators from before, and replace those of them alone that are to change.

    Without that these two take most of the time of an export, whatever the module.
    """
    registered = tuple(torch._C._dispatch_get_registrations_for_dispatch_key(COMPOSITE.name))
    readers: tuple[Any, ...] = (utils, decomp_utils, exported_program)
    try:
        for module in readers:
            module._collect_all_valid_cia_ops = functools.partial(_composites, registered)
        exported_program._override_composite_implicit_decomp = _replaced  # type: ignore[assignment]
        yield
    finally:
        for module in readers:
            module._collect_all_valid_cia_ops = _collect
        exported_program._override_composite_implicit_decomp = _override


@functools.lru_cache(maxsize=1)
def _composites(registered: tuple[str, ...]) -> set[Any]:
    """The composite operators while these are registered."""
    return _collect()


def _replaced(decompositions: Mapping[Any, Callable[..., Any]]) -> AbstractContextManager[None]:
    """Replace what composite operators decompose to, where that is something else than they are made of."""
    return _override({operator: function for operator, function in decompositions.items() if not _is_own(operator, function)})


def _is_own(operator: Any, function: Callable[..., Any]) -> bool:
    own = utils._get_decomp_for_cia(operator)
    both = (own, function)
    if all(isinstance(each, functools.partial) for each in both):
        return own.func.__qualname__ == function.func.__qualname__  # type: ignore[attr-defined]
    return own is function
