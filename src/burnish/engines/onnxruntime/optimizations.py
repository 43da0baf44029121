"""Limit ONNX Runtime's graph rewrites at loading, and recover graphs that they broke.

A wrong rewrite makes a graph fail, at loading or for some shapes, or changes its results. A graph that fails is run once without
optimizations; if it then runs, it is reopened permanently with fewer, down to none. Optimizers that are known to change results
are disabled from the start, and ``OnnxRuntimeEngine(verify=True)`` compares the first run of each graph with one without
optimizations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import onnx_ir as ir
import onnxruntime

from burnish.engines.onnxruntime.exchanges import Exchanges
from burnish.engines.onnxruntime.failures import description, is_out_of_memory
from burnish.rewriting.complete_axes import names_axes
from burnish.warn import warn

Level = Literal["none", "basic", "extended", "all"]
Result = TypeVar("Result")

TRANSPOSE_OPTIMIZERS = ("TransposeOptimizer", "TransposeOptimizer_CPUExecutionProvider")
"""The first name applies from the level ``basic`` on, the second from ``extended`` on."""

ROUNDING = 1e-2
"""The largest difference between two orders of float32 computation, relative to an output's norm."""
NOTHING_BESIDE = 1e-5
"""The size of rounding errors, relative to the largest norm of all outputs."""


class OptimizationWarning(UserWarning):
    """ONNX Runtime's optimizations broke a correct graph; it was reopened with fewer of them."""


@dataclass(frozen=True)
class Optimizations:
    """A limit on ONNX Runtime's graph rewrites.

    Attributes:
        level: optimization level.
        disabled: names of disabled optimizers of this level.
    """

    level: Level
    disabled: tuple[str, ...] = ()

    @classmethod
    def of(cls, level: Level, model: ir.Model) -> Optimizations:
        """Return the level without the optimizers that could change the results of this model."""
        return cls(level, TRANSPOSE_OPTIMIZERS) if level != "none" and is_transposed_wrong(model) else cls(level)

    def fewer(self) -> tuple[Optimizations, ...]:
        """The limits to try in turn if a graph fails: each with fewer optimizations, the last with none."""
        if self.level == "none":
            return ()
        tried = [Optimizations(self.level, TRANSPOSE_OPTIMIZERS), Optimizations("basic", TRANSPOSE_OPTIMIZERS)]
        return (*dict.fromkeys(item for item in tried if item != self), Optimizations("none"))

    def __str__(self) -> str:
        if self.level == "none":
            return "without optimizations"
        return f"with optimization={self.level!r}" + (f" but without {' and '.join(self.disabled)}" if self.disabled else "")


def is_transposed_wrong(model: ir.Model) -> bool:
    """True if a model has a node that ONNX Runtime's transpose optimizer (1.32) handles wrongly.

    It ignores the axes of a ``Pad`` or ``Resize`` (see ``rewriting.complete_axes``), and the blocks of quantization, whose scales
    it does not permute.
    """
    nodes = (*model.graph.all_nodes(), *(node for function in model.functions.values() for node in function.all_nodes()))
    return any(names_axes(node) or _quantizes_in_blocks(node) for node in nodes)


def _quantizes_in_blocks(node: ir.Node) -> bool:
    return node.op_type in ("QuantizeLinear", "DequantizeLinear") and "block_size" in node.attributes


def first_that_parts(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> str | None:
    """Return the first floating-point output that differs by more than rounding; None if all match.

    Rounding is a hundredth of an output's norm, or a tiny part of the largest norm: a gradient that is zero in exact arithmetic
    consists of rounding errors only.
    """
    norms = {name: _norm(array) for name, array in expected.items() if array.dtype.kind == "f"}
    nothing = NOTHING_BESIDE * max((norm for norm in norms.values() if np.isfinite(norm)), default=0.0)
    for name, norm in norms.items():
        if actual[name].shape != expected[name].shape:
            return name
        with np.errstate(invalid="ignore"):
            apart = np.where(_same(actual[name], expected[name]), 0, actual[name].astype(np.float64) - expected[name])
        if not _norm(apart) <= ROUNDING * (norm if np.isfinite(norm) else 0.0) + nothing:
            return name
    return None


def _same(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one == other) | (np.isnan(one) & np.isnan(other))


def _norm(array: np.ndarray) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))


class OpenedGraph:
    """A graph in an ONNX Runtime session with as many optimizations as possible.

    Args:
        name: name of the graph, for messages.
        model: the graph as it is loaded.
        optimizations: limit for the first session.
        load: a function that makes the session; None stands for the first limit.
        verifies: True if ``verify`` checks the results of the session.

    Attributes:
        model: the graph before ONNX Runtime rewrites it.
        session: the session.
        reopened: position in the list ``Optimizations.fewer``; 0 for the first session.
        exchanges: exchanges with other workers inside the graph. A graph with exchanges is not run again after a failure, because
            the other workers would not run theirs.

    Raises:
        Exception: the error of ``load``, if it also fails without optimizations.
    """

    def __init__(
        self,
        name: str,
        model: ir.Model,
        optimizations: Optimizations,
        load: Callable[[Optimizations | None], onnxruntime.InferenceSession],
        verifies: bool = False,
    ):
        self._name = name
        self.model = model
        self._load = load
        self._fewer = optimizations.fewer()
        self._is_unverified = verifies
        self.reopened = 0
        self.exchanges: Exchanges | None = None
        try:
            self.session = load(None)
        except Exception as error:
            self.run_with_fewer(lambda session: session, error)

    def run(self, attempt: Callable[[onnxruntime.InferenceSession], Result]) -> Result:
        """Return the result of ``attempt`` on the session; if only optimizations make it fail, change the session and retry.

        Args:
            attempt: a function that runs the graph; a second call does the same as the first.

        Raises:
            Exception: the error of ``attempt``, if it also fails without optimizations; the session is then unchanged.
        """
        if self.exchanges is not None:
            return self.exchanges.run(lambda: attempt(self.session))
        try:
            return attempt(self.session)
        except Exception as error:
            return self.run_with_fewer(attempt, error)

    def verify(self, results: Callable[[onnxruntime.InferenceSession], Mapping[str, np.ndarray]]) -> None:
        """Compare the session's results, once, with those without optimizations; reopen it if they differ.

        Args:
            results: a function that runs the graph and returns its outputs by name; it changes nothing.
        """
        if not self._is_unverified:
            return
        try:
            actual = results(self.session)
        except Exception:  # ``run`` meets and handles it too
            return
        self._is_unverified = False
        remaining = self._fewer[self.reopened :]
        expected = results(self._load(remaining[-1])) if remaining else actual
        parting = first_that_parts(actual, expected)
        for optimizations in remaining if parting is not None else ():
            session = self._load(optimizations)
            if first_that_parts(results(session), expected) is None:
                self._take(session, optimizations)
                warn(
                    OptimizationWarning(
                        f"The {self._name} graph computes another '{parting}' as ONNX Runtime {onnxruntime.__version__} rewrites "
                        f"it. It was opened again {optimizations}, and is right so; only speed may be lost"
                    )
                )
                return

    def _take(self, session: onnxruntime.InferenceSession, optimizations: Optimizations) -> None:
        self.session = session
        self.reopened = self._fewer.index(optimizations) + 1

    def reopen(self, reopened: int) -> None:
        """Reopen the graph with as few optimizations as another worker needed; do nothing if it has no more already."""
        if reopened > self.reopened:
            self.session = self._load(self._fewer[reopened - 1])
            self.reopened = reopened

    def run_with_fewer(self, attempt: Callable[[onnxruntime.InferenceSession], Result], error: Exception) -> Result:
        """Return the result of ``attempt``, which raised this error, on a session with fewer optimizations.

        Raises:
            Exception: the error, if it also occurs without optimizations; the session is then unchanged.
        """
        remaining = self._fewer[self.reopened :]
        if not remaining or is_out_of_memory(error) or not self._succeeds(attempt, remaining[-1]):
            raise error
        for optimizations in remaining:
            try:
                session = self._load(optimizations)
                result = attempt(session)
            except Exception:
                continue
            self._take(session, optimizations)
            warn(
                OptimizationWarning(
                    f"The {self._name} graph fails as ONNX Runtime {onnxruntime.__version__} rewrites it{description(error)}, "
                    f"and runs {optimizations}: it was opened again so. The results are right; only speed may be lost"
                )
            )
            return result
        raise error

    def _succeeds(self, attempt: Callable[[onnxruntime.InferenceSession], object], optimizations: Optimizations) -> bool:
        try:
            attempt(self._load(optimizations))
        except Exception:
            return False
        return True
