"""Nodes that work along the axis of the samples, so that what a model computes of one sample depends on the others of its batch.

A Softmax along axis 0, a recurrent layer or attention that takes the first axis for time, a mean of everything, samples that a
Reshape puts into one sequence: a program runs with each of them, and its loss falls, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from burnish.graph import FLOATING
from burnish.graph.annotations import has_sample_axis_mark, marked_sample_axis
from burnish.graph.uses import ancestors_of, read_by
from burnish.operators.axes import Call, Untold
from burnish.operators.extents import Axes, Axis, Factor, Kind
from burnish.sample_axes.analysis import Analysis

OF_SAMPLES = re.compile(r"batch|sample|^bs$", re.IGNORECASE)
OF_OTHERS = re.compile(r"seq|time|len|step|frame|tok|word|row|node|edge|atom|point|pixel|^t$|^l$", re.IGNORECASE)
RECURRENT = ("RNN", "GRU", "LSTM")
_EXPONENTIAL = ("Exp", "Softmax", "LogSoftmax")


@dataclass(frozen=True)
class Mixing:
    """A node that works along samples.

    Attributes:
        node: the node.
        input: the name of the input that these samples are of.
        axis: of that input, along which they stand.
    """

    node: ir.Node
    input: str
    axis: int


def mixing_nodes(graph: ir.Graph, outputs: Collection[ir.Value]) -> list[Mixing]:
    """Return the nodes that work along the axis of samples, of those that outputs with a row for each sample come from.

    Only where the model says which axis of an input is that of samples: by a mark, by the name of the extent, or as the only one
    that is open. Of a sequence, a cloud of points or a graph it is another.

    Args:
        graph: of a model, of standard operators; in order. Its inputs are a batch.
        outputs: values of it.
    """
    certain = {value.name or "" for value in graph.inputs if _names_samples(value, graph)}
    if not certain:
        return []
    analysis = Analysis(graph, [value.name or "" for value in graph.inputs])
    return [_of_its_own_input(each, graph, analysis) for each in mixing_in(analysis, graph, outputs, certain)]


def mixing_in(analysis: Analysis, graph: ir.Graph, outputs: Collection[ir.Value] | None, inputs: Collection[str]) -> list[Mixing]:
    """Return the same of a graph that was analysed, for the samples of some inputs alone; without outputs, of all nodes."""
    known = {key: name for key, name in analysis.counted.items() if name in inputs}
    for node in graph:
        known.update(_cut_apart(node, analysis, known))
    mixing = []
    before = None
    if outputs is not None:
        before = _floating_before([value for value in outputs if _samples_in(analysis.layout(value).axes or (), known)])
    for node in graph:
        along = _ALONG.get(node.op_type) if node.domain == "" and (before is None or node in before) else None
        if along is None:
            continue
        call = Call(node, [None if value is None else analysis.layout(value) for value in node.inputs], analysis)
        try:
            name = _samples_in(along(call), known)
        except (Untold, IndexError):
            continue
        if name is not None:
            mixing.append(Mixing(node, name, analysis.axes[name] or 0))
    return mixing


def _of_its_own_input(mixing: Mixing, graph: ir.Graph, analysis: Analysis) -> Mixing:
    """Name, of the inputs that have the same samples, the first that the node reads something of."""
    before = ancestors_of(mixing.node.outputs[0])
    values = {value.name or "": value for value in graph.inputs}
    samples = {name: (analysis.layout(values[name]).axes or ())[axis] for name, axis in analysis.axes.items() if axis is not None}
    for name, along in samples.items():
        if along == samples[mixing.input] and values[name] in before:
            return replace(mixing, input=name, axis=analysis.axes[name] or 0)
    return mixing


def _names_samples(value: ir.Value, graph: ir.Graph) -> bool:
    """Whether an axis of an input is certainly that of samples, and open."""
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
    """Return the nodes that values come from by way of floating-point values alone."""
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
    """Return the axes of a Reshape that cuts the samples into a fixed number of parts, of which each holds pieces of several.

    It was perhaps taken for a transposition: ``x.view(steps, -1, features)`` of ``x [batch, steps, features]``.
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
    """Return the input whose samples stand along one of the axes, and are not all alike there; None where there is none."""
    for axis in axes:
        for factor in axis:
            if isinstance(factor, Factor) and factor.key in known and not factor.is_uniform:
                return known[factor.key]
    return None


def _named(call: Call) -> Axes:
    """The axis of an attribute, by default the last."""
    return (call.axes()[call.axis(default=-1)],)


def _following(call: Call) -> Axes:
    """That of an attribute and those after it."""
    return call.axes()[call.axis(default=-1) :]


def _reduced(call: Call) -> Axes:
    axes, named = call.axes(), call.named_axes()
    if not named:
        return () if call.attribute("noop_with_empty_axes", 0) else axes
    return tuple(axes[axis % len(axes)] for axis in named)


def _extreme(call: Call) -> Axes:
    """Of a reduction whose result is only subtracted, from the exponents of a softmax, nothing depends on it."""
    readers = call.node.outputs[0].consumers()
    return () if readers and all(_is_exponent(reader) for reader in readers) else _reduced(call)


def _is_exponent(node: ir.Node) -> bool:
    """Whether a node gives a difference that is read as an exponent."""
    return node.op_type == "Sub" and any(reader.op_type in _EXPONENTIAL for reader in node.outputs[0].consumers())


def _contracted(call: Call) -> Axes:
    return call.axes(0)[-1:] if len(call.axes(1)) > 0 else ()


def _contracted_by_gemm(call: Call) -> Axes:
    return (call.axes(0)[0 if call.attribute("transA", 0) else 1],)


def _summed_by_einsum(call: Call) -> Axes:
    terms, _, result = str(call.attribute("equation")).replace(" ", "").partition("->")
    if "->" not in str(call.attribute("equation")) or "..." in terms:
        return ()
    pairs = [
        (letter, axis) for index, term in enumerate(terms.split(",")) for letter, axis in zip(term, call.axes(index), strict=True)
    ]
    return tuple(axis for letter, axis in pairs if letter not in result)


def _time(call: Call) -> Axes:
    return (call.axes()[1 if call.attribute("layout", 0) else 0],)


def _keys(call: Call) -> Axes:
    """The axis of an attention along which its softmax is taken."""
    return (call.axes(1)[-2],)


def _scanned(call: Call) -> Axes:
    """The axes that are gone along, where each round reads what the one before it leaves."""
    number = int(call.attribute("num_scan_inputs"))
    states = len(call) - number
    along = call.attribute("scan_input_axes", [0] * number)
    return tuple(call.axes(states + index)[axis] for index, axis in enumerate(along)) if states else ()


def _cumulated(call: Call) -> Axes:
    at = call.integers(1)
    return () if not at else (call.axes()[at[0] % call.rank()],)


_ALONG: dict[str, Callable[[Call], Axes]] = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "TopK"), _named),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _following),
    **dict.fromkeys(
        [f"Reduce{name}" for name in ("L1", "L2", "LogSum", "LogSumExp", "Mean", "Prod", "Sum", "SumSquare")], _reduced
    ),
    **dict.fromkeys(("ReduceMax", "ReduceMin"), _extreme),
    **dict.fromkeys(RECURRENT, _time),
    "InstanceNormalization": lambda call: call.axes()[2:],
    "MatMul": _contracted,
    "Gemm": _contracted_by_gemm,
    "Einsum": _summed_by_einsum,
    "CumSum": _cumulated,
    "Attention": _keys,
    "Scan": _scanned,
}
"""The axes whose places go into one element of a result together."""
