"""CastLike with a dtype that is known, as Cast: ONNX Runtime has no kernel for CastLike and warns where it meets one."""

from __future__ import annotations

import onnx_ir as ir


def resolve_cast_like(model: ir.Model) -> None:
    """Replace, in place, each CastLike by a Cast to the dtype of its second operand. Names and other attributes stay.

    For a model whose dtypes are inferred; where one is not known, the node stays.
    """
    for node in model.graph.all_nodes():
        like = node.inputs[1] if node.op_type == "CastLike" and node.domain == "" else None
        if like is None or like.dtype is None:
            continue
        node.op_type = "Cast"
        node.attributes["to"] = ir.AttrInt64("to", like.dtype.value)
        node.resize_inputs(1)
