"""A small residual network with batch normalization, after He et al. 2015, "Deep Residual Learning for Image Recognition"."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor

OPSET = 18
IR_VERSION = 8


def residual_network(
    input_shape: Sequence[int] = (1, 8, 8),
    classes: int = 10,
    width: int = 16,
    blocks: Sequence[int] = (1, 1, 1),
    seed: int = 0,
) -> ir.Model:
    """Build an image classifier of basic residual blocks in standard ONNX, in inference form, with initial weights.

    A 3x3 convolution, then stages of residual blocks (two 3x3 convolutions, each with batch normalization); every stage
    after the first halves height and width in its first block and doubles the channels. Then the mean over all pixels and
    a dense layer.

    Args:
        input_shape: channels, height and width of an image.
        classes: number of classes.
        width: channels of the first stage.
        blocks: residual blocks in each stage.
        seed: seed of the initial weights. Convolutions are drawn from a normal distribution of variance 2 / fan-out
            (He et al. 2015), the dense layer from a uniform one of bound 1 / sqrt(fan-in).

    Returns:
        A model with the input ``x`` (float32, [batch, channels, height, width]) and the output ``logits``
        (float32, [batch, classes]).

    Raises:
        ConfigurationError: a size that is not positive, or an input shape that is not of an image.
    """
    if len(input_shape) != 3:
        raise ConfigurationError(
            f"residual_network: input_shape={tuple(input_shape)} has {len(input_shape)} dimensions; "
            "give (channels, height, width)"
        )
    if min(*input_shape, classes, width, *blocks, len(blocks)) < 1:
        raise ConfigurationError(
            f"residual_network: input_shape={tuple(input_shape)}, classes={classes}, width={width}, blocks={tuple(blocks)}: "
            "every number has to be 1 or more"
        )
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", *input_shape]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": OPSET}, name="residual_network")
    layers = _Layers(Builder(graph), np.random.default_rng(seed))
    y = layers.normalized_convolution("stem", layers.builder.tensor(x), input_shape[0], width, kernel=3)
    y = layers.builder.op("Relu", y)
    channels = width
    for stage, depth in enumerate(blocks):
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            y = layers.residual_block(f"stage{stage + 1}.block{block + 1}", y, channels, width << stage, stride)
            channels = width << stage
    logits = layers.dense("classifier", layers.builder.op("GlobalAveragePool", y), channels, classes)
    logits.value.name = "logits"
    logits.value.shape = ir.Shape(["batch", classes])
    graph.outputs.append(logits.value)
    return ir.Model(graph, ir_version=IR_VERSION, producer_name="burnish")


class _Layers:
    """Emits layers and registers their weights as initializers, drawn in the order of emission."""

    def __init__(self, builder: Builder, generator: np.random.Generator):
        self.builder = builder
        self.generator = generator

    def weight(self, name: str, array: np.ndarray) -> Tensor:
        tensor = ir.tensor(np.ascontiguousarray(array, dtype=np.float32), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        self.builder.graph.register_initializer(value)
        return self.builder.tensor(value)

    def normalized_convolution(
        self, name: str, x: Tensor, channels_in: int, channels_out: int, kernel: int, stride: int = 1
    ) -> Tensor:
        """Convolution without bias, padded to keep the size at stride 1, then batch normalization."""
        deviation = np.sqrt(2 / (channels_out * kernel * kernel))
        drawn = self.generator.normal(0.0, deviation, (channels_out, channels_in, kernel, kernel))
        y = self.builder.op(
            "Conv",
            x,
            self.weight(f"{name}.convolution.weight", drawn),
            kernel_shape=[kernel, kernel],
            pads=[kernel // 2] * 4,
            strides=[stride, stride],
        )
        return self.builder.op(
            "BatchNormalization",
            y,
            self.weight(f"{name}.normalization.scale", np.ones(channels_out)),
            self.weight(f"{name}.normalization.bias", np.zeros(channels_out)),
            self.weight(f"{name}.normalization.running_mean", np.zeros(channels_out)),
            self.weight(f"{name}.normalization.running_variance", np.ones(channels_out)),
            epsilon=1e-5,
            momentum=0.9,
        )

    def residual_block(self, name: str, x: Tensor, channels_in: int, channels_out: int, stride: int) -> Tensor:
        """Two normalized 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""
        y = self.builder.op("Relu", self.normalized_convolution(f"{name}.first", x, channels_in, channels_out, 3, stride))
        y = self.normalized_convolution(f"{name}.second", y, channels_out, channels_out, 3)
        if stride != 1 or channels_in != channels_out:
            x = self.normalized_convolution(f"{name}.shortcut", x, channels_in, channels_out, 1, stride)
        return self.builder.op("Relu", y + x)

    def dense(self, name: str, x: Tensor, features_in: int, features_out: int) -> Tensor:
        bound = 1 / np.sqrt(features_in)
        weight = self.weight(f"{name}.weight", self.generator.uniform(-bound, bound, (features_out, features_in)))
        bias = self.weight(f"{name}.bias", self.generator.uniform(-bound, bound, features_out))
        return self.builder.op("Gemm", self.builder.op("Flatten", x, axis=1), weight, bias, transB=1)
