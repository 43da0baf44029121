"""What each initializer is: a weight, a running statistic, or a constant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum

import onnx_ir as ir

from burnish.graph import FLOATING, bodies
from burnish.graph.annotations import masked_weights
from burnish.graph.uses import producer_of
from burnish.importer.export_notes import is_no_parameter, is_parameter, noted_kinds
from burnish.importer.operands import (
    HELD,
    NOT_DIFFERENTIABLE,
    PREPARES,
    QUANTIZES,
    STATISTIC_OPERANDS,
    constant_operands,
    may_hold_integers,
)
from burnish.quantization.graph import observed_range

_ATTRIBUTE = re.compile(r"(?!val_|ortshared)[A-Za-z_]\w*(\.\w+)*")
"""The path of a tensor in a module."""


class InitializerKind(StrEnum):
    """What an initializer is for."""

    WEIGHT = "weight"  # trained unless the user says otherwise
    STATISTIC = "statistic"  # running mean or variance: updated by training, never differentiated
    BUFFER = "buffer"  # looks like a weight, and was none: trained where the user names it
    CONSTANT = "constant"  # everything else


def classify_initializers(model: ir.Model) -> dict[str, InitializerKind]:
    """Tell weights, statistics and constants apart by where they are used, and by what an exporter noted, never by their names.

    A statistic is a running mean or variance of a BatchNormalization, or the range that a quantization observes, or the mask
    of pruned weights. A weight is a floating-point tensor of rank 1 or more, or a scalar that PyTorch's exporter noted to be a
    parameter, from which an output of the model depends through inputs that carry a gradient. One of which the exporter noted
    that it was no parameter, nor computed from one, is a buffer, and so is one that prepares data for the first layer
    (``hold_input_constants``). All else is constant: integers, bounds of Clip, scales of Resize, exponents, scalars, scales of
    integers and of attention, and initializers that nothing depends on.

    Args:
        model: a canonical model (``burnish.importer.load``).

    Returns:
        The kind of every initializer of the main graph, in its order.
    """
    reached = reached_by_gradients(model.graph, model.graph.outputs)
    statistics = _statistics(model.graph)
    noted = noted_kinds(model.graph)
    return {name: _kind(value, reached, statistics, noted) for name, value in model.graph.initializers.items()}


def untrained_scalars(model: ir.Model) -> tuple[str, ...]:
    """Return the floating-point scalars that a gradient would reach, were scalars not constants: a learned temperature.

    Args:
        model: a canonical model.
    """
    reached = reached_by_gradients(model.graph, model.graph.outputs)
    noted = noted_kinds(model.graph)
    scalars = ((name, value) for name, value in model.graph.initializers.items() if value in reached and HELD not in value.meta)
    return tuple(
        name for name, value in scalars if value.shape is not None and len(value.shape) == 0 and not is_parameter(value, noted)
    )


def perhaps_learned_scalars(model: ir.Model) -> tuple[str, ...]:
    """Return the untrained scalars that look like parameters: PyTorch wrote the file, noted nothing, and gave them a name.

    What it computed or wrote down as a number has a name of the exporter's own, such as ``onnx::Mul_12``.

    Args:
        model: a canonical model.
    """
    if model.producer_name != "pytorch" or noted_kinds(model.graph):
        return ()
    return tuple(name for name in untrained_scalars(model) if _ATTRIBUTE.fullmatch(name))


def _kind(value: ir.Value, reached: set[ir.Value], statistics: set[ir.Value], noted: Mapping[str, str]) -> InitializerKind:
    if value in statistics:
        return InitializerKind.STATISTIC
    may_train = value.dtype in FLOATING and value.shape is not None and (len(value.shape) > 0 or is_parameter(value, noted))
    if not may_train or value not in reached or HELD in value.meta:
        return InitializerKind.CONSTANT
    is_buffer = PREPARES in value.meta or is_no_parameter(value, noted)
    return InitializerKind.BUFFER if is_buffer else InitializerKind.WEIGHT


def _statistics(graph: ir.Graph) -> set[ir.Value]:
    """Return the running statistics, also those that reach their layer through nodes that only pass them on."""
    statistics: set[ir.Value] = set()
    for product, _ in masked_weights(graph):
        if (mask := product.inputs[1]) is not None:
            statistics.add(mask)
    for node in graph.all_nodes():
        if (observed := observed_range(node)) is not None:
            statistics.add(observed)
        for index in STATISTIC_OPERANDS.get(node.op_type, ()) if node.domain == "" else ():
            value = node.inputs[index] if index < len(node.inputs) else None
            while value is not None:
                statistics.add(value)
                producer = producer_of(value, "Identity", "Cast")
                value = None if producer is None else producer.inputs[0]
    return statistics


def reached_by_gradients(graph: ir.Graph, targets: Iterable[ir.Value]) -> set[ir.Value]:
    """Return every floating-point value that ``targets`` depend on through inputs that carry a gradient; they themselves too.

    Integers through which a gradient passes, those of a quantization, are among them.
    """
    reached = {value for value in targets if value.dtype in FLOATING}
    _reach(graph, reached)
    return reached


def _reach(graph: ir.Graph, reached: set[ir.Value]) -> None:
    for node in reversed(list(graph)):
        if not any(output in reached for output in node.outputs):
            continue
        for body in bodies(node):
            reached.update(value for value in body.outputs if value.dtype in FLOATING)
            _reach(body, reached)
        if node.domain == "" and node.op_type in NOT_DIFFERENTIABLE:
            continue
        constant = constant_operands(node)
        is_rounding = node.domain == "" and node.op_type in QUANTIZES
        gives_numbers = is_rounding or any(output in reached and output.dtype in FLOATING for output in node.outputs)
        for index, value in enumerate(node.inputs):
            if value is None or index in constant:
                continue
            if gives_numbers if value.dtype in FLOATING else may_hold_integers(node, index):
                reached.add(value)
