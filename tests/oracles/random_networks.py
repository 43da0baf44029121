"""Random networks over signals, images and volumes, drawn by Hypothesis: windows, groups, norms and joins of any form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st

from burnish.graph import Builder, Tensor, constant_array
from burnish.rewriting.change_dtypes import compute_in_float64

CLASSES = 3
LEAST_NORMALIZED = 8
"""Elements of a channel under a batch normalization: of fewer the statistics are badly conditioned."""
MOST_ELEMENTS = 3000
"""Of an image, beyond which no layer makes it larger."""


@dataclass(repr=False)
class RandomNetwork:
    """A drawn classifier, with a batch.

    Attributes:
        model: float32, with weights as initializers, the logits as its output.
        batch: ``x`` and ``labels``.
    """

    model: ir.Model
    batch: dict[str, np.ndarray]

    def __repr__(self) -> str:
        layers = [f"{node.op_type}{[*(str(value.shape) for value in node.outputs)]}" for node in self.model.graph]
        return f"{self.batch['x'].shape} -> {' '.join(layers)}"


class _Drawing:
    """A network under construction; ``values`` are the images that later layers may read again, and
    ``shareable`` the weights that they may share.
    """

    def __init__(self, draw: st.DrawFn, graph: ir.Graph, seed: int, samples: int, least_spatial: tuple[int, ...]):
        self.draw = draw
        self.graph = graph
        self.builder = Builder(graph)
        self.rng = np.random.default_rng(seed)
        self.samples = samples
        self.spatial = least_spatial
        self.values: list[Tensor] = []
        self.shareable: list[Tensor] = []

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def one_of(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def weight(self, *shape: int, fan_in: int = 1, around: float = 0.0) -> Tensor:
        """A weight; that of a layer, with a fan-in, may be one that another layer has already."""
        if fan_in > 1 and not around:
            shared = [tensor for tensor in self.shareable if tensor.shape == ir.Shape(shape)]
            if shared and self.number(0, 2) == 0:
                return self.one_of(*shared)
        array = self.rng.normal(around, fan_in**-0.5, shape).astype(np.float32)
        value = ir.Value(
            name=f"w{len(self.graph.initializers)}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(array.shape)
        )
        value.const_value = ir.tensor(array, name=value.name)
        self.graph.register_initializer(value)
        tensor = self.builder.tensor(value)
        if fan_in > 1 and not around:
            self.shareable.append(tensor)
        return tensor

    def op(self, op_type: str, *operands: Any, **attributes: Any) -> Tensor:
        result = self.builder.op(op_type, *operands, **attributes)
        assert isinstance(result, Tensor)
        assert result.shape is not None, (
            f"{op_type} {[str(o.shape) if isinstance(o, Tensor) else o for o in operands]} {attributes}"
        )
        return result


def _extents(x: Tensor) -> list[int]:
    assert x.shape is not None
    return [int(extent) for extent in x.shape.dims[1:]]


def _windows(drawing: _Drawing, sizes: list[int], largest: int, with_dilations: bool) -> dict[str, Any] | None:
    """Attributes of windows that fit an image; None where none was found."""
    rank = len(sizes)
    kernel = [drawing.number(1, largest) for _ in range(rank)]
    if drawing.number(0, 2):
        kernel = [kernel[0]] * rank
    strides = [drawing.one_of(1, 1, 2, 3)] * rank if drawing.number(0, 2) else [drawing.number(1, 3) for _ in range(rank)]
    dilations = [drawing.one_of(1, 1, 1, 2)] * rank if with_dilations else [1] * rank
    padding = drawing.one_of("none", "same", "any", "SAME_UPPER", "SAME_LOWER", "VALID")
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides}
    if with_dilations:
        attributes["dilations"] = dilations
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    pads = [0] * 2 * rank
    if padding == "same":
        pads = 2 * [(span - 1) // 2 for span in spans]
    elif padding == "any":
        pads = [drawing.number(0, size - 1) for size in 2 * kernel]
    if padding in ("SAME_UPPER", "SAME_LOWER"):
        return {**attributes, "auto_pad": padding}
    if any(size + pads[axis] + pads[axis + rank] < spans[axis] for axis, size in enumerate(sizes)):
        return None
    return {**attributes, "auto_pad": "VALID"} if padding == "VALID" else {**attributes, "pads": pads}


def convolution(drawing: _Drawing, x: Tensor) -> Tensor | None:
    channels, *sizes = _extents(x)
    kind = drawing.one_of("plain", "plain", "pointwise", "grouped", "depthwise", "multiplied")
    window = _windows(drawing, sizes, 1 if kind == "pointwise" else 5 if channels < 20 else 3, with_dilations=True)
    if window is None:
        return None
    group, outputs = 1, drawing.one_of(1, 4, 8, 16, 17, 24)
    if kind == "grouped":
        group = next((count for count in (4, 2, 3) if channels % count == 0), 1)
        outputs = group * drawing.number(1, 6)
    elif kind == "depthwise":
        group = outputs = channels
    elif kind == "multiplied":
        group, outputs = channels, 2 * channels
    fan_in = channels // group * int(np.prod(window["kernel_shape"]))
    w = drawing.weight(outputs, channels // group, *window["kernel_shape"], fan_in=fan_in)
    bias = [drawing.weight(outputs)] if drawing.number(0, 1) else []
    return drawing.op("Conv", x, w, *bias, **window, group=group)


def transposed_convolution(drawing: _Drawing, x: Tensor) -> Tensor | None:
    channels, *sizes = _extents(x)
    if int(np.prod(sizes)) * 8 > MOST_ELEMENTS // 4:
        return None
    outputs, kernel, stride = drawing.one_of(2, 16), drawing.number(1, 3), drawing.number(1, 2)
    w = drawing.weight(channels, outputs, *[kernel] * len(sizes), fan_in=channels * kernel)
    return drawing.op("ConvTranspose", x, w, kernel_shape=[kernel] * len(sizes), strides=[stride] * len(sizes))


def batch_normalization(drawing: _Drawing, x: Tensor) -> Tensor | None:
    channels, *sizes = _extents(x)
    if drawing.samples * int(np.prod(sizes)) < LEAST_NORMALIZED:
        return None
    operands = [drawing.weight(channels, around=1.0, fan_in=10), drawing.weight(channels)]
    statistics = [drawing.weight(channels), drawing.weight(channels, around=2.0, fan_in=100)]
    return drawing.op("BatchNormalization", x, *operands, *statistics)


def other_normalization(drawing: _Drawing, x: Tensor) -> Tensor | None:
    channels, *sizes = _extents(x)
    if int(np.prod(sizes)) < LEAST_NORMALIZED or channels < 4:
        return None
    kind, scale, bias = drawing.one_of("instance", "group", "layer"), *(drawing.weight(channels) for _ in range(2))
    if kind == "instance":
        return drawing.op("InstanceNormalization", x, scale, bias)
    if kind == "group":
        groups = next(count for count in (4, 2, 1) if channels % count == 0)
        return drawing.op("GroupNormalization", x, scale, bias, num_groups=groups, like=x)
    rank = len(sizes) + 2
    last = drawing.op("Transpose", x, perm=[0, *range(2, rank), 1])
    return drawing.op(
        "Transpose", drawing.op("LayerNormalization", last, scale, bias, axis=-1), perm=[0, rank - 1, *range(1, rank - 1)]
    )


def activation(drawing: _Drawing, x: Tensor) -> Tensor:
    channels, *sizes = _extents(x)
    kind = drawing.one_of(
        "Relu", "Relu", "Clip", "PRelu", "gate", "Sigmoid", "LeakyRelu", "HardSwish", "Gelu", "Tanh", "Softplus"
    )
    if kind == "Clip":
        low, high = (drawing.builder.constant(np.float32(bound)) for bound in (0, drawing.one_of(1, 6)))
        return drawing.op("Clip", x, low, high)
    if kind == "PRelu":
        return drawing.op("PRelu", x, drawing.weight(channels, *[1] * len(sizes)))
    if kind == "gate":
        return x * drawing.op("Sigmoid", x)
    return drawing.op(kind, x)


def pool(drawing: _Drawing, x: Tensor) -> Tensor | None:
    _, *sizes = _extents(x)
    window = _windows(drawing, sizes, 3, with_dilations=False)
    if window is None or min(sizes) < 2:
        return None
    ceil_mode = 0 if "auto_pad" in window else drawing.one_of(0, 0, 1)
    if ceil_mode and _rounds_into_padding(sizes, window):
        return None  # a window that the standard's inference counts up to opset 21, and no runtime has
    if drawing.number(0, 1):
        return drawing.op("MaxPool", x, **window, ceil_mode=ceil_mode)
    return drawing.op("AveragePool", x, **window, count_include_pad=drawing.number(0, 1), ceil_mode=ceil_mode)


def _rounds_into_padding(sizes: list[int], window: dict[str, Any]) -> bool:
    rank = len(sizes)
    axes = zip(sizes, window["kernel_shape"], window["strides"], window["pads"][:rank], window["pads"][rank:], strict=True)
    return any(-(-(size + begin + end - kernel) // stride) * stride >= size + begin for size, kernel, stride, begin, end in axes)


def recurrent(drawing: _Drawing, x: Tensor) -> Tensor | None:
    """A recurrent layer along a signal, in one direction or both; its states are the channels of the result."""
    channels, *sizes = _extents(x)
    if len(sizes) != 1:
        return None
    kind, direction = drawing.one_of("LSTM", "GRU", "RNN"), drawing.one_of("forward", "reverse", "bidirectional")
    gates, hidden, directions = (
        {"LSTM": 4, "GRU": 3, "RNN": 1}[kind],
        drawing.one_of(2, 5, 16),
        1 + (direction == "bidirectional"),
    )
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    if kind == "GRU":
        attributes["linear_before_reset"] = drawing.number(0, 1)
    w = drawing.weight(directions, gates * hidden, channels, fan_in=channels)
    r = drawing.weight(directions, gates * hidden, hidden, fan_in=hidden)
    b = drawing.weight(directions, 2 * gates * hidden, fan_in=4) if drawing.number(0, 1) else None
    sequence = drawing.op("Transpose", x, perm=[2, 0, 1])
    lengths = _lengths(drawing, x, sizes[0]) if drawing.number(0, 2) == 0 else None
    outputs = drawing.builder.op(kind, sequence, w, r, b, lengths, outputs=3 if kind == "LSTM" else 2, **attributes)
    states = drawing.op("Transpose", outputs[0], perm=[2, 1, 3, 0])  # [steps, directions, N, hidden]
    return drawing.op("Reshape", states, drawing.builder.integers([0, directions * hidden, sizes[0]]))


def _lengths(drawing: _Drawing, x: Tensor, steps: int) -> Tensor:
    """Lengths of sequences, from 1 to all steps, int32 [N]."""
    builder, index = drawing.builder, ir.DataType.INT64
    samples = builder.op("Squeeze", builder.op("Shape", x, start=0, end=1), builder.integers([0]))
    numbers = builder.op("Range", builder.scalar(drawing.number(0, steps), index), samples + steps, builder.scalar(1, index))
    numbers = builder.op("Slice", numbers, builder.integers([0]), builder.op("Shape", x, start=0, end=1), builder.integers([0]))
    return builder.cast(builder.op("Mod", numbers, steps) + 1, ir.DataType.INT32)


def attention(drawing: _Drawing, x: Tensor) -> Tensor | None:
    """Self-attention among the places of an image, of one head or two, with a causal mask or none."""
    channels, *sizes = _extents(x)
    places, heads, width = int(np.prod(sizes)), drawing.number(1, 2), drawing.one_of(2, 4, 8)
    if not 1 < places <= 64:
        return None
    builder = drawing.builder
    tokens = drawing.op("Transpose", drawing.op("Reshape", x, builder.integers([0, channels, places])), perm=[0, 2, 1])

    def projected(perm: list[int]) -> Tensor:
        product = drawing.op("MatMul", tokens, drawing.weight(channels, heads * width, fan_in=channels))
        apart = drawing.op("Reshape", product, builder.integers([0, places, heads, width]))
        return drawing.op("Transpose", apart, perm=perm)

    scores = drawing.op("MatMul", projected([0, 2, 1, 3]), projected([0, 2, 3, 1])) * width**-0.5
    if drawing.number(0, 1):
        mask = np.where(np.tri(places, dtype=bool), 0, drawing.one_of(-1e4, -np.inf)).astype(np.float32)
        scores = scores + builder.constant(mask)
    shares = drawing.op("Softmax", scores, axis=-1)
    joined = drawing.op("Transpose", drawing.op("MatMul", shares, projected([0, 2, 1, 3])), perm=[0, 2, 1, 3])
    flat = drawing.op("Reshape", joined, builder.integers([0, places, heads * width]))
    mixed = drawing.op("MatMul", flat, drawing.weight(heads * width, channels, fan_in=heads * width))
    return drawing.op("Reshape", drawing.op("Transpose", mixed, perm=[0, 2, 1]), builder.integers([0, channels, *sizes]))


def dropout(drawing: _Drawing, x: Tensor) -> Tensor:
    """Whose mask follows from the program's key, so that it is the same on every engine."""
    return drawing.op("Dropout", x, drawing.builder.constant(np.float32(drawing.one_of(0.1, 0.5))))


def squeeze_and_excite(drawing: _Drawing, x: Tensor) -> Tensor:
    """Channels times what a layer makes of their mean or their largest element."""
    channels, *sizes = _extents(x)
    pooled = drawing.op(drawing.one_of("GlobalAveragePool", "GlobalMaxPool"), x)
    weight = drawing.weight(channels, channels, *[1] * len(sizes), fan_in=channels)
    gate = drawing.op("Conv", pooled, weight)
    return x * drawing.op(drawing.one_of("Sigmoid", "HardSigmoid"), gate)


def scaled(drawing: _Drawing, x: Tensor) -> Tensor:
    """Times, or plus, a weight of some of the axes."""
    channels, *sizes = _extents(x)
    extents = [drawing.one_of(1, extent) for extent in sizes]
    shape = drawing.one_of(
        [], [1], [channels, *[1] * len(sizes)], [1, channels, *[1] * len(sizes)], [channels, *extents], extents
    )
    weight = drawing.weight(*shape, around=1.0)
    return drawing.op(drawing.one_of("Mul", "Add", "Sub", "Max"), x, weight)


def joined(drawing: _Drawing, x: Tensor) -> Tensor | None:
    """Added to, or beside, an image from before."""
    channels, *sizes = _extents(x)
    others = [value for value in drawing.values if value.rank == x.rank and _extents(value)[1:] == sizes]
    if not others:
        return None
    other = drawing.one_of(*others)
    if _extents(other)[0] in (1, channels) and drawing.number(0, 2):
        return drawing.op(drawing.one_of("Add", "Mul", "Min"), x, other)
    return drawing.op("Concat", other, x, axis=1) if channels + _extents(other)[0] < 48 else None


def cut(drawing: _Drawing, x: Tensor) -> Tensor | None:
    """Some of the channels or of the places."""
    axis = drawing.number(1, (x.rank or 2) - 1)
    extent = _extents(x)[axis - 1]
    if extent < 2:
        return None
    count = drawing.builder.integers
    if drawing.number(0, 1):
        first = drawing.number(1, extent - 1)
        parts = drawing.builder.op("Split", x, count([first, extent - first]), axis=axis, outputs=2)
        drawing.values.append(parts[0])
        return parts[1]
    return drawing.op("Slice", x, count([drawing.number(0, 1)]), count([extent]), count([axis]), count([drawing.number(1, 2)]))


def moved(drawing: _Drawing, x: Tensor) -> Tensor | None:
    """Channels shuffled, places repeated, or an axis reversed."""
    channels, *sizes = _extents(x)
    kind = drawing.one_of("shuffle", "repeat", "pad")
    if kind == "shuffle" and channels % 2 == 0:
        integers, axes = drawing.builder.integers, range(3, len(sizes) + 3)
        apart = drawing.op("Reshape", x, integers([0, 2, channels // 2, *sizes]))
        turned = drawing.op("Transpose", apart, perm=[0, 2, 1, *axes])
        return drawing.op("Reshape", turned, integers([0, channels, *sizes]))
    if kind == "repeat" and channels * int(np.prod(sizes)) * 2 ** len(sizes) <= MOST_ELEMENTS:
        scales = drawing.builder.constant(np.array([1, 1, *[2] * len(sizes)], np.float32))
        how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        return drawing.op("Resize", x, None, scales, **how)
    if kind == "pad":
        return drawing.op("Pad", x, drawing.builder.integers([0, 0, *[1] * len(sizes), 0, 0, *[0] * len(sizes)]))
    return None


def _embedded(drawing: _Drawing, x: Tensor) -> Tensor:
    """An image plus rows of a table, by its elements rounded down, which no dtype does otherwise."""
    rows = drawing.builder.op("Clip", drawing.builder.op("Floor", x), np.float32(-3), np.float32(3))
    indices = drawing.builder.cast(rows, ir.DataType.INT64) + 3
    return x + drawing.op("Gather", drawing.weight(7, around=0.5), indices, axis=0)


LAYERS: list[Callable[[_Drawing, Tensor], Tensor | None]] = [
    *[convolution] * 5,
    transposed_convolution,
    *[batch_normalization] * 3,
    other_normalization,
    *[activation] * 3,
    pool,
    *[recurrent] * 2,
    squeeze_and_excite,
    scaled,
    *[joined] * 2,
    cut,
    moved,
    attention,
    dropout,
]


def _head(drawing: _Drawing, x: Tensor) -> Tensor:
    channels, *sizes = _extents(x)
    kind = drawing.one_of("pool", "mean", "flatten", "convolution")
    if kind == "flatten":
        features = channels * int(np.prod(sizes))
        return drawing.op(
            "Gemm", drawing.op("Flatten", x), drawing.weight(features, CLASSES, fan_in=features), drawing.weight(CLASSES)
        )
    if kind == "convolution":
        scores = drawing.op("Conv", x, drawing.weight(CLASSES, channels, *[1] * len(sizes), fan_in=channels))
        return drawing.op("ReduceMean", scores, drawing.builder.integers(range(2, len(sizes) + 2)), keepdims=0)
    if kind == "pool":
        vector = drawing.op("Flatten", drawing.op("GlobalAveragePool", x))
    else:
        vector = drawing.op("ReduceMean", x, drawing.builder.integers(range(2, len(sizes) + 2)), keepdims=0)
    return drawing.op("MatMul", vector, drawing.weight(channels, CLASSES, fan_in=channels)) + drawing.weight(CLASSES)


@st.composite
def random_networks(draw: st.DrawFn, ranks: tuple[int, ...] = (1, 2, 2, 2, 2, 3)) -> RandomNetwork:
    """Networks of 3 to 12 drawn layers over 1 to 5 samples, whose number the model leaves open or not."""
    rank = draw(st.sampled_from(ranks))
    samples, channels = draw(st.integers(1, 5)), draw(st.sampled_from((1, 3, 4, 16, 18)))
    sizes = tuple(draw(st.integers(3, {1: 30, 2: 11, 3: 5}[rank])) for _ in range(rank))
    graph = ir.Graph([], [], nodes=[], name="drawn", opset_imports={"": 21})
    shape = [draw(st.sampled_from(("batch", samples))), channels, *sizes]
    graph.inputs.append(ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape)))
    drawing = _Drawing(draw, graph, draw(st.integers(0, 2**16)), samples, sizes)
    x = drawing.builder.tensor(graph.inputs[0])
    if drawing.number(0, 3) == 0:
        x = _embedded(drawing, x)
    for _ in range(draw(st.integers(3, 12))):
        result = draw(st.sampled_from(LAYERS))(drawing, x)
        if result is None or int(np.prod(_extents(result))) > MOST_ELEMENTS or min(_extents(result)) < 1:
            continue
        drawing.values.append(x)
        x = result
    logits = drawing.op("Identity", _head(drawing, x))
    logits.value.name = "logits"
    graph.outputs.append(logits.value)
    rng = np.random.default_rng(samples)
    images = rng.normal(size=(samples, channels, *sizes)).astype(np.float32)
    return RandomNetwork(ir.Model(graph, ir_version=10), {"x": images, "labels": rng.integers(0, CLASSES, samples)})


def in_float64(model: ir.Model) -> ir.Model:
    """The same network in float64, but for the scales of ``Resize``, which are float32 in the standard."""
    wide = compute_in_float64(model)
    for node in wide.graph:
        if node.op_type == "Resize":
            scales = constant_array(node.inputs[2])
            assert scales is not None
            node.replace_input_with(2, Builder(wide.graph, before=node).constant(scales.astype(np.float32)).value)
    return wide
