"""LSTM, GRU and RNN to the products and loops that they become in training, for engines without them."""

from __future__ import annotations

import onnx_ir as ir

from burnish.modes import put_training_forms
from burnish.operators.recurrent_layer import is_recurrent
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators


def expand_recurrent_layers(model: ir.Model) -> ir.Model:
    """Return a copy with standard operators in the place of the recurrent layers; the model itself where it has none.

    Args:
        model: a model whose values have dtypes. Layers without a gradient here stay.
    """
    if not any(map(is_recurrent, model.graph.all_nodes())):
        return model
    copy = model.clone()
    put_training_forms(copy.graph, is_recurrent)
    lower_semantic_operators(copy)
    return copy
