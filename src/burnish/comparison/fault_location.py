"""Location of the first node that two engines compute differently.

Both engines return all intermediate values, compared in graph order, forward pass first. A differing value does not prove its
node wrong: rounding grows under cancellation, and masks flip near zero. So each such node runs alone on both engines with the
same inputs. Its tolerance follows from the response of its outputs to small changes of its inputs (in float64, on the reference
engine). The first node that still differs is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from burnish import engines as registry
from burnish.comparison.single_nodes import single_node_model
from burnish.comparison.tensor_difference import NONE, Difference, Tolerance, difference
from burnish.compiler.lowered_graphs import LoweredGraphs
from burnish.compiler.update import OPTIMIZER
from burnish.engines import Arrays, Engine
from burnish.errors import EngineError, UnsupportedOperatorError
from burnish.graph import BURNISH_DOMAIN, describe_node, place, source_of
from burnish.rewriting.change_dtypes import compute_in_float64
from burnish.targets import TARGETS

PERTURBATION = 1e-6
STANDARD = TARGETS["onnxruntime"]
"""Target of semantic operators' lowering, to find its faulty part."""


@dataclass(frozen=True)
class Fault:
    """The node where two engines start to differ.

    Attributes:
        node: operator, name and output of the node.
        operator: its operator; semantic ones, run by a kernel or lowered, have the prefix ``burnish.``.
        output: the differing output.
        source: the part of the model it belongs to (``gradient of Conv 'stem' ...``), or None.
        updates: for an optimizer's node, the state entries that depend on it.
        within: for a semantic operator, the differing standard operator of its lowering, or None.
        in_graph: difference of its output in the whole graph.
        alone: difference of the node by itself on the same inputs; None if it cannot run, or only differs when fused
            (``joined``).
        errors: by engine, error of the node by itself against float64; empty if unknown.
        joined: True if the difference disappears when all intermediate values are outputs, so an engine's rewriting causes it.
    """

    node: str
    operator: str
    output: str
    source: str | None
    updates: tuple[str, ...]
    within: str | None
    in_graph: Difference
    alone: Difference | None
    errors: dict[str, float]
    joined: bool = False

    def place(self) -> str:
        """Return a description of the node and its place in the model."""
        text = self.node if self.within is None else f"{self.within} in the lowering of {self.node}"
        if self.updates and self.source == OPTIMIZER:
            shown = " and ".join(f"'{name}'" for name in self.updates[:2])
            more = f" and {len(self.updates) - 2} more" if len(self.updates) > 2 else ""
            return f"{text} of the update of {shown}{more}"
        return text if self.source == self.node else place(text, self.source)


@dataclass(frozen=True)
class Location:
    """The result of a search.

    Attributes:
        fault: the node at fault; None if every node alone agrees, so rounding has grown.
        first: description of the first node with a value beyond tolerance, or None.
    """

    fault: Fault | None
    first: str | None


@dataclass
class FaultLocator:
    """Finds the node where two engines start to differ.

    Args:
        tolerance: allowed differences.
        threads: threads of the engines.
    """

    tolerance: Tolerance
    threads: int | None = None
    _reference: Engine = field(default_factory=lambda: registry.get("reference"))

    def locate(
        self,
        model: ir.Model,
        inputs: Mapping[str, np.ndarray],
        engines: Mapping[str, Engine],
        suspects: Collection[str],
        updates: Mapping[str, str] | None = None,
    ) -> Location:
        """Find the first node that two engines compute differently.

        Args:
            model: the graph, with semantic operators.
            inputs: all its inputs, including state.
            engines: two engines by name; the first is the reference.
            suspects: differing outputs of the graph.
            updates: state entry -> output with its next value.

        Raises:
            EngineError: an engine cannot run the graph.
        """
        names = _probes(model)
        probed = _with_outputs(model, names)
        results = [self._run(engine, probed, inputs) for engine in engines.values()]
        fault, first = self._scan(probed, inputs, results, engines, updates or {})
        if fault is None and all(self._agrees(output, results) for output in suspects):
            fault = self._bisect(model, inputs, engines, suspects, updates or {})
        return Location(fault, first)

    def _scan(
        self,
        model: ir.Model,
        inputs: Mapping[str, np.ndarray],
        results: list[Arrays],
        engines: Mapping[str, Engine],
        updates: Mapping[str, str],
    ) -> tuple[Fault | None, str | None]:
        first = None
        values = {**inputs, **results[0]}
        for node in model.graph:
            outputs = [value.name or "" for value in node.outputs if value.name in results[0]]
            differing = [name for name in outputs if not self._agrees(name, results)]
            if not differing:
                continue
            first = first or _place(node, differing[0], updates)
            fault = self._convict(node, differing[0], values, results, engines, updates)
            if fault is not None:
                return fault, first
        return None, first

    def _convict(
        self,
        node: ir.Node,
        output: str,
        values: Mapping[str, np.ndarray],
        results: list[Arrays],
        engines: Mapping[str, Engine],
        updates: Mapping[str, str],
    ) -> Fault | None:
        """Return the fault of a node with a differing output; None if it agrees on the same inputs."""

        def fault(output: str, alone: Difference | None, within: str | None, errors: dict[str, float]) -> Fault:
            in_graph = difference(results[1][output], results[0][output])
            return _fault(node, output, updates, within=within, in_graph=in_graph, alone=alone, errors=errors)

        try:
            model, inputs = single_node_model(node, values)
            alone_results = [self._run(engine, model, inputs) for engine in engines.values()]
        except (EngineError, UnsupportedOperatorError, KeyError):
            # It cannot run alone, so it is at fault if its inputs agree.
            read = [value.name or "" for value in node.inputs if value is not None]
            agree = all(self._agrees(name, results) for name in read if name in results[0])
            return fault(output, None, None, {}) if agree else None
        exact, scales = self._conditioning(model, inputs)
        for name, expected in alone_results[0].items():
            apart = difference(alone_results[1][name], expected, scales.get(name))
            if self.tolerance.allows(apart, expected.dtype):
                continue
            errors = {
                engine: difference(result[name].astype(np.float64), exact[name], scales.get(name)).relative
                for engine, result in zip(engines, alone_results, strict=True)
                if name in exact
            }
            within = self._within(model, inputs, engines) if node.domain == BURNISH_DOMAIN else None
            return fault(name if name in results[0] else output, apart, within, errors)
        return None

    def _within(self, model: ir.Model, inputs: Mapping[str, np.ndarray], engines: Mapping[str, Engine]) -> str | None:
        """Return the faulty operator in the lowering of a semantic operator; None if the engine has its own kernel."""
        lowered = LoweredGraphs.of_model(model, STANDARD)["step"]
        probed = _with_outputs(lowered, _probes(lowered))
        try:
            results = [self._run(engine, probed, inputs) for engine in engines.values()]
        except (EngineError, UnsupportedOperatorError):
            return None
        fault, _ = self._scan(probed, inputs, results, engines, {})
        return None if fault is None else fault.node

    def _conditioning(self, model: ir.Model, inputs: Mapping[str, np.ndarray]) -> tuple[Arrays, Arrays]:
        """Return the outputs in float64, and the scale of rounding errors for each entry.

        The scale is the change of an output if every input changes by its own size: for a canceling sum, the size of its terms.
        It is estimated from small random relative changes.
        """
        try:
            exact_model = compute_in_float64(LoweredGraphs.of_model(model, STANDARD)["step"])
            wide = {name: _widened(array) for name, array in inputs.items()}
            run = self._reference.load(exact_model)
            exact = run(wide)
            generator = np.random.default_rng(0)
            moved = {
                name: array * (1 + PERTURBATION * generator.choice((-1.0, 1.0), array.shape))
                if array.dtype.kind == "f"
                else array
                for name, array in wide.items()
            }
            answer = run(moved)
        except (EngineError, UnsupportedOperatorError):
            return {}, {}
        floating = [name for name, array in exact.items() if array.dtype.kind == "f" and np.isfinite(array).all()]
        scales = {name: np.abs(answer[name] - exact[name]) / PERTURBATION for name in floating}
        return {name: exact[name] for name in floating}, {n: s for n, s in scales.items() if np.isfinite(s).all()}

    def _bisect(
        self,
        model: ir.Model,
        inputs: Mapping[str, np.ndarray],
        engines: Mapping[str, Engine],
        suspects: Collection[str],
        updates: Mapping[str, str],
    ) -> Fault | None:
        """Find a node that differs only when fused with its neighbors, by requesting one value at a time.

        A value that depends on a wrong one is assumed wrong: an agreeing value clears its ancestors, and a differing one leaves
        only these. Each request halves the candidates as far as possible.

        Returns:
            The fault; None if the outputs agree, so the difference did not recur.
        """
        nodes = list(_computed(model))
        ancestors = _ancestors(nodes)

        def differing(index: int) -> list[Arrays] | None:
            name = nodes[index][1]
            outputs = [self._run(engine, _with_outputs(model, [name]), inputs) for engine in engines.values()]
            return None if self._agrees(name, outputs) else outputs

        last, results = None, None
        for index in (index for index, (_, name) in enumerate(nodes) if name in suspects):
            results = differing(index)
            if results is not None:
                last = index
                break
        if last is None or results is None:
            return None
        left = ancestors[last]
        while left:
            half = left.bit_count() // 2
            middle = min(_members(left), key=lambda index: abs((ancestors[index] & left).bit_count() + 1 - half))
            outputs = differing(middle)
            if outputs is None:
                left &= ~(ancestors[middle] | 1 << middle)
            else:
                last, results, left = middle, outputs, left & ancestors[middle]
        node, name = nodes[last]
        in_graph = difference(results[1][name], results[0][name])
        return _fault(node, name, updates, within=None, in_graph=in_graph, alone=None, errors={}, joined=True)

    def _agrees(self, name: str, results: list[Arrays]) -> bool:
        first, second = results[0][name], results[1][name]
        return self.tolerance.allows(difference(second, first), first.dtype)

    def _run(self, engine: Engine, model: ir.Model, inputs: Mapping[str, np.ndarray]) -> Arrays:
        runner = engine.open(LoweredGraphs.of_model(model, engine.target), {}, device=None, threads=self.threads)
        return runner.step({value.name or "": np.asarray(inputs[value.name or ""]) for value in model.graph.inputs})


def _probes(model: ir.Model) -> list[str]:
    """Return the names of computed values in graph order, without constants and values of unknown type."""
    return [name for _, name in _computed(model)]


def _computed(model: ir.Model) -> Iterator[tuple[ir.Node, str]]:
    for node in model.graph:
        if node.op_type == "Constant" and node.domain == "":
            continue
        for value in node.outputs:
            if value.name and isinstance(value.type, ir.TensorType) and (value.uses() or value.is_graph_output()):
                yield node, value.name


def _ancestors(nodes: Sequence[tuple[ir.Node, str]]) -> list[int]:
    """Return the ancestors of every computed value, as bits by index."""
    position = {name: index for index, (_, name) in enumerate(nodes)}
    ancestors: list[int] = []
    for node, _ in nodes:
        bits = 0
        for value in node.inputs:
            index = None if value is None else position.get(value.name or "")
            if index is not None and index < len(ancestors):
                bits |= ancestors[index] | 1 << index
        ancestors.append(bits)
    return ancestors


def _members(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _with_outputs(model: ir.Model, names: Collection[str]) -> ir.Model:
    copy = model.clone()
    further = set(names) - {value.name for value in copy.graph.outputs}
    copy.graph.outputs.extend(value for node in copy.graph for value in node.outputs if value.name in further)
    return copy


def _fault(node: ir.Node, output: str, updates: Mapping[str, str], **fields: object) -> Fault:
    operator = f"{BURNISH_DOMAIN}.{node.op_type}" if node.domain == BURNISH_DOMAIN else node.op_type
    named = _described(node, output)
    source = source_of(node)
    entries = _reached(node, updates) if source == OPTIMIZER else ()
    make: Callable[..., Fault] = Fault
    return make(named, operator, output, source, entries, **fields)


def _place(node: ir.Node, output: str, updates: Mapping[str, str]) -> str:
    return _fault(node, output, updates, within=None, in_graph=NONE, alone=None, errors={}).place()


def _described(node: ir.Node, output: str) -> str:
    text = describe_node(node)
    first = next((value.name for value in node.outputs if value.name), None)
    return text if first == output else text.replace(f"(output '{first}')", f"(output '{output}')")


def _reached(node: ir.Node, updates: Mapping[str, str]) -> tuple[str, ...]:
    reached, pending = set(), list(node.outputs)
    while pending:
        value = pending.pop()
        if value in reached:
            continue
        reached.add(value)
        pending.extend(output for user, _ in value.uses() for output in user.outputs)
    names = {value.name for value in reached}
    return tuple(entry for entry, output in updates.items() if output in names)


def _widened(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "biuSUO" else array.astype(np.float64)
