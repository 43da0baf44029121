"""The shape of a parameter, for updates that depend on it: a program declares it, as a parameter starts as an array."""

from __future__ import annotations

from burnish.graph import Tensor, static_shape


def known_rank(parameter: Tensor) -> int:
    """Return the number of dimensions of a parameter."""
    if parameter.rank is None:
        raise AssertionError(f"parameter '{parameter.name}' has no rank; a program declares the shape of every parameter")
    return parameter.rank


def known_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the extents of a parameter."""
    shape = static_shape(parameter.value)
    if shape is None:
        raise AssertionError(
            f"parameter '{parameter.name}' has an unknown extent; a program declares the shape of every parameter"
        )
    return shape
