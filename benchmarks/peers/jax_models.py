"""The models of ``torch_models`` as functions of their parameters in JAX, images in NHWC, parameters under PyTorch's names.

``MODELS`` names them; each takes layers over the parameters and a batch, and returns the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

Parameters = dict[str, jax.Array]
Statistics = dict[str, tuple[jax.Array, jax.Array]]


class Layers:
    """Layers over named parameters, of which batch normalization leaves its statistics behind."""

    def __init__(self, parameters: Parameters):
        self.parameters = parameters
        self.statistics: Statistics = {}

    def dense(self, name: str, x: jax.Array) -> jax.Array:
        return x @ self.parameters[f"{name}.weight"].T + self.parameters[f"{name}.bias"]

    def convolution(self, name: str, x: jax.Array, stride: int = 1, pad: int = 0, groups: int = 1) -> jax.Array:
        """x is NHWC, the weight HWIO."""
        y = jax.lax.conv_general_dilated(
            x,
            self.parameters[f"{name}.weight"],
            (stride, stride),
            [(pad, pad)] * 2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        return y + self.parameters[f"{name}.bias"] if f"{name}.bias" in self.parameters else y

    def batch_norm(self, name: str, x: jax.Array) -> jax.Array:
        axes = tuple(range(x.ndim - 1))
        mean, variance = x.mean(axes), x.var(axes)
        count = x.size // x.shape[-1]
        self.statistics[name] = (mean, variance * (count / (count - 1)))
        scale = self.parameters[f"{name}.weight"] * jax.lax.rsqrt(variance + 1e-5)
        return (x - mean) * scale + self.parameters[f"{name}.bias"]

    def layer_norm(self, name: str, x: jax.Array) -> jax.Array:
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        normalized = (x - mean) * jax.lax.rsqrt(variance + 1e-12)
        return normalized * self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]

    def instance_norm(self, name: str, x: jax.Array) -> jax.Array:
        mean, variance = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
        normalized = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
        return normalized * self.parameters[f"{name}.weight"] + self.parameters[f"{name}.bias"]


def max_pool(x: jax.Array, kernel: int, stride: int, pad: int = 0) -> jax.Array:
    pads = [(0, 0), (pad, pad), (pad, pad), (0, 0)]
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, kernel, kernel, 1), (1, stride, stride, 1), pads)


def mlp(layers: Layers, x: jax.Array) -> jax.Array:
    return layers.dense("2", jax.nn.relu(layers.dense("0", x)))


def normalized_mlp(layers: Layers, x: jax.Array, depth: int = 4) -> jax.Array:
    for index in range(depth):
        x = jax.nn.relu(layers.batch_norm(str(3 * index + 1), layers.dense(str(3 * index), x)))
    return layers.dense(str(3 * depth), x)


def lenet(layers: Layers, x: jax.Array) -> jax.Array:
    x = max_pool(jax.nn.relu(layers.convolution("0", x, pad=2)), 2, 2)
    x = max_pool(jax.nn.relu(layers.convolution("3", x)), 2, 2)
    x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)
    return layers.dense("11", jax.nn.relu(layers.dense("9", jax.nn.relu(layers.dense("7", x)))))


def _shortcut(layers: Layers, name: str, x: jax.Array, stride: int) -> jax.Array:
    if f"{name}.downsample.0.weight" not in layers.parameters:
        return x
    return layers.batch_norm(f"{name}.downsample.1", layers.convolution(f"{name}.downsample.0", x, stride))


def digits_resnet(layers: Layers, x: jax.Array) -> jax.Array:
    x = jax.nn.relu(layers.batch_norm("bn1", layers.convolution("conv1", x, pad=1)))
    for index, stride in enumerate((1, 2, 2)):
        name = f"blocks.{index}"
        y = jax.nn.relu(layers.batch_norm(f"{name}.bn1", layers.convolution(f"{name}.conv1", x, stride, 1)))
        y = layers.batch_norm(f"{name}.bn2", layers.convolution(f"{name}.conv2", y, pad=1))
        x = jax.nn.relu(y + _shortcut(layers, name, x, stride))
    return layers.dense("fc", x.mean((1, 2)))


def resnet50(layers: Layers, x: jax.Array) -> jax.Array:
    x = max_pool(jax.nn.relu(layers.batch_norm("bn1", layers.convolution("conv1", x, 2, 3))), 3, 2, 1)
    for stage, depth in enumerate((3, 4, 6, 3)):
        for block in range(depth):
            name, stride = f"stages.{stage}.{block}", 2 if stage and not block else 1
            y = jax.nn.relu(layers.batch_norm(f"{name}.bn1", layers.convolution(f"{name}.conv1", x)))
            y = jax.nn.relu(layers.batch_norm(f"{name}.bn2", layers.convolution(f"{name}.conv2", y, stride, 1)))
            y = layers.batch_norm(f"{name}.bn3", layers.convolution(f"{name}.conv3", y))
            x = jax.nn.relu(y + _shortcut(layers, name, x, stride))
    return layers.dense("fc", x.mean((1, 2)))


def mobilenet_v2(layers: Layers, x: jax.Array) -> jax.Array:
    def normalized(name: str, index: int, y: jax.Array, stride: int = 1, pad: int = 0, groups: int = 1) -> jax.Array:
        return layers.batch_norm(f"{name}.{index + 1}", layers.convolution(f"{name}.{index}", y, stride, pad, groups))

    x = jax.nn.relu6(normalized("features", 0, x, 2, 1))
    place = 3
    settings = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, channels, repeats, first_stride in settings:
        for repeat in range(repeats):
            name, stride, y, index = f"features.{place}.layers", first_stride if repeat == 0 else 1, x, 0
            if expansion != 1:
                y, index = jax.nn.relu6(normalized(name, 0, y)), 3
            y = jax.nn.relu6(normalized(name, index, y, stride, 1, y.shape[-1]))
            y = normalized(name, index + 3, y)
            x = x + y if stride == 1 and x.shape[-1] == channels else y
            place += 1
    x = jax.nn.relu6(normalized("features", place, x))
    return layers.dense("classifier", x.mean((1, 2)))


def unet(layers: Layers, x: jax.Array, stages: int = 4) -> jax.Array:
    def two_convolutions(name: str, y: jax.Array) -> jax.Array:
        for index in (0, 3):
            y = jax.nn.silu(layers.instance_norm(f"{name}.{index + 1}", layers.convolution(f"{name}.{index}", y, pad=1)))
        return y

    maps: list[jax.Array] = []
    for stage in range(stages):
        x = two_convolutions(f"down.{stage}", max_pool(x, 2, 2) if stage else x)
        maps.append(x)
    for index, skipped in enumerate(reversed(maps[:-1])):
        x = jax.image.resize(x, (*skipped.shape[:3], x.shape[3]), "linear")
        x = two_convolutions(f"up.{index}", jnp.concatenate([skipped, x], 3))
    return layers.convolution("head", x)


def audio(layers: Layers, x: jax.Array) -> jax.Array:
    """x is NWC, the weights WIO."""
    for index, (kernel, stride) in enumerate([(80, 4), (9, 1), (9, 1), (9, 1)]):
        name, pad = f"layers.{4 * index}", (kernel - stride + 1) // 2
        weight = layers.parameters[f"{name}.weight"]
        y = jax.lax.conv_general_dilated(x, weight, (stride,), [(pad, pad)], dimension_numbers=("NWC", "WIO", "NWC"))
        y = jax.nn.relu(layers.batch_norm(f"layers.{4 * index + 1}", y + layers.parameters[f"{name}.bias"]))
        x = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 4, 1), (1, 4, 1), "VALID")
    return layers.dense("fc", x.mean(1))


def bert(layers: Layers, x: jax.Array, heads: int = 12, depth: int = 12) -> jax.Array:
    table = layers.parameters
    y = table["tokens.weight"][x] + table["positions.weight"][: x.shape[1]] + table["sentences.weight"][0]
    y = layers.layer_norm("norm", y)
    for index in range(depth):
        name = f"layers.{index}"
        query, key, value = (
            layers.dense(f"{name}.{part}", y).reshape(*y.shape[:2], heads, -1) for part in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value).reshape(y.shape)
        y = layers.layer_norm(f"{name}.attention_norm", y + layers.dense(f"{name}.project", mixed))
        hidden = jax.nn.gelu(layers.dense(f"{name}.expand", y), approximate=False)
        y = layers.layer_norm(f"{name}.output_norm", y + layers.dense(f"{name}.contract", hidden))
    return layers.dense("classifier", jnp.tanh(layers.dense("pooler", y[:, 0])))


MODELS: dict[str, Callable[[Layers, jax.Array], jax.Array]] = {
    "mlp": mlp,
    "mlp-batchnorm": normalized_mlp,
    "digits-resnet": digits_resnet,
    "lenet": lenet,
    "resnet50": resnet50,
    "mobilenet_v2": mobilenet_v2,
    "unet": unet,
    "audio": audio,
    "bert-base": bert,
}
