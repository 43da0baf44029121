"""Resize and its gradient, by a kernel that reads images as they lie in memory."""

from __future__ import annotations

import onnx_ir as ir

from burnish.engines.torch.families.resize.translation import FUSED_RESIZE, FUSED_RESIZE_GRAD
from burnish.graph import Builder, attribute_value, replace_node
from burnish.ops.resize import RESIZE_GRAD

RESIZED = frozenset({RESIZE_GRAD.name})
"""The semantic operators that become kernels here."""


def fuse_resize(graph: ir.Graph) -> None:
    """Replace Resize and ResizeGrad of float32 by FusedResize and FusedResizeGrad, in place.

    What has a region of interest stays.
    """
    for node in list(graph):
        source = node.inputs[0] if node.inputs else None
        if source is None or source.dtype != ir.DataType.FLOAT or source.shape is None:
            continue
        gradient = RESIZE_GRAD.is_of(node)
        if not gradient and (node.domain != "" or node.op_type != "Resize"):
            continue
        if attribute_value(node, "coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
            continue
        builder = Builder(graph, before=node)
        operands = [None if value is None else builder.tensor(value) for value in node.inputs]
        resized = (FUSED_RESIZE_GRAD if gradient else FUSED_RESIZE)(*operands)
        resized.value.type, resized.value.shape = node.outputs[0].type, node.outputs[0].shape
        maker = resized.value.producer()
        assert maker is not None
        for attribute in node.attributes.values():
            maker.attributes.add(attribute)
        replace_node(node, resized)
