"""The adapter of a node, and its variants: LoRA, DoRA and (IA)³.

A variant's class defines computation, initialization, merging and PEFT names. To add one, add a class and an entry of
``VARIANTS``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor, attribute_value, describe_node, output_axis
from burnish.operators.elementwise import STOP_GRADIENT

if TYPE_CHECKING:
    from burnish.adapters.layers import Layer

Arrays = Mapping[str, np.ndarray]
CONVOLVED = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
"""Conv attributes that an adapter's first product shares."""


@dataclass(frozen=True)
class Adapter:
    """An adapter of one node.

    Attributes:
        layer: name of the adapted layer: the module of its weight.
        operator: ``MatMul``, ``Gemm``, ``Conv`` or ``Gather``.
        variant: ``lora``, ``dora`` or ``ia3``.
        weight: initializer of the weight, or of its integers.
        product: name of the node's output.
        base_output: name of the value that the adapter changes: the product, or its sum with the bias.
        output: name of the value that replaces it.
        parameters: part -> initializer: ``A`` and ``B``, for dora also ``magnitude``; ``scale`` for ia3. A is [inputs, rank], for
            Conv [rank, inputs / groups, *kernel]; B is [rank, outputs], for Conv [outputs, rank / groups, 1, ...]; magnitude is
            [outputs]; scale is [outputs], or [inputs] with ``feedforward``.
        rank, alpha, rslora: B is scaled by ``alpha / rank``, or ``alpha / √rank`` with rslora.
        dropout: dropout rate of the inputs of A.
        feedforward: True if ia3 scales the node's input.
        spatial: number of kernel axes of a Conv; else 0.
    """

    layer: str
    operator: str
    variant: str
    weight: str
    product: str
    base_output: str
    output: str
    parameters: Mapping[str, str]
    rank: int = 0
    alpha: float = 0.0
    rslora: bool = False
    dropout: float = 0.0
    feedforward: bool = False
    spatial: int = 0

    @property
    def scaling(self) -> float:
        """Factor of B."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank) if self.rank else 1.0


class Lora:
    """LoRA (Hu et al. 2021): ``y + s (x A) B``.

    Attributes:
        name: value of ``lora(variant=)``.
        parts: names of the parameters.
        has_rank: True if it has rank, alpha and dropout; else it has a scale, which ``feedforward`` moves to the input.
        peft_type, peft_flags: PEFT settings of this variant.
        peft_parts: PEFT's suffix of a module -> part.
    """

    name: ClassVar[str] = "lora"
    parts: ClassVar[tuple[str, ...]] = ("A", "B")
    has_rank: ClassVar[bool] = True
    peft_type: ClassVar[str] = "LORA"
    peft_flags: ClassVar[Mapping[str, bool]] = {"use_dora": False}
    peft_parts: ClassVar[Mapping[str, str]] = {
        "lora_A.weight": "A",
        "lora_B.weight": "B",
        "lora_embedding_A": "A",
        "lora_embedding_B": "B",
    }

    def check_layer(self, layer: Layer, rank: int) -> None:
        """Raise ConfigurationError if a layer does not support the variant."""
        if layer.groups > 1 and rank % layer.groups:
            raise ConfigurationError(
                f"lora: rank={rank} does not fit {describe_node(layer.node)}, '{layer.name}', which has {layer.groups} groups, "
                "each of which needs as large a part of the rank: give a multiple of them, or leave the layer out of the patterns"
            )

    def initial(self, layer: Layer, rank: int, feedforward: bool, generator: np.random.Generator, opset: int) -> Arrays:
        """Return the initial parameters, part -> array."""
        if layer.node.op_type == "Conv":
            a_shape: tuple[int, ...] = (rank, layer.inputs // layer.groups, *layer.kernel)
            b_shape: tuple[int, ...] = (layer.outputs, rank // layer.groups, *(1 for _ in layer.kernel))
        else:
            a_shape, b_shape = (layer.inputs, rank), (rank, layer.outputs)
        if layer.node.op_type == "Gather":
            return {"A": np.zeros(a_shape), "B": generator.standard_normal(b_shape)}
        limit = 1 / math.sqrt(math.prod(a_shape) / rank)
        return {"A": generator.uniform(-limit, limit, a_shape), "B": np.zeros(b_shape)}

    def emit(self, builder: Builder, adapter: Adapter, layer: Layer, base: ir.Value, parameters: Mapping[str, Tensor]) -> Tensor:
        """Emit the replacement of a layer's output.

        Args:
            builder: emits after the layer.
            adapter: the adapter.
            layer: its layer.
            base: the layer's output, with its bias.
            parameters: parameters by part.
        """
        added, *_ = self._added(builder, adapter, layer, parameters)
        return builder.tensor(base) + added

    def merged(self, adapter: Adapter, arrays: Arrays, weight: np.ndarray, node: ir.Node) -> np.ndarray:
        """Return the merged weight [float64] of a weight [float64] and its adapter."""
        factor = _factor(node)
        return (weight * factor + _product(adapter, arrays, node, weight.shape)) / factor

    def _added(
        self, builder: Builder, adapter: Adapter, layer: Layer, parameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ``s (x A) B``, ``s B``, and the input after dropout (None without dropout)."""
        read = layer.node.inputs[1 if layer.node.op_type == "Gather" else 0]
        assert read is not None
        x = builder.tensor(read)
        if attribute_value(layer.node, "transA", 0):
            x = builder.op("Transpose", x, perm=[1, 0])
        is_dropped = adapter.dropout > 0 and layer.node.op_type != "Gather"
        dropped = builder.op("Dropout", x, builder.scalar(adapter.dropout, ir.DataType.FLOAT)) if is_dropped else x
        a, b = parameters["A"], parameters["B"] if adapter.scaling == 1 else parameters["B"] * adapter.scaling
        if layer.node.op_type == "Gather":
            added = builder.op("MatMul", builder.op("Gather", a, dropped, axis=0), b)
        elif layer.node.op_type != "Conv":
            added = builder.op("MatMul", builder.op("MatMul", dropped, a), b)
        else:
            attributes = {name: attribute.value for name, attribute in layer.node.attributes.items() if name in CONVOLVED}
            inner = builder.op("Conv", dropped, a, **attributes)
            added = builder.op("Conv", inner, b, group=layer.groups if layer.groups > 1 else None)
        return added, b, dropped if is_dropped else None


class Dora(Lora):
    """DoRA (Liu et al. 2024): LoRA with the columns of ``W + s A B`` scaled to the lengths ``magnitude``."""

    name = "dora"
    parts = (*Lora.parts, "magnitude")
    peft_flags: ClassVar[Mapping[str, bool]] = {"use_dora": True}
    peft_parts: ClassVar[Mapping[str, str]] = {**Lora.peft_parts, "lora_magnitude_vector": "magnitude"}

    def check_layer(self, layer: Layer, rank: int) -> None:
        super().check_layer(layer, rank)
        if layer.groups > 1:
            raise ConfigurationError(
                f"lora: variant='dora' is not for {describe_node(layer.node)}, '{layer.name}', which has {layer.groups} groups: "
                "choose 'lora', or leave the layer out of the patterns"
            )

    def initial(self, layer: Layer, rank: int, feedforward: bool, generator: np.random.Generator, opset: int) -> Arrays:
        arrays = super().initial(layer, rank, feedforward, generator, opset)
        magnitude = lengths(layer.array(opset).astype(np.float64) * layer.factor, layer.output_axis)
        if not magnitude.all():
            raise ConfigurationError(
                f"lora: output {int(np.argmin(magnitude))} of the layer '{layer.name}' has weights of zero, and no "
                "direction: choose variant='lora', or leave the layer out of the patterns"
            )
        return {**arrays, "magnitude": magnitude}

    def emit(self, builder: Builder, adapter: Adapter, layer: Layer, base: ir.Value, parameters: Mapping[str, Tensor]) -> Tensor:
        y = builder.tensor(base)
        added, b, dropped = self._added(builder, adapter, layer, parameters)
        factor = self._magnitude_factor(builder, layer, parameters["magnitude"], parameters["A"], b)
        if dropped is not None:
            # The input of Dropout is transposed already, and y has the bias.
            attributes = {name: one.value for name, one in layer.node.attributes.items() if name not in ("transA", "beta")}
            kept = builder.op(layer.node.op_type, dropped, builder.tensor(layer.weight), **attributes)
            return y + ((factor - 1.0) * kept + factor * added)
        bias = _bias(builder, layer)
        return factor * (y + added) if bias is None else factor * ((y - bias) + added) + bias

    def merged(self, adapter: Adapter, arrays: Arrays, weight: np.ndarray, node: ir.Node) -> np.ndarray:
        factor, axis = _factor(node), output_axis(node)
        whole = weight * factor + _product(adapter, arrays, node, weight.shape)
        factors = arrays["magnitude"].astype(np.float64) / lengths(whole, axis)
        return whole * _along(factors, node, weight, axis, False) / factor

    def _magnitude_factor(self, builder: Builder, layer: Layer, magnitude: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return ``magnitude / |W + s A B|``, with the lengths as constants in the backward pass."""
        weight = builder.tensor(layer.weight)
        if layer.factor != 1:
            weight = weight * layer.factor
        shape = layer.weight.shape
        assert shape is not None
        if layer.node.op_type == "Conv":
            flat = builder.op("MatMul", *(builder.op("Flatten", part, axis=1) for part in (b, a)))
            delta = builder.op("Reshape", flat, builder.integers([int(extent) for extent in shape.numpy()]), like=weight)
        else:
            delta = builder.op("MatMul", a, b)
            delta = builder.op("Transpose", delta, perm=[1, 0]) if layer.output_axis == 0 else delta
        whole = weight + delta
        axes = [axis for axis in range(len(shape)) if axis != layer.output_axis]
        squares = builder.op("ReduceSum", whole * whole, builder.integers(axes), keepdims=0)
        length = STOP_GRADIENT(builder.op("Sqrt", squares))
        return scaled_axis(builder, magnitude / length, layer, of_inputs=False)


class Ia3:
    """(IA)³ (Liu et al. 2022): the output, with its bias, times ``scale``; with ``feedforward`` the input times ``scale``."""

    name: ClassVar[str] = "ia3"
    parts: ClassVar[tuple[str, ...]] = ("scale",)
    has_rank: ClassVar[bool] = False
    peft_type: ClassVar[str] = "IA3"
    peft_flags: ClassVar[Mapping[str, bool]] = {}
    peft_parts: ClassVar[Mapping[str, str]] = {"ia3_l": "scale"}

    def check_layer(self, layer: Layer, rank: int) -> None:
        """Accept every layer."""

    def initial(self, layer: Layer, rank: int, feedforward: bool, generator: np.random.Generator, opset: int) -> Arrays:
        return {"scale": np.ones(layer.inputs if feedforward else layer.outputs)}

    def emit(self, builder: Builder, adapter: Adapter, layer: Layer, base: ir.Value, parameters: Mapping[str, Tensor]) -> Tensor:
        return builder.tensor(base) * scaled_axis(builder, parameters["scale"], layer, of_inputs=False)

    def merged(self, adapter: Adapter, arrays: Arrays, weight: np.ndarray, node: ir.Node) -> np.ndarray:
        return weight * _along(arrays["scale"], node, weight, output_axis(node), adapter.feedforward)


Variant = Lora | Ia3
VARIANTS: Mapping[str, Variant] = {variant.name: variant for variant in (Lora(), Dora(), Ia3())}


def scaled_axis(builder: Builder, scale: Tensor, layer: Layer, of_inputs: bool) -> Tensor:
    """Return a vector over inputs or outputs in a shape that broadcasts to a layer's input or output."""
    if layer.node.op_type == "Conv":
        return builder.op("Unsqueeze", scale, builder.integers(range(1, 1 + len(layer.kernel))))
    if of_inputs and attribute_value(layer.node, "transA", 0):
        return builder.op("Unsqueeze", scale, builder.integers([1]))
    return scale


def name_in_peft(variant: Variant, part: str, operator: str) -> str:
    """Return PEFT's suffix for a part, which is different for embeddings (``Gather``)."""
    of_table = operator == "Gather"
    names = [name for name, own in variant.peft_parts.items() if own == part]
    return next((name for name in names if ("embedding" in name) == of_table), names[0])


def lengths(weight: np.ndarray, axis: int) -> np.ndarray:
    """Return the Euclidean length of a weight for each index along an axis."""
    return np.sqrt(np.sum(weight * weight, axis=tuple(other for other in range(weight.ndim) if other != axis)))


def _factor(node: ir.Node) -> float:
    """Return alpha of a Gemm; else 1."""
    return float(attribute_value(node, "alpha", 1.0)) if node.op_type == "Gemm" else 1.0


def _product(adapter: Adapter, arrays: Arrays, node: ir.Node, shape: Sequence[int]) -> np.ndarray:
    """Return ``s A B`` in the layout of a node's weight, in float64."""
    a, b = (arrays[part].astype(np.float64) for part in "AB")
    if adapter.operator != "Conv":
        delta = a @ b
        return adapter.scaling * (delta.T if output_axis(node) == 0 else delta)
    groups = int(attribute_value(node, "group", 1))
    by_group = zip(np.split(a.reshape(len(a), -1), groups), np.split(b.reshape(len(b), -1), groups), strict=True)
    return adapter.scaling * np.concatenate([outputs @ inputs for inputs, outputs in by_group]).reshape(shape)


def _along(scale: np.ndarray, node: ir.Node, weight: np.ndarray, axis: int, of_inputs: bool) -> np.ndarray:
    """Return a vector over outputs or inputs in a shape that broadcasts to a weight, with the groups of a Conv."""
    if of_inputs and node.op_type == "Conv":
        groups = int(attribute_value(node, "group", 1))
        by_output = np.repeat(scale.reshape(groups, -1), len(weight) // groups, axis=0)
        return by_output.reshape(*by_output.shape, *(1 for _ in weight.shape[2:]))
    place = 1 - axis if of_inputs else axis
    return scale.reshape([-1 if other == place else 1 for other in range(weight.ndim)])


def _bias(builder: Builder, layer: Layer) -> Tensor | None:
    """Return the bias in a layer's node, broadcastable and scaled by beta."""
    node = layer.node
    value = node.inputs[2] if node.op_type in ("Gemm", "Conv") and len(node.inputs) > 2 else None
    if value is None:
        return None
    bias = builder.tensor(value)
    if node.op_type == "Conv":
        return scaled_axis(builder, bias, layer, of_inputs=False)
    beta = attribute_value(node, "beta", 1.0)
    return bias if beta == 1 else bias * beta
