"""What the standard's own shape inference, or its text, does not take from a node, written on the node."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import attribute_value, constant_array

_MEAN_VARIANCE_AXES = [0, 2, 3]
"""Of MeanVarianceNormalization, in every version."""


def state_defaults(model: ir.Model) -> None:
    """Write, in place, on nodes what the standard's own inference, or its text, does not take from what they say.

    - MeanVarianceNormalization without axes has those of the standard. Inference expands its function body, which has no default.
    - STFT without ``onesided`` gives a half of the spectrum. Inference takes the whole one for the default.
    - SplitToSequence into pieces of one, told by a scalar, that are to come without their axis (``keepdims=0``) is told so by the
      default size. The standard takes no notice of the attribute beside a size; PyTorch's exporter, which writes ``unbind`` so,
      means it, and ONNX Runtime does.
    """
    for node in model.graph.all_nodes():
        if node.domain != "":
            continue
        if node.op_type == "MeanVarianceNormalization":
            node.attributes.setdefault("axes", ir.AttrInt64s("axes", _MEAN_VARIANCE_AXES))
        elif node.op_type == "STFT":
            node.attributes.setdefault("onesided", ir.AttrInt64("onesided", 1))
        elif node.op_type == "SplitToSequence" and len(node.inputs) > 1 and attribute_value(node, "keepdims", 1) == 0:
            size = constant_array(node.inputs[1])
            if size is not None and size.ndim == 0 and size == 1:
                node.replace_input_with(1, None)
