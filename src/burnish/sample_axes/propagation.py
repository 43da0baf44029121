"""The position of samples in every value of a model's graph: along which axis, and how many places each sample has.

The analysis goes from the inputs on, with the ``axes`` rule in each operator's record. An axis is *lost* if an operator mixes
samples, reorders them, or is unknown here; a lost axis carries the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir

from burnish.graph import describe_node
from burnish.graph.annotations import has_sample_axis_mark, marked_sample_axis
from burnish.graph.inference import RANDOM_OPERATORS
from burnish.operators.axes import LONGEST, Call, Layout, Untold, small_numbers
from burnish.operators.axis_rules import elementwise_axes
from burnish.operators.extents import Axes, Axis, Factor, Kind, Number, has, is_fixed, lost, normal, sides
from burnish.operators.registry import find_record
from burnish.random import Numbered, Places
from burnish.sample_axes.shape_arithmetic import NUMBERS

Extents = Sequence[int | str | None]


class Analysis:
    """The layouts of the values of a graph.

    Args:
        graph: the graph of a model with standard operators, in order.
        data: names of the inputs that are a batch. The other inputs, such as parameters, are the same for every batch.
        axes: sample axis by input, None for an input without samples; the marks by default.

    Attributes:
        axes: sample axis by input, as given or marked.
        counted: key of each factor that is a number of samples -> the first input with these samples.
    """

    def __init__(self, graph: ir.Graph, data: Collection[str], axes: Mapping[str, int | None] | None = None):
        self._layouts: dict[ir.Value, Layout] = {}
        self._keys: dict[ir.Node, str] = {}
        inputs = {value.name or "": value for value in graph.inputs if value.name in data and value.shape is not None}
        self.axes = {
            name: axis for name, axis in (input_axes(inputs.values()) if axes is None else axes).items() if name in inputs
        }
        shapes = {name: extents_of(value) for name, value in inputs.items()}
        self.counted: dict[str, str] = {}
        samples: dict[str, Factor] = {}
        for name, axis in self.axes.items():
            if axis is not None:
                extent = shapes[name][axis]
                symbol = extent if isinstance(extent, str) else ""
                samples[name] = Factor(f"samples {symbol}", Kind.SAMPLES, extent if isinstance(extent, int) else None)
                self.counted.setdefault(samples[name].key, name)
        self._fixes_samples = any(factor.extent is not None for factor in samples.values())
        symbols = {factor.key.partition(" ")[2]: factor for factor in samples.values() if factor.extent is None}
        for value in graph.inputs:
            name = value.name or ""
            if name in inputs:
                places = [_of_extent(extent, symbols) for extent in shapes[name]]
                if (axis := self.axes.get(name)) is not None:
                    places[axis] = (samples[name],)
                self._layouts[value] = Layout(tuple(places))
            else:
                self._layouts[value] = Layout(_declared(value, f"input {name}"), is_constant=name not in data)
        self.follow(graph)

    def layout(self, value: ir.Value) -> Layout:
        known = self._layouts.get(value)
        if known is None:
            known = self._layouts[value] = _of_constant(value)
        return known

    def assume(self, value: ir.Value, layout: Layout) -> None:
        self._layouts[value] = layout

    def key(self, node: ir.Node) -> str:
        """Return a key that is unique to a node."""
        return self._keys.setdefault(node, f"node {len(self._keys)}")

    def follow(self, graph: ir.Graph) -> None:
        """Compute the layouts of all values of a graph, the main one or a body, in its order."""
        for node in graph:
            if node.op_type == "Constant" and node.domain == "":
                self._layouts[node.outputs[0]] = _of_constant(node.outputs[0])
                continue
            operands = [None if value is None else self.layout(value) for value in node.inputs]
            for index, (output, told) in enumerate(zip(node.outputs, self._results(node, operands), strict=True)):
                self._layouts[output] = self._as_declared(told, output, f"{self.key(node)} result {index}")

    def _results(self, node: ir.Node, operands: Sequence[Layout | None]) -> Sequence[Layout]:
        call = Call(node, operands, self)
        is_standard = node.domain == ""
        constant = node.op_type not in RANDOM_OPERATORS and all(operand is None or operand.is_constant for operand in operands)
        told: Sequence[Axes | Layout | None] = ()
        numbers = None
        try:
            numbers = _numbers(call) if is_standard else None
            constant = constant if numbers is None else all(number.is_fixed for number in numbers)
            told, reason = _axes(call, constant), call.reason
        except Untold as error:
            reason = str(error)
        results = []
        for index in range(len(node.outputs)):
            one = told[index] if index < len(told) else None
            results.append(one if isinstance(one, Layout) else Layout(one, constant, None if index else numbers, reason))
        return results

    def _as_declared(self, told: Layout, output: ir.Value, key: str) -> Layout:
        """Combine the layout of a result with the extents from shape inference; lost if the two contradict each other."""
        if output.shape is None:
            return told
        declared = [extent if isinstance(extent, int) else None for extent in output.shape.dims]
        axes = told.axes
        if axes is None or len(axes) != len(declared):
            reason = told.reason or "its rank is not that which its operands have"
            axes = tuple((lost(f"{key} axis {axis}", reason),) for axis in range(len(declared)))
            if told.is_constant:
                axes = tuple(_fixed(extent, f"{key} axis {axis}") for axis, extent in enumerate(output.shape.dims))
        return Layout(
            tuple(
                self._settled(axis, extent, f"{key} axis {at}")
                for at, (axis, extent) in enumerate(zip(axes, declared, strict=True))
            ),
            told.is_constant,
            told.numbers,
            told.reason,
        )

    def _settled(self, axis: Axis, extent: int | None, key: str) -> Axis:
        if extent is None:
            return axis
        if extent == 1 and has(axis, Kind.LOST) and not self._fixes_samples:
            return ()  # the batch may have any size, so samples cannot be in a single place
        integer = Number.of(axis).integer
        if is_fixed(axis) and integer in (None, extent):
            return (extent,) if extent != 1 else ()
        if has(axis, Kind.LOST) or integer == extent:
            return axis
        return (lost(key, f"an axis of {extent} places, in which samples cannot be told apart"),)


def _axes(call: Call, constant: bool) -> Sequence[Axes | Layout | None]:
    record = find_record(call.node) if call.node.domain == "" else None
    rule = None if record is None else elementwise_axes if record.elementwise is not None else record.axes
    if rule is None and constant:
        return [_declared(output, f"{call.key} result {index}") for index, output in enumerate(call.node.outputs)]
    if rule is None:
        raise Untold(f"what {describe_node(call.node)} does with samples is not known")
    told = rule(call)
    return told if isinstance(told, list) else [told]


def _numbers(call: Call) -> tuple[Number, ...] | None:
    rule = NUMBERS.get(call.node.op_type)
    if rule is None:
        return None
    try:
        told = rule(call)
    except Untold:
        return None
    return None if told is None or len(told) > LONGEST else told


def _of_extent(extent: int | str | None, symbols: Mapping[str, Factor]) -> Axis:
    if isinstance(extent, int):
        return () if extent == 1 else (extent,)
    return (symbols.get(extent or " ") or Factor(f"symbol {extent}", Kind.FIXED),)


def _declared(value: ir.Value, key: str) -> Axes | None:
    """Return the axes of a value that does not depend on the batch; None if its rank is unknown."""
    if value.shape is None:
        return None
    return tuple(_fixed(extent, f"{key} axis {axis}") for axis, extent in enumerate(value.shape.dims))


def _fixed(extent: int | ir.SymbolicDim, key: str) -> Axis:
    if isinstance(extent, int):
        return () if extent == 1 else (extent,)
    return (Factor(key, Kind.FIXED),)


def _of_constant(value: ir.Value) -> Layout:
    """Return the layout of a constant or an initializer; unknown for anything else."""
    numbers, producer = small_numbers(value), value.producer()
    if numbers is None and not value.is_initializer() and (producer is None or producer.op_type != "Constant"):
        return Layout(None, reason=f"the value '{value.name}' is computed elsewhere")
    return Layout(_declared(value, f"constant {value.name}"), True, numbers)


def sample_inputs(inputs: Mapping[str, Extents]) -> list[str]:
    """Return the names of the inputs with samples along the first axis; the first one gives a worker's number of samples.

    A symbolic first axis holds samples, unless other inputs that begin with a symbol have the same symbol at a later axis:
    positions ``[time]`` next to tokens ``[batch, time]``. If no first axis is symbolic, the inputs with the first extent of the
    first input hold samples.

    Args:
        inputs: the extents of the model's inputs, by name; a string is a symbol, None an extent without one.
    """
    ranked = {name: extents for name, extents in inputs.items() if len(extents)}
    symbolic = [name for name, extents in ranked.items() if not isinstance(extents[0], int)]
    if not symbolic:
        first = next(iter(ranked.values()), ())
        return [name for name, extents in ranked.items() if extents[0] == first[0]]
    others = {extent for name in symbolic for extent in ranked[name][1:] if isinstance(extent, str)}
    return [name for name in symbolic if ranked[name][0] not in others] or symbolic


def input_axes(inputs: Iterable[ir.Value]) -> dict[str, int | None]:
    """Return the sample axis of each input of known rank; None for an input without samples.

    Args:
        inputs: the graph inputs that are a batch.
    """
    values = {value.name or "": value for value in inputs if value.shape is not None}
    marked = {name: marked_sample_axis(value) for name, value in values.items() if has_sample_axis_mark(value)}
    first = sample_inputs({name: extents_of(value) for name, value in values.items() if name not in marked})
    return {name: marked.get(name, 0 if name in first else None) for name in values}


def extents_of(value: ir.Value) -> list[int | str | None]:
    """Return the extents of a value of known rank: numbers, symbols, and None for an extent without a symbol."""
    assert value.shape is not None
    return [extent if isinstance(extent, int) else extent.value for extent in value.shape.dims]


def moved_inputs(graph: ir.Graph) -> dict[str, int]:
    """Return the inputs of a graph with samples along another axis than the first: name -> axis."""
    return {name: axis for name, axis in input_axes(graph.inputs).items() if axis}


def numbered(analysis: Analysis, value: ir.Value) -> Numbered:
    """Return the sample layouts of the rows and columns of a random draw for a value of the analysed graph."""
    layout = analysis.layout(value)
    if layout.axes is None:
        return Numbered(*[Places(problem=layout.reason)] * 2)
    whole = normal(factor for axis in layout.axes for factor in axis)
    problem = _problem(whole)
    if problem:
        return Numbered(*[Places(problem=problem)] * 2)
    half = (len(layout.axes) + 1) // 2
    rows, columns = (normal(factor for axis in part for factor in axis) for part in (layout.axes[:half], layout.axes[half:]))
    return Numbered(_places(rows, analysis.counted), _places(columns, analysis.counted))


def _problem(factors: Axis) -> str:
    lost = next((factor for factor in factors if isinstance(factor, Factor) and factor.kind is Kind.LOST), None)
    if lost is not None:
        return lost.reason
    return "samples stand along more than one of its axes" if len(sides(factors)) > 1 else ""


def _places(factors: Axis, counted: Mapping[str, str]) -> Places:
    times = sides(factors)
    if not times:
        return Places()
    slower, faster = (None if number.factors else number.coefficient for number in map(Number.of, times[0]))
    if slower is None and faster is None:
        return Places(problem="samples stand between axes whose extents are both symbolic")
    samples = next(factor for factor in factors if isinstance(factor, Factor) and factor.kind is Kind.SAMPLES)
    return Places(counted[samples.key], slower, faster)
