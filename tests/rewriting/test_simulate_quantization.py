"""Quantization passes gradients straight through: beside PyTorch's fake quantization, whatever stands between the two."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser
import pytest
import torch

import burnish
from burnish.engines import registry
from burnish.errors import GradientError, UntrainedWeightsWarning
from oracles.onnxruntime_outputs import onnxruntime_outputs

GENERATOR = np.random.default_rng(0)
X = (3 * GENERATOR.normal(size=(2, 3, 4))).astype(np.float32)
COTANGENT = GENERATOR.normal(size=(2, 3, 4)).astype(np.float32)
HEADER = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>'


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEADER} {text}")


def gradients(
    model: onnx.ModelProto, wrt: list[str], feeds: Mapping[str, np.ndarray], cotangent: np.ndarray = COTANGENT
) -> dict[str, np.ndarray]:
    """The outputs of a model and its gradients, the same on every engine."""
    graph = burnish.grad(model, wrt=wrt)
    inputs = {**feeds, "cotangent:y": cotangent}
    results = {name: registry.get(name).load(graph)(inputs) for name in ("onnxruntime", "reference", "torch")}
    for result in results.values():
        for name, array in results["reference"].items():
            np.testing.assert_allclose(result[name], array, rtol=1e-5, atol=1e-5, err_msg=name)
    return results["onnxruntime"]


def expected(quantize: object, x: np.ndarray, scale: np.ndarray, cotangent: np.ndarray = COTANGENT) -> dict[str, np.ndarray]:
    """The same of a PyTorch function."""
    operands = {"x": torch.tensor(x, requires_grad=True), "scale": torch.tensor(scale, requires_grad=True)}
    y = quantize(operands["x"], operands["scale"])  # type: ignore[operator]
    y.backward(torch.tensor(cotangent))
    found = {f"grad:{name}": operand.grad.numpy() for name, operand in operands.items() if operand.grad is not None}
    return {"y": y.detach().numpy(), **found}


def assert_alike(found: Mapping[str, np.ndarray], wanted: Mapping[str, np.ndarray]) -> None:
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array.reshape(found[name].shape), rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("dtype", "zero_point", "low", "high", "scale"),
    [
        ("uint8", 20, 0, 255, 0.021),
        ("int8", 3, -128, 127, 0.021),
        ("int8", 0, -128, 127, 0.021),
        ("uint16", 9000, 0, 65535, 0.0003),
        ("int16", 7, -32768, 32767, 0.0001),
        ("int4", 2, -8, 7, 0.4),
        ("uint4", 7, 0, 15, 0.4),
    ],
)
def test_one_scale_for_all(dtype, zero_point, low, high, scale):
    """Zero points below zero are left to the next test: PyTorch adds one to them where it computes the gradient of a scale."""
    model = parsed(f"""g (float[A, B, C] x, float scale) => (float[A, B, C] y) <{dtype} zero = {{{zero_point}}}> {{
        q = QuantizeLinear (x, scale, zero)
        y = DequantizeLinear (q, scale, zero)
    }}""")

    def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        zero = torch.tensor([float(zero_point)])
        return torch._fake_quantize_learnable_per_tensor_affine(x, scale.reshape(1), zero, low, high, 1.0)

    scales = np.asarray(scale, np.float32)
    assert_alike(gradients(model, ["x", "scale"], {"x": X, "scale": scales}), expected(quantize, X, scales))


def test_a_zero_point_below_zero_and_the_bounds():
    """On a bound of the integers the gradient passes, beyond it there is none; a scale has the gradient of learned step sizes."""
    model = parsed("""g (float[N] x, float scale) => (float[N] y) <int8 zero = {-3}> {
        q = QuantizeLinear (x, scale, zero)
        y = DequantizeLinear (q, scale, zero)
    }""")
    x = np.array([-126.0, -125.4, -124.9, 0.3, 129.6, 130.4, 131.0], np.float32)
    found = gradients(model, ["x", "scale"], {"x": x, "scale": np.asarray(1.0, np.float32)}, np.ones(7, np.float32))
    np.testing.assert_array_equal(found["y"], [-125, -125, -125, 0, 130, 130, 130])
    np.testing.assert_array_equal(found["grad:x"], [0, 1, 1, 1, 1, 1, 0])
    np.testing.assert_allclose(found["grad:scale"], -125 + 0.4 - 0.1 - 0.3 + 0.4 - 0.4 + 130, rtol=1e-4)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("rank_is_known_only", [False, True])
def test_a_scale_for_each_index(axis, rank_is_known_only):
    extent = X.shape[axis]
    shape = "A, B, C" if rank_is_known_only else "2, 3, 4"
    zeros = list(range(extent))
    model = parsed(f"""g (float[{shape}] x, float[{extent}] scale) => (float[{shape}] y)
    <int8[{extent}] zero = {{{", ".join(map(str, zeros))}}}> {{
        q = QuantizeLinear <axis = {axis}> (x, scale, zero)
        y = DequantizeLinear <axis = {axis}> (q, scale, zero)
    }}""")

    def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        zero = torch.tensor(zeros, dtype=torch.float32)
        return torch._fake_quantize_learnable_per_channel_affine(x, scale, zero, axis % 3, -128, 127, 1.0)

    scales = np.linspace(0.01, 0.04, extent, dtype=np.float32)
    assert_alike(gradients(model, ["x", "scale"], {"x": X, "scale": scales}), expected(quantize, X, scales))


@pytest.mark.parametrize("shape", ["2, 3, 4", "A, B, C"])
def test_a_scale_for_each_block(shape):
    model = parsed(f"""g (float[{shape}] x, float[2, 2, 4] scale) => (float[{shape}] y) {{
        q = QuantizeLinear <axis = 1, block_size = 2, output_dtype = 3> (x, scale)
        y = DequantizeLinear <axis = 1, block_size = 2> (q, scale)
    }}""")
    scales = GENERATOR.uniform(0.01, 0.04, (2, 2, 4)).astype(np.float32)

    def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        each = scale.repeat_interleave(2, 1)[:, :3]
        ratio = x / each
        rounded = ratio + (ratio.round() - ratio).detach()
        return rounded.clamp(-128, 127) * each

    graph = burnish.grad(model, wrt=["x", "scale"])
    found = registry.get("reference").load(graph)({"x": X, "scale": scales, "cotangent:y": COTANGENT})
    assert_alike(found, expected(quantize, X, scales))


@pytest.mark.parametrize(("dtype", "code", "greatest"), [("float8e4m3fn", 17, 448.0), ("float8e5m2", 19, 57344.0)])
def test_floating_point_numbers_of_eight_bits(dtype, code, greatest):
    model = parsed(f"""g (float[N] x, float scale) => (float[N] y) {{
        q = QuantizeLinear <output_dtype = {code}> (x, scale)
        y = DequantizeLinear (q, scale)
    }}""")
    x = np.array([-2 * greatest, -greatest, -1.3, 0.02, 1.7, greatest, 3 * greatest], np.float32)
    graph = burnish.grad(model, wrt=["x"])
    cotangent = np.arange(1, 8, dtype=np.float32)
    found = registry.get("onnxruntime").load(graph)({"x": x, "scale": np.asarray(1.0, np.float32), "cotangent:y": cotangent})
    np.testing.assert_array_equal(found["y"], torch.tensor(x).clamp(-greatest, greatest).to(getattr(torch, TORCH[dtype])).float())
    np.testing.assert_array_equal(found["grad:x"], [0, 2, 3, 4, 5, 6, 0])


TORCH = {"float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}

BETWEEN = {
    "nothing": "r = Identity (q)",
    "reshape": "flat = Reshape (q, whole)\n s = Shape (x)\n r = Reshape (flat, s)",
    "transpose": "t = Transpose <perm = [2, 0, 1]> (q)\n r = Transpose <perm = [1, 2, 0]> (t)",
    "split and concat": "a, b = Split <axis = 2, num_outputs = 2> (q)\n r = Concat <axis = 2> (a, b)",
    "squeeze": "u = Unsqueeze (q, one)\n r = Squeeze (u, one)",
    "gather": "i = Shape <start = 0, end = 1> (x)\n z = Sub (i, i)\n r0 = Gather <axis = 1> (q, order)\n"
    " r = Gather <axis = 1> (r0, back)",
    "wide integers": "w = Cast <to = 6> (q)\n v = Add (w, seven)\n u = Sub (v, seven)\n r = Cast <to = 3> (u)",
    "where": "c = Less (x, x)\n r = Where (c, zero, q)",
    "pad": "p = Pad (q, pads, zero)\n r = Slice (p, starts, ends)",
    "tile": "t = Tile (q, twice)\n r = Slice (t, none, extents)",
    "max": "r = Max (q, lowest)",
}


@pytest.mark.parametrize("between", BETWEEN)
def test_what_stands_between_the_two_operators(between):
    model = parsed(f"""g (float[2, 3, 4] x) => (float[2, 3, 4] y)
    <float scale = {{0.021}}, int8 zero = {{3}}, int64[1] whole = {{-1}}, int64[1] one = {{1}}, int64[3] order = {{2, 0, 1}},
     int64[3] back = {{1, 2, 0}}, int32 seven = {{7}}, int64[6] pads = {{1, 0, 0, 0, 0, 2}}, int64[3] starts = {{1, 0, 0}},
     int64[3] ends = {{3, 3, 4}}, int64[3] twice = {{2, 1, 1}}, int64[3] none = {{0, 0, 0}}, int64[3] extents = {{2, 3, 4}},
     int8 lowest = {{-128}}> {{
        q = QuantizeLinear (x, scale, zero)
        {BETWEEN[between]}
        y = DequantizeLinear (r, scale, zero)
    }}""")

    def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(x, 0.021, 3, -128, 127)

    assert_alike(gradients(model, ["x"], {"x": X}), expected(quantize, X, np.float32(0)))


def test_integers_of_fewer_bits_that_exporters_write_as_clip():
    """PyTorch's range of 0 to 127, and the narrow ranges of Brevitas."""
    model = parsed("""g (float[A, B, C] x) => (float[A, B, C] y)
    <float scale = {0.05}, uint8 zero = {60}, uint8 low = {0}, uint8 high = {127}> {
        q = QuantizeLinear (x, scale, zero)
        r = Clip (q, low, high)
        y = DequantizeLinear (r, scale, zero)
    }""")

    def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(x, 0.05, 60, 0, 127)

    assert_alike(gradients(model, ["x"], {"x": X}), expected(quantize, X, np.float32(0)))


def test_a_pooling_of_integers():
    model = parsed("""g (float[N, 3, 4] x) => (float[N, 3, 2] y) <float scale = {0.03}, uint8 zero = {128}> {
        q = QuantizeLinear (x, scale, zero)
        r = MaxPool <kernel_shape = [2], strides = [2]> (q)
        y = DequantizeLinear (r, scale, zero)
    }""")

    def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.max_pool1d(torch.fake_quantize_per_tensor_affine(x, 0.03, 128, 0, 255), 2)

    found = gradients(model, ["x"], {"x": X}, COTANGENT[:, :, :2])
    assert_alike(found, expected(quantize, X, np.float32(0), COTANGENT[:, :, :2]))


def test_two_scales():
    """What is quantized by one scale and read by another is its value times their ratio."""
    model = parsed("""g (float[A, B, C] x) => (float[A, B, C] y)
    <float fine = {0.02}, float coarse = {0.06}, uint8 zero = {128}> {
        q = QuantizeLinear (x, fine, zero)
        y = DequantizeLinear (q, coarse, zero)
    }""")

    def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(x, 0.02, 128, 0, 255) * 3

    assert_alike(gradients(model, ["x"], {"x": X}), expected(quantize, X, np.float32(0)))


DYNAMIC_PRODUCT = """g (float[2, 3, 4] x) => (float[2, 3, 5] y)
<int8[4, 5] w = {1, -2, 3, -4, 5, -6, 7, -8, 9, -10, 11, -12, 13, -14, 15, -16, 17, -18, 19, -20}, int8 w_zero = {2},
 float w_scale = {0.1}> {
    q, scale, zero = DynamicQuantizeLinear (x)
    product = MatMulInteger (q, w, zero, w_zero)
    wide = Cast <to = 1> (product)
    both = Mul (scale, w_scale)
    y = Mul (wide, both)
}"""


def test_a_product_of_integers_whose_scale_is_chosen_at_run_time():
    """The gradient is that of the product with the weights that the integers stand for."""
    model = parsed(DYNAMIC_PRODUCT)
    integers = np.arange(1, 21) * np.tile([1, -1], 10)
    weight = torch.tensor(((integers - 2) * 0.1).reshape(4, 5).astype(np.float32))
    cotangent = GENERATOR.normal(size=(2, 3, 5)).astype(np.float32)
    step = (max(X.max(), 0) - min(X.min(), 0)) / 255
    zero = int(np.round(-min(X.min(), 0) / step))

    def product(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(x, float(step), zero, 0, 255) @ weight

    assert_alike(gradients(model, ["x"], {"x": X}, cotangent), expected(product, X, np.float32(0), cotangent))


def test_a_convolution_of_integers():
    model = parsed("""g (float[N, 3, 4] x) => (float[N, 2, 4] y)
    <uint8[2, 3, 1] w = {1, 2, 3, 4, 5, 6}, uint8[2] w_zero = {2, 3}, float scale = {0.05}, uint8 zero = {100}> {
        q = QuantizeLinear (x, scale, zero)
        product = ConvInteger (q, w, zero, w_zero)
        wide = Cast <to = 1> (product)
        y = Mul (wide, scale)
    }""")
    weight = torch.tensor([[[-1.0], [0], [1]], [[1], [2], [3]]])

    def product(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv1d(torch.fake_quantize_per_tensor_affine(x, 0.05, 100, 0, 255), weight)

    cotangent = COTANGENT[:, :2]
    assert_alike(gradients(model, ["x"], {"x": X}, cotangent), expected(product, X, np.float32(0), cotangent))


def test_an_operator_that_computes_with_the_integers_in_its_own_way_is_named():
    model = parsed("""g (float[N, 2] x) => (float[N, 2] y) <float scale = {0.1}, uint8 zero = {0}> {
        q = QuantizeLinear (x, scale, zero)
        r = com.microsoft.QOrderedGelu (q, scale, scale)
        y = DequantizeLinear (r, scale, zero)
    }""")
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("r", onnx.TensorProto.UINT8, ["N", 2]))
    message = (
        r"^com\.microsoft\.QOrderedGelu '\S*' \(output 'r'\) computes with the integers of a quantization, which no gradient "
        r"passes there, and 'x' is differentiated through it\. Export the model with QuantizeLinear and DequantizeLinear around "
    )
    with pytest.raises(GradientError, match=message):
        burnish.grad(model, wrt=["x"])


def test_what_only_counts_or_compares_stops_no_gradient():
    model = parsed("""g (float[N, 2] x) => (float[N, 2] y) <float scale = {0.1}, uint8 zero = {100}> {
        q = QuantizeLinear (x, scale, zero)
        s = Shape (q)
        d = DequantizeLinear (q, scale, zero)
        y = Reshape (d, s)
    }""")
    x = np.array([[0.5, -0.25]], np.float32)
    found = gradients(model, ["x"], {"x": x}, np.array([[2, 3]], np.float32))
    np.testing.assert_allclose(found["grad:x"], [[2, 3]])


@pytest.mark.slow
def test_a_quantization_of_unknown_rank_is_named():
    model = parsed("""g (float[N, 2] x, int64[K] shape) => (float[A, B] y) <float[2] scale = {0.1, 0.2}, int8[2] zero = {0, 0}> {
        flat = Reshape (x, shape)
        q = QuantizeLinear <axis = 1> (flat, scale, zero)
        y = DequantizeLinear <axis = 1> (q, scale, zero)
    }""")
    with pytest.raises(GradientError, match=r"^QuantizeLinear .* quantizes along an axis of a value whose rank is not known"):
        burnish.grad(model, wrt=["x"])


def network() -> onnx.ModelProto:
    """Quantized in training, as exporters write it: weights and activations pass both operators."""
    return parsed("""g (float[N, 4] x) => (float[N, 2] y)
    <float[4, 3] first = {0.3, -0.2, 0.5, 0.1, 0.9, -0.7, 0.4, 0.2, -0.5, -0.8, 0.6, 0.3},
     float[3] bias = {0.1, -0.1, 0.2}, float[3, 2] head = {0.5, -0.4, 0.3, 0.8, -0.6, 0.7},
     float[3] columns = {0.01, 0.02, 0.015}, int8[3] zeros = {0, 0, 0}, float step = {0.05}, uint8 middle = {128},
     int8 zero = {0}, float fine = {0.01}> {
        xq = QuantizeLinear (x, step, middle)
        xd = DequantizeLinear (xq, step, middle)
        wq = QuantizeLinear <axis = 1> (first, columns, zeros)
        wd = DequantizeLinear <axis = 1> (wq, columns, zeros)
        p = MatMul (xd, wd)
        b = Add (p, bias)
        r = Relu (b)
        rq = QuantizeLinear (r, step, middle)
        rd = DequantizeLinear (rq, step, middle)
        hq = QuantizeLinear (head, fine, zero)
        hd = DequantizeLinear (hq, fine, zero)
        y = MatMul (rd, hd)
    }""")


class Network(torch.nn.Module):
    """The same in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        for initializer in network().graph.initializer:
            if initializer.name in ("first", "bias", "head"):
                array = torch.tensor(onnx.numpy_helper.to_array(initializer))
                self.register_parameter(initializer.name, torch.nn.Parameter(array))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.fake_quantize_per_tensor_affine(x, 0.05, 128, 0, 255)
        columns, zeros = torch.tensor([0.01, 0.02, 0.015]), torch.zeros(3, dtype=torch.int32)
        first = torch.fake_quantize_per_channel_affine(self.first, columns, zeros, 1, -128, 127)
        hidden = torch.relu(x @ first + self.bias)
        hidden = torch.fake_quantize_per_tensor_affine(hidden, 0.05, 128, 0, 255)
        return hidden @ torch.fake_quantize_per_tensor_affine(self.head, 0.01, 0, -128, 127)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "torch"])
def test_quantization_in_training_beside_pytorch(engine, tmp_path):
    """Five steps; the model that is exported keeps both operators."""
    generator = np.random.default_rng(1)
    program = burnish.compile(network(), loss="mse", optimizer=burnish.optim.sgd(lr=0.05))
    assert program.options["trainable"] == ["first", "bias", "head"]
    session = burnish.Session(program, engine=engine)
    module = Network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(5):
        x, targets = (generator.normal(size=(8, extent)).astype(np.float32) for extent in (4, 2))
        loss = torch.nn.functional.mse_loss(module(torch.tensor(x)), torch.tensor(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert session.step({"x": x, "targets": targets})["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(session.state()[f"param/{name}"], parameter.detach().numpy(), rtol=1e-5, atol=1e-6)
    session.export(tmp_path / "tuned.onnx")
    operators = [node.op_type for node in onnx.load(tmp_path / "tuned.onnx").graph.node]
    assert operators.count("QuantizeLinear") == operators.count("DequantizeLinear") == 4
    np.testing.assert_allclose(session.predict({"x": x})["y"], module(torch.tensor(x)).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_weights_that_are_integers_stay_and_are_named():
    model = parsed("""g (float[N, 2] x) => (float[N, 2] y)
    <int8[2, 2] w = {10, 20, 30, 40}, float step = {0.1}, float[2] bias = {0, 0}, float[2, 2] head = {1, 2, 3, 4}> {
        wide = DequantizeLinear (w, step)
        h = MatMul (x, wide)
        b = Add (h, bias)
        y = MatMul (b, head)
    }""")
    with pytest.warns(UntrainedWeightsWarning, match=r"^1 weight stays as it is: .*'w': integers, as the model is quantized"):
        program = burnish.compile(model, loss="mse")
    assert program.options["trainable"] == ["bias", "head"]


def test_a_model_quantized_after_training_trains_what_it_has_in_floating_point():
    """The bias before the second quantization moves; the integers of the matrices do not."""
    model = parsed("""g (float[N, 2] x) => (float[N, 2] y)
    <int8[2, 2] w = {10, 20, 30, 40}, int8[2, 2] v = {5, -20, 30, 10}, float step = {0.1}, float[2] bias = {0, 0},
     uint8 zero = {128}> {
        wide = DequantizeLinear (w, step)
        h = MatMul (x, wide)
        b = Add (h, bias)
        q = QuantizeLinear (b, step, zero)
        d = DequantizeLinear (q, step, zero)
        last = DequantizeLinear (v, step)
        y = MatMul (d, last)
    }""")
    with pytest.warns(UntrainedWeightsWarning, match="2 weights stay as they are"):
        program = burnish.compile(model, loss="mse")
    session = burnish.Session(program, engine="onnxruntime")
    x = np.ones((4, 2), np.float32)
    session.step({"x": x, "targets": x})
    assert np.all(session.state()["param/bias"] != 0)


@pytest.mark.parametrize(("taken", "wanted"), [(True, [[1.0, -4.0], [0.0, 24.0]]), (False, [[-1.0, -2.0], [0.0, -4.0]])])
def test_branches_that_quantize_and_read_integers(taken, wanted):
    """One branch reads the integers of the graph around it and squares what they stand for, the other quantizes by itself."""
    model = parsed("""g (float[N, 2] x, bool c) => (float[N, 2] y) <float s = {0.1}, int8 z = {0}> {
        q = QuantizeLinear (x, s, z)
        y = If (c) <then_branch = a () => (float[N, 2] o) { r = DequantizeLinear (q, s, z) o = Mul (r, r) },
                    else_branch = b () => (float[N, 2] p) {
                        h = Neg (x) t = QuantizeLinear (h, s, z) p = DequantizeLinear (t, s, z) }>
    }""")
    x, cotangent = np.array([[0.52, -1.04], [100, 3]], np.float32), np.array([[1, 2], [3, 4]], np.float32)
    found = gradients(model, ["x"], {"x": x, "c": np.asarray(taken)}, cotangent)
    np.testing.assert_allclose(found["grad:x"], wanted, rtol=1e-5)


def test_a_scale_that_is_returned_has_a_gradient():
    """Equal extremes share it; what is on the side of 0 that has no element has none."""
    model = parsed("""g (float[4] x) => (float scale) {
        q, scale, zero = DynamicQuantizeLinear (x)
    }""")
    graph = burnish.grad(model, ["x"], of="scale")
    cases = {(2, -1, 2, 0.5): [0.5, -1, 0.5, 0], (1, 3, 2, 1): [0, 1, 0, 0], (-1, -3, -2, -1): [0, -1, 0, 0]}
    for x, expected_parts in cases.items():
        found = onnxruntime_outputs(graph, {"x": np.array(x, np.float32)})
        np.testing.assert_allclose(found["grad:x"], np.array(expected_parts) / 255, rtol=1e-6)
