"""Sums of sixteen-bit values in float32: float16 overflows at 65,504 and bfloat16 stands still after 256 equal terms."""

from __future__ import annotations

import onnx_ir as ir

from burnish.graph import SIXTEEN_BIT, Builder, Names, insert_behind, replace_value
from burnish.graph.uses import only_user

REDUCTIONS = frozenset(
    "CumSum ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMean ReduceProd ReduceSum ReduceSumSquare".split()
)
ONLY_SHAPE = frozenset("Flatten Reshape Squeeze Transpose Unsqueeze".split())
"""What may stand between a sum and its cast back, so that a sum that is wanted in float32 is never rounded."""


def widen_reductions(model: ir.Model) -> bool:
    """Let every reduction of sixteen-bit values read and give float32, in place; what reads the result sees its dtype again."""
    names = None
    for node in list(model.graph):
        source = node.inputs[0] if node.inputs else None
        if node.op_type in REDUCTIONS and node.domain == "" and source is not None and source.dtype in SIXTEEN_BIT:
            names = names or Names.of(model.graph)
            _widen(model.graph, names, node, source)
    return names is not None


def _widen(graph: ir.Graph, names: Names, node: ir.Node, source: ir.Value) -> None:
    builder, dtype = Builder(graph, before=node), source.dtype
    assert dtype is not None
    node.replace_input_with(0, builder.cast(builder.tensor(source), ir.DataType.FLOAT).value)
    last, following = node, only_user(node.outputs[0])
    last.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    while following is not None and following.op_type in ONLY_SHAPE and following.inputs[0] is last.outputs[0]:
        last, following = following, only_user(following.outputs[0])
        last.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    rounding = ir.node("Cast", [last.outputs[0]], {"to": int(dtype)})
    insert_behind(last, rounding, names)
    rounded = rounding.outputs[0]
    rounded.type = ir.TensorType(dtype)
    for reader, _ in list(rounded.uses()):
        if reader.op_type == "Cast" and reader.domain == "" and reader.attributes["to"].as_int() == ir.DataType.FLOAT:
            replace_value(reader.outputs[0], last.outputs[0])
