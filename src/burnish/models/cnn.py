"""A convolutional network with batch normalization."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from burnish.models.layers import Layers, check_extents, check_input_shape
from burnish.validation import check_count

LAYERS = 3


def cnn(input_shape: Sequence[int], classes: int = 10, width: int = 16, seed: int = 0) -> ir.Model:
    """Build a convolutional image classifier in standard ONNX, in inference form, with initial weights.

    Each of three layers is a 3x3 convolution, batch normalization, ReLU and 2x2 max pooling, with twice the channels of the layer
    before. A side of one pixel is not pooled further. Global average pooling and a dense layer follow.

    Args:
        input_shape: shape of an image: (channels, height, width).
        classes: number of classes.
        width: channels of the first layer.
        seed: seed of the initial weights: convolutions normal with variance 2 / fan-out (He et al. 2015), the dense layer uniform
            with bound 1 / sqrt(fan-in).

    Returns:
        A model with the input ``x`` (float32, [batch, channels, height, width]) and the output ``logits`` (float32, [batch,
        classes]).

    Raises:
        ConfigurationError: a size that is not a whole number of at least 1 or is too large, or an input shape that is not an
            image's.
    """
    check_input_shape("cnn", input_shape, "channels", "height", "width")
    check_extents("cnn", classes=classes, width=width)
    check_count("cnn", 0, seed=seed)
    network = Layers("cnn", seed)
    y = network.input("x", ir.DataType.FLOAT, *input_shape)
    channels, *sides = input_shape
    for layer in range(LAYERS):
        y = network.normalized_convolution(f"layers.{layer + 1}", y, channels, width << layer)
        y = network.builder.op("Relu", y)
        channels = width << layer
        window = [min(side, 2) for side in sides]
        y = network.builder.op("MaxPool", y, kernel_shape=window, strides=window)
        sides = [max(side // 2, 1) for side in sides]
    return network.model(network.classifier(y, channels, classes), classes)
