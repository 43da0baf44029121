"""Where two engines part: the first node that they compute differently.

All intermediate values of a graph are asked for as outputs on both engines, and compared in the graph's order, the forward pass
first. A value that differs does not convict its node: rounding grows where values cancel, and a mask may flip where a value is
near zero. So the node is run alone, on the same inputs, on both engines; what it may differ by then is measured by how far its
outputs move when its inputs do (in float64, on the reference engine). The first node that still differs is at fault.
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
"""What a semantic operator is lowered for, to see which part of its lowering is at fault."""


@dataclass(frozen=True)
class Fault:
    """The node that two engines part at.

    Attributes:
        node: operator, name and output of the program's node.
        operator: its operator; ``burnish.`` before a semantic one, which an engine runs by a kernel of its own or lowered.
        output: the output that differs.
        source: what of the model it computes a part of (``gradient of Conv 'stem' ...``); None where that is not known.
        updates: of a node of the optimizer, the state entries whose next value depends on it.
        within: of a semantic operator, the standard operator of its lowering that differs, where one does.
        in_graph: how far its output differs where the whole graph runs.
        alone: how far it differs where the node runs alone on the same inputs; None where it cannot run alone, or where the
            difference shows only as long as the engine may join the node with its neighbours (``joined``).
        errors: by engine, how far its output is from float64, alone and on the same inputs; empty where that is not known.
        joined: the difference is gone when all intermediate values are outputs, so that it comes from how an engine rewrites
            the graph.
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
        """Return what to look for: the node, and the node of the model that it belongs to."""
        text = self.node if self.within is None else f"{self.within} in the lowering of {self.node}"
        if self.updates and self.source == OPTIMIZER:
            shown = " and ".join(f"'{name}'" for name in self.updates[:2])
            more = f" and {len(self.updates) - 2} more" if len(self.updates) > 2 else ""
            return f"{text} of the update of {shown}{more}"
        return text if self.source == self.node else place(text, self.source)


@dataclass(frozen=True)
class Location:
    """What was found out about outputs that differ.

    Attributes:
        fault: the node at fault; None where every node, run alone, agrees: then rounding has grown on the way.
        first: the first node whose value differs beyond tolerance, as a description; None where none does.
    """

    fault: Fault | None
    first: str | None


@dataclass
class FaultLocator:
    """Finds where two engines part in a graph.

    Args:
        tolerance: how far values may be apart.
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
            model: the graph, semantic operators and all.
            inputs: all its inputs, state too.
            engines: two engines by name; the first is the one to compare with.
            suspects: outputs of the graph that differ.
            updates: state entry -> the output that holds its next value.

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
        """Return the fault of a node whose output differs, None where it agrees on the same inputs."""

        def fault(output: str, alone: Difference | None, within: str | None, errors: dict[str, float]) -> Fault:
            in_graph = difference(results[1][output], results[0][output])
            return _fault(node, output, updates, within=within, in_graph=in_graph, alone=alone, errors=errors)

        try:
            model, inputs = single_node_model(node, values)
            alone_results = [self._run(engine, model, inputs) for engine in engines.values()]
        except (EngineError, UnsupportedOperatorError, KeyError):
            # It cannot run alone: what it was given convicts it, or does not.
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
        """Return the operator at fault in the lowering of a semantic operator; None where the engine has a kernel of its own."""
        lowered = LoweredGraphs.of_model(model, STANDARD)["step"]
        probed = _with_outputs(lowered, _probes(lowered))
        try:
            results = [self._run(engine, probed, inputs) for engine in engines.values()]
        except (EngineError, UnsupportedOperatorError):
            return None
        fault, _ = self._scan(probed, inputs, results, engines, {})
        return None if fault is None else fault.node

    def _conditioning(self, model: ir.Model, inputs: Mapping[str, np.ndarray]) -> tuple[Arrays, Arrays]:
        """Return the outputs in float64, and how far each entry would move if every input moved by its own size.

        The second is what rounding is relative to: of a sum of large terms that cancel, the size of the terms. The inputs move by
        a small random part of themselves, and the answer is scaled up.
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
        """Find a node that differs only while its neighbours are not outputs, by asking for one value at a time.

        What depends on a wrong value is taken to be wrong too: a value that agrees clears all that it depends on, one that
        differs leaves only that. Each question halves what is left, as far as the graph allows.

        Returns:
            The fault; None where the outputs agree, so that the difference does not come back.
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
    """The values of a graph that nodes compute, in its order, but for constants and what is no tensor of a known dtype."""
    return [name for _, name in _computed(model)]


def _computed(model: ir.Model) -> Iterator[tuple[ir.Node, str]]:
    for node in model.graph:
        if node.op_type == "Constant" and node.domain == "":
            continue
        for value in node.outputs:
            if value.name and isinstance(value.type, ir.TensorType) and (value.uses() or value.is_graph_output()):
                yield node, value.name


def _ancestors(nodes: Sequence[tuple[ir.Node, str]]) -> list[int]:
    """Return, for every computed value, the values that it depends on, as bits by index."""
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
    """Return a copy of a model with further values among its outputs."""
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
    """Name a node with the output that differs; one that stands as the model has it, as its source does."""
    text = describe_node(node)
    first = next((value.name for value in node.outputs if value.name), None)
    return text if first == output else text.replace(f"(output '{first}')", f"(output '{output}')")


def _reached(node: ir.Node, updates: Mapping[str, str]) -> tuple[str, ...]:
    """The state entries whose next value depends on a node."""
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
