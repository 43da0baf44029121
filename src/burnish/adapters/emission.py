"""The nodes of an adapter, beside those of its layer, which stay."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from burnish.adapters.graph import Adapter
from burnish.adapters.layers import Layer
from burnish.graph import Builder, Tensor, attribute_value
from burnish.operators.elementwise import STOP_GRADIENT

SPATIAL = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")


def emit(builder: Builder, adapter: Adapter, layer: Layer, base: ir.Value, parameters: Mapping[str, Tensor]) -> Tensor:
    """Emit what stands in the place of the output of a layer.

    Args:
        builder: emits after the layer.
        adapter: what is to be emitted.
        layer: its layer.
        base: the output of the layer, with its bias.
        parameters: by part.
    """
    y = builder.tensor(base)
    if adapter.variant == "ia3":
        return y * scaled_axis(builder, parameters["scale"], layer, of_inputs=False)
    read = layer.node.inputs[1 if layer.node.op_type == "Gather" else 0]
    assert read is not None
    x = builder.tensor(read)
    if attribute_value(layer.node, "transA", 0):
        x = builder.op("Transpose", x, perm=[1, 0])
    is_dropped = adapter.dropout > 0 and layer.node.op_type != "Gather"
    dropped = builder.op("Dropout", x, builder.scalar(adapter.dropout, ir.DataType.FLOAT)) if is_dropped else x
    b = parameters["B"] if adapter.scaling == 1 else parameters["B"] * adapter.scaling
    added = _product(builder, layer, dropped, parameters["A"], b)
    if adapter.variant == "lora":
        return y + added
    factor = _magnitude_factor(builder, layer, parameters["magnitude"], parameters["A"], b)
    if is_dropped:
        kept = _base_without_bias(builder, layer, dropped)
        return y + ((factor - 1.0) * kept + factor * added)
    bias = _bias(builder, layer)
    return factor * (y + added) if bias is None else factor * ((y - bias) + added) + bias


def scaled_axis(builder: Builder, scale: Tensor, layer: Layer, of_inputs: bool) -> Tensor:
    """Return a vector over inputs or outputs in a shape that broadcasts to what a layer reads or gives."""
    if layer.node.op_type == "Conv":
        return builder.op("Unsqueeze", scale, builder.integers(range(1, 1 + len(layer.kernel))))
    if of_inputs and attribute_value(layer.node, "transA", 0):
        return builder.op("Unsqueeze", scale, builder.integers([1]))
    return scale


def _product(builder: Builder, layer: Layer, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``(x A) B``."""
    if layer.node.op_type == "Gather":
        return builder.op("MatMul", builder.op("Gather", a, x, axis=0), b)
    if layer.node.op_type != "Conv":
        return builder.op("MatMul", builder.op("MatMul", x, a), b)
    attributes = {name: attribute.value for name, attribute in layer.node.attributes.items() if name in SPATIAL}
    read = builder.op("Conv", x, a, **attributes)
    return builder.op("Conv", read, b, group=layer.groups if layer.groups > 1 else None)


def _magnitude_factor(builder: Builder, layer: Layer, magnitude: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What brings the outputs of ``W + A B`` to their magnitudes; the lengths that they have count as constants."""
    weight = builder.tensor(layer.weight)
    if layer.factor != 1:
        weight = weight * layer.factor
    rank = layer.weight.shape
    assert rank is not None
    if layer.node.op_type == "Conv":
        flat = builder.op("MatMul", *(builder.op("Flatten", part, axis=1) for part in (b, a)))
        delta = builder.op("Reshape", flat, builder.integers([int(extent) for extent in rank.numpy()]), like=weight)
    else:
        delta = builder.op("MatMul", a, b)
        delta = builder.op("Transpose", delta, perm=[1, 0]) if layer.output_axis == 0 else delta
    whole = weight + delta
    axes = [axis for axis in range(len(rank)) if axis != layer.output_axis]
    squares = builder.op("ReduceSum", whole * whole, builder.integers(axes), keepdims=0)
    length = STOP_GRADIENT(builder.op("Sqrt", squares))
    return scaled_axis(builder, magnitude / length, layer, of_inputs=False)


def _bias(builder: Builder, layer: Layer) -> Tensor | None:
    """The bias within a layer's node, as it is added."""
    node = layer.node
    value = node.inputs[2] if node.op_type in ("Gemm", "Conv") and len(node.inputs) > 2 else None
    if value is None:
        return None
    bias = builder.tensor(value)
    if node.op_type == "Conv":
        return scaled_axis(builder, bias, layer, of_inputs=False)
    beta = attribute_value(node, "beta", 1.0)
    return bias if beta == 1 else bias * beta


def _base_without_bias(builder: Builder, layer: Layer, dropped: Tensor) -> Tensor:
    """What a layer gives for another input, without its bias."""
    node = layer.node
    # What is dropped has been transposed where the node would.
    attributes = {name: attribute.value for name, attribute in node.attributes.items() if name not in ("transA", "beta")}
    return builder.op(node.op_type, dropped, builder.tensor(layer.weight), **attributes)
