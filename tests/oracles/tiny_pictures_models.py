"""A detector and a segmentation network as ONNX files that a processor trains in seconds: a small SSD, and a small U-Net."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from burnish.graph import Builder, Tensor

SIDE = 32
SSD = {"grids": [[8, 8], [4, 4]], "scales": [0.3, 0.45, 0.6], "ratios": [[], []]}
SSD_TEXT = "ssd:grids=[[8,8],[4,4]],scales=[0.3,0.45,0.6]"
PER_CELL = 2


class _Layers:
    def __init__(self, seed: int):
        x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 3, SIDE, SIDE]))
        self.graph = ir.Graph([x], [], nodes=[], name="pictures", opset_imports={"": 18})
        self.builder, self.rng, self.count = Builder(self.graph), np.random.default_rng(seed), 0
        self.x = self.builder.tensor(x)

    def weight(self, array: np.ndarray) -> Tensor:
        self.count += 1
        name = f"weight{self.count}"
        value = ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(array.shape))
        value.const_value = ir.tensor(array.astype(np.float32), name=name)
        self.graph.register_initializer(value)
        return self.builder.tensor(value)

    def conv(self, x: Tensor, channels: int, stride: int = 1, kernel: int = 3, relu: bool = True) -> Tensor:
        assert x.shape is not None
        inner = int(x.shape.dims[1])
        drawn = self.rng.normal(size=(channels, inner, kernel, kernel)) * np.sqrt(2 / (inner * kernel * kernel))
        y = self.builder.op(
            "Conv",
            x,
            self.weight(drawn),
            self.weight(np.zeros(channels)),
            kernel_shape=[kernel] * 2,
            pads=[kernel // 2] * 4,
            strides=[stride] * 2,
        )
        return self.builder.op("Relu", y) if relu else y

    def model(self, outputs: Sequence[tuple[str, Tensor]]) -> ir.Model:
        for name, tensor in outputs:
            tensor.value.name = name
            self.graph.outputs.append(tensor.value)
        return ir.Model(self.graph, ir_version=10)


def small_ssd(classes: int = 2, seed: int = 0) -> ir.Model:
    """``x [batch, 3, 32, 32]`` to ``scores [batch, 160, 1 + classes]`` and ``boxes [batch, 160, 4]``, of grids of 8 and 4."""
    layers = _Layers(seed)
    builder = layers.builder
    fine = layers.conv(layers.conv(layers.conv(layers.x, 12), 24, stride=2), 32, stride=2)
    fine = layers.conv(fine, 32)
    coarse = layers.conv(layers.conv(fine, 48, stride=2), 48)
    rows: dict[str, list[Tensor]] = {"scores": [], "boxes": []}
    for features in (fine, coarse):
        for name, numbers in (("scores", 1 + classes), ("boxes", 4)):
            head = layers.conv(features, PER_CELL * numbers, relu=False)
            head = builder.op("Transpose", head, perm=[0, 2, 3, 1])
            rows[name].append(builder.op("Reshape", head, builder.integers([0, -1, numbers])))
    return layers.model([(name, builder.op("Concat", *parts, axis=1)) for name, parts in rows.items()])


def small_yolo(classes: int = 2, bins: int = 8, seed: int = 0) -> ir.Model:
    """``x [batch, 3, 32, 32]`` to ``scores [batch, classes, 80]`` and ``distances [batch, 4 bins, 80]``, of grids of 8 and 4."""
    layers = _Layers(seed)
    builder = layers.builder
    fine = layers.conv(layers.conv(layers.conv(layers.x, 12), 24, stride=2), 32, stride=2)
    fine = layers.conv(fine, 32)
    coarse = layers.conv(layers.conv(fine, 48, stride=2), 48)
    rows: dict[str, list[Tensor]] = {"scores": [], "distances": []}
    for features in (fine, coarse):
        for name, numbers in (("scores", classes), ("distances", 4 * bins)):
            head = layers.conv(features, numbers, relu=False)
            rows[name].append(builder.op("Reshape", head, builder.integers([0, numbers, -1])))
    return layers.model([(name, builder.op("Concat", *parts, axis=2)) for name, parts in rows.items()])


def small_detr(classes: int = 2, seed: int = 0) -> ir.Model:
    """``x [batch, 3, 32, 32]`` to ``scores [batch, 8, classes + 1]`` and ``boxes [batch, 8, 4]``, without attention."""
    layers = _Layers(seed)
    builder = layers.builder
    y = layers.conv(layers.conv(layers.conv(layers.x, 12), 24, stride=2), 32, stride=2)
    y = builder.op("Flatten", layers.conv(layers.conv(y, 48, stride=2), 16))
    drawn = layers.rng.normal(size=(256, 128)) * np.sqrt(2 / 256)
    y = builder.op("Relu", builder.op("MatMul", y, layers.weight(drawn)))
    outputs = []
    for name, numbers in (("scores", classes + 1), ("boxes", 4)):
        head = builder.op("MatMul", y, layers.weight(layers.rng.normal(size=(128, 8 * numbers)) / np.sqrt(128)))
        head = builder.op("Reshape", head, builder.integers([0, 8, numbers]))
        outputs.append((name, builder.op("Sigmoid", head) if name == "boxes" else head))
    return layers.model(outputs)


def queried_detr(classes: int = 2, seed: int = 0) -> ir.Model:
    """``x [batch, 3, 32, 32]`` to ``given [batch, 8, classes + 1]`` and ``sides [batch, 8, 4]``, by layers over eight queries."""
    layers = _Layers(seed)
    builder = layers.builder
    y = layers.conv(layers.conv(layers.conv(layers.x, 12), 24, stride=2), 32, stride=2)
    y = builder.op("Reshape", layers.conv(y, 8, stride=2), builder.integers([0, 8, 16]))

    def linear(y: Tensor, outer: int) -> Tensor:
        inner = y.dimension(2)
        assert inner is not None
        return builder.op("MatMul", y, layers.weight(layers.rng.normal(size=(inner, outer)) / np.sqrt(inner))) + layers.weight(
            np.zeros(outer)
        )

    hidden = y + linear(builder.op("Relu", linear(y, 32)), 16)
    sides = linear(builder.op("Relu", linear(hidden, 16)), 4)
    return layers.model([("given", linear(hidden, classes + 1)), ("sides", builder.op("Sigmoid", sides))])


def small_unet(classes: int = 3, seed: int = 0, reduction: int = 1) -> ir.Model:
    """``x [batch, 3, 32, 32]`` to ``logits [batch, classes, 32, 32]``; with ``reduction=2`` at half of height and width."""
    layers = _Layers(seed)
    builder = layers.builder
    first = layers.conv(layers.x, 8)
    second = layers.conv(first, 16, stride=2)
    third = layers.conv(second, 32, stride=2)
    scales = builder.constant(np.array([1, 1, 2, 2], np.float32))

    def up(x: Tensor) -> Tensor:
        return builder.op(
            "Resize", x, None, scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
        )

    fourth = layers.conv(layers.conv(third, 48, stride=2), 48)
    y = layers.conv(builder.op("Concat", up(fourth), third, axis=1), 32)
    y = layers.conv(builder.op("Concat", up(y), second, axis=1), 16)
    if reduction == 1:
        y = layers.conv(builder.op("Concat", up(y), first, axis=1), 12)
    return layers.model([("logits", layers.conv(y, classes, kernel=1, relu=False))])


def exported_yolo(classes: int = 5, bins: int = 8, seed: int = 0, mean_by_layer: bool = False) -> ir.Model:
    """A YOLO as its users export it: distances and scores joined map by map and cut apart again, boxes decoded to corners in
    pixels, ``output0 [batch, 4 + classes, 80]`` of boxes and probabilities, and ``selected`` of a NonMaxSuppression.

    ``mean_by_layer``: the mean of the bins of a distance is a convolution by 0, 1, 2, ..., as Ultralytics writes it.
    """
    layers = _Layers(seed)
    builder = layers.builder
    fine = layers.conv(layers.conv(layers.conv(layers.x, 12), 24, stride=2), 32, stride=2)
    fine = layers.conv(fine, 32)
    coarse = layers.conv(layers.conv(fine, 48, stride=2), 48)
    rows = []
    for features in (fine, coarse):
        heads = [layers.conv(features, numbers, kernel=1, relu=False) for numbers in (4 * bins, classes)]
        joined = builder.op("Concat", *heads, axis=1)
        rows.append(builder.op("Reshape", joined, builder.integers([0, 4 * bins + classes, -1])))
    sizes = builder.integers([4 * bins, classes])
    distances, scores = builder.op("Split", builder.op("Concat", *rows, axis=2), sizes, axis=1, outputs=2)
    apart = builder.op("Reshape", distances, builder.integers([0, 4, bins, 80]))
    if mean_by_layer:
        shares = builder.op("Softmax", builder.op("Transpose", apart, perm=[0, 2, 1, 3]), axis=1)
        means = builder.op("Conv", shares, layers.weight(np.arange(bins).reshape(1, bins, 1, 1)), kernel_shape=[1, 1])
        means = builder.op("Reshape", means, builder.integers([0, 4, 80]))
        ends = [[builder.integers([number]) for number in (start, start + 2, 1)] for start in (0, 2)]
        halves = (builder.op("Relu", builder.op("Slice", means, *each)) for each in ends)
        before, after = (builder.op("Transpose", half, perm=[0, 2, 1]) for half in halves)
    else:
        shares = builder.op("Softmax", builder.op("Transpose", apart, perm=[0, 3, 1, 2]), axis=3)
        places = builder.constant(np.arange(bins, dtype=np.float32))
        sides = builder.op("ReduceSum", shares * places, builder.integers([3]), keepdims=0)
        before, after = builder.op("Split", sides, axis=2, num_outputs=2, outputs=2)
    cells = [(x + 0.5, y + 0.5, SIDE // side) for side in (8, 4) for y in range(side) for x in range(side)]
    centre, stride = np.split(np.array(cells, np.float32)[None], [2], axis=2)
    middle, scale = builder.constant(centre), builder.constant(stride)
    boxes = builder.op("Concat", (middle - before) * scale, (middle + after) * scale, axis=2)
    probabilities = builder.op("Sigmoid", scores)
    output = builder.op("Concat", builder.op("Transpose", boxes, perm=[0, 2, 1]), probabilities, axis=1)
    limits = (builder.constant(np.array([limit], np.float32)) for limit in (0.7, 0.001))
    selected = builder.op("NonMaxSuppression", boxes, probabilities, builder.integers([100]), *limits)
    return layers.model([("output0", output), ("selected", selected)])
