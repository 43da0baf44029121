"""The record that describes an operator to the generic gradient tests, and generators for its inputs.

A table module in this folder assigns ``SPECS = [OperatorSpec(...), ...]``; ``tests/operators/test_operator_gradients.py`` finds
every such module by itself and runs all generic tests over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish.errors import BurnishError, GradientError
from burnish.graph import Builder, Tensor

SHAPE_KNOWLEDGE = ("static", "batch", "symbolic", "unranked")
"""What a graph may know of its inputs' shapes: everything; all but the leading axis of the inputs in ``Sample.batched``;
only ranks (every dimension a name of its own); nothing."""


@dataclass(frozen=True)
class Sample:
    """One use of an operator.

    Attributes:
        inputs: float64 arrays (cast to the dtype under test), integer or boolean arrays, None for an optional input left out.
        attributes: attributes of the node; also keyword arguments of the PyTorch function, unless ``torch_attributes`` is given.
        name: tells samples of one operator apart in test names.
        outputs: how many outputs the node has.
        wrt: the inputs to differentiate by; None means every floating-point input.
        cotangents: the outputs that carry a cotangent; None means every floating-point output.
        constants: inputs that are initializers; None means every input that is not floating-point (axes, a shape, indices).
        batched: inputs whose leading axis is the batch, a name in the graphs of shape knowledge "batch".
        opset: the version of the standard the sample is written in, at least 18.
        newest_opset: whether the node means the same, and so is also run, at the newest opset.
        build: emits a small graph instead of a single node: ``build(builder, inputs) -> output or outputs``.
        smooth: False where differences are no oracle (a kink, infinite or huge values): compared with PyTorch only.
        torch: overrides the record's PyTorch function.
        torch_attributes: overrides the keyword arguments of the PyTorch function.
        repeated: whether other samples run the same of the same rules, so that ``make test`` leaves this one out.
        most_nodes: the most nodes besides constants that the reverse pass may emit before lowering, shapes known.
    """

    inputs: Sequence[np.ndarray | None]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    outputs: int = 1
    wrt: Sequence[int] | None = None
    cotangents: Sequence[int] | None = None
    constants: Sequence[int] | None = None
    batched: Sequence[int] = (0,)
    opset: int = 18
    newest_opset: bool = True
    build: Callable[[Builder, list[Tensor | None]], Tensor | tuple[Tensor, ...]] | None = None
    smooth: bool = True
    torch: Callable[..., Any] | None = None
    torch_attributes: Mapping[str, Any] | None = None
    repeated: bool = False
    most_nodes: int | None = None


@dataclass(frozen=True)
class ErrorInput:
    """A use that must be refused: building its gradient graph raises ``error`` with a message that matches ``match``."""

    sample: Sample
    match: str
    error: type[BurnishError] = GradientError
    shapes: str = "static"


@dataclass(frozen=True)
class OperatorSpec:
    """One operator in a table.

    Attributes:
        op_type: the operator's name in the standard domain.
        samples: makes the samples from a seeded generator.
        torch: the same function in PyTorch, ``torch(*inputs, **attributes)``; None where PyTorch has none.
        dtypes: what to run; "float16" adds a run in half precision; without "float64", for an operator that the standard or
            the runtime has in single precision only, PyTorch is the one oracle.
        shapes: the shape knowledge (see ``SHAPE_KNOWLEDGE``) under which the gradient must exist.
        tolerance: for float32 against float64 at the same point, relative to the norm, from the conditioning of the case.
        float64_tolerance: for float64 against PyTorch; 1e-7 where a float32 constant enters (an attribute's default, a function
            body in the standard).
        error_inputs: uses that must be refused.
    """

    op_type: str
    samples: Callable[[np.random.Generator], Iterable[Sample]]
    torch: Callable[..., Any] | None = None
    dtypes: Sequence[str] = ("float32", "float64")
    shapes: Sequence[str] = ("static", "batch", "symbolic")
    tolerance: float = 5e-6
    float64_tolerance: float = 1e-10
    error_inputs: Sequence[ErrorInput] = ()


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Standard normal values."""
    return rng.standard_normal(shape)


def uniform(rng: np.random.Generator, low: float, high: float, *shape: int) -> np.ndarray:
    """Values between ``low`` and ``high``: the range in which an operator is smooth and well conditioned."""
    return rng.uniform(low, high, shape)


def away_from(rng: np.random.Generator, points: Sequence[float], *shape: int, margin: float = 0.05) -> np.ndarray:
    """Normal values of scale 2 that keep ``margin`` from every kink in ``points``."""
    values = 2 * rng.standard_normal(shape)
    for _ in range(100):
        close = np.any([np.abs(values - point) < margin for point in points], axis=0)
        if not np.any(close):
            break
        values = np.where(close, 2 * rng.standard_normal(shape), values)
    return values


def distinct(rng: np.random.Generator, *shape: int, gap: float = 0.1) -> np.ndarray:
    """Signed values that all differ by at least ``gap``, in random order: for maxima, sorting, top-k."""
    count = int(np.prod(shape))
    return ((rng.permutation(count) - count / 2 + 0.25) * gap).reshape(shape)
