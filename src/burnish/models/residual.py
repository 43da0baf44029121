"""A small residual network with batch normalization, after He et al. 2015, "Deep Residual Learning for Image Recognition"."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Tensor
from burnish.models.layers import Layers, check_input_shape


def residual_network(
    input_shape: Sequence[int] = (1, 8, 8),
    classes: int = 10,
    width: int = 16,
    blocks: Sequence[int] = (1, 1, 1),
    seed: int = 0,
) -> ir.Model:
    """Build an image classifier of basic residual blocks in standard ONNX, in inference form, with initial weights.

    A 3x3 convolution is followed by stages of residual blocks (two 3x3 convolutions, each with batch normalization). Every stage
    after the first halves height and width in its first block and doubles the channels. Global average pooling and a dense layer
    follow.

    Args:
        input_shape: channels, height and width of an image.
        classes: number of classes.
        width: channels of the first stage.
        blocks: residual blocks in each stage.
        seed: seed of the initial weights: convolutions normal with variance 2 / fan-out (He et al. 2015), the dense layer uniform
            with bound 1 / sqrt(fan-in).

    Returns:
        A model with the input ``x`` (float32, [batch, channels, height, width]) and the output ``logits`` (float32, [batch,
        classes]).

    Raises:
        ConfigurationError: a size that is not positive, or an input shape that is not an image's.
    """
    check_input_shape("residual_network", input_shape, "channels", "height", "width")
    if min(*input_shape, classes, width, *blocks, len(blocks)) < 1:
        raise ConfigurationError(
            f"residual_network: input_shape={tuple(input_shape)}, classes={classes}, width={width}, blocks={tuple(blocks)}: "
            "every number has to be 1 or more"
        )
    layers = Layers("residual_network", seed)
    x = layers.input("x", ir.DataType.FLOAT, *input_shape)
    y = layers.builder.op("Relu", layers.normalized_convolution("stem", x, input_shape[0], width))
    channels = width
    for stage, depth in enumerate(blocks):
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            y = _block(layers, f"stage{stage + 1}.block{block + 1}", y, channels, width << stage, stride)
            channels = width << stage
    return layers.model(layers.classifier(y, channels, classes), classes)


def _block(layers: Layers, name: str, x: Tensor, channels_in: int, channels_out: int, stride: int) -> Tensor:
    """Emit two normalized 3x3 convolutions plus a shortcut, which is a 1x1 convolution if the shape changes."""
    builder = layers.builder
    y = builder.op("Relu", layers.normalized_convolution(f"{name}.first", x, channels_in, channels_out, 3, stride))
    y = layers.normalized_convolution(f"{name}.second", y, channels_out, channels_out)
    if stride != 1 or channels_in != channels_out:
        x = layers.normalized_convolution(f"{name}.shortcut", x, channels_in, channels_out, 1, stride)
    return builder.op("Relu", y + x)
