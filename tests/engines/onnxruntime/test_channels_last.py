"""Images with their channels last on ONNX Runtime: what graphs become, and the kernels of convolutions beside float64."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish import optim
from burnish.engines.onnxruntime import OnnxRuntimeEngine, kernels
from burnish.errors import EngineError
from burnish.kernels.compiling import find_compiler
from burnish.kernels.convolution import channels_last
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from oracles.rewritten import rewritten

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler for the engine's kernels")


@pytest.fixture(autouse=True)
def narrow_ones_too(monkeypatch):
    """What is tested is what kernels compute, and not where they are worth it."""
    monkeypatch.setattr(channels_last, "LEAST_WIDTH", 1)


CONVOLUTIONS = {
    # name: (images, kernels, strides, pads, dilations, group)
    "one pixel": ((2, 24, 9, 7), (40, 24, 1, 1), 1, (0, 0, 0, 0), 1, 1),
    "one pixel, both gradients at once": ((2, 72, 16, 16), (24, 72, 1, 1), 1, (0, 0, 0, 0), 1, 1),
    "one pixel, more results than weights": ((2, 16, 20, 20), (17, 16, 1, 1), 1, (0, 0, 0, 0), 1, 1),
    "one pixel with strides": ((2, 17, 9, 8), (19, 17, 1, 1), 2, (0, 0, 0, 0), 1, 1),
    "filtered": ((2, 20, 13, 11), (18, 20, 3, 3), 1, (1, 1, 1, 1), 1, 1),
    "filtered, uneven pads": ((3, 16, 9, 12), (24, 16, 3, 3), 1, (0, 2, 1, 1), 1, 1),
    "few pixels": ((1, 33, 3, 3), (37, 33, 3, 3), 1, (1, 1, 1, 1), 1, 1),
    "first layer": ((2, 3, 21, 17), (16, 3, 7, 7), 2, (3, 3, 3, 3), 1, 1),
    "strides": ((2, 18, 11, 8), (20, 18, 3, 3), 2, (1, 1, 1, 1), 1, 1),
    "strides, fewer results than kernels": ((1, 18, 5, 5), (40, 18, 3, 3), 2, (1, 1, 1, 1), 1, 1),
    "strides and dilation": ((2, 18, 12, 9), (17, 18, 3, 3), 2, (2, 3, 2, 1), 2, 1),
    "dilation, fewer results than kernels": ((1, 16, 5, 4), (33, 16, 3, 3), 1, (2, 2, 2, 2), 2, 1),
    "dilation": ((2, 9, 12, 10), (6, 9, 3, 2), 1, (2, 1, 2, 0), 2, 1),
    "depthwise": ((2, 24, 11, 9), (24, 1, 3, 3), 1, (1, 1, 1, 1), 1, 24),
    "depthwise with strides": ((3, 19, 12, 9), (19, 1, 5, 5), 2, (2, 1, 1, 2), 1, 19),
    "no images": ((0, 16, 5, 5), (16, 16, 3, 3), 1, (1, 1, 1, 1), 1, 1),
}


def dims(*extents: int | str) -> str:
    return ", ".join(f'"{extent}"' if isinstance(extent, str) else str(extent) for extent in extents)


def text_of(images, weight, stride, pads, dilation, group) -> str:
    """A convolution and its gradients, as the standard's operators and burnish's own."""
    top, left, bottom, right = pads
    rows, columns = (
        (size + before + after - dilation * (extent - 1) - 1) // stride + 1
        for size, before, after, extent in zip(images[2:], (top, left), (bottom, right), weight[2:], strict=True)
    )
    window = (
        f"kernel_shape = [{weight[2]}, {weight[3]}], strides = [{stride}, {stride}], pads = [{', '.join(map(str, pads))}], "
        f"dilations = [{dilation}, {dilation}], group = {group}"
    )
    x, w, y = dims("N", *images[1:]), dims(*weight), dims("N", weight[0], rows, columns)
    return f"""
<ir_version: 10, opset_import: ["" : 21, "burnish" : 1]>
g (float[{x}] x, float[{w}] w, float[{weight[0]}] b, float[{y}] dy) => (float[{y}] y, float[{x}] dx, float[{w}] dw)
{{
    y = Conv<{window}>(x, w, b)
    dx = burnish.ConvInputGrad<{window}>(dy, w, x)
    dw = burnish.ConvWeightGrad<{window}>(dy, x, w)
}}
"""


def operands_of(images, weight, stride, pads, dilation, group):
    random = np.random.default_rng(0)
    x, w, b = (random.normal(size=shape) for shape in (images, weight, weight[:1]))
    y, *_ = exact(x, w, b, None, stride, pads, dilation, group)
    return {"x": x, "w": w, "b": b, "dy": random.normal(size=y.shape)}


def exact(x, w, b, dy, stride, pads, dilation, group):
    """The convolution and its gradients in float64."""
    x, w, b = (torch.from_numpy(array).requires_grad_() for array in (x, w, b))
    top, left, bottom, right = pads
    padded = torch.nn.functional.pad(x, (left, right, top, bottom))
    y = torch.nn.functional.conv2d(padded, w, b, stride, 0, dilation, group)
    gradients = () if dy is None else torch.autograd.grad(y, (x, w), torch.from_numpy(dy))
    return [tensor.detach().numpy() for tensor in (y, *gradients)]


@functools.cache
def loaded(name: str, threads: int):
    model = onnx.parser.parse_model(text_of(*CONVOLUTIONS[name]))
    return OnnxRuntimeEngine(kernels=True).load(ir.from_proto(model), threads)


def with_drawn_weights(text: str, random: np.random.Generator) -> onnx.ModelProto:
    """A model with a weight for each value that its text declares."""
    model = onnx.parser.parse_model(text)
    for value in model.graph.value_info:
        shape = [extent.dim_value for extent in value.type.tensor_type.shape.dim]
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(random.normal(0, 0.3, shape)), value.name))
    del model.graph.value_info[:]
    return model


def called(model: ir.Model) -> Counter[str]:
    """How many nodes of each operator a graph has once it calls kernels."""
    copy = model.clone()
    kernels.call_kernels(copy)
    return Counter(node.op_type for node in copy.graph)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_and_their_gradients_beside_float64(name, threads):
    case = CONVOLUTIONS[name]
    operands = operands_of(*case)
    expected = dict(zip(("y", "dx", "dw"), exact(*operands.values(), *case[2:]), strict=True))
    feeds = {key: array.astype(np.float32) for key, array in operands.items()}
    first, second = (loaded(name, threads)(feeds) for _ in range(2))
    for key, array in expected.items():
        size = np.abs(array).max(initial=1e-6)
        np.testing.assert_allclose(first[key], array, rtol=0, atol=2e-6 * size, err_msg=key)
        np.testing.assert_array_equal(second[key], first[key], err_msg=key)


def test_both_gradients_are_one_node():
    model = ir.from_proto(onnx.parser.parse_model(text_of(*CONVOLUTIONS["strides"])))
    assert called(model)["ChannelsLastConv"] == called(model)["ChannelsLastConvGrad"] == 1


@pytest.mark.parametrize(
    ("name", "wanted"), [("one pixel", "dx"), ("filtered", "dw"), ("depthwise", "dx"), ("depthwise", "dw"), ("strides", "dx")]
)
def test_one_gradient_alone(name, wanted):
    case = CONVOLUTIONS[name]
    model = onnx.parser.parse_model(text_of(*case))
    del model.graph.output[: 2 if wanted == "dw" else 1]
    if wanted == "dx":
        del model.graph.output[1]
    operands = operands_of(*case)
    expected = exact(*operands.values(), *case[2:])[1 if wanted == "dx" else 2]
    feeds = {key: array.astype(np.float32) for key, array in operands.items()}
    run = OnnxRuntimeEngine(kernels=True).load(ir.from_proto(model), 2)
    np.testing.assert_allclose(run(feeds)[wanted], expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_what_no_kernel_takes_is_refused_by_name():
    window = "kernel_shape = [3, 3], strides = [1, 1], pads = [0, 0, 0, 0], dilations = [1, 1], threads = 1"
    text = """
<ir_version: 10, opset_import: ["" : 21, "burnish" : 1]>
g (float[1, "H", "W", 4] x, float[4, 2, 3, 3] w) => (float[1, "H2", "W2", 4] y) {{ y = burnish.ChannelsLastConv<{}>(x, w) }}
"""
    engine = OnnxRuntimeEngine(kernels=True)
    weight = np.ones((4, 2, 3, 3), np.float32)
    for group, size, problem in (
        (2, 5, "of several groups one kernel of 3x3 or 5x5"),
        (1, 5, "that fit expected"),
        (2, 2, "larger than"),
    ):
        run = engine.load(ir.from_proto(onnx.parser.parse_model(text.format(f"{window}, group = {group}"))), 1)
        with pytest.raises(EngineError, match=problem):
            run({"x": np.ones((1, size, size, 4), np.float32), "w": weight})


@pytest.mark.slow
def test_a_bias_of_another_size_is_refused():
    """ONNX Runtime does not look at it until then, and a kernel would read past its end."""
    text = """
<ir_version: 10, opset_import: ["" : 21]>
net (float["N", 16, 4, 4] x) => (float["N", 16] y) <float[16, 16, 1, 1] w, float[3] b>
{ a = Conv(x, w, b)  p = GlobalAveragePool(a)  y = Flatten(p) }
"""
    model = with_drawn_weights(text, np.random.default_rng(0))
    session = burnish.Session(burnish.compile(model, optimizer="sgd"), engine=OnnxRuntimeEngine(kernels=True))
    place = r"at ChannelsLastConv 'node_\w+' of the Conv 'Conv' \(output 'a'\): .*a bias of 16 numbers expected, found 3"
    with pytest.raises(EngineError, match=place):
        session.step({"x": np.zeros((2, 16, 4, 4), np.float32), "labels": np.zeros(2, np.int64)})


NEAR = "kernel_shape = [3, 3], strides = [1, 1], pads = [1, 1, 1, 1], dilations = [1, 1], group = 1"
FAR = "kernel_shape = [3, 3], strides = [1, 1], pads = [2, 2, 2, 2], dilations = [2, 2], group = 1"
SAME_OPERANDS = f"""
<ir_version: 10, opset_import: ["" : 21, "burnish" : 1]>
g (float["N", 6, 5, 4] x, float[6, 6, 3, 3] w, float["N", 6, 5, 4] dy)
  => (float["N", 6, 5, 4] near, float[6, 6, 3, 3] far_weight, float["N", 6, 5, 4] far, float[6, 6, 3, 3] near_weight)
{{
    near = burnish.ConvInputGrad<{NEAR}>(dy, w, x)
    far_weight = burnish.ConvWeightGrad<{FAR}>(dy, x, w)
    far = burnish.ConvInputGrad<{FAR}>(dy, w, x)
    near_weight = burnish.ConvWeightGrad<{NEAR}>(dy, x, w)
}}
"""
REDUCED_WEIGHT = f"""
<ir_version: 10, opset_import: ["" : 21, "burnish" : 1]>
g (float["N", 6, 5, 4] x, float[6, 6, 3, 3] w, float["N", 6, 5, 4] dy, float[6, 5, 4] scale)
  => (float["N", 6, 5, 4] scaled, float[6, 4] sums, float["N", 6, 5, 4] dx)
{{
    y = Conv<{NEAR}>(x, w)
    scaled = Mul(y, scale)
    axes = Constant<value = int64[1] {{1}}>()
    sums = ReduceSum<keepdims = 0>(scale, axes)
    dx = burnish.ConvInputGrad<{NEAR}>(dy, w, x)
}}
"""


@pytest.mark.parametrize("text", [SAME_OPERANDS, REDUCED_WEIGHT], ids=["windows of the same operands", "sum of a weight"])
def test_graphs_compute_what_they_do_without_kernels(text):
    """Gradients of several convolutions of the same operands are told apart; of images alone axes change their places."""
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    random = np.random.default_rng(3)
    feeds = {
        value.name: random.normal(size=[extent.dim_value or 2 for extent in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in model.graph.input
    }
    assert called(ir.from_proto(model))["ChannelsLastConvGrad"]
    expected = OnnxRuntimeEngine(kernels=False).load(rewritten(lower_semantic_operators, ir.from_proto(model)), 1)(feeds)
    actual = OnnxRuntimeEngine(kernels=True).load(ir.from_proto(model), 1)(feeds)
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=0, atol=2e-6 * np.abs(array).max(), err_msg=name)


POOL = """
<ir_version: 10, opset_import: ["" : 21, "burnish" : 1]>
g (float["N", 8, 11, 9] image, float[{channels}, 8, 1, 1] w, float["N", {channels}, {rows}, {columns}] dy)
  => (float["N", {channels}, {rows}, {columns}] y, float["N", 8, 11, 9] dimage, float[{channels}, 8, 1, 1] dw)
{{
    x = Conv<kernel_shape = [1, 1]>(image, w)
    y, indices = MaxPool<{window}>(x)
    dx = burnish.MaxPoolGrad<{window}, dilations = [1, 1]>(dy, indices, x)
    dimage = burnish.ConvInputGrad<{one}>(dx, w, image)
    dw = burnish.ConvWeightGrad<{one}>(dx, image, w)
}}
"""


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "pads"), [(24, 3, 2, (1, 1, 1, 1)), (5, 2, 2, (0, 0, 0, 0)), (17, 3, 1, (2, 0, 1, 1))]
)
def test_max_pooling_gives_its_gradient_to_the_first_of_the_largest(channels, kernel, stride, pads):
    rows, columns = ((size + pads[axis] + pads[axis + 2] - kernel) // stride + 1 for axis, size in enumerate((11, 9)))
    window = f"kernel_shape = [{kernel}, {kernel}], strides = [{stride}, {stride}], pads = [{', '.join(map(str, pads))}]"
    one = "kernel_shape = [1, 1], strides = [1, 1], pads = [0, 0, 0, 0], dilations = [1, 1], group = 1"
    text = POOL.format(channels=channels, rows=rows, columns=columns, window=window, one=one)
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text))
    assert called(ir.from_proto(model))["ChannelsLastMaxPoolGrad"] == 1
    random = np.random.default_rng(1)
    feeds = {
        "image": random.integers(-1, 2, (3, 8, 11, 9)).astype(np.float32),  # so that many are as large as others
        "w": random.integers(0, 2, (channels, 8, 1, 1)).astype(np.float32),
        "dy": random.integers(-9, 10, (3, channels, rows, columns)).astype(np.float32),
    }
    standard = rewritten(lower_semantic_operators, ir.from_proto(model))
    expected = OnnxRuntimeEngine(kernels=False).load(standard, 2)(feeds)
    actual = OnnxRuntimeEngine(kernels=True).load(ir.from_proto(model), 2)(feeds)
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


AROUND = """
<ir_version: 10, opset_import: ["" : 21]>
net (float["N", 4, 12, 10] x) => (float["N", 5] y)
<float[16, 4, 3, 3] w1, float[16] b1, float[16, 16, 1, 1] w2, float[16, 16, 1, 1] gate, float[24, 20, 3, 3] w3,
 float[24, 1, 3, 3] w4, float[16, 1, 1] slope, float[24, 5] head, float[5] b>
{
    a = Conv<pads = [1, 1, 1, 1]>(x, w1, b1)
    s = Sigmoid(a)
    m = Mul(a, s)
    pooled = GlobalAveragePool(m)
    g = Conv(pooled, gate)
    h = HardSigmoid(g)
    gated = Mul(m, h)
    c = Conv(gated, w2)
    p = PRelu(c, slope)
    r = Add(p, m)
    joined = Concat<axis = 1>(r, x)
    d = Conv<auto_pad = "SAME_UPPER", strides = [2, 2]>(joined, w3)
    e = Conv<pads = [1, 1, 1, 1], group = 24>(d, w4)
    low = Constant<value = float {0}>()
    high = Constant<value = float {6}>()
    f = Clip(e, low, high)
    axes = Constant<value = int64[2] {2, 3}>()
    t = ReduceMean<keepdims = 0>(f, axes)
    v = MatMul(t, head)
    y = Add(v, b)
}
"""


@pytest.mark.slow
def test_a_network_of_many_layers_trains_as_with_standard_operators():
    """Gates, slopes, joined images, means over places: all read images with their channels last, and only inputs are turned."""
    random = np.random.default_rng(2)
    model = with_drawn_weights(AROUND, random)
    program = burnish.compile(model, loss="cross_entropy", optimizer=optim.sgd(lr=0.05, momentum=0.9))
    engines = OnnxRuntimeEngine(kernels=True), OnnxRuntimeEngine(kernels=False)
    step = program.graphs.lowered_to(engines[0].target).copy_of("step")
    counts = called(step)
    assert counts["ChannelsLastConv"] == counts["ChannelsLastConvGrad"] == 5
    assert counts["Conv"] == counts["ConvTranspose"] == 0
    assert counts["Transpose"] == 4  # of the input, of the slopes and their gradient, and of one pixel for each image
    batches = [{"x": random.normal(size=(3, 4, 12, 10)).astype(np.float32), "labels": random.integers(0, 5, 3)} for _ in range(3)]
    sessions = [burnish.Session(program, engine=engine, threads=2) for engine in engines]
    losses = [[session.step(batch)["loss"] for batch in batches] for session in sessions]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    actual, expected = (session.state() for session in sessions)
    for name, array in expected.items():
        if array.dtype == np.float32:
            assert np.linalg.norm(actual[name] - array) <= 2e-5 * np.linalg.norm(array) + 1e-6, name


def test_grouped_convolutions_leave_a_graph_as_it_is():
    """Around each, images would be turned and turned back."""
    case = CONVOLUTIONS["depthwise"]
    model = onnx.parser.parse_model(text_of((2, 8, 9, 9), (8, 2, 3, 3), *case[2:5], 4))
    counts = called(ir.from_proto(model))
    assert counts["ChannelsLastConv"] == counts["ChannelsLastConvGrad"] == 0


def test_a_network_of_narrow_convolutions_is_left_as_it_is(monkeypatch):
    model = ir.from_proto(onnx.parser.parse_model(text_of(*CONVOLUTIONS["dilation"])))
    assert called(model)["ChannelsLastConv"] == 1
    monkeypatch.setattr(channels_last, "LEAST_WIDTH", 16)
    counts = called(model)
    assert counts["ChannelsLastConv"] == counts["ChannelsLastConvGrad"] == 0


BEFORE_OR_AFTER = """
<ir_version: 10, opset_import: ["" : 21, "burnish" : 1]>
g (float["N", 4, {side}, {side}] x, float[16, 4, 3, 3] w1, float[64, 16, 3, 3] w2, float["N", 64, {last}, {last}] dy)
=> (float["N", 64, {last}, {last}] y, float["N", 16, {middle}, {middle}] dx, float[64, 16, 3, 3] dw)
{{
    middle = Conv<kernel_shape = [3, 3]>(x, w1)
    y = Conv<{window}>(middle, w2)
    dx = burnish.ConvInputGrad<{window}>(dy, w2, middle)
    dw = burnish.ConvWeightGrad<{window}>(dy, middle, w2)
}}
"""


@pytest.mark.parametrize(("stride", "taken"), [(1, 2), (14, 0)])
def test_what_convolutions_multiply_decides(stride, taken, monkeypatch):
    """A narrow one beside a wide one, which with its gradients has most of the work, but not with a large stride."""
    monkeypatch.setattr(channels_last, "LEAST_WIDTH", 16)
    middle = 30
    window = f"kernel_shape = [3, 3], strides = [{stride}, {stride}], pads = [0, 0, 0, 0], dilations = [1, 1], group = 1"
    sizes = {"side": middle + 2, "middle": middle, "last": (middle - 3) // stride + 1, "window": window}
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(BEFORE_OR_AFTER.format(**sizes))))
    assert called(model)["ChannelsLastConv"] == taken


def test_inference_is_left_to_onnx_runtime():
    model = onnx.parser.parse_model(text_of(*CONVOLUTIONS["filtered"]))
    del model.graph.output[1:], model.graph.node[1:]
    assert called(ir.from_proto(model))["Conv"] == 1
