"""Fusion of group and instance normalization with what stands around them; training goes on as on ATen's kernels."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.fusion import FUSED, fuse
from burnish.engines.torch.translate.rules import translated_operators
from burnish.graph import BURNISH_DOMAIN
from oracles.combinations import diagonal, named
from oracles.kernel_graphs import kernel_graphs

needs_kernels = pytest.mark.skipif(not kernels.available("group_norm"), reason="needs the engine's kernels")

INSTANCE = "n = InstanceNormalization (h, scale, bias)"
GROUP = "n = GroupNormalization <num_groups = 4> (h, scale, bias)"
ENDINGS = {
    "none": "a = Identity (n)",
    "relu": "a = Relu (n)",
    "relu6": "a = Clip (n, low, high)",
    "silu": "gate = Sigmoid (n) a = Mul (gate, n)",
    "swish": "a = Swish (n)",
}
ACTIVATIONS = {"none": 0, "relu": 1, "relu6": 2, "silu": 3, "swish": 3}


def network(layer: str, ending: str, rest: str = "y = Conv <pads = [1, 1, 1, 1]> (a, v)", opset: int = 21) -> onnx.ModelProto:
    """A convolution, the layer, an activation and another convolution, over images [batch, 3, 9, 10]."""
    model = onnx.parser.parse_model(f"""
<ir_version: 10, opset_import: ["": {opset}]>
network (float[batch, 3, 9, 10] x) => (float[batch, 3, 9, 10] y)
<float low = {{0}}, float high = {{1.5}}>
{{ h = Conv <pads = [1, 1, 1, 1]> (x, w) {layer} {ending} {rest} }}""")
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 3, 3, 3), "v": (3, 8, 3, 3), "scale": (8,), "bias": (8,)}
    for name, shape in shapes.items():
        values = (rng.normal(size=shape) * 0.4 + (name == "scale")).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    return model


def fused(program: burnish.Program) -> ir.Graph:
    known = translated_operators(BURNISH_DOMAIN) | FUSED
    return fuse(kernel_graphs(program, known)["step"], kernels=True).graph


def check_training(program: burnish.Program) -> None:
    """Three steps of two engines agree."""
    rng = np.random.default_rng(1)
    sessions = [burnish.Session(program, engine, threads=1) for engine in (TorchEngine(), TorchEngine(compile="none"))]
    for size in (4, 4, 1):
        x, targets = (rng.normal(size=(size, 3, 9, 10)).astype(np.float32) for _ in range(2))
        losses = [session.step({"x": x, "targets": targets}, lr=0.1)["loss"] for session in sessions]
        assert losses[0] == pytest.approx(losses[1], rel=2e-6)
    one, other = (session.state() for session in sessions)
    for name in ("param/w", "param/v", "param/scale", "param/bias"):
        np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=2e-6, err_msg=name)


@needs_kernels
@diagonal(("layer", named([INSTANCE, GROUP], ["instance", "group"])), ("ending", list(ENDINGS)), test=3)
def test_a_layer_and_its_activation_are_one_call_and_so_are_their_gradients(layer, ending):
    model = network(layer, ENDINGS[ending], opset=24 if ending == "swish" else 21)
    program = burnish.compile(model, loss="mse", optimizer="sgd")
    nodes = list(fused(program))
    found = Counter(node.op_type for node in nodes)
    assert found["FusedGroupNorm"] == found["FusedGroupNormGrad"] == 1
    assert not {"Sigmoid", "Relu", "Clip", "Silu", "SiluGrad", "ReluGrad", "ClipGrad", "GroupNormTraining"} & set(found)
    for node in nodes:
        if node.op_type.startswith("FusedGroupNorm"):
            assert node.attributes["activation"].as_int() == ACTIVATIONS[ending]
    check_training(program)


@needs_kernels
@pytest.mark.parametrize(
    "rest",
    [
        "b = Add (a, n) y = Conv <pads = [1, 1, 1, 1]> (b, v)",
        "b = Mul (a, gate) y = Conv <pads = [1, 1, 1, 1]> (b, v)",
        "b = Mul (a, h) y = Conv <pads = [1, 1, 1, 1]> (b, v)",
    ],
    ids=["the layer's result", "the gate", "the layer's operand"],
)
def test_what_else_reads_between_layer_and_activation_gets_it(rest):
    check_training(burnish.compile(network(GROUP, ENDINGS["silu"], rest), loss="mse", optimizer="sgd"))


@needs_kernels
def test_a_sum_behind_the_layer_stays():
    rest = "s = Add (n, h) a = Relu (s) y = Conv <pads = [1, 1, 1, 1]> (a, v)"
    program = burnish.compile(network(INSTANCE, "", rest), loss="mse", optimizer="sgd")
    layers = [node for node in fused(program) if node.op_type == "FusedGroupNorm"]
    assert [node.attributes["activation"].as_int() for node in layers] == [0]
    check_training(program)


@pytest.mark.slow
@needs_kernels
def test_a_map_that_is_joined_later_too_sums_up_its_gradients_before_the_kernel():
    """As the skipped maps of a U-Net are: two gradients come to the activation."""
    rest = "p = Relu (a) j = Add (p, a) y = Conv <pads = [1, 1, 1, 1]> (j, v)"
    for ending in ("silu", "relu"):
        program = burnish.compile(network(INSTANCE, ENDINGS[ending], rest), loss="mse", optimizer="sgd")
        layers = [node for node in fused(program) if node.op_type == "FusedGroupNormGrad"]
        assert [node.attributes["activation"].as_int() for node in layers] == [ACTIVATIONS[ending]]
        check_training(program)


@needs_kernels
def test_a_unit_without_a_layer_joins_the_chain_around_it():
    model = network("n = Mul (h, factor)", ENDINGS["silu"])
    for unread in [tensor for tensor in model.graph.initializer if tensor.name in ("scale", "bias")]:
        model.graph.initializer.remove(unread)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(8, 1.5, np.float32).reshape(8, 1, 1), "factor"))
    program = burnish.compile(model, loss="mse", optimizer="sgd")
    found = Counter(node.op_type for node in fused(program))
    assert not {"Silu", "SiluGrad", "Sigmoid"} & set(found)
    rng = np.random.default_rng(3)
    sessions = [burnish.Session(program, engine, threads=1) for engine in (TorchEngine(), "onnxruntime")]
    for _ in range(2):
        x, targets = (rng.normal(size=(2, 3, 9, 10)).astype(np.float32) for _ in range(2))
        losses = [session.step({"x": x, "targets": targets}, lr=0.1)["loss"] for session in sessions]
        assert losses[0] == pytest.approx(losses[1], rel=2e-6)


@needs_kernels
def test_layers_between_casts_of_mixed_precision_compute_in_float32():
    program = burnish.compile(network(INSTANCE, ENDINGS["silu"]), loss="mse", optimizer="sgd", precision="bfloat16")
    found = Counter(node.op_type for node in fused(program))
    assert found["FusedGroupNorm"] == found["FusedGroupNormGrad"] == 1
    sessions = [burnish.Session(program, engine, threads=1) for engine in (TorchEngine(), TorchEngine(compile="none"))]
    rng = np.random.default_rng(4)
    x, targets = (rng.normal(size=(2, 3, 9, 10)).astype(np.float32) for _ in range(2))
    losses = [session.step({"x": x, "targets": targets}, lr=0.1)["loss"] for session in sessions]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
