"""Small files as exporters write them: their names, their opset, and the pieces that they write layers in."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class _Style:
    """A file under construction; weights are drawn from one seed."""

    def __init__(self, producer: str, opset: int):
        self.producer, self.opset = producer, opset
        self.rng = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def weight(self, name: str, *shape: int, around: float = 0.0) -> str:
        array = around + 0.3 * self.rng.normal(size=shape)
        return self.constant(name, array.astype(np.float32))

    def constant(self, name: str, array: Any) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def integers(self, name: str, numbers: list[int]) -> str:
        return self.constant(name, np.array(numbers, np.int64))

    def op(self, op_type: str, inputs: list[str], *outputs: str, name: str = "", **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, list(outputs), name=name or f"{op_type}_{outputs[0]}", **attributes))
        return outputs[0]

    def batch_norm(self, x: str, name: str, channels: int) -> str:
        operands = [self.weight(f"{name}.{part}", channels, around=around) for part, around in _BATCH_NORM.items()]
        self.initializers[-1].CopyFrom(
            numpy_helper.from_array(self.rng.uniform(0.5, 1.5, channels).astype(np.float32), operands[-1])
        )
        return self.op("BatchNormalization", [x, *operands], f"{name}.out", epsilon=1e-3)

    def model(self, x: str, shape: list[Any], y: str, rank_of_y: list[Any]) -> onnx.ModelProto:
        inputs = [helper.make_tensor_value_info(x, TensorProto.FLOAT, shape)]
        outputs = [helper.make_tensor_value_info(y, TensorProto.FLOAT, rank_of_y)]
        graph = helper.make_graph(self.nodes, "main_graph", inputs, outputs, self.initializers)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("ai.onnx.ml", 2)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=7, producer_name=self.producer)


_BATCH_NORM = {"gamma": 1.0, "beta": 0.0, "mean": 0.0, "variance": 1.0}


def tensorflow() -> onnx.ModelProto:
    """As tf2onnx: channels last outside, transpositions around convolutions, a probability at the end."""
    style = _Style("tf2onnx 1.16.1", 13)
    x = style.op("Transpose", ["input_1"], "model/conv2d/Conv2D__6:0", perm=[0, 3, 1, 2])
    weights = [
        style.weight("model/conv2d/Conv2D/ReadVariableOp:0", 4, 3, 3, 3),
        style.weight("model/conv2d/BiasAdd/ReadVariableOp:0", 4),
    ]
    attributes = {"pads": [1, 1, 1, 1], "strides": [1, 1], "dilations": [1, 1], "group": 1, "kernel_shape": [3, 3]}
    x = style.op("Conv", [x, *weights], "model/conv2d/BiasAdd:0", **attributes)
    x = style.op("Relu", [style.batch_norm(x, "model/batch_normalization", 4)], "model/re_lu/Relu:0")
    x = style.op("MaxPool", [x], "model/max_pooling2d/MaxPool:0", kernel_shape=[2, 2], strides=[2, 2])
    x = style.op("Transpose", [x], "model/max_pooling2d/MaxPool__12:0", perm=[0, 2, 3, 1])
    x = style.op("Reshape", [x, style.integers("const_fold_opt__20", [-1, 64])], "model/flatten/Reshape:0")
    x = style.op("MatMul", [x, style.weight("model/dense/MatMul/ReadVariableOp:0", 64, 5)], "model/dense/MatMul:0")
    x = style.op("Add", [x, style.weight("model/dense/BiasAdd/ReadVariableOp:0", 5)], "model/dense/BiasAdd:0")
    style.op("Softmax", [x], "dense", axis=-1)
    return style.model("input_1", ["unk__24", 8, 8, 3], "dense", ["unk__25", 5])


def keras() -> onnx.ModelProto:
    """As Keras 3: layer normalization in its pieces, projections and attention by Einsum."""
    style = _Style("tf2onnx 1.16.1", 15)
    mean = style.op("ReduceMean", ["x"], "mean", axes=[-1], keepdims=1)
    centered = style.op("Sub", ["x", mean], "centered")
    variance = style.op("ReduceMean", [style.op("Mul", [centered, centered], "square")], "variance", axes=[-1], keepdims=1)
    stable = style.op("Add", [variance, style.constant("epsilon", np.float32(1e-3))], "stable")
    inverse = style.op("Reciprocal", [style.op("Sqrt", [stable], "deviation")], "inverse")
    scaled = style.op("Mul", [inverse, style.weight("layer_normalization/gamma", 8, around=1.0)], "inverse_gamma")
    offset = style.op(
        "Sub", [style.weight("layer_normalization/beta", 8), style.op("Mul", [mean, scaled], "mean_gamma")], "offset"
    )
    normed = style.op("Add", [style.op("Mul", ["x", scaled], "x_gamma"), offset], "normed")
    heads = []
    for name in ("query", "key", "value"):
        product = style.op("Einsum", [normed, style.weight(f"attention/{name}/kernel", 8, 2, 4)], name, equation="abc,cde->abde")
        heads.append(style.op("Add", [product, style.weight(f"attention/{name}/bias", 2, 4)], f"{name}_biased"))
    query = style.op("Mul", [heads[0], style.constant("scale", np.float32(0.5))], "query_scaled")
    scores = style.op("Einsum", [heads[1], query], "scores", equation="aecd,abcd->acbe")
    probabilities = style.op("Softmax", [scores], "probabilities", axis=-1)
    context = style.op("Einsum", [probabilities, heads[2]], "context", equation="acbe,aecd->abcd")
    out = style.op("Einsum", [context, style.weight("attention/output/kernel", 2, 4, 8)], "out", equation="abcd,cde->abe")
    pooled = style.op("ReduceMean", [style.op("Add", [out, "x"], "residual")], "pooled", axes=[1], keepdims=0)
    product = style.op("MatMul", [pooled, style.weight("dense/kernel", 8, 5)], "product")
    style.op("Add", [product, style.weight("dense/bias", 5)], "dense")
    return style.model("x", ["unk__1", 6, 8], "dense", ["unk__2", 5])


def paddle() -> onnx.ModelProto:
    """As Paddle2ONNX: an old opset, activations in pieces, a shape computed for a Reshape, the batch -1."""
    style = _Style("PaddlePaddle", 11)
    attributes = {"pads": [1, 1, 1, 1], "strides": [2, 2], "dilations": [1, 1], "group": 1, "kernel_shape": [3, 3]}
    x = style.op("Conv", ["x", style.weight("conv2d_0.w_0", 4, 3, 3, 3)], "conv2d_0.tmp_0", **attributes)
    x = style.batch_norm(x, "batch_norm_0", 4)
    x = style.op("Mul", [x, style.op("HardSigmoid", [x], "gate", alpha=1 / 6, beta=0.5)], "hard_swish_0")
    squeezed = style.op("GlobalAveragePool", [x], "pool2d_0")
    squeezed = style.op("Conv", [squeezed, style.weight("conv2d_1.w_0", 4, 4, 1, 1)], "conv2d_1.tmp_0", kernel_shape=[1, 1])
    squeezed = style.op("Add", [squeezed, style.weight("conv2d_1.b_0", 1, 4, 1, 1)], "conv2d_1.tmp_1")
    x = style.op("Mul", [x, style.op("HardSigmoid", [squeezed], "excited", alpha=0.2, beta=0.5)], "squeezed_0")
    bounds = [style.integers(f"p2o.slice.{number}", [number]) for number in (0, 1)]
    batch = style.op("Slice", [style.op("Shape", [x], "p2o.Shape.0"), *bounds], "p2o.Slice.0")
    target = style.op("Concat", [batch, style.integers("p2o.rest", [-1])], "p2o.Concat.0", axis=0)
    x = style.op("MatMul", [style.op("Reshape", [x, target], "flat"), style.weight("linear_0.w_0", 64, 5)], "linear_0.tmp_0")
    style.op(
        "Identity", [style.op("Add", [x, style.weight("linear_0.b_0", 5)], "linear_0.tmp_1")], "save_infer_model/scale_0.tmp_0"
    )
    return style.model("x", [-1, 3, 8, 8], "save_infer_model/scale_0.tmp_0", [-1, 5])


def ultralytics() -> onnx.ModelProto:
    """As Ultralytics after its simplifier: split branches, pools in a row, boxes from distributions, anchors as initializers."""
    style = _Style("pytorch", 17)
    conv = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}
    x = style.op(
        "Conv", ["images", style.weight("model.0.conv.weight", 8, 3, 3, 3), style.weight("model.0.conv.bias", 8)], "c0", **conv
    )
    x = style.op("Mul", [x, style.op("Sigmoid", [x], "s0")], "a0")
    halves = ["h0", "h1"]
    style.op("Split", [x, style.integers("split", [4, 4])], *halves, axis=1)
    inner = style.op("Conv", ["h1", style.weight("model.2.m.weight", 4, 4, 1, 1)], "m0", kernel_shape=[1, 1])
    x = style.op("Concat", [*halves, style.op("Add", ["h1", inner], "m1")], "c2f", axis=1)
    pools = [x]
    for index in range(2):
        pool = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [1, 1], "ceil_mode": 0}
        pools.append(style.op("MaxPool", [pools[-1]], f"pool{index}", **pool))
    x = style.op("Concat", pools, "sppf", axis=1)
    head = [style.weight("model.22.cv2.weight", 19, 36, 1, 1), style.weight("model.22.cv2.bias", 19)]
    small = style.op("Conv", [x, *head], "head", kernel_shape=[1, 1])
    flat = style.op("Reshape", [small, style.integers("/model.22/Constant_output_0", [0, 19, 16])], "flat")
    style.op("Split", [flat, style.integers("parts", [16, 3])], "box", "classes", axis=1)
    box = style.op("Reshape", ["box", style.integers("/model.22/dfl/Constant_output_0", [0, 4, 4, 16])], "sides")
    box = style.op("Softmax", [style.op("Transpose", [box], "turned", perm=[0, 2, 1, 3])], "distribution", axis=1)
    counts = style.constant("model.22.dfl.conv.weight", np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1))
    box = style.op("Conv", [box, counts], "distances", kernel_shape=[1, 1])
    box = style.op("Reshape", [box, style.integers("/model.22/dfl/Constant_1_output_0", [0, 4, 16])], "distances_flat")
    style.op("Split", [box, style.integers("corners", [2, 2])], "lt", "rb", axis=1)
    grid = np.stack(np.meshgrid(np.arange(4) + 0.5, np.arange(4) + 0.5), 0).reshape(1, 2, 16).astype(np.float32)
    anchors = style.constant("/model.22/Constant_9_output_0", grid)
    ends = [style.op("Sub", [anchors, "lt"], "first"), style.op("Add", [anchors, "rb"], "last")]
    middle = style.op("Div", [style.op("Add", ends, "both"), style.constant("two", np.float32(2))], "middle")
    boxes = style.op("Concat", [middle, style.op("Sub", ends[::-1], "size")], "boxes", axis=1)
    strides = style.constant("/model.22/Constant_12_output_0", np.full((1, 16), 2.0, np.float32))
    scaled = style.op("Mul", [boxes, strides], "scaled")
    style.op("Concat", [scaled, style.op("Sigmoid", ["classes"], "scores")], "output0", axis=1)
    return style.model("images", ["batch", 3, 8, 8], "output0", ["batch", 7, 16])
