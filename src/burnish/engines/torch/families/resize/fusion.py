"""Resize and its gradient, by a kernel that reads images as they lie in memory."""

from __future__ import annotations

import onnx_ir as ir

from burnish.engines.torch.families.fused import replaces
from burnish.engines.torch.families.resize.translation import FUSED_RESIZE, FUSED_RESIZE_GRAD
from burnish.graph import attribute_value
from burnish.operators.resize import RESIZE_GRAD


@replaces("Resize", by=FUSED_RESIZE)
@replaces(RESIZE_GRAD, by=FUSED_RESIZE_GRAD)
def has_kernel(node: ir.Node) -> bool:
    """Whether a node of float32 has no region of interest."""
    return bool(attribute_value(node, "coordinate_transformation_mode", "half_pixel") != "tf_crop_and_resize")
