"""What an optimizer may know of the parameters beside their values: what each is for, found from the graph, never from names."""

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
    """What a parameter is for, told by the operator that it meets data in, and by which of its inputs."""

    WEIGHT = "weight"  # multiplied and summed: of a convolution, a matrix product, a recurrent layer
    BIAS = "bias"  # added per channel, or the slope of an activation
    NORMALIZATION = "normalization"  # scale or bias of a normalization layer, or any scale per channel
    EMBEDDING = "embedding"  # rows that are looked up, positions that are added, tokens that are put in


@dataclass(frozen=True)
class ParameterInfo:
    """What is known of a parameter from the graph.

    Attributes:
        name: initializer name.
        shape: its extents.
        dtype: its element type.
        kind: what it is for.
        depth: how many layers with weights lie on the longest way from the model's inputs to the operator that reads it, that
            one included: 1 for the first layer; a bias or scale has the depth of the layer before it.
        input_axes: for a weight, the axes that an output sums over; empty where there are none.
        masked: whether a mask makes zeros of a part of it. What a ``fixed`` one masks is zero itself; of another, the gradient
            alone tells.
    """

    name: str
    shape: tuple[int, ...]
    dtype: ir.DataType
    kind: ParameterKind = ParameterKind.WEIGHT
    depth: int = 0
    input_axes: tuple[int, ...] = ()
    masked: Masked = "no"


Infos = Mapping[str, ParameterInfo]
"""Initializer name -> what is known of it, for every parameter that has a gradient."""

NO_WEIGHTS = "biases, normalization and other numbers for each channel as they are, and there are no others"
"""Why an option that is for weights changes nothing."""
WILDCARDS = frozenset("*?[")
"""What makes a pattern match more than the name that it is."""
T = TypeVar("T")


@runtime_checkable
class NeedsInfos(Protocol):
    """An optimizer, or a gradient transform, that has to know the parameters before it can be used."""

    def bind(self, infos: Infos) -> object:
        """Return the same with the parameters known; raise ConfigurationError where its patterns do not fit them."""
        ...


@runtime_checkable
class MayDoNothing(Protocol):
    """An optimizer, or a gradient transform, with options that may be for none of the parameters that train."""

    def without_effect(self, names: Collection[str]) -> list[str]:
        """Return which options change nothing, and why, as sentences; it is bound, and these parameters train."""
        ...


def bind(wanting: T, infos: Infos) -> T:
    """Tell an optimizer or a gradient transform what the parameters are; ``burnish.compile`` does so.

    Args:
        wanting: an optimizer or transform; one that needs nothing is returned as it is.
        infos: every parameter that has a gradient.

    Raises:
        ConfigurationError: a pattern that matches none of them, or a setting that does not fit.
    """
    return wanting.bind(infos) if isinstance(wanting, NeedsInfos) else wanting  # type: ignore[return-value]


@runtime_checkable
class HoldsParameters(Protocol):
    """An optimizer that leaves some parameters as they are."""

    @property
    def frozen(self) -> frozenset[str]:
        """Names of the parameters that are not updated; known once bound."""
        ...


def frozen_parameters(optimizer: object) -> frozenset[str]:
    """Return the names of the parameters that a bound optimizer does not update."""
    return optimizer.frozen if isinstance(optimizer, HoldsParameters) else frozenset()


def matching(pattern: str, names: Collection[str]) -> tuple[str, ...]:
    """Return the names that a shell-style pattern matches, or that it is."""
    return tuple(name for name in names if matches_pattern(name, pattern))


class LastMatch:
    """Tells which of many patterns is the last that matches a name, without trying those that are names themselves.

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
        """Return the index of the last pattern that matches a name; None where none does."""
        last = self._names.get(name)
        matches = (index for index, pattern in reversed(self._patterns) if fnmatchcase(name, pattern))
        return max((index for index in (last, next(matches, None)) if index is not None), default=None)


def check_matches(owner: str, pattern: str, names: Collection[str]) -> None:
    """Raise ConfigurationError, with what comes near, for a pattern that matches none of the parameters."""
    if pattern in names or matching(pattern, names):
        return
    raise ConfigurationError(
        f"{owner}: the pattern '{pattern}' matches no parameter that trains; did you mean {nearest(pattern, names)}? "
        "`burnish inspect` lists them all"
    )


def decays(owner: str, name: str, infos: Infos | None) -> bool:
    """Whether weight decay ``on weights`` acts on a parameter: on all but biases and the parameters of normalization.

    Raises:
        ConfigurationError: it is not known what the parameter is.
    """
    if infos is None or name not in infos:
        raise ConfigurationError(
            f"{owner}: what '{name}' is for is not known, and decay on 'weights' goes by that: call burnish.optim.bind with what "
            "each parameter is, as burnish.compile does, or choose by pattern"
        )
    return infos[name].kind not in (ParameterKind.BIAS, ParameterKind.NORMALIZATION)
