"""The engine's own kernels, and the fusion that puts them into graphs, against float64 and against the graphs without them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.fusion import FUSED, fuse
from burnish.engines.torch.runtime import autograd_node  # noqa: F401  # declares its kernel; wrapped modules import it
from burnish.engines.torch.translate.rules import translated_operators
from burnish.errors import KernelWarning
from burnish.graph import BURNISH_DOMAIN
from burnish.kernels.elementwise.fusion import fuse_elementwise
from burnish.models import residual_network
from oracles.combinations import spread
from oracles.kernel_graphs import kernel_graphs

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the fused kernels")
ACTIVATIONS = {0: lambda y: y, 1: torch.relu, 2: lambda y: torch.clamp(y, 0, 6)}


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@needs_kernels
@pytest.mark.parametrize("mean", [0.0, 100.0, 1e4])
@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(5, 7, 6, 9), (33, 12), (2, 64, 8, 8), (4, 1, 3, 3)])
def test_batch_normalization_keeps_its_digits(shape, residual, activation, mean):
    generator = torch.Generator().manual_seed(hash((shape, residual, activation)) % 1000)
    x = torch.randn(shape, generator=generator) + mean
    added = torch.randn(shape, generator=generator) if residual else None
    dy = torch.randn(shape, generator=generator)
    scale, bias = torch.rand(shape[1], generator=generator) + 0.5, torch.randn(shape[1], generator=generator)
    exact = [tensor.double().requires_grad_() for tensor in (x, scale, bias, *([added] if residual else []))]
    before = functional.batch_norm(exact[0], None, None, exact[1], exact[2], training=True, eps=1e-5)
    before = before + exact[3] if residual else before
    expected = ACTIVATIONS[activation](before)
    y, batch_mean, inverse_std, variance, saved = torch.ops.burnish.batch_norm_training(
        x, scale, bias, added, 1e-5, activation, 6.0
    )
    # Where a value lies within rounding of a kink, the two may fall on different sides of it: no such draw is used.
    kinks = torch.stack([before.detach().abs().min(), (before.detach() - 6).abs().min()])
    assert kinks.min() > 1e-6
    (expected * dy.double()).sum().backward()
    assert relative(y, expected.detach()) < 2e-7
    axes = [axis for axis in range(len(shape)) if axis != 1]
    torch.testing.assert_close(batch_mean.double(), exact[0].detach().mean(axes), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(variance.double(), exact[0].detach().var(axes, correction=0), rtol=1e-6, atol=0)
    # Without an addition the kernel finds y again from x.
    kept = y if activation and residual else None
    keeps = residual and activation > 0
    results = torch.ops.burnish.batch_norm_gradient(dy, x, scale, inverse_std, saved, kept, None, bias, activation, 6.0, keeps)
    assert relative(results[0], exact[0].grad) < 5e-7
    # The sums of a channel may cancel: their errors are those of their terms.
    flow = dy.double().abs()
    normalized = functional.batch_norm(exact[0].detach(), None, None, training=True, eps=1e-5).abs()
    for found, tensor, terms in zip(results[1:], exact[1:3], (flow * normalized, flow), strict=False):
        assert ((found.double() - tensor.grad).abs() / terms.sum(axes)).max() < 2e-7
    if residual and activation:
        torch.testing.assert_close(results[3].double(), exact[3].grad, rtol=0, atol=0)


def fused_graph(program: burnish.Program, graph: str = "step") -> ir.Model:
    return fuse(kernel_graphs(program, translated_operators(BURNISH_DOMAIN) | FUSED)[graph], kernels=True)


def count(model: ir.Model, op_type: str) -> int:
    return sum(node.op_type == op_type for node in model.graph)


@needs_kernels
def test_gradients_of_two_branches_are_added_up():
    x, one, other = (torch.randn(3, 8, 5, 5) for _ in range(3))
    scale, bias = torch.rand(8) + 0.5, torch.randn(8)
    y, _, inverse_std, _, saved = torch.ops.burnish.batch_norm_training(x, scale, bias, None, 1e-5, 1, 0.0)
    apart = torch.ops.burnish.batch_norm_gradient(one, x, scale, inverse_std, saved, y, other, None, 1, 0.0, True)
    summed = torch.ops.burnish.batch_norm_gradient(one + other, x, scale, inverse_std, saved, y, None, None, 1, 0.0, True)
    for found, expected in zip(apart, summed, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.slow
@needs_kernels
def test_a_residual_network_is_fused_whole():
    model = fused_graph(burnish.compile(residual_network(), optimizer=burnish.optim.sgd(lr=0.1, momentum=0.9)))
    layers = count(model, "FusedBatchNorm")
    assert layers == count(model, "FusedBatchNormGrad") > 3
    activations = [node.attributes["activation"].as_int() for node in model.graph if node.op_type == "FusedBatchNorm"]
    assert activations.count(1) >= layers - 2
    assert any(node.op_type == "FusedBatchNorm" and len(node.inputs) > 3 and node.inputs[3] for node in model.graph)
    assert count(model, "Relu") == 0
    assert count(model, "ReluGrad") == 0


@pytest.mark.slow
@needs_kernels
def test_a_residual_network_in_bfloat16_is_fused_whole_without_its_casts():
    program = burnish.compile(residual_network(), optimizer="sgd", precision="bfloat16")
    model = fused_graph(program)
    layers = [node for node in model.graph if node.op_type in ("FusedBatchNorm", "FusedBatchNormGrad")]
    assert len(layers) == 2 * count(model, "FusedBatchNorm") > 6
    for node in layers:
        is_gradient = node.op_type == "FusedBatchNormGrad"
        x = node.inputs[int(is_gradient)]
        assert {x.dtype, node.inputs[0].dtype, node.outputs[0].dtype} == {ir.DataType.BFLOAT16}
        assert x.producer().op_type == "Conv"
        assert not is_gradient or all(user.op_type.startswith("Conv") for user, _ in node.outputs[0].uses())
    assert count(model, "Relu") == count(model, "ReluGrad") == 0


@needs_kernels
@pytest.mark.slow
def test_fused_and_unfused_programs_in_bfloat16_train_alike():
    """Fused layers round less often: both are as far from float32 as the rounding of bfloat16 takes them."""
    generator = np.random.default_rng(0)
    batches = [
        {"x": generator.normal(size=(32, 1, 8, 8)).astype(np.float32), "labels": generator.integers(0, 10, 32)} for _ in range(3)
    ]
    gradients = []
    for precision, kind in (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "regions")):
        program = burnish.compile(residual_network(), optimizer=burnish.optim.sgd(lr=1.0), precision=precision)
        session = burnish.Session(program, TorchEngine(compile=kind), threads=2)
        start, steps = session.state(), []
        for batch in batches:
            session.load_state(start)
            session.step(batch)
            after = session.state()
            steps.append({name: start[name] - after[name] for name in start if name.startswith("param/")})
        gradients.append(steps)
    for name in gradients[0][0]:
        exact, plain, fused = (np.concatenate([batch[name].ravel() for batch in found]) for found in gradients)
        error = np.linalg.norm(fused - exact) / np.linalg.norm(exact)
        assert error <= max(1.5 * np.linalg.norm(plain - exact) / np.linalg.norm(exact), 2.0**-8), name


@needs_kernels
@spread("extents", [(9,), (3, 5, 4)], test=1)
def test_batch_normalization_of_signals_and_volumes_keeps_its_statistics_in_float32(extents):
    """The kernels take them as images, and read and write bfloat16 in the place of the casts around them."""
    sizes = ", ".join(map(str, extents))
    kernel = ", ".join("1" for _ in extents)
    values = {"w": 12, "scale": 6, "bias": 6, "mean": 6, "variance": 6}
    shapes = {name: str(count) for name, count in values.items()} | {"w": f"6, 2, {kernel}"}
    generator = np.random.default_rng(0)
    weights = ", ".join(
        f"float[{shapes[name]}] {name} = {{{', '.join(map(str, generator.uniform(0.5, 1.5, count).round(3)))}}}"
        for name, count in values.items()
    )
    source = onnx.parser.parse_model(f"""
<ir_version: 10, opset_import: ["": 22]>
network (float[batch, 2, {sizes}] x) => (float[batch, features] y)
<{weights}> {{
    t = Conv (x, w)
    n = BatchNormalization (t, scale, bias, mean, variance)
    r = Relu (n)
    y = Flatten (r)
}}""")
    program = burnish.compile(source, loss="mse", optimizer=burnish.optim.sgd(lr=0.1), precision="bfloat16")
    model = fused_graph(program)
    assert count(model, "FusedBatchNorm") == count(model, "FusedBatchNormGrad") == 1
    batch = {
        "x": generator.normal(3.0, 1.0, (16, 2, *extents)).astype(np.float32),
        "targets": generator.normal(size=(16, 6 * int(np.prod(extents)))).astype(np.float32),
    }
    states = []
    for kind in ("none", "regions"):
        session = burnish.Session(program, TorchEngine(compile=kind))
        session.step(batch)
        states.append(session.state())
    for name, expected in states[0].items():
        np.testing.assert_allclose(states[1][name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lion", "rmsprop"])
def test_fused_and_unfused_programs_train_alike(optimizer):
    program = burnish.compile(residual_network(), optimizer=optimizer)
    generator = np.random.default_rng(0)
    sessions = [burnish.Session(program, TorchEngine(compile=kind), threads=1) for kind in ("regions", "none")]
    for size in (6, 6, 3):
        batch = {"x": generator.normal(size=(size, 1, 8, 8)).astype(np.float32), "labels": generator.integers(0, 10, size)}
        losses = [session.step(batch, lr=1e-3)["loss"] for session in sessions]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    one, other = (session.state() for session in sessions)
    for name, array in one.items():
        if name.startswith(("param/", "stat/")):
            np.testing.assert_allclose(array, other[name], rtol=2e-3, atol=2e-4, err_msg=name)


@needs_kernels
@pytest.mark.slow
def test_the_same_run_twice_is_bitwise_the_same():
    program = burnish.compile(residual_network(), optimizer="adam")
    generator = np.random.default_rng(0)
    batch = {"x": generator.normal(size=(16, 1, 8, 8)).astype(np.float32), "labels": generator.integers(0, 10, 16)}
    states = []
    for _ in range(2):
        session = burnish.Session(program, "torch", threads=2)
        for _ in range(4):
            session.step(batch)
        states.append(session.state())
    for name, array in states[0].items():
        assert array.tobytes() == states[1][name].tobytes(), name


CHAIN = """
<ir_version: 10, opset_import: ["": 18]>
chain (float[batch, 40, 30] a, float[batch, 40, 30] b, float s, float[batch, 40, 30] c)
    => (float[batch, 40, 30] y, float[batch, 40, 30] z) {
    half = Constant <value_float = 0.5> ()
    p = Mul (a, s)
    q = Add (p, b)
    z = Sub (q, half)
    r = Abs (z)
    t = Sqrt (r)
    soft = Softmax <axis = -1> (t)
    u = Div (soft, c)
    v = Max (u, q)
    n = Neg (v)
    w = Min (n, half)
    k = Relu (w)
    y = Add (k, u)
}"""


@needs_kernels
def test_chains_are_one_pass_and_give_the_same():
    model = ir.from_proto(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(CHAIN)))
    plain = model.clone()
    fuse_elementwise(model.graph)
    kinds = [node.op_type for node in model.graph if node.op_type not in ("Constant", "Identity")]
    assert kinds == ["FusedElementwise", "Softmax", "FusedElementwise"]
    generator = np.random.default_rng(3)
    inputs = {name: generator.normal(size=(5, 40, 30)).astype(np.float32) + 2 for name in "abc"}
    inputs["s"] = np.float32(-1.5)
    found, expected = (burnish.engines.get("torch").run(graph, inputs) for graph in (model, plain))
    np.testing.assert_array_equal(found["z"], expected["z"])
    # PyTorch's own root is not always correctly rounded.
    np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-5, atol=1e-6)


@needs_kernels
def test_layouts_may_differ():
    a = torch.randn(3, 4, 5, 6).contiguous(memory_format=torch.channels_last)
    b = torch.randn(3, 4, 5, 6)
    c = torch.randn(6, 5, 4, 3).permute(3, 2, 1, 0)
    (found,) = torch.ops.burnish.elementwise([a, b, c], [2.0], [0, 5, 0, 1, -1, 2, 6, 5, 2, -1, 2, 4, 6, 3, -1], [6])
    torch.testing.assert_close(found, (a + b) * c * 2.0, rtol=0, atol=0)


def forget_kernels():
    for remembered in (kernels._load, kernels._warn, kernels.find_operator):
        remembered.cache_clear()
    kernels._builds.clear()


def told_of_kernels(recwarn):
    return [str(warning.message) for warning in recwarn if warning.category is KernelWarning]


@pytest.mark.slow
def test_without_kernels_the_engine_goes_on(monkeypatch, recwarn):
    monkeypatch.setattr(kernels, "_build", lambda name: (_ for _ in ()).throw(RuntimeError("no compiler here")))
    monkeypatch.delenv("BURNISH_KERNELS", raising=False)
    forget_kernels()
    try:
        program = burnish.compile(residual_network())
        session = burnish.Session(program, "torch", threads=1)
        batch = {"x": np.ones((4, 1, 8, 8), np.float32), "labels": np.arange(4)}
        loss = session.step(batch)["loss"]
        assert loss == pytest.approx(burnish.Session(program, threads=1).step(batch)["loss"], rel=1e-5)
        (told,) = told_of_kernels(recwarn)
        assert "cannot be used: no compiler here. PyTorch's own operators run instead" in told
        assert session.describe()["kernels"] is None
        assert session.describe()["kernels_reason"] == "no compiler here"
    finally:
        forget_kernels()


def test_kernels_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("BURNISH_KERNELS", "off")
    assert not kernels.available()
    assert not kernels.expected()


def test_kernels_that_no_graph_calls_are_not_built(monkeypatch):
    asked = []
    monkeypatch.setattr(kernels, "_build", lambda name: asked.append(name) or (_ for _ in ()).throw(RuntimeError("not now")))
    monkeypatch.delenv("BURNISH_KERNELS", raising=False)
    monkeypatch.setattr(kernels, "find_compiler", lambda: "c++")
    forget_kernels()
    try:
        assert kernels.expected()
        for built in kernels._requested(*kernels.EARLY):
            built.exception(timeout=600)
        assert sorted(asked) == sorted(kernels.EARLY)
        assert not kernels.available("depthwise")
        assert sorted(asked) == sorted([*kernels.EARLY, "depthwise"])
    finally:
        forget_kernels()


def test_every_kernel_has_its_schemas():
    assert set(kernels.sources()) == set(kernels.declared_kernels())


def test_a_kernel_is_declared_once():
    with pytest.raises(ValueError, match="the kernel elementwise is declared twice: give one of the two files another name"):
        kernels.declare_kernel("elementwise")


def test_kernels_that_more_programs_call_are_built_first():
    order = kernels.declared_kernels()
    assert set(order[: len(kernels.EARLY)]) == set(kernels.EARLY)
    assert order.index("linear") < order.index("standardize") < order.index("depthwise_bfloat16")


@pytest.mark.slow
@needs_kernels
def test_a_graph_waits_for_the_kernels_that_it_calls():
    program = burnish.compile(residual_network())
    runner = burnish.Session(program, "torch", threads=1)._runner
    module = runner._translate("step", fused=True)
    assert (
        {"batch_norm", "elementwise"} <= kernels.called(module) <= set(kernels.declared_kernels()) - {"depthwise", "standardize"}
    )


@pytest.mark.slow
@needs_kernels
def test_a_kernel_that_fails_leaves_graphs_that_call_it_to_pytorch(monkeypatch, recwarn):
    build = kernels._build

    def failing(name):
        if name == "batch_norm":
            raise RuntimeError("refused here")
        return build(name)

    monkeypatch.setattr(kernels, "_build", failing)
    forget_kernels()
    try:
        program = burnish.compile(residual_network())
        batch = {"x": np.random.default_rng(0).normal(size=(4, 1, 8, 8)).astype(np.float32), "labels": np.arange(4)}
        one, other = (burnish.Session(program, engine, threads=1) for engine in ("torch", "onnxruntime"))
        for _ in range(2):
            assert one.step(batch)["loss"] == pytest.approx(other.step(batch)["loss"], rel=1e-5)
        assert not one._runner._updates
        (told,) = told_of_kernels(recwarn)
        assert "refused here" in told
    finally:
        forget_kernels()
