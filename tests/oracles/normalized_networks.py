"""Small image classifiers with batch normalization, in float64 or float32: of residual blocks, and of inverted ones."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from burnish.graph import Tensor
from burnish.models import residual_network
from burnish.rewriting.change_dtypes import compute_in_float64
from oracles.small_networks import CLASSES, Network

IMAGE = (3, 8, 8)


def residual(double: bool = True) -> ir.Model:
    """Two basic residual blocks, the second with strides and a convolution on its short cut."""
    model = residual_network(input_shape=IMAGE, classes=CLASSES, width=4, blocks=(1, 1))
    return compute_in_float64(model) if double else model


def inverted_residual(double: bool = True, dropout: bool = False) -> ir.Model:
    """A stem and two blocks as in MobileNetV2: expand, convolve each channel by itself, project; ReLU6."""
    network = Network("inverted_residual", IMAGE)
    builder = network.builder

    def convolved(name: str, x: Tensor, channels: tuple[int, int], kernel: int = 1, stride: int = 1, grouped: bool = False):
        into, out = channels
        weight = network.drawn(f"{name}.conv", out, 1 if grouped else into, kernel, kernel, fan_in=kernel * kernel * into)
        y = builder.op(
            "Conv",
            x,
            weight,
            kernel_shape=[kernel] * 2,
            pads=[kernel // 2] * 4,
            strides=[stride] * 2,
            group=into if grouped else 1,
        )
        return network.normalized(f"{name}.norm", y, out)

    def clipped(y: Tensor) -> Tensor:
        return builder.op("Clip", y, builder.constant(np.float32(0)), builder.constant(np.float32(6)))

    y = clipped(convolved("stem", network.input, (3, 4), kernel=3, stride=2))
    for block in ("first", "second"):
        inner = clipped(convolved(f"{block}.expand", y, (4, 8)))
        inner = clipped(convolved(f"{block}.depthwise", inner, (8, 8), kernel=3, grouped=True))
        y = y + convolved(f"{block}.project", inner, (8, 4))
    y = builder.op("Flatten", builder.op("GlobalAveragePool", y))
    if dropout:
        y = builder.op("Dropout", y, builder.constant(np.float32(0.4)))
    model = network.model(network.dense("head", y, 4, CLASSES))
    return compute_in_float64(model) if double else model


def image_batches(steps: int, samples: int, dtype: type = np.float64, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Batches of images and labels."""
    rng = np.random.default_rng(seed)
    return [
        {
            "x": (rng.standard_normal((samples, *IMAGE)) + 1.5).astype(dtype),
            "labels": rng.integers(0, CLASSES, samples),
        }
        for _ in range(steps)
    ]
