"""Weights that are perhaps not what they were before a model was exported: one that was several, or one of two that were one."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir

from burnish.graph import constant_array
from burnish.importer.classify import InitializerKind, classify_initializers
from burnish.importer.export_notes import missing_parameters, noted_kinds, parameters_behind
from burnish.importer.untie import is_computed

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
