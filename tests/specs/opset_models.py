"""Small models of operators whose form changed between opset 7 and today, each written in the form of a given opset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FIRST, LAST = 7, 26
"""ONNX Runtime 1.31 runs these opsets."""

IR_VERSIONS = {7: 3, 8: 3, 9: 4, 10: 5, 11: 6, 12: 7, 13: 7, 14: 7, 15: 8, 16: 8, 17: 8, 18: 8}


@dataclass
class Draft:
    """A model in the making, of one opset."""

    opset: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    counter: int = 0

    def name(self, stem: str = "v") -> str:
        self.counter += 1
        return f"{stem}{self.counter}"

    def weight(self, array: np.ndarray, name: str | None = None) -> str:
        name = name or self.name("w")
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def ints(self, *numbers: int) -> str:
        return self.weight(np.asarray(numbers, np.int64))

    def node(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: object) -> str:
        names = [self.name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(op_type, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else ",".join(names)

    def axes(self, op_type: str, data: str, axes: Sequence[int], since: int, **attributes: object) -> str:
        """A node whose axes became an input with opset ``since``."""
        if self.opset >= since:
            return self.node(op_type, data, self.ints(*axes), **attributes)
        return self.node(op_type, data, axes=list(axes), **attributes)

    def model(self, shape: Sequence[int | str], outputs: Sequence[tuple[str, int]]) -> onnx.ModelProto:
        """Finish: one float input ``x``; outputs by name and element type."""
        infos = [helper.make_tensor_value_info(name, dtype, None) for name, dtype in outputs]
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))]
        if self.opset < 9:
            inputs += [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in self.initializers]
        graph = helper.make_graph(self.nodes, "g", inputs, infos, self.initializers)
        imports = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSIONS.get(self.opset, 10))


Make = Callable[[int], onnx.ModelProto]


@dataclass(frozen=True)
class Case:
    """A model for the opsets ``since`` to ``until``, fed with a float array of ``shape``; some have no gradient."""

    name: str
    make: Make
    shape: tuple[int, ...]
    since: int = FIRST
    until: int = LAST
    differentiable: bool = True

    @property
    def opsets(self) -> list[int]:
        return list(range(self.since, self.until + 1))


CASES: list[Case] = []


def opsets_of_versions(case: Case) -> list[int]:
    """The first opset of each combination of versions of a model's operators."""
    first: dict[tuple[int, ...], int] = {}
    for opset in case.opsets:
        nodes = case.make(opset).graph.node
        first.setdefault(tuple(onnx.defs.get_schema(node.op_type, opset, node.domain).since_version for node in nodes), opset)
    return list(first.values())


def case(shape: tuple[int, ...], since: int = FIRST, until: int = LAST, differentiable: bool = True) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        CASES.append(Case(make.__name__, make, shape, since, until, differentiable))
        return make

    return register


def _random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _single(draft: Draft, output: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    return draft.model(shape, [(output, dtype)])


@case((2, 3, 8, 8))
def convolutional_classifier(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    y = d.node("Conv", "x", d.weight(_random(4, 3, 3, 3)), d.weight(_random(4)), pads=[1, 1, 1, 1])
    statistics = [np.abs(_random(4, seed=seed)) + 0.5 for seed in range(4)]
    y = d.node("BatchNormalization", y, *(d.weight(array) for array in statistics), epsilon=1e-3)
    y = d.node("MaxPool", d.node("Relu", y), kernel_shape=[2, 2], strides=[2, 2])
    y = d.node("Flatten", d.node("Dropout", y), axis=1)
    y = d.node("Gemm", y, d.weight(_random(10, 64)), d.weight(_random(10)), transB=1)
    return _single(d, d.node("Softmax", y, axis=1), ["batch", 3, 8, 8])


@case((2, 5))
def clip_both(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    bounds = [d.weight(np.float32(bound)) for bound in (-0.5, 0.25)] if opset >= 11 else []
    attributes = {} if opset >= 11 else {"min": -0.5, "max": 0.25}
    return _single(d, d.node("Clip", "x", *bounds, **attributes), ["batch", 5])


@case((2, 5))
def clip_upper(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    if opset >= 11:
        return _single(d, d.node("Clip", "x", "", d.weight(np.float32(0.25))), ["batch", 5])
    return _single(d, d.node("Clip", "x", max=0.25), ["batch", 5])


@case((2, 6, 4))
def slice_axes(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    if opset >= 10:
        return _single(d, d.node("Slice", "x", d.ints(1, -3), d.ints(5, 100), d.ints(1, 2)), ["batch", 6, 4])
    return _single(d, d.node("Slice", "x", starts=[1, -3], ends=[5, 100], axes=[1, 2]), ["batch", 6, 4])


@case((2, 6))
def slice_without_axes(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    if opset >= 10:
        return _single(d, d.node("Slice", "x", d.ints(0, 2), d.ints(1, 4)), ["batch", 6])
    return _single(d, d.node("Slice", "x", starts=[0, 2], ends=[1, 4]), ["batch", 6])


@case((2, 3, 4))
def pad_constant(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    pads = [0, 1, 0, 0, 2, 1]
    if opset >= 11:
        return _single(d, d.node("Pad", "x", d.ints(*pads), d.weight(np.float32(1.5))), ["batch", 3, 4])
    return _single(d, d.node("Pad", "x", pads=pads, value=1.5), ["batch", 3, 4])


@case((2, 3, 4))
def pad_reflect(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    pads = [0, 1, 2, 0, 1, 0]
    if opset >= 11:
        return _single(d, d.node("Pad", "x", d.ints(*pads), mode="reflect"), ["batch", 3, 4])
    return _single(d, d.node("Pad", "x", pads=pads, mode="reflect"), ["batch", 3, 4])


@case((2, 1, 4, 1))
def squeeze_unsqueeze(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    y = d.axes("Squeeze", "x", [1, 3], since=13)
    return _single(d, d.axes("Unsqueeze", y, [0, 3], since=13), ["batch", 1, 4, 1])


def _reduction(op_type: str) -> Make:
    def make(opset: int) -> onnx.ModelProto:
        d = Draft(opset)
        positive = d.node("Exp", "x")
        some = d.axes(op_type, positive, [0, 2], since=13 if op_type == "ReduceSum" else 18, keepdims=0)
        every = d.node(op_type, positive, keepdims=1)
        return d.model(["batch", 3, 4], [(some, TensorProto.FLOAT), (every, TensorProto.FLOAT)])

    make.__name__ = op_type.lower()
    return make


for _name in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare"):
    case((2, 3, 4))(_reduction(f"Reduce{_name}"))


@case((2, 6))
def split_sizes(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    if opset >= 13:
        names = d.node("Split", "x", d.ints(1, 5), axis=1, outputs=2)
    else:
        names = d.node("Split", "x", axis=1, split=[1, 5], outputs=2)
    return d.model(["batch", 6], [(name, TensorProto.FLOAT) for name in names.split(",")])


@case((2, 6))
def split_evenly(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    attributes = {"num_outputs": 3} if opset >= 18 else {}
    names = d.node("Split", "x", axis=1, outputs=3, **attributes)
    return d.model(["batch", 6], [(name, TensorProto.FLOAT) for name in names.split(",")])


def _softmax(op_type: str, axis: int | None, rank: int) -> Make:
    def make(opset: int) -> onnx.ModelProto:
        d = Draft(opset)
        attributes = {} if axis is None else {"axis": axis}
        return _single(d, d.node(op_type, "x", **attributes), ["batch", 3, 2, 2][:rank])

    make.__name__ = f"{op_type.lower()}_axis_{axis}_rank_{rank}"
    return make


for _op in ("Softmax", "LogSoftmax", "Hardmax"):
    for _axis, _rank in ((None, 4), (1, 4), (2, 4), (3, 4), (0, 2), (1, 2), (None, 2)):
        case((2, 3, 2, 2)[:_rank])(_softmax(_op, _axis, _rank))


@case((1, 2, 3, 3), until=9)
def upsample_nearest(opset: int) -> onnx.ModelProto:
    return _upsample(opset, "nearest")


@case((1, 2, 3, 3), until=9)
def upsample_linear(opset: int) -> onnx.ModelProto:
    return _upsample(opset, "linear")


def _upsample(opset: int, mode: str) -> onnx.ModelProto:
    d = Draft(opset)
    scales = [1.0, 1.0, 2.0, 2.0]
    if opset >= 9:
        return _single(d, d.node("Upsample", "x", d.weight(np.asarray(scales, np.float32)), mode=mode), [1, 2, 3, 3])
    return _single(d, d.node("Upsample", "x", scales=scales, mode=mode), [1, 2, 3, 3])


def _resize(name: str, scales: list[float], mode: str) -> None:
    def make(opset: int) -> onnx.ModelProto:
        d = Draft(opset)
        factors = d.weight(np.asarray(scales, np.float32))
        if opset == 10:
            return _single(d, d.node("Resize", "x", factors, mode=mode), [1, 2, 5, 6])
        roi = d.weight(np.zeros(0, np.float32)) if opset < 13 else ""
        attributes = {"coordinate_transformation_mode": "half_pixel", "nearest_mode": "round_prefer_floor"}
        return _single(d, d.node("Resize", "x", roi, factors, mode=mode, **attributes), [1, 2, 5, 6])

    make.__name__ = name
    case((1, 2, 5, 6), since=10)(make)


_resize("resize_nearest_up", [1.0, 1.0, 2.0, 1.5], "nearest")
_resize("resize_nearest_down", [1.0, 1.0, 0.6, 0.5], "nearest")
_resize("resize_nearest_up_and_down", [1.0, 1.0, 2.0, 0.5], "nearest")
_resize("resize_linear", [1.0, 1.0, 2.0, 2.0], "linear")


def _resize_at_run_time(name: str, scale: float) -> None:
    """Scales that only the running model knows, in an opset whose nearest depends on whether they enlarge."""

    def make(opset: int) -> onnx.ModelProto:
        d = Draft(opset)
        total = d.node("Cast", d.axes("ReduceSum", "x", [0, 1, 2, 3], since=13, keepdims=0), to=TensorProto.INT64)
        zero = d.node("Mul", d.node("Cast", total, to=TensorProto.FLOAT), d.weight(np.float32(0)))
        scales = d.node("Add", d.weight(np.asarray([1, 1, scale, 1.5], np.float32)), zero)
        return _single(d, d.node("Resize", "x", scales, mode="nearest"), [1, 2, 5, 6])

    make.__name__ = name
    case((1, 2, 5, 6), since=10, until=10)(make)


_resize_at_run_time("resize_up_at_run_time", 2.0)
_resize_at_run_time("resize_down_at_run_time", 0.6)


@case((1, 2, 4, 4), since=11)
def resize_sizes(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    empty = d.weight(np.zeros(0, np.float32)) if opset < 13 else ""
    roi = d.weight(np.zeros(0, np.float32)) if opset < 13 else ""
    return _single(d, d.node("Resize", "x", roi, empty, d.ints(1, 2, 6, 8), mode="linear"), [1, 2, 4, 4])


@case((1, 1, 4, 4), since=11, until=12)
def resize_tensorflow_nearest(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    attributes = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor", "mode": "nearest"}
    roi, scales = d.weight(np.zeros(0, np.float32)), d.weight(np.asarray([1, 1, 1.75, 0.5], np.float32))
    return _single(d, d.node("Resize", "x", roi, scales, **attributes), [1, 1, 4, 4])


@case((3, 7))
def top_k(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    names = d.node("TopK", "x", d.ints(3), axis=1, outputs=2) if opset >= 10 else d.node("TopK", "x", k=3, axis=1, outputs=2)
    values, indices = names.split(",")
    return d.model(["batch", 7], [(values, TensorProto.FLOAT), (indices, TensorProto.INT64)])


@case((2, 3), since=9)
def scatter(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    indices, updates = d.weight(np.array([[2, 0], [1, 2]])), d.weight(_random(2, 2))
    return _single(d, d.node("Scatter" if opset < 11 else "ScatterElements", "x", indices, updates, axis=1), [2, 3])


@case((1, 2, 6, 6), since=10, until=21, differentiable=False)
def roi_align(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    rois, batch = d.weight(np.array([[0.3, 0.2, 4.1, 3.7]], np.float32)), d.weight(np.array([0], np.int64))
    return _single(d, d.node("RoiAlign", "x", rois, batch, output_height=2, output_width=2, sampling_ratio=2), [1, 2, 6, 6])


@case((2, 4))
def dropout_with_ratio(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    y = d.node("Dropout", "x", d.weight(np.float32(0.3))) if opset >= 12 else d.node("Dropout", "x", ratio=0.3)
    return _single(d, d.node("Relu", y), ["batch", 4])


@case((3, 2, 4))
def long_short_term_memory(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    weights = [d.weight(_random(1, 12, 4)), d.weight(_random(1, 12, 3))]
    return _single(d, d.node("LSTM", "x", *weights, hidden_size=3), [3, 2, 4])


@case((2, 3, 5, 5))
def transposed_convolution(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    return _single(d, d.node("ConvTranspose", "x", d.weight(_random(3, 4, 3, 3)), strides=[2, 2]), ["batch", 3, 5, 5])


@case((2, 3, 4))
def dense_and_arithmetic(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    y = d.node("Add", d.node("MatMul", "x", d.weight(_random(4, 5))), d.weight(_random(5)))
    y = d.node("PRelu", d.node("Div", y, d.weight(np.float32(3))), d.weight(_random(5)))
    y = d.node("Max", d.node("Mul", y, y), d.node("Sub", y, d.weight(_random(3, 1))))
    shape = d.node("Concat", d.node("Shape", y), d.ints(1), axis=0)
    return _single(d, d.node("Reshape", d.node("Transpose", y, perm=[0, 2, 1]), shape), ["batch", 3, 4])


@case((2, 3), since=11, differentiable=False)
def branches(opset: int) -> onnx.ModelProto:
    """Axes of nodes inside an If, which captures values of the graph around it."""
    d = Draft(opset)
    total = d.axes("ReduceSum", "x", [0, 1], since=13, keepdims=0)
    condition = d.node("Greater", total, d.weight(np.float32(0)))
    branches = {}
    for branch, op_type in (("then_branch", "Softmax"), ("else_branch", "Hardmax")):
        inner = Draft(opset)
        inner.counter = 100 if branch == "then_branch" else 200
        y = inner.axes("Unsqueeze", "x", [2], since=13)
        y = inner.node(op_type, y, axis=1)
        output = helper.make_tensor_value_info(y, TensorProto.FLOAT, None)
        branches[branch] = helper.make_graph(inner.nodes, branch, [], [output], inner.initializers)
    return _single(d, d.node("If", condition, **branches), ["batch", 3])


@case((2, 5), since=9)
def one_hot(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    indices = np.array([[0, 2, 1, 1, 4], [3, 0, 0, 3, 2]]) - (5 if opset >= 11 else 0)  # negative ones came with opset 11
    codes = d.node("OneHot", d.weight(indices), d.ints(4), "x01", axis=1)
    pair = d.node("Slice", "x", d.ints(0, 0), d.ints(1, 2)) if opset >= 10 else d.node("Slice", "x", starts=[0, 0], ends=[1, 2])
    d.nodes.append(helper.make_node("Reshape", [pair, d.ints(2)], ["x01"]))
    d.nodes.append(d.nodes.pop(0))
    return _single(d, codes, [2, 5])


def _pool(name: str, op_type: str, extents: tuple[int, ...], since: int, **attributes: object) -> None:
    """Output sizes rounded up, where the last window would start behind the data."""

    def make(opset: int) -> onnx.ModelProto:
        d = Draft(opset)
        y = d.node("Exp", d.node(op_type, "x", ceil_mode=1, **attributes))
        return _single(d, d.axes("ReduceSum", y, [0], since=13, keepdims=0), ["batch", 2, *extents])

    make.__name__ = name
    case((2, 2, *extents), since=since)(make)


for _op, _since in (("MaxPool", 10), ("AveragePool", 10), ("LpPool", 18)):
    _pool(f"{_op}_dropped", _op, (6,), _since, kernel_shape=[3], strides=[4], pads=[1, 1])
    _pool(f"{_op}_one_dropped", _op, (6, 6), _since, kernel_shape=[3, 2], strides=[4, 4], pads=[1, 0, 1, 0])
    _pool(f"{_op}_cropped", _op, (4, 5), _since, kernel_shape=[1, 2], strides=[4, 2])
_pool(
    "AveragePool_dropped_counting",
    "AveragePool",
    (6, 6),
    10,
    kernel_shape=[3, 3],
    strides=[4, 2],
    pads=[1] * 4,
    count_include_pad=1,
)


def _transposed(name: str, **attributes: object) -> None:
    """Pads that are not even, whose formula opset 11 corrected."""

    def make(opset: int) -> onnx.ModelProto:
        d = Draft(opset)
        y = d.node("ConvTranspose", "x", d.weight(_random(2, 1, 3, 3)), strides=[2, 2], **attributes)
        return _single(d, y, ["batch", 2, 4, 5])

    make.__name__ = f"transposed_{name}"
    case((2, 2, 4, 5))(make)


_transposed("same_upper", auto_pad="SAME_UPPER")
_transposed("same_lower", auto_pad="SAME_LOWER")
_transposed("output_shape", output_shape=[8, 10])
_transposed("output_shape_same_upper", output_shape=[8, 10], auto_pad="SAME_UPPER")


@case((2, 3, 4, 4), since=9)
def mean_variance_normalization(opset: int) -> onnx.ModelProto:
    d = Draft(opset)
    return _single(d, d.node("MeanVarianceNormalization", "x"), ["batch", 3, 4, 4])
