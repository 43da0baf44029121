"""Networks over signals and volumes take the kernels that those over images take."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings.calls import as_image, from_image
from burnish.engines.torch.fusion import FUSED, fuse
from burnish.engines.torch.translate.rules import translated_operators
from burnish.graph import BURNISH_DOMAIN
from oracles.kernel_graphs import kernel_graphs
from oracles.several_workers import largest_difference, train_alone, train_in_threads

pytestmark = pytest.mark.skipif(not kernels.available(), reason="needs a C++ compiler for the fused kernels")

CHANNELS, CLASSES = 8, 3
RANKS = [1, 3]


def network(rank: int) -> onnx.ModelProto:
    """Two convolutions with batch normalization, a short cut, and both kinds of pooling."""
    generator = np.random.default_rng(0)
    shapes = {
        "w1": (CHANNELS, 2, *[3] * rank),
        "w2": (CHANNELS, CHANNELS, *[3] * rank),
        "dense": (CHANNELS, CLASSES),
        **{f"{name}{index}": (CHANNELS,) for name in ("scale", "bias", "mean", "variance") for index in (1, 2)},
    }

    def declared(name: str, shape: tuple[int, ...]) -> str:
        values = generator.uniform(0.5, 1.5, shape) if len(shape) == 1 else generator.normal(size=shape) / 4
        return f"float[{', '.join(map(str, shape))}] {name} = {{{', '.join(map(str, values.ravel().round(3)))}}}"

    ones, twos = [1] * (2 * rank), [2] * rank
    axes = list(range(2, rank + 2))
    return onnx.parser.parse_model(f"""
<ir_version: 10, opset_import: ["": 22]>
network (float[batch, 2, {", ".join(["8"] * rank)}] x) => (float[batch, {CLASSES}] logits)
<{", ".join(declared(*item) for item in shapes.items())}, int64[{rank}] axes = {{{", ".join(map(str, axes))}}}> {{
    c1 = Conv <pads = {ones}> (x, w1)
    n1 = BatchNormalization (c1, scale1, bias1, mean1, variance1)
    r1 = Relu (n1)
    p1 = MaxPool <kernel_shape = {twos}, strides = {twos}> (r1)
    c2 = Conv <pads = {ones}> (p1, w2)
    n2 = BatchNormalization (c2, scale2, bias2, mean2, variance2)
    s2 = Add (n2, p1)
    r2 = Relu (s2)
    p2 = AveragePool <kernel_shape = {twos}, strides = {twos}> (r2)
    m = ReduceMean <keepdims = 0> (p2, axes)
    logits = MatMul (m, dense)
}}""")


def batches(rank: int, count: int = 2) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(1)
    return [
        {
            "x": generator.normal(size=(12, 2, *[8] * rank)).astype(np.float32),
            "labels": generator.integers(0, CLASSES, 12),
        }
        for _ in range(count)
    ]


def nodes(program: burnish.Program, op_type: str) -> list[ir.Node]:
    model = fuse(kernel_graphs(program, translated_operators(BURNISH_DOMAIN) | FUSED)["step"], kernels=True)
    return [node for node in model.graph if node.op_type == op_type]


@pytest.mark.parametrize("rank", RANKS)
def test_layers_are_fused(rank):
    program = burnish.compile(network(rank), optimizer="sgd:lr=0.1")
    layers = nodes(program, "FusedBatchNorm")
    assert [node.attributes["activation"].as_int() for node in layers] == [1, 1]
    assert len(nodes(program, "FusedBatchNormGrad")) == 2
    assert len(nodes(program, "FusedMaxPool")) == len(nodes(program, "FusedMaxPoolGrad")) == 1
    assert not nodes(program, "Relu")
    assert not nodes(program, "ReluGrad")


@pytest.mark.parametrize("rank", RANKS)
def test_fused_and_unfused_programs_train_alike(rank):
    program = burnish.compile(network(rank), optimizer="sgd:lr=0.05")
    states = []
    for kind in ("regions", "none"):
        session = burnish.Session(program, TorchEngine(compile=kind))
        for batch in batches(rank):
            session.step(batch)
        states.append(session.state())
    for name, expected in states[1].items():
        np.testing.assert_allclose(states[0][name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
def test_workers_train_as_one_process_does(rank):
    program = burnish.compile(network(rank), optimizer="sgd:lr=0.05")
    alone = train_alone(program, batches(rank))
    for outcome in train_in_threads(program, batches(rank), [[5, 0, 7], [1, 10, 1]]):
        assert largest_difference(outcome, alone) < 1e-5


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5), (2, 3, 5, 4), (2, 3, 4, 5, 6)])
def test_images_of_signals_and_volumes_are_views(shape):
    tensor = torch.randn(shape).movedim(1, -1).contiguous().movedim(-1, 1)  # channels last
    image = as_image(tensor, len(shape))
    assert image.data_ptr() == tensor.data_ptr()
    assert image.dim() == (2 if len(shape) == 2 else 4)
    again = from_image(image, shape)
    assert again.data_ptr() == tensor.data_ptr()
    assert torch.equal(again, tensor)
