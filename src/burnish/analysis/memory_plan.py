"""The planned peak of a graph: the most bytes alive at once if its nodes run in the graph's order.

Also finds state entries that a step can overwrite with their next values, without second buffers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from burnish.graph import BURNISH_DOMAIN, has_long_vectors, model_proto
from burnish.graph.annotations import RECOMPUTES, marked_sample_axis
from burnish.graph.inference import BROADCAST_ARITHMETIC, SAME_AS_FIRST_INPUT
from burnish.graph.uses import read_by
from burnish.operators.semantic import semantic_operator

VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Standard operators whose output may share the memory of their first operand."""
ELEMENTWISE = frozenset({"Add", "Div", "Identity", "Mul", "Sub", "Where"})
"""Standard operators that ONNX Runtime may compute in place if an operand has the shape of the output."""


def written_in_place(graph: ir.Graph, updates: Mapping[str, str], elementwise: Collection[str] = ()) -> frozenset[str]:
    """Return the state entries that a runtime may overwrite with their next values, for any order of the nodes.

    Args:
        graph: the graph as it will run, with no later rewrite. Its inputs are named like the state entries.
        updates: state entry -> the output with its next value.
        elementwise: operators of the domain ``burnish`` that read each element of their operands before they write it.
    """
    present = {value.name: value for value in graph.inputs}
    following = {value.name: value for value in graph.outputs}
    place = {node: number for number, node in enumerate(graph)}
    ancestors = _ancestors(graph, place)
    readers = _readers(graph)

    def may_be_written(entry: str, output: str) -> bool:
        writer = following[output].producer()
        if writer is None or entry not in present:
            return False
        own = ELEMENTWISE if writer.domain == "" else elementwise if writer.domain == BURNISH_DOMAIN else ()
        allowed = ancestors[writer] | (1 << place[writer] if writer.op_type in own else 0)
        return all(allowed >> place[reader] & 1 for reader in readers.get(present[entry], ()))

    return frozenset(entry for entry, output in updates.items() if output in following and may_be_written(entry, output))


def _ancestors(graph: ir.Graph, place: Mapping[ir.Node, int]) -> dict[ir.Node, int]:
    """For each node, a bit set of the nodes that it waits for."""
    ancestors: dict[ir.Node, int] = {}
    for node in graph:
        bits = 0
        for value in read_by(node):
            producer = value.producer()
            if producer is not None:
                bits |= ancestors[producer] | 1 << place[producer]
        ancestors[node] = bits
    return ancestors


def _readers(graph: ir.Graph) -> dict[ir.Value, set[ir.Node]]:
    """For each graph input, the nodes that read its memory, directly or through a view."""
    origins = {value: value for value in graph.inputs}
    readers: dict[ir.Value, set[ir.Node]] = {}
    for node in graph:
        read = [origins[value] for value in read_by(node) if value in origins]
        for origin in read:
            readers.setdefault(origin, set()).add(node)
        if node.domain == "" and node.op_type in VIEWS and node.inputs[0] in origins:
            origins[node.outputs[0]] = origins[node.inputs[0]]
    return readers


SHARES_MEMORY = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
WRITES_IN_PLACE = (SAME_AS_FIRST_INPUT | BROADCAST_ARITHMETIC) - {"CumSum", "Mean", "Sum"}


@dataclass(frozen=True)
class PlannedPeak:
    """The planned memory of a graph.

    Attributes:
        bytes: everything alive at the peak: inputs (state and batch) and computed values.
        inputs: the part of ``bytes`` for the inputs, which are always alive.
        without_recompute: ``bytes`` of the same graph without recomputation.
        unknown: values of unknown size, which count as 0.
    """

    bytes: int
    inputs: int
    without_recompute: int
    unknown: int = 0


@dataclass(frozen=True)
class Task:
    """One run of a node, with the numbers of the values that it reads and writes."""

    node: ir.Node
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def planned_peak(
    model: ir.Model, batch: int = 1, extents: Mapping[str, int] | None = None, in_place: Collection[str] = ()
) -> PlannedPeak:
    """Return the planned peak of a graph for the order of its nodes.

    Args:
        model: a model with its nodes in a valid order.
        batch: the extent of a symbolic sample dimension.
        extents: the extents of other symbolic dimensions; 1 by default.
        in_place: the outputs that overwrite inputs and need no memory of their own.
    """
    graph = model.graph
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    number = {value: index for index, value in enumerate(values)}
    bytes_of = value_bytes(model, batch, extents)
    sizes = [0 if value.name in in_place else bytes_of.get(value, 0) or 0 for value in values]
    outputs = {number[value] for value in graph.outputs if value in number}
    tasks = [
        Task(node, tuple(number[value] for value in read_by(node) if value in number), tuple(number[v] for v in node.outputs))
        for node in graph
    ]
    inputs = sum(sizes[number[value]] for value in graph.inputs)
    return PlannedPeak(
        bytes=inputs + peak_of(tasks, sizes, outputs),
        inputs=inputs,
        without_recompute=inputs + peak_of(list(_without_recompute(tasks, values)), sizes, outputs),
        unknown=sum(bytes_of.get(value) is None for value in values if value.name),
    )


def peak_of(tasks: Sequence[Task], sizes: Sequence[int], outputs: Collection[int]) -> int:
    """Return the most bytes alive at once among the values that ``tasks`` compute.

    Args:
        tasks: the runs of nodes, in order.
        sizes: bytes by value number.
        outputs: the values that live to the end.
    """
    last: dict[int, int] = {}
    for index, task in enumerate(tasks):
        last.update(dict.fromkeys(task.inputs, index))
    last.update(dict.fromkeys(outputs, len(tasks)))
    block: dict[int, int] = {}  # value -> the first value in the same memory
    holders: dict[int, int] = {}  # block -> number of live values in it
    alive = peak = 0
    for index, task in enumerate(tasks):
        ending = [value for value in dict.fromkeys(task.inputs) if last[value] == index and value in block]
        for position, value in enumerate(task.outputs):
            source = _memory_taken_over(task, position, ending, block, holders, sizes)
            if source is None:
                block[value] = value
                holders[value] = 1
                alive += sizes[value]
            else:
                block[value] = block[source]
                holders[block[source]] += 1
        peak = max(peak, alive)
        for value in (*ending, *(value for value in task.outputs if value not in last)):
            holders[block[value]] -= 1
            if not holders[block[value]]:
                alive -= sizes[block[value]]
    return peak


def _memory_taken_over(
    task: Task,
    position: int,
    ending: Sequence[int],
    block: Mapping[int, int],
    holders: Mapping[int, int],
    sizes: Sequence[int],
) -> int | None:
    """Return the operand whose memory an output reuses: a view of it, or one with no later reader."""
    if not task.inputs:
        return None
    if task.node.domain == BURNISH_DOMAIN:
        operator = semantic_operator(task.node)
        index = None if operator is None else operator.shared_input(position)
        return task.inputs[index] if index is not None and task.inputs[index] in block else None
    if position or task.node.domain != "":
        return None
    if task.node.op_type in SHARES_MEMORY:
        return task.inputs[0] if task.inputs[0] in block else None
    if task.node.op_type not in WRITES_IN_PLACE:
        return None
    size = sizes[task.outputs[0]]
    return next((v for v in ending if holders[block[v]] == 1 and sizes[block[v]] == size and sizes[v] == size), None)


def _without_recompute(tasks: Sequence[Task], values: Sequence[ir.Value]) -> Iterator[Task]:
    """Return the tasks without recomputation: later readers use the first result."""
    by_name = {value.name: index for index, value in enumerate(values) if value.name}
    first: dict[int, int] = {}
    moved: dict[int, list[Task]] = {}
    rest: list[Task] = []
    position: dict[int, int] = {}
    for task in tasks:
        originals = RECOMPUTES.get(task.node)
        if originals == ():
            continue
        if originals and all(name in by_name for name in originals):
            first.update(zip(task.outputs, (by_name[name] for name in originals), strict=True))
            continue
        task = Task(task.node, tuple(first.get(value, value) for value in task.inputs), task.outputs)
        if originals:
            # Only the backward reads it, so its first run was removed: without recomputation it would run there.
            there = max((position[value] for value in task.inputs if value in position), default=-1)
            moved.setdefault(there, []).append(task)
        else:
            there = len(rest)
            rest.append(task)
        position.update(dict.fromkeys(task.outputs, there))
    for index in range(-1, len(rest)):
        if index >= 0:
            yield rest[index]
        yield from moved.get(index, ())


def value_bytes(model: ir.Model, batch: int, extents: Mapping[str, int] | None = None) -> dict[ir.Value, int | None]:
    """Return the bytes of every input and computed value; None if unknown."""
    graph = model.graph
    known = _known_extents(graph, batch, extents or {})
    values = [value for value in (*graph.inputs, *(v for node in graph for v in node.outputs)) if value.name]
    sizes = {value: _bytes(value, value.shape, known) for value in values}
    if any(size is None for size in sizes.values()):
        shapes = _inferred_shapes(model, known)
        for value, size in sizes.items():
            if size is None and value.name in shapes:
                sizes[value] = _bytes(value, shapes[value.name], known)
    return sizes


def _known_extents(graph: ir.Graph, batch: int, extents: Mapping[str, int]) -> dict[str | None, int]:
    known: dict[str | None, int] = {}
    for value in graph.inputs:
        samples = marked_sample_axis(value)
        for axis, dimension in enumerate(() if value.shape is None else value.shape.dims):
            if not isinstance(dimension, int) and dimension.value is not None:
                extent = batch if axis == samples else 1
                known[dimension.value] = max(extent, known.get(dimension.value, 1))
    known.update(extents)
    return known


def _bytes(value: ir.Value, shape: ir.Shape | None, known: Mapping[str | None, int]) -> int | None:
    if shape is None or value.dtype is None or value.dtype == ir.DataType.STRING:
        return None
    dimensions = [d if isinstance(d, int) else known.get(d.value) for d in shape.dims]
    if any(dimension is None for dimension in dimensions):
        return None
    return math.ceil(math.prod(d for d in dimensions if d is not None) * value.dtype.itemsize)


def _inferred_shapes(model: ir.Model, known: Mapping[str | None, int]) -> dict[str, ir.Shape]:
    """Infer, from known extents, the shapes that inference with symbolic dimensions left open."""
    proto = model_proto(model)
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param in known:
                dimension.dim_value = known[dimension.dim_param]
    open_shapes = [
        index
        for index, value in enumerate(proto.graph.value_info)
        if any(not dimension.HasField("dim_value") for dimension in value.type.tensor_type.shape.dim)
    ]
    for index in reversed(open_shapes):
        del proto.graph.value_info[index]
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, data_prop=not has_long_vectors(proto.graph))
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return {}
    shapes = {}
    for value in inferred.graph.value_info:
        shape = ir.serde.deserialize_type_proto_for_shape(value.type)
        if shape is not None:
            shapes[value.name] = shape
    return shapes
