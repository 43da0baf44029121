"""Nodes that work along the sample axis, so that results for one sample depend on the others of its batch.

Examples: a Softmax along axis 0, a recurrent layer or attention that takes the first axis for time, a mean of everything, a
Reshape that joins samples into one sequence. Such a program runs and its loss falls, so the mistake is easy to miss.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from burnish.graph import FLOATING
from burnish.graph.annotations import has_sample_axis_mark, marked_sample_axis
from burnish.graph.uses import ancestors_of, read_by
from burnish.operators.axes import Call, Untold
from burnish.operators.extents import Axis, Factor, Kind
from burnish.operators.registry import find_record
from burnish.sample_axes.propagation import Analysis

OF_SAMPLES = re.compile(r"batch|sample|^bs$", re.IGNORECASE)
OF_OTHERS = re.compile(r"seq|time|len|step|frame|tok|word|row|node|edge|atom|point|pixel|^t$|^l$", re.IGNORECASE)
RECURRENT = ("RNN", "GRU", "LSTM")


@dataclass(frozen=True)
class Mixing:
    """A node that works along samples.

    Attributes:
        node: the node.
        input: name of the input with these samples.
        axis: sample axis of that input.
    """

    node: ir.Node
    input: str
    axis: int


def mixing_nodes(graph: ir.Graph, outputs: Collection[ir.Value]) -> list[Mixing]:
    """Return the nodes that mix samples on the way to outputs with a row for each sample.

    Covers only inputs with a certain sample axis: by a mark, by the name of the extent, or as the only open axis. Open axes may
    otherwise be those of a sequence, a point cloud or a graph.

    Args:
        graph: the graph of a model with standard operators, in order. Its inputs are a batch.
        outputs: values of the graph.
    """
    certain = {value.name or "" for value in graph.inputs if _names_samples(value, graph)}
    if not certain:
        return []
    analysis = Analysis(graph, [value.name or "" for value in graph.inputs])
    return [_of_its_own_input(each, graph, analysis) for each in mixing_in(analysis, graph, outputs, certain)]


def mixing_in(analysis: Analysis, graph: ir.Graph, outputs: Collection[ir.Value] | None, inputs: Collection[str]) -> list[Mixing]:
    """Return the nodes of an analysed graph that mix the samples of some inputs; all such nodes if ``outputs`` is None."""
    known = {key: name for key, name in analysis.counted.items() if name in inputs}
    for node in graph:
        known.update(_cut_apart(node, analysis, known))
    mixing = []
    before = None
    if outputs is not None:
        before = _floating_before([value for value in outputs if _samples_in(analysis.layout(value).axes or (), known)])
    for node in graph:
        record = find_record(node) if before is None or node in before else None
        if record is None or record.mixes is None:
            continue
        call = Call(node, [None if value is None else analysis.layout(value) for value in node.inputs], analysis)
        try:
            name = _samples_in(record.mixes(call), known)
        except (Untold, IndexError):
            continue
        if name is not None:
            mixing.append(Mixing(node, name, analysis.axes[name] or 0))
    return mixing


def _of_its_own_input(mixing: Mixing, graph: ir.Graph, analysis: Analysis) -> Mixing:
    """Replace the named input by the first one with the same samples that the node depends on."""
    before = ancestors_of(mixing.node.outputs[0])
    values = {value.name or "": value for value in graph.inputs}
    samples = {name: (analysis.layout(values[name]).axes or ())[axis] for name, axis in analysis.axes.items() if axis is not None}
    for name, along in samples.items():
        if along == samples[mixing.input] and values[name] in before:
            return replace(mixing, input=name, axis=analysis.axes[name] or 0)
    return mixing


def _names_samples(value: ir.Value, graph: ir.Graph) -> bool:
    """True if an axis of an input is open and certainly holds samples."""
    if value.shape is None or not len(value.shape):
        return False
    axis = marked_sample_axis(value)
    extent = None if axis is None else value.shape[axis]
    if extent is None or isinstance(extent, int):
        return False
    if has_sample_axis_mark(value):
        return True
    name = extent.value or ""
    if OF_SAMPLES.search(name) or OF_OTHERS.search(name):
        return bool(OF_SAMPLES.search(name))
    extents = [extent for other in graph.inputs if other.shape is not None for extent in other.shape.dims[1:]]
    firsts = {str(other.shape[0]) for other in graph.inputs if other.shape is not None and len(other.shape)}
    return firsts == {str(value.shape[0])} and all(isinstance(extent, int) and extent != 1 for extent in extents)


def _floating_before(values: Sequence[ir.Value]) -> set[ir.Node]:
    """Return the nodes that values depend on through floating-point values only."""
    seen: set[ir.Node] = set()
    pending = [value.producer() for value in values]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(value.producer() for value in read_by(node) if value.dtype in FLOATING)
    return seen


def _cut_apart(node: ir.Node, analysis: Analysis, known: Mapping[str, str]) -> dict[str, str]:
    """Return the axes of a Reshape that cuts the samples into a fixed number of parts with pieces of several samples each.

    Perhaps the author meant a transposition: ``x.view(steps, -1, features)`` of ``x [batch, steps, features]``.
    """
    if node.op_type != "Reshape" or node.domain != "" or node.inputs[0] is None or node.inputs[1] is None:
        return {}
    operand, target = analysis.layout(node.inputs[0]).axes or ((),), analysis.layout(node.inputs[1]).numbers
    name = _samples_in(operand[:1], known)
    parts = target[0].integer if target else None
    if name is None or len(operand[0]) != 1 or any(isinstance(factor, Factor) for axis in operand[1:] for factor in axis):
        return {}
    if parts is None or parts < 2 or any(number.integer is None for number in target or ()):
        return {}
    result = analysis.layout(node.outputs[0]).axes or ()
    return {factor.key: name for axis in result for factor in axis if isinstance(factor, Factor) and factor.kind is Kind.LOST}


def _samples_in(axes: Sequence[Axis], known: Mapping[str, str]) -> str | None:
    """Return the input with samples along one of the axes, if they differ along it; otherwise None."""
    for axis in axes:
        for factor in axis:
            if isinstance(factor, Factor) and factor.key in known and not factor.is_uniform:
                return known[factor.key]
    return None
