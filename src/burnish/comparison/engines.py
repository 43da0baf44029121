"""Comparison of engines over the same steps of a program, with the node where they start to differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from burnish import engines as registry
from burnish.comparison.fault_location import Fault, FaultLocator, Location
from burnish.comparison.tensor_difference import NONE, Difference, Tolerance, difference
from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.data.random_data import random_batches
from burnish.engines import Arrays, Engine, ProgramRunner
from burnish.errors import ConfigurationError, NonFiniteLossError
from burnish.operators import semantic_operators
from burnish.operators.collectives import MARKS
from burnish.program import Program, Role
from burnish.rewriting.change_dtypes import compute_in_float64
from burnish.training.inputs import check_batch, check_hyperparameters

EXPLAINED = 10.0
"""Growth of a difference explained by rounding before it is examined again."""


@dataclass
class TensorComparison:
    """Comparison of one tensor with the first engine.

    Attributes:
        name: ``loss`` or a metric, ``grad:<parameter>``, or a state entry.
        kind: ``figure``, ``gradient`` or ``state``.
        dtype: its element type.
        tolerance: allowed relative difference.
        worst: largest difference in any step.
        step: step of that difference, from 0.
        agrees: True if it is within tolerance, or exceeds it only by rounding (``by_rounding``).
        by_rounding: True if it exceeds tolerance, but every node alone agrees on the same inputs.
    """

    name: str
    kind: str
    dtype: str
    tolerance: float
    worst: Difference = NONE
    step: int = 0
    agrees: bool = True
    by_rounding: bool = False


@dataclass
class EngineReport:
    """Comparison of one engine with the first.

    Attributes:
        engine: its name.
        tensors: all figures, gradients and state entries, by name.
        first_step: first step with a difference, or None.
        differing: names of the differing tensors in that step.
        fault: the node where the difference starts; None if there is none or it was not found.
        grown: first node with a difference by growing rounding, if nothing worse was found.
        drifted: True if no node is at fault, and the states had drifted apart before (``own_state``).
    """

    engine: str
    tensors: dict[str, TensorComparison] = field(default_factory=dict)
    first_step: int | None = None
    differing: list[str] = field(default_factory=list)
    fault: Fault | None = None
    grown: str | None = None
    drifted: bool = False

    @property
    def agrees(self) -> bool:
        return self.first_step is None


@dataclass
class Comparison:
    """The result of ``compare_engines``.

    Attributes:
        engines: their names; the others are compared with the first.
        losses: for every step, the loss by engine; NaN if it is not finite.
        reports: one for every engine but the first.
        errors: engine -> tensor -> largest relative error against float64 in any step; empty unless requested.
    """

    engines: list[str]
    losses: list[dict[str, float]]
    reports: list[EngineReport]
    errors: dict[str, dict[str, float]]

    @property
    def agrees(self) -> bool:
        return all(report.agrees for report in self.reports)

    def message(self) -> str:
        """Return the result in words, with the first node at fault of each engine."""
        if self.agrees:
            count = len(self.losses)
            return f"{' and '.join(self.engines)} agree over {count} step{'' if count == 1 else 's'}"
        return ". ".join(_verdict(self.engines[0], report) for report in self.reports if not report.agrees)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON-compatible values; NaN and infinities as text."""
        values = {"agrees": self.agrees, "message": self.message(), **asdict(self)}
        for entry, report in zip(values["reports"], self.reports, strict=True):
            entry["agrees"] = report.agrees
            if report.fault is not None:
                entry["fault"]["place"] = report.fault.place()
        plain: dict[str, Any] = _plain(values)
        return plain


def compare_engines(
    program: Program,
    engines: Sequence[str | Engine],
    batches: Iterable[Mapping[str, Any]] | None = None,
    *,
    steps: int = 24,
    seed: int = 0,
    rtol: float | None = None,
    atol: float = 0.0,
    against_float64: bool = False,
    own_state: bool = False,
    threads: int | None = None,
) -> Comparison:
    """Run the same steps on several engines, and compare losses, metrics, gradients and state with the first engine.

    All engines start each step from the first engine's state, so differences do not accumulate. Differences beyond tolerance are
    traced to their first node (``burnish.comparison.fault_location``).

    Args:
        program: program to run.
        engines: two or more names or Engine objects; the others are compared with the first.
        batches: batches for ``Session.step``; random ones of 4 samples by default.
        steps: most steps; fewer if the batches end.
        seed: seed of the initial state and random batches.
        rtol, atol: tolerances; see ``Tolerance``.
        against_float64: True to also run every step in float64 on the reference engine, and report each engine's error.
        own_state: True to let engines continue from their own state, to see how they drift apart.
        threads: threads per engine; the engine's choice by default.

    Raises:
        ConfigurationError: fewer than two engines, no steps or batches, a negative tolerance, or a step beyond the program's
            schedule.
        InputError: a batch does not fit the program.
        NonFiniteLossError: the first engine's loss is NaN or infinite.
        EngineError: an engine is missing or cannot run the program.
    """
    if len(engines) < 2:
        raise ConfigurationError("engines: give two or more to compare, such as onnxruntime and reference")
    if steps < 1:
        raise ConfigurationError(f"steps={steps}: give one step or more")
    tolerance = Tolerance(rtol, atol)
    run = _Run(program, _by_name(engines), FaultLocator(tolerance, threads), own_state, program.initial_state(seed))
    for _, batch in zip(range(steps), random_batches(program, seed=seed) if batches is None else batches, strict=False):
        run.step(batch, against_float64)
    if not run.losses:
        raise ConfigurationError("there is no batch to compare the engines on: the iterable of batches is empty")
    return Comparison(list(run.engines), run.losses, list(run.reports.values()), run.errors)


class _Run:
    def __init__(
        self,
        program: Program,
        engines: dict[str, Engine],
        locator: FaultLocator,
        own_state: bool,
        state: Mapping[str, np.ndarray],
    ):
        self.program = program
        self.engines = engines
        self.locator = locator
        self.own_state = own_state
        semantic = program.graphs.lowered_to(program.target.with_kernels(semantic_operators() - {mark.name for mark in MARKS}))
        self.graphs = {name: semantic.copy_of(name) for name in ("grad", "step")}
        self.first = next(iter(engines))
        self.signature = program.signature["step"]
        self.gradients = tuple(entry.name for entry in program.signature["grad"].outputs_of(Role.GRADIENT, Role.ROWS))
        threads = locator.threads
        self.runners = {
            name: engine.open(program.graphs.lowered_to(engine.target), state, device=None, threads=threads)
            for name, engine in engines.items()
        }
        self.gradient_runners = {
            name: engine.open(LoweredGraphs.of_model(self.graphs["grad"], engine.target), {}, device=None, threads=threads)
            for name, engine in engines.items()
        }
        self.reports = {name: EngineReport(name) for name in engines if name != self.first}
        self.losses: list[dict[str, float]] = []
        self.errors: dict[str, dict[str, float]] = {}
        self.explained: dict[tuple[str, str], float] = {}
        self.stopped: set[str] = set()

    def step(self, batch: Mapping[str, Any], against_float64: bool) -> None:
        number = len(self.losses)
        if self.signature.end is not None and number >= self.signature.end:
            raise ConfigurationError(
                f"steps: the learning-rate schedule of this program ends after {self.signature.end:,} steps; compare fewer"
            )
        inputs = {**check_batch(self.signature, batch), **check_hyperparameters(self.signature, {})}
        self.losses.append({})
        before: dict[str, Arrays] = {}
        results: dict[str, Arrays] = {}
        for name, runner in self.runners.items():
            if name in self.stopped:
                continue
            before[name] = runner.state()
            results[name] = self._results(name, runner, {**before[name], **inputs}, inputs)
            self.losses[-1] |= {name: self._loss(results[name])}
        if against_float64:
            self._measure({**before[self.first], **inputs}, results)
        for name in results.keys() - {self.first}:
            differing = self._compare(name, number, results)
            if differing:
                self._follow(name, number, differing, {**before[name], **inputs})
        if not self.own_state:
            state = self.runners[self.first].state()
            for name, runner in self.runners.items():
                if name != self.first:
                    runner.load_state(state)

    def _results(
        self, name: str, runner: ProgramRunner, feeds: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]
    ) -> Arrays:
        asked = {entry.name: np.asarray(feeds[entry.name]) for entry in self.program.signature["grad"].inputs}
        outputs = self.gradient_runners[name].step(asked)
        gradients = {gradient: outputs[gradient] for gradient in self.gradients}
        try:
            figures = runner.step(inputs)
        except NonFiniteLossError:
            if name == self.first:
                raise
            figures = {entry.name: np.full((), math.nan, entry.numpy_dtype) for entry in self.signature.outputs_of(Role.LOSS)}
            if self.own_state:
                self.stopped.add(name)
        state = runner.state()
        return {**figures, **gradients, **{entry: state[entry] for entry in self.signature.updates}}

    def _loss(self, results: Arrays) -> float:
        (entry,) = self.signature.outputs_of(Role.LOSS)
        return float(results[entry.name])

    def _compare(self, name: str, number: int, results: Mapping[str, Arrays]) -> list[str]:
        """Record the differences of a step; return the unexplained ones beyond tolerance."""
        tolerance, tensors = self.locator.tolerance, self.reports[name].tensors
        unexplained = []
        for tensor, actual in results[name].items():
            expected = results[self.first][tensor]
            apart = difference(actual, expected)
            entry = tensors.setdefault(tensor, self._entry(tensor, expected.dtype))
            if apart.relative > entry.worst.relative:
                entry.worst, entry.step = apart, number
            if tolerance.allows(apart, expected.dtype):
                continue
            if apart.absolute > EXPLAINED * self.explained.get((name, tensor), 0.0):
                unexplained.append(tensor)
        return unexplained

    def _entry(self, tensor: str, dtype: np.dtype) -> TensorComparison:
        kind = "gradient" if tensor in self.gradients else "state" if tensor in self.signature.updates else "figure"
        return TensorComparison(tensor, kind, dtype.name, self.locator.tolerance.relative(dtype))

    def _follow(self, name: str, number: int, differing: list[str], inputs: Mapping[str, np.ndarray]) -> None:
        """Find the node where a difference starts, once per engine; later differences are only measured."""
        report = self.reports[name]
        for tensor in differing:
            report.tensors[tensor].agrees = False
        if report.first_step is not None:
            return
        location = self._locate(name, differing, inputs)
        is_apart = self.own_state and number > 0
        if location.fault is None and location.first is not None and not is_apart:
            # Every node agrees on the same inputs, so this is rounding.
            report.grown = report.grown or location.first
            for tensor in differing:
                entry = report.tensors[tensor]
                entry.agrees = entry.by_rounding = True
                self.explained[name, tensor] = entry.worst.absolute
            return
        report.first_step, report.differing, report.fault = number, differing, location.fault
        report.drifted = is_apart and location.fault is None

    def _locate(self, name: str, differing: list[str], inputs: Mapping[str, np.ndarray]) -> Location:
        pair = {self.first: self.engines[self.first], name: self.engines[name]}
        location = Location(None, None)
        for graph in ("grad", "step"):
            model = self.graphs[graph]
            outputs = self._outputs(model, differing)
            if not outputs:
                continue
            updates = self.program.signature[graph].updates
            location = self.locator.locate(model, inputs, pair, outputs, updates)
            if location.fault is not None:
                break
        return location

    def _outputs(self, model: ir.Model, names: Sequence[str]) -> list[str]:
        present = {value.name for value in model.graph.outputs}
        outputs = [self.signature.updates.get(name, name) for name in names]
        return [name for name in outputs if name in present]

    def _measure(self, inputs: Mapping[str, np.ndarray], results: Mapping[str, Arrays]) -> None:
        wide = {name: np.asarray(array).astype(np.float64) if _is_floating(array) else array for name, array in inputs.items()}
        reference, outputs = registry.get("reference"), Arrays()
        for graph in ("grad", "step"):
            model = compute_in_float64(self.program.graphs[graph])
            outputs |= reference.load(model)({value.name or "": wide[value.name or ""] for value in model.graph.inputs})
        exact = {**outputs, **{entry: outputs[output] for entry, output in self.signature.updates.items()}}
        for name, tensors in results.items():
            errors = self.errors.setdefault(name, {})
            for tensor, array in tensors.items():
                expected = exact[tensor]
                apart = difference(array.astype(expected.dtype), expected).relative
                errors[tensor] = max(errors.get(tensor, 0.0), apart)


def _by_name(engines: Sequence[str | Engine]) -> dict[str, Engine]:
    by_name: dict[str, Engine] = {}
    for asked in engines:
        engine = registry.get(asked)
        name, count = engine.name, 1
        while name in by_name:
            count += 1
            name = f"{engine.name} ({count})"
        by_name[name] = engine
    return by_name


def _verdict(first: str, report: EngineReport) -> str:
    shown = ", ".join(f"'{name}'" for name in report.differing[:3])
    more = f" and {len(report.differing) - 3} more" if len(report.differing) > 3 else ""
    text = f"{report.engine} differs from {first} in step {report.first_step}, in {shown}{more}"
    fault = report.fault
    if fault is None and report.drifted:
        return f"{text}, but not from the same state: the two runs have drifted apart by then"
    if fault is None:
        return f"{text}; no single node was found that differs on the same inputs"
    text += f", first at {fault.place()}: "
    if fault.joined:
        return text + (
            f"by {fault.in_graph.relative:.1e}, though not where all intermediate values are outputs, so that an engine joins "
            "this node with its neighbours wrongly"
        )
    if fault.alone is None:
        return f"{text}by {fault.in_graph.relative:.1e}, with inputs that agree"
    text += f"by {fault.alone.relative:.1e} on the same inputs"
    if not fault.errors:
        return text
    return f"{text}; against float64 " + " and ".join(f"{name} is off by {error:.1e}" for name, error in fault.errors.items())


def _is_floating(array: np.ndarray) -> bool:
    return np.asarray(array).dtype.kind not in "biuSUO"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
