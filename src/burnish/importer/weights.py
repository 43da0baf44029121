"""Classification of initializers as weights, running statistics or constants.

Also finds weights that an exporter may have merged or duplicated.
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
"""Path of a tensor in a module."""


class InitializerKind(StrEnum):
    """Role of an initializer."""

    WEIGHT = "weight"  # trained by default
    STATISTIC = "statistic"  # running mean or variance: updated by training, never differentiated
    BUFFER = "buffer"  # looks like a weight but was none: trained only if the user names it
    CONSTANT = "constant"  # everything else


def classify_initializers(model: ir.Model) -> dict[str, InitializerKind]:
    """Classify weights, statistics and constants by their use and by exporters' records, never by name.

    A statistic is a running mean or variance of a BatchNormalization, the observed range of a quantization, or a pruning mask. A
    weight is a floating-point tensor of rank 1 or more, or a scalar recorded as a parameter by PyTorch's exporter, if an output
    depends on it through differentiable inputs. It is a buffer instead if it was recorded as neither a parameter nor computed
    from one, or preprocesses data (``hold_input_constants``). The rest is constant: integers, bounds of Clip, scales of Resize,
    exponents, scalars, scales of integers and of attention, and unused initializers.

    Args:
        model: a canonical model (``burnish.importer.load``).

    Returns:
        The kind of every initializer of the main graph, in order.
    """
    reached = reached_by_gradients(model.graph, model.graph.outputs)
    statistics = _statistics(model.graph)
    noted = noted_kinds(model.graph)
    return {name: _kind(value, reached, statistics, noted) for name, value in model.graph.initializers.items()}


def untrained_scalars(model: ir.Model) -> tuple[str, ...]:
    """Return a canonical model's floating-point scalars with a gradient, such as a temperature; they count as constants."""
    reached = reached_by_gradients(model.graph, model.graph.outputs)
    noted = noted_kinds(model.graph)
    scalars = ((name, value) for name, value in model.graph.initializers.items() if value in reached and not HELD.is_on(value))
    return tuple(
        name for name, value in scalars if value.shape is not None and len(value.shape) == 0 and not is_parameter(value, noted)
    )


def perhaps_learned_scalars(model: ir.Model) -> tuple[str, ...]:
    """Return the untrained scalars of a canonical model that look like parameters.

    These are scalars with a module path as name in PyTorch's files without records. Computed or literal numbers have generated
    names, such as ``onnx::Mul_12``.
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
    """Return the targets and every floating-point value on which they depend through differentiable inputs.

    Includes quantized integers that a gradient passes.
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
"""Number of leading elements compared first to tell weights apart."""


def perhaps_merged(model: ir.Model) -> dict[str, int]:
    """Return the weights of a canonical model that look like several merged parameters, with the number of their readers.

    Scales of one and biases of zero are equal in all layers of a fresh model, and a graph optimizer may merge them; then they
    train as one. A uniform vector with several readers is probably such a case; layers that really share a scale share larger,
    varying weights too. Empty if an exporter recorded all parameters.
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
    """Return the matrices of a canonical model that equal a table or its transpose, with the name of the table.

    An exporter that precomputes tensors makes two matrices of one shared by an embedding and a head; they would train separately.
    Uniform matrices are ignored: fresh layers may have equal ones.
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
    """Return the weights of a canonical model that equal another, if PyTorch's older exporter computed both, with its name.

    It computes a weight for each module that reads it, so a parameter shared by modules, such as heads, would train separately.
    Copies of an untrained module look the same. Uniform weights are ignored.
    """
    kinds = classify_initializers(model)
    alike: dict[tuple[object, ...], list[tuple[str, np.ndarray]]] = {}  # avoids reading most of a large file
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
    """Return the weights that PyTorch's exporter computed from parameters, with the parameters' names.

    Its optimizer precomputes what depends on no input: the exponential of a learned scale, rows of a position table. The result
    trains instead of the parameters, with different steps.
    """
    noted = noted_kinds(model.graph)
    weights = [name for name, kind in classify_initializers(model).items() if kind is InitializerKind.WEIGHT]
    computed = {name: parameters_behind(model.graph.initializers[name], noted) for name in weights}
    return {name: parameters for name, parameters in computed.items() if parameters}


def of_unknown_origin(model: ir.Model) -> list[str]:
    """Return the weights with names generated by PyTorch's older exporter, which computed them or wrote literal numbers.

    Excludes weights that rearrange a parameter, and those of ``folded_layers``.
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
