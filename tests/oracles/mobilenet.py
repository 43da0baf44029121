"""MobileNetV2 in its published size, with drawn weights."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from oracles.small_networks import Network

CLASSES = 10


def mobilenet_v2() -> ir.Model:
    """MobileNetV2 (Sandler et al. 2018) over images of 224 x 224 pixels, with drawn weights: 17 inverted residuals."""
    network = Network("mobilenet_v2", [3, 224, 224])
    builder = network.builder
    count = 0

    def block(x: Tensor, channels: int, outputs: int, kernel: int, group: int, stride: int = 1, clip: bool = True) -> Tensor:
        nonlocal count
        count += 1
        weights = network.drawn(
            f"features.{count}.weight", outputs, channels // group, kernel, kernel, fan_in=kernel**2 * channels // group
        )
        attributes = {"kernel_shape": [kernel] * 2, "pads": [kernel // 2] * 4, "strides": [stride] * 2, "group": group}
        y = network.normalized(f"features.{count}.normalization", builder.op("Conv", x, weights, **attributes), outputs)
        limits = (builder.constant(np.float32(limit)) for limit in (0, 6))
        return builder.op("Clip", y, *limits) if clip else y

    x, channels = block(network.input, 3, 32, 3, 1, 2), 32
    stages = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    for expansion, outputs, repeats, first_stride in stages:
        for index in range(repeats):
            stride = first_stride if index == 0 else 1
            wide = channels * expansion
            y = block(x, channels, wide, 1, 1) if expansion > 1 else x
            y = block(block(y, wide, wide, 3, wide, stride), wide, outputs, 1, 1, clip=False)
            x, channels = (x + y if stride == 1 and channels == outputs else y), outputs
    x = block(x, channels, 1280, 1, 1)
    mean = builder.op("ReduceMean", x, builder.integers([2, 3]), keepdims=0)
    return network.model(network.dense("head", mean, 1280, CLASSES))
