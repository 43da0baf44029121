"""A U-Net with batch normalization, after Ronneberger et al. 2015, "U-Net: Convolutional networks for biomedical images"."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from burnish.models.layers import Layers, check_extents, check_halvings, check_input_shape
from burnish.validation import check_count

DEPTH = 3
"""Number of halvings of height and width."""


def unet(input_shape: Sequence[int], classes: int = 2, width: int = 16, seed: int = 0) -> ir.Model:
    """Build a U-Net that classifies each pixel in standard ONNX, in inference form, with initial weights.

    On the way down, each of three stages is two 3x3 convolutions with batch normalization and ReLU, then 2x2 max pooling; the
    channels double from stage to stage. On the way up, a transposed convolution doubles height and width, the output of the stage
    of that size is concatenated, and two convolutions follow. A 1x1 convolution gives the classes.

    Args:
        input_shape: shape of an image: (channels, height, width). Height and width are multiples of 8.
        classes: number of classes.
        width: channels of the first stage.
        seed: seed of the initial weights: convolutions normal with variance 2 / fan-out (He et al. 2015), transposed ones with 1
            / channels; the last uniform with bound 1 / sqrt(fan-in).

    Returns:
        A model with the input ``x`` (float32, [batch, channels, height, width]) and the output ``logits`` (float32, [batch,
        classes, height, width]).

    Raises:
        ConfigurationError: a size that is not a whole number of at least 1 or is too large, an input shape that is not an
            image's, or a height or width that is not a multiple of 8.
    """
    check_input_shape("unet", input_shape, "channels", "height", "width")
    check_extents("unet", classes=classes, width=width)
    check_count("unet", 0, seed=seed)
    check_halvings("unet", input_shape, DEPTH)
    channels, *sides = input_shape
    network = Layers("unet", seed)
    builder = network.builder
    y = network.input("x", ir.DataType.FLOAT, *input_shape)
    stages = []
    for stage in range(DEPTH):
        y = _stage(network, f"down.{stage + 1}", y, channels, width << stage)
        channels = width << stage
        stages.append(y)
        y = builder.op("MaxPool", y, kernel_shape=[2, 2], strides=[2, 2])
    y = _stage(network, "middle", y, channels, width << DEPTH)
    for stage in reversed(range(DEPTH)):
        half = width << stage
        y = _doubled(network, f"up.{stage + 1}.upsampling", y, 2 * half, half)
        y = _stage(network, f"up.{stage + 1}", builder.op("Concat", stages[stage], y, axis=1), 2 * half, half)
    bound = 1 / np.sqrt(width)
    weight = network.uniform("classifier.weight", bound, classes, width, 1, 1)
    logits = builder.op("Conv", y, weight, network.uniform("classifier.bias", bound, classes), kernel_shape=[1, 1])
    return network.model(logits, classes, *sides)


def _stage(network: Layers, name: str, x: Tensor, channels_in: int, channels_out: int) -> Tensor:
    y = network.builder.op("Relu", network.normalized_convolution(f"{name}.first", x, channels_in, channels_out))
    return network.builder.op("Relu", network.normalized_convolution(f"{name}.second", y, channels_out, channels_out))


def _doubled(network: Layers, name: str, x: Tensor, channels_in: int, channels_out: int) -> Tensor:
    """Emit a transposed convolution that doubles height and width; each output pixel comes from one input pixel."""
    drawn = network.generator.normal(0.0, 1 / np.sqrt(channels_in), (channels_in, channels_out, 2, 2))
    weight, bias = network.weight(f"{name}.weight", drawn), network.weight(f"{name}.bias", np.zeros(channels_out))
    return network.builder.op("ConvTranspose", x, weight, bias, kernel_shape=[2, 2], strides=[2, 2])
