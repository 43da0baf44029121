"""Shared layers of the networks; each emits nodes and registers its weights as initializers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish.errors import ConfigurationError
from burnish.graph import Builder, Tensor
from burnish.validation import is_whole, require

BATCH = "batch"
IR_VERSIONS = {18: 8, 20: 9}
"""ONNX file format version of each opset."""
LARGEST = 2**20
"""Largest extent, which keeps the weights below the 2 GiB limit of one ONNX file."""


def check_extents(model: str, **extents: int) -> None:
    """Raise ConfigurationError for anything but whole numbers from 1 to ``LARGEST``."""
    for name, extent in extents.items():
        require(is_whole(extent) and 1 <= extent <= LARGEST, model, name, extent, f"a whole number from 1 to {LARGEST:,}")


def check_input_shape(model: str, input_shape: Sequence[int], *axes: str) -> None:
    """Raise ConfigurationError unless the shape has one extent for each axis of a sample."""
    form = f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"
    if not isinstance(input_shape, Sequence) or isinstance(input_shape, str):
        raise ConfigurationError(f"{model}: input_shape={input_shape!r} is not the shape of a sample; give {form}")
    if len(input_shape) != len(axes):
        count = f"{len(input_shape)} dimension{'' if len(input_shape) == 1 else 's'}"
        raise ConfigurationError(f"{model}: input_shape={tuple(input_shape)} has {count}; give {form}")
    check_extents(model, **{f"{axis} in input_shape": extent for axis, extent in zip(axes, input_shape, strict=True)})


def check_halvings(model: str, input_shape: Sequence[int], times: int) -> None:
    """Raise ConfigurationError for an image with a height or width that cannot be halved ``times`` times."""
    step = 2**times
    for side, extent in zip(("height", "width"), input_shape[1:], strict=True):
        if extent % step:
            raise ConfigurationError(
                f"{model}: input_shape={tuple(input_shape)}: the {side} {extent} is no multiple of {step}, as it is halved "
                f"{times} times; give {-(-extent // step) * step}"
            )


class Layers:
    """Emits layers and registers their weights as initializers, drawn in the order of emission.

    Args:
        name: name of the graph.
        seed: seed of the initial weights.
        opset: opset of the operators.

    Attributes:
        metadata: the model's metadata.
    """

    def __init__(self, name: str, seed: int, opset: int = 18):
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name=name)
        self.builder = Builder(self.graph)
        self.generator = np.random.default_rng(seed)
        self.metadata: dict[str, str] = {}

    def input(self, name: str, dtype: ir.DataType, *extents: int | str) -> Tensor:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape([BATCH, *extents]))
        self.graph.inputs.append(value)
        return self.builder.tensor(value)

    def weight(self, name: str, array: np.ndarray) -> Tensor:
        tensor = ir.tensor(np.ascontiguousarray(array, dtype=np.float32), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
        self.graph.register_initializer(value)
        return self.builder.tensor(value)

    def uniform(self, name: str, bound: float, *shape: int) -> Tensor:
        """Add a weight drawn uniformly from -bound to bound."""
        return self.weight(name, self.generator.uniform(-bound, bound, shape))

    def dense(self, name: str, x: Tensor, features_in: int, features_out: int) -> Tensor:
        """Add a dense layer, initialized as in PyTorch: uniform, with bound 1 / sqrt(fan-in)."""
        bound = 1 / np.sqrt(features_in)
        weight = self.uniform(f"{name}.weight", bound, features_out, features_in)
        return self.builder.op("Gemm", x, weight, self.uniform(f"{name}.bias", bound, features_out), transB=1)

    def normalized_convolution(
        self, name: str, x: Tensor, channels_in: int, channels_out: int, kernel: int = 3, stride: int = 1
    ) -> Tensor:
        """Add a convolution without bias, padded to keep the size at stride 1, then batch normalization.

        Its weights are normal with variance 2 / fan-out (He et al. 2015).
        """
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

    def classifier(self, x: Tensor, channels: int, classes: int) -> Tensor:
        """Add global average pooling and a dense layer."""
        pooled = self.builder.op("Flatten", self.builder.op("GlobalAveragePool", x), axis=1)
        return self.dense("classifier", pooled, channels, classes)

    def output(self, name: str, tensor: Tensor, *extents: int | str) -> None:
        tensor.value.name = name
        tensor.value.shape = ir.Shape([BATCH, *extents])
        self.graph.outputs.append(tensor.value)

    def model(self, logits: Tensor, *extents: int | str, name: str = "logits") -> ir.Model:
        """Return the model with ``logits`` as its last output, of these extents per sample."""
        self.output(name, logits, *extents)
        version = IR_VERSIONS[self.builder.opset]
        return ir.Model(self.graph, ir_version=version, producer_name="burnish", metadata_props=self.metadata)
