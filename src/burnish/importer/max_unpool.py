"""MaxUnpool with an output shape, brought to one meaning: its indices count positions of the output.

The standard says what the operator is for, undoing a MaxPool, and its test case shows an output shape larger than the one that
follows from the attributes: the indices count positions of the latter, which fills the leading corner. ONNX Runtime counts
positions of the output shape instead. Where the indices are those of a MaxPool in the model, they count positions of what that
MaxPool read, and nothing is left to decide; otherwise the standard's test case is followed. What then remains of MaxUnpool with
an output shape means the same on every engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from burnish.errors import ModelError
from burnish.graph import Builder, Tensor, attribute_value, constant_array, describe_node, replace_node, static_dimension
from burnish.graph.uses import origin_of, producer_of

Extents = list[int | None]


def place_unpooled(model: ir.Model) -> bool:
    """Rewrite, in place, each MaxUnpool whose indices do not count positions of its output; return whether there was one.

    For a model whose shapes are inferred.

    Raises:
        ModelError: an output shape that is smaller than what the indices count positions of, or none where one is needed.
    """
    changed = False
    for graph in list(model.graphs()):
        for node in list(graph):
            if node.op_type == "MaxUnpool" and node.domain == "":
                changed |= _place(node, Builder(graph, before=node))
    return changed


def _place(node: ir.Node, builder: Builder) -> bool:
    """Rewrite a node where that is needed; return whether it was."""
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
    """Zeros after the data along every spatial axis, up to the output shape."""
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
    """What the MaxPool read that a node's indices come from, where that is known."""
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
    """The spatial extents that follow from the data's and the attributes; None where one is symbolic."""
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
