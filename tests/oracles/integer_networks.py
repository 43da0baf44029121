"""Networks drawn at random, of what ONNX Runtime computes with integers."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

CHANNELS, SIDE = 4, 6


class Drawing:
    """A network under construction: convolutions of all kinds, sums, products, pooling and activation functions."""

    def __init__(self, seed: int):
        self.generator = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.images = [("x", 3)]
        """Values of one extent, and their channels."""

    def model(self, operators: int = 6) -> onnx.ModelProto:
        self.convolution()
        for _ in range(operators):
            self.generator.choice([self.convolution, self.depthwise, self.joined, self.activated, self.pooled, self.normalized])()
        self.head()
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, SIDE, SIDE])]
        outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])]
        graph = helper.make_graph(self.nodes, "drawn", inputs, outputs, self.initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)

    def weight(self, *shape: int, low: float | None = None) -> str:
        array = self.generator.normal(size=shape) if low is None else self.generator.uniform(low, 1.5, shape)
        self.initializers.append(onnx.numpy_helper.from_array(array.astype(np.float32), f"w{len(self.initializers)}"))
        return self.initializers[-1].name

    def add(self, op_type: str, *inputs: str, channels: int = 0, **attributes: object) -> str:
        output = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [output], **attributes))
        if channels:
            self.images.append((output, channels))
        return output

    def image(self) -> tuple[str, int]:
        return self.images[self.generator.integers(max(len(self.images) - 3, 0), len(self.images))]

    def convolution(self) -> None:
        x, channels = self.image()
        extent = int(self.generator.choice([1, 3]))
        bias = [self.weight(CHANNELS)] if self.generator.random() < 0.5 else []
        weight = self.weight(CHANNELS, channels, extent, extent)
        self.add("Conv", x, weight, *bias, channels=CHANNELS, pads=[extent // 2] * 4)

    def depthwise(self) -> None:
        x, channels = self.image()
        self.add("Conv", x, self.weight(channels, 1, 3, 3), channels=channels, group=channels, pads=[1] * 4)

    def joined(self) -> None:
        (x, channels), (y, others) = self.image(), self.image()
        if channels == others:
            result = self.add(str(self.generator.choice(["Add", "Mul"])), x, y, channels=channels)
            if self.generator.random() < 0.5:
                self.images.pop()
                self.add("Relu", result, channels=channels)
        else:
            self.add("Concat", x, y, channels=channels + others, axis=1)

    def activated(self) -> None:
        x, channels = self.image()
        self.add(str(self.generator.choice(["Relu", "LeakyRelu", "Sigmoid"])), x, channels=channels)

    def pooled(self) -> None:
        x, channels = self.image()
        window = {"kernel_shape": [3, 3], "pads": [1] * 4}
        if self.generator.random() < 0.5:
            self.add("MaxPool", x, channels=channels, **window)
        else:
            self.add("AveragePool", x, channels=channels, count_include_pad=int(self.generator.integers(2)), **window)

    def normalized(self) -> None:
        self.convolution()
        x, channels = self.images.pop()
        operands = [self.weight(channels) for _ in range(3)]
        result = self.add("BatchNormalization", x, *operands, self.weight(channels, low=0.5), channels=channels)
        if self.generator.random() < 0.5:
            self.images.pop()
            self.add("Relu", result, channels=channels)

    def head(self) -> None:
        x, channels = self.images[-1]
        if self.generator.random() < 0.5:
            rows = self.add("Flatten", self.add("GlobalAveragePool", x))
        else:
            self.initializers.append(onnx.numpy_helper.from_array(np.asarray([-1, 2]), "axes"))
            rows = self.add("ReduceMean", x, "axes", keepdims=0)
        if self.generator.random() < 0.5:
            self.nodes.append(helper.make_node("Gemm", [rows, self.weight(3, channels), self.weight(3)], ["y"], transB=1))
        else:
            product = self.add("MatMul", rows, self.weight(channels, 3))
            self.nodes.append(helper.make_node("Add", [product, self.weight(3)], ["y"]))
