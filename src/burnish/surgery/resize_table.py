"""An embedding table with another number of rows: a vocabulary that has grown, or lost its end."""

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
    """Return a model whose embedding table has more rows, or fewer.

    Rows keep their places and bits. Rows that are new are drawn from the normal distribution of the present ones: of each column
    its mean and its standard deviation. Where there are to be fewer, the last ones are left out.

    Args:
        source: path, bytes, ``onnx.ModelProto`` or ``onnx_ir.Model``; left as it is.
        table: the name of its initializer, which ``Gather`` on axis 0 alone reads.
        rows: how many it is to have.
        seed: of the new rows.

    Returns:
        A canonical model.

    Raises:
        ConfigurationError: no such table, something else reads it, or ``rows`` is no whole number of at least 1.
        ModelError: the source is not a valid ONNX model.
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
    """Whether a node reads whole rows of its first operand, by their numbers."""
    axis = node.attributes.get("axis")
    return node.op_type == "Gather" and node.domain == "" and operand == 0 and (axis is None or axis.as_int() == 0)
