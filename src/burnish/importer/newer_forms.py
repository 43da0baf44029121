"""Forms that opsets 27 and 28 gave older operators, in operators that mean the same: runtimes and rules know these."""

from __future__ import annotations

import onnx_ir as ir

from burnish.errors import UnsupportedOperatorError
from burnish.graph import FLOATING, SIXTEEN_BIT, Builder, Tensor, attribute_value, describe_node, replace_node

_SINCE = {"Range": 27, "SpaceToDepth": 28, "Mod": 28}


def write_older_forms(model: ir.Model) -> bool:
    """Write, in place, such nodes in the forms of older opsets; return whether that changed any.

    Raises:
        UnsupportedOperatorError: a node with an attribute of a value that is not known.
    """
    opset = model.opset_imports[""]
    changed = False
    for node in list(model.graph.all_nodes()):
        if node.domain != "" or opset < _SINCE.get(node.op_type, opset + 1):
            continue
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        builder = Builder(graph, before=node)
        operands = [builder.tensor(value) for value in node.inputs if value is not None]
        attributes = len(node.attributes)
        result = {"Range": _range, "SpaceToDepth": _space_to_depth, "Mod": _mod}[node.op_type](node, builder, operands)
        if result is not None:
            replace_node(node, result)
        changed |= result is not None or len(node.attributes) < attributes
    return changed


def _range(node: ir.Node, builder: Builder, operands: list[Tensor]) -> Tensor | None:
    """Numbers of sixteen bits are computed in the type that ``stash_type`` says, and rounded."""
    attribute = node.attributes.pop("stash_type", None)
    start = operands[0]
    if start.value.dtype not in SIXTEEN_BIT:
        return None
    wide = ir.DataType.FLOAT if attribute is None else ir.DataType(attribute.as_int())
    return builder.cast(builder.op("Range", *(builder.cast(bound, wide) for bound in operands)), start.dtype)


def _space_to_depth(node: ir.Node, builder: Builder, operands: list[Tensor]) -> Tensor | None:
    """``CRD`` has the channel before the places in the block, ``DCR``, the only order before, behind them."""
    attribute = node.attributes.pop("mode", None)
    mode = "DCR" if attribute is None else attribute.as_string()
    if mode == "DCR":
        return None
    if mode != "CRD":
        raise UnsupportedOperatorError(f"{describe_node(node)} has the mode '{mode}', which is not DCR or CRD: export it again")
    x, block = operands[0], int(attribute_value(node, "blocksize", 1))
    y = builder.op("SpaceToDepth", x, blocksize=block)
    parts = [builder.op("Shape", y, end=1), builder.integers([block * block]), builder.op("Shape", x, start=1, end=2)]
    apart = builder.op("Reshape", y, builder.op("Concat", *parts, builder.op("Shape", y, start=2), axis=0), allowzero=1)
    turned = builder.op("Transpose", apart, perm=[0, 2, 1, 3, 4])
    return builder.op("Reshape", turned, builder.op("Shape", y), allowzero=1, like=y)


def _mod(node: ir.Node, builder: Builder, operands: list[Tensor]) -> Tensor | None:
    """Of floating-point numbers with the sign of the divisor, which ``fmod=0`` did not allow: a remainder that is moved by it."""
    a, b = operands
    if attribute_value(node, "fmod", 0) or a.value.dtype not in FLOATING:
        return None
    rest = builder.op("Mod", a, b, fmod=1)
    zero = builder.scalar(0, rest)
    differ = builder.op("Xor", builder.op("Less", rest, zero), builder.op("Less", b, zero))
    moves = builder.op("And", differ, builder.op("Not", builder.op("Equal", rest, zero)))
    return builder.op("Where", moves, rest + b, rest)
