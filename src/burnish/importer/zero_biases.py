"""Convolutions without a bias to which an exporter gave a zero that it broadcasts, in a shape that need not be that of a bias.

PyTorch's newer exporter writes ``Conv3d(bias=False)`` with zeros of shape ``[channels, 2]``, which no runtime takes.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import attribute_value, constant_array
from burnish.graph.uses import origin_of, producer_of, remove_unread
from burnish.importer.shape_constants import COMPUTED

_PASSING = ("Cast", "CastLike", "Identity", "Reshape", "Squeeze", "Unsqueeze")


def leave_out_zero_biases(model: ir.Model) -> bool:
    """Leave out, in place, every bias of a convolution that is a broadcast zero; return whether there was any.

    A zero that the file holds as such, in the shape of a bias, is one that trains, and stays.
    """
    changed = False
    for node in list(model.graph.all_nodes()):
        if node.op_type not in ("Conv", "ConvTranspose") or node.domain != "" or len(node.inputs) < 3:
            continue
        bias = node.inputs[2]
        if bias is None or not _is_broadcast_zero(bias):
            continue
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        node.resize_inputs(2)
        remove_unread(graph, bias.producer())
        changed = True
    return changed


def _is_broadcast_zero(value: ir.Value) -> bool:
    origin = origin_of(value, _PASSING)
    made = producer_of(origin, "Expand", "ConstantOfShape", "Constant")
    if made is None:
        return False
    if made.op_type == "Constant":
        array = constant_array(origin) if COMPUTED in made.metadata_props else None
        return array is not None and not array.any()
    if made.op_type == "ConstantOfShape":
        fill = attribute_value(made, "value", None)
        return fill is None or not fill.numpy().any()
    array = None if made.inputs[0] is None else constant_array(origin_of(made.inputs[0], _PASSING))
    return array is not None and array.size == 1 and not array.any()
