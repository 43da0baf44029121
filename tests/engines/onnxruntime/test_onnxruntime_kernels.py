"""Kernels of burnish's own on ONNX Runtime: what graphs become, and that they train as standard operators do."""

from __future__ import annotations

import subprocess
import sys
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
from burnish.kernels import building
from burnish.kernels.compiling import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler for the engine's kernels")

RELU = """
<ir_version: 10, opset_import: ["" : 21]>
layer (float["N", 6] x) => (float["N", 3] y)
<float[6, 40] w1, float[40] b1, float[40, 3] w2, float[3] b2> {
    h = MatMul(x, w1)
    a = Add(h, b1)
    r = Relu(a)
    p = MatMul(r, w2)
    y = Add(p, b2)
}
"""


def with_drawn_weights(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    random = np.random.default_rng(0)
    for value in model.graph.value_info:
        shape = [extent.dim_value for extent in value.type.tensor_type.shape.dim]
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(random.normal(0, 0.5, shape)), value.name))
    del model.graph.value_info[:]
    return model


def called(model: ir.Model) -> Counter[str]:
    """How many nodes of burnish's own a graph has once it calls kernels."""
    copy = model.clone()
    kernels.call_kernels(copy)
    return Counter(node.op_type for node in copy.graph if node.domain == "burnish")


def run(text: str, feeds: dict[str, np.ndarray], **options: bool) -> dict[str, np.ndarray]:
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), strict_mode=True)
    return dict(OnnxRuntimeEngine(**options).load(ir.from_proto(model), threads=2)(feeds))


def trained(program, batches, **options):
    session = burnish.Session(program, engine=OnnxRuntimeEngine(**options), threads=2)
    return [session.step(batch)["loss"] for batch in batches], session.state()


@pytest.mark.slow
def test_arithmetic_comes_to_the_bits_of_standard_operators():
    """Sums, products, quotients and roots are rounded alike, whatever the sizes of batches, and however updates are joined."""
    optimizer = optim.adam(lr=0.01, weight_decay=0.01)
    program = burnish.compile(with_drawn_weights(RELU), loss="mse", optimizer=optimizer)
    assert called(program.step)["FusedElementwiseGroups"] == 1
    random = np.random.default_rng(1)
    batches = [
        {"x": random.normal(size=(size, 6)).astype(np.float32), "targets": random.normal(size=(size, 3)).astype(np.float32)}
        for size in (64, 1, 700)
    ]
    (losses, state), (expected_losses, expected) = (trained(program, batches, kernels=own) for own in (True, False))
    assert losses == expected_losses
    for name, array in expected.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)


@pytest.mark.slow
def test_a_network_with_batch_normalization_trains_as_without():
    program = burnish.compile(
        burnish.models.residual_network(), loss="cross_entropy", optimizer=optim.sgd(lr=0.05, momentum=0.9, weight_decay=1e-4)
    )
    random = np.random.default_rng(2)
    entry = program.signature["step"].inputs_of(burnish.program.Role.DATA)[0]
    shape = [extent for extent in entry.extents if isinstance(extent, int)]
    batches = [
        {entry.name: random.normal(size=(8, *shape)).astype(np.float32), "labels": random.integers(0, 10, 8)} for _ in range(4)
    ]
    (losses, state), (expected_losses, expected) = (trained(program, batches, kernels=own) for own in (True, False))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for name, array in expected.items():
        if array.dtype == np.float32:
            assert np.linalg.norm(state[name] - array) <= 2e-5 * np.linalg.norm(array) + 1e-6, name


NORMALIZED = """
<ir_version: 10, opset_import: ["" : 21]>
g (float["N", 8, 4, 4] x) => (float["N", 8] y)
<float[8] scale, float[8] bias, float[8] mean, float[8] variance>
{
    normalized = BatchNormalization(x, scale, bias, mean, variance)
    axes = Constant<value_ints = [2, 3]>()
    y = ReduceMean<keepdims = 0>(normalized, axes)
}
"""


@pytest.mark.parametrize("has_kernels", [False, True])
@pytest.mark.parametrize("size", [1e15, 1e30])
def test_a_variance_that_overflows_is_normalized_as_by_pytorch(size, has_kernels):
    """The inverse of an infinite deviation is zero: the loss is that of the biases, and no weight moves."""
    bias, random = np.linspace(-1, 1, 8, dtype=np.float32), np.random.default_rng(3)
    model = onnx.parser.parse_model(NORMALIZED)
    zeros, ones = np.zeros(8, np.float32), np.ones(8, np.float32)
    for name, array in {"scale": ones, "bias": bias, "mean": zeros, "variance": ones}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    x, labels = random.normal(size=(6, 8, 4, 4)).astype(np.float32) * np.float32(size), np.arange(6)
    program = burnish.compile(model, loss="cross_entropy", optimizer=optim.sgd(lr=1.0))
    session = burnish.Session(program, engine=OnnxRuntimeEngine(kernels=has_kernels), threads=2)
    loss, state = session.step({"x": x, "labels": labels})["loss"], session.state()

    layer = torch.nn.BatchNorm2d(8)
    layer.bias.data.copy_(torch.from_numpy(bias))
    expected = torch.nn.functional.cross_entropy(layer(torch.from_numpy(x)).mean((2, 3)), torch.from_numpy(labels))
    expected.backward()
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-6)
    np.testing.assert_allclose(1 - state["param/scale"], layer.weight.grad, atol=1e-6)
    np.testing.assert_allclose(bias - state["param/bias"], layer.bias.grad, atol=1e-6)
    np.testing.assert_array_equal(np.isinf(state["stat/variance"]), np.isinf(layer.running_var.numpy()))


@pytest.mark.slow
def test_a_variance_that_overflows_with_channels_last():
    """Images of 1e30 where convolutions are kernels too: the loss and the next state are those of standard operators."""
    program = burnish.compile(burnish.models.residual_network(), loss="cross_entropy", optimizer=optim.sgd(lr=0.05))
    entry = program.signature["step"].inputs_of(burnish.program.Role.DATA)[0]
    shape = [extent for extent in entry.extents if isinstance(extent, int)]
    x = np.random.default_rng(3).normal(size=(4, *shape)).astype(np.float32) * np.float32(1e30)
    losses, states = [], []
    for has_kernels in (False, True):
        session = burnish.Session(program, engine=OnnxRuntimeEngine(kernels=has_kernels), threads=2)
        losses.append(session.step({entry.name: x, "labels": np.arange(4)})["loss"])
        states.append(session.state())
    assert np.isfinite(losses[0])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
    for name, array in states[0].items():
        np.testing.assert_allclose(states[1][name], array, rtol=1e-5, atol=1e-6, err_msg=name)


BROADCAST = """
<ir_version: 10, opset_import: ["" : 21]>
g (float["N", 7, "H", "W"] x, float[7, 1, 1] scale, float["N", 1, "H", "W"] gate, float s) =>
  (float["N", 7, "H", "W"] y, bool["N", 7, "H", "W"] positive, float["N", 7, "H", "W"] e)
{
    a = Mul(x, scale)
    b = Add(a, gate)
    zero = Constant<value = float {0}>()
    positive = Greater(b, zero)
    c = Where(positive, b, x)
    y = Mul(c, s)
    d = Gelu(b)
    e = Sigmoid(d)
}
"""


@pytest.mark.parametrize("shape", [(2, 7, 13, 5), (1, 7, 1, 1), (3, 7, 64, 64), (0, 7, 3, 3)])
def test_operands_that_repeat_and_truth_values(shape):
    random = np.random.default_rng(3)
    batch, _, height, width = shape
    feeds = {
        "x": random.normal(size=shape).astype(np.float32),
        "scale": random.normal(size=(7, 1, 1)).astype(np.float32),
        "gate": random.normal(size=(batch, 1, height, width)).astype(np.float32),
        "s": np.array(1.5, np.float32),
    }
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(BROADCAST), strict_mode=True)
    assert called(ir.from_proto(model))["FusedElementwise"] >= 1
    actual, expected = run(BROADCAST, feeds, kernels=True), run(BROADCAST, feeds)
    for name in ("y", "positive"):
        np.testing.assert_array_equal(actual[name], expected[name])
    np.testing.assert_allclose(actual["e"], expected["e"], rtol=1e-6)


def test_the_sum_for_the_gradient_of_a_bias_is_added_up_in_the_same_pass():
    text = """
<ir_version: 10, opset_import: ["" : 21]>
g (float["N", 40] dy, float["N", 40] x) => (float[40, "N"] dx, float[40] db)
{
    scaled = Mul(dy, x)
    t = Tanh(scaled)
    dx = Transpose(t)
    axes = Constant<value = int64[1] {0}>()
    db = ReduceSum<keepdims = 0>(scaled, axes)
}
"""
    random = np.random.default_rng(4)
    feeds = {name: random.normal(size=(1000, 40)).astype(np.float32) for name in ("dy", "x")}
    model = onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text), strict_mode=True)
    assert called(ir.from_proto(model)) == {"FusedElementwiseSums": 1}
    actual = run(text, feeds, kernels=True)
    exact = feeds["dy"].astype(np.float64) * feeds["x"]
    np.testing.assert_allclose(actual["db"], exact.sum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(actual["dx"], np.tanh(exact.T), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_the_same_bits_come_again():
    program = burnish.compile(with_drawn_weights(RELU), loss="cross_entropy", optimizer=optim.adam(lr=0.01))
    random = np.random.default_rng(5)
    batches = [{"x": random.normal(size=(300, 6)).astype(np.float32), "labels": random.integers(0, 3, 300)} for _ in range(3)]
    (_, first), (_, second) = (trained(program, batches, kernels=True) for _ in range(2))
    for name, array in first.items():
        np.testing.assert_array_equal(second[name], array, err_msg=name)


@pytest.mark.slow
def test_no_pytorch_is_loaded():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from burnish.engines.onnxruntime import OnnxRuntimeEngine; OnnxRuntimeEngine(kernels=True);"
            "assert 'torch' not in sys.modules",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path))
    monkeypatch.setattr(building, "find_installed", lambda *_, **__: None)
    monkeypatch.setattr(building, "find_compiler", lambda: None)
    with pytest.raises(EngineError, match=r"could not be built \(there is no C\+\+ compiler.*kernels=False goes without"):
        OnnxRuntimeEngine(kernels=True)


def test_kernels_can_be_switched_off_for_a_process(monkeypatch):
    monkeypatch.setenv("BURNISH_KERNELS", "off")
    assert OnnxRuntimeEngine(kernels=True).kernels is None


def test_kernels_that_are_built_are_the_default():
    built = OnnxRuntimeEngine(kernels=True)
    engine = OnnxRuntimeEngine()
    assert engine.kernels == built.kernels
    assert engine.target.kernels == {operator.name for operator in kernels.OPERATORS}
    for options in ({"kernels": False}, {"optimization": "none"}, {"providers": ["AzureExecutionProvider"]}):
        without = OnnxRuntimeEngine(**options)
        assert without.kernels is None
        assert not without.target.kernels
    assert OnnxRuntimeEngine(optimization="none", kernels=True).kernels == built.kernels


def test_what_is_not_built_is_not_built_unasked(monkeypatch, tmp_path):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path))
    monkeypatch.setattr(building, "find_installed", lambda *_, **__: None)
    assert OnnxRuntimeEngine().kernels is None
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.slow
def test_checkpoints_pass_between_sessions_with_kernels_and_without(tmp_path):
    program = burnish.compile(burnish.models.residual_network(width=4, blocks=(1,)), optimizer=optim.adam(lr=0.01))
    batch = {"x": np.random.default_rng(6).normal(size=(4, 1, 8, 8)).astype(np.float32), "labels": np.arange(4)}
    sessions = [burnish.Session(program, engine=OnnxRuntimeEngine(kernels=own), threads=1) for own in (True, False)]
    for place, session in enumerate(sessions):
        session.step(batch)
        session.save_checkpoint(tmp_path / f"{place}.safetensors")
    states = [session.state() for session in sessions]
    for place, session in enumerate(sessions):
        session.restore(tmp_path / f"{1 - place}.safetensors")
        for name, array in session.state().items():
            np.testing.assert_array_equal(array, states[1 - place][name], err_msg=name)
    losses = [session.step(batch)["loss"] for session in sessions]
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_outputs_that_kernels_compute_keep_their_names():
    """The gradients of scale and bias are outputs of the graph itself, which a session finds by name."""
    program = burnish.compile(burnish.models.residual_network(width=4, blocks=(1,)), loss="cross_entropy")
    model = program.semantic["grad"].clone()
    names = [value.name for value in model.graph.outputs]
    kernels.call_kernels(model)
    assert [value.name for value in model.graph.outputs] == names
    assert Counter(node.op_type for node in model.graph)["FusedBatchNormGrad"] == 3


def test_what_a_kernel_refuses_is_an_error_of_the_run():
    text = """
<ir_version: 10, opset_import: ["" : 21, "burnish" : 1]>
g (float["N"] x) => (float["N"] y)
{ y = burnish.FusedElementwise<constants = [0.0], constant_count = 0, program = [99, 1, 0, -1, -1], dtypes = [1]>(x) }
"""
    engine = OnnxRuntimeEngine(kernels=True)
    run_model = engine.load(ir.from_proto(onnx.parser.parse_model(text)), threads=2)
    for size in (3, 100_000):  # on the caller's thread, and on several
        with pytest.raises(EngineError, match="no operation 99"):
            run_model({"x": np.ones(size, np.float32)})


BRANCH = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[40, 50] x, bool given) => (float[40, 50] y)
{
    a = Mul(x, x)
    c = If(given) <
        then_branch = yes () => (float[40, 50] t) { one = Exp(a) two = Neg(one) t = Tanh(two) },
        else_branch = no () => (float[40, 50] f) { f = Sin(a) }
    >
    d = Add(a, c)
    y = Sqrt(d)
}
"""


@pytest.mark.parametrize("given", [True, False])
def test_a_branch_that_reads_a_chain_is_not_in_its_middle(given):
    """What follows the branch waits for it, and it for what its body reads: the two are no one chain."""
    x = np.random.default_rng(7).normal(size=(40, 50)).astype(np.float32)
    feeds = {"x": x, "given": np.array(given)}
    a = x.astype(np.float64) ** 2
    with np.errstate(invalid="ignore"):
        expected = np.sqrt(a + (np.tanh(-np.exp(a)) if given else np.sin(a)))
    np.testing.assert_allclose(run(BRANCH, feeds, kernels=True)["y"], expected, rtol=1e-5, atol=1e-4)
