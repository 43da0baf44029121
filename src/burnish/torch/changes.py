"""What of a module its graphs depend on beside the values of parameters and buffers, and whether it has changed since.

A graph has attributes of the module and its parts as constants: a slope, a probability, a momentum. Who sets one afterwards
means the next call. Dictionaries are compared at each call, in C and by identity first, which takes a fraction of a microsecond
for each part. What is changed within a list or a configuration object is not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

TRAINING = "training"
OF_SHARDING = ("_fsdp", "_is_fsdp", "__composable_api")
"""What names of attributes begin with that ``fully_shard`` sets on modules."""


class Place(NamedTuple):
    """An attribute of a part."""

    part: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.part}.{self.attribute}" if self.part else self.attribute


class Noted:
    """A module as it was.

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
        """Whether nothing has changed, modes included."""
        try:
            for now, before in self._attributes:
                if now != before:
                    return False
        except Exception:
            return False  # tensors and arrays do not say that they are equal
        return not self.is_built_otherwise()

    def is_built_otherwise(self) -> bool:
        """Whether parts were replaced, added or removed, tensors given where there were none, or shared ones parted."""
        for now, before in self._children:
            if now != before:
                return True
        for tensors, name in self._absent:
            if tensors.get(name) is not None:
                return True
        return any(tensors.get(name) is not others.get(other) for tensors, name, others, other in self._tied)

    def changed(self) -> list[Place]:
        """The attributes that are others than they were, but for modes and what is sharded."""
        places = []
        for name, (now, before), tensors in zip(self._names, self._attributes, self._tensors, strict=True):
            # A parameter is an attribute while ``fully_shard`` has it put together.
            for attribute in (now.keys() | before.keys()) - tensors - {TRAINING}:
                is_same = _is_same(now.get(attribute, _MISSING), before.get(attribute, _MISSING))
                if not is_same and not attribute.startswith(OF_SHARDING):
                    places.append(Place(name, attribute))
        return sorted(places)


_MISSING = object()


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    try:
        return type(value) is type(other) and bool(value == other)
    except Exception:
        return False
