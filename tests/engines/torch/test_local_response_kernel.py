"""The kernels of local response normalization and its gradient: beside float64, in every layout, and in programs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

import burnish
from burnish.engines.torch import TorchEngine
from burnish.engines.torch import native as kernels
from burnish.engines.torch.bindings.normalization import FUSED_LRN, FUSED_LRN_GRAD
from burnish.engines.torch.fusion import FUSED, fuse
from burnish.engines.torch.translate.rules import translated_operators
from burnish.graph import BURNISH_DOMAIN
from burnish.operators.normalization.local_response import LRN_GRAD
from oracles.central_differences import TOLERANCE, central_differences
from oracles.combinations import diagonal
from oracles.kernel_graphs import kernel_graphs
from oracles.semantic_gradients import semantic_gradients
from specs.pooling import torch_local_response

needs_kernels = pytest.mark.skipif(not kernels.available("local_response"), reason="needs the engine's kernels")

SHAPES = {
    "images": (2, 7, 5, 3),
    "more pixels than a tile": (2, 70, 33, 9),
    "one channel": (3, 1, 4, 4),
    "one pixel": (2, 200, 1, 1),
    "rows": (5, 6),
    "signals": (2, 6, 10),
    "volumes": (2, 4, 3, 4, 5),
    "an empty batch": (0, 3, 2, 2),
    "no pixels": (2, 3, 0, 2),
    "no channels": (2, 0, 3, 2),
}


def operands(shape: tuple[int, ...], last: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    layout = torch.channels_last if last else torch.contiguous_format
    return [torch.randn(shape, generator=generator).contiguous(memory_format=layout) for _ in range(2)]


def in_float64(x: torch.Tensor, dy: torch.Tensor, **settings: float) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the gradient of x, by PyTorch's autograd."""
    leaf = x.double().requires_grad_()
    if not x.shape[1]:
        return leaf.detach(), leaf.detach()
    y = torch_local_response(leaf, **settings)
    y.backward(dy.double())
    assert leaf.grad is not None
    return y.detach(), leaf.grad


@needs_kernels
@diagonal(("name", list(SHAPES)), ("size", [1, 2, 3, 4, 5, 9, 300]), ("beta", [0.75, 0.5, 1.25]), test=42)
def test_results_and_gradients_are_those_of_float64(name, size, beta, threads):
    shape = SHAPES[name]
    for last in (False, True) if len(shape) == 4 else (False,):
        x, dy = operands(shape, last)
        y = torch.ops.burnish.local_response(x, size, 0.9, beta, 1.5)
        dx = torch.ops.burnish.local_response_gradient(dy, x, size, 0.9, beta, 1.5)
        for found, exact in zip((y, dx), in_float64(x, dy, size=size, alpha=0.9, beta=beta, bias=1.5), strict=True):
            assert found.shape == shape
            torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=2e-6)
            assert 1 in shape or found.stride() == x.stride() or not x.numel()


@needs_kernels
def test_the_gradient_is_that_of_central_differences():
    x, dy = operands((2, 5, 2, 1))

    def flow(inputs: list[np.ndarray | None]) -> float:
        (moved,) = inputs
        padded = np.pad(np.square(moved), ((0, 0), (1, 2), (0, 0), (0, 0)))
        sums = sum(padded[:, shift : shift + 5] for shift in range(4))
        return float(np.sum(dy.double().numpy() * moved * (2.0 + 0.9 / 4 * sums) ** -0.6))

    expected = central_differences(flow, [x.double().numpy()], 0)
    found = torch.ops.burnish.local_response_gradient(dy, x, 4, 0.9, 0.6, 2.0).double().numpy()
    assert np.linalg.norm(found - expected) <= (TOLERANCE + 2.0**-21) * np.linalg.norm(expected)


@needs_kernels
def test_operands_are_read_wherever_they_lie():
    x, dy = operands((3, 8, 6, 5))
    settings = (3, 0.9, 0.75, 1.0)
    y, dx = torch.ops.burnish.local_response(x, *settings), torch.ops.burnish.local_response_gradient(dy, x, *settings)
    parts = [torch.cat([tensor, tensor], 1)[:, 8:] for tensor in (x, dy)]
    transposed = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in (x, dy)]
    part_of_images = [torch.cat([tensor, tensor], 1).contiguous(memory_format=torch.channels_last)[:, 8:] for tensor in (x, dy)]
    channels_last = [tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, dy)]
    for other_x, other_dy in (parts, transposed, part_of_images, (channels_last[0], dy), (x, channels_last[1])):
        torch.testing.assert_close(torch.ops.burnish.local_response(other_x, *settings), y, rtol=1e-6, atol=1e-7)
        found = torch.ops.burnish.local_response_gradient(other_dy, other_x, *settings)
        torch.testing.assert_close(found, dx, rtol=2e-6, atol=1e-6)


@needs_kernels
def test_what_is_no_image_of_float32_is_refused():
    x = torch.zeros(2, 3, 4)
    with pytest.raises(RuntimeError, match=r"local_response: float32 \[N, C, ...\] expected"):
        torch.ops.burnish.local_response(x.double(), 3, 1.0, 0.75, 1.0)
    with pytest.raises(RuntimeError, match=r"local_response: float32 \[N, C, ...\] expected"):
        torch.ops.burnish.local_response(x[0, 0], 3, 1.0, 0.75, 1.0)
    with pytest.raises(RuntimeError, match="a window of at least one channel expected, found 0"):
        torch.ops.burnish.local_response(x, 0, 1.0, 0.75, 1.0)
    with pytest.raises(RuntimeError, match="local_response_gradient: a float32 gradient of the shape of x expected"):
        torch.ops.burnish.local_response_gradient(x[:1], x, 3, 1.0, 0.75, 1.0)


def normalizing(**attributes: float) -> onnx.ModelProto:
    """A convolution, a normalization across its channels, and another convolution."""
    rng = np.random.default_rng(0)
    weights = {"w": (6, 3, 3, 3), "v": (2, 6, 1, 1)}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
            helper.make_node("LRN", ["a"], ["b"], **attributes),
            helper.make_node("Conv", ["b", "v"], ["y"]),
        ],
        "normalizing",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 3, 5, 4])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 2, 5, 4])],
        [onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name) for name, shape in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_the_gradient_is_one_node():
    model = semantic_gradients(normalizing(size=5), wrt=["x"], of="y")
    (node,) = (node for node in model.graph if LRN_GRAD.is_of(node))
    assert set(node.attributes) == {"size"}, "attributes that are left out keep their defaults"


@needs_kernels
@pytest.mark.parametrize("size", [5, 4])
def test_programs_train_as_on_other_engines(size):
    attributes = {"size": size} if size == 5 else {"size": size, "alpha": 0.5, "beta": 0.6, "bias": 1.5}
    program = burnish.compile(normalizing(**attributes), loss="mse", optimizer=burnish.optim.sgd(lr=0.1))
    known = translated_operators(BURNISH_DOMAIN) | FUSED
    with_kernels = fuse(kernel_graphs(program, known)["step"], kernels=True).graph
    assert [sum(map(operator.is_of, with_kernels)) for operator in (FUSED_LRN, FUSED_LRN_GRAD, LRN_GRAD)] == [1, 1, 0]
    without = fuse(kernel_graphs(program, known)["step"], kernels=False).graph
    assert not any(map(LRN_GRAD.is_of, without))
    assert [node.op_type for node in without].count("LRN") == 1
    rng = np.random.default_rng(1)
    batch = {"x": rng.normal(size=(4, 3, 5, 4)), "targets": rng.normal(size=(4, 2, 5, 4))}
    engines = [TorchEngine(), TorchEngine(channels_last=False), TorchEngine(compile="none")]
    if size % 2:  # ONNX Runtime has no windows of an even size
        engines.append("onnxruntime")
    sessions = [burnish.Session(program, engine, threads=1) for engine in engines]
    for samples in (4, 4, 1):
        fed = {name: array[:samples].astype(np.float32) for name, array in batch.items()}
        losses = [session.step(fed)["loss"] for session in sessions]
        assert losses == pytest.approx([losses[-1]] * len(losses), rel=2e-6)
    for name, expected in sessions[-1].state().items():
        for session in sessions[:-1]:
            np.testing.assert_allclose(session.state()[name], expected, rtol=1e-5, atol=1e-6)
