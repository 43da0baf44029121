"""What each initializer is: a weight, a running statistic or a constant; and weights that are perhaps not what they were.

An exporter may have merged several into one, or made two of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum

import numpy as np
import onnx_ir as ir

from burnish.graph import FLOATING, bodies, constant_array
from burnish.graph.annotations import HELD, PREPARES, masked_weights
from burnish.graph.uses import producer_of
from burnish.importer.export_notes import (
    is_computed,
    is_no_parameter,
    is_parameter,
    missing_parameters,
    noted_kinds,
    parameters_behind,
)
from burnish.importer.operands import NOT_DIFFERENTIABLE, QUANTIZES, STATISTIC_OPERANDS, constant_operands, may_hold_integers
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
    scalars = ((name, value) for name, value in model.graph.initializers.items() if value in reached and not HELD.is_on(value))
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
    if not may_train or value not in reached or HELD.is_on(value):
        return InitializerKind.CONSTANT
    is_buffer = PREPARES.is_on(value) or is_no_parameter(value, noted)
    return InitializerKind.BUFFER if is_buffer else InitializerKind.WEIGHT


def _statistics(graph: ir.Graph) -> set[ir.Value]:
    """Return the running statistics, also those that reach their layer through nodes that only pass them on."""
    statistics: set[ir.Value] = set()
    for product, _ in masked_weights(graph):
        if (mask := product.inputs[1]) is not None:
            statistics.add(mask)
    for node in graph.all_nodes():
        if node.op_type == "QuantizeLinear" and (observed := observed_range(node)) is not None:
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


_NAMED_BY_EXPORTER = re.compile(r"onnx::(?!(MatMul|Gemm|LSTM|GRU|RNN|Conv|ConvTranspose)_)\w+_\d+")

STARTING = 16
"""Numbers at the start of a weight by which most are told apart."""


def perhaps_merged(model: ir.Model) -> dict[str, int]:
    """Return the weights that look like several parameters in one, and how many operands each is.

    Scales of one and biases of zero are equal in every layer of a fresh model, and an optimizer of graphs that keeps equal
    tensors once makes one of them, which trains as one. A vector of one value that several nodes read is most likely that; layers
    that really share a scale share larger weights as well, whose values differ. Where an exporter noted all parameters, none is.

    Args:
        model: a canonical model.
    """
    merged: dict[str, int] = {}
    if noted_kinds(model.graph) and not missing_parameters(model.graph):
        return merged
    for name, kind in classify_initializers(model).items():
        value = model.graph.initializers[name]
        readers = [reader for reader, _ in value.uses()]
        if kind is not InitializerKind.WEIGHT or len(readers) < 2 or value.shape is None or len(value.shape) != 1:
            continue
        array = constant_array(value)
        if array is not None and array.size > 1 and (array == array[0]).all():
            merged[name] = len(readers)
    return merged


def perhaps_copied(model: ir.Model) -> dict[str, str]:
    """Return the matrices that hold the numbers of a table of rows, or of its transposition, and the name of that table.

    An exporter that computes ahead of time makes two matrices of one that an embedding and a head share; they train apart.
    Matrices of one value are left out: fresh layers may have equal ones.

    Args:
        model: a canonical model.
    """
    kinds = classify_initializers(model)
    values = (model.graph.initializers[name] for name, kind in kinds.items() if kind is InitializerKind.WEIGHT)
    matrices = [value for value in values if value.shape is not None and len(value.shape) == 2]
    tables = [value for value in matrices if any(user.op_type == "Gather" and not place for user, place in value.uses())]
    copied: dict[str, str] = {}
    for table in tables:
        for value in matrices:
            if (
                value is not table
                and (value not in tables or tables.index(value) > tables.index(table))
                and _are_alike(table, value)
            ):
                copied[value.name or ""] = table.name or ""
    return copied


def perhaps_shared(model: ir.Model) -> dict[str, str]:
    """Return the weights that hold the numbers of another, both computed by PyTorch's older exporter, and the name of that one.

    It computes a weight for each module that reads it: modules that share a parameter, as heads may, would train it apart. The
    file of copies of a module that was not trained yet is the same. Weights of one value are left out.

    Args:
        model: a canonical model.
    """
    kinds = classify_initializers(model)
    alike: dict[tuple[object, ...], list[tuple[str, np.ndarray]]] = {}  # of a large file little is read
    shared: dict[str, str] = {}
    for name, value in model.graph.initializers.items():
        array = constant_array(value) if kinds.get(name) is InitializerKind.WEIGHT and is_computed(value) else None
        if array is None or array.size < 2:
            continue
        others = alike.setdefault((value.dtype, array.shape, array.flat[:STARTING].tobytes()), [])
        first = next((other for other, numbers in others if np.array_equal(numbers, array)), None)
        if first is None:
            others.append((name, array))
        elif (array != array.flat[0]).any():
            shared[name] = first
    return shared


def computed_ahead(model: ir.Model) -> dict[str, list[str]]:
    """Return the weights that PyTorch's exporter computed from parameters, and the names of these.

    Its optimizer computes what depends on no input: the exponential of a learned scale, the rows of a table of positions. What
    comes of it trains in the place of the parameters, which takes other steps.

    Args:
        model: a canonical model.
    """
    noted = noted_kinds(model.graph)
    weights = [name for name, kind in classify_initializers(model).items() if kind is InitializerKind.WEIGHT]
    computed = {name: parameters_behind(model.graph.initializers[name], noted) for name in weights}
    return {name: parameters for name, parameters in computed.items() if parameters}


def of_unknown_origin(model: ir.Model) -> list[str]:
    """Return the weights to which PyTorch's older exporter gave a name of its own: it computed them, or wrote down numbers.

    Left out are those of layers that read a parameter in another order, and those that ``folded_layers`` tells of.

    Args:
        model: a canonical model.
    """
    if model.producer_name != "pytorch" or noted_kinds(model.graph):
        return []
    weights = [name for name, kind in classify_initializers(model).items() if kind is InitializerKind.WEIGHT]
    return [name for name in weights if _NAMED_BY_EXPORTER.fullmatch(name)]


def _are_alike(table: ir.Value, value: ir.Value) -> bool:
    assert table.shape is not None
    assert value.shape is not None
    rows, columns = table.shape.dims
    if table.dtype != value.dtype or value.shape not in ([rows, columns], [columns, rows]):
        return False
    first, second = constant_array(table), constant_array(value)
    if first is None or second is None or first.size < 2 or (first == first.flat[0]).all():
        return False
    return any(matrix.shape == second.shape and np.array_equal(matrix, second) for matrix in (first, first.T))
