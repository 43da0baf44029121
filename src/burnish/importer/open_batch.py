"""Conversion of models for a single sample to batches of any size.

``open_batch`` walks over the nodes of a canonical model like ``jax.vmap`` over a function: it tracks the sample axis of each
value, and each operator's record has a rule that computes the same for every sample (``burnish.operators.reopening``). Operators
without a rule are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from burnish.errors import ConfigurationError, ModelError, UnsupportedOperatorError
from burnish.graph import Names, attribute_value, describe_node, remove_node
from burnish.graph.annotations import has_sample_axis_mark, mark_sample_axis, marked_sample_axis
from burnish.graph.inference import RANDOM_OPERATORS
from burnish.graph.uses import captured_by
from burnish.importer.dimensions import settle_loop_shapes
from burnish.importer.nodes import name_everything
from burnish.importer.shapes import infer_shapes
from burnish.operators.registry import Elementwise, find_record
from burnish.operators.reopen_rules import broadcast, unary
from burnish.operators.reopening import FIRST, Batch, Call, Opening, Operand, Refused, ReopenRule, Result, sample_shape

EXPORT_REMEDY = "Export the model again with an open batch (dynamic axes), or train it at batch 1"

RECURRENT_OPERANDS = (0, 5, 6)
"""Operands of a recurrent layer with samples: its sequence and initial states."""

KEEPS_AXES = frozenset({"Cast", "Identity", "Slice"})
"""Operators that exporters insert between an input and a recurrent layer."""

BY_ELEMENT: Mapping[Elementwise | None, ReopenRule] = {Elementwise.UNARY: unary, Elementwise.BROADCAST: broadcast}
"""Rules for elementwise operators whose records have none."""


def open_batch(model: ir.Model) -> bool:
    """Make a model for one sample accept any number of samples, in place.

    The sample axis of each input is its first axis of extent 1, or the second if a recurrent layer reads it; it is named
    ``batch``. Inputs without such an axis are the same for all samples. If all inputs are vectors, they get a leading sample
    axis, and scalars are the same for all samples. Axes recorded with inputs have priority. Every node that depends on samples is
    rewritten so that each sample's results stay the same, or refused. Only batch normalization in training uses statistics over
    all samples.

    Outputs have their samples wherever the axis ends up, or along the first axis if it was dropped or all inputs are vectors.
    Sample axes are recorded with the inputs.

    Args:
        model: a canonical model.

    Raises:
        ConfigurationError: no input has an axis of extent 1 and not all are vectors; or the batch is open already.
        UnsupportedOperatorError: a node cannot take several samples; the message gives the reason and a remedy.
    """
    graph = model.graph
    inputs = _inputs(graph)
    symbol = Names(
        dim.value
        for value in (*graph.inputs, *(output for node in graph for output in node.outputs))
        if value.shape is not None
        for dim in value.shape.dims
        if isinstance(dim, ir.SymbolicDim)
    ).take("batch")
    opening = Opening(graph, inputs)
    reached = [node for node in list(graph) if _open_node(node, opening)]
    opening.before = None
    outputs = _open_outputs(graph, opening)
    _hand_over_names(reached, opening, outputs)
    expected = {
        operand.value: _opened_shape(operand, symbol) for operand in opening.results.values() if operand.batch is not None
    }
    for value, operand in outputs.items():
        expected[value] = _opened_shape(operand, symbol)
    for value in (*(value for value, _ in inputs), *outputs):
        value.shape = expected[value]
    held = dict(inputs)
    for value in graph.inputs:
        mark_sample_axis(value, held[value].axis if value in held else None)
    name_everything(model)
    infer_shapes(model)
    settle_loop_shapes(model)
    for value, shape in expected.items():
        _check(value, shape)
    return True


def _inputs(graph: ir.Graph) -> list[tuple[ir.Value, Batch]]:
    shapes = {value: sample_shape(value) for value in graph.inputs}
    apart = {value for value in shapes if has_sample_axis_mark(value) and marked_sample_axis(value) is None}
    held = [
        (value, Batch(_sample_axis(value, shape), is_extra=False))
        for value, shape in shapes.items()
        if shape is not None and value not in apart and (1 in shape or has_sample_axis_mark(value))
    ]
    described = ", ".join(f"'{value.name}' {_written(value)}" for value in graph.inputs) or "none"
    first = next((shape for shape in shapes.values() if shape), None)
    if first is not None and isinstance(first[0], str) and 1 not in first:
        raise ConfigurationError(
            f"batch='open': the batch of this model is open already: its inputs are {described}. Leave batch out: the model "
            "takes batches of any size as it is"
        )
    if first and all(shape is not None and len(shape) <= 1 for shape in shapes.values()) and 1 not in first:
        held = [(value, FIRST) for value, shape in shapes.items() if shape and value not in apart]
    if not held:
        raise ConfigurationError(
            "batch='open': no input of the model has an axis of extent 1, in which the samples of a batch could stand: its "
            f"inputs are {described}. Leave batch out, or export the model at batch 1, or of one vector"
        )
    return held


def _sample_axis(value: ir.Value, shape: Sequence[int | str | None]) -> int:
    """Return the first axis of extent 1, or the second for inputs of a recurrent layer, whose first is steps or directions.

    A recorded axis has priority.
    """
    marked = marked_sample_axis(value) if has_sample_axis_mark(value) else None
    if marked is not None:
        if shape[marked] != 1:
            raise ConfigurationError(
                f"batch='open': the input '{value.name}' {_written(value)} holds its samples along axis {marked} (sample_axis), "
                f"and only an axis of extent 1 is opened: {'leave batch out' if 1 not in shape else 'name another axis'}"
            )
        return marked
    pending = [value]
    while pending:
        for node, index in pending.pop().uses():
            is_recurrent = node.domain == "" and node.op_type in ("GRU", "LSTM", "RNN") and index in RECURRENT_OPERANDS
            if is_recurrent and not attribute_value(node, "layout", 0) and shape[1] == 1:
                return 1
            if node.domain == "" and node.op_type in KEEPS_AXES and index == 0:
                pending.extend(node.outputs)
    return shape.index(1)


def _written(value: ir.Value) -> str:
    shape = sample_shape(value)
    return "of unknown shape" if shape is None else f"[{', '.join('?' if extent is None else str(extent) for extent in shape)}]"


def _open_node(node: ir.Node, opening: Opening) -> bool:
    opening.before = node
    operands = [opening.operand(value) for value in node.inputs if value is not None]
    try:
        if any(opening.operand(value).batch is not None for value in captured_by(node)):
            raise Refused("reads samples inside its body, which runs once")
        if all(operand.batch is None for operand in operands):
            _check_drawn(node)
            return False
        record = find_record(node) if node.domain == "" else None
        rule = None if record is None else record.reopen or BY_ELEMENT.get(record.elementwise)
        if rule is None:
            raise Refused("does something with samples that is not known here")
        results = _by_rule(rule, Call(node, opening, None if record is None else record.axes))
    except Refused as refused:
        raise _unsupported(node, refused) from refused
    each: list[Result | None] = [results] if isinstance(results, tuple) else list(results)
    for output, result in zip(node.outputs, each, strict=False):
        if result is not None and output.name:
            opening.settle(output, *result)
    return True


def _unsupported(node: ir.Node, refused: Refused) -> UnsupportedOperatorError:
    return UnsupportedOperatorError(f"batch='open': {describe_node(node)} {refused.reason}. {refused.remedy or EXPORT_REMEDY}")


def _by_rule(rule: ReopenRule, call: Call) -> Result | Sequence[Result | None]:
    try:
        return rule(call)
    except Refused:
        raise
    except Exception as error:
        # The standard's checks allow contradictory operands and attributes.
        raise Refused(f"has operands or attributes that do not fit together ({type(error).__name__}: {error})") from error


def _check_drawn(node: ir.Node) -> None:
    """Raise Refused for numbers that are drawn once for all samples but may have been meant per sample."""
    if node.domain != "" or node.op_type not in RANDOM_OPERATORS:
        return
    shape = sample_shape(node.outputs[0])
    if shape is None or 1 in shape:
        raise Refused(
            f"draws numbers {_written(node.outputs[0])} without reading a sample: whether for each or once for all cannot be told"
        )


def _open_outputs(graph: ir.Graph, opening: Opening) -> dict[ir.Value, Operand]:
    opened: dict[ir.Value, Operand] = {}
    for position, output in enumerate(graph.outputs):
        operand = opening.operand(output)
        if operand.batch is None or output.is_graph_input():
            continue
        node = output.producer()
        if operand.sample_shape is None and node is not None:
            raise _unsupported(node, Refused(f"has the result '{output.name}', whose rank is not known"))
        batch = operand.batch
        if opening.in_front:
            batch = FIRST
        elif batch.is_extra:
            batch = Batch(0, is_extra=not operand.shape or operand.shape[0] != 1)
        value = opening.placed(operand, batch)
        if value.is_graph_input() or (value is not operand.value and value in opening.named):
            value = opening.emit("Identity", value)
        value.type = output.type
        graph.outputs[position] = value
        if value.name != output.name:
            name, output.name = output.name, None
            value.name = name
        opened[value] = Operand(value, operand.sample_shape, batch)
    return opened


def _hand_over_names(reached: list[ir.Node], opening: Opening, outputs: dict[ir.Value, Operand]) -> None:
    for node in reversed(reached):
        values = [(output, output.name) for output in node.outputs]
        remove_node(node)
        for value, name in values:
            result = opening.results.get(value)
            if result is not None and name and result.value not in outputs:
                value.name, result.value.name = None, name


def _opened_shape(operand: Operand, symbol: str) -> ir.Shape:
    assert operand.batch is not None
    dims: list[int | str | None] = list(operand.shape)
    dims[operand.batch.axis : operand.batch.axis + (not operand.batch.is_extra)] = [symbol]
    return ir.Shape(dims)


def _check(value: ir.Value, expected: ir.Shape) -> None:
    """Raise ModelError if inference contradicts a rule's shape: a defect that must not go unnoticed."""
    inferred = value.shape
    if inferred is None:
        return
    pairs = zip(inferred.dims, expected.dims, strict=False)
    if len(inferred) != len(expected) or any(
        isinstance(one, int) and one != other and _is_certain(other) for one, other in pairs
    ):
        producer = value.producer()
        raise ModelError(
            f"batch='open': {'an input' if producer is None else describe_node(producer)} should have the shape {expected} with "
            f"all samples, and has {inferred}. This is a defect of burnish worth reporting; export the model with an open batch"
        )


def _is_certain(dim: int | ir.SymbolicDim) -> bool:
    return isinstance(dim, int) or dim.value is not None
