"""Facts about parameters for optimizers, such as their role, found from the graph and never from names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Literal, Protocol, TypeVar, runtime_checkable

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.settings import matches_pattern, nearest

Masked = Literal["no", "fixed", "changing"]


class ParameterKind(StrEnum):
    """The role of a parameter, determined by the operator that combines it with data, and the operator's input."""

    WEIGHT = "weight"  # multiplied and summed, in a convolution, matrix product or recurrent layer
    BIAS = "bias"  # added per channel, or the slope of an activation
    NORMALIZATION = "normalization"  # scale or bias of a normalization layer, or any scale per channel
    EMBEDDING = "embedding"  # rows to look up, positions to add, tokens to insert


@dataclass(frozen=True)
class ParameterInfo:
    """Facts about a parameter, found from the graph.

    Attributes:
        name: initializer name.
        shape: extents.
        dtype: element type.
        kind: role of the parameter.
        depth: number of layers with weights on the longest path from the model's inputs to the operator that reads it, including
            that layer: 1 for the first layer. A bias or scale has the depth of the layer before it.
        input_axes: for a weight, the axes that an output sums over; empty if there are none.
        masked: kind of mask that zeroes a part of it. A part masked by a ``fixed`` mask is zero itself; with ``changing`` only
            its gradient is zero.
    """

    name: str
    shape: tuple[int, ...]
    dtype: ir.DataType
    kind: ParameterKind = ParameterKind.WEIGHT
    depth: int = 0
    input_axes: tuple[int, ...] = ()
    masked: Masked = "no"


Infos = Mapping[str, ParameterInfo]
"""Initializer name -> facts about it, for every parameter with a gradient."""

NO_WEIGHTS = "biases, normalization and other numbers for each channel as they are, and there are no others"
"""Why an option for weights changes nothing."""
WILDCARDS = frozenset("*?[")
"""Characters that make a pattern more than a name."""
T = TypeVar("T")


@runtime_checkable
class NeedsInfos(Protocol):
    """An optimizer or gradient transform that needs facts about the parameters before use."""

    def bind(self, infos: Infos) -> object:
        """Return a copy bound to the parameters; raise ConfigurationError if its patterns do not fit them."""
        ...


@runtime_checkable
class MayDoNothing(Protocol):
    """An optimizer or gradient transform with options that may affect none of the trained parameters."""

    def without_effect(self, names: Collection[str]) -> list[str]:
        """Return the options without an effect on the trained parameters, and why, as sentences; needs a bound object."""
        ...


def bind(wanting: T, infos: Infos) -> T:
    """Bind an optimizer or a gradient transform to the parameters, as ``burnish.compile`` does.

    Args:
        wanting: an optimizer or transform; it is returned unchanged if it needs no facts.
        infos: every parameter with a gradient.

    Raises:
        ConfigurationError: a pattern matches no parameter, or a setting does not fit.
    """
    return wanting.bind(infos) if isinstance(wanting, NeedsInfos) else wanting  # type: ignore[return-value]


@runtime_checkable
class HoldsParameters(Protocol):
    """An optimizer that does not update some parameters."""

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that are not updated; known once bound."""
        ...


def frozen_parameters(optimizer: object) -> frozenset[str]:
    """Return the names of the parameters that a bound optimizer does not update."""
    return optimizer.frozen if isinstance(optimizer, HoldsParameters) else frozenset()


def matching(pattern: str, names: Collection[str]) -> tuple[str, ...]:
    """Return the names that equal a shell-style pattern or match it."""
    return tuple(name for name in names if matches_pattern(name, pattern))


class LastMatch:
    """Finds the last of many patterns that matches a name, with a lookup for plain names.

    Args:
        patterns: names, or shell-style patterns.
    """

    def __init__(self, patterns: Iterable[str]):
        self._names: dict[str, int] = {}
        self._patterns: list[tuple[int, str]] = []
        for index, pattern in enumerate(patterns):
            self._names[pattern] = index
            if not WILDCARDS.isdisjoint(pattern):
                self._patterns.append((index, pattern))

    def __call__(self, name: str) -> int | None:
        """Return the index of the last pattern that matches a name, or None."""
        last = self._names.get(name)
        matches = (index for index, pattern in reversed(self._patterns) if fnmatchcase(name, pattern))
        return max((index for index in (last, next(matches, None)) if index is not None), default=None)


def check_matches(owner: str, pattern: str, names: Collection[str]) -> None:
    """Raise ConfigurationError, with similar names, for a pattern that matches no parameter."""
    if pattern in names or matching(pattern, names):
        return
    raise ConfigurationError(
        f"{owner}: the pattern '{pattern}' matches no parameter that trains; did you mean {nearest(pattern, names)}? "
        "`burnish inspect` lists them all"
    )


def decays(owner: str, name: str, infos: Infos | None) -> bool:
    """True if weight decay ``on weights`` affects a parameter: all but biases and normalization parameters.

    Raises:
        ConfigurationError: the parameter's role is unknown.
    """
    if infos is None or name not in infos:
        raise ConfigurationError(
            f"{owner}: what '{name}' is for is not known, and decay on 'weights' goes by that: call burnish.optim.bind with what "
            "each parameter is, as burnish.compile does, or choose by pattern"
        )
    return infos[name].kind not in (ParameterKind.BIAS, ParameterKind.NORMALIZATION)
