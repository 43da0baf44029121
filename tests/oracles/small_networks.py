"""Small networks of every kind that programs are compiled from, in plain ONNX: inputs, weights and a batch that fits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor

BATCH = 8
CLASSES = 5


class Network:
    """A network under construction; weights are drawn in the order of emission."""

    def __init__(self, name: str, shape: Sequence[int], dtype: ir.DataType = ir.DataType.FLOAT, input_name: str = "x"):
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name=name)
        self.graph.inputs.append(ir.Value(name=input_name, type=ir.TensorType(dtype), shape=ir.Shape(["batch", *shape])))
        self.builder = Builder(self.graph)
        self.generator = np.random.default_rng(0)

    @property
    def input(self) -> Tensor:
        return self.builder.tensor(self.graph.inputs[0])

    def weight(self, name: str, array: np.ndarray) -> Tensor:
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(array.shape))
        value.const_value = ir.tensor(array.astype(np.float32), name=name)
        self.graph.register_initializer(value)
        return self.builder.tensor(value)

    def drawn(self, name: str, *extents: int, fan_in: int) -> Tensor:
        return self.weight(name, self.generator.normal(0, fan_in**-0.5, extents))

    def dense(self, name: str, x: Tensor, features_in: int, features_out: int) -> Tensor:
        product = self.builder.op("MatMul", x, self.drawn(f"{name}.weight", features_in, features_out, fan_in=features_in))
        return product + self.drawn(f"{name}.bias", features_out, fan_in=features_in)

    def normalized(self, name: str, x: Tensor, channels: int) -> Tensor:
        scale, bias = self.generator.uniform(0.5, 1.5, channels), self.generator.normal(size=channels)
        running = [self.weight(f"{name}.mean", np.zeros(channels)), self.weight(f"{name}.variance", np.ones(channels))]
        return self.builder.op(
            "BatchNormalization",
            x,
            self.weight(f"{name}.scale", scale),
            self.weight(f"{name}.bias", bias),
            *running,
            epsilon=1e-5,
        )

    def model(self, logits: Tensor) -> ir.Model:
        logits.value.name = "logits"
        self.graph.outputs.append(logits.value)
        return ir.Model(self.graph, ir_version=8)


def perceptron(dropout: bool = False, outputs: int = CLASSES) -> ir.Model:
    """Two hidden layers, with dropout between them on demand."""
    network = Network("perceptron", [12])
    builder = network.builder
    y = builder.op("Tanh", network.dense("first", network.input, 12, 16))
    if dropout:
        y = builder.op("Dropout", y, builder.constant(np.float32(0.3)))
    y = builder.op("Relu", network.dense("second", y, 16, 16))
    if dropout:
        y = builder.op("Dropout", y, builder.constant(np.float32(0.5)))
    return network.model(network.dense("head", y, 16, outputs))


def transformer() -> ir.Model:
    """An embedding, one block of attention and a dense part, each behind a layer normalization."""
    width, heads, length = 16, 2, 6
    network = Network("transformer", [length], ir.DataType.INT64, "tokens")
    builder = network.builder

    def layer_norm(name: str, x: Tensor) -> Tensor:
        scale = network.weight(f"{name}.scale", network.generator.uniform(0.5, 1.5, width))
        return builder.op("LayerNormalization", x, scale, network.drawn(f"{name}.bias", width, fan_in=width), axis=-1)

    def split(x: Tensor) -> Tensor:
        parts = builder.op("Reshape", x, builder.integers([0, length, heads, width // heads]))
        return builder.op("Transpose", parts, perm=[0, 2, 1, 3])

    x = builder.op("Gather", network.drawn("embedding", 20, width, fan_in=1), network.input, axis=0)
    x = x + network.drawn("position", length, width, fan_in=1)
    inner = layer_norm("before_attention", x)
    query, key, value = (
        split(builder.op("MatMul", inner, network.drawn(name, width, width, fan_in=width))) for name in ("query", "key", "value")
    )
    scores = builder.op("MatMul", query, builder.op("Transpose", key, perm=[0, 1, 3, 2])) * (width // heads) ** -0.5
    mixed = builder.op("MatMul", builder.op("Softmax", scores, axis=-1), value)
    mixed = builder.op("Reshape", builder.op("Transpose", mixed, perm=[0, 2, 1, 3]), builder.integers([0, length, width]))
    x = x + builder.op("Dropout", network.dense("attention", mixed, width, width), builder.constant(np.float32(0.1)))
    inner = network.dense("expand", layer_norm("before_dense", x), width, 32)
    gated = inner * 0.5 * (builder.op("Erf", inner * 2**-0.5) + 1.0)
    x = x + network.dense("contract", gated, 32, width)
    mean = builder.op("ReduceMean", x, builder.integers([1]), keepdims=0)
    return network.model(network.dense("head", mean, width, CLASSES))


def mobile() -> ir.Model:
    """Depthwise and pointwise convolutions with batch normalization and a clipped activation, as in MobileNet."""
    network = Network("mobile", [3, 12, 12])
    builder = network.builder

    def block(name: str, x: Tensor, channels: int, outputs: int, kernel: int, group: int, stride: int = 1) -> Tensor:
        kernels = network.drawn(
            f"{name}.weight", outputs, channels // group, kernel, kernel, fan_in=channels // group * kernel**2
        )
        attributes = {"kernel_shape": [kernel] * 2, "pads": [kernel // 2] * 4, "strides": [stride] * 2, "group": group}
        return network.normalized(f"{name}.normalization", builder.op("Conv", x, kernels, **attributes), outputs)

    def clipped(x: Tensor) -> Tensor:
        return builder.op("Clip", x, builder.constant(np.float32(0)), builder.constant(np.float32(6)))

    x = clipped(block("stem", network.input, 3, 8, 3, 1, 2))
    inner = clipped(block("expand", x, 8, 16, 1, 1))
    inner = clipped(block("depthwise", inner, 16, 16, 3, 16))
    x = x + block("project", inner, 16, 8, 1, 1)
    x = clipped(block("last", x, 8, 12, 3, 1, 2))
    x = builder.op("MaxPool", x, kernel_shape=[2, 2], strides=[1, 1])
    mean = builder.op("Reshape", builder.op("GlobalAveragePool", x), builder.integers([-1, 12]))
    return network.model(network.dense("head", mean, 12, CLASSES))


def batch_of(model: ir.Model, seed: int = 0) -> dict[str, np.ndarray]:
    """A batch for a classifier: values, or tokens, and labels."""
    generator = np.random.default_rng(seed)
    (value,) = model.graph.inputs
    assert value.shape is not None
    extents = [BATCH, *(int(extent) for extent in value.shape.dims[1:])]
    if value.dtype == ir.DataType.INT64:
        data: np.ndarray = generator.integers(0, 20, extents)
    else:
        data = generator.normal(size=extents).astype(np.float32)
    return {str(value.name): data, "labels": generator.integers(0, CLASSES, BATCH)}
