"""Batch normalization in training mode whose running statistics are computed of its own input.

PyTorch's older exporter writes a layer without running statistics (``track_running_stats=False``) so. In training mode these
operands enter only the running outputs, which nothing reads: the layer normalizes by the batch, and keeps nothing.
"""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import Builder, attribute_value
from burnish.graph.uses import ancestors_of, is_used, remove_unread


def normalize_by_own_statistics(model: ir.Model) -> bool:
    """Give such layers, in place, the mean and variance of the batch, in inference mode, as PyTorch's newer exporter writes them.

    Returns:
        Whether there was any.
    """
    found = False
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.op_type != "BatchNormalization" or node.domain != "" or not attribute_value(node, "training_mode", 0):
                continue
            x, running = node.inputs[0], [value for value in node.inputs[3:5] if value is not None]
            if x is None or x.shape is None or any(map(is_used, node.outputs[1:])):
                continue
            if not any(x in ancestors_of(value) for value in running):
                continue
            builder = Builder(graph, before=node)
            data = builder.tensor(x)
            axes = builder.integers([axis for axis in range(len(x.shape)) if axis != 1])
            centred = data - builder.op("ReduceMean", data, axes)
            mean = builder.op("ReduceMean", data, axes, keepdims=0)
            variance = builder.op("ReduceMean", centred * centred, axes, keepdims=0)
            node.replace_input_with(3, mean.value)
            node.replace_input_with(4, variance.value)
            node.attributes.pop("training_mode")
            node.resize_outputs(1)
            remove_unread(graph, *(value.producer() for value in running))
            found = True
    return found
