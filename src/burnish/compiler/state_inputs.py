"""Turn weights and statistics into explicit state: graph inputs, and arrays with their initial values.

A file in float16 or bfloat16 has two graphs: its own, for prediction and export, and the same in float32, for training. Trained
values are float32 in the state and rounded for the file's own graph. Other weights keep the file's dtype and are cast for the
graph in float32.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from burnish.compiler.selection import ModelState
from burnish.errors import ConfigurationError
from burnish.graph import SIXTEEN_BIT, Names, insert_behind
from burnish.program.state import Weights
from burnish.rewriting.change_dtypes import Order, cast_for_readers, order_of


def state_dtypes(model: ir.Model, state: ModelState) -> dict[str, ir.DataType]:
    """Return the dtype of each parameter and statistic in the state, by state name.

    Args:
        model: the model with the dtypes of its file.
        state: the selected state.
    """
    frozen = set(state.parameters).difference(state.trainable)
    dtypes = {}
    for name, state_name in state.state_names.items():
        dtype = model.graph.initializers[name].dtype
        assert dtype is not None
        dtypes[state_name] = ir.DataType.FLOAT if dtype in SIXTEEN_BIT and name not in frozen else dtype
    return dtypes


def rounded_weights(model: ir.Model, state: ModelState) -> dict[str, str]:
    """Return the parameters and statistics in float32 in the state and in sixteen bits in the file, with the file's dtype."""
    dtypes, initializers = state_dtypes(model, state), model.graph.initializers
    return {
        name: dtype.name.lower()
        for name, state_name in state.state_names.items()
        if (dtype := initializers[name].dtype) is not None and dtype != dtypes[state_name]
    }


def make_inputs(model: ir.Model, state: ModelState, dtypes: Mapping[str, ir.DataType]) -> Weights:
    """Turn the initializers of ``state`` into graph inputs named ``param/...`` and ``stat/...``, in place.

    Args:
        model: a canonical model.
        state: the selected state.
        dtypes: dtypes of the inputs, by state name; an input with another dtype than its initializer is cast for its readers.

    Returns:
        Their arrays, by state name.
    """
    graph = model.graph
    tensors: dict[str, ir.TensorProtocol] = {}
    input_names = {value.name for value in graph.inputs}
    order: Order | None = None
    for name, state_name in state.state_names.items():
        value = graph.initializers[name]
        assert value.const_value is not None
        tensors[state_name] = value.const_value
        if value.is_graph_output():
            raise ConfigurationError(f"the initializer '{name}' is an output of the model; remove that output to train it")
        if state_name in input_names:
            raise ConfigurationError(
                f"the model has an input '{state_name}', a name the program needs for its state: rename that input"
            )
        dtype, shape = dtypes[state_name], ir.Shape(value.const_value.shape.numpy())
        replacement = ir.Value(name=state_name, type=ir.TensorType(dtype), shape=shape)
        value.replace_all_uses_with(replacement)
        if dtype != value.const_value.dtype:
            order = order or order_of(graph)
            _cast(graph, replacement, value.const_value.dtype, order)
        del graph.initializers[name]
        graph.inputs.append(replacement)
    others = (*graph.initializers.values(), *(output for node in graph.all_nodes() for output in node.outputs))
    for value in others:
        if value.name in tensors and not value.is_graph_output():  # outputs are refused when they are named
            raise ConfigurationError(
                f"the model has a value '{value.name}', a name the program needs for its state: rename that value"
            )
    return Weights(tensors, dtypes)


def _cast(graph: ir.Graph, value: ir.Value, dtype: ir.DataType, order: Order) -> None:
    """Cast a value to another dtype for its readers; for a sixteen-bit table, cast only the rows that are read."""
    is_table = value.dtype in SIXTEEN_BIT
    tables = [node for node, index in value.uses() if is_table and index == 0 and _is_lookup(node) and node.graph is graph]
    if len(value.uses()) > len(tables):
        cast_for_readers(graph, value, dtype, order, besides=tables)
    for node in tables:
        following = ir.node("Cast", [node.outputs[0]], {"to": int(dtype)})
        insert_behind(node, following, Names.of(graph))
        node.outputs[0].type = value.type
        order[following] = order[node]


def _is_lookup(node: ir.Node) -> bool:
    return node.op_type == "Gather" and node.domain == ""
