"""Normalization layers on ONNX Runtime: digits kept, constant rows, 16-bit types, second derivatives.

The oracle is the definition in float64 on the very float32 numbers that the layer is given; PyTorch's float32 error stands
beside it. What the layers compute in general is tested by the table in ``specs/normalization.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import helper
from torch.nn import functional

import burnish
from burnish.autodiff import differentiate
from burnish.engines.reference import ReferenceEngine
from burnish.graph import Builder, Tensor
from burnish.modes import bind_as_exported
from burnish.operators import has_gradient
from burnish.operators.normalization.standardize import root_mean_square_normalize, standardize
from burnish.rewriting.lower_semantic_operators import lower_semantic_operators
from oracles.combinations import diagonal, named, spread
from oracles.gradient_harness import Evaluator, assert_close
from oracles.rewritten import rewritten

EPSILON = 1e-5
WELL_POSED = 3e-7
ROUNDING = 1.2e-7
KNOWN_ROW = np.array([[-1.83965693, -1.82964566]], np.float32)


@dataclass(frozen=True)
class Layer:
    """A layer without a scale that matters, and the same in numpy and in PyTorch.

    Attributes:
        shape: of an input whose rows hold N elements.
        axes: the normalized axes of that shape.
        operands: sizes of scale and bias.
        torch: in the dtype of its argument.
    """

    op_type: str
    shape: Callable[[int], tuple[int, ...]]
    axes: tuple[int, ...]
    operands: Callable[[int], list[int]]
    torch: Callable[[torch.Tensor], torch.Tensor]
    attributes: dict[str, object]
    opset: int = 21

    def reference(self, x: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """y and dx in float64."""
        wide, q = x.astype(np.float64), dy.astype(np.float64)
        grouped = wide.reshape(2, 2, -1) if self.op_type == "GroupNormalization" else wide
        q = q.reshape(grouped.shape)
        if self.op_type == "LpNormalization":
            inverse = 1 / np.sqrt((grouped**2).sum(self.axes, keepdims=True))
            y = grouped * inverse
            return y, inverse * (q - y * (q * y).sum(self.axes, keepdims=True))
        centered = grouped if self.op_type == "RMSNormalization" else grouped - grouped.mean(self.axes, keepdims=True)
        inverse = 1 / np.sqrt((centered**2).mean(self.axes, keepdims=True) + (0 if "axes" in self.attributes else EPSILON))
        y = centered * inverse
        dx = q - y * (q * y).mean(self.axes, keepdims=True)
        if self.op_type != "RMSNormalization":
            dx = dx - q.mean(self.axes, keepdims=True)
        return y.reshape(x.shape), (inverse * dx).reshape(x.shape)


def torch_mean_variance(x: torch.Tensor) -> torch.Tensor:
    centered = x - x.mean((0, 2, 3), keepdim=True)
    return centered / (x.var((0, 2, 3), correction=0, keepdim=True).sqrt() + 1e-9)


LAYERS = {
    "layer": Layer(
        "LayerNormalization",
        lambda n: (3, n),
        (1,),
        lambda n: [n, n],
        lambda x: functional.layer_norm(x, x.shape[1:], eps=EPSILON),
        {"epsilon": EPSILON},
    ),
    "root_mean_square": Layer(
        "RMSNormalization",
        lambda n: (3, n),
        (1,),
        lambda n: [n],
        lambda x: functional.rms_norm(x, x.shape[1:], eps=EPSILON),
        {"epsilon": EPSILON},
        opset=23,
    ),
    "group": Layer(
        "GroupNormalization",
        lambda n: (2, 4, n // 2),
        (2,),
        lambda n: [4, 4],
        lambda x: functional.group_norm(x, 2, eps=EPSILON),
        {"epsilon": EPSILON, "num_groups": 2},
    ),
    "instance": Layer(
        "InstanceNormalization",
        lambda n: (2, 2, 2, n // 2),
        (2, 3),
        lambda n: [2, 2],
        lambda x: functional.instance_norm(x, eps=EPSILON),
        {"epsilon": EPSILON},
    ),
    "mean_variance": Layer(
        "MeanVarianceNormalization",
        lambda n: (2, 3, 1, n // 2),
        (0, 2, 3),
        lambda n: [],
        torch_mean_variance,
        {"axes": [0, 2, 3]},
    ),
    "lp": Layer("LpNormalization", lambda n: (3, n), (1,), lambda n: [], lambda x: functional.normalize(x, dim=1), {}),
}
LONG = (2, 7, 64, 1024, 4099, 25088, 65537)
every_layer = pytest.mark.parametrize("layer", list(LAYERS.values()), ids=list(LAYERS))


def gradient_of(layer: Layer, n: int, dtype: str = "float32", symbolic: bool = False) -> ir.Model:
    """burnish's gradient graph of the layer, scale 1 and bias 0; every dimension of x a name where ``symbolic``."""
    return burnish.grad(model_of(layer, n, dtype, symbolic), "x", of="y")


def model_of(layer: Layer, n: int, dtype: str, symbolic: bool = False) -> onnx.ModelProto:
    """The layer alone, scale 1 and bias 0."""
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shape = [f"axis{axis}" for axis in range(len(layer.shape(n)))] if symbolic else ["batch", *layer.shape(n)[1:]]
    sizes = layer.operands(n)
    initializers = [
        onnx.numpy_helper.from_array(np.full(size, value, dtype), name)
        for name, size, value in zip(("scale", "bias"), sizes, (1, 0), strict=False)
    ]
    node = helper.make_node(layer.op_type, ["x", *(value.name for value in initializers)], ["y"], **layer.attributes)
    values = [helper.make_tensor_value_info(name, element, shape) for name in ("x", "y")]
    graph = helper.make_graph([node], "layer", values[:1], values[1:], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", layer.opset)], ir_version=10)


def run(model: ir.Model, x: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y and dx on stock ONNX Runtime, its optimizations on."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    y, dx = session.run(["y", "grad:x"], {"x": x, "cotangent:y": dy})
    return y, dx


def relative_error(actual: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(actual.astype(np.float64) - exact) / np.linalg.norm(exact))


def in_torch(layer: Layer, x: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tensor = torch.from_numpy(x).requires_grad_()
    y = layer.torch(tensor)
    y.backward(torch.from_numpy(dy))
    return y.detach().numpy(), tensor.grad.numpy()


def check_digits(layer: Layer, n: int, symbolic: bool) -> None:
    """A sweep over the mean: within 3e-7 of float64 where the problem is well posed, and within twice PyTorch's error."""
    model = gradient_of(layer, n, symbolic=symbolic)
    for mean in (0, 1e2, 1e4, 1e5):
        rng = np.random.default_rng(n)
        x = (rng.standard_normal(layer.shape(n)) + mean).astype(np.float32)
        dy = rng.standard_normal(x.shape).astype(np.float32)
        exact = layer.reference(x, dy)
        # Two elements are sent to -1 and 1 whatever they are: what dx is left with is of the size of epsilon.
        well_posed = n > 2 or layer.op_type in ("RMSNormalization", "LpNormalization")
        for what, ours, theirs, right in zip(("y", "dx"), run(model, x, dy), in_torch(layer, x, dy), exact, strict=True):
            error, reference = relative_error(ours, right), relative_error(theirs, right)
            if well_posed or what == "y":
                assert error <= WELL_POSED, f"{what} at mean {mean:g}: {error:.1e}, PyTorch {reference:.1e}"
            assert error <= max(2 * reference, ROUNDING), f"{what} at mean {mean:g}: {error:.1e}, PyTorch {reference:.1e}"


# Without an epsilon, two elements that round to the same number have no derivative.
DIGITS = [(name, n) for name in LAYERS for n in LONG if (name, n) != ("mean_variance", 2)]


@pytest.mark.slow
@spread(("name", "n"), DIGITS, test_all=14)
def test_digits_kept(name, n):
    check_digits(LAYERS[name], n, symbolic=False)


IMAGES = {
    "group": lambda n: (2, 4, 100, n // 200),
    "instance": lambda n: (2, 2, 100, n // 100),
    "mean_variance": lambda n: (2, 3, 100, n // 200),
}


@pytest.mark.slow
@diagonal(("name", list(LAYERS)), ("n", [4200, 200_000]))
def test_digits_kept_where_no_extent_is_known(name, n):
    layer = LAYERS[name]
    check_digits(replace(layer, shape=IMAGES.get(name, layer.shape)), n, symbolic=True)


@pytest.mark.slow
def test_digits_kept_in_a_sequence_of_unknown_length():
    check_digits(LAYERS["group"], 200_000, symbolic=True)


@pytest.mark.slow
@spread("name", ["layer", "root_mean_square", "instance"], test_all=1)
def test_digits_kept_over_a_million(name):
    check_digits(LAYERS[name], 1_000_000, symbolic=False)


@pytest.mark.parametrize("dy", [(1.0, -1.0), (1.0, 0.0), (0.12573022, -0.13210486), (-0.64042264, 0.10490011)])
def test_the_row_where_implementations_part(dy):
    """With d half the difference of two elements and i² = 1 / (d² + epsilon), y = -+ d i and dx = +- (dy1 - dy2) epsilon i³ / 2.

    PyTorch's y is off by 1e-5 here, and its dx by 1e-4.
    """
    cotangent = np.array([dy], np.float32)
    first, second = KNOWN_ROW[0].astype(np.float64)
    difference = (second - first) / 2
    inverse = 1 / np.sqrt(difference**2 + EPSILON)
    slope = (np.float64(cotangent[0, 0]) - cotangent[0, 1]) / 2 * EPSILON * inverse**3
    y, dx = run(gradient_of(LAYERS["layer"], 2), KNOWN_ROW, cotangent)
    assert relative_error(y, np.array([[-1, 1]]) * difference * inverse) <= WELL_POSED
    assert relative_error(dx, np.array([[1, -1]]) * slope) <= WELL_POSED
    np.testing.assert_allclose(y, [[-0.84543, 0.84543]], atol=5e-6)


@pytest.mark.slow
@diagonal(("name", ["layer", "root_mean_square", "group", "instance"]), ("epsilon", [1e-12, 1e-5, 1.0]))
def test_constant_rows(name, epsilon):
    """A constant row is its own mean: y = 0 and, with an inverse std of 1/sqrt(epsilon), dx = (dy - mean(dy)) / sqrt(epsilon)."""
    layer = LAYERS[name]
    layer = replace(layer, attributes=layer.attributes | {"epsilon": epsilon})
    for n in (6, 1002, 5000):
        model = gradient_of(layer, n)
        for value in (0.0, 0.1, -1.7, 3e4, 1.1e9):
            x = np.full(layer.shape(n), value, np.float32)
            dy = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)
            y, dx = run(model, x, dy)
            assert np.isfinite([y, dx]).all(), f"{n} times {value}"
            if name == "root_mean_square":
                continue
            assert not y.any(), f"{n} times {value}"
            rows = dy.astype(np.float64).reshape(2, 2, -1) if name == "group" else dy.astype(np.float64)
            expected = (rows - rows.mean(layer.axes, keepdims=True)) / np.sqrt(epsilon)
            assert relative_error(dx, expected.reshape(dx.shape)) <= 1e-6, f"{n} times {value}"


@pytest.mark.slow
@every_layer
def test_nearly_constant_rows_give_finite_gradients(layer):
    for n in (6, 1000, 5000):
        model = gradient_of(layer, n)
        for value in (1.0, 3e4, 1.1e9):
            x = np.full(layer.shape(n), value, np.float32)
            x[..., 0] = np.nextafter(x[..., 0], np.float32(np.inf))
            y, dx = run(model, x, np.random.default_rng(1).standard_normal(x.shape).astype(np.float32))
            assert np.isfinite([y, dx]).all(), f"{n} of {value}"
            assert np.abs(y).max() <= np.sqrt(n) * 1.01


def test_no_epsilon_and_no_variance_is_zero():
    layer = replace(LAYERS["layer"], attributes={"epsilon": 0.0})
    y, dx = run(gradient_of(layer, 5), np.full((2, 5), 0.1, np.float32), np.ones((2, 5), np.float32))
    assert not np.any([y, dx])


def test_mean_variance_normalization_of_constants_has_the_slope_of_its_offset():
    layer = LAYERS["mean_variance"]
    x = np.full(layer.shape(8), 0.3, np.float32)
    dy = np.random.default_rng(2).standard_normal(x.shape).astype(np.float32)
    y, dx = run(gradient_of(layer, 8), x, dy)
    assert not y.any()
    np.testing.assert_allclose(dx, (dy - dy.mean((0, 2, 3), keepdims=True)) * 1e9, rtol=1e-5, atol=1e3)


def test_mean_variance_normalization_in_float64():
    layer = LAYERS["mean_variance"]
    rng = np.random.default_rng(3)
    x, dy = rng.standard_normal((2, *layer.shape(10)))
    x *= 1e-8
    tensor = torch.from_numpy(x).requires_grad_()
    expected = torch_mean_variance(tensor)
    expected.backward(torch.from_numpy(dy))
    y, dx = run(gradient_of(layer, 10, "float64"), x, dy)
    assert_close(y, expected.detach().numpy(), 1e-7, "y")  # the offset is stored as a float32
    assert_close(dx, tensor.grad.numpy(), 1e-7, "dx")


@every_layer
def test_float16_has_statistics_in_float32(layer):
    """A mean of 300 leaves float16 a variance of nothing but noise, and a row of 2048 squares of it overflows."""
    n = 2048
    rng = np.random.default_rng(4)
    x = (2 * rng.standard_normal(layer.shape(n)) + 300).astype(np.float16)
    dy = rng.standard_normal(x.shape).astype(np.float16)
    y, dx = run(gradient_of(layer, n, "float16"), x, dy)
    assert y.dtype == dx.dtype == np.float16
    for what, half, exact in zip(("y", "dx"), (y, dx), layer.reference(x, dy), strict=True):
        # Below 6e-5 float16 has no full precision.
        assert np.abs(half - exact).max() <= 2e-3 * np.abs(exact).max() + 6e-8, what


@pytest.mark.parametrize("name", ["layer", "root_mean_square", "group", "instance"])
def test_the_normalized_values_are_cast_back_before_scale_and_bias(name):
    model = burnish.load(model_of(LAYERS[name], 8, "float16"))
    bind_as_exported(model.graph)
    lower_semantic_operators(model)
    y = next(value for value in model.graph.outputs if value.name == "y")
    node = y.producer()
    scaled = node if node.op_type == "Mul" else node.inputs[0].producer()
    assert scaled.op_type == "Mul"
    assert [value.dtype for value in scaled.inputs] == [ir.DataType.FLOAT16] * 2


def test_bfloat16_has_statistics_in_float32():
    import ml_dtypes

    rng = np.random.default_rng(5)
    x = (rng.standard_normal((2, 64)) * 4 + 100).astype(ml_dtypes.bfloat16)
    dy = rng.standard_normal((2, 64)).astype(ml_dtypes.bfloat16)
    layer = LAYERS["layer"]
    element = onnx.TensorProto.BFLOAT16
    values = [helper.make_tensor_value_info(name, element, ["batch", 64]) for name in ("x", "y")]
    scale = helper.make_tensor("scale", element, [64], [1.0] * 64)
    node = helper.make_node("LayerNormalization", ["x", "scale"], ["y"], epsilon=EPSILON)
    graph = helper.make_graph([node], "layer", values[:1], values[1:], [scale])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    results = ReferenceEngine().run(burnish.grad(model, "x"), {"x": x, "cotangent:y": dy})
    wide = [array.astype(np.float64) for array in (x, dy)]
    for name, exact in zip(("y", "grad:x"), layer.reference(*wide), strict=True):
        assert relative_error(np.asarray(results[name]), exact) <= 8e-3, name


def torch_standardize(x: torch.Tensor, axes: list[int], epsilon: float, offset: float) -> tuple[torch.Tensor, ...]:
    mean = x.mean(axes, keepdim=True)
    inverse_std = 1 / ((x.var(axes, correction=0, keepdim=True) + epsilon).sqrt() + offset)
    return (x - mean) * inverse_std, mean, inverse_std


def torch_root_mean_square(x: torch.Tensor, axes: list[int], epsilon: float, offset: float) -> tuple[torch.Tensor, ...]:
    inverse_rms = (x.square().mean(axes, keepdim=True) + epsilon).rsqrt()
    return x * inverse_rms, inverse_rms


SECOND_ORDER = {
    "standardize": (lambda x, axis: standardize(x, axis, 0.25), torch_standardize, 0.25, 0.0),
    "offset": (lambda x, axis: standardize(x, axis, 0.0, 0.5), torch_standardize, 0.0, 0.5),
    "root_mean_square": (lambda x, axis: root_mean_square_normalize(x, axis, 0.25), torch_root_mean_square, 0.25, 0.0),
}


@pytest.mark.slow
@diagonal(("name", list(SECOND_ORDER)), ("axis", [-1, -2]), ("known", named([True, False], ["static", "symbolic"])))
def test_second_and_third_derivatives(name, axis, known):
    """Gradients of gradients of all outputs, each time of the product with a new random cotangent, against PyTorch."""
    emit, in_pytorch, epsilon, offset = SECOND_ORDER[name]
    rng = np.random.default_rng(8)
    array = rng.standard_normal((3, 2, 64)) + 1
    graph = ir.Graph([], [], nodes=[], name="twice", opset_imports={"": 18})
    shape = ir.Shape(array.shape if known else ["a", "b", "c"])
    graph.inputs.append(ir.Value(name="x", shape=shape, type=ir.TensorType(ir.DataType.DOUBLE)))
    builder = Builder(graph)
    x = builder.tensor(graph.inputs[0])
    tensor = torch.from_numpy(array).requires_grad_()
    outputs, expected_outputs = emit(x, axis), in_pytorch(tensor, list(range(axis, 0)), epsilon, offset)
    cotangents = [rng.standard_normal(tuple(output.shape)) for output in expected_outputs]
    total = sum((output * torch.from_numpy(c)).sum() for output, c in zip(expected_outputs, cotangents, strict=True))
    incoming: dict[ir.Value, Tensor] = {output.value: builder.constant(c) for output, c in zip(outputs, cotangents, strict=True)}
    expected = []
    for _ in range(3):
        gradient = differentiate(builder, incoming, [x.value])[x.value]
        assert gradient is not None
        graph.outputs.append(gradient.value)
        (derivative,) = torch.autograd.grad(total, [tensor], create_graph=True)
        expected.append(derivative)
        v = rng.standard_normal(array.shape)
        incoming = {gradient.value: builder.constant(v)}
        total = (derivative * torch.from_numpy(v)).sum()
    names = [value.name for value in graph.outputs]
    results = Evaluator(rewritten(lower_semantic_operators, ir.Model(graph, ir_version=10)))({"x": array})
    for order, (result, derivative) in enumerate(zip(names, expected, strict=True), start=1):
        assert_close(results[result], derivative.detach().numpy(), 1e-9, f"derivative {order}")


@pytest.mark.parametrize(("op_type", "opset"), [(layer.op_type, layer.opset) for layer in LAYERS.values()])
def test_inspect_counts_these_operators_as_differentiable(op_type, opset):
    assert has_gradient(ir.node(op_type, []), opset)


@pytest.mark.slow
def test_only_the_training_graphs_hold_the_training_form():
    model = onnx.parser.parse_model("""
<ir_version: 8, opset_import: ["": 18]>
network (float[batch, 4] x) => (float[batch, 4] logits)
<float[4] scale = {1, 2, 3, 4}, float[4] bias = {0, 1, 0, 1}> { logits = LayerNormalization (x, scale, bias) }""")
    program = burnish.compile(model, optimizer=burnish.optim.sgd(lr=0.1))

    def inputs_of(graph: ir.Model) -> list[str]:
        return [node.inputs[0].name for node in graph.graph if node.op_type == "LayerNormalization"]

    assert inputs_of(program.predict) == inputs_of(program.evaluate) == ["x"]
    assert "x" not in inputs_of(program.step)
    session = burnish.Session(program)
    x = np.random.default_rng(9).normal(5, 2, (6, 4)).astype(np.float32)
    batch = {"x": x, "labels": np.arange(6) % 4}
    before = session.evaluate(batch)["loss"]
    assert session.step(batch)["loss"] == pytest.approx(before, rel=1e-5)
    assert session.evaluate(batch)["loss"] < before


@pytest.mark.parametrize("statistic", ["mean", "variance"])
def test_running_statistics_have_the_gradient_of_their_closed_form(statistic):
    """Of n numbers x in a channel: (1 - momentum) / n for the mean, and 2 (x - mean) times that for the variance."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        layer (float[n, 3, 4] x) => (float[n, 3, 4] y, float[3] mean, float[3] variance)
        <float[3] s = {1, 2, 3}, float[3] b = {0, 0, 0}, float[3] m = {0, 0, 0}, float[3] v = {1, 1, 1}> {
            y, mean, variance = BatchNormalization <training_mode = 1, momentum = 0.75> (x, s, b, m, v)
        }"""
    )
    x = np.random.default_rng(0).normal(size=(5, 3, 4)).astype(np.float32)
    cotangent = np.array([1, -2, 0.5], np.float32)
    gradient = burnish.grad(model, wrt=["x"], of=statistic)
    found = ReferenceEngine().run(gradient, {"x": x, f"cotangent:{statistic}": cotangent})["grad:x"]
    weight = (1 - 0.75) * cotangent.reshape(3, 1) / (5 * 4)
    slope = 2 * (x - x.mean(axis=(0, 2), keepdims=True)) if statistic == "variance" else np.ones_like(x)
    np.testing.assert_allclose(found, weight * slope, rtol=1e-5, atol=1e-7)
