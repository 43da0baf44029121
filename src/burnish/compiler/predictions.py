"""The values that the loss reads: the chosen outputs, or the logits before an activation that the loss applies itself.

A final Softmax or Sigmoid is skipped if the nodes after it only move or copy elements; these nodes are repeated on the logits.
Probabilities of two classes made from one logit, ``1 - sigmoid(z)`` and ``sigmoid(z)``, are the softmax of ``-z / 2`` and ``z /
2``. If a loss would still read probabilities, ``Prediction.bounded_by`` names the node that bounds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import onnx_ir as ir

from burnish.compiler.probabilities import bounding_node, is_open
from burnish.errors import ConfigurationError
from burnish.graph import FLOATING, Builder, Names, constant_array, describe_node, same_dimension
from burnish.losses import Activation, Reading
from burnish.settings import nearest

REMEDY = (
    "probabilities are trained as if they were logits. Let it read what comes before (outputs='{}'; any value of the model will "
    "do), or choose a loss of probabilities, such as binary_cross_entropy"
)


@dataclass(frozen=True)
class Prediction:
    """One value that the loss reads.

    Attributes:
        value: the value.
        output: the requested name.
        stepped_over: the skipped activation between the two, which the loss applies itself; None if there is none.
        bounded_by: the node that turns the value into probabilities, although the loss applies an activation to it; None if none
            is known.
        class_axis: the axis along which probabilities would sum to 1, if only the numbers can show whether they are
            probabilities; else None.
    """

    value: ir.Value
    output: str
    stepped_over: ir.Node | None = None
    bounded_by: ir.Node | None = None
    class_axis: int | None = None

    @property
    def name(self) -> str:
        return self.value.name or ""

    def options(self) -> dict[str, Any]:
        """Return the stored part, as JSON-compatible values; ``class_axis`` only if there is something to check."""
        options: dict[str, Any] = {"output": self.output, "reads": self.name}
        return options if self.class_axis is None else {**options, "class_axis": self.class_axis}

    def has_classes_last(self) -> bool:
        """True if, of three axes, the second is open, like that of a sequence, and the last is not: class axes are never open."""
        dims = () if self.value.shape is None else self.value.shape.dims
        return len(dims) == 3 and not isinstance(dims[1], int) and isinstance(dims[2], int) and dims[2] > 1

    def warning(self, loss: str) -> str:
        """Return the warning for a loss that applies an activation to probabilities."""
        assert self.bounded_by is not None
        before = next((value.name for value in self.bounded_by.inputs if value is not None and value.name), "...")
        return (
            f"the loss {loss} applies an activation itself, and reads '{self.name}', which {describe_node(self.bounded_by)} "
            f"bounds to [0, 1]: {REMEDY.format(before)}"
        )


def find_predictions(
    model: ir.Model, chosen: str | Sequence[str] | None, readings: Sequence[Reading], loss: str
) -> tuple[Prediction, ...]:
    """Return the values the loss reads, one per reading; nodes that move elements may be added to the graph.

    Args:
        model: a canonical model, in which written-out activations are recognized.
        chosen: the output, or the outputs in order, for readings without a name; any other value of the graph is possible, by
            name. None: the only output, or the only floating-point one.
        readings: readings of the loss; a final activation that the loss applies itself is skipped.
        loss: name of the loss.

    Raises:
        ConfigurationError: an output does not exist, there are several to choose from, or the loss reads another number of them.
    """
    count = max((reading.position + 1 for reading in readings if reading.output is None), default=0)
    names = _chosen_outputs(chosen, count, model.graph, loss)
    predictions = []
    for reading in readings:
        name = names[reading.position] if reading.output is None else reading.output
        value = _value_named(name, model.graph, "outputs" if reading.output is None else f"loss {loss}")
        predictions.append(_read(model.graph, value, reading.activation))
    return tuple(predictions)


def _value_named(name: str, graph: ir.Graph, option: str) -> ir.Value:
    outputs = {value.name or "": value for value in graph.outputs}
    if name in outputs:
        return outputs[name]
    inside = {value.name or "": value for node in graph for value in node.outputs if value.name}
    if name in inside:
        return inside[name]
    listed = ", ".join(f"'{output}'" for output in outputs)
    hint = f"; did you mean the value {nearest(name, list(inside))}?" if inside else ""
    raise ConfigurationError(f"{option}: the model has no output '{name}'; it has {listed}{hint}")


def _chosen_outputs(chosen: str | Sequence[str] | None, count: int, graph: ir.Graph, loss: str) -> list[str]:
    """Return ``count`` names: the chosen ones, or all outputs of a model that has as many."""
    outputs = [value.name or "" for value in graph.outputs]
    listed = ", ".join(f"'{name}'" for name in outputs)
    if chosen is None:
        floating = [value.name or "" for value in graph.outputs if value.dtype in FLOATING]
        for names in (outputs, floating):
            if len(names) == count or count == 0:
                return list(names[:count])
        if not outputs:
            raise ConfigurationError(f"the loss {loss} has nothing to read: the graph of the model declares no outputs")
        which = "which one the loss reads" if count == 1 else f"which {count} the loss {loss} reads, in order,"
        own = [value.name for value in graph.outputs if value.dtype in FLOATING and value.shape is not None and not value.shape]
        hint = ""
        if own:
            hint = f"; where '{own[0]}' is the loss that the model computes itself, give output='{own[0]}' in place of loss"
            hint += f" (--loss output:output={own[0]})"
        raise ConfigurationError(f"the model has the outputs {listed}: say {which} with the option outputs{hint}")
    names = [chosen] if isinstance(chosen, str) else list(chosen) if isinstance(chosen, Iterable) else [chosen]
    if count == 1 and (len(names) != 1 or not isinstance(names[0], str)):
        raise ConfigurationError(
            f"outputs is the name of the one output that the loss reads, not {chosen!r}; the model has {listed}"
        )
    if count == 0:
        raise ConfigurationError(f"outputs: the loss {loss} says itself which outputs it reads; leave outputs out")
    if len(names) != count or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"outputs: the loss {loss} reads {count} outputs, in order: give as many names, not {chosen!r}; the model has "
            f"{listed}"
        )
    return names


def _read(graph: ir.Graph, value: ir.Value, activation: Activation | None) -> Prediction:
    name = value.name or ""
    if activation is None:
        return Prediction(value, name)
    node, movers = _find_activation(value, activation)
    if node is None:
        bounded_by = bounding_node(value)
        unknown = activation.axis if bounded_by is None and not is_open(value) else None
        return Prediction(value, name, bounded_by=bounded_by, class_axis=unknown)
    before = node.inputs[0] if node.op_type in activation.operators else _paired_logits(graph, node)
    assert before is not None
    for mover, output in reversed(movers):
        if mover.op_type != "Identity":
            before = _repeated(graph, mover, output, before)
    return Prediction(before, name, stepped_over=node, bounded_by=bounding_node(before))


def _find_activation(value: ir.Value, activation: Activation) -> tuple[ir.Node | None, list[tuple[ir.Node, ir.Value]]]:
    """Return the activation whose moved output is the value, along the axis of the loss, and the nodes that move it.

    That may be the last node of two classes' probabilities made from one logit. The moving nodes come last first, each with the
    output that leads to ``value``.
    """
    movers: list[tuple[ir.Node, ir.Value]] = []
    axis = activation.axis
    if axis is not None and axis < 0 and value.shape is not None:
        axis += len(value.shape)
    while (node := value.producer()) is not None and node.domain == "" and node.inputs and node.inputs[0] is not None:
        if node.op_type in activation.operators:
            if axis is None or _is_along(node, axis):
                return node, movers
            return None, movers
        if axis is not None and _logit_of_pair(node, axis) is not None:
            return node, movers
        moved_from = MOVERS.get(node.op_type)
        if moved_from is None:
            return None, movers
        if axis is not None:
            axis = moved_from(node, value, axis)
            if axis is None:
                return None, movers
        elif node.op_type == "Cast" and node.inputs[0].dtype not in FLOATING:
            return None, movers
        movers.append((node, value))
        value = node.inputs[0]
    return None, movers


def sorting_node(value: ir.Value, axis: int) -> ir.Node | None:
    """Return the TopK that sorts a value along an axis, if the nodes after it only move elements; else None."""
    return _find_activation(value, Activation(("TopK",), axis))[0]


def _logit_of_pair(node: ir.Node, axis: int) -> ir.Value | None:
    """Return z if a node gives ``sigmoid(-z)`` and ``sigmoid(z)``, concatenated along an axis; else None.

    The graph may hold a Sigmoid of both, or ``1 - p`` and ``p = sigmoid(z)``.
    """
    joined = node.inputs[0].producer() if node.op_type == "Sigmoid" and node.inputs[0] is not None else node
    if joined is None or joined.domain != "" or joined.op_type != "Concat" or len(joined.inputs) != 2:
        return None
    first, second = joined.inputs
    shape = None if second is None else second.shape
    along = joined.attributes["axis"].as_int()
    if first is None or second is None or shape is None or axis >= len(shape) or along not in (axis, axis - len(shape)):
        return None
    other, sigmoid = first.producer(), second.producer()
    if shape.dims[axis] != 1 or other is None or other.domain != "":
        return None
    if node is not joined:
        return second if other.op_type == "Neg" and other.inputs[0] is second else None
    is_rest = other.op_type == "Sub" and other.inputs[1] is second and _is_one(other.inputs[0])
    if not is_rest or sigmoid is None or sigmoid.domain != "" or sigmoid.op_type != "Sigmoid":
        return None
    return sigmoid.inputs[0]


def _is_one(value: ir.Value | None) -> bool:
    array = None if value is None else constant_array(value)
    return array is not None and array.size == 1 and array.dtype.kind == "f" and array.reshape(-1)[0] == 1


def _paired_logits(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """Add the logits of two classes if a node gives their probabilities from one logit."""
    joined = node if node.op_type == "Concat" else node.inputs[0].producer()  # type: ignore[union-attr]
    assert joined is not None
    axis = joined.attributes["axis"].as_int()
    shape = node.outputs[0].shape
    logit = _logit_of_pair(node, axis if axis >= 0 or shape is None else axis + len(shape))
    assert logit is not None
    builder = Builder(graph)
    half = builder.tensor(logit) * 0.5
    pair = builder.op("Concat", -half, half, axis=axis).value
    pair.name = Names.of(graph).take(f"{logit.name}:pair")
    return pair


def _is_along(node: ir.Node, axis: int) -> bool:
    normalized = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if shape is not None and normalized < 0:
        normalized += len(shape)
    return normalized == axis or (normalized == -1 and axis == _last_axis_of_matrix(node))


def _last_axis_of_matrix(node: ir.Node) -> int | None:
    """Return 1 if the operand of a node is certainly a matrix, even if its shape is unknown."""
    source = node.inputs[0].producer() if node.inputs[0] is not None else None
    return 1 if source is not None and source.op_type == "Flatten" else None


def _repeated(graph: ir.Graph, mover: ir.Node, output: ir.Value, operand: ir.Value) -> ir.Value:
    """Add a node that moves the elements of ``operand`` like ``mover`` moves its own; return the matching output."""
    node = ir.Node(
        mover.domain,
        mover.op_type,
        [operand, *mover.inputs[1:]],
        attributes=list(mover.attributes.values()),
        num_outputs=len(mover.outputs),
    )
    for moved, other in zip(node.outputs, mover.outputs, strict=True):
        moved.shape = None if other.shape is None else other.shape.copy()
        moved.type = other.type
    graph.append(node)
    return node.outputs[output.index() or 0]


def _same_axis(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    return axis


def _through_cast(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    return axis if node.inputs[0] is not None and node.inputs[0].dtype in FLOATING and output.dtype in FLOATING else None


def _through_transpose(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    if "perm" not in node.attributes:
        return None if output.shape is None else len(output.shape) - 1 - axis
    permutation = node.attributes["perm"].as_ints()
    return permutation[axis] if axis < len(permutation) else None


def _through_slice(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    """Lines along the axis stay whole if only other axes are sliced."""
    if len(node.inputs) < 4 or node.inputs[3] is None:
        starts = constant_array(node.inputs[1])
        return axis if starts is not None and axis >= starts.size else None
    axes = constant_array(node.inputs[3])
    if axes is None or output.shape is None:
        return None
    return None if axis in {int(sliced) % len(output.shape) for sliced in axes.reshape(-1)} else axis


def _through_split(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    split = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    if split < 0:
        if output.shape is None:
            return None
        split += len(output.shape)
    return None if split == axis else axis


def _through_gather(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    indices = node.inputs[1]
    data = node.inputs[0]
    if data is None or data.shape is None or indices is None or indices.shape is None:
        return None
    gathered = (node.attributes["axis"].as_int() if "axis" in node.attributes else 0) % len(data.shape)
    if axis < gathered:
        return axis
    behind = axis - len(indices.shape) + 1
    return behind if axis >= gathered + len(indices.shape) else None


def _through_expand(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    """Lines are copied whole if the axis keeps its extent."""
    data = node.inputs[0]
    if data is None or data.shape is None or output.shape is None:
        return None
    data_axis = axis - (len(output.shape) - len(data.shape))
    return data_axis if data_axis >= 0 and same_dimension(data.shape.dims[data_axis], output.shape.dims[axis]) else None


def _through_order(node: ir.Node, output: ir.Value, axis: int) -> int | None:
    """Return the axis that becomes ``axis`` if elements keep their order: of the same extent, with as many elements after it."""
    data = node.inputs[0]
    assert data is not None
    if _restores_matrix(node, output, axis):
        return 1
    if data.shape is None or output.shape is None or axis >= len(output.shape):
        return None
    before, after = data.shape.dims, output.shape.dims
    for data_axis, extent in enumerate(before):
        if same_dimension(extent, after[axis]) and (
            _same_product(before[data_axis + 1 :], after[axis + 1 :]) or _same_product(before[:data_axis], after[:axis])
        ):
            return data_axis
    return None


def _restores_matrix(node: ir.Node, output: ir.Value, axis: int) -> bool:
    """True if a Reshape restores the axes that a Flatten before the activation joined, with ``axis`` as the rows.

    Softmax before opset 13 normalizes over all axes from one on, and is loaded in this form.
    """
    activation = node.inputs[0].producer() if node.inputs[0] is not None else None
    flattened = activation.inputs[0].producer() if activation is not None and activation.inputs and activation.inputs[0] else None
    target = node.inputs[1].producer() if node.op_type == "Reshape" and node.inputs[1] is not None else None
    if flattened is None or flattened.op_type != "Flatten" or target is None or target.op_type != "Shape":
        return False
    rank = None if output.shape is None else len(output.shape)
    if target.inputs[0] is not flattened.inputs[0] or target.attributes or rank is None:
        return False
    first = flattened.attributes["axis"].as_int() if "axis" in flattened.attributes else 1
    assert output.shape is not None
    return first % rank == axis and all(extent == 1 for extent in output.shape.dims[axis + 1 :])


def _same_product(left: Sequence[int | ir.SymbolicDim], right: Sequence[int | ir.SymbolicDim]) -> bool:
    names = [Counter(extent.value for extent in side if not isinstance(extent, int)) for side in (left, right)]
    numbers = [prod(extent for extent in side if isinstance(extent, int)) for side in (left, right)]
    return None not in names[0] and names[0] == names[1] and numbers[0] == numbers[1]


ORDERED = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
"""Operators that keep the order of elements."""
MOVERS: dict[str, Callable[[ir.Node, ir.Value, int], int | None]] = {
    "Identity": _same_axis,
    "Cast": _through_cast,
    "Transpose": _through_transpose,
    "Slice": _through_slice,
    "Split": _through_split,
    "Gather": _through_gather,
    "Expand": _through_expand,
    **dict.fromkeys(ORDERED, _through_order),
}
"""A function of (node, output, axis) for each operator that only moves or copies elements of its first operand. It returns the
axis of the operand that became the axis of the output, counted from the front, or None if lines along it may have been broken
up.
"""
