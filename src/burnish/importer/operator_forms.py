"""Replacement of operator forms that a canonical model does not have by portable ones.

These are new forms of older operators in opsets 27 and 28; CastLike, which ONNX Runtime has no kernel for; signals without an
axis for real and imaginary parts; Range bounds that are vectors of one number; and attribute defaults that the standard's
inference ignores.

MaxUnpool with an output shape undoes a MaxPool. In the standard's test case the indices count positions of the shape that follows
from the attributes, which fills the leading corner of the larger output; in ONNX Runtime they count positions of the output.
Indices from a MaxPool in the model count positions of its input; otherwise the test case is followed. The result means the same
on every engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from burnish.errors import ModelError, UnsupportedOperatorError
from burnish.graph import (
    FLOATING,
    SIXTEEN_BIT,
    Builder,
    Tensor,
    attribute_value,
    constant_array,
    describe_node,
    replace_node,
    static_dimension,
)
from burnish.graph.uses import origin_of, producer_of

_SINCE = {"Range": 27, "SpaceToDepth": 28, "Mod": 28}


def write_older_forms(model: ir.Model) -> bool:
    """Rewrite, in place, such nodes in the forms of older opsets; return True if any changed.

    Raises:
        UnsupportedOperatorError: an attribute has an unknown value.
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
    """Compute 16-bit ranges in the dtype of ``stash_type``, then round."""
    attribute = node.attributes.pop("stash_type", None)
    start = operands[0]
    if start.value.dtype not in SIXTEEN_BIT:
        return None
    wide = ir.DataType.FLOAT if attribute is None else ir.DataType(attribute.as_int())
    return builder.cast(builder.op("Range", *(builder.cast(bound, wide) for bound in operands)), start.dtype)


def _space_to_depth(node: ir.Node, builder: Builder, operands: list[Tensor]) -> Tensor | None:
    """Support ``CRD``, which puts the channel before the position in the block; ``DCR``, the only older order, puts it after."""
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
    """Emit the floating-point remainder with the sign of the divisor, which ``fmod=0`` did not allow before."""
    a, b = operands
    if attribute_value(node, "fmod", 0) or a.value.dtype not in FLOATING:
        return None
    rest = builder.op("Mod", a, b, fmod=1)
    zero = builder.scalar(0, rest)
    differ = builder.op("Xor", builder.op("Less", rest, zero), builder.op("Less", b, zero))
    moves = builder.op("And", differ, builder.op("Not", builder.op("Equal", rest, zero)))
    return builder.op("Where", moves, rest + b, rest)


def resolve_cast_like(model: ir.Model) -> bool:
    """Replace, in place, each CastLike by a Cast to the dtype of its second operand. Names and other attributes stay.

    Nodes with an unknown dtype stay; dtypes must be inferred.
    """
    changed = False
    for node in model.graph.all_nodes():
        like = node.inputs[1] if node.op_type == "CastLike" and node.domain == "" else None
        if like is None or like.dtype is None:
            continue
        node.op_type = "Cast"
        node.attributes["to"] = ir.AttrInt64("to", like.dtype.value)
        node.resize_inputs(1)
        changed = True
    return changed


def give_signals_parts(model: ir.Model) -> bool:
    """Unsqueeze, in place, two-axis signals of STFT; return True if there were any."""
    changed = False
    for node in list(model.graph.all_nodes()):
        signal = node.inputs[0] if node.op_type == "STFT" and node.domain == "" else None
        if signal is None or signal.shape is None or len(signal.shape) != 2:
            continue
        graph = node.graph
        assert isinstance(graph, ir.Graph)
        graph.opset_imports.update(model.graph.opset_imports)
        builder = Builder(graph, before=node)
        node.replace_input_with(0, builder.op("Unsqueeze", builder.tensor(signal), builder.integers([-1])).value)
        changed = True
    return changed


def make_bounds_scalars(model: ir.Model) -> bool:
    """Reshape, in place, Range bounds of shape [1] to scalars; return True if there were any.

    For a model of opset 11 or newer with inferred shapes.
    """
    changed = False
    for node in model.graph.all_nodes():
        if node.op_type != "Range" or node.domain != "" or node.graph is None:
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and value.shape == [1]:
                builder = Builder(node.graph, before=node)
                node.replace_input_with(index, builder.op("Reshape", builder.tensor(value), builder.integers([])).value)
                changed = True
    return changed


_MEAN_VARIANCE_AXES = [0, 2, 3]
"""MeanVarianceNormalization's axes in every version."""


def state_defaults(model: ir.Model) -> bool:
    """Write, in place, defaults that the standard's inference ignores or contradicts.

    - MeanVarianceNormalization without axes gets the standard's. Inference expands its function body, which has no default.
    - STFT without ``onesided`` returns half the spectrum. Inference assumes all of it.
    - SplitToSequence with a scalar size of 1 and ``keepdims=0`` loses the size, which is the default. The standard ignores
      ``keepdims`` next to a size; but PyTorch's exporter writes ``unbind`` like this, and ONNX Runtime respects it.
    """
    changed = False
    for node in model.graph.all_nodes():
        if node.domain != "":
            continue
        said = len(node.attributes)
        if node.op_type == "MeanVarianceNormalization":
            node.attributes.setdefault("axes", ir.AttrInt64s("axes", _MEAN_VARIANCE_AXES))
        elif node.op_type == "STFT":
            node.attributes.setdefault("onesided", ir.AttrInt64("onesided", 1))
        elif node.op_type == "SplitToSequence" and len(node.inputs) > 1 and attribute_value(node, "keepdims", 1) == 0:
            size = constant_array(node.inputs[1])
            if size is not None and size.ndim == 0 and size == 1:
                node.replace_input_with(1, None)
                changed = True
        changed |= len(node.attributes) > said
    return changed


Extents = list[int | None]


def place_unpooled(model: ir.Model) -> bool:
    """Rewrite, in place, each MaxUnpool whose indices do not count positions of its output; return True if there were any.

    For a model with inferred shapes.

    Raises:
        ModelError: the output shape is missing or smaller than the shape that the indices count positions of.
    """
    changed = False
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.op_type == "MaxUnpool" and node.domain == "":
                changed |= _place(node, Builder(graph, before=node))
    return changed


def _place(node: ir.Node, builder: Builder) -> bool:
    output_shape = node.inputs[2] if len(node.inputs) > 2 else None
    pooled = _pooled(node)
    natural = _natural_extents(node)
    if output_shape is None:
        if pooled is not None and _differ(_spatial(pooled.shape), natural):
            raise ModelError(
                f"{describe_node(node)} has no output_shape, so that its output is {_written(natural)}, and its indices count "
                f"positions of '{pooled.name}', which is {_written(_spatial(pooled.shape))}: give the operator that output_shape"
            )
        return False
    counted = natural if pooled is None else _spatial(pooled.shape)
    known = constant_array(output_shape)
    target: Extents = [None] * len(counted) if known is None else [int(number) for number in known[2:]]
    if any(a is not None and b is not None and a > b for a, b in zip(counted, target, strict=True)):
        raise ModelError(
            f"{describe_node(node)} has output_shape {_written(target)}, and its indices count positions of {_written(counted)}, "
            "which does not fit into it: correct the output_shape"
        )
    if _same(counted, target) or (pooled is not None and _is_shape_of(output_shape, pooled)):
        if _same(natural, target):
            node.resize_inputs(2)
            return True
        return False
    operands = [builder.tensor(value) for value in node.inputs[:2] if value is not None]
    if pooled is not None:
        operands.append(builder.op("Shape", builder.tensor(pooled)))
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    unpooled = builder.op("MaxUnpool", *operands, dtype=node.outputs[0].dtype, **attributes)
    replace_node(node, _padded_to(unpooled, builder.tensor(output_shape), counted, target))
    return True


def _padded_to(tensor: Tensor, output_shape: Tensor, counted: Extents, target: Extents) -> Tensor:
    builder, rank = tensor.builder, len(counted)
    missing = [None if a is None or b is None else b - a for a, b in zip(counted, target, strict=True)]
    if None not in missing:
        pads = builder.integers([0] * rank + [number for number in missing if number is not None])
    else:
        spatial = builder.op("Slice", output_shape, builder.integers([2]), builder.integers([rank + 2]), builder.integers([0]))
        behind = spatial - builder.op("Shape", tensor, start=2)
        pads = builder.op("Concat", builder.integers([0] * rank), behind, axis=0)
    return builder.op("Pad", tensor, pads, None, builder.integers(range(2, rank + 2)))


def _pooled(node: ir.Node) -> ir.Value | None:
    indices = node.inputs[1]
    maker = None if indices is None else producer_of(origin_of(indices, {"Identity"}), "MaxPool")
    if maker is None:
        return None
    if attribute_value(maker, "storage_order", 0) != 0:
        raise ModelError(
            f"{describe_node(node)} reads the indices of {describe_node(maker)}, which has storage_order=1, and takes row-major "
            "ones: export the model with storage_order=0"
        )
    return maker.inputs[0]


def _natural_extents(node: ir.Node) -> Extents:
    kernel = attribute_value(node, "kernel_shape", ())
    rank = len(kernel)
    strides, pads = attribute_value(node, "strides", [1] * rank), attribute_value(node, "pads", [0] * 2 * rank)
    data = node.inputs[0]
    extents = [None if data is None else static_dimension(data.shape, axis + 2) for axis in range(rank)]
    return [
        None if extent is None else (extent - 1) * strides[axis] - pads[axis] - pads[axis + rank] + kernel[axis]
        for axis, extent in enumerate(extents)
    ]


def _spatial(shape: ir.Shape | None) -> Extents:
    return [] if shape is None else [static_dimension(shape, axis) for axis in range(2, len(shape))]


def _same(one: Extents, other: Extents) -> bool:
    return None not in one and one == other


def _differ(one: Extents, other: Extents) -> bool:
    return any(a is not None and b is not None and a != b for a, b in zip(one, other, strict=False))


def _is_shape_of(value: ir.Value, data: ir.Value) -> bool:
    maker = producer_of(value, "Shape")
    if maker is None or maker.inputs[0] is not data:
        return False
    return attribute_value(maker, "start", 0) == 0 and "end" not in maker.attributes


def _written(extents: Sequence[int | None]) -> str:
    return "×".join("?" if extent is None else str(extent) for extent in extents)
