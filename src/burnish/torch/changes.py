"""Detection of changes to a module that its graphs depend on, other than the values of parameters and buffers.

A graph holds attributes of the module and its parts as constants: a slope, a probability, a momentum. If a user sets one, the
next call must use it. Each call therefore compares the parts' dictionaries, in C and by identity first, which takes a fraction of
a microsecond per part. It also compares lists and configuration objects among the attributes that hold only numbers and words,
and the ones that methods of classes outside PyTorch read: class attributes and variables of the enclosing scope.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch

from burnish.errors import HooksWarning
from burnish.importer.pytorch.python_state import OWN, is_same
from burnish.warn import warn

TRAINING = "training"
OF_SHARDING = ("_fsdp", "_is_fsdp", "__composable_api")
"""Prefixes of the attributes that ``fully_shard`` sets on modules."""


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

OF_ALL = [
    getattr(torch.nn.modules.module, f"_global_{name}")
    for name in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
]
"""The hooks that PyTorch calls with every module."""

PLAIN = (bool, int, float, str, type(None), torch.dtype)


class Place(NamedTuple):
    part: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.part}.{self.attribute}" if self.part else self.attribute


class Noted:
    """A snapshot of a module, to compare with later.

    Args:
        module: the module.

    Attributes:
        modes: ``training`` of the module and all its parts.
    """

    def __init__(self, module: torch.nn.Module):
        parts = dict(module.named_modules())
        self._names = list(parts)
        self._tensors = [part._parameters.keys() | part._buffers.keys() for part in parts.values()]
        self._attributes = [(part.__dict__, dict(part.__dict__)) for part in parts.values()]
        self._children = [(part._modules, dict(part._modules)) for part in parts.values() if part._modules]
        self.modes = tuple([part.training for part in parts.values()])
        hooks = [getattr(part, name) for part in [*parts.values()][1:] for name in HOOKS]
        self._unhooked = [each for each in (*hooks, *OF_ALL) if not each]
        self._hooked = [(each, dict(each)) for each in (*hooks, *OF_ALL) if each]
        self._variables: list[tuple[Place, Any, Any]] = [
            (Place(name, attribute), value, copy.copy(value)) for name, part in parts.items() for attribute, value in _held(part)
        ]
        for cls in set(map(type, parts.values())):
            self._variables.extend((place, variable, copy.copy(variable.value)) for place, variable in _read_by(cls))
        self._absent: list[tuple[Mapping[str, Any], str]] = []
        held: dict[int, tuple[Mapping[str, Any], str]] = {}
        self._tied: list[tuple[Mapping[str, Any], str, Mapping[str, Any], str]] = []
        for part in parts.values():
            for tensors in (part._parameters, part._buffers):
                for name, tensor in tensors.items():
                    if tensor is None:
                        self._absent.append((tensors, name))
                    elif id(tensor) in held:
                        self._tied.append((tensors, name, *held[id(tensor)]))
                    else:
                        held[id(tensor)] = tensors, name

    def is_current(self) -> bool:
        try:
            for now, before in self._attributes:
                if now != before:
                    return False
            for _, now, before in self._variables:
                if now != before:
                    return False
        except Exception:
            return False  # comparisons of tensors and arrays have no single truth value
        return not self.is_hooked_otherwise() and not self.is_built_otherwise()

    def is_hooked_otherwise(self) -> bool:
        """True if parts gained or lost hooks."""
        return any(self._unhooked) or any(now != before for now, before in self._hooked)

    def is_built_otherwise(self) -> bool:
        """True if parts were replaced, added or removed, missing tensors were set, or shared tensors separated."""
        for now, before in self._children:
            if now != before:
                return True
        for tensors, name in self._absent:
            if tensors.get(name) is not None:
                return True
        return any(tensors.get(name) is not others.get(other) for tensors, name, others, other in self._tied)

    def changed(self) -> list[Place]:
        """Return the changed attributes, except modes and sharding."""
        places = []
        for name, (now, before), tensors in zip(self._names, self._attributes, self._tensors, strict=True):
            # While ``fully_shard`` has a parameter gathered, it is a plain attribute.
            for attribute in (now.keys() | before.keys()) - tensors - {TRAINING}:
                is_unchanged = is_same(now.get(attribute, _MISSING), before.get(attribute, _MISSING))
                if not is_unchanged and not attribute.startswith(OF_SHARDING):
                    places.append(Place(name, attribute))
        places.extend(place for place, now, before in self._variables if now != before)
        return sorted(places)


_MISSING = object()


class _Variable:
    """A variable that a method reads; it equals an object of the same type and value."""

    def __init__(self, holder: Mapping[str, Any] | CellType, name: str):
        self._holder = holder
        self._name = name

    @property
    def value(self) -> Any:
        holder = self._holder
        try:
            return holder.cell_contents if isinstance(holder, CellType) else holder.get(self._name)
        except ValueError:
            return _MISSING  # an empty cell

    def __eq__(self, other: object) -> bool:
        value = self.value
        return value is other or (type(value) is type(other) and value == other)

    __hash__ = None  # type: ignore[assignment]


def _held(part: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the lists and objects among a part's attributes that hold only numbers and words, which graphs hold as constants."""
    for name, value in part.__dict__.items():
        if name in OWN or name.startswith("_"):
            continue
        held = value if isinstance(value, list | dict | set) else getattr(value, "__dict__", None)
        if isinstance(value, type | torch.nn.Module | torch.Tensor | FunctionType) or not isinstance(held, list | dict | set):
            continue
        if _is_plain(held):
            yield name, held


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        value = value.values()
    return all(isinstance(each, PLAIN) or (isinstance(each, tuple) and _is_plain(each)) for each in value)


@functools.cache
def _read_by(cls: type) -> tuple[tuple[Place, _Variable], ...]:
    """Return the numbers and words that methods of a class outside PyTorch read, other than attributes of the module."""
    variables: list[tuple[Place, _Variable]] = []
    for base in (base for base in cls.__mro__ if not base.__module__.startswith(("torch.", "burnish.", "builtins"))):
        attributes: Mapping[str, Any] = vars(base)
        holders: list[tuple[str, Mapping[str, Any] | CellType]] = [
            (name, attributes) for name in attributes if not name.startswith("__")
        ]
        for function in (each for each in attributes.values() if isinstance(each, FunctionType)):
            holders.extend((name, function.__globals__) for name in inspect.getclosurevars(function).globals)
            holders.extend(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, holder in holders:
            value = (variable := _Variable(holder, name)).value
            if isinstance(value, PLAIN) or (isinstance(value, list | dict | set) and _is_plain(value)):
                variables.append((Place(base.__name__, name), variable))
    return tuple(variables)


def warn_of_hooks(module: torch.nn.Module) -> None:
    """Warn about hooks that a graph does not call."""
    hooked = [name for name, part in module.named_modules() if name and any(getattr(part, hooks, None) for hooks in HOOKS)]
    if any(OF_ALL):
        hooked.append("those of all modules")
    if hooked:
        shown = ", ".join(f"'{name}'" for name in hooked[:5]) + (f" and {len(hooked) - 5} more" if len(hooked) > 5 else "")
        warn(
            HooksWarning(
                f"submodules have hooks: {shown}. They run while the module is exported, and what they do to its values is in "
                "the graph; they are not called after that. Remove them, or wrap a part of the module that they lie outside of"
            )
        )
