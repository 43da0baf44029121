"""What ONNX Runtime may rewrite in a graph when it loads it, and how a graph goes on that it has rewritten wrong.

An optimizer of ONNX Runtime that takes one graph for another makes it fail, at loading or where a shape leads there, or makes it
compute something else. Against the first, a graph that fails is run once without any optimization. Where it runs then, it is
opened again with less, down to none, for good; where it fails again, the fault is not ONNX Runtime's, and the graph stays as it
is. Against the second, which nothing reports, the optimizers that are known for it are left out from the start, and
``OnnxRuntimeEngine(verify=True)`` compares the first run of each graph with one without optimizations.
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
"""Under one name from the level ``basic`` on, under the other one once more from ``extended`` on."""

ROUNDING = 1e-2
"""How far two orders of computing in float32 may part, relative to an output's norm."""
NOTHING_BESIDE = 1e-5
"""What is nothing but rounding, relative to the largest norm of all outputs."""


class OptimizationWarning(UserWarning):
    """ONNX Runtime's optimizations made a right graph fail; it was opened again with fewer of them."""


@dataclass(frozen=True)
class Optimizations:
    """How far ONNX Runtime may rewrite a graph.

    Attributes:
        level: its optimization level.
        disabled: the names of optimizers of this level that it goes without.
    """

    level: Level
    disabled: tuple[str, ...] = ()

    @classmethod
    def of(cls, level: Level, model: ir.Model) -> Optimizations:
        """The level, without optimizers that could turn this model into one that computes something else."""
        return cls(level, TRANSPOSE_OPTIMIZERS) if level != "none" and is_transposed_wrong(model) else cls(level)

    def fewer(self) -> tuple[Optimizations, ...]:
        """What to try in turn where a graph fails with these: each with fewer than the one before, the last without any."""
        if self.level == "none":
            return ()
        tried = [Optimizations(self.level, TRANSPOSE_OPTIMIZERS), Optimizations("basic", TRANSPOSE_OPTIMIZERS)]
        return (*dict.fromkeys(item for item in tried if item != self), Optimizations("none"))

    def __str__(self) -> str:
        if self.level == "none":
            return "without optimizations"
        return f"with optimization={self.level!r}" + (f" but without {' and '.join(self.disabled)}" if self.disabled else "")


def is_transposed_wrong(model: ir.Model) -> bool:
    """Whether a model has a node that the transpose optimizer of ONNX Runtime (1.32) moves transpositions across wrongly.

    It takes no notice of the axes that a ``Pad`` or a ``Resize`` names (see ``rewriting.complete_axes``), nor of the blocks of
    quantization, whose scales it does not permute.
    """
    nodes = (*model.graph.all_nodes(), *(node for function in model.functions.values() for node in function.all_nodes()))
    return any(names_axes(node) or _quantizes_in_blocks(node) for node in nodes)


def _quantizes_in_blocks(node: ir.Node) -> bool:
    return node.op_type in ("QuantizeLinear", "DequantizeLinear") and "block_size" in node.attributes


def first_that_parts(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> str | None:
    """Return the first output of floating-point numbers that differs by more than rounding; None where all agree.

    Rounding is a hundredth of an output's norm, or what is nothing beside the largest norm of all: a gradient that is zero in
    exact arithmetic is nothing but rounding.
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
    """A graph in an ONNX Runtime session with as many optimizations as it runs with.

    Args:
        name: of the graph, for messages.
        model: the graph as it is loaded.
        optimizations: what it is opened with first.
        load: makes the session; None stands for the first.
        verifies: whether ``verify`` is to look at what the session computes.

    Attributes:
        model: the graph, before ONNX Runtime rewrites it.
        session: the session.
        reopened: how far it came down the list of ``Optimizations.fewer``; 0 where it is as it was opened first.
        exchanges: those with other workers that it makes. It is then not run again where it failed: the others would not be.

    Raises:
        Exception: what ``load`` raised, where it does without optimizations too.
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
        """Return what ``attempt`` makes of the session; where it fails with this one and not without optimizations, of another.

        Args:
            attempt: runs the graph; a second call does the same as the first.

        Raises:
            Exception: what ``attempt`` raised, where it does without optimizations too; the session is the one before.
        """
        if self.exchanges is not None:
            return self.exchanges.run(lambda: attempt(self.session))
        try:
            return attempt(self.session)
        except Exception as error:
            return self.run_with_fewer(attempt, error)

    def verify(self, results: Callable[[onnxruntime.InferenceSession], Mapping[str, np.ndarray]]) -> None:
        """Compare, once, what the session computes with what it computes without optimizations; open it anew where they part.

        Args:
            results: runs the graph and returns its outputs by name; changes nothing.
        """
        if not self._is_unverified:
            return
        try:
            actual = results(self.session)
        except Exception:  # ``run`` meets it too, and deals with it
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
        """Open the graph again with as few optimizations as another worker came to; nothing where it has no more."""
        if reopened > self.reopened:
            self.session = self._load(self._fewer[reopened - 1])
            self.reopened = reopened

    def run_with_fewer(self, attempt: Callable[[onnxruntime.InferenceSession], Result], error: Exception) -> Result:
        """Return what ``attempt``, which raised this error, makes of a session with fewer optimizations.

        Raises:
            Exception: the error, where it comes without optimizations too; the session is the one before.
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
