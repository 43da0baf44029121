"""Embedding tables with another number of rows, for a vocabulary that has grown or shrunk."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import FLOATING, describe_node
from burnish.graph.constants import initial_array, set_initializer
from burnish.importer import Source, load
from burnish.random import check_seed
from burnish.settings import suggestion
from burnish.validation import is_whole


def resize_table(source: Source, table: str, rows: int, seed: int = 0) -> ir.Model:
    """Return a model whose embedding table has another number of rows.

    Existing rows keep their positions and values. New rows are normal with each column's mean and standard deviation; surplus
    rows are removed from the end.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; not changed.
        table: name of its initializer, whose only readers are ``Gather`` on axis 0.
        rows: new number of rows.
        seed: seed of the new rows.

    Returns:
        A canonical model.

    Raises:
        ConfigurationError: there is no such table, it has other readers, or ``rows`` is invalid.
        ModelError: invalid ONNX model.
    """
    if not is_whole(rows) or rows < 1:
        raise ConfigurationError(f"resize_table: rows={rows!r}: give a whole number of 1 or more")
    check_seed(seed)
    model = load(source)
    value = model.graph.initializers.get(table)
    if value is None or value.const_value is None:
        raise ConfigurationError(
            f"resize_table: the model has no initializer '{table}'{suggestion(table, model.graph.initializers)}. Give the name "
            "of a table, as program.signature.state has it behind 'param/'"
        )
    other = next((node for node, operand in value.uses() if not _looks_up(node, operand)), None)
    if other is not None or not value.uses() or value.is_graph_output():
        reader = "nothing looks rows up in it" if other is None else f"{describe_node(other)} reads it too"
        raise ConfigurationError(
            f"resize_table: '{table}' is not read by Gather on axis 0 alone: {reader}, and would meet another number of rows. "
            "Untie it first, or export the model with the vocabulary that it is to have"
        )
    present = initial_array(value)
    if value.dtype not in FLOATING or present.ndim < 1 or not len(present):
        raise ConfigurationError(f"resize_table: '{table}' holds no rows of floating-point numbers")
    resized = np.empty((rows, *present.shape[1:]), present.dtype)
    resized[: len(present)] = present[:rows]
    if rows > len(present):
        wide = present.astype(np.float64)
        drawn = np.random.default_rng(seed).standard_normal((rows - len(present), *present.shape[1:]))
        resized[len(present) :] = (wide.mean(axis=0) + drawn * wide.std(axis=0)).astype(present.dtype)
    set_initializer(value, resized)
    return model


def _looks_up(node: ir.Node, operand: int) -> bool:
    axis = node.attributes.get("axis")
    return node.op_type == "Gather" and node.domain == "" and operand == 0 and (axis is None or axis.as_int() == 0)
